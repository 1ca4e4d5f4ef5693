"""Rows of `speed` that hold a method against plain decoding on some texts, one run beside the other in alternating order."""

import functools
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import NamedTuple

from benchmark import texts
from benchmark.bench import Bench, Row
from benchmark.methods import FULL_SKIP, latency_for, longest, make_methods
from benchmark.runs import (
    fresh,
    geometric_mean,
    other_texts,
    runs_of,
    side_by_side,
    speedups,
)
from benchmark.sweep import contenders, sweep, told
from beyond.ways import WAYS, add_ways
from decoding import FixedPlanner, Plan


def short_answers(bench, tokenizer, config):
    return texts.encoded(list(texts.SHORT.items())[: bench.n_prompts], tokenizer, config)


def prose(bench, tokenizer, config):
    """Long texts to continue: what Python says about itself."""
    return [(str(n), texts.running_text(topics.values(), tokenizer, n)) for n in ((256,) if bench.quick else (4000, 7000))]


def documents(bench, tokenizer, config):
    return texts.documents(tokenizer, config, texts.spread(list(texts.DOCUMENTS), bench.n_prompts))


class Race(NamedTuple):
    """knapspec+ and skipping alone beside plain decoding, and what is wanted of one of them."""

    what: str
    prompts: Callable = functools.partial(Bench.prompts, count=6)  # (bench, tokenizer=, config=) -> [(id, token ids)]
    mean: float | None = 1.5  # geometric mean over the texts
    least: float | None = None  # on any text
    of_fixed: float | None = None  # of the speed-up of the best fixed plan that a sweep finds with what the method has
    method: str = "knapspec+"
    model: str = "smollm2"
    dtype: str | None = None
    new_tokens: int | None = None  # None: as the bench has it


RACES = {
    "prompts": Race("knapspec+, SmolLM2, the prompts", functools.partial(Bench.prompts, count=24), 2.0, 1.5),
    "short": Race("knapspec+, SmolLM2, answers of one to forty tokens", short_answers, 1.4, 0.98, new_tokens=256),
    "prose": Race("knapspec+, SmolLM2, 4,000 and 7,000 tokens of prose continued", prose, 1.4, 1.35),
    "documents": Race("knapspec+, SmolLM2, documents of 3,200 to 7,000 tokens", documents, 1.4, 1.0),
    "bfloat16": Race("knapspec+, SmolLM2, in bfloat16", least=0.98, dtype="bfloat16"),
    "split": Race("knapspec+, planted SmolLM2 `split`", of_fixed=0.95, model="split"),
    "blocks": Race("knapspec+, planted SmolLM2 `blocks`", of_fixed=0.95, model="blocks"),
    "soft": Race("skipping alone, planted SmolLM2 `soft`", mean=None, of_fixed=0.95, method=FULL_SKIP, model="soft"),
}


def find_fixed(bench, race):
    """The best fixed plan for a race's model, told()."""
    model, tokenizer = bench.models.load(race.model)
    prompts = bench.prompts(4, tokenizer, model.config)
    ways = ["full", *(way for way in add_ways(model) if WAYS[way].whole and race.method != FULL_SKIP)]
    latency, ids = latency_for(model, longest(prompts, bench.max_new_tokens)), [ids for _, ids in prompts]
    plans = contenders(model, ids[0], latency, kind=race.model, ways=ways)
    plans, new_tokens = (plans[::8], 8) if bench.quick else (plans, 32)
    return told(*sweep(model, ids, plans, max_new_tokens=new_tokens, progress=bench.progress)[-1][0])


def run_race(bench, name):
    """{text: its runs}: of both methods and, where the row asks for it, of the best fixed plan."""
    race = RACES[name]
    best = bench.results.once(f"sweep/{name}", functools.partial(find_fixed, bench, race)) if race.of_fixed else None
    model, tokenizer = bench.models.load(race.model, race.dtype)
    prompts = race.prompts(bench, tokenizer=tokenizer, config=model.config)
    options = {"max_new_tokens": race.new_tokens or bench.max_new_tokens, "eos_ids": tokenizer.eos_ids}

    def methods():
        made = make_methods(("knapspec+", FULL_SKIP), model, tokenizer, prompts, options)
        if best:
            plan = Plan(frozenset(best["skip_set"]), best["gamma"], choices=best["choices"] and tuple(best["choices"]))
            made["fixed"] = fresh(model, FixedPlanner(plan), options)
        return made

    return side_by_side(bench.results, model, prompts, methods, options=options, repeats=bench.repeats, key=f"{name}/", progress=bench.progress)


def against_plain(bench, name):
    race, found = RACES[name], run_race(bench, name)
    values = speedups(found, race.method)
    mean, least, runs = geometric_mean(values.values()), min(values.values()), runs_of(found, race.method)
    checks = [(f"mean ≥ {race.mean}×", mean, race.mean), (f"≥ {race.least}× on any", least, race.least)]
    text = f"mean {mean:.2f}×, {least:.2f}× at least, drafts in {sum(run['drafted'] > 0 for run in runs)} of {len(runs)} runs"
    details = {"speedups": values}
    if race.of_fixed:
        fixed = geometric_mean(speedups(found, "fixed").values())
        checks.append((f"≥ {race.of_fixed:.0%} of the best fixed plan", mean / fixed, race.of_fixed))
        text, details["fixed"] = f"{text}, {mean / fixed:.0%} of the best fixed plan's {fixed:.2f}×", fixed
    checks = [check for check in checks if check[2] is not None]
    met = all(value >= wanted for _, value, wanted in checks)
    return Row(", ".join(wanted for wanted, *_ in checks), text + other_texts(found), met, details)


def skipping_alone(bench):
    """The floor: with full and skip alone the planner may lose nothing, on any text of any length."""
    names = "prompts", "short", "documents"
    values = {f"{name}/{text}": value for name in names for text, value in speedups(run_race(bench, name), FULL_SKIP).items()}
    worst = min(values, key=values.get)
    text = f"{values[worst]:.2f}× at least ({worst}), mean {geometric_mean(values.values()):.2f}×"
    return Row("≥ 0.98× on any text", text, values[worst] >= 0.98, {"speedups": values})


ROWS = {name: (race.what, functools.partial(against_plain, name=name)) for name, race in RACES.items()}
ROWS["full_skip"] = ("skipping alone, SmolLM2: prompts, short answers, documents", skipping_alone)

"""Rows of `speed` that hold a method against plain decoding on some texts, one run beside the other in alternating order."""

import functools
import importlib.util
import statistics
from collections.abc import Callable
from statistics import geometric_mean
from typing import NamedTuple

from benchmark import texts
from benchmark.bench import Bench, Row
from benchmark.methods import FULL_SKIP, race
from benchmark.runs import median, other_texts, runs_of, speedups
from benchmark.sweep import best_plans, plan_of
from decoding import FixedPlanner


def short_answers(bench, tokenizer, config):
    return texts.encoded(list(texts.SHORT.items())[: bench.limit], tokenizer, config)


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
    "bfloat16": Race("knapspec+, SmolLM2, in bfloat16", least=0.98, dtype="bfloat16"),
    "split": Race("knapspec+, planted SmolLM2 `split`", of_fixed=0.95, model="split"),
    "blocks": Race("knapspec+, planted SmolLM2 `blocks`", of_fixed=0.95, model="blocks"),
    "soft": Race("skipping alone, planted SmolLM2 `soft`", mean=None, of_fixed=0.95, method=FULL_SKIP, model="soft"),
}


def run_race(bench, name):
    """{text: its runs}: of both methods and, where the row asks for it, of the best fixed plan."""
    asked = RACES[name]

    def find_fixed():
        model, tokenizer = bench.load(asked.model)
        prompts = bench.prompts(4, tokenizer, model.config)
        return best_plans(model, prompts, kind=asked.model, skip_only=asked.method == FULL_SKIP)[-1][0]

    planners = {"fixed": FixedPlanner(plan_of(bench.results.once(f"sweep/{name}", find_fixed)))} if asked.of_fixed else {}
    model, tokenizer = bench.load(asked.model, asked.dtype)
    prompts = asked.prompts(bench, tokenizer=tokenizer, config=model.config)
    amount = {"max_new_tokens": asked.new_tokens or bench.max_new_tokens, "repeats": bench.repeats}
    return race(bench.results, ("knapspec+", FULL_SKIP), model, tokenizer, prompts, key=f"{name}/", planners=planners, **amount)


def against_plain(bench, name):
    asked, found = RACES[name], run_race(bench, name)
    values = speedups(found, asked.method)
    mean, least, runs = geometric_mean(values.values()), min(values.values()), runs_of(found, asked.method)
    checks = [(f"mean ≥ {asked.mean}×", mean, asked.mean), (f"≥ {asked.least}× on any", least, asked.least)]
    text = f"mean {mean:.2f}×, {least:.2f}× at least, drafts in {sum(run['drafted'] > 0 for run in runs)} of {len(runs)} runs"
    details = {"speedups": values}
    if asked.of_fixed:
        fixed = geometric_mean(speedups(found, "fixed").values())
        checks.append((f"≥ {asked.of_fixed:.0%} of the best fixed plan", mean / fixed, asked.of_fixed))
        text, details["fixed"] = f"{text}, {mean / fixed:.0%} of the best fixed plan's {fixed:.2f}×", fixed
    checks = [check for check in checks if check[2] is not None]
    met = all(value >= wanted for _, value, wanted in checks)
    return Row(", ".join(wanted for wanted, *_ in checks), text + other_texts(found), met, details)


def skipping_alone(bench):
    """The floor: with full and skip alone the planner may lose nothing on any text; `documents` has the long ones."""
    values = {f"{name}/{text}": value for name in ("prompts", "short") for text, value in speedups(run_race(bench, name), FULL_SKIP).items()}
    worst = min(values, key=values.get)
    text = f"{values[worst]:.2f}× at least ({worst}), mean {geometric_mean(values.values()):.2f}×"
    return Row("≥ 0.98× on any text", text, values[worst] >= 0.98, {"speedups": values})


def plans_of(bench):
    """{texts: runs of knapspec+}, as the races have them."""
    return {name: runs_of(run_race(bench, name), "knapspec+") for name in ("prompts", "split", "blocks", "short")}


def planning(bench):
    """Planning's part of a generation: the median over the runs on each model, and over short answers."""
    parts = {name: median(run["seconds"]["plan"] / run["seconds"]["total"] for run in runs) for name, runs in plans_of(bench).items()}
    return Row("≤ 5%", ", ".join(f"{part:.1%} on {name}" for name, part in parts.items()), max(parts.values()) <= 0.05, parts)


def alpha(bench):
    """The α by which knapspec+ decided, mean over a text's drafted tokens, against how many of them were accepted."""
    runs = [run for some in plans_of(bench).values() for run in some if run["tried"]]
    if not runs:
        return Row("mean error ≤ 0.05", "nothing was drafted", None, {})
    error = statistics.mean(abs(run["expected"] - run["accepted"]) / run["tried"] for run in runs)
    return Row("mean error ≤ 0.05", f"mean error {error:.3f} in {len(runs)} runs with drafts", error <= 0.05, {"error": error})


def against_theirs(bench, *, theirs, ours, wanted):
    """A method, or None for plain decoding, against one of transformers' with the same weights; worst kind of prompt."""
    if importlib.util.find_spec("transformers") is None:
        return Row(f"≥ {wanted}×", "transformers is not installed", None, {})
    model, tokenizer = bench.load("smollm2")
    prompts = bench.prompts(24, tokenizer, model.config)
    methods, amount = ("knapspec+", "transformers", "transformers_prompt_lookup"), {"max_new_tokens": bench.max_new_tokens, "repeats": bench.repeats}
    found = race(bench.results, methods, model, tokenizer, prompts, key="transformers/", folder=bench.folder("smollm2"), **amount)
    gains, kinds = speedups(found, ours), {}
    for prompt_id, speedup in speedups(found, theirs).items():
        kinds.setdefault(prompt_id.partition("-")[0], []).append(gains.get(prompt_id, 1) / speedup)  # 1: plain decoding's
    kinds = {kind: geometric_mean(values) for kind, values in kinds.items()}
    worst, runs = min(kinds, key=kinds.get), runs_of(found, theirs)
    same = f"the same text in {sum(run['identical'] for run in runs)} of {len(runs)} runs"
    text = f"{kinds[worst]:.2f}× at least ({worst}), mean {geometric_mean(kinds.values()):.2f}×, {same}"
    return Row(f"≥ {wanted}× on any kind of prompt", text, kinds[worst] >= wanted, {"kinds": kinds})


ROWS = {
    "transformers": ("plain decoding against transformers' generate",
                     functools.partial(against_theirs, theirs="transformers", ours=None, wanted=1.7)),
    "prompt_lookup": ("knapspec+ against transformers' prompt lookup",
                      functools.partial(against_theirs, theirs="transformers_prompt_lookup", ours="knapspec+", wanted=1.5)),
    **{name: (asked.what, functools.partial(against_plain, name=name)) for name, asked in RACES.items()},
    "full_skip": ("skipping alone, SmolLM2: prompts, short answers", skipping_alone),
    "planning": ("planning's part of a generation, and of short answers", planning),
    "alpha": ("predicted α against the part accepted", alpha),
}  # fmt: skip

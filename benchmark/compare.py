"""`compare`: methods side by side on the same prompts, every run held against a run of plain decoding next to it."""

import functools
import importlib.util
import statistics

from benchmark import commands, plots
from benchmark.methods import longest
from benchmark.results import heading, shown, table
from benchmark.runs import decode, median, other_texts, runs_of, side_by_side
from benchmark.texts import encoded
from benchmark.theirs import THEIRS, make_theirs
from cli.methods import METHODS, make_planner
from cli.options import number
from rivals import RIVALS
from rivals.draft_verify import DraftVerify


def make_methods(names, model, tokenizer, folder, results, *, context, options, search_s, progress=True):
    """{name: method} for names of METHODS and THEIRS. Planners last for all prompts: some go on learning.

    context: tokens of the longest text. What draft_verify finds stays in the results, so that it searches only once.
    """

    made = functools.partial(make_planner, model=model, tokenizer=tokenizer, context=context, progress=progress)

    def search():
        planner, _ = made("draft_verify", search_s=search_s)
        return {"skip_set": sorted(planner.skip_set), "search_s": planner.search_s}

    def planner(name):
        return DraftVerify(frozenset(results.once("search/draft_verify", search)["skip_set"])) if name == "draft_verify" else made(name)[0]

    methods = {name: functools.partial(decode, model, planner=planner(name), **options) for name in names if name not in THEIRS}
    theirs = [name for name in names if name in THEIRS]
    return methods | (make_theirs(model, folder, theirs, options) if theirs else {})


def summary(name, found, search_s=0.0):
    """One method over all prompts: a row of the table, as a dict without what it has no figures for."""
    runs = runs_of(found, name)
    values = [run["speedup"] for run in runs if run["speedup"] is not None]
    row = {"method": name, "tokens_per_second": median(run["tokens_per_second"] for run in runs), "speedup": median(values)}
    if len(values) > 1:
        row["quartiles"] = statistics.quantiles(values, n=4, method="inclusive")[::2]
    if "identical" in runs[0]:
        row["identical"] = [sum(run["identical"] for run in runs), len(runs)]
    if "rounds" not in runs[0]:  # transformers does not tell
        return row
    total = {key: sum(run[key] for run in runs) for key in ("new_tokens", "rounds", "drafted", "accepted", "given", "search_s")}
    seconds = {key: sum(run["seconds"][key] for run in runs) for key in ("plan", "prefill", "total")}
    if total["drafted"]:
        row["acceptance_rate"] = total["accepted"] / total["drafted"]
    if total["drafted"] > total["given"]:
        for kind in ("attention", "mlp"):
            row[f"skipped_{kind}"] = sum(run["used"][kind].get("skip", 0) for run in runs) / (total["drafted"] - total["given"])
    if total["rounds"]:
        row["tokens_per_round"] = (total["new_tokens"] - len(runs)) / total["rounds"]
        row["plan_share"] = (seconds["plan"] - total["search_s"]) / (seconds["total"] - seconds["prefill"])
    return row | {"search_s": total["search_s"] + search_s or None}  # most methods do not search


COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:.1f}"), "speedup": ("speed-up", "{:.2f}"), "acceptance_rate": ("accepted", "{:.0%}"),
    "tokens_per_round": ("tokens/round", "{:.2f}"), "plan_share": ("planning", "{:.1%}"), "search_s": ("search", "{:.1f} s"),
    "skipped_attention": ("skipped attention", "{:.1f}"), "skipped_mlp": ("skipped MLP", "{:.1f}"),
}  # fmt: skip


def report(data, found, n_layer):
    """The table of a comparison, as Markdown. data: of Results, with rows; found: what side_by_side() returned."""
    runs = [(prompt["prompt_tokens"], run["new_tokens"]) for prompt in found.values() for run in prompt["runs"]]
    rows, settings = [], data["settings"]
    for row in data["rows"]:
        cells = [shown(row.get(key), form) for key, (_, form) in COLUMNS.items()]
        if "quartiles" in row:
            cells[1] += " ({:.2f} to {:.2f})".format(*row["quartiles"])
        same, count = row.get("identical", (None, None))
        rows.append([row["method"], *cells, None if same is None else "yes" if same == count else f"{same} of {count}"])
    how = f"temperature {settings['temperature']}, top-p {settings['top_p']}" if settings["temperature"] > 0 else "greedy"
    notes = (
        f"Prompts: {len(found)}; repeats: {settings['repeats']}; new tokens: up to {settings['max_new_tokens']}, {how}{other_texts(found)}. "
        f"Tokens/s: median, behind the first token, planning included. Speed-up: over the plain run beside it, median "
        f"(quartiles). Skipped: of {n_layer} each, mean over the tokens that a model drafted."
    )
    lines = heading("compare", data, [tokens for n, new in runs for tokens in (n, n + new)])
    return "\n".join([*lines, *table(["method", *(name for name, _ in COLUMNS.values()), "same text"], rows), "", notes])


def names_here():
    """All methods that can be had: some need an optional package."""
    needs = dict.fromkeys(METHODS) | {name: rival.needs for name, rival in RIVALS.items()} | dict.fromkeys(THEIRS, "transformers")
    return [name for name, module in needs.items() if module is None or importlib.util.find_spec(module)]


def add_options(add):
    commands.add_model(add)
    commands.add_amount(add, new_tokens=128, plot=True)
    add("--methods", type=commands.names_of(names_here()), default=names_here(), metavar="LIST",
        help=f"some of {','.join(names_here())} (default: all)")  # fmt: skip
    add("--search-seconds", type=number(float, 0), default=120.0, metavar="S",
        help="for draft_verify's search, before the first prompt (default: %(default)s)")  # fmt: skip
    add("--raw", action="store_true", help="no chat template: continue the prompts as they stand")
    add("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0: always the likeliest token (default)")
    add("--top-p", type=number(float, 0, 1), default=1.0, metavar="P", help="sample from the likeliest up to this mass")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="for sampling (default: %(default)s)")


def run(arguments):
    model, tokenizer, prompts = commands.prepare(arguments)
    prompts = encoded(prompts, tokenizer, model.config, arguments.raw)
    results = commands.results_of(arguments, model=model, prompts=prompts)
    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    options["eos_ids"] = tokenizer.eos_ids
    make = functools.partial(
        make_methods, arguments.methods, model, tokenizer, arguments.model, results, options=options,
        context=min(longest(prompts, arguments.max_new_tokens), model.config.max_position), search_s=arguments.search_seconds,
    )  # fmt: skip
    found = side_by_side(results, model, prompts, make, options=options, repeats=arguments.repeats, key="prompt/")
    searched = results.data["runs"].get("search/draft_verify", {"search_s": 0.0})["search_s"]
    results.save(rows=[summary(name, found, searched if name == "draft_verify" else 0.0) for name in arguments.methods])
    if arguments.plot:
        plots.speedups_of({"": found}, {name: name for name in arguments.methods}, arguments.plot)
    return report(results.data, found, model.config.n_layer)

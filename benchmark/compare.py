"""`compare`: methods side by side on the same prompts, every run held against a run of plain decoding next to it."""

import importlib.util
import statistics

from benchmark import commands
from benchmark.methods import race
from benchmark.results import heading, table
from benchmark.runs import median, other_texts, runs_of
from benchmark.theirs import THEIRS
from cli.methods import METHODS
from cli.options import number
from rivals import RIVALS


def summary(name, found):
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
            row[f"skipped_{kind}"] = sum(run[f"skipped_{kind}"] for run in runs) / (total["drafted"] - total["given"])
    if total["rounds"]:
        row["tokens_per_round"] = (total["new_tokens"] - len(runs)) / total["rounds"]
        row["plan_share"] = (seconds["plan"] - total["search_s"]) / (seconds["total"] - seconds["prefill"])
    return row | {"search_s": max(run["searched_s"] for run in runs) or None}  # most methods do not search


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
        cells = [form.format(row[key]) if row.get(key) is not None else None for key, (_, form) in COLUMNS.items()]
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


def missing():
    """{name: the optional module that it needs and that is not there} of the methods that cannot be had."""
    needs = {name: rival.needs for name, rival in RIVALS.items()} | dict.fromkeys(THEIRS, "transformers")
    return {name: module for name, module in needs.items() if module and not importlib.util.find_spec(module)}


def names_here():
    return [name for name in (*METHODS, *THEIRS) if name not in missing()]


def add_options(add):
    commands.add_model(add)
    commands.add_amount(add, new_tokens=128)
    names = names_here()
    add("--methods", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of {', '.join(names)} (default: all)")
    add("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0: always the likeliest token (default)")
    add("--top-p", type=number(float, 0, 1), default=1.0, metavar="P", help="sample from the likeliest up to this mass")


def run(arguments):
    model, tokenizer, prompts, results = commands.prepare(arguments)
    options = {name: getattr(arguments, name) for name in ("repeats", "max_new_tokens", "temperature", "top_p")}
    found = race(results, arguments.methods, model, tokenizer, prompts, folder=arguments.model, lasting=True, **options)
    results.save(rows=[summary(name, found) for name in arguments.methods])
    left_out = [f"{name} is left out: {module} is not installed." for name, module in missing().items() if arguments.methods == names_here()]
    return "\n".join([report(results.data, found, model.config.n_layer), *left_out])

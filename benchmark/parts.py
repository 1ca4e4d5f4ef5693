"""`parts`: what each part of knapspec+ brings. Each is left out in turn; the ladder adds one after the other to the paper's planner.

A row is a name of methods.py; it is measured once, in whatever tables it stands.
"""

from statistics import geometric_mean

from benchmark import commands
from benchmark.bench import Bench
from benchmark.methods import FULL_SKIP, race, without
from benchmark.results import heading, machine, table
from benchmark.runs import other_texts, speedups
from benchmark.texts import documents
from beyond.adaptive import PARTS

# Rows: label -> method.
LEFT_OUT = {"knapspec+": "knapspec+"} | {f"without {part}": without(part) for part in PARTS}
LADDER = {"knapspec": "knapspec", "none of the parts": without(*PARTS)}
LADDER |= {f"+ {part}": without(*PARTS[i:]) for i, part in enumerate(PARTS, 1)}  # the last one is knapspec+
YARDSTICKS = {"knapspec+ full,skip": FULL_SKIP, "uniform": "uniform"}
METHODS = list(dict.fromkeys([*LEFT_OUT.values(), *LADDER.values(), *YARDSTICKS.values()]))
TEXTS = {"smollm2": "smollm2", "split": "split", "blocks": "blocks", "documents": "smollm2"}  # texts -> model
TWO_DOCUMENTS = ("debugger", "types")  # of 4,000 and 6,000 tokens


def measure(bench, texts):
    """-> {texts: what side_by_side() returns of METHODS}."""
    found = {}
    for name in texts:
        model, tokenizer = bench.load(TEXTS[name])
        if name == "documents":
            prompts = documents(tokenizer, model.config, TWO_DOCUMENTS[: bench.limit])
        else:
            prompts = bench.prompts(bench.limit, tokenizer, model.config)
        amount = {"max_new_tokens": bench.max_new_tokens, "repeats": bench.repeats}
        found[name] = race(bench.results, METHODS, model, tokenizer, prompts, key=f"{name}/", **amount)
    return found


def parts_table(found, group, before):
    """Lines of Markdown: for each texts the geometric mean over prompts, the lowest one, and the change of the mean.

    group: label -> method. before: label -> the label that its row is held against, where there is one.
    """
    values = {label: [speedups(of, method).values() for of in found.values()] for label, method in group.items()}
    means = {label: [geometric_mean(some) for some in of_label] for label, of_label in values.items()}
    rows = []
    for label in group:
        changes = [f" {mean / old - 1:+.0%}" for mean, old in zip(means[label], means.get(before.get(label), ()))] or [""] * len(found)
        rows.append([label, *(f"{mean:.2f} ({min(some):.2f}){change}" for mean, some, change in zip(means[label], values[label], changes))])
    return table(["planner", *found], rows)


def add_options(add):
    commands.add_amount(add, new_tokens=96, limit=24)
    commands.add_planted(add)
    add("--only", nargs="+", choices=TEXTS, default=list(TEXTS), metavar="TEXTS", help=f"some of {', '.join(TEXTS)} (default: all)")


def run(arguments):
    results = commands.results_of(arguments, machine() | {"methods": METHODS})
    amount = {name: getattr(arguments, name) for name in ("limit", "max_new_tokens", "repeats", "planted")}
    found = measure(Bench(results, **amount), arguments.only)
    lines = heading("parts", results.data, [prompt["prompt_tokens"] for of in found.values() for prompt in of.values()])
    lines += [*parts_table(found, LEFT_OUT, dict.fromkeys(list(LEFT_OUT)[1:], "knapspec+")), ""]
    lines += [*parts_table(found, LADDER | YARDSTICKS, dict(zip(list(LADDER)[1:], LADDER))), ""]
    counts = ", ".join(f"{len(of)} of {name}" for name, of in found.items())
    notes = (
        f"Speed-up over the plain run beside it: geometric mean over prompts ({counts}) of the median of {arguments.repeats}, the lowest "
        f"prompt, and the change: over knapspec+ where a part is left out, over the row before in the ladder"
    )
    return "\n".join([*lines, notes + "".join(map(other_texts, found.values())) + "."])

"""`parts`: what each part of knapspec+ brings. Each is left out in turn; the ladder adds one after the other to the paper's planner.

A row is a name of methods.py; it is measured once, in whatever tables it stands.
"""

import functools

from benchmark import commands, plots
from benchmark.methods import FULL_SKIP, make_methods, without
from benchmark.models import models_at
from benchmark.results import heading, machine, table
from benchmark.runs import geometric_mean, other_texts, side_by_side, speedups
from benchmark.texts import documents, own_prompts
from beyond.adaptive import PARTS

# Groups of rows: label -> method.
LEFT_OUT = {"knapspec+": "knapspec+"} | {f"without {part}": without(part) for part in PARTS}
LADDER = {"knapspec": "knapspec", "none of the parts": without(*PARTS)}
LADDER |= {f"+ {part}": without(*PARTS[i:]) for i, part in enumerate(PARTS, 1)}  # the last one is knapspec+
YARDSTICKS = {"knapspec+ full,skip": FULL_SKIP, "uniform": "uniform"}
GROUPS = {"left_out": LEFT_OUT, "ladder": LADDER, "yardsticks": YARDSTICKS}
TEXTS = {"smollm2": "smollm2", "split": "split", "blocks": "blocks", "documents": "smollm2"}  # texts -> model
TWO_DOCUMENTS = ("debugger", "types")  # of 4,000 and 6,000 tokens


def measure(results, models, texts, methods, *, limit, max_new_tokens, repeats):
    """-> {texts: what side_by_side() returns of these methods}."""
    found = {}
    for name in texts:
        model, tokenizer = models.load(TEXTS[name])
        options = {"max_new_tokens": max_new_tokens, "eos_ids": tokenizer.eos_ids}
        if name == "documents":
            prompts = documents(tokenizer, model.config, TWO_DOCUMENTS[:limit])
        else:
            prompts = own_prompts(limit, tokenizer, model.config)
        make = functools.partial(make_methods, methods, model, tokenizer, prompts, options)
        found[name] = side_by_side(results, model, prompts, make, options=options, repeats=repeats, key=f"{name}/")
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
    commands.add_amount(add, new_tokens=96, limit=24, plot=True, planted=True)
    names = [*GROUPS, *TEXTS]
    add("--only", type=commands.names_of(names), default=names, metavar="LIST",
        help=f"groups of rows and texts: some of {','.join(names)}; all of a sort of which none is named")  # fmt: skip


def run(arguments):
    commands.check_files(arguments)
    groups, texts = ({name: of for name, of in every.items() if name in arguments.only} or every for every in (GROUPS, TEXTS))
    methods = list(dict.fromkeys(method for group in groups.values() for method in group.values()))
    results = commands.results_of(arguments, machine() | {"methods": methods})
    with models_at(arguments.planted) as models:
        found = measure(results, models, texts, methods, limit=arguments.limit, max_new_tokens=arguments.max_new_tokens, repeats=arguments.repeats)
    lines = heading("parts", results.data, [prompt["prompt_tokens"] for of in found.values() for prompt in of.values()])
    if "left_out" in groups:
        lines += [*parts_table(found, LEFT_OUT, dict.fromkeys(list(LEFT_OUT)[1:], "knapspec+")), ""]
    ladder = groups.get("ladder", {}) | groups.get("yardsticks", {})
    if ladder:
        lines += [*parts_table(found, ladder, dict(zip(list(LADDER)[1:], LADDER)) if "ladder" in groups else {}), ""]
    if arguments.plot:
        plots.speedups_of(found, ladder or LEFT_OUT, arguments.plot)
    counts = ", ".join(f"{len(of)} of {name}" for name, of in found.items())
    notes = (
        f"Speed-up over the plain run beside it: geometric mean over prompts ({counts}) of the median of {arguments.repeats}, the lowest "
        f"prompt, and the change: over knapspec+ where a part is left out, over the row before in the ladder"
    )
    return "\n".join([*lines, notes + "".join(map(other_texts, found.values())) + "."])

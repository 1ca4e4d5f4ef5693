"""`documents`: long documents that exist wherever Python does, summarised or asked about."""

from statistics import geometric_mean

from benchmark import commands
from benchmark.methods import FULL_SKIP, race
from benchmark.results import heading, table
from benchmark.runs import other_texts, runs_of, speedups
from benchmark.texts import DOCUMENTS, documents

METHODS = ("knapspec+", FULL_SKIP, "uniform")


def documents_table(found):
    """Lines of Markdown: each document's median speed-up with its lowest and highest run; then over all of them."""
    rows, medians = [], {method: speedups(found, method) for method in METHODS}
    for name, document in found.items():
        cells = []
        for method in METHODS:
            values = [run["speedup"] for run in runs_of({name: document}, method) if run["speedup"]]
            cells.append(f"{medians[method][name]:.2f} ({min(values):.2f} to {max(values):.2f})" if values else None)
        rows.append([name, document["prompt_tokens"], DOCUMENTS[name][1].split()[0].rstrip(","), *cells])
    for what, over_all in (("geometric mean", geometric_mean), ("minimum", min)):
        rows.append([what, None, None, *(f"{over_all(medians[method].values()):.2f}" for method in METHODS)])
    notes = "Speed-up over the plain run beside it: median (lowest to highest run)" + other_texts(found) + "."
    return [*table(["document", "tokens", "asked", *METHODS], rows), "", notes]


def add_options(add):
    commands.add_model(add, prompts=False)
    commands.add_amount(add, new_tokens=128, repeats=3)


def run(arguments):
    model, tokenizer, prompts, results = commands.prepare(arguments, documents)
    amount = {"max_new_tokens": arguments.max_new_tokens, "repeats": arguments.repeats}
    found = race(results, METHODS, model, tokenizer, prompts, **amount)
    return "\n".join([*heading("documents", results.data, [len(ids) for _, ids in prompts]), *documents_table(found)])

"""`plot`: draws speed-ups that `speed`, `documents` or `parts` kept with --json: medians of at least three runs, and their spread."""

import json
import statistics
from collections import Counter

from benchmark import pictures

LEAST_RUNS = 3  # of a method on a text: one run's noise is no result


def read_speedups(path, by):
    """{texts: {row: {series: speed-ups of all runs}}}; by "kind", a row is a kind of prompt and a series a method; by "method", a row is one.

    Raises ValueError for a file without such runs, and where a method ran less than LEAST_RUNS times on a text.
    """
    try:
        with open(path, encoding="utf-8") as file:
            runs = json.load(file)["runs"]
        found = {key: of["runs"] for key, of in runs.items() if isinstance(of, dict) and "runs" in of}
        found = {key: [(run["method"], run["speedup"]) for run in some if run["speedup"]] for key, some in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no results ({error!r:.80}): pass a file that --json of speed, documents or parts wrote") from None
    groups = {}
    kinds = Counter((texts, prompt.partition("-")[0]) for texts, _, prompt in (key.rpartition("/") for key in found))
    for key, pairs in found.items():
        texts, _, prompt = key.rpartition("/")
        kind = prompt.partition("-")[0]
        label = kind if kinds[texts, kind] > 1 else prompt
        for method, count in Counter(method for method, _ in pairs).items():
            if count < LEAST_RUNS:
                raise ValueError(f"{path} has {count} runs of {method} on {key}: measure with --repeats {LEAST_RUNS} or more")
        for method, speedup in pairs:
            row, series = (label, method) if by == "kind" else (method, "")
            groups.setdefault(texts, {}).setdefault(row, {}).setdefault(series, []).append(speedup)
    if not groups:
        raise ValueError(f"{path} holds no speed-ups: pass a file that --json of speed, documents or parts wrote")
    return groups


def paint(groups):
    """-> a function that draws a panel for each texts: a dot is a median of runs, its line goes from the lowest run to the highest."""
    series = list(dict.fromkeys(name for rows in groups.values() for row in rows.values() for name in row))

    def paint_groups(figure):
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        for axes, (texts, rows) in zip(panels, groups.items()):
            for i, name in enumerate(series):
                places = [(place, row[name]) for place, row in enumerate(rows.values()) if name in row]
                y, colour = [place + (i - (len(series) - 1) / 2) * 0.22 for place, _ in places], pictures.COLOURS[i % len(pictures.COLOURS)]
                axes.hlines(y, [min(values) for _, values in places], [max(values) for _, values in places], color=colour, linewidth=1.5)
                axes.plot([statistics.median(values) for _, values in places], y, "o", color=colour, markersize=5, label=name)
            axes.axvline(1, color=pictures.MUTED, linewidth=1, linestyle="--")
            axes.set(yticks=range(len(rows)), yticklabels=list(rows), ylim=(len(rows) - 0.5, -0.5), title=texts,
                     xlabel="speed-up over plain decoding\nmedian, lowest to highest run")  # fmt: skip
            axes.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(series), frameon=False)

    return paint_groups


def add_options(add):
    add("file", metavar="FILE", help="what --json of speed, documents or parts wrote")
    add("--out", required=True, metavar="FILE", help="the picture, such as pictures/prompts.svg; for dark pages another one beside it")
    add("--by", choices=("kind", "method"), default="kind", help="a row for each kind of prompt (default), or for each method")


def run(arguments):
    pictures.check("--out", arguments.out)
    groups = read_speedups(arguments.file, arguments.by)
    height = 1.6 + 0.35 * max(map(len, groups.values()))
    return pictures.draw(arguments.out, (max(7, 4.5 * len(groups)), height), paint(groups))

"""Pictures of what comparison.py and evidence.py measured, a function for each kind of result. They need matplotlib."""

import contextlib
import importlib.util
from pathlib import Path


def check(path):
    """Raises ValueError, before any work, if no picture could be written to path."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs the package matplotlib: pip install matplotlib")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path} is no picture: name a .png, .svg or .pdf file")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--plot {path} is in no folder: make the folder first")


@contextlib.contextmanager
def figure(path, rows, columns):
    """The axes of so many rows and columns, as a list; afterwards they are written to path."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(4.5 * columns, 3.5 * rows), layout="constrained")
    yield list(drawn.subplots(rows, columns, squeeze=False).flat)
    drawn.savefig(path, dpi=120)


def comparison(state, path):
    """The speed-up of each method: a dot for each run, a bar for the median."""
    rows = [row for row in reversed(state["rows"]) if row["speedup"] is not None]
    runs = [run for prompt in state["prompts"] for run in prompt["runs"] if run["speedup"] is not None]
    with figure(path, 1, 1) as (axes,):
        axes.barh([row["method"] for row in rows], [row["speedup"] for row in rows], color="tab:blue", alpha=0.4)
        axes.plot([run["speedup"] for run in runs], [run["method"] for run in runs], ".", color="tab:blue", markersize=3)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlabel("speed-up over plain decoding")


def tpt(result, path):
    """Measured tokens per second over what each predictor says, with the α measured in each setting."""
    rows = [row for row in result["rows"] if row["alpha"] == "measured"]
    with figure(path, 2, 2) as every:
        for axes, row in zip(every, rows):
            for n in sorted({point["context"] for point in result["points"]}):
                points = [point for point in result["points"] if point["context"] == n]
                predicted = [point["measured"][row["predictor"]] for point in points]
                measured = [point["tokens_per_second"] for point in points]
                axes.plot(predicted, measured, "o", markersize=4, label=f"context {n}")
            r = row["pearson"]["all"]
            axes.set(xlabel=row["label"], ylabel="measured tokens/s", title="" if r is None else f"Pearson {r:.3f}")
        every[0].legend()


def over_context(axes, lengths, label):
    """Labels axes that show something over these context lengths, in tokens."""
    axes.set(xscale="log", xlabel="context, tokens", ylabel=label)
    axes.set_xticks(lengths, map(str, lengths))
    axes.minorticks_off()


def context(result, path):
    """Over the context length: latencies, the shares that are skipped, the speed-up."""
    rows = result["rows"]
    lengths = [row["context"] for row in rows]
    with figure(path, 1, 3) as (latencies, shares, speedups):
        for key, color in (("attention", "tab:orange"), ("mlp", "tab:blue")):
            for source, form in (("fitted", "-"), ("measured", "o")):
                ms = [1e3 * row[f"{source}_s"][key] for row in rows]
                latencies.plot(lengths, ms, form, color=color, label=f"{key}, {source}")
            shares.plot(lengths, [row["shares"][key]["skip"] for row in rows], "o-", color=color, label=key)
        among = [row["attention_among_skipped"] for row in rows]
        shares.plot(lengths, among, "o--", color="black", label="attention among what is skipped")
        speedups.plot(lengths, [row["speedup"] for row in rows], "o-", color="tab:green")
        speedups.axhline(1, color="black", linewidth=1)
        labels = "ms per sublayer", "share skipped in drafts", "speed-up over plain decoding"
        for axes, label in zip((latencies, shares, speedups), labels):
            over_context(axes, lengths, label)
        latencies.set_ylim(bottom=0)
        shares.set_ylim(0, 1)
        latencies.legend()
        shares.legend()


def choices(result, path):
    """Over the context length: what the drafts of the largest set of choices are made of, and the speed-up of each set."""
    by_name = {}
    for row in result["rows"]:
        by_name.setdefault(row["choices"], []).append(row)
    lengths = [row["context"] for row in next(iter(by_name.values()))]
    largest = [name for name, rows in by_name.items() if "same_tokens" not in rows[0]][-1]
    with figure(path, 1, 3) as (*shares, speedups):
        for axes, (kind, label) in zip(shares, (("attention", "attention"), ("mlp", "MLP"))):
            parts = {choice: [row["shares"][kind][choice] for row in by_name[largest]] for choice in ("int8", "window", "skip")}
            axes.stackplot(lengths, *parts.values(), labels=list(parts), colors=("tab:blue", "tab:orange", "tab:green"), alpha=0.7)
            axes.set(ylim=(0, 1), title=largest)
            over_context(axes, lengths, f"share of {label} in drafts")
        shares[0].legend()
        for name, rows in by_name.items():
            speedups.plot(lengths, [row["speedup"] for row in rows], "o:" if "same_tokens" in rows[0] else "o-", label=name)
        speedups.axhline(1, color="black", linewidth=1)
        over_context(speedups, lengths, "speed-up over plain decoding")
        speedups.legend(fontsize=7)


def window(result, path):
    """What each planning finds over the time it takes, and the error of α over the size of the window."""
    with figure(path, 1, 2) as (plannings, alphas):
        for row in result["plannings"]:
            at = row["plan_s"], row["worth"]
            plannings.plot(*at, "o", color="tab:blue")
            plannings.annotate(row["planning"], at, xytext=(4, 4), textcoords="offset points", fontsize=8)
        plannings.set(xscale="log", xlabel="seconds per planning", ylabel="speed-up of what it chooses")
        for alpha, color in (("pooled", "tab:blue"), ("share", "tab:orange")):
            for own, form in ((False, "o-"), (True, "s--")):
                rows = [row for row in result["alphas"] if (row["alpha"], row["own_window"]) == (alpha, own)]
                keys = "own keys" if own else "target's keys"
                errors = [row["error"] for row in rows]
                alphas.plot([row["window"] for row in rows], errors, form, color=color, label=f"{alpha}, {keys}")
        alphas.set(xlabel="window, tokens", ylabel="mean error of α")
        alphas.legend()

"""Pictures of what was measured. They need matplotlib."""

import contextlib

from benchmark.runs import geometric_mean, speedups


@contextlib.contextmanager
def figure(path, columns):
    """The axes of so many columns, as a list; afterwards they are written to path."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(4.5 * columns, 3.5), layout="constrained")
    yield list(drawn.subplots(1, columns, squeeze=False).flat)
    drawn.savefig(path, dpi=120)


def speedups_of(found, labels, path):
    """found: {title: what side_by_side() returns}; labels: {label: method}. A bar is a geometric mean over prompts, a dot one of them."""
    with figure(path, len(found)) as every:
        for axes, (title, of) in zip(every, found.items()):
            values = {label: list(speedups(of, method).values()) for label, method in reversed(labels.items())}
            values = {label: some for label, some in values.items() if some}
            axes.barh(list(values), [geometric_mean(some) for some in values.values()], color="tab:blue", alpha=0.4)
            for label, some in values.items():
                axes.plot(some, [label] * len(some), ".", color="tab:blue", markersize=3)
            axes.axvline(1, color="black", linewidth=1)
            axes.set(xlabel="speed-up over plain decoding", title=title)


def context(rows, path):
    """Over the context length: latencies, what is skipped, the speed-up."""
    lengths = [row["context"] for row in rows]
    with figure(path, 3) as (latencies, skipped, gains):
        for key, color in (("attention", "tab:orange"), ("mlp", "tab:blue")):
            for source, form in (("fitted", "-"), ("measured", "o")):
                latencies.plot(lengths, [1e3 * row[f"{source}_s"][key] for row in rows], form, color=color, label=f"{key}, {source}")
            skipped.plot(lengths, [row["skipped"][key] for row in rows], "o-", color=color, label=key)
        among = [row["attention_among_skipped"] for row in rows]
        skipped.plot(lengths, among, "o--", color="black", label="attention among what is skipped")
        gains.plot(lengths, [row["speedup"] for row in rows], "o-", color="tab:green")
        gains.axhline(1, color="black", linewidth=1)
        for axes, label in ((latencies, "ms per sublayer"), (skipped, "part skipped in drafts"), (gains, "speed-up over plain decoding")):
            axes.set(xscale="log", xlabel="context, tokens", ylabel=label)
            axes.set_xticks(lengths, map(str, lengths))
            axes.minorticks_off()
        latencies.set_ylim(bottom=0)
        skipped.set_ylim(0, 1)
        latencies.legend()
        skipped.legend()

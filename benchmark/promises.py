"""Rows of `speed` on what a planner promises, and what planning costs."""

import statistics
from profile import measure

import torch

from benchmark.bench import Row
from benchmark.predictions import tpt
from benchmark.races import run_race
from benchmark.runs import decode, median, probe, runs_of
from benchmark.texts import read_prompts, running_text
from beyond.certificate import certified
from decoding import Planner
from knapspec import knapsack
from rivals.draft_verify import PROMPTS


def plans_of(bench):
    """{texts: runs of knapspec+}, as the races have them."""
    return {name: runs_of(run_race(bench, name), "knapspec+") for name in ("prompts", "split", "blocks", "short")}


def planning(bench):
    """Planning's part of a generation: the median over the runs on each model, and over short answers."""
    parts = {name: median(run["seconds"]["plan"] / run["seconds"]["total"] for run in runs) for name, runs in plans_of(bench).items()}
    return Row("≤ 5%", ", ".join(f"{part:.1%} on {name}" for name, part in parts.items()), max(parts.values()) <= 0.05, parts)


def predictions(bench):
    """{model: (points, rows) of tpt()}: skip sets × γ at two context lengths, priced by a profile made right before."""
    found = {}
    contexts, sizes = (128, 640), {"gammas": (1, 2, 4, 8), "skip_sets": 6, "new_tokens": 48}
    if bench.quick:
        contexts, sizes = (32, 64), {"gammas": (1, 4), "skip_sets": 2, "new_tokens": 8}
    for name in ("smollm2", "split"):
        model, tokenizer = bench.models.load(name)
        text_ids = running_text([text for _, text in read_prompts(PROMPTS)], tokenizer, contexts[1])
        latency = measure(model, context_lengths=[contexts[0], sum(contexts) // 2, contexts[1] + 64], gamma_max=8)
        found[name] = tpt(bench.results, model, latency, text_ids, contexts=contexts, key=f"tpt/{name}/", progress=bench.progress, **sizes)
    return found


def rates(bench):
    """Tokens per second as tokens per time predicts them, given the α of the setting, against those measured.

    The error is that of the ratio to plain decoding, predicted and right beside the run: what a machine that others use
    slows down since it was profiled is no fault of the prediction. The error without that is told as well.
    """
    found = predictions(bench).values()
    rows = [row for _, rows in found for row in rows if row["predictor"] == "tpt"]
    pearson, error, drifting = min(row["pearson"]["all"] for row in rows), *(max(row[key] for row in rows) for key in ("speedup_error", "error"))
    text = f"Pearson {pearson:.3f}, mean error {error:.1%}, {drifting:.1%} with the drift of the machine"
    text += f" ({sum(len(points) for points, _ in found)} settings, the worse of SmolLM2 and split)"
    return Row("Pearson ≥ 0.95, mean error ≤ 10%", text, pearson >= 0.95 and error <= 0.1, {"rows": rows})


def alpha(bench):
    """The α by which knapspec+ decided, mean over a text's drafted tokens, against how many of them were accepted."""
    runs = [run for some in plans_of(bench).values() for run in some if run["tried"]]
    if not runs:
        return Row("mean error ≤ 0.05", "nothing was drafted", None, {})
    error = statistics.mean(abs(run["expected"] - run["accepted"]) / run["tried"] for run in runs)
    return Row("mean error ≤ 0.05", f"mean error {error:.3f} in {len(runs)} runs with drafts", error <= 0.05, {"error": error})


def certificate(bench):
    """How often `certified` proves, for drafts that skip 1, 4 or 12 sublayers, that the best token stays what it is.

    In the middle of a text, on the last 16 tokens. Beside it how often it is the same.
    """

    def look(session):
        states, _ = session.window(16)
        items = len(states) - 1
        branches, x = knapsack(session.model.sublayers, [1] * items, states, session.cache, budget=items // 4)
        best = session.model.logits(states[-1]).argmax(-1)
        return {branch.weight: (certified(session.model, states[-1], final).float().mean().item(),
                                (session.model.logits(final).argmax(-1) == best).float().mean().item())
                for branch, final in zip(branches, x) if branch.weight in (1, 4, 12)}  # fmt: skip

    def found():
        model, tokenizer = bench.models.load("smollm2")
        prompts = bench.prompts(4, tokenizer, model.config)
        texts = [ids + decode(model, ids, Planner(), max_new_tokens=32)["token_ids"] for _, ids in prompts]
        with torch.inference_mode():
            seen = [probe(model, text, look, window=16) for text in texts]
        counts = sorted(set.intersection(*map(set, seen)))
        return [[count, *(statistics.mean(pairs[count][i] for pairs in seen) for i in (0, 1))] for count in counts]

    found = bench.results.once("certificate", found)
    text = "; ".join(f"{count} skipped: {proven:.1%} proven, {same:.1%} the same" for count, proven, same in found)
    return Row("–", text, None, {"skipped, proven, same": found})


ROWS = {
    "planning": ("planning's part of a generation, and of short answers", planning),
    "rates": ("predicted against measured tokens/s", rates),
    "alpha": ("predicted α against the part accepted", alpha),
    "certificate": ("drafts whose token is provably the target's, SmolLM2", certificate),
}

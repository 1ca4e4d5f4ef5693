"""Row of `speed` on what a planner promises: predicted against measured speed, over skip sets × fixed γ at two context lengths.

Source: KnapSpec's correlation of tokens per time with throughput.
"""

import functools
import statistics
from profile import measure

import torch

from benchmark.bench import Row
from benchmark.runs import beside_plain, fresh, probe
from benchmark.texts import read_prompts, running_text, spread
from decoding import FixedPlanner, Plan
from knapspec import integer_weights, knapsack, tokens_per_time
from rivals.draft_verify import PROMPTS

CONTEXTS, GAMMAS, SKIP_SETS = (128, 640), (1, 2, 4, 8), 6


def skip_sets_to_try(session, latency, count, rng):
    """Half of them are the knapsack's, at savings evenly spread; then random ones as large."""
    n, L = session.cache.length, session.model.config.n_layer
    weights = integer_weights(latency.attention(n), latency.mlp(), L)
    branches, _ = knapsack(session.model.sublayers, weights, session.window(8)[0], session.cache, budget=sum(weights) // 2)
    found = spread([branch.skip_set for branch in branches if branch.skip_set], count // 2)
    if not found:
        raise ValueError("the knapsack finds nothing to skip in this model: there is nothing to predict")
    free = 2 * L - 4  # the first and the last layer are kept
    return found + [frozenset((2 + torch.randperm(free, generator=rng)[: len(s)]).tolist()) for s in found]


def points_at(model, latency, text_ids, n, *, gammas, skip_sets, new_tokens):
    """Of each setting at a context of n tokens what it gave, and what tokens per time say given the α of that very setting."""
    L, options, middle, points = model.config.n_layer, {"max_new_tokens": new_tokens}, n + new_tokens // 2, []
    look = functools.partial(skip_sets_to_try, latency=latency, count=skip_sets, rng=torch.Generator().manual_seed(n))
    plans = [Plan(skip_set, gamma) for skip_set in probe(model, text_ids[:n], look, window=8) for gamma in gammas]
    methods = {i: fresh(model, FixedPlanner(plan), options) for i, plan in enumerate(plans)}
    for run in beside_plain(model, text_ids[:n], methods, options=options):
        plan, alpha = plans[run["method"]], run["accepted"] / run["tried"]
        draft_s, verify_s = latency.draft(plan.skip_set, middle, L), latency.verify(middle, plan.gamma + 1)
        points.append({
            "context": n, "skip_set": sorted(plan.skip_set), "gamma": plan.gamma, "alpha": alpha,
            "tokens_per_second": run["tokens_per_second"], "predicted": tokens_per_time(alpha, plan.gamma, draft_s, verify_s),
            "speedup": run["speedup"], "predicted_plain": 1 / latency.verify(middle, 1),
        })  # fmt: skip
    return points


def predictions(bench):
    """{model: points_at() both context lengths}, priced by a profile made right before."""
    found, sizes = {}, {"gammas": GAMMAS, "skip_sets": SKIP_SETS, "new_tokens": min(48, bench.max_new_tokens)}
    for name in ("smollm2", "split"):
        model, tokenizer = bench.load(name)
        text_ids = running_text([text for _, text in read_prompts(PROMPTS)], tokenizer, CONTEXTS[1])
        latency = measure(model, context_lengths=[CONTEXTS[0], sum(CONTEXTS) // 2, CONTEXTS[1] + 64], gamma_max=8)
        every = [bench.results.once(f"rates/{name}/{n}", functools.partial(points_at, model, latency, text_ids, n, **sizes)) for n in CONTEXTS]
        found[name] = [point for points in every for point in points]
    return found


def worth(points):
    """(Pearson's correlation with the measured tokens per second, mean error, mean error of the ratio to plain decoding)."""
    predicted, measured = ([point[key] for point in points] for key in ("predicted", "tokens_per_second"))
    ratios = [point["predicted"] / point["predicted_plain"] / point["speedup"] for point in points]
    errors = [statistics.mean(abs(ratio - 1) for ratio in some) for some in ([x / y for x, y in zip(predicted, measured)], ratios)]
    return statistics.correlation(predicted, measured), *errors


def rates(bench):
    """Tokens per second as tokens per time predicts them, given the α of the setting, against those measured.

    The error is that of the ratio to plain decoding, predicted and right beside the run: what a machine that others use
    slows down since it was profiled is no fault of the prediction. The error without that is told as well.
    """
    found = predictions(bench)
    pearson, drifting, error = zip(*map(worth, found.values()))
    text = f"Pearson {min(pearson):.3f}, mean error {max(error):.1%}, {max(drifting):.1%} with the drift of the machine"
    text += f" ({sum(map(len, found.values()))} settings, the worse of SmolLM2 and split)"
    return Row("Pearson ≥ 0.95, mean error ≤ 10%", text, min(pearson) >= 0.95 and max(error) <= 0.1, found)


ROWS = {"rates": ("predicted against measured tokens/s", rates)}

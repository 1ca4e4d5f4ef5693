"""Row of `speed` on what a planner promises: predicted against measured speed of the knapsack's skip sets × γ.

Source: KnapSpec's correlation of tokens per time with throughput.
"""

import functools
import statistics
from profile import measure

from benchmark.bench import Row
from benchmark.runs import beside_plain, fresh
from benchmark.sweep import contenders
from benchmark.texts import read_prompts, running_text
from decoding import FixedPlanner
from knapspec import tokens_per_time
from rivals.draft_verify import PROMPTS

CONTEXTS, GAMMAS = (128, 640), (1, 2, 4, 8)


def points_at(model, latency, text_ids, n, new_tokens):
    """Of each setting at a context of n tokens what it gave, and what tokens per time say given the α of that very setting."""
    L, options, middle, points = model.config.n_layer, {"max_new_tokens": new_tokens}, n + new_tokens // 2, []
    plans = [plan for plan in contenders(model, text_ids[:n], latency) if plan.gamma in GAMMAS]
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
    found, new_tokens = {}, min(48, bench.max_new_tokens)
    for name in ("smollm2", "split"):
        model, tokenizer = bench.load(name)
        text_ids = running_text([text for _, text in read_prompts(PROMPTS)], tokenizer, CONTEXTS[1])
        latency = measure(model, context_lengths=[CONTEXTS[0], sum(CONTEXTS) // 2, CONTEXTS[1] + 64], gamma_max=GAMMAS[-1])
        every = [bench.results.once(f"rates/{name}/{n}", functools.partial(points_at, model, latency, text_ids, n, new_tokens)) for n in CONTEXTS]
        found[name] = [point for points in every for point in points]
    return found


def worth(points):
    """(Pearson's correlation with the measured tokens per second, mean error, mean error of the ratio to plain decoding)."""
    predicted, measured = ([point[key] for point in points] for key in ("predicted", "tokens_per_second"))
    ratios = [x / y for x, y in zip(predicted, measured)]
    of_plain = [point["predicted"] / point["predicted_plain"] / point["speedup"] for point in points]
    error, error_of_ratio = (statistics.mean(abs(ratio - 1) for ratio in some) for some in (ratios, of_plain))
    return statistics.correlation(predicted, measured), error, error_of_ratio


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

"""`tpt`: predicted against measured speed, over skip sets × fixed γ at several context lengths.

Source: KnapSpec's correlation of tokens per time with throughput, and the predictors that it is held against.
"""

import functools
import math
import statistics

import torch
from tqdm import tqdm

from benchmark import commands
from benchmark.methods import latency_for
from benchmark.results import heading, shown, table
from benchmark.runs import beside_plain, fresh, median, probe
from benchmark.texts import running_text, spread
from cli.options import number
from decoding import FixedPlanner, Plan
from knapspec import (
    agreement,
    expected_tokens,
    integer_weights,
    knapsack,
    tokens_per_time,
)

PREDICTORS = {"tpt": "TPT, full price", "paper_tpt": "TPT, paper's price", "acceptance_rate": "acceptance rate",
              "tokens_per_layer": "tokens per layer"}  # fmt: skip


def predict(latency, skip_set, gamma, alpha, n, n_layer):
    """What each of PREDICTORS says of a plan at n tokens of context; the first two in tokens per second."""
    tokens, head_s = expected_tokens(alpha, gamma), latency.head()
    draft_s, step_s = (latency.draft(s, n, n_layer) for s in (skip_set, frozenset()))
    return {
        "tpt": tokens_per_time(alpha, gamma, draft_s, latency.verify(n, gamma + 1)),
        "paper_tpt": tokens_per_time(alpha, gamma, draft_s - head_s, step_s - head_s),
        "acceptance_rate": (tokens - 1) / gamma,
        "tokens_per_layer": tokens / (n_layer + gamma * (n_layer - len(skip_set) / 2)),  # DEL's; two sublayers are a layer
    }


def skip_sets_to_try(session, latency, count, rng):
    """[(skip set, the α that the paper's planner expects)]: half are the knapsack's, at savings evenly spread; then random ones as large, None."""
    n, L = session.cache.length, session.model.config.n_layer
    weights = integer_weights(latency.attention(n), latency.mlp(), L)
    states, target_probs = session.window(8)
    branches, x = knapsack(session.model.sublayers, weights, states, session.cache, budget=sum(weights) // 2)
    found = [(branch.skip_set, alpha) for branch, alpha in zip(branches, agreement(session, x, target_probs)) if branch.skip_set]
    if not found:
        raise ValueError("the knapsack finds nothing to skip in this model: there is nothing to predict")
    found, free = spread(found, count // 2), 2 * L - 4  # the first and the last layer are kept
    return found + [(frozenset((2 + torch.randperm(free, generator=rng)[: len(s)]).tolist()), None) for s, _ in found]


def points_at(model, latency, text_ids, n, *, gammas, skip_sets=6, new_tokens=64, repeats=1, seed=0):
    """Of each setting at a context of n tokens what it gave, and what each predictor says given the α of that very setting."""
    L, rng, points = model.config.n_layer, torch.Generator().manual_seed(seed + n), []
    look = functools.partial(skip_sets_to_try, latency=latency, count=skip_sets, rng=rng)
    plans = [(*pair, gamma) for pair in probe(model, text_ids[:n], look, window=8) for gamma in gammas]
    options, middle = {"max_new_tokens": new_tokens}, n + new_tokens // 2
    methods = {i: fresh(model, FixedPlanner(Plan(s, gamma)), options) for i, (s, _, gamma) in enumerate(plans)}
    every = list(beside_plain(model, text_ids[:n], methods, options=options, repeats=repeats))
    for i, (skip_set, expected_alpha, gamma) in enumerate(plans):
        runs = [run for run in every if run["method"] == i]
        drafted, accepted, tried = (sum(run[key] for run in runs) for key in ("drafted", "accepted", "tried"))
        points.append({
            "context": n, "skip_set": sorted(skip_set), "gamma": gamma, "alpha": accepted / tried, "expected_alpha": expected_alpha,
            **{key: median(run[key] for run in runs) for key in ("tokens_per_second", "speedup")}, "plain": 1 / latency.verify(middle, 1),
            "predicted": predict(latency, skip_set, gamma, accepted / tried, middle, L) | {"acceptance_rate": accepted / drafted},
        })  # fmt: skip
    return points


def tpt(results, model, latency, text_ids, *, contexts, key="", progress=True, **sizes):
    """-> (points, rows): points_at() each context length, and how far each predictor can be trusted."""
    bar = tqdm(contexts, desc="tpt", unit="length", disable=None if progress else True)
    points = [p for n in bar for p in results.once(f"{key}{n}", functools.partial(points_at, model, latency, text_ids, n, **sizes))]
    return points, [worth(points, name) for name in PREDICTORS]


def worth(points, name):
    """One predictor: its correlations with tokens per second, by context and over all, and how far it is off."""
    row = {"predictor": name, "pearson": {}}
    for n in (*sorted({p["context"] for p in points}), "all"):
        some = [p for p in points if n in (p["context"], "all")]
        row["pearson"][str(n)] = pearson([p["predicted"][name] for p in some], [p["tokens_per_second"] for p in some])
    # A machine that is slower now than when it was profiled slows plain decoding as well: speed-ups are compared, too.
    measured, in_seconds = [p["speedup"] for p in points], name in ("tpt", "paper_tpt")
    predicted = [p["predicted"][name] / (p["plain"] if in_seconds else 1) for p in points]
    row["pearson"]["speed-up"] = pearson(predicted, measured)
    if in_seconds:
        row["error"] = statistics.mean(abs(p["predicted"][name] / p["tokens_per_second"] - 1) for p in points)
        row["speedup_error"] = statistics.mean(abs(x / y - 1) for x, y in zip(predicted, measured))
    return row


def pearson(x, y):
    """The correlation of two lists; None where one of them is constant."""
    r = torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1].item()
    return r if math.isfinite(r) else None


def tpt_table(points, rows):
    """Lines of Markdown that tell what tpt() returned."""
    lengths = list(rows[0]["pearson"])
    columns = ["predictor", *(f"Pearson, {n}" for n in lengths), "error", "error of speed-up"]
    lines = [[PREDICTORS[row["predictor"]], *(shown(row["pearson"][n], "{:.3f}") for n in lengths),
              *(shown(row.get(key), "{:.1%}") for key in ("error", "speedup_error"))] for row in rows]  # fmt: skip
    surprise = statistics.mean(abs(p["alpha"] - p["expected_alpha"]) for p in points if p["expected_alpha"] is not None)
    notes = (
        f"{len(points)} settings, with the α of each. Pearson: with measured tokens/s, by context and over all, and with the speed-up over "
        f"the plain run beside it. The α that eight tokens of the window promise for the knapsack's skip sets is off by {surprise:.3f} (mean)."
    )
    return [*table(columns, lines), "", notes]


def add_options(add):
    commands.add_model(add)
    commands.add_amount(add, new_tokens=64)
    add("--contexts", type=commands.counts, default="128,1024", metavar="LIST", help="context lengths (default: %(default)s)")
    add("--gammas", type=commands.counts, default="1,2,4,8", metavar="LIST", help="draft lengths (default: %(default)s)")
    add("--skip-sets", type=number(int, 2), default=6, metavar="N", help="half found, half random (default: %(default)s)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="for the random ones (default: %(default)s)")


def run(arguments):
    model, tokenizer, prompts = commands.prepare(arguments)
    longest, limit = arguments.contexts[-1] + arguments.max_new_tokens, model.config.max_position
    if longest > limit:
        raise ValueError(f"{longest} tokens, the longest of --contexts and the new ones, are more than the model's {limit}: "
                         f"pass --contexts of at most {limit - arguments.max_new_tokens}, or fewer new tokens")  # fmt: skip
    results = commands.results_of(arguments, model=model, prompts=prompts)
    text_ids = running_text([text for _, text in prompts], tokenizer, longest)
    points, rows = tpt(results, model, latency_for(model, longest, arguments.gammas[-1]), text_ids, contexts=arguments.contexts,
                       gammas=arguments.gammas, skip_sets=arguments.skip_sets, new_tokens=arguments.max_new_tokens,
                       repeats=arguments.repeats, seed=arguments.seed)  # fmt: skip
    results.save(rows=rows)
    return "\n".join([*heading("tpt", results.data, [arguments.contexts[0], longest]), *tpt_table(points, rows)])

"""The best fixed plan of a model, found by trying many: what a planner that must decide on the spot is held against."""

import functools
import math
import statistics

from tqdm import tqdm

from benchmark.comparison import decode, paired, table
from benchmark.evidence import probe
from benchmark.planted import planted_items
from decoding import FixedPlanner, Plan, Planner, generate
from knapspec import knapsack

GAMMAS = (1, 2, 3, 4, 6, 8)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the sublayers' time, saved in a draft


def contenders(model, prompt_ids, latency, *, kind=None, window=16, new_tokens=64):
    """Plans to try: every γ with skip sets of the knapsack in the middle of a text, and with the planted truth.

    prompt_ids: a list of ids; its plain continuation by new_tokens is the text. kind: that of a planted model. Where
    the model's table holds int8 (shortcuts.py), there are also plans that keep everything in it. Returns a list of Plan.
    """
    L = model.config.n_layer
    text = prompt_ids + generate(model, prompt_ids, max_new_tokens=new_tokens).token_ids
    truth = {b for b in planted_items(kind, L) if 2 <= b < 2 * L - 2} if kind else ()  # not the first and the last layer

    def look(session):
        states, _ = session.window(window)
        found = {}  # (skip set, how the rest is kept): a dict, since that has an order
        for way in ("full", "int8") if "int8" in model.table else ("full",):
            costs = [latency.sublayer(item, session.cache.length, way) for item in range(2 * L)]
            ways = [[(way, cost, model.way(item, way))] for item, cost in enumerate(costs)]
            drafts = knapsack(model, session.cache, states, costs, budget=max(SHARES), ways=ways)
            within = [[(saved_s, skip_set) for skip_set, _, saved_s, _ in drafts if saved_s <= share * sum(costs)] for share in SHARES]
            skip_sets = [max(some, key=lambda pair: pair[0])[1] for some in within if some]
            choices = None if way == "full" else (way,) * (2 * L + 1)
            found |= dict.fromkeys((s, choices) for s in [*skip_sets, frozenset(truth), frozenset()] if s or choices)
        return found

    return [Plan(s, gamma, choices=choices) for s, choices in probe(model, text, look, window=window) for gamma in GAMMAS]


def sweep(model, prompts, plans, *, max_new_tokens=32, progress=True):
    """Successive halving: [[(Plan, speed-up)]] for each round, the best first; the last round's first is the best of all.

    prompts: lists of ids. Every run decodes max_new_tokens, over any end of text, beside a plain run. A round takes
    twice as many prompts as the one before, and the best third of its plans go on. The last one, of up to three plans,
    takes all prompts, in both orders. Speed-up: over plain decoding, the geometric mean over prompts.
    """
    run = functools.partial(decode, model, max_new_tokens=max_new_tokens)
    run(prompts[0], planner=Planner())  # the first forwards are slow
    rounds, count = [], 1
    while True:
        last = len(plans) <= 3
        chosen = prompts if last else prompts[:count]
        bar = tqdm(total=len(chosen) * len(plans) * (1 + last), desc=f"{len(plans)} plans", unit="run", leave=False,
                   disable=None if progress else True)  # fmt: skip
        logs = [[] for _ in plans]
        for prompt_ids in chosen:
            others = {i: functools.partial(run, prompt_ids, FixedPlanner(plan)) for i, plan in enumerate(plans)}
            for result in paired(functools.partial(run, prompt_ids, Planner()), others, repeats=1 + last):
                logs[result["method"]].append(math.log(result["speedup"]))
                bar.update()
        bar.close()
        ranked = sorted(((math.exp(statistics.mean(values)), i) for i, values in enumerate(logs)), key=lambda pair: -pair[0])
        rounds.append([(plans[i], speedup) for speedup, i in ranked])
        if last:
            return rounds
        plans, count = [plan for plan, _ in rounds[-1][: max(len(plans) // 3, 1)]], 2 * count


def told(plan, speedup):
    """A plan and its speed-up as JSON can hold them."""
    return {"skip_set": sorted(plan.skip_set), "gamma": plan.gamma, "choices": plan.choices, "speedup": speedup}


def sweep_table(rounds, n_layer, truth=None):
    """The last round as Markdown. truth: a planted model's redundant items; of those a plan's column tells the share."""
    rows = []
    for plan, speedup in rounds[-1]:
        skipped = f"{len(plan.skip_set)} of {2 * n_layer}"
        hits = f"{len(plan.skip_set & truth)} of {len(truth)}" if truth else None
        rows.append([plan.choices[0] if plan.choices else "full", skipped, hits, plan.gamma, f"{speedup:.2f}×"])
    return "\n".join(table(["the rest is kept as", "skipped", "planted ones among them", "gamma", "over plain decoding"], rows))

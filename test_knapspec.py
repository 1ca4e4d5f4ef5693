"""The method: tokens per time, the knapsack against its recurrence spelled out, the planner's decisions, the certificate.

Case -> tests here
  budget 0; items cheaper than a unit; equal latencies; window of 1; zero or NaN states
                                        -> test_odd_inputs_end_finite_and_the_same_each_time
  every subset enumerated               -> test_survivors_are_those_of_the_recurrence, test_best_found_is_near_the_true_best
  speculation slower than plain         -> test_the_planner_does_not_draft_where_no_draft_can_win
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from decoding import Plan, generate, sampling_probs
from knapspec import (
    Branches,
    KnapSpec,
    certified,
    distance,
    expected_tokens,
    knapsack,
    tokens_per_time,
)
from model import KVCache
from tests.testing_models import (
    latency_model,
    random_model,
    random_tokens,
    tiny_config,
)

L = 5  # 10 items; the 4 of the first and the last layer are never skipped


def prefilled(model):
    """The model, a cache with 20 verified tokens, the states of the last 4 and their logits."""
    cache, states = KVCache(model.config, 64), []
    logits = model(random_tokens(20, model.config, seed=1), cache, capture=states, last=4)
    cache.length = 20
    return model, cache, states, logits


@pytest.fixture(scope="module")
def scene():
    return prefilled(random_model(tiny_config(n_layer=L), seed=3))


COSTS = [3e-3, 2e-3] * L


def recurrence(model, cache, states, costs, budget, tau):
    """The dynamic program spelled out for one branch at a time: {weight: (cosine, skipped items)} after the last item."""
    W, unit, capacity = len(states[0]), min(costs), budget * sum(costs)
    best = {0: (1.0, (), states[0], 0.0)}
    for b, cost in enumerate(costs):
        rivals = {}
        for weight in sorted(best):
            _, skipped, x, saved_s = best[weight]
            kept = model.sublayers[b](x, Branches(cache, 1, W))
            rivals.setdefault(weight, []).append((skipped, kept, saved_s))
            if 2 <= b < len(costs) - 2 and saved_s + cost <= capacity:
                rivals.setdefault(weight + max(1, round(cost / unit)), []).append(((*skipped, b), x, saved_s + cost))
        best = {}
        for weight, those in rivals.items():
            for skipped, x, saved_s in those:
                cosine = torch.cosine_similarity(x, states[b + 1], dim=-1).mean().item()
                if cosine >= tau and (weight not in best or cosine > best[weight][0] + 1e-6):
                    best[weight] = cosine, skipped, x, saved_s
    return {weight: (cosine, frozenset(skipped)) for weight, (cosine, skipped, *_) in best.items()}


@pytest.mark.parametrize("budget, tau", [(0.5, 0.5), (0.5, -1.0), (0.2, 0.9), (1.0, -1.0)])
def test_survivors_are_those_of_the_recurrence(scene, budget, tau):
    model, cache, states, _ = scene
    found = knapsack(model, cache, states, COSTS, budget=budget, tau=tau)
    expected = recurrence(model, cache, states, COSTS, budget, tau)
    assert [skip_set for skip_set, *_ in found] == [expected[weight][1] for weight in sorted(expected)]
    for skip_set, names, saved_s, x in found:
        assert saved_s == pytest.approx(sum(COSTS[b] for b in skip_set)) and not names
        assert saved_s <= budget * sum(COSTS) and skip_set <= set(range(2, 2 * L - 2))
        again, context = states[0], Branches(cache, 1, 4)
        for item, sublayer in enumerate(model.sublayers):
            again = again if item in skip_set else sublayer(again, context)
        assert torch.allclose(again, x, atol=1e-5)


def test_ways_to_keep_an_item_stand_beside_skipping_it(scene):
    """A way that is free and exact must be taken everywhere; one that is exact at half the cost must never lose."""
    model, cache, states, _ = scene
    ways = [[("full", cost, f), ("exact", cost / 2, f)] for cost, f in zip(COSTS, model.sublayers)]
    found = knapsack(model, cache, states, COSTS, budget=1.0, tau=0.999999, ways=ways)
    skip_set, names, saved_s, x = found[-1]
    assert Counter(names.values())["exact"] + len(skip_set) == 2 * L - 4 and not skip_set & set(names)
    assert saved_s == pytest.approx(sum(COSTS[b] / 2 for b in names) + sum(COSTS[b] for b in skip_set))
    assert torch.cosine_similarity(x, states[-1], dim=-1).mean() > 0.999999
    alone = knapsack(model, cache, states, COSTS, ways=[way[:1] for way in ways])
    paper = knapsack(model, cache, states, COSTS)
    assert [f[0] for f in alone] == [f[0] for f in paper]  # with {full, skip} the plans are the paper's


def test_the_branch_that_keeps_everything_stays_while_it_can_pay(scene):
    """Where more saved always promises more, the few kept are those that saved most, and the one that saved nothing."""
    model, cache, states, _ = scene
    found = knapsack(model, cache, states, COSTS, budget=1.0, tau=-1.0, gain=lambda far, saved_s: 2 + saved_s, max_branches=3)
    assert len(found) == 3 and [bool(skip_set) for skip_set, *_ in found] == [False, True, True]
    none = knapsack(model, cache, states, COSTS, gain=lambda far, saved_s: saved_s + (saved_s > 0), max_branches=3)
    assert none and all(skip_set for skip_set, *_ in none)


@pytest.mark.parametrize("own_window", [False, True])
def test_a_branch_that_keeps_everything_is_the_target(scene, own_window):
    model, cache, states, _ = scene
    x, context = states[0].repeat(2, 1), Branches(cache, 2, 4, own_window)
    for b, sublayer in enumerate(model.sublayers):
        x = sublayer(x, context)
        assert torch.allclose(x.view(2, 4, -1), states[b + 1].expand(2, -1, -1), atol=1e-5)


def alphas(model, states, logits, x):
    probs, target_probs = (sampling_probs(t, 0, 1) for t in (model.logits(x), logits))
    return torch.minimum(probs, target_probs).sum(-1).mean().item()


def best_rate(alpha, saved_s):
    full_s, verify_s = sum(COSTS) + 1e-3, [sum(COSTS) * (1 + 0.05 * g) for g in range(9)]
    return tokens_per_time([alpha], [full_s - saved_s], verify_s).max().item()


def test_best_found_is_near_the_true_best(scene):
    """Of all 64 subsets the best in tokens per time, against the best of the survivors: at least 95% of it here."""
    model, cache, states, logits = scene
    true_best = 0.0
    for skipped in itertools.chain.from_iterable(itertools.combinations(range(2, 2 * L - 2), r) for r in range(2 * L - 3)):
        x, context = states[0], Branches(cache, 1, 4)
        for b, sublayer in enumerate(model.sublayers):
            x = x if b in skipped else sublayer(x, context)
        true_best = max(true_best, best_rate(alphas(model, states, logits, x), sum(COSTS[b] for b in skipped)))
    found = knapsack(model, cache, states, COSTS, budget=1.0, tau=-1.0)
    best = max(best_rate(alphas(model, states, logits, x), saved_s) for *_, saved_s, x in found)
    assert 0.95 * true_best <= best <= true_best + 1e-9


def test_pruned_search_keeps_what_the_full_one_finds_best():
    model, cache, states, _ = prefilled(random_model(tiny_config(n_layer=L), faint=(3, 4, 6), epsilon=0.05))

    def gain(far, saved_s):
        full_s, verify_s = sum(COSTS), [sum(COSTS) * (1 + 0.05 * g) for g in range(9)]
        return tokens_per_time(1 - far.clamp(max=1), full_s - saved_s, verify_s)[:, 1:].max(-1).values * verify_s[0]

    def value(found):
        return max(gain(distance(x, states[-1])[0].mean()[None].double(), torch.tensor([saved_s], dtype=torch.float64)).item()
                   for *_, saved_s, x in found)  # fmt: skip

    everything = knapsack(model, cache, states, COSTS, budget=1.0, tau=-1.0)
    few = knapsack(model, cache, states, COSTS, budget=1.0, tau=-1.0, gain=gain, max_branches=4)
    assert 0 < len(few) <= 4 < len(everything)
    assert value(few) >= 0.97 * value(everything)


@pytest.mark.parametrize("change", [
    {"budget": 0.0}, {"costs": [1e-3] * 2 * L}, {"costs": [1e-30] * 2 * L}, {"costs": [0.0] * 2 * L}, {"W": 1},
    {"states": 0.0}, {"states": math.nan}, {"costs": [1e-3, 1e-6] * L},
])  # fmt: skip
def test_odd_inputs_end_finite_and_the_same_each_time(scene, change):
    model, cache, states, _ = scene
    states = [x[-change.get("W", 4) :] for x in states]
    if "states" in change:
        states = [torch.full_like(x, change["states"]) for x in states]
    runs = [knapsack(model, cache, states, change.get("costs", COSTS), budget=change.get("budget", 0.5)) for _ in range(2)]
    assert [f[0] for f in runs[0]] == [f[0] for f in runs[1]]
    assert all(math.isfinite(f[2]) for f in runs[0])
    if change.get("budget") == 0.0:
        assert [f[0] for f in runs[0]] == [frozenset()]


def test_whole_layers_are_kept_or_skipped_together(scene):
    model, cache, states, _ = scene
    items = [(2 * i, 2 * i + 1) for i in range(L)]
    found = knapsack(model, cache, states, COSTS, tau=-1.0, items=items)
    assert len(found) > 1 and all((b ^ 1) in skip_set for skip_set, *_ in found for b in skip_set)


def test_tokens_per_time_at_its_limits():
    assert expected_tokens(0.0, 5) == 1 and expected_tokens(1.0, 5) == 6 and expected_tokens(0.5, 2) == 1.75
    rates = tokens_per_time([0.0, 0.5, 1.0], [1.0, 1.0, 1.0], [2.0, 2.5, 3.0])
    assert rates[:, 0].tolist() == [0.5] * 3  # plain decoding, whatever the draft
    assert rates[:, 2].tolist() == pytest.approx([1 / 5, 1.75 / 5, 3 / 5])


def planted():
    """A model whose inner layers do almost nothing, so that a draft without them is nearly always right."""
    return random_model(tiny_config(n_layer=8), faint=range(2, 14), epsilon=1e-3)


PROMPT = random_tokens(12, tiny_config(), seed=2).tolist()


def test_the_planner_drafts_with_the_redundant_items_left_out():
    model, prompt = planted(), PROMPT
    planner = KnapSpec(latency_model(8), share=1.0)
    result = generate(model, prompt, max_new_tokens=60, planner=planner)
    assert result.token_ids == generate(model, prompt, max_new_tokens=60).token_ids
    skipped = {len(plan.skip_set) for _, plan, _ in result.plans if plan.gamma}
    assert result.drafted > 20 and result.accepted / result.drafted > 0.8 and max(skipped) >= 6


def test_the_planner_does_not_draft_where_no_draft_can_win():
    model, prompt = planted(), PROMPT
    dear = latency_model(8, per_token=1.0)  # verifying two tokens costs two steps
    result = generate(model, prompt, max_new_tokens=30, planner=KnapSpec(dear, share=1.0))
    assert result.drafted == 0 and all(plan.gamma == 0 for _, plan, _ in result.plans)


def test_no_planning_beyond_its_share():
    model, prompt = planted(), PROMPT
    latency = latency_model(8)
    for share, new in [(0.0, 30), (0.05, 10), (1.0, 30)]:
        planner = KnapSpec(latency, share=share, interval=1)
        generate(model, prompt, max_new_tokens=new, planner=planner, temperature=1.0)  # planned by the profile, not the clock
        assert planner.planned_s <= share * new * latency.verify(12, 1)
        assert (planner.planned_s > 0) == (share == 1.0)


def test_intervals_stretch_while_the_answer_stays():
    model, prompt = planted(), PROMPT
    planner, positions = KnapSpec(latency_model(8, per_token=1.0), share=100.0, interval=4), []
    replan = planner._replan
    planner._replan = lambda session, branches: (positions.append(session.cache.length), replan(session, branches))
    generate(model, prompt, max_new_tokens=60, planner=planner)
    assert positions == [12, 20, 36, 68]


def test_what_was_seen_outweighs_the_estimate_in_time():
    model, prompt = planted(), PROMPT
    planner = KnapSpec(latency_model(8), share=1.0)
    generate(model, prompt, max_new_tokens=20, planner=planner)
    candidate = planner.chosen
    candidate.accepted, candidate.tried = 0.0, 1000.0
    for other in planner.candidates:
        other.accepted, other.tried = 0.0, 1000.0
    session = type("", (), {"cache": type("", (), {"length": 30}), "model": model})
    planner._choose(session)
    assert planner.current.gamma == 0


@pytest.mark.parametrize("confidence, pays", [(1.0, True), (0.1, False)])
def test_a_draft_goes_on_if_some_longer_one_pays(confidence, pays):
    """Behind two drafts, a third costs half a step to make and half to verify: more than the 0.9 tokens that it may bring.

    It pays only where the tokens behind it are verified for nothing, and the two are likely to stand."""
    session = type("", (), {"cache": type("", (), {"length": 0}), "model": random_model(tiny_config(n_layer=4))})
    latency, plan = latency_model(4, head_s=0.0, attention_s=(1e-3, 0.0)), Plan(frozenset(range(2, 6)), 8, 0.9, 1 / 8e-3)
    for at_nine, expected in [(1.5, pays), (4.0, False)]:
        verify_s = tuple((k, steps * 8e-3, 0.0) for k, steps in ((1, 1.0), (3, 1.0), (4, 1.5), (9, at_nine)))
        planner = KnapSpec(replace(latency, verify_s=verify_s))
        assert planner.keep_drafting(session, plan, [confidence, confidence]) == expected


def test_a_certified_state_never_disagrees():
    """States ever nearer to the target's, tiny ones included: whatever is certified has the same best token."""
    generator, counts = torch.Generator().manual_seed(0), Counter()
    for seed, size in itertools.product(range(8), (1.0, 1e-3)):  # at 1e-3 RMSNorm's epsilon outweighs the mean square
        model = random_model(tiny_config(n_layer=1), seed=seed)
        target = torch.randn(16, model.config.hidden_size, generator=generator) * size
        for nearness in (1.0, 0.1, 0.01, 1e-3):
            draft = target + nearness * size * torch.randn(target.shape, generator=generator)
            proven = certified(model, target, draft)
            agree = model.logits(target).argmax(-1) == model.logits(draft).argmax(-1)
            assert (agree | ~proven).all()
            counts[nearness] += proven.sum().item()
    assert counts[1e-3] > 100 and counts[1.0] < counts[1e-3]  # the certificate is neither empty nor careless

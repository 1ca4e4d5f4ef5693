"""knapspec.py in depth: the knapsack against the recurrence and all subsets, the certificate, whole generations on a clock.

test_knapspec.py has the method step by step; here each part meets something written independently of it.

case                                              tests (those without a file are here or in test_knapspec.py)
budget 0; all items cheaper than one unit; equal  test_knapsack_is_the_recurrence, test_odd_inputs_end_finite_and_the_same_each_time
latencies; a window of 1 token; zero or NaN
up to 12 items, every subset enumerated           test_knapsack_is_the_recurrence, test_the_best_survivor_is_close_to_the_best_of_all_subsets
a saved latency profile of something else         test_profile.py: test_a_profile_of_something_else_is_not_used
timing without warm-up; one layer timed           test_measuring_recovers_what_whole_forwards_take_once_warm
speculation slower than plain decoding            test_where_no_draft_can_win_none_is_made; test_cli.py: test_the_report_says_when_no_draft_pays
acceptance statistics                             test_decoding.py: test_only_the_accepted_prefix_counts
"""

import copy
import functools
import itertools
from profile import measure

import pytest
import torch

import knapspec
from decoding import generate
from knapspec import Branches, KnapSpec, certified, knapsack, tokens_per_time
from model import Context
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    prefilled,
    random_model,
    random_tokens,
    tiny_config,
)

SIX = tiny_config(n_layer=6, vocab_size=101)  # 12 items, of which the middle 8 can be skipped
COSTS = {
    "equal": [1e-3] * 12,
    "attention three times an MLP": [3e-3, 1e-3] * 6,
    "MLP twice and a half an attention": [1e-3, 2.5e-3] * 6,
    "all different": [1e-3 * (1 + 0.37 * i % 2) for i in range(12)],
    "cheaper than any unit": [1e-15] * 12,
}


def _window(model, *, prompt_tokens=20, W=8, seed=0):
    """A cache of verified tokens and the states of the last W of them."""
    states = []
    cache, _ = prefilled(model, random_tokens(prompt_tokens, model.config, seed), capture=states, last=W)
    return cache, states


# --- The knapsack ----------------------------------------------------------------------------------------------------


def _alone(function, cache, x, own_window):
    """A way to compute an item on one branch's window, by the model's own forward pass over a copy of the cache."""
    W, rows = x.size(0), []
    for w in range(W):
        if w == 0 or not own_window:  # with own_window the branch goes on reading what it wrote itself
            own = copy.copy(cache)
            own.keys, own.values = cache.keys.clone(), cache.values.clone()
        own.length = cache.length - W + w
        rows.append(function(x[w : w + 1], Context(own, 1)))
    return torch.cat(rows)


def _recurrence(ways, cache, states, costs, *, budget, tau, own_window):
    """The dynamic program as the paper has it: g(b, j), the survivor after b items with j units saved, for every j.

    ways: for each item how it may be kept, (name, cost, function), at full price first and the cheapest last.
    """
    unit, cheapest_s = max(min(costs), 1e-12), sum(cost for *_, (_, cost, _) in ways)
    capacity = sum(costs) - cheapest_s + budget * cheapest_s
    choices = []  # for each item (name or None, saved_s, function)
    for item, ((_, _, full), *cheaper) in enumerate(ways):
        choices.append([(None, 0.0, full)])
        if 2 <= item < 10:
            choices[-1] += [(name, saved_s, function) for name, cost, function in cheaper if (saved_s := costs[item] - cost) >= unit / 2]
            choices[-1].append(("skip", costs[item], None))

    @functools.cache
    def g(b, j):  # -> (cosine, saved_s, ((item, choice), ...), states) or None
        if b == 0:
            return (1.0, 0.0, (), states[0]) if j == 0 else None
        item, found = b - 1, []
        for name, saved_s, function in choices[item]:
            before = g(item, j - (max(1, round(saved_s / unit)) if name else 0)) if j >= 0 else None
            if before and before[1] + saved_s <= capacity:
                x = _alone(function, cache, before[3], own_window) if function else before[3]
                found.append((before[1] + saved_s, before[2] + (((item, name),) if name else ()), x))
        scored = [(torch.cosine_similarity(x, states[b], dim=-1).mean().item(), *rest, x) for *rest, x in found]
        return max((s for s in scored if s[0] >= tau), key=lambda s: s[0], default=None)

    return [s for j in range(sum(max(1, round(cost / unit)) for cost in costs) + 1) if (s := g(12, j))]


def _slightly_wrong(function):
    return lambda x, context: x + 0.9 * (function(x, context) - x)


@pytest.mark.parametrize("cheaper", [False, True], ids=["skip", "skip and a cheaper way"])
@pytest.mark.parametrize("own_window", [False, True])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS.keys())
def test_knapsack_is_the_recurrence(costs, own_window, cheaper):
    for seed, (budget, tau, W) in enumerate([(0.5, 0.5, 3), (0.3, 0.9, 1), (0.0, 0.5, 3)]):
        model = random_model(SIX, seed=seed, faint=range(2, 10), epsilon=0.5)
        cache, states = _window(model, W=W, seed=seed)
        ways = [[("full", cost, f), ("cheaper", cost / 2, _slightly_wrong(f))] if cheaper else [("full", cost, f)]
                for cost, f in zip(costs, model.sublayers)]  # fmt: skip
        options = {"budget": budget, "tau": tau, "own_window": own_window}
        found = knapsack(model, cache, states, costs, ways=ways if cheaper else None, **options)
        wanted = _recurrence(ways, cache, states, costs, **options)
        assert [dict.fromkeys(skip_set, "skip") | names for skip_set, names, *_ in found] == [dict(path) for _, _, path, _ in wanted]
        assert (len(found) > 1) == (budget > 0 or cheaper)
        for (skip_set, names, saved_s, x), (_, wanted_s, _, wanted_x) in zip(found, wanted):
            saved = sum(costs[b] for b in skip_set) + sum(costs[b] / 2 for b in names)
            assert saved_s == pytest.approx(wanted_s) == pytest.approx(saved)
            torch.testing.assert_close(x, wanted_x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own_window", [False, True])
@pytest.mark.parametrize("W", [1, 5, 20])  # the last: all that is in the cache
def test_a_row_of_the_batch_is_what_the_model_computes_alone(W, own_window):
    model = random_model(SIX)
    cache, states = _window(model, W=W)
    before, others = cache.keys.clone(), torch.randn(2, W, 16, generator=torch.Generator().manual_seed(0))
    for item, sublayer in enumerate(model.sublayers):
        x = torch.cat((states[item][None], others))
        batch = sublayer(x.flatten(0, 1), Branches(cache, 3, W, own_window)).view(3, W, 16)
        torch.testing.assert_close(batch[0], states[item + 1], rtol=1e-4, atol=1e-4)
        for branch in (0, 1, 2):
            torch.testing.assert_close(batch[branch], _alone(sublayer, cache, x[branch], own_window), rtol=1e-4, atol=1e-4)
    assert torch.equal(cache.keys, before)


@torch.inference_mode()
def _all_subsets(model, cache, states):
    """[(skip set, final states)] of all 256."""
    W, H = states[0].shape
    x, skip_sets = states[0][None], [frozenset()]
    for item, sublayer in enumerate(model.sublayers):
        kept = sublayer(x.reshape(-1, H), Branches(cache, len(skip_sets), W)).view(-1, W, H)
        can_skip = 2 <= item < 10
        x = torch.cat((kept, x)) if can_skip else kept
        skip_sets += [skip_set | {item} for skip_set in skip_sets] if can_skip else []
    return list(zip(skip_sets, x))


@pytest.mark.parametrize("costs", list(COSTS.values())[:2], ids=list(COSTS)[:2])
def test_the_best_survivor_is_close_to_the_best_of_all_subsets(costs):
    """In tokens per time by shares of equal argmaxes. A cosine stands in for that share, so the best can be missed."""
    full_s = sum(costs) + 1e-3
    verify_s = [full_s * (1 + 0.03 * gamma) for gamma in range(9)]
    of_all, of_unpruned = [], []
    for seed in range(4):
        model = random_model(SIX, seed=seed, faint=range(2, 10), epsilon=0.2)
        cache, states = _window(model, W=16, seed=seed)
        target = model.logits(states[-1]).argmax(-1)

        def best(found, model=model, target=target):
            alpha = torch.stack([(model.logits(x).argmax(-1) == target).double().mean() for _, x in found])
            draft_s = [full_s - sum(costs[b] for b in skip_set) for skip_set, _ in found]
            return tokens_per_time(alpha, draft_s, verify_s).max().item()

        def gain(far, saved_s):
            return tokens_per_time(1 - far.clamp(max=1), full_s - saved_s, verify_s)[:, 1:].max(-1).values * verify_s[0]

        subsets = [found for found in _all_subsets(model, cache, states) if sum(costs[b] for b in found[0]) <= sum(costs) / 2]
        survivors = best([(found[0], found[-1]) for found in knapsack(model, cache, states, costs)])
        few = knapsack(model, cache, states, costs, gain=gain, max_branches=4)
        assert 1 <= len(few) <= 4
        of_all.append(survivors / best(subsets))
        of_unpruned.append(best([(found[0], found[-1]) for found in few]) / survivors)
    assert max(of_all) <= 1 and min(of_all) > 0.75 and sum(of_all) / 4 > 0.9  # measured: 0.80, and 0.93 to 0.98
    assert min(of_unpruned) > 0.9


# --- The certificate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-8])  # √ε of the norm is 0.003
@pytest.mark.parametrize("tied", [False, True])
def test_no_certified_state_disagrees(size, tied):
    model = random_model(tiny_config(vocab_size=101, n_layer=1, tied=tied))
    rng = torch.Generator().manual_seed(0)
    proven, agreed = 0, 0
    for nearness, other_size in itertools.product((1.0, 0.3, 0.1, 0.03, 0.01), (1.0, 0.1, 30.0)):
        target = torch.randn(200, 16, generator=rng)
        draft = target + nearness * torch.randn(200, 16, generator=rng)
        same = model.logits(target * size).argmax(-1) == model.logits(draft * size * other_size).argmax(-1)
        certain = certified(model, target * size, draft * size * other_size)
        assert same[certain].all()
        proven, agreed = proven + certain.sum().item(), agreed + same.sum().item()
    assert 0.2 * agreed < proven < agreed


def test_the_certificate_cannot_be_widened():
    """Turned straight at the runner-up, a state is certified up to where the tokens change, and not much less far."""
    model = random_model(tiny_config(vocab_size=7, n_layer=1))
    rows = (model.head.weight.to_dense() if model.head.packed else model.head.weight) * model.model.norm.weight
    for target in torch.randn(40, 16, generator=torch.Generator().manual_seed(0)):
        first, second = (rows @ target).topk(2).indices
        toward = torch.nn.functional.normalize(rows[second] - rows[first], dim=0)
        drafts = target + torch.linspace(0, 8, 2001)[:, None] * toward
        same = model.logits(drafts).argmax(-1) == first
        certain = certified(model, target.expand(2001, -1), drafts)
        assert certain[0] and same[certain].all() and not same.all()
        assert certain.sum() > 0.5 * same.sum()


def test_nothing_is_certified_without_a_margin_or_a_direction():
    model = random_model(tiny_config(n_layer=1))
    state, zero = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 16)
    assert certified(model, state, state).tolist() == [True]
    assert certified(model, state, 5 * state).tolist() == [True]
    assert certified(model, state, -state).tolist() == [False]
    assert certified(model, state, zero).tolist() == certified(model, zero, state).tolist() == [False]
    assert certified(model, zero, zero).tolist() == [False]


# --- Measuring -------------------------------------------------------------------------------------------------------


class _ColdMachine(SimulatedMachine):
    """Takes a second more for whatever it does for the first time. Its sublayers cannot be run one by one."""

    warm, sublayers = frozenset(), property(lambda self: pytest.fail("a sublayer was timed apart from its forward"))

    def __call__(self, tokens, cache, *, skip=frozenset(), **options):
        run = skip, len(tokens), cache.length
        self.now_s += run not in self.warm
        self.warm |= {run}
        return super().__call__(tokens, cache, skip=skip, **options)


def test_measuring_recovers_what_whole_forwards_take_once_warm(monkeypatch):
    wanted = latency_model(6, attention_s=(2e-3, 3e-6), mlp_s=7e-4, head_s=5e-4, per_token=0.1)
    found = measure(_ColdMachine(random_model(SIX), wanted, monkeypatch), context_lengths=[16, 64, 256], gamma_max=4)
    assert [found.head(), found.mlp(), *found.attention_s] == pytest.approx([5e-4, 7e-4, 2e-3, 3e-6], rel=1e-6)
    for n, k in itertools.product((10, 500), range(1, 6)):
        assert found.verify(n, k) == pytest.approx(wanted.verify(n, k), rel=1e-6)
    assert found.error < 1e-6


# --- Whole generations on a clock ------------------------------------------------------------------------------------

FAINT = range(2, 10)


def _run(model, latency, monkeypatch, *, new=100, **options):
    """(plain seconds, generation, planner) on a machine that takes what `latency` says; the text is the plain one."""
    machine, prompt = SimulatedMachine(model, latency, monkeypatch), random_tokens(12, model.config).tolist()
    plain = generate(machine, prompt, max_new_tokens=new)
    planner = KnapSpec(latency, **options)
    generation = generate(machine, prompt, max_new_tokens=new, planner=planner)
    assert generation.token_ids == plain.token_ids
    return plain.seconds["total"], generation, planner


def test_drafts_that_are_always_right_come_as_fast_as_predicted(monkeypatch):
    plain_s, generation, _ = _run(random_model(SIX, faint=FAINT), latency_model(6), monkeypatch, share=1.0)
    assert generation.accepted == generation.drafted > 60
    assert plain_s / generation.seconds["total"] > 1.4
    rate = 100 / (generation.seconds["draft"] + generation.seconds["verify"])
    assert generation.plans[-1][1].tokens_per_second == pytest.approx(rate, rel=0.1)
    assert generation.plans[-1][1].skip_set <= set(FAINT)


@pytest.mark.parametrize("per_token", [1.0, 0.5])
def test_where_no_draft_can_win_none_is_made(monkeypatch, per_token):
    """Verification gains nothing, or only half, per token, and half of the time is the most that a draft may save."""
    latency = latency_model(6, per_token=per_token, head_s=2e-3)
    plain_s, generation, _ = _run(random_model(SIX, faint=FAINT), latency, monkeypatch)
    assert generation.drafted == 0 and [plan.gamma for _, plan, _ in generation.plans] == [0]
    assert generation.seconds["total"] <= plain_s * 1.05


@pytest.mark.parametrize("seed", range(2))
def test_a_model_that_needs_all_its_items_is_hardly_slowed_down(monkeypatch, seed):
    plain_s, generation, _ = _run(random_model(SIX, seed=seed), latency_model(6), monkeypatch, new=100)
    assert generation.seconds["total"] <= plain_s * 1.06


class _Misled:
    """Drafts another token than it would: the window looks good, but every draft is rejected."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, cache, *, skip=frozenset(), **options):
        logits = self.model(tokens, cache, skip=skip, **options)
        return logits.roll(1, -1) if skip else logits


def test_what_is_really_accepted_outweighs_the_estimate(monkeypatch):
    model = random_model(SIX, faint=FAINT)
    _, right, _ = _run(model, latency_model(6), monkeypatch, share=1.0)
    plain_s, wrong, _ = _run(_Misled(model), latency_model(6), monkeypatch, share=1.0)
    assert right.accepted == right.drafted > 70
    assert wrong.accepted == 0 < wrong.drafted < 60
    assert wrong.seconds["total"] < 1.4 * plain_s


class _HardAtFirst(_Misled):
    """Drafts another token than it would up to a length of 60, then its own."""

    def __call__(self, tokens, cache, *, skip=frozenset(), **options):
        logits = self.model(tokens, cache, skip=skip, **options)
        return logits.roll(1, -1) if skip and cache.length < 60 else logits


def test_a_text_that_begins_hard_is_tried_again(monkeypatch):
    """One planning: drafts are given up when they are rejected, tried again some tokens later, and then kept up."""
    model = random_model(SIX, faint=FAINT)
    _, generation, _ = _run(_HardAtFirst(model), latency_model(6), monkeypatch, new=200, interval=64, share=0.05)
    gammas = [plan.gamma for _, plan, _ in generation.plans]
    assert gammas[0] > 0 and 0 in gammas and gammas[-1] > 0 and generation.accepted > 50


def test_plannings_grow_rarer_while_the_answer_stays(monkeypatch):
    positions, knapsack_itself = [], knapspec.knapsack

    def counted(model, cache, *arguments, **options):
        positions.append(cache.length)
        return knapsack_itself(model, cache, *arguments, **options)

    monkeypatch.setattr(knapspec, "knapsack", counted)
    _run(random_model(SIX), latency_model(6, per_token=1.0), monkeypatch, interval=4, share=100.0)
    waits = [later - earlier for earlier, later in itertools.pairwise(positions)]
    assert len(waits) >= 3 and all(later == 2 * earlier for earlier, later in itertools.pairwise(waits))


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("faint", [(), FAINT])
def test_planning_takes_no_more_than_its_share(monkeypatch, faint, share):
    """Of the time that is left when drafts have saved the rest."""
    _, generation, _ = _run(random_model(SIX, faint=faint), latency_model(6), monkeypatch, new=400, interval=2, share=share)
    assert (generation.drafted > 200) == bool(faint)
    assert 0 < generation.seconds["plan"] / generation.seconds["total"] <= 1.1 * share


def test_whole_layers_are_planned_together(monkeypatch):
    _, generation, _ = _run(random_model(SIX, faint=FAINT), latency_model(6), monkeypatch, layers=True, share=1.0)
    assert generation.drafted > 0
    for _, plan, _ in generation.plans:
        assert {item ^ 1 for item in plan.skip_set} == plan.skip_set


@pytest.mark.parametrize("options", [{"price": "paper", "stop": "fixed", "alphas": "share", "max_branches": None}, {"gamma_max": 1},
                                     {"stop": "confidence", "window": 1}, {"gamma_max": 0}, {"budget": 0.0}])  # fmt: skip
def test_every_option_ends_in_the_plain_text(monkeypatch, options):
    _, generation, _ = _run(random_model(SIX, faint=FAINT), latency_model(6), monkeypatch, new=40, share=1.0, **options)
    assert (generation.drafted > 0) == (options.get("gamma_max") != 0 and options.get("budget") != 0)
    assert all(plan.gamma <= options.get("gamma_max", 8) for _, plan, _ in generation.plans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_planned_as_well(monkeypatch, dtype):
    machine = SimulatedMachine(random_model(SIX, faint=FAINT, dtype=dtype), latency_model(6), monkeypatch)
    prompt, planner = random_tokens(12, SIX).tolist(), KnapSpec(machine.latency, share=1.0)
    generation = generate(machine, prompt, max_new_tokens=60, planner=planner)
    assert generation.drafted > 30 and generation.accepted > 0.9 * generation.drafted


def test_a_planner_starts_anew_with_each_text(monkeypatch):
    model, latency = random_model(SIX, faint=FAINT, epsilon=0.2), latency_model(6)
    machine, planner = SimulatedMachine(model, latency, monkeypatch), KnapSpec(latency, share=1.0)
    for seed in range(3):
        prompt = random_tokens(5 + 40 * seed, model.config, seed).tolist()
        plain = generate(machine, prompt, max_new_tokens=40)
        again = generate(machine, prompt, max_new_tokens=40, planner=planner)
        assert again.token_ids == plain.token_ids and again.drafted > 0

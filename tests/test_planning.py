"""The parts of knapspec.py where inputs are odd, and whole generations on a machine whose clock obeys a LatencyModel.

test_knapspec.py has the method by hand, tests/test_paper.py whole plans against METHOD.md.

case                                              tests (those without a file are here)
budget 0; all items cheaper than one unit; equal  test_odd_inputs_end_finite_and_the_same_each_time,
latencies; a window of 1 token; zero or NaN       test_prices_that_are_odd_lead_to_finite_plans, test_paper.py
up to 12 items, every subset enumerated           test_paper.py, test_the_best_survivor_is_close_to_the_best_of_all_subsets
a saved latency profile of something else         test_profile.py: test_a_profile_of_something_else_is_not_used
timing without warm-up; one layer timed           test_measuring_recovers_what_whole_forwards_take_once_warm
speculation slower than plain decoding            test_paper.py; test_cli.py: test_the_report_says_when_no_draft_pays
acceptance statistics                             test_decoding.py: test_only_the_accepted_prefix_counts
"""

import copy
import itertools
import math
from dataclasses import replace
from profile import LatencyModel, measure

import pytest
import torch

from decoding import Planner, generate
from knapspec import (
    Branches,
    KnapSpec,
    expected_tokens,
    integer_weights,
    knapsack,
    tokens_per_time,
)
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
FAINT = range(2, 10)


def _window(model, *, prompt_tokens=20, W=8, seed=0):
    """A cache of verified tokens and the states of the last W of them."""
    states = []
    cache, _ = prefilled(model, random_tokens(prompt_tokens, model.config, seed), capture=states, last=W)
    return cache, states


# --- Tokens per time, weights ----------------------------------------------------------------------------------------


def test_tokens_per_time_at_its_limits():
    assert expected_tokens(0.0, 5) == 1 and expected_tokens(1.0, 5) == 6 and expected_tokens(0.5, 2) == 1.75
    assert [tokens_per_time(alpha, 0, 1.0, 2.0) for alpha in (0.0, 0.5, 1.0)] == [0.5] * 3  # plain decoding, whatever the draft
    assert [tokens_per_time(alpha, 2, 1.0, 3.0) for alpha in (0.0, 0.5, 1.0)] == pytest.approx([1 / 5, 1.75 / 5, 3 / 5])
    near = [expected_tokens(1 - 10.0**-power, 8) for power in (3, 6, 9, 12)]  # no jump where the formula divides by almost nothing
    assert near == sorted(near) and near[-1] == pytest.approx(9, rel=1e-3)


@pytest.mark.parametrize("attention_s, mlp_s, max_ratio, attention, mlp", [
    (1e-3, 1e-3, None, 1, 1), (3e-3, 1e-3, None, 3, 1), (1e-3, 2.6e-3, None, 1, 3), (1.4e-3, 1e-3, None, 1, 1),
    (9e-3, 1e-3, 5, 5, 1), (1e-3, 9e-3, 5, 1, 5), (9e-3, 1e-3, None, 9, 1), (1e-15, 1e-15, None, 1, 1),
    (0.0, 1e-3, None, 1, 1000), (1e-3, 0.0, None, 1000, 1), (1e-3, 0.0, 5, 5, 1), (0.0, 0.0, None, 1, 1),
])  # fmt: skip
def test_the_cheaper_kind_weighs_one_and_the_other_its_multiple(attention_s, mlp_s, max_ratio, attention, mlp):
    assert integer_weights(attention_s, mlp_s, 3, max_ratio) == [attention, mlp] * 3


# --- The knapsack ----------------------------------------------------------------------------------------------------


def _alone(function, cache, x):
    """One branch's window by the model's own forward pass, token by token, over a copy of the cache that it then reads itself."""
    own = copy.copy(cache)
    own.keys, own.values, rows = cache.keys.clone(), cache.values.clone(), []
    for w in range(len(x)):
        own.length = cache.length - len(x) + w
        rows.append(function(x[w : w + 1], Context(own, 1)))
    return torch.cat(rows)


@pytest.mark.parametrize("W", [1, 5, 20])  # the last: all that is in the cache
def test_a_row_of_the_batch_is_what_the_model_computes_alone(W):
    model = random_model(SIX)
    cache, states = _window(model, W=W)
    before, others = cache.keys.clone(), torch.randn(2, W, 16, generator=torch.Generator().manual_seed(0))
    for item, sublayer in enumerate(model.sublayers):
        x = torch.cat((states[item][None], others))
        batch = sublayer(x.flatten(0, 1), Branches(cache, 3, W)).view(3, W, 16)
        torch.testing.assert_close(batch[0], states[item + 1], rtol=1e-4, atol=1e-4)  # one that skips nothing is the target
        for branch in (0, 1, 2):
            torch.testing.assert_close(batch[branch], _alone(sublayer, cache, x[branch]), rtol=1e-4, atol=1e-4)
    assert torch.equal(cache.keys, before)


def test_the_selection_decides_which_branches_go_on():
    model = random_model(SIX, faint=FAINT, epsilon=0.3)
    cache, states = _window(model)
    seen = []

    def two_that_saved_most(item, branches):
        seen.append((item, len(branches)))
        assert [branch.weight for branch in branches] == sorted({branch.weight for branch in branches})
        return branches[-2:]

    arguments = model.sublayers, [1] * 12, states, cache
    found, x = knapsack(*arguments, budget=6, tau=-1.0, select=two_that_saved_most)
    assert [item for item, _ in seen] == list(range(12)) and max(count for _, count in seen) == 3  # two, and each with one more skipped
    assert [branch.weight for branch in found] == [5, 6]
    every, _ = knapsack(*arguments, budget=6, tau=-1.0)
    same, _ = knapsack(*arguments, budget=6, tau=-1.0, select=lambda item, branches: branches)
    assert same == every and [branch.weight for branch in every] == list(range(7))
    for branch, states_of in zip(found, x):  # states and branches stay together
        again, context = states[0], Branches(cache, 1, 8)
        for item, sublayer in enumerate(model.sublayers):
            again = again if item in branch.skip_set else sublayer(again, context)
        torch.testing.assert_close(states_of, again, rtol=1e-4, atol=1e-4)
    none, x = knapsack(*arguments, budget=6, select=lambda item, branches: [])
    assert none == [] and x.shape == (0, 8, 16)


@pytest.mark.parametrize("change, survivors", [
    ({"budget": 0}, {0}), ({"W": 1}, set(range(7))), ({"weights": [1000, 1] * 6, "budget": 3003}, None),
    ({"states": 0.0}, set()), ({"states": math.nan}, set()), ({"states": math.inf}, set()), ({"tau": 1.01}, set()),
])  # fmt: skip
def test_odd_inputs_end_finite_and_the_same_each_time(change, survivors):
    model = random_model(SIX, faint=FAINT, epsilon=0.2)
    cache, states = _window(model, W=change.get("W", 4))
    if "states" in change:
        states = [torch.full_like(x, change["states"]) for x in states]
    options = {"budget": change.get("budget", 6), "tau": change.get("tau", 0.5)}
    runs = [knapsack(model.sublayers, change.get("weights", [1] * 12), states, cache, **options) for _ in range(2)]
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert all(math.isfinite(branch.cosine) for branch in runs[0][0]) and runs[0][1].isfinite().all()
    weights = {branch.weight for branch in runs[0][0]}
    assert weights == survivors if survivors is not None else {0, 1, 1000, 1001} <= weights


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


@pytest.mark.parametrize("attention, mlp", [(1, 1), (3, 1)])
def test_the_best_survivor_is_close_to_the_best_of_all_subsets(attention, mlp):
    """In tokens per time by shares of equal argmaxes. A cosine stands in for that share, so the best can be missed."""
    shares, weights = [], [attention, mlp] * 6
    for seed in range(4):
        model = random_model(SIX, seed=seed, faint=FAINT, epsilon=0.2)
        cache, states = _window(model, W=8, seed=seed)
        target = model.logits(states[-1]).argmax(-1)

        def best(found, model=model, target=target):
            rates = []
            for skip_set, x in found:
                alpha = (model.logits(x).argmax(-1) == target).double().mean().item()
                draft_s = sum(weights) - sum(weights[item] for item in skip_set)
                rates += [tokens_per_time(alpha, gamma, draft_s, sum(weights)) for gamma in range(9)]
            return max(rates)

        subsets = [found for found in _all_subsets(model, cache, states) if sum(weights[b] for b in found[0]) <= sum(weights) / 2]
        branches, x = knapsack(model.sublayers, weights, states, cache, budget=sum(weights) // 2)
        shares.append(best([(branch.skip_set, states) for branch, states in zip(branches, x)]) / best(subsets))
    assert max(shares) <= 1 + 1e-9 and min(shares) > 0.75 and sum(shares) / 4 > 0.85, shares  # measured: 0.83, and 0.89 or more


# --- Measuring -------------------------------------------------------------------------------------------------------


class _ColdMachine(SimulatedMachine):
    """Takes a second more for whatever it does for the first time. Its sublayers cannot be run one by one."""

    warm, sublayers = frozenset(), property(lambda self: pytest.fail("a sublayer was timed apart from its forward"))

    def __call__(self, tokens, cache, *, skip=frozenset(), choices=None, **options):
        run = skip, choices, len(tokens), cache.length
        self.now_s += run not in self.warm
        self.warm |= {run}
        return super().__call__(tokens, cache, skip=skip, choices=choices, **options)


def test_measuring_recovers_what_whole_forwards_take_once_warm(monkeypatch):
    wanted = latency_model(6, attention_s=(2e-3, 3e-6), mlp_s=7e-4, head_s=5e-4, per_token=0.1)
    model, other = random_model(SIX), latency_model(6, attention_s=(1e-3, 1e-6), mlp_s=3e-4, head_s=2e-4)
    model.table["other"] = [*model.sublayers, model.head]
    machine = _ColdMachine(model, replace(wanted, ways=(("other", other),)), monkeypatch)
    found = measure(machine, context_lengths=[16, 64, 256], gamma_max=4)
    assert [found.head(), found.mlp(), *found.attention_s] == pytest.approx([5e-4, 7e-4, 2e-3, 3e-6], rel=1e-6)
    for n, k in itertools.product((10, 500), range(1, 6)):
        assert found.verify(n, k) == pytest.approx(wanted.verify(n, k), rel=1e-6)
    (name, way), = found.ways
    assert (name, way.head(), way.mlp(), *way.attention_s) == ("other", *(pytest.approx(s, rel=1e-6) for s in (2e-4, 3e-4, 1e-3, 1e-6)))
    assert found.error < 1e-6


# --- Whole generations on a clock ------------------------------------------------------------------------------------


def _run(model, latency, monkeypatch, *, new=100, **options):
    """(plain seconds, generation) on a machine that takes what `latency` says; the text is the plain one."""
    machine, prompt = SimulatedMachine(model, latency, monkeypatch), random_tokens(12, model.config).tolist()
    plain = generate(machine, prompt, max_new_tokens=new)
    generation = generate(machine, prompt, max_new_tokens=new, planner=KnapSpec(latency, **options))
    assert generation.token_ids == plain.token_ids
    return plain.seconds["total"], generation


def test_drafts_that_are_always_right_come_as_fast_as_predicted(monkeypatch):
    """On a machine as the paper prices it: no head, and any number of tokens verified in one step."""
    latency = latency_model(6, head_s=0.0, per_token=0.0, attention_s=(1e-3, 0.0))
    plain_s, generation = _run(random_model(SIX, faint=FAINT), latency, monkeypatch, threshold=0.0, new=101)
    assert generation.accepted == generation.drafted > 60
    (_, plan, _), = generation.plans
    assert plan.skip_set < set(FAINT) and len(plan.skip_set) == 6 and plan.gamma == 8  # half of all time may be saved
    assert plan.tokens_per_second == pytest.approx(9 / (8 * 6e-3 + 12e-3))
    rate = 100 / (generation.seconds["draft"] + generation.seconds["verify"])
    assert rate == pytest.approx(plan.tokens_per_second, rel=0.02)  # the last round is a shorter one
    assert plain_s / generation.seconds["total"] > 1.4  # of 1.8, planning included


def test_planning_comes_with_the_rounds_and_takes_what_it_takes(monkeypatch):
    """Every `interval` rounds at the same price; the paper's planner has no other rule."""
    latency, spent = latency_model(6, attention_s=(1e-3, 0.0)), {}
    for interval in (10, 20, 100):
        _, generation = _run(random_model(SIX, faint=FAINT), latency, monkeypatch, interval=interval, gamma_max=1, threshold=0.0)
        spent[interval] = generation.seconds["plan"] / math.ceil(generation.rounds / interval)
    assert spent[10] == pytest.approx(spent[20]) == pytest.approx(spent[100]) and spent[10] > 12e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_planned_as_well(monkeypatch, dtype):
    machine = SimulatedMachine(random_model(SIX, faint=FAINT, dtype=dtype), latency_model(6), monkeypatch)
    prompt, planner = random_tokens(12, SIX).tolist(), KnapSpec(machine.latency, threshold=0.0)
    generation = generate(machine, prompt, max_new_tokens=60, planner=planner)
    assert generation.drafted > 30 and generation.accepted > 0.9 * generation.drafted


PRICES = {"nothing costs anything": (0.0, (0.0, 0.0)), "MLPs cost nothing": (0.0, (1e-3, 0.0)), "attention costs nothing": (1e-3, (0.0, 0.0)),
          "cheaper than any unit": (1e-15, (1e-15, 0.0)), "equal": (1e-3, (1e-3, 0.0))}  # fmt: skip


@pytest.mark.parametrize("mlp_s, attention_s", PRICES.values(), ids=PRICES.keys())
def test_prices_that_are_odd_lead_to_finite_plans(mlp_s, attention_s):
    latency = LatencyModel(0.0, mlp_s, attention_s, ((1, 0.0, 0.0),), 0.0)
    model, prompt = random_model(tiny_config(n_layer=4), faint=range(2, 6), epsilon=0.1), random_tokens(9, tiny_config()).tolist()
    plain = generate(model, prompt, max_new_tokens=20).token_ids
    runs = [generate(model, prompt, max_new_tokens=20, planner=KnapSpec(latency, interval=5, threshold=0.0)) for _ in range(2)]
    assert [run.token_ids for run in runs] == [plain] * 2
    plans = [[replace(plan, tokens_per_second=None) for _, plan, _ in run.plans] for run in runs]
    assert plans[0] == plans[1]
    assert all(math.isfinite(plan.tokens_per_second) for _, plan, _ in runs[0].plans)
    assert runs[0].drafted > 0 or mlp_s + attention_s[0] == 0


def test_states_that_are_not_finite_lead_to_plain_decoding():
    """The window may hold a state that overflowed where the logits did not."""

    class Overflowing(Planner):
        window = 8

        def plan(self, session):
            states, probs = session.window(8)
            session.window = lambda W: ([torch.full_like(x, math.nan) for x in states], probs)
            self.found = KnapSpec(latency_model(6), interval=1).plan(session)
            return self.found

    planner = Overflowing()
    generate(random_model(SIX, faint=FAINT), [1, 2, 3], max_new_tokens=3, planner=planner)
    assert planner.found.gamma == 0 and planner.found.tokens_per_second == pytest.approx(1 / 12e-3, rel=0.01)

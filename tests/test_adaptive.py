"""beyond/adaptive.py: whole generations on a machine whose clock obeys a LatencyModel, then each part by hand.

Texts of models as small as these soon repeat themselves, which the lookup would draft: it is left out where a test is about
something else. test_lookup.py has the lookup alone, test_properties.py the text under random options.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from beyond import adaptive
from beyond.adaptive import PARTS, Candidate, KnapSpecPlus, Prices, best_rate
from decoding import Plan, Round, generate
from knapspec import KnapSpec, knapsack
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
FLAT = latency_model(6, attention_s=(1e-3, 0.0), head_s=0.0)  # a step takes 12 ms at any length, each token more 2% of it
SLOPED = latency_model(6, attention_s=(1e-3, 1e-5), head_s=3e-3)
PROMPT = random_tokens(12, SIX).tolist()


class _Recorded(KnapSpecPlus):
    def observe(self, session, round):
        self.rounds = [*self.rounds, round] if session.generation.rounds > 1 else [round]
        super().observe(session, round)


def _run(model, machine_s, monkeypatch, *, new=100, prompt=PROMPT, profile=None, planner=None, temperature=0.0, seed=0, without=("lookup",),
         **options):  # fmt: skip
    """Plain and planned generation on a machine that takes what machine_s says, by default that is what the planner believes.

    solved: [(position, branches found)] of each knapsack.
    """
    machine, solved = SimulatedMachine(model, machine_s, monkeypatch), []

    def watched(sublayers, weights, states, cache, **options):
        found = knapsack(sublayers, weights, states, cache, **options)
        solved.append((cache.length, len(found[0])))
        return found

    monkeypatch.setattr(adaptive, "knapsack", watched)
    planner = planner or _Recorded(profile or machine_s, without=without, **options)
    plain, generation = (generate(machine, prompt, max_new_tokens=new, temperature=temperature, planner=p,
                                  rng=torch.Generator().manual_seed(seed)) for p in (None, planner))  # fmt: skip
    assert generation.token_ids == plain.token_ids or temperature > 0
    slower = generation.seconds["total"] / plain.seconds["total"]
    return SimpleNamespace(generation=generation, planner=planner, rounds=planner.rounds, solved=solved, slower=slower)


def _decisions(run):
    return [(position, plan.skip_set, plan.gamma, plan.choices) for position, plan, _ in run.generation.plans]


class _Misled:
    """Drafts another token than it would, up to a length: the window looks good, but drafts are rejected."""

    def __init__(self, model, until=math.inf):
        self.model, self.until = model, until

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, cache, *, skip=frozenset(), **options):
        logits = self.model(tokens, cache, skip=skip, **options)
        return logits.roll(1, -1) if skip and cache.length < self.until else logits


def test_drafts_that_are_always_right_come_as_fast_as_predicted(monkeypatch):
    run = _run(random_model(SIX, faint=FAINT), FLAT, monkeypatch, new=1 + 6 * 17)
    (_, plan, _), = run.generation.plans
    assert plan.skip_set < set(FAINT) and len(plan.skip_set) == 6 and plan.gamma == 16  # half of all time may be saved
    assert plan.tokens_per_second == pytest.approx(17 / (16 * 6e-3 + 1.32 * 12e-3), rel=0.01)
    assert run.generation.accepted == run.generation.drafted == 96 and len(run.solved) == 1
    rate = 6 * 17 / (run.generation.seconds["draft"] + run.generation.seconds["verify"])
    assert rate == pytest.approx(plan.tokens_per_second, rel=0.01) and run.slower < 0.6


@pytest.mark.parametrize("per_token, without", [(1.0, ()), (0.5, ("lookup",))])
def test_where_no_draft_can_win_none_is_made(monkeypatch, per_token, without):
    """Verification gains nothing, or only half, per token, and half of the time is the most that a draft may save."""
    machine_s = latency_model(6, per_token=per_token, attention_s=(1e-3, 0.0), head_s=2e-3)
    run = _run(random_model(SIX, faint=FAINT), machine_s, monkeypatch, without=without)
    assert run.generation.drafted == 0 and run.solved == [] and run.slower <= 1.02


@pytest.mark.parametrize("seed", range(2))
def test_a_model_that_needs_all_its_items_is_not_slowed_down(monkeypatch, seed):
    """The free look promises nothing, so that no knapsack is solved; without it they are, for nothing."""
    run = _run(random_model(SIX, seed=seed), FLAT, monkeypatch)
    assert run.solved == [] and run.generation.drafted == 0 and run.slower <= 1.02
    blind = _run(random_model(SIX, seed=seed), FLAT, monkeypatch, without=("lookup", "thrift"))
    assert len(blind.solved) >= 3 and blind.slower > 1.03


def test_few_tokens_left_are_not_worth_a_knapsack(monkeypatch):
    runs = [_run(random_model(SIX, faint=FAINT), FLAT, monkeypatch, new=new) for new in (2, 3, 4, 5, 6, 12)]
    assert [len(run.solved) for run in runs] == [0, 0, 0, 1, 1, 1] and max(run.slower for run in runs) <= 1.01


def test_later_plannings_keep_within_their_share(monkeypatch):
    run = _run(random_model(SIX, faint=FAINT, epsilon=0.1), FLAT, monkeypatch, new=250, interval=8)
    seconds = run.generation.seconds
    assert len(run.solved) >= 4 and 0.005 < seconds["plan"] / seconds["total"] <= 0.05


@pytest.mark.parametrize("gain, followed", [(0.02, None), (0.04, "half")])
def test_a_draft_must_promise_three_per_cent(monkeypatch, gain, followed):
    """The price of a draft in float16 at which its usual α, 0.98, promises so much over plain decoding."""
    low_s, high_s, verify_s = 1e-3, 12e-3, [FLAT.verify(0, k) for k in range(1, 18)]
    for _ in range(50):
        half_s = (low_s + high_s) / 2
        low_s, high_s = (half_s, high_s) if best_rate(0.98, half_s, verify_s)[0] * verify_s[0] > 1 + gain else (low_s, half_s)
    run = _run(_with_ways(half=None), _priced(half=half_s), monkeypatch, new=10, ways=["half"])
    assert run.rounds[0].plan.choices == (followed and (followed,) * 13)


def test_misled_drafts_are_given_up(monkeypatch):
    """What one branch shows counts for all that skip, and is tried again but seldom. The knapsack and 16 tokens are the loss."""
    model = _Misled(random_model(SIX, faint=FAINT))
    run = _run(model, latency_model(6), monkeypatch, new=200)
    drafted = [round.drafted for round in run.rounds]
    assert run.generation.accepted == 0 and drafted[0] == 16 and run.slower < 1.12
    assert sum(drafted[1:]) <= 6 and max(drafted[1:]) <= 2
    trusting = _run(model, latency_model(6), monkeypatch, new=30, without=("lookup", "posterior"))
    assert trusting.slower > 4  # it drafts sixteen tokens in every round


def test_a_text_that_begins_hard_is_tried_again(monkeypatch):
    """Without a new knapsack: what was seen fades, a draft of one token stands, and longer ones follow."""
    run = _run(_Misled(random_model(SIX, faint=FAINT), until=50), FLAT, monkeypatch, new=150, interval=1000)
    assert len(run.solved) == 1
    gammas = [plan.gamma for _, plan, _ in run.generation.plans]
    assert gammas[0] == 16 and 0 in gammas and gammas[-1] > 4 and run.generation.accepted > 50
    monkeypatch.setattr(adaptive, "FADE_UNUSED", 1.0)
    never = _run(_Misled(random_model(SIX, faint=FAINT), until=50), FLAT, monkeypatch, new=150, interval=1000)
    assert never.generation.accepted == 0 and never.generation.plans[-1][1].gamma == 0


@pytest.mark.parametrize("window", [1, 8, 40])
def test_what_is_expected_counts_as_eight_tokens_whatever_the_window(monkeypatch, window):
    """One item may be skipped, and its draft is rejected: α falls from about 1 to 8/9 for it, as for all that skip, and fades back a little."""
    machine_s, options = latency_model(6, per_token=0.0, attention_s=(1e-3, 0.0), head_s=0.0), {"budget": 1 / 12, "without": ("lookup", "thrift")}
    run = _run(_Misled(random_model(SIX, faint=FAINT)), machine_s, monkeypatch, new=3, prompt=PROMPT * 4, window=window, **options)
    candidate, = run.planner.candidates
    assert [round.drafted for round in run.rounds] == [1, 0] and candidate.tried == 0.997
    assert candidate.alpha == pytest.approx((8 / (8 + 0.997)) ** 2, abs=2e-3)


def test_a_candidate_by_hand():
    """A draft of five: three stand, the fourth is rejected, of the fifth nothing is known."""
    plain, whole = Candidate("full"), Candidate("int8")
    skipping = Candidate("int8", frozenset({2}), 0.5, (whole, plain))
    assert (plain.alpha, whole.alpha, skipping.alpha, plain.risk) == (1, 0.9, pytest.approx(0.45), 0)
    whole.observe(Round(0, Plan(), 5, 3, [1.0, 0.9, 0.8, 0.2, 0.0], 0.0, 0.0))
    assert whole.alpha == pytest.approx((8 * 0.9 + 3) / (8 + 4)) and skipping.prior == pytest.approx(0.5 * whole.alpha)
    assert whole.risk == pytest.approx((8 * 0.1 + 1) / (8 * 0.35 + 1.1))
    whole.fade(0.97)
    assert (whole.accepted, whole.tried, whole.doubt) == pytest.approx((3 * 0.97, 4 * 0.97, 1.1 * 0.97))
    plain.observe(Round(0, Plan(), 0, 0, [], 0.0, 0.0))  # nothing could be drafted
    plain.observe(Round(0, Plan(), 2, 2, [0.5, 0.5], 0.0, 0.0))  # all stand
    assert (plain.accepted, plain.tried) == (2, 8 + 2)


@pytest.mark.parametrize("confidence, pays", [(1.0, True), (0.1, False)])
def test_a_draft_goes_on_if_some_longer_one_pays(confidence, pays):
    """Behind two drafts, a third costs half a step to make and half to verify: more than the 0.9 tokens that it may bring.

    It pays only where the tokens behind it are verified for nothing, and the two are likely to stand.
    """
    session, skip_set = SimpleNamespace(cache=SimpleNamespace(length=0)), frozenset(range(2, 6))
    for at_nine, expected in [(1.5, pays), (4.0, False)]:
        verify_s = tuple((k, steps * 8e-3, 0.0) for k, steps in ((1, 1.0), (3, 1.0), (4, 1.5), (9, at_nine)))
        planner = KnapSpecPlus(gamma_max=8)
        planner.prices = Prices(replace(latency_model(4, head_s=0.0, attention_s=(1e-3, 0.0)), verify_s=verify_s), 4, True)
        planner.chosen, planner.verify_s = Candidate("full", skip_set, 0.9, (Candidate("full"),)), planner.prices.verify_s(0, 8)
        assert planner.keep_drafting(session, Plan(skip_set, 8, 0.9, 1 / 8e-3), [confidence] * 2) == expected


def _with_ways(**heads):
    """A model that needs all its items, with rows in its table that are exact, or change the logits."""
    model = random_model(SIX)
    for way, change in heads.items():
        model.table[way] = [*model.sublayers, model.head if change is None else lambda x, change=change: change(model.head(x))]
    return model


def _priced(**seconds):
    """FLAT, with ways in which a draft token with nothing skipped takes so many seconds."""
    ways = {way: latency_model(6, attention_s=(s / 12, 0.0), mlp_s=s / 12, head_s=0.0) for way, s in seconds.items()}
    return replace(FLAT, ways=tuple(ways.items()))


@pytest.mark.parametrize("without", [(), *((part,) for part in PARTS), PARTS], ids=lambda without: "+".join(without) or "none")
def test_each_part_can_be_left_out_and_the_text_stays(monkeypatch, without):
    """What a part does is done with it, and not without it, on a machine a little slower than its profile."""
    model = random_model(SIX, faint=FAINT, epsilon=0.1)
    model.table["half"] = [*model.sublayers, model.head]
    profile = _priced(half=9e-3)
    run = _run(model, _slower(profile, 1.1, 1.0), monkeypatch, new=120, profile=profile, without=without, ways=["half"])
    planner, generation = run.planner, run.generation
    did = {
        "prices": planner.prices.verify_factor > 1.05,
        "posterior": any(candidate.tried for candidate in planner.candidates),
        "renewal": any(confidence < 0.7 for round in run.rounds for confidence in round.confidences[:-1]),
        "thrift": planner.planned_s > 0,
        "pruning": max(branches for _, branches in run.solved) <= 4,
        "ways": any(plan.choices for _, plan, _ in generation.plans),
        "lookup": generation.given > 0,
    }
    assert did == {part: part not in without for part in PARTS} and generation.drafted > generation.given


@pytest.mark.parametrize("temperature, seed, machine_s", [(0.0, 0, FLAT), (0.0, 1, FLAT), (0.7, 2, FLAT), (0.0, 2, SLOPED), (0.7, 3, SLOPED)])
def test_without_all_parts_it_is_the_papers(monkeypatch, temperature, seed, machine_s):
    """The first plan always; where prices do not grow with the text, in which ours chooses anew each round, all of them."""
    machine = SimulatedMachine(random_model(SIX, faint=FAINT, epsilon=0.05, seed=seed), machine_s, monkeypatch)
    paper, ours = (generate(machine, PROMPT, max_new_tokens=60, temperature=temperature, planner=planner) for planner in
                   (KnapSpec(machine_s, interval=8), KnapSpecPlus(machine_s, gamma_max=8, interval=8, without=PARTS)))  # fmt: skip
    first, same = paper.plans[0][1], ours.plans[0][1]
    assert (same.skip_set, same.gamma, same.choices) == (first.skip_set, first.gamma, None) and first.gamma > 0
    assert (same.alpha, same.tokens_per_second) == pytest.approx((first.alpha, first.tokens_per_second))
    if machine_s is FLAT:
        paper, ours = ((run.token_ids, [(n, plan.skip_set, plan.gamma) for n, plan, _ in run.plans]) for run in (paper, ours))
        assert paper == ours and len(paper[1]) > 2


def test_of_ways_the_fastest_that_is_accepted_is_taken(monkeypatch):
    machine_s = _priced(slow=6e-3, fast=4e-3)
    run = _run(_with_ways(slow=None, fast=None), machine_s, monkeypatch, ways=["slow", "fast"])
    assert {plan.choices for _, plan, _ in run.generation.plans} == {("fast",) * 13}
    assert run.generation.accepted == run.generation.drafted > 80
    run = _run(_with_ways(slow=None, fast=lambda logits: logits.roll(1, -1)), machine_s, monkeypatch, ways=["slow", "fast"])
    assert [plan.choices[0] for _, plan, _ in run.generation.plans] == ["fast", "slow"] and run.rounds[0].accepted == 0
    assert all(round.accepted == round.drafted for round in run.rounds[1:]) and run.slower < 0.8


@pytest.mark.parametrize("way, value", [("half", math.nan), ("int8", math.inf)])
def test_a_way_that_overflows_ends_no_run(monkeypatch, way, value):
    """Its drafts are empty, and the first ones say enough."""
    machine_s, overflow = _priced(**{way: 4e-3, "sound": 6e-3}), {way: lambda logits: logits * value}
    run = _run(_with_ways(**overflow), machine_s, monkeypatch, ways=[way])
    gammas = [round.plan.gamma for round in run.rounds]
    assert run.generation.drafted == 0 and gammas[0] >= 4 and sum(gamma > 0 for gamma in gammas) <= 5 and run.slower < 1.04
    both = _run(_with_ways(**overflow, sound=None), machine_s, monkeypatch, ways=[way, "sound"])
    assert both.generation.accepted == both.generation.drafted > 80 and both.slower < 0.8


@pytest.mark.parametrize("free_s, taken", [(1e-9, "way"), (6e-3, "both"), (12e-3, "lookup")])
def test_the_text_drafts_where_it_promises_the_most(monkeypatch, free_s, taken):
    """A way that is right and costs nothing beats guesses of less than α = 1, one that costs a step is never drafted in."""
    run = _run(_with_ways(exact=None), _priced(exact=free_s), monkeypatch, prompt=PROMPT[:3] + PROMPT, without=(), ways=["exact"])
    generation = run.generation
    given = [round for round in run.rounds if round.plan.tokens]
    assert (generation.given > 0, generation.drafted > generation.given) == (taken != "way", taken != "lookup")
    assert generation.given == sum(round.drafted for round in given) and generation.given_accepted == sum(round.accepted for round in given)
    assert run.slower < 0.75 and all(round.draft_s == 0 for round in given)


def _slower(latency, verify, draft):
    """A machine on which a verification and a draft take so many times what `latency` says."""
    return replace(latency, head_s=draft * latency.head_s, mlp_s=draft * latency.mlp_s, attention_s=tuple(draft * s for s in latency.attention_s),
                   verify_s=tuple((k, verify * a, verify * b) for k, a, b in latency.verify_s))  # fmt: skip


def test_prices_converge_to_what_the_run_takes(monkeypatch):
    profile = latency_model(6)
    run = _run(random_model(SIX, faint=FAINT, epsilon=0.1), _slower(profile, 2.0, 1.5), monkeypatch, profile=profile, new=150)
    prices = run.planner.prices
    assert (prices.verify_factor, prices.draft_factor) == pytest.approx((2.0, 1.5), rel=1e-2) and len(run.rounds) > 50
    assert prices.draft_s(99, Candidate("full", {2, 5})) == pytest.approx(1.5 * profile.draft({2, 5}, 99, 6), rel=1e-2)
    assert prices.verify_s(99, 3) == pytest.approx([2 * profile.verify(99, k) for k in (1, 2, 3, 4)], rel=1e-2)


def test_one_round_moves_prices_a_tenth_of_the_way():
    prices, skipping = Prices(FLAT, 6, True), Candidate("full", frozenset({2, 3, 4}))
    prices.observe(Round(50, Plan(), 4, 1, [], draft_s=2 * 4 * 9e-3, verify_s=3 * 12e-3 * 1.08), skipping)
    assert (prices.draft_factor, prices.verify_factor) == pytest.approx((1.1, 1.2))
    for candidate, drafted in [(None, 4), (skipping, 0)]:  # a given draft, and one that overflowed, say nothing of a draft's price
        prices.observe(Round(50, Plan(), drafted, 0, [], draft_s=1.0, verify_s=1.2 * FLAT.verify(50, drafted + 1)), candidate)
        assert (prices.draft_factor, prices.verify_factor) == pytest.approx((1.1, 1.2))
    paper = Prices(latency_model(6, head_s=5e-3), 6, False)  # no head, and any verification is one step
    assert (paper.draft_s(0, skipping), paper.verify_s(0, 2)) == (pytest.approx(9e-3), pytest.approx([12e-3] * 3))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_when_sampling_no_plan_depends_on_the_clock(monkeypatch, temperature):
    model, profile = random_model(SIX, faint=FAINT, epsilon=0.1), latency_model(6)
    runs = [_run(model, _slower(profile, *factors), monkeypatch, profile=profile, temperature=temperature, without=(), new=70)
            for factors in ((1, 1), (1, 2), (3, 2))]  # fmt: skip
    same = [_decisions(run) == _decisions(runs[0]) and run.generation.token_ids == runs[0].generation.token_ids for run in runs]
    assert same == ([True] * 3 if temperature else [True, False, False]) and all(run.generation.accepted > 10 for run in runs)


@pytest.mark.parametrize("temperature", [0.0, 0.7])  # greedy on a machine that takes just what its profile says
def test_the_order_of_texts_does_not_matter(monkeypatch, temperature):
    model = random_model(SIX, faint=FAINT, epsilon=0.1)
    model.table["half"] = [*model.sublayers, model.head]
    machine_s = _priced(half=9e-3)
    texts = {name: {"prompt": random_tokens(20 + 20 * seed, SIX, seed).tolist(), "seed": seed} for seed, name in enumerate("AB")}

    def plans(order):
        planner, found = _Recorded(machine_s, ways=["half"]), {}
        for name in order:
            run = _run(model, machine_s, monkeypatch, planner=planner, temperature=temperature, new=70, **texts[name])
            found[name] = _decisions(run), run.generation.token_ids, run.generation.given
            assert run.generation.accepted > 10
        return found

    assert plans("AB") == plans("BA") == {**plans("A"), **plans("B")}


def test_prices_stay_from_text_to_text(monkeypatch):
    planner = _Recorded(FLAT, without=["lookup"])
    for factor in (1.0, 2.0):  # before the first text, and before the second
        run = _run(random_model(SIX), _slower(FLAT, 2.0, 2.0), monkeypatch, planner=planner)
        assert run.generation.plans[0][1].tokens_per_second == pytest.approx(1 / (factor * 12e-3), rel=1e-3)


@pytest.mark.parametrize("options, drafts", [({"gamma_max": 0}, False), ({"gamma_max": 1}, True), ({"window": 1}, True), ({"budget": 0.0}, False),
                                             ({"interval": 1, "tau": 0.9}, True), ({"without": (), "gamma_max": 1}, True)])  # fmt: skip
def test_every_option_ends_in_the_plain_text(monkeypatch, options, drafts):
    run = _run(random_model(SIX, faint=FAINT, epsilon=0.02), FLAT, monkeypatch, new=50, **options)
    assert (run.generation.drafted > 0) == drafts
    assert max(round.drafted for round in run.rounds) <= options.get("gamma_max", 16)
    assert options.get("gamma_max") != 0 or run.solved == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_planned_as_well(monkeypatch, dtype):
    machine = SimulatedMachine(random_model(SIX, faint=FAINT, dtype=dtype), FLAT, monkeypatch)
    generation = generate(machine, PROMPT, max_new_tokens=60, planner=KnapSpecPlus(FLAT, without=["lookup"]))
    assert generation.drafted > 30 and generation.accepted > 0.9 * generation.drafted


@pytest.mark.parametrize("mlp_s, attention_s", [(0.0, 1e-3), (1e-3, 0.0), (1e-15, 1e-15)])
def test_prices_that_are_odd_lead_to_finite_plans(monkeypatch, mlp_s, attention_s):
    machine_s = latency_model(6, mlp_s=mlp_s, attention_s=(attention_s, 0.0), head_s=0.0)
    runs = [_run(random_model(SIX, faint=FAINT, epsilon=0.02), machine_s, monkeypatch, new=40) for _ in range(2)]
    assert _decisions(runs[0]) == _decisions(runs[1]) and runs[0].generation.accepted > 10
    assert all(math.isfinite(plan.tokens_per_second) for _, plan, _ in runs[0].generation.plans)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_states_that_are_not_finite_lead_to_plain_decoding(monkeypatch, value):
    """The window may hold a state that overflowed where the logits did not."""

    class Overflowing(_Recorded):
        def plan(self, session):
            window = type(session).window
            session.window = lambda W: ([torch.full_like(x, value) for x in window(session, W)[0]], window(session, W)[1])
            return super().plan(session)

    for without in (["lookup"], ["lookup", "thrift"], PARTS):
        run = _run(random_model(SIX, faint=FAINT), FLAT, monkeypatch, new=20, planner=Overflowing(FLAT, without=without))
        assert len(run.rounds) == 19 and all(round.plan == Plan(tokens_per_second=pytest.approx(1 / 12e-3)) for round in run.rounds)


def test_the_free_look_by_hand():
    """Items 2, 3, 4, 5 turn the states by 40, 10, 30, 20 degrees, the outer ones by 1. An MLP counts 10 ms, an attention 20 ms.

    Squared distance over milliseconds: 0.468 / 20, 0.030 / 10, 0.268 / 20, 0.121 / 10. So 3 goes first, then 5, 4 and 2.
    """
    angles = [math.radians(degrees) for degrees in (0, 1, 2, 42, 52, 82, 102, 103, 104)]
    states = [torch.tensor([[math.cos(angle), math.sin(angle)]]) for angle in angles]
    found = adaptive.free_look(states, [0.02, 0.01], 0.5)
    assert [saved_s for _, saved_s in found] == pytest.approx([0.01, 0.02, 0.04, 0.06])  # the last is half of all: no more may be saved
    assert [far**2 for far, _ in found] == pytest.approx([0.030, 0.151, 0.419, 0.887], abs=1e-3)
    assert adaptive.free_look(states, [0.02, 0.01], 0.35) == found[:3] and adaptive.free_look(states, [0.02, 0.01], 0.0) == []


def test_few_branches_find_nearly_the_best():
    """By what their distance promises: four branches are followed of up to seven."""
    verify_s, shares = [FLAT.verify(0, k) for k in range(1, 18)], []

    def rate(alpha, weight):
        return best_rate(alpha, 12e-3 - weight * 1e-3, verify_s)[0]

    for seed in range(4):
        model, states, select = random_model(SIX, faint=FAINT, epsilon=0.1, seed=seed), [], adaptive.promising([1] * 12, 6, rate)
        cache, _ = prefilled(model, random_tokens(20, SIX, seed), capture=states, last=8)
        few, every = (knapsack(model.sublayers, [1] * 12, states, cache, budget=6, select=s)[0] for s in (select, None))
        assert 0 < len(few) <= 4 < len(every) == 7 and few == sorted(few, key=lambda branch: branch.weight)
        best = [max(rate(adaptive.alpha_at(adaptive.distance(b.cosine)), b.weight) for b in found) for found in (few, every)]
        shares.append(best[0] / best[1])
    assert min(shares) > 0.95 and max(shares) <= 1 + 1e-6, shares

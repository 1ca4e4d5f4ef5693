"""Draft & Verify, SWIFT, CLaSp: how they search, and that they find redundancy that is known."""

import math
import time

import pytest
import torch

from decoding import generate
from rivals import clasp, draft_verify, make_planner
from rivals.clasp import Clasp, most_similar_blocks
from rivals.common import Bayes, whole_blocks
from rivals.draft_verify import search_skip_set, skipped_above_half, speed
from rivals.swift import Swift, matchness, parallel_draft
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    prefilled,
    random_model,
    random_tokens,
)
from tests.testing_rivals import CONFIG, PROMPT, L, NoSuggestions, needs_bayes

# --- Draft & Verify --------------------------------------------------------------------------------------------------


def test_draft_verify_skips_coordinates_above_one_half():
    assert skipped_above_half([0.50, 0.51, 0.0, 1.0]) == {1, 3}


def test_draft_verify_keeps_the_faster_mask(monkeypatch):
    monkeypatch.setattr(draft_verify, "Bayes", NoSuggestions)
    for seconds, wanted in (((2.0, 1.6), {2, 6}), ((1.6, 2.0), {2, 3, 6, 7})):
        taken = iter(seconds)
        assert search_skip_set(5, lambda _, t=taken: 256 / next(t), iterations=0) == wanted


def test_draft_verify_search_is_timed_and_ends_with_its_budget(monkeypatch):
    """On a machine where odd blocks add nothing and forwards take what a profile says."""
    faint = whole_blocks(range(1, L, 2))
    machine = SimulatedMachine(random_model(CONFIG, faint=faint), latency_model(L), monkeypatch)
    monkeypatch.setattr(draft_verify, "Bayes", NoSuggestions)
    plain_s = sum(generate(machine, PROMPT, max_new_tokens=32).seconds["total"] for _ in range(2))
    rate = speed(machine, [PROMPT, PROMPT], whole_blocks((1, 3, 5)))
    assert rate > 1.2 * 64 / plain_s
    start_s = time.perf_counter()
    planner = make_planner("draft_verify", machine, calibration=[PROMPT], search_s=1e-6)
    assert planner.skip_set == whole_blocks((1, 3))  # the first guess, begun before the time was over
    assert planner.search_s == time.perf_counter() - start_s > 0
    planner = make_planner("draft_verify", machine, calibration=[PROMPT], search_s=0)
    assert (planner.skip_set, planner.search_s) == (whole_blocks((1, 3)), 0)


def test_draft_verify_searches_on_the_first_eight_prompts(monkeypatch):
    class Tokenizer:
        chat_template = None

        def encode(self, text):
            texts.append(text)
            return PROMPT[:3]

    texts = []
    monkeypatch.setattr(draft_verify, "Bayes", NoSuggestions)
    make_planner("draft_verify", random_model(CONFIG), tokenizer=Tokenizer(), search_s=1e-6)
    assert len(texts) == 8 and texts[0] == "Explain why the sky is blue."


# --- Bayesian optimisation -------------------------------------------------------------------------------------------


@needs_bayes
def test_bayesian_search_finds_the_better_half_of_a_line():
    wanted = {0, 3}
    scores = []

    def objective(skip_set):
        scores.append(-len(skip_set ^ wanted))
        return scores[-1]

    assert search_skip_set(2, objective, iterations=8) == wanted
    assert scores[:2] == [-2, -2] and max(scores) == 0 and len(scores) == 10


@needs_bayes
def test_bayesian_suggestions_are_points_of_the_cube_and_repeatable(capfd):
    suggestions = []
    for _ in range(2):
        bayes = Bayes(3, kappa=2.5, seed=0)
        bayes.register([1.0, 0.0, 0.0], 0.9)
        bayes.register([0.0, 1.0, 1.0], 0.1)
        bayes.register([0.0, 1.0, 1.0], 0.2)  # the same point scores differently on another text
        suggestions.append(bayes.suggest())
    assert suggestions[0] == suggestions[1] and len(suggestions[0]) == 3
    assert all(0 <= x <= 1 for x in suggestions[0])
    assert capfd.readouterr().out == ""  # the text's own


# --- SWIFT -----------------------------------------------------------------------------------------------------------


def test_swift_matchness_is_the_share_of_next_tokens_chosen():
    assert matchness([7, 9, 9], [5, 7, 7, 9]) == pytest.approx(2 / 3)


def test_swift_adopts_only_better_candidates():
    planner = Swift(L, bayes_interval=None, tolerance=2, max_score=0.95)
    first, second, third = frozenset({2, 3, 4}), frozenset({5, 6, 7}), frozenset({3, 4, 9})
    planner.consider(first, 2 / 3)
    planner.consider(second, 2 / 3)
    assert (planner.skip_set, planner.streak, planner.searching) == (first, 1, True)
    planner.consider(third, 0.96)
    assert (planner.skip_set, planner.streak, planner.searching) == (third, 0, False)


@pytest.mark.parametrize(("options", "count"), [({"tolerance": 2}, 3), ({"max_iterations": 5}, 6)])
def test_swift_ends_its_search_after_tolerance_or_iterations(options, count):
    planner, tried = Swift(L, bayes_interval=None, **options), 0
    while planner.searching:
        planner.consider(frozenset({2}), 0.0)
        tried += 1
    assert tried == count
    assert planner.skip_set == whole_blocks((1, 3))  # a score of 0 is not adopted


def test_swift_candidates_have_a_fixed_size_and_spare_the_first_and_last_block():
    planner = Swift(L, bayes_interval=None)
    assert planner.skip_set == whole_blocks((1, 3))
    candidates = [planner.candidate() for _ in range(60)]
    assert {len(c) for c in candidates} == {3}
    assert frozenset.union(*candidates) == frozenset(range(2, 10))
    assert len(set(candidates)) > 30


def test_swift_asks_the_bayesian_optimiser_every_so_often_and_tells_it_all():
    class Suggesting(NoSuggestions):
        def suggest(self):
            return [0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.7, 0.0]

    planner = Swift(L, bayes_interval=None)
    planner.bayes, planner.bayes_interval = Suggesting(8), 3
    suggested = frozenset({3, 5, 8})
    taken = []
    for _ in range(6):
        taken.append(planner.candidate())
        planner.consider(taken[-1], 0.25)
    assert [i for i, candidate in enumerate(taken) if candidate == suggested] == [2, 5]
    assert len(planner.bayes.seen) == 6
    assert planner.bayes.seen[2] == ([0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0], 0.25)


def test_swift_scores_a_candidate_in_one_pass_that_leaves_the_cache_alone():
    model, skip_set = random_model(CONFIG), frozenset({3, 4, 8})
    cache, _ = prefilled(model, PROMPT, room=9)
    keys, values = cache.keys.clone(), cache.values.clone()
    logits = parallel_draft(model, cache, torch.tensor(PROMPT[20:30]), 20, skip_set)
    assert cache.length == 40
    assert torch.equal(cache.keys[:, :, :40], keys[:, :, :40]) and torch.equal(cache.values[:, :, :40], values[:, :, :40])
    cache.length = 20
    for token, row in zip(PROMPT[20:30], logits, strict=True):  # the draft, one token at a time
        torch.testing.assert_close(model(torch.tensor([token]), cache, skip=skip_set)[0], row, rtol=1e-4, atol=1e-5)
        cache.length += 1


def test_swift_finds_the_redundant_sublayers_across_prompts():
    model, faint = random_model(CONFIG, faint=(3, 4, 8)), frozenset({3, 4, 8})
    planner = Swift(L, bayes_interval=None)
    generate(model, PROMPT, max_new_tokens=33, planner=planner)
    assert planner.iterations == 0 and planner.search_s == 0  # too few tokens to score on
    prompts = (random_tokens(10, CONFIG, seed=i).tolist() for i in range(20))
    while planner.searching:
        generate(model, next(prompts), max_new_tokens=60, planner=planner)
    assert (planner.skip_set, planner.best_score) == (faint, 1.0)
    assert 27 < planner.iterations < 300 and planner.search_s > 0  # more than one prompt's
    generation = generate(model, PROMPT, max_new_tokens=20, planner=planner)
    assert generation.accepted == generation.drafted > 0


# --- CLaSp -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degrees", "n_skipped", "wanted"), [((40, 2, 30), 1, {1}), ((10, 4, -10), 2, {1, 2}), ((0, 0), 1, {1})])
def test_clasp_dynamic_program_on_rotations(degrees, n_skipped, wanted):
    """Blocks that turn the plane. The second case is one that the program does not solve best; the third is a tie."""
    turns = []
    for degree in degrees:
        cos, sin = math.cos(math.radians(degree)), math.sin(math.radians(degree))
        turns.append(torch.tensor([[cos, sin], [-sin, cos]]))
    states = [torch.tensor([1.0, 0.0])]
    for turn in turns:
        states.append(states[-1] @ turn)
    assert most_similar_blocks(torch.stack(states), lambda i, x: x @ turns[i], n_skipped) == wanted


@pytest.mark.parametrize("faint", [(1, 3, 4), (0, 1, 5)])
def test_clasp_skips_the_blocks_that_add_nothing_wherever_they_are(faint):
    model = random_model(CONFIG, faint=whole_blocks(faint))
    generation = generate(model, PROMPT, max_new_tokens=40, planner=Clasp(L, threshold=0.0))
    assert [plan.skip_set for _, plan, _ in generation.plans] == [frozenset(), whole_blocks(faint)]
    assert generation.accepted == generation.drafted


def test_clasp_plans_after_the_first_round_and_then_at_intervals(monkeypatch):
    rounds = []

    class Watched(Clasp):
        def plan(self, session):
            rounds.append(0)
            return super().plan(session)

    def noted(states, run_block, n_skipped):
        for i in range(L):  # on the target's own states a block gives the target's next, for each of several branches
            torch.testing.assert_close(run_block(i, states[[i, 0, i]])[[0, 2]], states[[i + 1] * 2], rtol=1e-4, atol=1e-5)
        rounds[-1] = n_skipped
        return frozenset({1})

    monkeypatch.setattr(clasp, "most_similar_blocks", noted)
    generate(random_model(CONFIG), PROMPT, max_new_tokens=60, planner=Watched(L, interval=3))
    assert rounds[:11] == [0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3]

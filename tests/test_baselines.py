"""The rivals: each changes no text, decides constructed cases as its paper says, and finds redundancy that is known."""

import importlib.util
import itertools
import math
import sys
import time

import pytest
import torch

from decoding import Plan, Planner, accept, draft, generate
from knapspec import KnapSpec
from model import KVCache
from rivals import baselines
from rivals.baselines import (
    ASD,
    DEL,
    METHODS,
    Bayes,
    Clasp,
    DraftVerify,
    Kangaroo,
    LayerSkip,
    Rival,
    Swift,
    make_planner,
    whole_blocks,
)
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    prefilled,
    random_model,
    random_tokens,
    tiny_config,
)

L = 6
CONFIG = tiny_config(n_layer=L)
PROMPT = random_tokens(40, CONFIG).tolist()
RIVALS = {
    "layerskip": lambda: LayerSkip(L),
    "kangaroo": lambda: Kangaroo(L),
    "del": lambda: DEL(L),
    "asd": lambda: ASD(similarity=0.5),
    "draft_verify": lambda: DraftVerify(frozenset({2, 5, 6})),
    "swift": lambda: Swift(L, context=4, bayes_interval=None),
    "clasp": lambda: Clasp(L, interval=2),
}
needs_bayes = pytest.mark.skipif(importlib.util.find_spec("bayes_opt") is None, reason="bayesian-optimization is not installed")


class Confident:
    """In place of a model: the confidence of each drafted token in turn; every token is 0."""

    device = torch.device("cpu")

    def __init__(self, confidences, V=50):
        self.rows = [torch.full((1, V), (1 - c) / (V - 1)).index_fill_(1, torch.tensor([0]), c).log() for c in confidences]

    def __call__(self, tokens, cache, **options):
        return self.rows.pop(0)


def submitted(planner, confidences):
    """How many tokens a planner submits when drafting with these confidences."""
    plan, cache = Plan(planner.skip_set, planner.gamma), KVCache(CONFIG, 1)
    return len(draft(Confident(confidences), cache, 0, plan, lambda c: planner.keep_drafting(None, plan, c), 0.0, 1.0, None)[0])


# --- All of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", RIVALS.values(), ids=RIVALS)
def test_greedy_text_is_that_of_plain_decoding(make):
    model, planner = random_model(CONFIG), make()
    for prompt, new in ((PROMPT, 40), (PROMPT[:1], 15)):  # a planner outlives a prompt
        wanted = generate(model, prompt, max_new_tokens=new).token_ids
        generation = generate(model, prompt, max_new_tokens=new, planner=planner)
        assert generation.token_ids == wanted
        assert generation.drafted > 0


@pytest.mark.parametrize("make", RIVALS.values(), ids=RIVALS)
def test_sampled_text_depends_on_the_seed_alone(make):
    model = random_model(CONFIG)
    runs = [generate(model, PROMPT, max_new_tokens=12, temperature=0.8, top_p=0.9, planner=make(),
                     rng=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]  # fmt: skip
    assert runs[0].token_ids == runs[1].token_ids != runs[2].token_ids
    assert runs[0].drafted > 0


def test_make_planner_knows_every_method_and_no_other(monkeypatch):
    model, latency = random_model(CONFIG), latency_model(L)
    machine = SimulatedMachine(model, latency, monkeypatch)
    monkeypatch.setattr(baselines, "Bayes", lambda n, **_: None)
    kinds = {"autoregressive": Planner, "layerskip": LayerSkip, "kangaroo": Kangaroo, "del": DEL, "asd": ASD,
             "draft_verify": DraftVerify, "swift": Swift, "clasp": Clasp, "knapspec": KnapSpec}  # fmt: skip
    monkeypatch.setattr(baselines, "search_skip_set", lambda *_, **__: frozenset({2}))
    assert {name: type(make_planner(name, machine, latency, calibration=[PROMPT])) for name in METHODS} == kinds
    with pytest.raises(ValueError, match="unknown method 'medusa': choose one of autoregressive, layerskip"):
        make_planner("medusa", model, latency)
    with pytest.raises(ValueError, match="at least 3 blocks; this one has 2"):
        make_planner("clasp", random_model(tiny_config(n_layer=2)), latency)
    with pytest.raises(ValueError, match="pass calibration"):
        make_planner("draft_verify", model, latency)


def test_gamma_max_bounds_each_methods_own_longest_draft():
    model, latency = random_model(CONFIG), latency_model(L)
    own = {name: make_planner(name, model, latency).gamma for name in ("layerskip", "kangaroo", "del", "asd", "clasp")}
    assert own == {"layerskip": 6, "kangaroo": 6, "del": 17, "asd": 12, "clasp": 10}
    bounded = {name: make_planner(name, model, latency, gamma_max=8).gamma for name in own}
    assert bounded == {"layerskip": 6, "kangaroo": 6, "del": 8, "asd": 8, "clasp": 8}


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    for name in ("swift", "draft_verify"):
        with pytest.raises(ValueError, match="pip install bayesian-optimization$"):
            make_planner(name, random_model(CONFIG), latency_model(L), calibration=[PROMPT])


# --- LayerSkip, Kangaroo ---------------------------------------------------------------------------------------------


def test_layerskip_exits_after_a_quarter_of_the_blocks():
    assert LayerSkip(32).skip_set == frozenset(range(16, 64))  # Llama-2-7B: E = 8
    assert submitted(LayerSkip(32), [0.1] * 9) == 6


def test_layerskip_commits_the_accepted_drafts_and_a_correction():
    def one_hot(*tokens):
        return torch.eye(4)[list(tokens)]

    assert accept(one_hot(0, 3, 1, 2), [0, 1, 2], one_hot(0, 1, 2), torch.Generator()) == (1, 3)
    target_probs, draft_probs = torch.tensor([[0.5, 0.3, 0.2]] * 2), torch.tensor([[0.2, 0.6, 0.2]])
    rng = torch.Generator().manual_seed(0)
    outcomes = [accept(target_probs, [1], draft_probs, rng) for _ in range(2000)]
    assert sum(n for n, _ in outcomes) / 2000 == pytest.approx(0.5, abs=0.04)  # 3.6 standard deviations
    assert {token for n, token in outcomes if n == 0} == {0}


@pytest.mark.parametrize(("confidences", "count"), [([0.9, 0.7, 0.5, 0.99], 3), ([0.3], 1), ([0.9] * 9, 6)])
def test_kangaroo_submits_up_to_the_first_unsure_token(confidences, count):
    assert submitted(Kangaroo(32), confidences) == count


@pytest.mark.parametrize("planner", [LayerSkip(L, exit_layer=2), Kangaroo(L, threshold=0.0)])
def test_exits_after_which_nothing_is_added_are_always_right(planner):
    model = random_model(CONFIG, faint=range(4, 2 * L))
    generation = generate(model, PROMPT, max_new_tokens=50, planner=planner)
    assert generation.accepted == generation.drafted == 42  # 7 rounds of 6 + 1 behind the prefill's token


# --- DEL -------------------------------------------------------------------------------------------------------------


def test_del_takes_exit_and_length_with_the_most_tokens_per_layer():
    unknown = [math.nan] * 7
    alphas = {2: 0.5, 4: 0.9}
    choose = baselines.most_tokens_per_layer
    known = [alphas.get(layer, math.nan) for layer in range(1, 8)]
    assert choose(known, 4) == (4, 3)
    assert baselines.expected_tokens(0.9, 3) / (8 + 3 * 4) == pytest.approx(0.17195)
    known[3] = 0.6
    assert choose(known, 4) == (2, 1)
    assert choose(unknown, 4) == choose([0.0] * 7, 4) == (1, 0)
    assert choose([1.0, *unknown[:3]], 2) == (1, 1)
    assert choose([0.2, 1.0, 1.0], 2) == (2, 1)  # of equal alphas the smallest exit


def test_del_stops_midway_between_its_confidences_at_matches_and_misses():
    planner = Rival()
    planner.gamma = 5
    planner.threshold = baselines.midway(*torch.tensor([2.0, 4.0, 1.8, 2.0])).item()
    assert planner.threshold == pytest.approx(0.7)
    assert submitted(planner, [0.9, 0.71, 0.69, 0.9]) == 3
    planner.threshold = baselines.midway(*torch.tensor([2.0, 0.0, 1.8, 0.0])).item()  # no miss yet
    assert submitted(planner, [0.1] * 9) == 5


def test_del_counts_columns_up_to_the_exit_layers_first_mismatch():
    assert baselines.counted_columns([True, False, True]) == 2
    assert baselines.counted_columns([True, True]) == 2
    assert baselines.counted_columns([False]) == 1


def test_del_shadow_tokens_are_those_of_the_exits():
    model, states = random_model(CONFIG), []
    _, _ = prefilled(model, PROMPT, capture=states)
    tokens, confidences = baselines.shadow_tokens(model, torch.stack(states[2:-1:2]))
    for exit_layer in range(1, L):
        _, logits = prefilled(model, PROMPT, skip=whole_blocks(range(exit_layer, L)))
        assert torch.equal(tokens[exit_layer - 1], logits.argmax(-1))
        torch.testing.assert_close(confidences[exit_layer - 1], torch.softmax(logits, -1).max(-1).values)


class WatchedDEL(DEL):
    def __init__(self):
        super().__init__(L)
        self.totals, self.rounds = [], []

    def plan(self, session):
        plan = super().plan(session)
        self.totals.append((self.counts[0] + self.counts[1]).tolist())
        return plan

    def observe(self, session, round):
        self.rounds.append(round)


def test_del_counts_decay_and_restart_with_each_prompt():
    model = random_model(CONFIG, faint=range(6, 2 * L))
    planner = WatchedDEL()
    for prompt, from_prompt in ((PROMPT, 32), (PROMPT[:7], 7)):
        planner.totals, planner.rounds = [], []
        generate(model, prompt, max_new_tokens=40, planner=planner)
        assert planner.rounds[0].plan.skip_set == whole_blocks(range(1, L)) and planner.rounds[0].drafted == 1
        wanted = 0.0
        for i, totals in enumerate(planner.totals):
            if i > 0:
                wanted = 0.95 * wanted + planner.rounds[i - 1].accepted + 1 + (from_prompt if i == 1 else 0)
            assert totals == pytest.approx([wanted] * (L - 1))
        assert i > 1


def test_del_counts_no_position_behind_the_exits_mismatch_when_sampling():
    """A sampled draft can stand where the exit's most likely token is not the target's."""
    planner = WatchedDEL()
    generate(random_model(CONFIG, faint=range(6, 2 * L), epsilon=0.3), PROMPT, max_new_tokens=60, planner=planner,
             temperature=2.0, rng=torch.Generator().manual_seed(0))  # fmt: skip
    totals = [row[0] for row in planner.totals]
    new = [round(after - 0.95 * before, 6) for before, after in itertools.pairwise(totals[1:])]
    shown = [r.accepted + 1 for r in planner.rounds[1 : len(new) + 1]]
    assert all(1 <= a <= b for a, b in zip(new, shown, strict=True)) and sum(new) < sum(shown)


def test_del_finds_the_exit_after_which_nothing_is_added():
    generation = generate(random_model(CONFIG, faint=range(6, 2 * L)), PROMPT, max_new_tokens=60, planner=DEL(L))
    assert [(plan.skip_set, plan.gamma) for _, plan, _ in generation.plans] == [
        (whole_blocks(range(1, L)), 1),
        (whole_blocks(range(3, L)), 17),
    ]
    assert generation.plans[-1][1].alpha == 1.0


# --- Draft on the Fly, Draft & Verify --------------------------------------------------------------------------------


def test_asd_skips_attention_above_the_threshold_alone():
    assert ASD(similarity=0.95).similar([0.20, 0.99, 0.97, 0.80]) == {2, 4}  # attention of the blocks 1 and 2, from 0


def test_asd_finds_attention_that_adds_nothing_and_keeps_mlps_that_do_not():
    model = random_model(CONFIG, faint=(3, 4, 8))
    generation = generate(model, PROMPT, max_new_tokens=20, planner=ASD())
    assert {plan.skip_set for _, plan, _ in generation.plans} == {frozenset({4, 8})}
    assert generation.accepted == generation.drafted > 0


def test_asd_does_not_draft_where_nothing_may_be_skipped():
    generation = generate(random_model(CONFIG), PROMPT, max_new_tokens=20, planner=ASD(similarity=1.0))
    assert (generation.drafted, generation.rounds) == (0, 19)


def test_draft_verify_threshold_follows_the_share_accepted():
    planner, short = DraftVerify(frozenset()), []
    for _ in range(4):
        planner.adapt(4, 4)
        short.append(planner.threshold)
    assert short == pytest.approx([0.601, 0.602, 0.603, 0.602])
    planner = DraftVerify(frozenset())
    for drafted in (4, 4, 4, 12):
        planner.adapt(drafted, drafted)
    assert planner.threshold == pytest.approx(0.603)  # a full draft needs no lower threshold


def test_draft_verify_threshold_outlives_a_prompt_and_the_share_accepted_does_not():
    class Watched(DraftVerify):
        def plan(self, session):
            plan = super().plan(session)
            states.append((session.generation.rounds, self.rate, self.threshold))
            return plan

    states, planner = [], Watched(frozenset({4}))
    for _ in range(2):
        generate(random_model(CONFIG), PROMPT, max_new_tokens=20, planner=planner)
    second = next(i for i, (rounds, *_) in enumerate(states) if rounds == 0 and i > 0)
    assert states[0][1:] == (0.0, 0.6)
    assert states[second - 1][1] > 0 == states[second][1]
    assert states[second][2] == pytest.approx(states[second - 1][2], abs=0.0011) != 0.6  # one more step at most


def test_draft_verify_skips_coordinates_above_one_half():
    assert baselines.skipped_above_half([0.50, 0.51, 0.0, 1.0]) == {1, 3}


class NoSuggestions:
    """In place of Bayes where the first guesses are all that is tried."""

    def __init__(self, n, **_):
        self.seen = []

    def register(self, point, score):
        self.seen.append((point, score))

    def suggest(self):
        raise AssertionError("no suggestion was wanted")


def test_draft_verify_keeps_the_faster_mask(monkeypatch):
    monkeypatch.setattr(baselines, "Bayes", NoSuggestions)
    for seconds, wanted in (((2.0, 1.6), {2, 6}), ((1.6, 2.0), {2, 3, 6, 7})):
        taken = iter(seconds)
        assert baselines.search_skip_set(5, lambda _, t=taken: 256 / next(t), iterations=0) == wanted


def test_draft_verify_search_is_timed_and_ends_with_its_budget(monkeypatch):
    """On a machine where odd blocks add nothing and forwards take what a profile says."""
    faint = whole_blocks(range(1, L, 2))
    machine = SimulatedMachine(random_model(CONFIG, faint=faint), latency_model(L), monkeypatch)
    monkeypatch.setattr(baselines, "Bayes", NoSuggestions)
    plain_s = sum(generate(machine, PROMPT, max_new_tokens=32).seconds["total"] for _ in range(2))
    rate = baselines.speed(machine, [PROMPT, PROMPT], whole_blocks((1, 3, 5)))
    assert rate > 1.2 * 64 / plain_s
    start_s = time.perf_counter()
    planner = make_planner("draft_verify", machine, None, calibration=[PROMPT], search_s=1e-6)
    assert planner.skip_set == whole_blocks((1, 3))  # the first guess, begun before the time was over
    assert planner.search_s == time.perf_counter() - start_s > 0
    planner = make_planner("draft_verify", machine, None, calibration=[PROMPT], search_s=0)
    assert (planner.skip_set, planner.search_s) == (whole_blocks((1, 3)), 0)


def test_draft_verify_searches_on_the_first_eight_prompts(monkeypatch):
    class Tokenizer:
        chat_template = None

        def encode(self, text):
            texts.append(text)
            return PROMPT[:3]

    texts = []
    monkeypatch.setattr(baselines, "Bayes", NoSuggestions)
    make_planner("draft_verify", random_model(CONFIG), None, tokenizer=Tokenizer(), search_s=1e-6)
    assert len(texts) == 8 and texts[0] == "Explain why the sky is blue."


@needs_bayes
def test_bayesian_search_finds_the_better_half_of_a_line():
    wanted = {0, 3}
    scores = []

    def objective(skip_set):
        scores.append(-len(skip_set ^ wanted))
        return scores[-1]

    assert baselines.search_skip_set(2, objective, iterations=8) == wanted
    assert scores[:2] == [-2, -2] and max(scores) == 0 and len(scores) == 10


# --- SWIFT -----------------------------------------------------------------------------------------------------------


def test_swift_matchness_is_the_share_of_next_tokens_chosen():
    assert baselines.matchness([7, 9, 9], [5, 7, 7, 9]) == pytest.approx(2 / 3)


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
    logits = baselines.parallel_draft(model, cache, torch.tensor(PROMPT[20:30]), 20, skip_set)
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
    assert baselines.most_similar_blocks(torch.stack(states), lambda i, x: x @ turns[i], n_skipped) == wanted


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

    monkeypatch.setattr(baselines, "most_similar_blocks", noted)
    generate(random_model(CONFIG), PROMPT, max_new_tokens=60, planner=Watched(L, interval=3))
    assert rounds[:11] == [0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3]

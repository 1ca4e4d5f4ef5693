"""LayerSkip, Kangaroo, DEL: where a draft exits, and how long it is, as their papers say."""

import itertools
import math

import pytest
import torch

from decoding import accept, generate
from knapspec import expected_tokens
from rivals.common import Rival, whole_blocks
from rivals.del_ import (
    DEL,
    counted_columns,
    midway,
    most_tokens_per_layer,
    shadow_tokens,
)
from rivals.kangaroo import Kangaroo
from rivals.layerskip import LayerSkip
from tests.testing_models import prefilled, random_model
from tests.testing_rivals import CONFIG, PROMPT, L, submitted

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
    known = [alphas.get(layer, math.nan) for layer in range(1, 8)]
    assert most_tokens_per_layer(known, 4) == (4, 3)
    assert expected_tokens(0.9, 3) / (8 + 3 * 4) == pytest.approx(0.17195)
    known[3] = 0.6
    assert most_tokens_per_layer(known, 4) == (2, 1)
    assert most_tokens_per_layer(unknown, 4) == most_tokens_per_layer([0.0] * 7, 4) == (1, 0)
    assert most_tokens_per_layer([1.0, *unknown[:3]], 2) == (1, 1)
    assert most_tokens_per_layer([0.2, 1.0, 1.0], 2) == (2, 1)  # of equal alphas the smallest exit


def test_del_stops_midway_between_its_confidences_at_matches_and_misses():
    planner = Rival()
    planner.gamma = 5
    planner.threshold = midway(*torch.tensor([2.0, 4.0, 1.8, 2.0])).item()
    assert planner.threshold == pytest.approx(0.7)
    assert submitted(planner, [0.9, 0.71, 0.69, 0.9]) == 3
    planner.threshold = midway(*torch.tensor([2.0, 0.0, 1.8, 0.0])).item()  # no miss yet
    assert submitted(planner, [0.1] * 9) == 5


def test_del_counts_columns_up_to_the_exit_layers_first_mismatch():
    assert counted_columns([True, False, True]) == 2
    assert counted_columns([True, True]) == 2
    assert counted_columns([False]) == 1


def test_del_shadow_tokens_are_those_of_the_exits():
    model, states = random_model(CONFIG), []
    _, _ = prefilled(model, PROMPT, capture=states)
    tokens, confidences = shadow_tokens(model, torch.stack(states[2:-1:2]))
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

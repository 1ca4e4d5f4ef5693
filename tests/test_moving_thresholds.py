"""Draft on the Fly, Draft & Verify: attention that may go, and a threshold that follows the share accepted."""

import pytest

from decoding import generate
from rivals.asd import ASD
from rivals.draft_verify import DraftVerify
from tests.testing_models import random_model
from tests.testing_rivals import CONFIG, PROMPT


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

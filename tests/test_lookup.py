"""beyond/lookup.py: what is guessed, what is learnt of guesses, and that a guess changes no text."""

from dataclasses import replace

import pytest

from beyond.lookup import LONGEST, USUAL, Lookup
from beyond.uniform import Uniform
from decoding import Plan, Planner, generate
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    random_tokens,
    tiny_config,
)

CONFIG = tiny_config(vocab_size=101)


def test_what_followed_the_last_tokens_is_guessed():
    text = [7, 1, 2, 3, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 1, 2, 3]
    tokens, alpha = Lookup().guess(text)
    assert tokens == tuple(range(50, 66)) and len(tokens) == LONGEST and alpha == pytest.approx(USUAL[3])
    assert Lookup().guess([1, 2, 3, 4]) == ((), 0.0) == Lookup().guess([5]) == Lookup().guess([5, 5][:1])


def test_the_longest_match_counts_and_of_equals_the_latest():
    assert Lookup().guess([9, 1, 2, 3, 60, 8, 2, 3, 70, 9, 1, 2, 3])[0][0] == 60  # four tokens match there, two at the later place
    assert Lookup().guess([1, 2, 60, 4, 1, 2, 70, 5, 1, 2])[0][0] == 70


def test_a_guess_that_reaches_the_present_goes_on_with_itself():
    assert Lookup().guess([4, 1, 2, 3, 1, 2, 3, 1, 2, 3])[0] == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1)
    assert Lookup().guess([6, 6, 6])[0] == (6,) * LONGEST
    assert Lookup().guess([6, 6])[0] == ()  # the pair itself stands nowhere before


def test_tokens_that_came_one_by_one_are_found_like_those_that_came_at_once():
    text, lookup = random_tokens(400, tiny_config(vocab_size=5)).tolist(), Lookup()
    for end in range(1, 401):
        assert lookup.guess(text[:end])[0] == Lookup().guess(text[:end])[0]
    for end in (401, 405, 406, 420):  # several at a time, as a round brings them
        longer = text + text[:20]
        assert lookup.guess(longer[:end])[0] == Lookup().guess(longer[:end])[0]


def test_each_length_of_match_learns_from_its_own_guesses_alone():
    """Drafted or not: the tokens that came tell how much of the last guess was right."""
    lookup, text = Lookup(), [90, 91, 60, 61, 62, 90, 91]
    before = dict(lookup.seen)
    assert lookup.guess(text)[0][:4] == (60, 61, 62, 90)
    lookup.guess([*text, 60, 61, 5])  # two were right, the third was not, of the others nothing is known
    accepted, tried = before[2]
    assert lookup.seen[2] == pytest.approx((0.9 * accepted + 2, 0.9 * tried + 3))
    assert {size: lookup.seen[size] for size in USUAL if size != 2} == {size: before[size] for size in USUAL if size != 2}


def test_guesses_that_are_wrong_lose_their_credit_and_right_ones_gain_it():
    text, lookup, chances = [], Lookup(), []
    for i in range(40):  # a pair that is followed by something else each time
        text += [90, 91]
        guess, alpha = lookup.guess(text)
        assert not guess or (lookup.size, guess[0]) == (2, i - 1)
        chances += [alpha] if guess else []
        text += [i]
        lookup.guess(text)
    assert chances[0] == pytest.approx(USUAL[2]) and chances[-1] < 0.1 and chances == sorted(chances, reverse=True)
    lookup, text, chances = Lookup(), [1, 2, 3], []
    for _ in range(20):  # a loop, which is right from its second turn on
        text += [1, 2, 3]
        chances.append(lookup.guess(text)[1])
    assert chances[-1] > 0.9 and lookup.seen[8][0] / lookup.seen[8][1] > USUAL[8]


class Guessing(Planner):
    """Drafts every guess, whole."""

    def plan(self, session):
        if session.generation.rounds == 0:
            self.lookup = Lookup()
        tokens, alpha = self.lookup.guess(session.tokens)
        return Plan(gamma=len(tokens), alpha=alpha, tokens=tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_guesses_change_no_text_and_cost_no_forward(temperature, monkeypatch):
    model = random_model(CONFIG)
    latency = latency_model(3, attention_s=(1e-3, 0.0))
    machine, prompt = SimulatedMachine(model, latency, monkeypatch), random_tokens(9, CONFIG).tolist() * 4
    plain = generate(machine, prompt, max_new_tokens=120, temperature=temperature)
    found = generate(machine, prompt, max_new_tokens=120, temperature=temperature, planner=Guessing())
    assert found.seconds["draft"] == 0 and found.given == found.drafted and found.given_accepted == found.accepted
    assert all(plan.gamma == 0 for _, plan, _ in found.plans)  # guesses are not told there
    assert 0 < found.accepted < found.drafted and len(found.token_ids) == 120
    if temperature == 0:
        assert found.token_ids == plain.token_ids and found.rounds == 119 - found.accepted


def test_the_yardstick_guesses_where_a_guess_promises_more(monkeypatch):
    """Where drafting in a cheaper way costs as much as a step, only guesses pay."""
    model = random_model(CONFIG)
    model.table["half"] = [*model.sublayers, model.head]
    for half_s, ways_too in ((1e-3, False), (5e-4, True)):
        half = latency_model(3, attention_s=(half_s, 0.0), mlp_s=half_s, head_s=0.0)
        machine = SimulatedMachine(model, replace(latency_model(3), ways=(("half", half),)), monkeypatch)
        prompt = random_tokens(9, CONFIG).tolist() * 4
        found = generate(machine, prompt, max_new_tokens=120, planner=Uniform(machine.latency, ways=["half"], gamma=5))
        assert found.token_ids == generate(model, prompt, max_new_tokens=120).token_ids
        assert found.given > 0 and (found.drafted > found.given) == ways_too

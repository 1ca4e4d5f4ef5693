"""beyond/uniform.py, the yardstick: one way for the whole text, γ fixed, the text itself where it promises more."""

from dataclasses import replace

import pytest

from beyond.uniform import Uniform
from decoding import generate
from knapspec import tokens_per_time
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    random_tokens,
    tiny_config,
)

CONFIG = tiny_config(n_layer=4, vocab_size=101)
FLAT = latency_model(4, attention_s=(1e-3, 0.0), head_s=0.0)  # a step takes 8 ms, each token more 2% of it


class _Recorded(Uniform):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rounds = []

    def observe(self, session, round):
        self.rounds.append(round)


def _run(seconds, monkeypatch, *, gamma=6, wrong=(), prompt=None, new=50):
    """On a machine with ways in which a draft takes so many seconds; those in `wrong` are never right."""
    model = random_model(CONFIG)
    for way in seconds:
        roll = way in wrong
        model.table[way] = [*model.sublayers, lambda x, roll=roll: model.head(x).roll(int(roll), -1)]
    ways = tuple((way, latency_model(4, attention_s=(s / 8, 0.0), mlp_s=s / 8, head_s=0.0)) for way, s in seconds.items())
    machine, planner = SimulatedMachine(model, replace(FLAT, ways=ways), monkeypatch), _Recorded(replace(FLAT, ways=ways), ways=[*seconds], gamma=gamma)
    prompt = prompt or random_tokens(30, CONFIG, seed=5).tolist()
    plain, generation = (generate(machine, prompt, max_new_tokens=new, planner=p) for p in (None, planner))
    assert generation.token_ids == plain.token_ids
    return planner.rounds, generation, generation.seconds["total"] / plain.seconds["total"]


@pytest.mark.parametrize("half_s, int8_s, best", [(4e-3, 2.9e-3, "half"), (4e-3, 2.8e-3, "int8"), (9e-3, 7.9e-3, None), (9e-3, 4e-3, "int8")])
def test_the_way_is_the_one_that_promises_the_most(half_s, int8_s, best, monkeypatch):
    """By price and by usual acceptance, 0.98 and 0.9, with a round of 6 drafts in mind."""
    _, generation, _ = _run({"half": half_s, "int8": int8_s}, monkeypatch)
    (_, plan, _), = generation.plans
    assert plan.choices == (best and (best,) * 9) and not plan.skip_set
    rates = {"half": tokens_per_time(0.98, 6, half_s, 1.12 * 8e-3), "int8": tokens_per_time(0.9, 6, int8_s, 1.12 * 8e-3), None: 1 / 8e-3}
    assert plan.tokens_per_second == pytest.approx(max(rates.values())) == pytest.approx(rates[best])


@pytest.mark.parametrize("wrong", [(), ("half",)])
def test_it_drafts_gamma_tokens_and_learns_nothing(wrong, monkeypatch):
    """The plan stays where every draft stands, and where none does."""
    rounds, generation, slower = _run({"half": 4e-3}, monkeypatch, wrong=wrong)
    own = [round for round in rounds if not round.plan.tokens and round.position < 30 + 50 - 8]  # the last ones are shortened
    assert len(own) >= 4 and {round.plan for round in own} == {generation.plans[0][1]}
    assert {(round.drafted, round.accepted) for round in own} == {(6, 0 if wrong else 6)}
    assert (slower > 1.5) if wrong else (slower < 0.7)


def test_guesses_are_drafted_where_they_promise_more(monkeypatch):
    """Beside a way that costs nothing there is no room for them, beside none every guess counts that beats plain decoding."""
    prompt = random_tokens(9, CONFIG).tolist() * 3
    for seconds, share in (({"half": 1e-9}, "none"), ({"half": 4e-3}, "some"), ({}, "all")):
        rounds, generation, _ = _run(seconds, monkeypatch, prompt=prompt, new=100)
        given = [round for round in rounds if round.plan.tokens]
        assert (generation.given > 0, generation.drafted > generation.given) == (share != "none", share != "all")
        assert generation.given == sum(round.drafted for round in given) and all(round.plan.gamma == 6 for round in given)
        assert all(round.plan.tokens_per_second > generation.plans[0][1].tokens_per_second for round in given)


def test_without_ways_and_guesses_it_is_plain_decoding(monkeypatch):
    dear = replace(FLAT, verify_s=((1, 8e-3, 0.0), (16, 128e-3, 0.0)))  # verifying a token more costs a step more
    machine, prompt = SimulatedMachine(random_model(CONFIG), dear, monkeypatch), random_tokens(30, CONFIG, seed=5).tolist()
    plain, generation = (generate(machine, prompt, max_new_tokens=40, planner=p) for p in (None, Uniform(dear)))
    assert generation.token_ids == plain.token_ids and generation.drafted == 0
    assert generation.seconds["total"] == pytest.approx(plain.seconds["total"])
    (_, plan, _), = generation.plans
    assert plan.gamma == 0 and plan.tokens_per_second == pytest.approx(1 / 8e-3)

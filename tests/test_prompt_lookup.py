"""Prompt lookup: drafts are what followed the last tokens before, by transformers' rule, and no model runs for them.

In 1 2 3 1 2 the last two tokens stood at the start, and what followed them, 3 1 2, is the draft.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from decoding import generate
from rivals import make_planner
from rivals.prompt_lookup import PromptLookup, looked_up
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    tiny_config,
)
from tests.testing_rivals import CONFIG, PROMPT, L


def texts(count=400):
    rng = random.Random(0)
    return [[rng.randrange(rng.choice((2, 4, 9))) for _ in range(rng.randint(1, 30))] for _ in range(count)]


@pytest.mark.parametrize(("tokens", "draft"), [
    ([1, 2, 3, 1, 2], [3, 1, 2]),
    ([1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2, 4, 1, 2]),  # the first place, not the latest
    ([7, 2, 3, 1, 2], [3, 1, 2]),  # one token, where two never stood before
    ([2, 5, 1, 2, 3, 1, 2], [3, 1, 2]),  # two tokens before one
    ([5, 5, 5], [5]),  # places may overlap
    ([*range(20), 0, 1], [*range(2, 12)]),
    ([1, 2, 3], []), ([1], []),
])  # fmt: skip
def test_the_draft_is_what_followed_the_first_place_of_the_last_tokens(tokens, draft):
    assert looked_up(tokens, 2, 10) == draft


def test_the_rule_is_its_brute_force():
    def brute_force(tokens):
        """All (n, start of an earlier equal n-gram), the longest n first, then the leftmost start."""
        T = len(tokens)
        places = [(-n, i) for n in (1, 2) for i in range(T - n) if all(tokens[i + k] == tokens[T - n + k] for k in range(n))]
        n, i = min(places, default=(0, T))
        return [tokens[j] for j in range(i - n, min(i - n + 10, T))]

    assert [looked_up(tokens, 2, 10) for tokens in texts()] == [brute_force(tokens) for tokens in texts()]


def test_the_rule_is_that_of_transformers():
    module = pytest.importorskip("transformers.generation.candidate_generator")
    theirs = module.PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([3]), num_output_tokens=10, max_matching_ngram_size=2, max_length=10**6
    )
    planner = PromptLookup(eos_ids={3})
    for tokens in texts():
        candidates, _ = theirs.get_candidates(torch.tensor([tokens]))
        assert planner.plan(SimpleNamespace(tokens=tokens)).tokens == tuple(candidates[0, len(tokens) :].tolist())


def test_a_draft_ends_before_the_tokenizers_end_of_text():
    planner = make_planner("prompt_lookup", random_model(CONFIG), tokenizer=SimpleNamespace(eos_ids={4, 9}))
    for tokens, draft in (([1, 2, 3, 4, 1, 2], (3,)), ([1, 2, 9, 3, 1, 2], ())):
        plan = planner.plan(SimpleNamespace(tokens=tokens))
        assert (plan.tokens, plan.gamma) == (draft, len(draft))


def test_drafts_stand_where_the_text_repeats_itself_and_take_no_time(monkeypatch):
    """A model that adds nothing to its embeddings says the same token again and again, once it has said one twice."""
    machine = SimulatedMachine(random_model(CONFIG, faint=range(2 * L)), latency_model(L), monkeypatch)
    plain = generate(machine, PROMPT, max_new_tokens=60)
    generation = generate(machine, PROMPT, max_new_tokens=60, planner=PromptLookup())
    assert generation.token_ids == plain.token_ids
    assert generation.accepted > 40 and generation.seconds["draft"] == 0
    assert generation.seconds["total"] < plain.seconds["total"] / 2


def test_a_text_without_repetitions_is_decoded_plainly():
    model, options = random_model(tiny_config(vocab_size=997)), {"max_new_tokens": 8, "temperature": 2.0}
    plain, generation = (generate(model, [1], planner=planner, **options) for planner in (None, PromptLookup()))
    assert len({1, *plain.token_ids}) == 9
    assert (generation.token_ids, generation.drafted, generation.rounds) == (plain.token_ids, 0, plain.rounds)

"""decoding.py, sections 1 and 2: what is sampled follows the target's distribution exactly, whatever is drafted.

case                                            tests
temperature and top-p in draft and target       test_speculative_text_has_exactly_the_plain_distribution, test_accept_passes_a_chi_square_test
temperature 0, 1e-4, 1e-10; top_p 0, 1e-8, 1    test_small_temperatures_and_top_p_approach_greedy, test_probabilities_equal_a_plain_computation
NaN or infinite logits                          test_logits_that_are_not_finite_raise, test_a_draft_that_is_not_finite_ends_before_it
"""

import functools
import math
import random
import zlib
from collections import defaultdict

import pytest
import torch

import decoding
from beyond.ways import add_ways
from decoding import (
    FixedPlanner,
    Plan,
    Planner,
    accept,
    generate,
    sample,
    sampling_probs,
)
from tests.testing_models import random_model, tiny_config

TEMPERATURES, TOP_PS = (0.0, 0.3, 1.0, 2.0), (0.1, 0.5, 0.9, 1.0)


# --- From logits to a token ------------------------------------------------------------------------------------------


def _plain_probs(logits, temperature, top_p):
    """The same distribution token by token, in Python's double precision."""
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    enough = top_p * sum(weights)
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept, mass = set(), 0.0
    for i in order:
        if not kept or mass < enough:
            kept.add(i)
            mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.0, 1e-8, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_probabilities_equal_a_plain_computation(temperature, top_p):
    for size in (5, 1024, 1500):  # up to 1024 likely tokens are ranked without sorting all
        logits = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * 2
        probs = sampling_probs(logits, temperature, top_p)
        wanted = torch.tensor([_plain_probs(row, temperature, top_p) for row in logits.tolist()])
        torch.testing.assert_close(probs, wanted, rtol=1e-4, atol=1e-7)


def test_a_row_has_the_same_distribution_alone_and_among_others():
    wide = torch.zeros(1, 5000)  # its nucleus takes more than 1,024 tokens, those of the others do not
    steep, tied = torch.linspace(0, 60, 5000)[None], torch.zeros(1, 5000)
    tied[0, 1::3] = 5.0  # which of the equals stay must not depend on the neighbours either
    for row in (wide, steep, tied):
        alone = sampling_probs(row, 1.0, 0.3)
        for others in ((wide, row), (steep, row), (tied, row), (wide, steep, tied, row)):
            assert torch.equal(sampling_probs(torch.cat(others), 1.0, 0.3)[-1:], alone)


def test_temperature_zero_is_one_hot_even_where_logits_tie():
    probs = sampling_probs(torch.tensor([[1.0, 3.0, 3.0], [2.0, -1.0, 0.0]]), 0.0, 0.5)
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-40])
@pytest.mark.parametrize("top_p", [0.0, 1e-8, 1.0])
def test_small_temperatures_and_top_p_approach_greedy(temperature, top_p):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * 3
    greedy = sampling_probs(logits, 0.0, 1.0)
    assert torch.equal(sampling_probs(logits, temperature, top_p), greedy)
    if top_p < 1:
        assert torch.equal(sampling_probs(logits, 2.0, top_p), greedy)


class Broken:
    """A model whose last logits are `value` where `where(cache, skip)` says so."""

    def __init__(self, model, value, where):
        self.model, self.value, self.where = model, value, where

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, cache, *, skip=frozenset(), **options):
        logits = self.model(tokens, cache, skip=skip, **options)
        if self.where(cache, skip):
            logits[-1, :] = self.value
        return logits


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", ["prompt", "target"])
def test_logits_that_are_not_finite_raise(value, temperature, where):
    broken = Broken(random_model(), value, lambda cache, skip: not skip and (cache.length == 0) == (where == "prompt"))
    planner = FixedPlanner(Plan(frozenset({1}), 3))
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(broken, [1, 2, 3], max_new_tokens=9, planner=planner, temperature=temperature, top_p=0.9)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_draft_that_is_not_finite_ends_before_it(value, temperature, at):
    """A draft may overflow where the target does not: that costs a draft, never the text."""
    model, drafted = random_model(), []
    broken = Broken(model, value, lambda cache, skip: bool(skip) and drafted.append(cache.length) is None and len(drafted) % (at + 1) == 0)

    class Counting(FixedPlanner):
        def plan(self, session):
            drafted.clear()
            return super().plan(session)

        def observe(self, session, round):
            assert round.drafted == min(at, session.max_new_tokens - len(session.generation.token_ids) - 1) == len(round.confidences)
            assert all(map(math.isfinite, round.confidences))

    options = {"max_new_tokens": 9, "temperature": temperature, "top_p": 0.9}
    found = generate(broken, [1, 2, 3], planner=Counting(Plan(frozenset({1}), 3)), **options)
    assert len(found.token_ids) == 9 and (found.drafted > 0) == (at > 0)
    if temperature == 0:
        assert found.token_ids == generate(model, [1, 2, 3], **options).token_ids


def test_a_token_that_is_ruled_out_is_no_fault():
    assert sampling_probs(torch.tensor([[0.0, -math.inf, 0.0]]), 1.0, 1.0).tolist() == [[0.5, 0.0, 0.5]]


def test_sample_gives_each_token_its_share_of_the_unit_interval(monkeypatch):
    draws = [i / 1100 for i in range(1100)] + [1 - 2**-53]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(draws.pop(), dtype=torch.float64))
    probs = torch.tensor([0.0, 0.125, 0.0, 0.5, 0.0625, 0.0])  # not normalised, as a residual is not
    counts = torch.zeros(6, dtype=torch.int64)
    last = int(sample(probs, None))
    while draws:
        counts[int(sample(probs, None))] += 1
    assert last == 4 and counts.tolist() == [0, 200, 0, 800, 100, 0]


# --- The accept rule -------------------------------------------------------------------------------------------------


class Explorer:
    """Runs a program once for every outcome of its random draws -> the exact distribution of what it returns."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(decoding, "sample", lambda probs, rng: torch.tensor(self._draw(probs.tolist())))
        monkeypatch.setattr(decoding, "bernoulli", lambda chance, rng: self._draw([max(1 - chance, 0), min(chance, 1)]) == 1)

    def _draw(self, weights):
        if self.depth == len(self.path):  # a new draw: follow its first possible outcome, leave the others for later
            first, *others = [i for i, weight in enumerate(weights) if weight > 0]
            self.waiting += [[*self.path, other] for other in others]
            self.path.append(first)
        outcome = self.path[self.depth]
        self.depth += 1
        self.chance *= weights[outcome] / sum(weights)
        return outcome

    def distribution(self, program):
        chances = defaultdict(float)
        self.waiting = [[]]
        while self.waiting:
            self.path, self.depth, self.chance = self.waiting.pop(), 0, 1.0
            chances[program()] += self.chance
        assert sum(chances.values()) == pytest.approx(1)
        return chances


class TableModel:
    """Five words and a table from what was said to logits; drafts read another table. The cache holds what was said."""

    def __init__(self, vocab_size=5, noise=1.0):
        self.config = tiny_config(vocab_size=vocab_size, n_layer=1, n_head=1, n_kv_head=1, head_dim=2, max_position=32)
        self.device, self.dtype, self.noise = torch.device("cpu"), torch.float32, noise
        self.logits = functools.cache(self._logits)

    def _logits(self, said, drafting):
        rng = torch.Generator().manual_seed(zlib.crc32(repr(said).encode()))
        logits = torch.randn(self.config.vocab_size, generator=rng) * 1.5
        return logits + torch.randn(self.config.vocab_size, generator=rng) * self.noise if drafting else logits

    def __call__(self, tokens, cache, *, skip=frozenset(), choices=None, capture=None, last=None):
        n, T = cache.length, tokens.size(0)
        cache.keys[0, 0, n : n + T, 0] = tokens.float()
        said = cache.keys[0, 0, : n + T, 0].int().tolist()
        return torch.stack([self.logits(tuple(said[: n + t + 1]), bool(skip)) for t in range(T)])[-(last or T) :]


class SkipAll(Planner):
    """Drafts `gamma` tokens without any sublayer; with a threshold, stops behind a token that it was not sure of."""

    def __init__(self, gamma, threshold=0.0):
        self.gamma, self.threshold = gamma, threshold

    def plan(self, session):
        return Plan(frozenset({0, 1}), self.gamma)

    def keep_drafting(self, session, plan, confidences):
        return confidences[-1] >= self.threshold


class Given(Planner):
    """Gives drafts that depend on the text alone: random ids, or what the target says next at temperature 0, now and then spoilt."""

    def __init__(self, model, seed, gamma):
        self.model, self.seed, self.gamma = model, seed, gamma

    def plan(self, session):
        said, V = tuple(session.tokens), self.model.config.vocab_size
        rng = random.Random(zlib.crc32(repr((self.seed, said)).encode()))
        if rng.random() < 0.2:  # in between a draft that is not given
            return Plan(frozenset({0, 1}), self.gamma)
        tokens, greedy = [], rng.random() < 0.7
        for _ in range(self.gamma + rng.randint(0, 2)):
            likely = int(self.model.logits((*said, *tokens), False).argmax())
            tokens.append(likely if greedy and rng.random() < 0.8 else rng.randrange(V))
        return Plan(gamma=self.gamma, tokens=tuple(tokens))


class Enough(Exception):
    """Three tokens have been shown."""


def _first_three(model, *, at_most=4, **options):
    shown = []

    def on_token(token):
        shown.append(token)
        if len(shown) == 3:
            raise Enough

    with pytest.raises(Enough):
        generate(model, [0], max_new_tokens=at_most, on_token=on_token, **options)
    return tuple(shown)


def _exact_first_three(model, temperature, top_p):
    """By the definition: the product of the target's probabilities along the text."""
    chances = {(): 1.0}
    for _ in range(3):
        longer = {}
        for said, chance in chances.items():
            probs = sampling_probs(model.logits((0, *said), False)[None], temperature, top_p)[0].tolist()
            longer |= {(*said, token): chance * prob for token, prob in enumerate(probs) if prob > 0}
        chances = longer
    return chances


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("top_p", TOP_PS)
def test_speculative_text_has_exactly_the_plain_distribution(monkeypatch, temperature, top_p):
    explorer, model = Explorer(monkeypatch), TableModel()
    planner = SkipAll(2, threshold=0.4)  # a stopping rule that looks at the draft must not bend the distribution
    options = {"temperature": temperature, "top_p": top_p}
    wanted = _exact_first_three(model, **options)
    found = explorer.distribution(lambda: _first_three(model, planner=planner, **options))
    for said in wanted.keys() | found.keys():
        assert found.get(said, 0.0) == pytest.approx(wanted.get(said, 0.0), abs=1e-6), said


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_every_draft_length_has_exactly_the_plain_distribution(monkeypatch, gamma):
    explorer, model = Explorer(monkeypatch), TableModel(vocab_size=3)
    wanted = _exact_first_three(model, 1.0, 0.95)
    options = {"planner": SkipAll(gamma), "temperature": 1.0, "top_p": 0.95}
    found = explorer.distribution(lambda: _first_three(model, at_most=5, **options))
    assert found.keys() == wanted.keys()
    assert all(found[said] == pytest.approx(wanted[said], abs=1e-6) for said in wanted)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.3, 0.9), (1.0, 1.0), (2.0, 0.5)])
def test_text_from_given_drafts_has_exactly_the_plain_distribution(monkeypatch, seed, temperature, top_p):
    """A guess is certain, its distribution one-hot: it stands with the target's own chance, whatever it was."""
    explorer, model = Explorer(monkeypatch), TableModel()
    options = {"temperature": temperature, "top_p": top_p}
    wanted, planner = _exact_first_three(model, **options), Given(model, seed, gamma=1 + seed)
    found = explorer.distribution(lambda: _first_three(model, planner=planner, **options))
    for said in wanted.keys() | found.keys():
        assert found.get(said, 0.0) == pytest.approx(wanted.get(said, 0.0), abs=1e-6), said


def test_in_bfloat16_eight_bit_drafts_keep_the_distribution(monkeypatch):
    """A verified block differs from single steps by roundings of bfloat16; the drafts differ from both by far more than that."""
    model, explorer = random_model(tiny_config(vocab_size=3, n_layer=2), dtype=torch.bfloat16), Explorer(monkeypatch)
    add_ways(model, ["int8"])
    planner = FixedPlanner(Plan(frozenset({2}), 2, choices=("int8",) * 5))

    def three(planner=None):
        return explorer.distribution(lambda: _first_three(model, planner=planner, temperature=1.0, top_p=0.95))

    def apart(some, others):
        return sum(abs(some.get(said, 0.0) - others.get(said, 0.0)) for said in some.keys() | others.keys()) / 2

    plain, drafted = three(), three(planner)
    assert apart(plain, drafted) < 0.01
    monkeypatch.setattr(decoding, "bernoulli", lambda chance, rng: True)  # as if whatever is drafted were accepted
    assert apart(plain, three(planner)) > 0.05


def test_accept_passes_a_chi_square_test():
    rng = torch.Generator().manual_seed(0)
    target_probs = sampling_probs(torch.randn(3, 5, generator=rng) * 1.5, 1.0, 0.95)
    draft_probs = sampling_probs(torch.randn(2, 5, generator=rng) * 1.5, 1.0, 0.95)
    counts, draws = torch.zeros(5), 10_000
    for _ in range(draws):
        drafts = [int(sample(probs, rng)) for probs in draft_probs]
        accepted, token = accept(target_probs, drafts, draft_probs, rng)
        counts[(*drafts[:accepted], token)[0]] += 1
    wanted = target_probs[0] * draws
    assert (counts[wanted == 0] == 0).all()
    statistic = ((counts - wanted)[wanted > 0].square() / wanted[wanted > 0]).sum()
    assert statistic < 18.5  # exceeded once in 1,000 by chance, with 4 degrees of freedom


def test_a_draft_that_equals_the_target_is_always_accepted():
    rng = torch.Generator().manual_seed(0)
    for temperature in (0.0, 0.3, 1.0):
        for _ in range(200):
            target_probs = sampling_probs(torch.randn(4, 9, generator=rng), temperature, 0.9)
            drafts = [int(sample(probs, rng)) for probs in target_probs[:3]]
            assert accept(target_probs, drafts, target_probs[:3], rng)[0] == 3


def test_where_no_residual_is_left_the_correction_is_the_targets(monkeypatch):
    monkeypatch.setattr(decoding, "bernoulli", lambda chance, rng: False)  # as if rounding had rejected a certain token
    probs = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    assert accept(probs, [2], probs, torch.Generator()) == (0, 2)

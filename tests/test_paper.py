"""The paper's planner against METHOD.md's section 11, written down once more: slowly, and without a line of knapspec.py.

Whole generations are watched: at every interval the plan must be the one computed here from a fresh forward over the text,
and between intervals it must stay the same object.

case                                            tests
speculation slower than plain decoding          test_whole_plans_are_the_papers: "needs all its items", "nothing may be saved"
budget 0; equal latencies; window of 1          the same
a small model, every subset enumerated          test_survivors_are_those_of_the_recurrence_over_all_subsets
"""

import itertools
import math

import pytest
import torch

from decoding import Planner, generate, sampling_probs
from knapspec import KnapSpec, agreement, integer_weights, knapsack
from model import KVCache
from tests.testing_models import (
    latency_model,
    prefilled,
    random_model,
    random_tokens,
    tiny_config,
)

FIVE = tiny_config(n_layer=5, vocab_size=101)  # 10 items, of which the middle 6 can be skipped


# --- Section 11 once more --------------------------------------------------------------------------------------------


class Window:
    """The last W of some verified tokens, and what any draft computes there: each by one ordinary forward of the model."""

    def __init__(self, model, tokens, W):
        self.model, self.n, self.W = model, len(tokens), min(W, len(tokens))
        self.before, self.inside = tokens[: self.n - self.W], torch.tensor(tokens[self.n - self.W :])
        self.computed = {}
        self.target = self.states(frozenset())

    def states(self, skip_set):
        """x_0 … x_2L, each (W, H), of the draft that leaves out skip_set and sees its own keys in the window."""
        if skip_set not in self.computed:
            cache = KVCache(self.model.config, self.n)
            if self.before:  # all that a draft shares with the target
                self.model(torch.tensor(self.before), cache)
                cache.length = len(self.before)
            self.computed[skip_set] = []
            self.model(self.inside, cache, skip=skip_set, capture=self.computed[skip_set])
        return self.computed[skip_set]

    def cosine(self, skip_set, b):
        """Mean over the window of the cosines between draft and target behind b items: what follows changes neither."""
        x, y = self.states(skip_set)[b].double(), self.target[b].double()
        return ((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).mean().item()

    def alpha(self, skip_set, temperature, top_p):
        ours, theirs = (self.model.logits(states[-1]) for states in (self.states(skip_set), self.target))
        if temperature == 0:
            return sum(a == b for a, b in zip(ours.argmax(-1).tolist(), theirs.argmax(-1).tolist())) / self.W
        ours, theirs = (sampling_probs(logits, temperature, top_p).tolist() for logits in (ours, theirs))
        return sum(min(p, q) for row in zip(ours, theirs) for p, q in zip(*row)) / self.W


def paper_weights(attention_s, mlp_s, n_layer, max_ratio):
    ratio = round(max(attention_s, mlp_s) / min(attention_s, mlp_s))
    if max_ratio:
        ratio = min(ratio, max_ratio)
    return [ratio if attention_s > mlp_s else 1, ratio if mlp_s > attention_s else 1] * n_layer


def paper_survivors(window, weights, budget, tau):
    """Step 4: g[b][j], the skip set that is closest to the target behind b items of those that saved weight j."""
    g = {0: frozenset()}
    for item, weight in enumerate(weights):
        skippable = item // 2 not in (0, len(weights) // 2 - 1)  # not of the first, nor of the last layer
        following = {}
        for j in range(budget + 1):
            ways_to_j = [g[j]] if j in g else []
            if skippable and j - weight in g:
                ways_to_j.append(g[j - weight] | {item})
            close = {skip_set: window.cosine(skip_set, item + 1) for skip_set in ways_to_j}
            close = {skip_set: cosine for skip_set, cosine in close.items() if cosine >= tau}
            if close:
                following[j] = max(close, key=close.get)
        g = following
    return g


def paper_plan(planner, model, tokens, temperature, top_p):
    """Steps 1 to 6 -> (skip set, γ, α, tokens per second)."""
    n, L, latency = len(tokens), model.config.n_layer, planner.latency
    attention_s, mlp_s = latency.attention_s[0] + latency.attention_s[1] * n, latency.mlp_s
    weights = paper_weights(attention_s, mlp_s, L, planner.max_ratio)
    window = Window(model, tokens, planner.window)
    survivors = paper_survivors(window, weights, math.floor(planner.budget * sum(weights)), planner.tau)
    found = [(frozenset(), 0, 1.0, 1 / (L * (attention_s + mlp_s)))]
    for skip_set in survivors.values():
        alpha = min(window.alpha(skip_set, temperature, top_p), 1.0)  # rounding may pass 1
        kept_s = sum((attention_s, mlp_s)[item % 2] for item in range(2 * L) if item not in skip_set)
        for gamma in range(1, planner.gamma_max + 1):
            expected = sum(alpha**i for i in range(gamma + 1))  # (1 − α^(γ+1)) / (1 − α), written out
            found.append((skip_set, gamma, alpha, expected / (gamma * kept_s + L * (attention_s + mlp_s))))
    most = max(rate for *_, rate in found)
    return min((one for one in found if one[-1] > most * (1 - 1e-6)), key=lambda one: one[1])  # of equals the shorter draft


class Watched(KnapSpec):
    """Compares every plan, and what each draft did, with section 11."""

    def plan(self, session):
        if session.generation.rounds == 0:
            self.wanted, self.seen, self.due = [], [], 0
        plan = super().plan(session)
        if session.generation.rounds == self.due:
            self.due += self.interval
            self.wanted.append(paper_plan(self, session.model, session.tokens[:-1], session.temperature, session.top_p))
            self.seen.append(plan)
            skip_set, gamma, alpha, rate = self.wanted[-1]
            assert (plan.skip_set, plan.gamma) == (skip_set, gamma), session.generation.rounds
            assert (plan.alpha, plan.tokens_per_second) == pytest.approx((alpha, rate), rel=1e-4)
            assert plan.choices is None and plan.tokens == ()
        assert plan is self.seen[-1]
        return plan

    def observe(self, session, round):
        sure = [confidence >= self.threshold for confidence in round.confidences]
        assert all(sure[:-1])
        unsure = sum(not is_sure for is_sure in sure)
        self.unsure = getattr(self, "unsure", 0) + unsure
        bound = min(round.plan.gamma, session.max_new_tokens - len(session.generation.token_ids) - 1)
        assert round.drafted == bound or (unsure and round.drafted < bound)


FAINT = range(2, 8)
CASES = {  # model (items that hardly matter, and how much), latencies, options of KnapSpec, prompt tokens -> does it draft?
    "redundant": ((FAINT, 0.05), {}, {}, 20, True),
    "half redundant": (((3, 4, 6), 0.2), {}, {"window": 16}, 30, True),
    "needs all its items": ((FAINT, 10.0), {}, {}, 20, False),
    "equal latencies": ((FAINT, 0.1), {"attention_s": (1e-3, 0.0)}, {}, 20, True),
    "MLP twice and a half an attention": ((FAINT, 0.1), {"mlp_s": 2.5e-3, "attention_s": (1e-3, 0.0)}, {}, 20, True),
    "attention grows with the text": ((FAINT, 0.1), {"attention_s": (1e-4, 1e-4)}, {"interval": 4}, 5, True),
    "ratio capped": ((FAINT, 0.1), {"attention_s": (1e-4, 1e-3)}, {"max_ratio": 5}, 20, True),
    "ratio not capped": ((FAINT, 0.1), {"attention_s": (1e-4, 4e-4)}, {}, 20, True),
    "window of 1": ((FAINT, 0.1), {}, {"window": 1}, 20, True),
    "prompt of 1": ((FAINT, 0.1), {}, {"window": 8}, 1, True),
    "prompt shorter than the window": ((FAINT, 0.1), {}, {"window": 16}, 7, True),
    "unsure drafts end": ((FAINT, 0.3), {}, {"threshold": 0.999, "window": 3}, 20, True),
    "no threshold": ((FAINT, 0.3), {}, {"threshold": 0.0, "window": 3}, 20, True),
    "at most one draft": ((FAINT, 0.1), {}, {"gamma_max": 1}, 20, True),
    "no drafts allowed": ((FAINT, 0.1), {}, {"gamma_max": 0}, 20, False),
    "nothing may be saved": ((FAINT, 0.1), {}, {"budget": 0.0}, 20, False),
    "all may be saved": ((FAINT, 0.1), {}, {"budget": 1.0, "tau": -1.0}, 20, True),
    "a strict τ": ((FAINT, 0.2), {}, {"tau": 0.98}, 20, True),
    "a τ that nothing reaches": ((FAINT, 0.3), {}, {"tau": 1.01}, 20, False),
    "planned every round": ((FAINT, 0.2), {}, {"interval": 1, "threshold": 0.0}, 20, True),
}  # fmt: skip


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.8, 0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_whole_plans_are_the_papers(name, temperature, top_p):
    (faint, epsilon), prices, options, prompt_tokens, drafts = CASES[name]
    model = random_model(FIVE, seed=1, faint=faint, epsilon=epsilon)
    planner = Watched(latency_model(5, **prices), **{"interval": 3, "gamma_max": 4, "threshold": 0.1} | options)
    generation = generate(model, random_tokens(prompt_tokens, FIVE, seed=2).tolist(), max_new_tokens=16, planner=planner,
                          temperature=temperature, top_p=top_p)  # fmt: skip
    assert len(planner.wanted) == 1 + (generation.rounds - 1) // planner.interval
    assert (generation.drafted > 0) == drafts == any(gamma for _, gamma, *_ in planner.wanted)
    if "threshold" in options:
        assert (planner.unsure > 0) == (options["threshold"] > 0)
    if name == "attention grows with the text":  # so that other items become worth skipping
        assert len({plan.skip_set for plan in planner.seen}) > 1


def test_a_second_text_is_planned_anew():
    model, planner = random_model(FIVE, seed=1, faint=FAINT, epsilon=0.1), Watched(latency_model(5))
    for seed, count in ((3, 9), (4, 30)):
        generate(model, random_tokens(count, FIVE, seed).tolist(), max_new_tokens=6, planner=planner)
        assert len(planner.wanted) == 1  # 64 rounds are not over, but the text is another


# --- The parts -------------------------------------------------------------------------------------------------------


class Kept(Planner):
    """Keeps the session, for what it knows of the window."""

    window = 6

    def plan(self, session):
        self.session = session
        return super().plan(session)


PRICES = {  # attention and MLP, in milliseconds
    "equal": (1.0, 1.0),
    "attention three times an MLP": (3.0, 1.0),
    "MLP twice and a half an attention": (1.0, 2.5),
    "attention ten times an MLP": (10.0, 1.0),
}


@pytest.mark.parametrize("budget, tau", [(0.5, 0.5), (0.3, 0.9), (1.0, -1.0), (0.0, 0.5)])
@pytest.mark.parametrize("prices", PRICES.values(), ids=PRICES.keys())
def test_survivors_are_those_of_the_recurrence_over_all_subsets(prices, budget, tau):
    """All subsets are enumerated, and those struck out that saved too much, fell under τ, or were beaten somewhere on the way."""
    model, planner = random_model(tiny_config(n_layer=5, vocab_size=101), seed=3, faint=range(2, 8), epsilon=0.5), Kept()
    generate(model, random_tokens(20, model.config, seed=1).tolist(), max_new_tokens=5, planner=planner)
    session, weights = planner.session, paper_weights(*prices, 5, None)
    session.cache.length -= 1  # what was verified before the last round
    assert integer_weights(*prices, 5) == weights
    window, most = Window(model, session.tokens[: session.cache.length], 6), math.floor(budget * sum(weights))
    alive = {frozenset(some) for r in range(7) for some in itertools.combinations(range(2, 8), r)}
    assert len(alive) == 64
    for b in range(1, 11):
        best = {}
        for whole in alive:
            passed = frozenset(item for item in whole if item < b)
            weight, cosine = sum(weights[item] for item in passed), window.cosine(passed, b)
            if weight <= most and cosine >= tau and cosine > best.get(weight, (-2.0, None))[0]:
                best[weight] = cosine, passed
        winners = {passed for _, passed in best.values()}
        alive = {whole for whole in alive if frozenset(item for item in whole if item < b) in winners}
    assert alive == set(paper_survivors(window, weights, most, tau).values())
    branches, x = knapsack(model.sublayers, weights, window.target, session.cache, budget=most, tau=tau)
    assert {branch.skip_set for branch in branches} == alive and (len(alive) > 1) == (budget > 0)
    assert [branch.weight for branch in branches] == sorted(sum(weights[b] for b in skip_set) for skip_set in alive)
    for branch, states in zip(branches, x):
        torch.testing.assert_close(states, window.states(branch.skip_set)[-1], rtol=1e-4, atol=1e-4)
        assert branch.cosine == pytest.approx(window.cosine(branch.skip_set, 10), abs=1e-5)
    for session.temperature, session.top_p in ((0.0, 1.0), (0.7, 0.9)):
        target_probs = sampling_probs(model.logits(window.target[-1]), session.temperature, session.top_p)
        wanted = [window.alpha(branch.skip_set, session.temperature, session.top_p) for branch in branches]
        assert agreement(session, x, target_probs) == pytest.approx(wanted, abs=1e-4)


def test_the_window_of_a_session_is_that_of_a_fresh_forward():
    model, planner = random_model(FIVE, seed=5), Kept()
    generate(model, random_tokens(9, FIVE).tolist(), max_new_tokens=9, planner=planner)
    tokens = planner.session.tokens[: planner.session.cache.length]
    states, probs = planner.session.window(6)
    fresh = []
    _, logits = prefilled(model, tokens, capture=fresh, last=6)
    torch.testing.assert_close(torch.stack(states), torch.stack(fresh), rtol=1e-4, atol=1e-4)
    assert probs.argmax(-1).tolist() == logits.argmax(-1).tolist()

"""knapspec+: KnapSpec with a planner that corrects itself. Each part is one idea, has a name, and can be left out.

The paper's planner trusts eight tokens and a price list for 64 rounds. Here
- `prices`: the head and the verification of γ + 1 tokens are paid for too, and a run corrects the profile,
- `posterior`: what is really accepted counts,
- `renewal`: a draft ends where no number of further tokens pays,
- `thrift`: the knapsack is solved where the target's own states promise a gain, and only within a share of the time,
- `pruning`: a few of the knapsack's branches are followed in place of all,
- `ways`: drafts may keep sublayers in cheaper ways (ways.py),
- `lookup`: the text so far may draft (lookup.py).

Read it from top to bottom: what is known of a draft, prices, the planner.
"""

import math
from dataclasses import dataclass

import torch

from beyond.lookup import Lookup
from beyond.ways import WAYS
from decoding import Plan
from knapspec import (
    KnapSpec,
    agreement,
    expected_tokens,
    integer_weights,
    knapsack,
    measured,
    tokens_per_time,
)

PARTS = ("prices", "posterior", "renewal", "thrift", "pruning", "ways", "lookup")

# --- 1. What is known of a draft -------------------------------------------------------------------------------------

# What was seen of a draft fades each round: with use, so that it speaks for the text as it is now, some 30 rounds; without, far
# more slowly, so that what was given up is tried again, but seldom.
FADE_IN_USE, FADE_UNUSED = 0.97, 0.997
PRIOR_TOKENS = 8  # what is expected of a draft counts as much as so many tried tokens
DOUBT = 0.35  # mean of 1 − confidence over tried tokens, as it counts before a draft has shown its own


@dataclass(eq=False)
class Candidate:
    """A draft to choose from: what it skips, how it keeps the rest, and what has been seen of it."""

    way: str  # of WAYS, or "full"
    skip_set: frozenset = frozenset()
    window_alpha: float = 1.0  # what the knapsack's window says of the skip set
    parents: tuple = ()  # Candidates for what it has in common with others: its way with nothing skipped, skipping at all
    accepted: float = 0.0  # of its drafts that were tried: those before a rejection, and the rejected one
    tried: float = 0.0
    doubt: float = 0.0  # 1 − confidence, summed over those tried

    @property
    def prior(self):
        """α before anything was seen of it: what its parents have shown, times what the window says of its skip set."""
        if self.parents:
            return self.window_alpha * math.prod(parent.alpha for parent in self.parents)
        return WAYS[self.way].alpha if self.way in WAYS else 1.0

    @property
    def alpha(self):
        """A Beta posterior's mean."""
        return (PRIOR_TOKENS * self.prior + self.accepted) / (PRIOR_TOKENS + self.tried)

    @property
    def risk(self):
        """How the chance of a rejection grows with 1 − confidence."""
        return (PRIOR_TOKENS * (1 - self.prior) + self.tried - self.accepted) / (PRIOR_TOKENS * DOUBT + self.doubt)

    def observe(self, round):
        """A draft that came to nothing, as one that overflows does, weighs as much as all that was expected of it."""
        tried = min(round.accepted + 1, round.drafted) or PRIOR_TOKENS
        self.accepted, self.tried = self.accepted + round.accepted, self.tried + tried
        self.doubt += sum(1 - confidence for confidence in round.confidences[:tried])

    def fade(self, factor):
        self.accepted, self.tried, self.doubt = factor * self.accepted, factor * self.tried, factor * self.doubt


# --- 2. What things cost ---------------------------------------------------------------------------------------------

RATE = 0.1  # weight of the latest round in a correction: single rounds are noisy, a machine's drift lasts


class Prices:
    """What things cost now: the profile, corrected by what this run really takes. Not full: the paper's prices."""

    def __init__(self, latency, n_layer, full):
        self.latency, self.n_layer, self.full = latency, n_layer, full
        self.verify_factor, self.draft_factor = 1.0, 1.0  # measured / profiled

    def choices(self, candidate):
        return None if candidate.way == "full" else (candidate.way,) * (2 * self.n_layer + 1)

    def draft_s(self, n, candidate):
        """Seconds of one draft token behind n tokens. A draft that skips and cheapens nothing is a plain step, whatever was fitted."""
        profiled_s = self.latency.draft(candidate.skip_set, n, self.n_layer, self.choices(candidate))
        if self.full and candidate.way == "full":
            profiled_s += self.latency.verify(n, 1) - self.latency.draft(frozenset(), n, self.n_layer)
        return profiled_s * self.draft_factor if self.full else profiled_s - self.latency.way(candidate.way).head()

    def verify_s(self, n, gamma_max):
        """Seconds of verifying γ + 1 tokens, for each γ from 0 to gamma_max."""
        if not self.full:
            return [max(self.draft_s(n, Candidate("full")), 1e-12)] * (gamma_max + 1)
        return [max(self.latency.verify(n, k) * self.verify_factor, 1e-12) for k in range(1, gamma_max + 2)]

    def observe(self, round, candidate):
        """candidate: what drafted in this round, or None."""
        n, k = round.position, round.drafted
        self.verify_factor += RATE * (round.verify_s / self.latency.verify(n, k + 1) - self.verify_factor)
        if candidate and k:
            expected_s = k * self.draft_s(n, candidate) / self.draft_factor
            self.draft_factor += RATE * (round.draft_s / expected_s - self.draft_factor)


def best_rate(alpha, draft_s, verify_s):
    """The most tokens per second at any γ from 1 to len(verify_s) − 1, and that γ."""
    gammas = range(1, len(verify_s))
    return max(((tokens_per_time(alpha, gamma, draft_s, verify_s[gamma]), gamma) for gamma in gammas), default=(0.0, 0))


# --- 3. When to solve the knapsack, and which branches to follow -----------------------------------------------------

SHARE = 0.05  # of the time of the text so far may go into solving the knapsack again
SLOPE, SLOPE_WEIGHT = 0.7, 2.0  # rejections per unit of distance, and the sum of distances that this counts as much as
BRANCHES = 4  # to follow: more find hardly anything better, and cost as much more


def distance(cosine):
    """‖u − v‖ of two directions: √(2 (1 − cosine)). The chance of a rejection grows about in proportion to it."""
    return math.sqrt(max(2 * (1 - cosine), 0.0))


def alpha_at(far):
    """α of a draft whose states are so far from the target's, before any was seen."""
    return max(1 - SLOPE * far, 0.0)


def free_look(states, seconds, budget):
    """[(distance, seconds saved)] of skip sets that grow, if the changes that items make to the target's states added up.

    states: x_0 … x_2L of the window. seconds: of an attention and of an MLP. It runs no forward: where this promises
    nothing, the knapsack finds nothing either.
    """
    x, found, square, saved_s = torch.stack(states).float(), [], 0.0, 0.0  # (2L + 1, W, H)
    changes = [distance(c) ** 2 for c in torch.cosine_similarity(x[1:], x[:-1], dim=-1).mean(-1).tolist()]
    most_s = budget * sum(seconds) * len(changes) / 2
    for item in sorted(range(2, len(changes) - 2), key=lambda item: changes[item] / max(seconds[item % 2], 1e-12)):
        square, saved_s = square + changes[item], saved_s + seconds[item % 2]
        if saved_s <= most_s:
            found.append((math.sqrt(square), saved_s))
    return found


def promising(weights, budget, rate):
    """A `select` for the knapsack: the few branches that promise most of rate(α, weight saved) if they go on as they began.

    That is, weight saved and squared distance grow in proportion to the weight of the items passed: behind a third of it,
    a branch is judged by three times of both.
    """

    def select(item, branches):
        stretch = sum(weights[2:-2]) / max(sum(weights[2 : item + 1]), 1)

        def promise(branch):
            return rate(alpha_at(distance(branch.cosine) * math.sqrt(stretch)), min(branch.weight * stretch, budget))

        return sorted(sorted(branches, key=promise, reverse=True)[:BRANCHES], key=lambda branch: branch.weight)

    return select


# --- 4. The planner --------------------------------------------------------------------------------------------------

MARGIN = 1.03  # a draft must promise so much over plain decoding: predictions are off by some per cent


class KnapSpecPlus(KnapSpec):
    """Chooses each round among the knapsack's drafts, the cheaper ways, the text itself and plain decoding.

    latency: a profile.LatencyModel, by default measured before the first plan. ways: names of rows in the model's table, in
    which drafts may be kept. without: names of PARTS to leave out. window, tau and budget are KnapSpec's; every `interval`
    rounds it looks whether to solve the knapsack again. No plan depends on the clock when sampling: the same seed and profile give the same text.
    """

    def __init__(self, latency=None, *, ways=(), gamma_max=16, interval=32, without=(), **options):
        super().__init__(latency, gamma_max=gamma_max, interval=interval, **options)
        self.parts = frozenset(PARTS) - set(without)
        self.ways = ("full", *ways) if "ways" in self.parts else ("full",)
        self.prices = None

    def plan(self, session):
        rounds, n = session.generation.rounds, session.cache.length
        if rounds == 0:  # another text: prices stay, what was seen of drafts does not
            self.latency = self.latency or measured(session, self.gamma_max)
            self.prices = self.prices or Prices(self.latency, session.model.config.n_layer, "prices" in self.parts)
            self.unskipped, self.skipping = {way: Candidate(way) for way in self.ways}, Candidate("full")
            self.candidates = [self.unskipped[way] for way in self.ways[1:]]
            self.lookup, self.next_look, self.planned_s, self.branches = Lookup(), 0, 0.0, None
        self.verify_s = self.prices.verify_s(n, self.gamma_max)
        self.chosen, plan = self._best(n)
        if rounds >= self.next_look and self.gamma_max > 0 and self._worth_solving(session, plan):
            self.next_look = rounds + self.interval
            self._solve(session)
            self.chosen, plan = self._best(n)
        if "lookup" in self.parts:
            tokens, alpha = self.lookup.guess(session.tokens)
            rate, gamma = best_rate(alpha, 0.0, self.verify_s[: len(tokens) + 1])
            if rate > plan.tokens_per_second:
                self.chosen, plan = None, Plan(gamma=gamma, alpha=alpha, tokens_per_second=rate, tokens=tokens)
        return plan

    def _best(self, n):
        """The candidate with the most tokens per time and its Plan; None and plain decoding where none is worth it."""
        best, plan = None, Plan(tokens_per_second=1 / self.verify_s[0])
        least = MARGIN * plan.tokens_per_second
        self.weighed = [(c.skip_set, c.way, c.alpha, self.prices.draft_s(n, c)) for c in self.candidates]
        for candidate, (skip_set, _, alpha, draft_s) in zip(self.candidates, self.weighed):
            rate, gamma = best_rate(alpha, draft_s, self.verify_s)
            if rate > max(least, plan.tokens_per_second):
                best, plan = candidate, Plan(skip_set, gamma, alpha, rate, self.prices.choices(candidate))
        return best, plan

    def _whole(self, n):
        """What the knapsack counts in: of the drafts that skip nothing the fastest, and the seconds of its attention and of its MLP."""
        whole = max(self.unskipped.values(), key=lambda candidate: best_rate(candidate.alpha, self.prices.draft_s(n, candidate), self.verify_s))
        return whole, [self.latency.sublayer(item, n, whole.way) * self.prices.draft_factor for item in (0, 1)]

    def _worth_solving(self, session, plan):
        """Is the first look, or a later one within its share of the time, and may the rest of the text gain what it costs?"""
        if "thrift" not in self.parts:
            return True
        n = session.cache.length
        price_s = self.latency.verify(n, BRANCHES * self.window) * self.prices.verify_factor
        if self.planned_s and self.planned_s + price_s > SHARE * len(session.generation.token_ids) / plan.tokens_per_second:
            return False
        self.next_look = session.generation.rounds + self.interval
        (states, _), (whole, seconds) = session.window(self.window), self._whole(n)
        whole_s = self.prices.draft_s(n, whole)
        rate = max((best_rate(whole.alpha * alpha_at(far), whole_s - saved_s, self.verify_s)[0]
                    for far, saved_s in free_look(states, seconds, self.budget)), default=0.0)  # fmt: skip
        if not rate or session.remaining * (1 / plan.tokens_per_second - MARGIN / rate) <= price_s:
            return False
        self.planned_s += price_s
        return True

    def _solve(self, session):
        """The knapsack on the latest window: each survivor is a candidate in every way. What was seen of known ones stays."""
        n, (states, target_probs) = session.cache.length, session.window(self.window)
        whole, seconds = self._whole(n)
        weights = integer_weights(*seconds, self.prices.n_layer, self.max_ratio)
        budget, unit_s = int(self.budget * sum(weights)), sum(seconds) / (weights[0] + weights[1])
        whole_s = self.prices.draft_s(n, whole)
        select = promising(weights, budget, lambda alpha, weight: best_rate(alpha, whole_s - weight * unit_s, self.verify_s)[0])
        branches, x = knapsack(session.model.sublayers, weights, states, session.cache, budget=budget, tau=self.tau,
                               select=select if "pruning" in self.parts else None)  # fmt: skip
        alphas, distances = agreement(session, x, target_probs) if branches else [], [distance(branch.cosine) for branch in branches]
        self.branches, self.weights = branches, weights
        # Eight tokens say little of one branch. All of them together say how fast rejections grow with the distance.
        slope = (SLOPE * SLOPE_WEIGHT + sum(1 - alpha for alpha in alphas)) / (SLOPE_WEIGHT + sum(distances))
        known = {(c.skip_set, c.way): c for c in self.candidates}
        self.candidates = [self.unskipped[way] for way in self.ways[1:]]
        for branch, alpha, far in zip(branches, alphas, distances):
            for way in self.ways if branch.skip_set else ():
                candidate = known.get((branch.skip_set, way)) or Candidate(way, branch.skip_set, parents=(self.unskipped[way], self.skipping))
                candidate.window_alpha = max(1 - slope * far, 0.0) if "posterior" in self.parts else alpha
                self.candidates.append(candidate)

    def keep_drafting(self, session, plan, confidences):
        """Goes on where some number of further tokens is expected to be worth its time at the rate that the plan promises.

        The confidences tell the chance that all drafted so far are accepted, α that of each further one: a longer draft
        can pay where one more token does not, as a longer verification may cost hardly more. Source: the renewal-reward
        theorem.
        """
        if "renewal" not in self.parts:
            return super().keep_drafting(session, plan, confidences)
        risk, k, verify_s = self.chosen.risk, len(confidences), self.verify_s
        chance = math.prod(max(1 - risk * (1 - confidence), 0) for confidence in confidences)
        draft_s = self.prices.draft_s(session.cache.length, self.chosen)
        return any(chance * (expected_tokens(plan.alpha, m) - 1) > plan.tokens_per_second * (m * draft_s + verify_s[k + m] - verify_s[k])
                   for m in range(1, self.gamma_max - k + 1))  # fmt: skip

    def observe(self, session, round):
        if "posterior" in self.parts:
            used = [self.chosen, self.skipping][: 1 + bool(self.chosen.skip_set)] if self.chosen else []
            for candidate in (*self.candidates, self.skipping):
                candidate.fade(FADE_IN_USE if candidate in used else FADE_UNUSED)
            for candidate in used:
                candidate.observe(round)
        if "prices" in self.parts and session.temperature == 0:
            self.prices.observe(round, self.chosen)

"""knapspec+: KnapSpec with a planner that corrects itself. Each part is one idea, has a name, and can be left out.

The paper's planner trusts eight tokens and a price list for 64 rounds. Here
- `prices`: the head and the verification of γ + 1 tokens are paid for too, and a run corrects the profile,
- `posterior`: what is really accepted counts, and each round chooses anew,
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
    tokens_per_time,
)

PARTS = ("prices", "posterior", "renewal", "thrift", "pruning", "ways", "lookup")

# --- 1. What is known of a draft -------------------------------------------------------------------------------------

FADE = 0.97  # what was seen of a draft loses so much each round: it speaks for the text as it is now, some 30 rounds
PRIOR_TOKENS = 8  # what is expected of a draft counts as much as so many tried tokens
DOUBT = 0.35  # mean of 1 − confidence over tried tokens, as it counts before a draft has shown its own


@dataclass
class Candidate:
    """A draft to choose from: what it skips, how it keeps the rest, and what has been seen of it."""

    skip_set: frozenset = frozenset()
    way: str = "full"  # or a name of WAYS
    window_alpha: float = 1.0  # what the knapsack's window says of its skip set
    accepted: float = 0.0  # of its drafts that were tried: those before a rejection, and the rejected one
    tried: float = 0.0
    doubt: float = 0.0  # 1 − confidence, summed over those tried

    def observe(self, round):
        """A plan of which nothing could be drafted counts as one token rejected."""
        tried = max(min(round.accepted + 1, round.drafted), 1)
        self.accepted, self.tried = self.accepted + round.accepted, self.tried + tried
        self.doubt += sum(1 - confidence for confidence in round.confidences[:tried])

    def fade(self):
        self.accepted, self.tried, self.doubt = FADE * self.accepted, FADE * self.tried, FADE * self.doubt


# --- 2. Prices -------------------------------------------------------------------------------------------------------


class Prices:
    """What things cost now: the profile, corrected by what this run really takes. Not full: the paper's prices."""

    RATE = 0.1  # weight of the latest round: single rounds are noisy, a machine's drift lasts

    def __init__(self, latency, n_layer, full):
        self.latency, self.n_layer, self.full = latency, n_layer, full
        self.verify_factor, self.draft_factor = 1.0, 1.0  # measured / profiled

    def choices(self, candidate):
        return None if candidate.way == "full" else (candidate.way,) * (2 * self.n_layer + 1)

    def draft_s(self, n, candidate):
        """Seconds of one draft token behind n tokens."""
        profiled_s = self.latency.draft(candidate.skip_set, n, self.n_layer, self.choices(candidate))
        return profiled_s * self.draft_factor if self.full else profiled_s - self.latency.way(candidate.way).head()

    def verify_s(self, n, gamma_max):
        """Seconds of verifying γ + 1 tokens, for each γ from 0 to gamma_max."""
        if not self.full:
            return [self.draft_s(n, Candidate())] * (gamma_max + 1)
        return [self.latency.verify(n, k) * self.verify_factor for k in range(1, gamma_max + 2)]

    def observe(self, round, candidate):
        """candidate: what drafted in this round, or None."""
        n, k = round.position, round.drafted
        self.verify_factor += self.RATE * (round.verify_s / self.latency.verify(n, k + 1) - self.verify_factor)
        if candidate and k:
            expected_s = k * self.draft_s(n, candidate) / self.draft_factor
            self.draft_factor += self.RATE * (round.draft_s / expected_s - self.draft_factor)


# --- 3. The planner --------------------------------------------------------------------------------------------------

MARGIN = 1.03  # a draft must promise so much over plain decoding: predictions are off by some per cent
SHARE = 0.05  # of the time of the text so far may go into solving the knapsack again
SLOPE, SLOPE_WEIGHT = 0.7, 2.0  # rejections per unit of distance, and the sum of distances that this counts as much as
BRANCHES = 4  # to follow: more find hardly anything better, and cost as much more


def distance(cosine):
    """‖u − v‖ of two directions: √(2 (1 − cosine)). The chance of a rejection grows about in proportion to it."""
    return math.sqrt(max(2 * (1 - cosine), 0.0))


class KnapSpecPlus(KnapSpec):
    """Chooses each round among the knapsack's drafts, the cheaper ways, the text itself and plain decoding.

    latency: a profile.LatencyModel. ways: names of rows in the model's table in which drafts may be kept. without: names
    of PARTS to leave out. window, tau and budget are KnapSpec's; every `interval` rounds it looks whether to solve the
    knapsack again. No plan depends on the clock when sampling: the same seed and profile give the same text.
    """

    def __init__(self, latency, *, ways=(), gamma_max=16, interval=32, without=(), **options):
        super().__init__(latency, gamma_max=gamma_max, interval=interval, **options)
        self.parts = frozenset(PARTS) - set(without)
        self.ways = ("full", *ways) if "ways" in self.parts else ("full",)
        self.prices = None

    def plan(self, session):
        rounds, n = session.generation.rounds, session.cache.length
        if rounds == 0:  # another text: prices stay, what was seen of drafts does not
            self.prices = self.prices or Prices(self.latency, session.model.config.n_layer, "prices" in self.parts)
            self.kept = {way: Candidate(way=way) for way in self.ways}  # the drafts that skip nothing
            self.candidates = [self.kept[way] for way in self.ways[1:]]
            self.lookup, self.next_look, self.planned_s = Lookup(), 0, 0.0
        self.verify_s = self.prices.verify_s(n, self.gamma_max)
        self.chosen, plan = self._best(n)
        if rounds >= self.next_look and self.gamma_max > 0 and self._worth_solving(session, plan):
            self.next_look = rounds + self.interval
            self._solve(session)
            self.chosen, plan = self._best(n)
        if "lookup" in self.parts:
            tokens, alpha = self.lookup.guess(session.tokens)
            rate, gamma = self._rate(alpha, 0.0, min(self.gamma_max, len(tokens)))
            if tokens and rate > plan.tokens_per_second:
                self.chosen, plan = None, Plan(gamma=gamma, alpha=alpha, tokens_per_second=rate, tokens=tokens)
        return plan

    def _rate(self, alpha, draft_s, gamma_max=None):
        """The most tokens per second that such drafts give at any γ ≥ 1, and that γ."""
        gammas = range(1, (self.gamma_max if gamma_max is None else gamma_max) + 1)
        return max(((tokens_per_time(alpha, gamma, draft_s, self.verify_s[gamma]), gamma) for gamma in gammas), default=(0.0, 0))

    def _best(self, n):
        """The candidate with the most tokens per time and its Plan; None and plain decoding where none is worth it."""
        best, plan = None, Plan(tokens_per_second=1 / self.verify_s[0])
        least = MARGIN * plan.tokens_per_second
        for candidate in self.candidates:
            alpha = self._alpha(candidate)
            rate, gamma = self._rate(alpha, self.prices.draft_s(n, candidate))
            if rate > max(least, plan.tokens_per_second):
                best, plan = candidate, Plan(candidate.skip_set, gamma, alpha, rate, self.prices.choices(candidate))
        return best, plan

    def _alpha(self, candidate):
        """A Beta posterior over what was seen of the candidate."""
        return (PRIOR_TOKENS * self._prior(candidate) + candidate.accepted) / (PRIOR_TOKENS + candidate.tried)

    def _prior(self, candidate):
        """That of its way; for one that skips, times what the window says of its skip set."""
        if candidate.skip_set:
            return candidate.window_alpha * self._alpha(self.kept[candidate.way])
        return 1.0 if candidate.way == "full" else WAYS[candidate.way].alpha

    # The knapsack: when, and what comes of it.

    def _sublayers_s(self, session):
        """The cheapest way to draft, and the seconds of its attention and of its MLP: what the knapsack counts in."""
        n = session.cache.length
        way = min(self.ways, key=lambda way: self.prices.draft_s(n, self.kept[way]))
        return way, [self.latency.sublayer(item, n, way) for item in (0, 1)]

    def _worth_solving(self, session, plan):
        """A look that costs no forward: would skipping pay if the changes that items make to the target's states added up?

        If so, and if what may be gained of the rest of the text is more than solving costs. The first time is free; later
        ones wait until they are within SHARE of the time.
        """
        if "thrift" not in self.parts:
            return True
        n, (way, seconds) = session.cache.length, self._sublayers_s(session)
        states, _ = session.window(self.window)
        price_s = self.latency.verify(n, BRANCHES * len(states[0]))
        if self.planned_s and self.planned_s + price_s > SHARE * len(session.generation.token_ids) / plan.tokens_per_second:
            return False
        self.next_look = session.generation.rounds + self.interval
        x = torch.stack(states).float()  # (2L + 1, W, H)
        changes = torch.cosine_similarity(x[1:], x[:-1], dim=-1).mean(-1).tolist()
        squares = {item: distance(changes[item]) ** 2 for item in range(2, len(changes) - 2)}
        alpha, draft_s, far, saved_s, best = self._alpha(self.kept[way]), self.prices.draft_s(n, self.kept[way]), 0.0, 0.0, 0.0
        for item in sorted(squares, key=lambda item: squares[item] / max(seconds[item % 2], 1e-12)):
            far, saved_s = far + squares[item], saved_s + seconds[item % 2]
            if saved_s <= self.budget * sum(seconds) * len(states) / 2:
                best = max(best, self._rate(alpha * max(1 - SLOPE * math.sqrt(far), 0.0), draft_s - saved_s)[0])
        gain_s = session.remaining / plan.tokens_per_second - session.remaining / best if best else 0.0
        if gain_s <= price_s:
            return False
        self.planned_s += price_s
        return True

    def _solve(self, session):
        """The knapsack on the latest window: each survivor is a candidate in every way. What was seen of known ones stays."""
        n, (way, seconds) = session.cache.length, self._sublayers_s(session)
        states, target_probs = session.window(self.window)
        weights = integer_weights(*seconds, self.prices.n_layer, self.max_ratio)
        most = int(self.budget * sum(weights))
        unit_s = sum(seconds) / (weights[0] + weights[1])
        whole_s = self.prices.draft_s(n, self.kept[way])

        def promising(item, branches):
            """Those whose course promises most: weight and squared distance grow with the weight of the items passed."""
            stretch = sum(weights[2:-2]) / max(sum(weights[2 : item + 1]), 1)

            def course(branch):
                alpha = max(1 - SLOPE * distance(branch.cosine) * math.sqrt(stretch), 0.0)
                return self._rate(alpha, whole_s - min(branch.weight * stretch, most) * unit_s)[0]

            best = sorted(branches, key=course, reverse=True)[:BRANCHES]
            return sorted(best, key=lambda branch: branch.weight)

        branches, x = knapsack(session.model.sublayers, weights, states, session.cache, budget=most, tau=self.tau,
                               select=promising if "pruning" in self.parts else None)  # fmt: skip
        alphas, distances = agreement(session, x, target_probs) if branches else [], [distance(branch.cosine) for branch in branches]
        # Eight tokens say little of one branch. All of them together say how fast rejections grow with the distance.
        slope = (SLOPE * SLOPE_WEIGHT + sum(1 - alpha for alpha in alphas)) / (SLOPE_WEIGHT + sum(distances))
        known = {(c.skip_set, c.way): c for c in self.candidates}
        self.candidates = [self.kept[way] for way in self.ways[1:]]
        for branch, alpha, far in zip(branches, alphas, distances):
            for way in self.ways if branch.skip_set else ():
                self.candidates.append(known.get((branch.skip_set, way), Candidate(branch.skip_set, way)))
                self.candidates[-1].window_alpha = max(1 - slope * far, 0.0) if "posterior" in self.parts else alpha

    # While drafting, and afterwards.

    def keep_drafting(self, session, plan, confidences):
        """Goes on where some number of further tokens is expected to be worth its time at the rate that the plan promises.

        The confidences tell the chance that all drafted so far are accepted, α that of each further one: a longer draft
        can pay where one more token does not, as a longer verification may cost hardly more. Source: the renewal-reward
        theorem.
        """
        if "renewal" not in self.parts:
            return super().keep_drafting(session, plan, confidences)
        c, k = self.chosen, len(confidences)
        risk = (PRIOR_TOKENS * (1 - self._prior(c)) + c.tried - c.accepted) / (PRIOR_TOKENS * DOUBT + c.doubt)
        chance = math.prod(max(1 - risk * (1 - confidence), 0) for confidence in confidences)
        draft_s, verify_s = self.prices.draft_s(session.cache.length, c), self.verify_s
        return any(chance * (expected_tokens(plan.alpha, m) - 1) > plan.tokens_per_second * (m * draft_s + verify_s[k + m] - verify_s[k])
                   for m in range(1, self.gamma_max - k + 1))  # fmt: skip

    def observe(self, session, round):
        if "posterior" in self.parts:
            for candidate in self.candidates:
                candidate.fade()
            if self.chosen:
                self.chosen.observe(round)
        if "prices" in self.parts and session.temperature == 0:
            self.prices.observe(round, self.chosen)

"""The yardstick: everything kept in one cheaper way, γ fixed, a lookup where it promises more, and no planning."""

from beyond.lookup import Lookup
from beyond.ways import WAYS
from decoding import Plan, Planner
from knapspec import tokens_per_time


class Uniform(Planner):
    """Drafts gamma tokens a round with nothing skipped, in the way with the most tokens per time at its usual α.

    latency: a profile.LatencyModel; ways: names of rows in the model's table, "full" being plain decoding.
    """

    def __init__(self, latency, *, ways=(), gamma=10):
        self.latency, self.ways, self.gamma = latency, ways, gamma

    def plan(self, session):
        n, L = session.cache.length, session.model.config.n_layer
        verify_s = [self.latency.verify(n, k) for k in range(1, self.gamma + 2)]
        if session.generation.rounds == 0:
            self.lookup, self.uniform = Lookup(), Plan(tokens_per_second=1 / verify_s[0])
            for way in self.ways:
                alpha, choices = WAYS[way].alpha, (way,) * (2 * L + 1)
                rate = tokens_per_time(alpha, self.gamma, self.latency.draft(frozenset(), n, L, choices), verify_s[-1])
                if rate > self.uniform.tokens_per_second:
                    self.uniform = Plan(frozenset(), self.gamma, alpha, rate, choices)
        tokens, alpha = self.lookup.guess(session.tokens)
        rate = tokens_per_time(alpha, self.gamma, 0.0, verify_s[-1])
        if tokens and rate > self.uniform.tokens_per_second:
            return Plan(gamma=self.gamma, alpha=alpha, tokens_per_second=rate, tokens=tokens)
        return self.uniform

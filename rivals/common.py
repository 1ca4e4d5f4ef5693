"""What the rivals share: a planner with one skip set and a threshold, one that moves the threshold, a Bayesian search."""

import contextlib

from decoding import Plan, Planner


def whole_blocks(blocks):
    """The skip set of both sublayers of each block, counted from 0."""
    return frozenset(item for i in blocks for item in (2 * i, 2 * i + 1))


def odd_blocks(n_layer):
    """1, 3, … without the last block: SWIFT's first guess."""
    return range(1, n_layer - 1, 2)


class Rival(Planner):
    """Drafts up to gamma tokens without skip_set, or until the confidence is under a threshold."""

    skip_set = frozenset()
    gamma = 0  # the longest draft
    threshold = 0.0
    search_s = 0.0  # seconds spent on searching for a skip set
    least_blocks = 3  # of a model that it is made for

    @classmethod
    def make(cls, model, **options):
        """A new one for this model; options are those of rivals.make_planner."""
        return cls(model.config.n_layer)

    def plan(self, session):
        return Plan(self.skip_set, self.gamma)

    def keep_drafting(self, session, plan, confidences):
        return not confidences[-1] < self.threshold  # never stops at a threshold that is not a number


class AdaptiveStop(Rival):
    """Moves the threshold up while too few drafts are accepted, and down while they are accepted but stop too early.

    `rate`, the share accepted, is a running mean (β₁) that restarts with each prompt; the threshold moves a step ε,
    damped (β₂), and carries over. Source: Draft & Verify (arXiv 2309.08168), its adaptive draft-exiting mechanism.
    """

    def __init__(self, *, gamma=12, threshold=0.6, target_rate=0.90, step=0.01, rate_decay=0.5, threshold_decay=0.9):
        self.gamma, self.threshold, self.rate = gamma, threshold, 0.0
        self.target_rate, self.step, self.rate_decay, self.threshold_decay = target_rate, step, rate_decay, threshold_decay

    def plan(self, session):
        if session.generation.rounds == 0:
            self.rate = 0.0
        return super().plan(session)

    def adapt(self, drafted, accepted):
        self.rate = self.rate_decay * self.rate + (1 - self.rate_decay) * accepted / drafted
        wanted = self.threshold
        if self.rate < self.target_rate:
            wanted += self.step
        elif drafted < self.gamma:
            wanted -= self.step
        self.threshold = self.threshold_decay * self.threshold + (1 - self.threshold_decay) * wanted

    def observe(self, session, round):
        if round.drafted:
            self.adapt(round.drafted, round.accepted)


class Bayes:
    """Bayesian optimisation over [0, 1]^n: a Gaussian process, and the point with the largest upper confidence bound.

    Raises ValueError where the optional package bayesian-optimization is missing.
    """

    def __init__(self, n, *, kappa, seed, noise=1e-2):
        try:
            from bayes_opt import BayesianOptimization
            from bayes_opt.acquisition import UpperConfidenceBound
        except ImportError:
            raise ValueError("this method searches by Bayesian optimisation: pip install bayesian-optimization") from None
        bounds = {f"{i:06d}": (0.0, 1.0) for i in range(n)}
        self.optimizer = BayesianOptimization(None, bounds, acquisition_function=UpperConfidenceBound(kappa=kappa),
                                              random_state=seed, verbose=0, allow_duplicate_points=True)  # fmt: skip
        self.optimizer.set_gp_params(alpha=noise)

    def suggest(self):
        return [float(x) for x in self.optimizer.suggest().values()]

    def register(self, point, score):
        with contextlib.redirect_stdout(None):  # where it would print a notice for each point that it knows already
            self.optimizer.register(dict(zip(self.optimizer.space.keys, point, strict=True)), score)

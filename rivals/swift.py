"""SWIFT: random and Bayesian candidates, scored on the text generated so far."""

import time

import torch

from rivals.common import Bayes, Rival, odd_blocks, whole_blocks


def parallel_draft(model, cache, tokens, start, skip_set):
    """Logits (T, V) of a draft over tokens (T,) at positions start …, in one pass; the cache is left as it was."""
    rows, length = slice(start, start + len(tokens)), cache.length
    keys, values = cache.keys[:, :, rows].clone(), cache.values[:, :, rows].clone()
    cache.length = start
    logits = model(tokens, cache, skip=skip_set)
    cache.length, cache.keys[:, :, rows], cache.values[:, :, rows] = length, keys, values
    return logits


def matchness(choices, tokens):
    """Share of positions at which the choice is the token that came next; tokens are one more than choices."""
    return sum(choice == token for choice, token in zip(choices, tokens[1:], strict=True)) / len(choices)


class Swift(Rival):
    """Tries one candidate skip set a round, keeps the best, and stops when it is good enough.

    A candidate skips exactly int(2 (L − 2) share) sublayers, of no first or last block: a random set, and every
    `bayes_interval`-th time the largest coordinates of a Bayesian suggestion. Its score is the share of the request's
    first `context` new tokens after which it would choose the next one. The search goes on across prompts, until a
    score exceeds max_score, `tolerance` candidates in a row were no better, or max_iterations are exceeded. search_s
    is part of the generations' time for planning. seed: of the candidates. bayes_interval None needs no package.
    Source: SWIFT (arXiv 2410.06916) and its model/swift/utils.py; defaults of its command line, search switched on.
    Differs: drafts a single line of tokens, not a tree.
    """

    def __init__(self, n_layer, *, share=0.45, interval=1, bayes_interval=25, max_iterations=1000, tolerance=300,
                 max_score=0.95, context=32, gamma=25, threshold=0.8, seed=0):  # fmt: skip
        self.free = range(2, 2 * n_layer - 2)
        self.n_skipped = int(2 * (n_layer - 2) * share)
        self.interval, self.bayes_interval, self.context = interval, bayes_interval, context
        self.max_iterations, self.tolerance, self.max_score = max_iterations, tolerance, max_score
        self.skip_set, self.gamma, self.threshold = whole_blocks(odd_blocks(n_layer)), gamma, threshold
        self.rng = torch.Generator().manual_seed(seed)
        self.bayes = Bayes(len(self.free), kappa=2.5, seed=seed) if bayes_interval else None
        self.best_score, self.iterations, self.streak, self.searching = 0.0, 0, 0, True

    def plan(self, session):
        generation, start_s = session.generation, time.perf_counter()
        if self.searching and generation.rounds % self.interval == 0 and len(generation.token_ids) > self.context + 1:
            candidate = self.candidate()
            tokens = generation.token_ids[: self.context + 1]
            first = len(session.tokens) - len(generation.token_ids)  # position of the first new token
            inputs = torch.tensor(tokens[:-1], device=session.model.device)
            logits = parallel_draft(session.model, session.cache, inputs, first, candidate)
            self.consider(candidate, matchness(logits.argmax(-1).tolist(), tokens))
            self.search_s += time.perf_counter() - start_s
        return super().plan(session)

    def candidate(self):
        if self.bayes and (self.iterations + 1) % self.bayes_interval == 0:
            order = torch.tensor(self.bayes.suggest()).argsort(descending=True)
        else:
            order = torch.randperm(len(self.free), generator=self.rng)
        return frozenset(self.free[i] for i in order[: self.n_skipped].tolist())

    def consider(self, candidate, score):
        """Adopts a candidate that scores more than any before; decides whether to search on."""
        if self.bayes:
            self.bayes.register([float(item in candidate) for item in self.free], score)
        self.iterations, self.streak = self.iterations + 1, self.streak + 1
        if score > self.best_score:
            self.best_score, self.skip_set, self.streak = score, candidate, 0
        self.searching = score <= self.max_score and self.streak <= self.tolerance and self.iterations <= self.max_iterations

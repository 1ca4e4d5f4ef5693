"""What a run did, round by round, and what its last plan was weighed against: written down, and nothing changed.

Writing it down takes a run's total time a little longer, and the drafting, verifying and planning that are told not at all.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch

from decoding import Planner, Round
from knapspec import tokens_per_time

LIKELIEST = 3  # tokens that are kept of a distribution
KINDS = {  # of a token -> its mark, its ANSI colour, and what that means
    "first": ("^", "1", "first token: it comes out of the prompt"),
    "accepted": ("+", "32", "drafted and accepted"),
    "looked-up": ("=", "36", "looked up in the text so far and accepted"),
    "rejected": ("-", "31", "drafted and rejected"),
    "unread": (".", "2", "drafted behind a rejected one or the end of the text, never looked at"),
    "correction": (">", "33", "the target's correction of a rejected draft"),
    "bonus": ("*", "35", "the target's bonus where all drafts were accepted"),
    "plain": ("|", "0", "decoded plainly, nothing was drafted"),
}


@dataclass
class Token:
    """A token that was drafted or shown. target, draft: [(id, probability)], the likeliest that each would have put there."""

    kind: str  # of KINDS
    id: int
    target: list
    draft: list


@dataclass
class Step:
    """A round with all that was drafted, and the `shown` new tokens that came of it."""

    round: Round
    plan_s: float
    drafts: list
    shown: int
    target: list  # the likeliest tokens behind each
    draft: list

    def tokens(self, last):
        """Its drafts, then `last`, the token of the target's own; None if there is none, or an interrupt came before it."""
        accepted, rejected = self.round.accepted, self.shown > self.round.accepted < len(self.drafts)
        kinds = ["looked-up" if self.round.plan.tokens else "accepted"] * accepted + ["rejected"] * rejected + ["unread"] * len(self.drafts)
        tokens = [Token(*each) for each in zip(kinds, self.drafts, self.target, self.draft)]
        if last is not None:
            kind = "correction" if rejected else "bonus" if tokens else "plain"
            tokens.append(Token(kind, last, self.target[accepted], self.draft[accepted] if rejected else []))
        return tokens


@dataclass
class Draft:
    """A draft that was weighed. rates: its tokens per second for γ = 0, 1, …, the first being plain decoding's."""

    skip_set: frozenset
    way: str
    alpha: float
    rates: list
    weight: int = 0
    cosine: float | None = None  # None: no branch of the knapsack

    @property
    def best(self):
        """(tokens per second, γ)"""
        return max((rate, gamma) for gamma, rate in enumerate(self.rates) if gamma)


@dataclass
class Decision:
    """A plan, and what it was weighed against."""

    position: int
    plan: object
    drafts: list  # Drafts, without plain decoding and what was looked up
    plain: float | None  # tokens per second of plain decoding, where the planner prices it
    weights: tuple | None  # of an attention and of an MLP, where a knapsack was solved

    @property
    def winner(self):
        """The Draft that was chosen, or None: plain decoding, or a text that was looked up."""
        way = self.plan.choices[0] if self.plan.choices else "full"
        found = (d for d in self.drafts if (d.skip_set, d.way) == (self.plan.skip_set, way))
        return next(found, None) if self.plan.gamma and not self.plan.tokens else None


def skipped(skip_set):
    """How many attentions and MLPs."""
    attention = sum(item % 2 == 0 for item in skip_set)
    return attention, len(skip_set) - attention


def describe(skip_set, way):
    """A draft in words."""
    return f"{way}, {'skipping {} attention and {} MLP'.format(*skipped(skip_set)) if skip_set else 'skipping nothing'}"


def describe_plan(plan, bound=True):
    """A plan in words, with its gamma if bound."""
    if not plan.gamma:
        return "plain decoding"
    words = "looked up" if plan.tokens else describe(plan.skip_set, "/".join(dict.fromkeys(plan.choices or ["full"])))
    return f"{words}, gamma {plan.gamma}" if bound else words


def likeliest(logits):
    """For each row of logits (N, V) the likeliest tokens [(id, probability)], before temperature and top-p."""
    logits = logits.float()
    top, ids = logits.topk(min(LIKELIEST, logits.size(-1)))
    probs = (top - logits.logsumexp(-1, keepdim=True)).exp()
    return [list(zip(*row)) for row in zip(ids.tolist(), probs.tolist())]


class Watched:
    """A model, and the (tokens, logits) of its forwards since `calls` was renewed."""

    def __init__(self, model):
        self.watched, self.calls = model, deque(maxlen=1)  # of a prompt in many chunks the last is enough

    def __getattr__(self, name):
        return getattr(self.watched, name)

    def __call__(self, tokens, cache, **options):
        logits = self.watched(tokens, cache, **options)
        self.calls.append((tokens, logits))
        return logits


class Trace(Planner):
    """A planner that does as another one does, and keeps of each round what can be told of it.

    generate() takes it with its `model`, so that the logits are seen: the last forward before the first plan is the
    prompt's, the last one of a round is its verification, and those before it are its drafts.
    """

    def __init__(self, planner, model):
        self.planner, self.model, self.window = planner, Watched(model), planner.window
        self.first, self.steps, self.decision, self.solved, self.branches = None, [], None, 0, None

    def plan(self, session):
        self.first = self.first or self._first()
        start_s = time.perf_counter()
        plan = self.planner.plan(session)
        self.plan_s = time.perf_counter() - start_s
        self.model.calls = []
        branches = getattr(self.planner, "branches", None)
        if branches is not self.branches or not self.solved:
            self.solved += branches is not self.branches
            self.branches = branches
            self.decision = self._decision(session, plan)
        return plan

    def _first(self):
        return likeliest(self.model.calls[-1][1][-1:])[0]

    def _decision(self, session, plan):
        planner, branches = self.planner, {branch.skip_set: branch for branch in self.branches or ()}
        drafts, verify_s = [], getattr(planner, "verify_s", ())
        for skip_set, way, alpha, draft_s in planner.weighed if len(verify_s) > 1 else ():
            rates, branch = [tokens_per_time(alpha, gamma, draft_s, s) for gamma, s in enumerate(verify_s)], branches.get(skip_set)
            drafts.append(Draft(skip_set, way, alpha, rates, branch.weight if branch else 0, branch and branch.cosine))
        weights = tuple(planner.weights[:2]) if self.solved else None
        return Decision(session.cache.length, plan, drafts, 1 / verify_s[0] if verify_s else None, weights)

    def keep_drafting(self, session, plan, confidences):
        return self.planner.keep_drafting(session, plan, confidences)

    def observe(self, session, round):
        self.planner.observe(session, round)
        *drafting, (tokens, logits) = self.model.calls
        drafts, shown = tokens[1:].tolist(), session.cache.length - round.position
        rows = [logits for _, logits in drafting][: len(drafts)]  # a draft that overflowed ran once more
        draft = likeliest(torch.cat(rows)) if rows else [[]] * len(drafts)
        self.steps.append(Step(round, self.plan_s, drafts, shown, likeliest(logits), draft))
        self.model.calls = []

    def told(self, token_ids):
        """[[Token]]: that of the prompt, then those of each round in order. token_ids: what was shown, perhaps of an interrupted run."""
        if not token_ids:
            return []
        told, end = [[Token("first", token_ids[0], self.first or self._first(), [])]], 1
        for step in self.steps:
            last = token_ids[end + step.round.accepted] if end + step.round.accepted < len(token_ids) else None
            told.append(step.tokens(last))
            end += step.shown
        return told

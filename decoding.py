"""Self-speculative decoding: one loop that drafts with some sublayers skipped and verifies with none.

Read it from top to bottom: from logits to a token, a round's draft and its verification, what a planner is, and
generate(). Every method, the paper's and its rivals', is a planner for this loop.

Shapes: γ drafted tokens, W positions of a window, V vocabulary, H hidden size, L layers.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field, replace

import torch

from model import KVCache

# --- 1. From logits to a token ---------------------------------------------------------------------------------------


def sampling_probs(logits, temperature, top_p):
    """The distribution that is really sampled from: logits (N, V) -> probabilities (N, V), float32.

    Temperature 0 is one-hot, so that greedy and sampled decoding share one path. top_p keeps the most likely
    tokens up to that mass, the first one always. Rows must be finite: see `check_finite`.
    Source: Holtzman et al. 2020 (nucleus sampling).
    """
    logits = logits.float()
    top, index = logits.max(-1, keepdim=True)
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, index, 1.0)
    probs = torch.softmax((logits - top) / max(temperature, 1e-30), -1)
    if top_p >= 1:
        return probs
    ranked = probs.topk(min(1024, probs.size(-1))).values
    if (ranked.sum(-1) < top_p).any():  # the nucleus is wider: sort all
        ranked = probs.sort(-1, descending=True).values
    before = ranked.cumsum(-1) - ranked  # mass of the likelier tokens
    # The least likely token that stays. Its equals stay too: which of them come first may differ from call to call.
    least = torch.where(before < top_p, ranked, 1.0).amin(-1, keepdim=True).minimum(ranked[:, :1])
    probs = torch.where(probs >= least, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def check_finite(largest):
    """Raises FloatingPointError where one of these largest logits, or of numbers made of them, is NaN or infinite."""
    if not all(map(math.isfinite, largest)):
        raise FloatingPointError("the model's logits are not finite; try --dtype float32")


def sample(probs, rng):
    """One token id from probs (V,), a tensor (), by inverting the cumulative distribution at a uniform draw."""
    cumulative = probs.double().cumsum(-1)
    draw = torch.rand((), generator=rng, dtype=torch.float64).item()
    index = torch.searchsorted(cumulative, cumulative[-1:] * draw, right=True)
    return index[0].clamp(max=probs.size(0) - 1)


def bernoulli(probability, rng):
    """True with the given probability."""
    return torch.rand((), generator=rng, dtype=torch.float64).item() < probability


# --- 2. Draft, verify, accept ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One decision: what to skip, how many to draft, and what was expected of it."""

    skip_set: frozenset = frozenset()
    gamma: int = 0  # 0 is plain decoding
    alpha: float = 1.0  # estimated chance that one drafted token is accepted
    tokens_per_second: float | None = None  # predicted
    choices: tuple | None = None  # names of how the kept items, and the head, are computed; None: all as the target does
    tokens: tuple = ()  # a draft that is given, of at least gamma tokens: no model runs for it


def draft(model, cache, last, plan, keep_drafting, temperature, top_p, rng, eos_ids=()):
    """Guesses up to plan.gamma tokens behind `last` with plan.skip_set left out, or takes those that the plan gives.

    keep_drafting(confidences) is asked after each token; a token that ends the draft is still submitted, an end-of-text too.
    cache.length is moved while drafting and put back. Returns (drafts, draft_probs (γ, V), confidences), where a
    confidence is the draft's own probability, before temperature and top-p, of the token it chose. A token that is
    given was certain: its distribution is one-hot, and it has no confidence.
    """
    if plan.tokens:
        given = torch.tensor(plan.tokens[: plan.gamma], dtype=torch.int64, device=model.device)
        return given.tolist(), torch.nn.functional.one_hot(given, model.config.vocab_size).float(), []
    drafts, rows, confidences, length = [], [], [], cache.length
    try:
        for _ in range(plan.gamma):
            tokens = torch.tensor([drafts[-1] if drafts else last], device=model.device)
            logits = model(tokens, cache, skip=plan.skip_set, choices=plan.choices)
            probs = sampling_probs(logits, temperature, top_p)[0]
            token = sample(probs, rng) if temperature else probs.argmax()
            confidence = torch.softmax(logits[0].float(), -1).gather(0, token[None])[0]
            token, confidence = torch.stack((token.double(), confidence.double())).tolist()  # a GPU is waited for once
            if not math.isfinite(confidence):  # the draft overflowed, the target need not: what is here so far is submitted
                break
            rows.append(probs)
            drafts.append(int(token))
            confidences.append(confidence)
            cache.length += 1
            if drafts[-1] in eos_ids or not keep_drafting(confidences):
                break
    finally:
        cache.length = length
    return drafts, torch.stack(rows) if rows else None, confidences


def accept(target_probs, drafts, draft_probs, rng):
    """How many drafts stand, and the token that follows them: a correction, or the bonus if all stand.

    target_probs (γ+1, V), draft_probs (γ, V). The tokens are distributed as if sampled from the target alone.
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023.
    """
    for i, token in enumerate(drafts):
        target_prob, draft_prob = target_probs[i, token].item(), draft_probs[i, token].item()
        if not bernoulli(target_prob / draft_prob, rng):
            residual = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return i, int(sample(residual if residual.sum() > 0 else target_probs[i], rng))
    return len(drafts), int(sample(target_probs[len(drafts)], rng))


# --- 3. Planners -----------------------------------------------------------------------------------------------------


class Planner:
    """Decides before each round what to skip and how far to draft; each method is one. This one decodes plainly."""

    window = 0  # how many of the latest verified positions it wants to see the states of (Session.recent)

    def plan(self, session):
        """Called before each round -> Plan."""
        return Plan()

    def keep_drafting(self, session, plan, confidences):
        """Called after each drafted token: draft one more? The plan's gamma bounds it in any case."""
        return True

    def observe(self, session, round):
        """Called after each round."""


class FixedPlanner(Planner):
    """Always the same plan."""

    def __init__(self, plan):
        self.fixed = plan

    def plan(self, session):
        return self.fixed


# --- 4. The loop -----------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """What one round did: the first `accepted` of its `drafted` tokens went into the text, then one of the target's own.

    No token goes into the text behind an end-of-text: where a draft holds one that is accepted, it is the last.
    """

    position: int  # tokens in the cache before it
    plan: Plan
    drafted: int
    accepted: int
    confidences: list
    draft_s: float
    verify_s: float


@dataclass
class Generation:
    """What generate() returns. Seconds are keyed prefill, plan, draft, verify, total."""

    token_ids: list = field(default_factory=list)  # new ones; a final end-of-text included
    stop_reason: str | None = None  # "eos", "length" (max_new_tokens) or "context" (the model's longest sequence)
    seconds: dict = field(default_factory=lambda: dict.fromkeys(("prefill", "plan", "draft", "verify", "total"), 0.0))
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    given: int = 0  # of those drafted: by a plan that gives the tokens
    given_accepted: int = 0
    plans: list = field(default_factory=list)  # (position, Plan, seconds of planning), one for each change; no given drafts


class Session:
    """What a planner may look at while a generation is under way."""

    def __init__(self, model, cache, planner, temperature, top_p, max_new_tokens):
        self.model, self.cache, self.temperature, self.top_p = model, cache, temperature, top_p
        self.generation, self.max_new_tokens, self.start_s = Generation(), max_new_tokens, time.perf_counter()
        self.tokens = []  # prompt and new tokens; the last one is not in the cache yet
        self.recent, self.wanted = deque(), planner.window  # (states, target_probs) of verified rows, oldest first

    @property
    def remaining(self):
        return self.max_new_tokens - len(self.generation.token_ids)

    def elapsed_s(self):
        return time.perf_counter() - self.start_s

    def remember(self, states, target_probs):
        """states: x_0 … x_2L, each (rows, H), of positions just verified."""
        self.recent.append((states, target_probs))
        while sum(len(probs) for _, probs in self.recent) - len(self.recent[0][1]) >= self.wanted:
            self.recent.popleft()

    def window(self, W):
        """The states x_0 … x_2L, each (≤ W, H), and target_probs (≤ W, V) of the last W verified positions."""
        states = [torch.cat(parts)[-W:] for parts in zip(*(states for states, _ in self.recent))]
        return states, torch.cat([probs for _, probs in self.recent])[-W:]


PREFILL_CHUNK = 512


def prefill(session, tokens):
    """Fills the cache with the prompt in chunks, the last a full one -> target_probs after the last token, (1, V)."""
    cache, last = session.cache, max(session.wanted, 1)
    start = 0
    while start < len(tokens):
        end = start + (min(len(tokens), PREFILL_CHUNK) if start else (len(tokens) - 1) % PREFILL_CHUNK + 1)
        capture = [] if session.wanted and end == len(tokens) else None
        chunk = torch.tensor(tokens[start:end], device=session.model.device)
        logits = session.model(chunk, cache, capture=capture, last=last)
        cache.length = start = end
    check_finite(logits.amax(-1).tolist())
    target_probs = sampling_probs(logits, session.temperature, session.top_p)
    if session.wanted:
        session.remember(capture, target_probs)
    return target_probs[-1:]


@torch.inference_mode()
def generate(model, prompt_ids, *, max_new_tokens, eos_ids=(), temperature=0.0, top_p=1.0, planner=None, rng=None,
             on_token=None):  # fmt: skip
    """Continues prompt_ids (a list of ids) and returns a Generation.

    planner None is plain decoding. The tokens do not depend on the planner: at temperature 0 they are the target's
    argmaxes, else they follow its distribution after temperature and top_p. rng: a CPU torch.Generator (default: a
    new one, always seeded alike). on_token(id) is called for each new token. Raises ValueError for a prompt that is empty or leaves no
    room, FloatingPointError for logits that are not finite; a KeyboardInterrupt carries the Generation so far.
    """
    room = model.config.max_position - len(prompt_ids)
    if not prompt_ids:
        raise ValueError("the prompt is empty")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it cannot be negative")
    if room < 1:
        raise ValueError(f"the prompt has {len(prompt_ids)} tokens; the model takes {model.config.max_position - 1} at most")
    limit, planner, rng = min(max_new_tokens, room), planner or Planner(), rng or torch.Generator()
    cache = KVCache(model.config, len(prompt_ids) + limit, device=model.device, dtype=model.dtype)
    session = Session(model, cache, planner, temperature, top_p, limit)
    session.tokens = list(prompt_ids)
    generation, seconds = session.generation, session.generation.seconds
    try:
        if limit > 0:
            target_probs = prefill(session, prompt_ids)
            new = [int(sample(target_probs[0], rng))]
            seconds["prefill"] = session.elapsed_s()
            while _emit(session, new, eos_ids, on_token):
                new = _round(session, planner, eos_ids, rng)
        if generation.stop_reason is None:
            generation.stop_reason = "length" if limit == max_new_tokens else "context"
    except KeyboardInterrupt as interrupt:
        generation.stop_reason, interrupt.generation = "interrupted", generation
        raise
    finally:
        seconds["total"] = session.elapsed_s()
    return generation


def _emit(session, new, eos_ids, on_token):
    """Shows the new tokens; is there more to come?"""
    generation = session.generation
    for token in new:  # one by one: an interrupt of on_token finds in token_ids what was shown
        generation.token_ids.append(token)
        session.tokens.append(token)
        if on_token:
            on_token(token)
    if new[-1] in eos_ids:
        generation.stop_reason = "eos"
    return generation.stop_reason is None and session.remaining > 0


def _decision(plan):
    return plan.skip_set, plan.gamma, plan.choices


def _round(session, planner, eos_ids, rng):
    """Plans, drafts, verifies, accepts -> the new tokens, none behind an end-of-text."""
    model, cache, generation = session.model, session.cache, session.generation
    clock = [time.perf_counter()]
    plan = planner.plan(session)
    clock.append(time.perf_counter())
    if not plan.tokens and (not generation.plans or _decision(plan) != _decision(generation.plans[-1][1])):
        generation.plans.append((cache.length, plan, clock[1] - clock[0]))
    bounded = replace(plan, gamma=min(plan.gamma, session.remaining - 1))
    last = session.tokens[-1]
    drafts, draft_probs, confidences = draft(
        model, cache, last, bounded, lambda c: planner.keep_drafting(session, plan, c), session.temperature, session.top_p, rng, eos_ids
    )
    clock.append(time.perf_counter())
    # Verification writes all layers' keys and values over those of the draft.
    capture = [] if session.wanted else None
    logits = model(torch.tensor([last, *drafts], device=model.device), cache, capture=capture)
    check_finite(logits.amax(-1).tolist())
    target_probs = sampling_probs(logits, session.temperature, session.top_p)
    accepted, token = accept(target_probs, drafts, draft_probs, rng)
    new = [*drafts[:accepted], token]
    shown = next((i + 1 for i, t in enumerate(new) if t in eos_ids), len(new))
    clock.append(time.perf_counter())
    round = Round(cache.length, plan, len(drafts), min(accepted, shown), confidences, clock[2] - clock[1], clock[3] - clock[2])
    cache.length += shown
    if session.wanted:
        session.remember([x[:shown] for x in capture], target_probs[:shown])
    generation.rounds += 1
    generation.drafted += round.drafted
    generation.accepted += round.accepted
    if plan.tokens:
        generation.given += round.drafted
        generation.given_accepted += round.accepted
    for name, i in (("plan", 0), ("draft", 1), ("verify", 2)):
        generation.seconds[name] += clock[i + 1] - clock[i]
    planner.observe(session, round)
    return new[:shown]

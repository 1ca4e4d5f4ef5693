"""KnapSpec (arXiv 2602.20217): which sublayers to skip in a draft, chosen by a knapsack over measured latencies.

Read it from top to bottom: tokens per time says what a choice of sublayers and γ is worth, the knapsack finds choices
worth pricing, and the planner decides, and corrects itself by what it sees. decoding.py holds the loop that drafts and
verifies; run this file to decode from the command line.
"""

import math
from dataclasses import dataclass

import torch

from decoding import (
    FixedPlanner,
    Generation,
    Plan,
    Planner,
    Session,
    generate,
    sampling_probs,
)
from model import Context

__all__ = ["FixedPlanner", "Generation", "KnapSpec", "Plan", "Planner", "Session", "generate", "knapsack", "tokens_per_time"]

# --- 1. Tokens per time ----------------------------------------------------------------------------------------------


def expected_tokens(alpha, gamma):
    """Mean tokens of a round: 1 + α + … + α^γ, the correction or bonus token included. Source: Leviathan et al. 2023."""
    return sum(alpha**i for i in range(gamma + 1))


def tokens_per_time(alpha, draft_s, verify_s):
    """TPT in tokens per second of C choices at every γ from 0 (plain decoding) to γmax: (C, γmax + 1) float64.

    alpha and draft_s, the seconds of one draft token, are (C,); verify_s[γ] are the seconds of verifying γ + 1 tokens.
    Source: KnapSpec's TPT. Differs: every γ has its own price of verification, and γ = 0 stands among them.
    """
    alpha, draft_s, verify_s = (torch.as_tensor(t, dtype=torch.float64) for t in (alpha, draft_s, verify_s))
    gamma = torch.arange(verify_s.size(0), dtype=torch.float64)
    return (alpha[:, None] ** gamma).cumsum(-1) / (gamma * draft_s[:, None] + verify_s)


# --- 2. The knapsack -------------------------------------------------------------------------------------------------


class Branches(Context):
    """B drafts of the last W verified tokens side by side: rows (B * W, H), row b * W + w at the w-th position.

    Each row attends to the target's keys of all earlier tokens, shared by all branches and read in place, and to
    its own key. Nothing is written to the cache. With own_window a row sees its own branch's keys of the window
    in place of the target's.
    """

    def __init__(self, cache, B, W, own_window=False):
        n = cache.length
        self.cache, self.start = cache, n - W
        self.cos, self.sin = cache.cos[n - W : n].repeat(B, 1, 1), cache.sin[n - W : n].repeat(B, 1, 1)
        verified = torch.ones(W, n, dtype=torch.bool).tril(-1 if own_window and n == W else n - W - 1)
        own = torch.eye(W, dtype=torch.bool)
        if own_window:
            verified[:, n - W :] = False
            own = own.logical_or(torch.ones_like(own).tril())
        seen = torch.cat((verified.repeat(B, 1), torch.block_diag(*[own] * B)), 1)  # (B*W, n + B*W)
        self.mask = cache.keys.new_zeros(seen.shape).masked_fill_(~seen.to(cache.keys.device), float("-inf"))

    def extend(self, layer, k, v):
        """k and v (B * W, n_kv_head, D) -> the verified ones and these, (1, n_kv_head, n + B * W, D)."""
        cache, n = self.cache, self.cache.length
        keys = torch.cat((cache.keys[layer, :, :n], k.transpose(0, 1)), 1)
        return keys[None], torch.cat((cache.values[layer, :, :n], v.transpose(0, 1)), 1)[None]


def distance(x, target):
    """‖u − v‖ of the directions of x and target (…, H), in float32: √(2 (1 − cosine)). The cosine comes along."""
    cosine = torch.cosine_similarity(x.float(), target.float(), dim=-1)
    return (2 * (1 - cosine)).clamp(min=0).sqrt(), cosine


@dataclass
class Branch:
    """One survivor for each weight saved: how it got there, and its block in the batched states."""

    weight: int
    saved_s: float
    path: tuple | None  # ((sublayers, "skip" or the cheaper way), the path before it)
    block: int  # which of the stacked states, kept ones first


@torch.inference_mode()
def knapsack(model, cache, states, costs, *, budget=0.5, tau=0.5, items=None, ways=None, gain=None, max_branches=None,
             own_window=False):  # fmt: skip
    """Skip sets that stay close to the target, one for each amount of time saved.

    states: x_0 … x_2L of the last W verified tokens, each (W, H); cache.length counts them in. costs: seconds of
    each sublayer, 2L. budget: largest share of the sublayers' time to save, each in its cheapest way. items: tuples of
    sublayers that are kept or skipped together. Ours: ways, for each sublayer a list of (name, cost, function), the
    first the way in which it is kept at `costs`, the others cheaper; gain(distances, saved_s), what such drafts would
    give over plain decoding: with it branches are dropped that cannot exceed 1 any more, and of the rest at most
    max_branches are kept, by where they are heading. Returns [(skip_set, names, saved_s, final states (W, H))], by time saved; names maps
    sublayers that are kept in a cheaper way to that. Source: KnapSpec's dynamic program.
    """
    W, H = states[0].shape
    items = items or [(b,) for b in range(len(costs))]
    # 1. Latencies to integer weights in units of the cheapest item; the exact time is carried along.
    item_costs = [sum(costs[b] for b in item) for item in items]
    unit = max(min(item_costs), 1e-12)
    cheapest = [min(cost for _, cost, _ in way) for way in ways] if ways else costs
    capacity = budget * sum(cheapest) + sum(cost - least for cost, least in zip(costs, cheapest))
    skippable = [item[0] >= 2 and item[-1] < len(costs) - 2 for item in items]  # never the first and the last layer
    total_s = ahead_s = sum(cost for cost, can_skip in zip(item_costs, skippable) if can_skip)
    branches, x, contexts = [Branch(0, 0.0, None, 0)], states[0][None], {}  # x: (B, W, H)
    for item, cost, can_skip in zip(items, item_costs, skippable):
        B = len(branches)
        if B not in contexts:
            contexts[B] = Branches(cache, B, W, own_window)
        # 2. Keep: the item on all branches in one batched call. Skip: the states as they are, and time saved.
        choices = [(None, 0.0, [ways[b][0][2] if ways else model.sublayers[b] for b in item])]
        if can_skip:
            ahead_s -= cost
            if ways and len(item) == 1:  # what saves less than half a unit would hide the skips of weight 1
                cheaper = ((name, cost - cheaper_s, [way]) for name, cheaper_s, way in ways[item[0]][1:])
                choices += [choice for choice in cheaper if choice[1] >= unit / 2]
            choices += [("skip", cost, [])]
        stacked, proposals = [], []
        for name, saved_s, functions in choices:
            kept = x.reshape(B * W, H)
            for function in functions:
                kept = function(kept, contexts[B])
            weight = max(1, round(saved_s / unit)) if saved_s else 0
            for i, p in enumerate(branches):
                if p.saved_s + saved_s <= capacity:
                    path = ((item, name), p.path) if name else p.path
                    proposals.append(Branch(p.weight + weight, p.saved_s + saved_s, path, len(stacked) * B + i))
            stacked.append(kept.view(B, W, H))
        stacked = torch.cat(stacked)
        # 3. Drop what fell under τ; keep the closest branch for each weight.
        far, cosines = (t.mean(-1) for t in distance(stacked, states[item[-1] + 1]))
        cosine, best = cosines.tolist(), {}
        for p in proposals:
            if cosine[p.block] >= tau and (p.weight not in best or cosine[p.block] > cosine[best[p.weight].block]):
                best[p.weight] = p
        branches = [best[weight] for weight in sorted(best)]
        if gain and branches:
            branches = prune(branches, far, gain, capacity, ahead_s, total_s, max_branches)
        if not branches:
            return []
        x = stacked[[p.block for p in branches]]
    # 4. Trace back: one skip set for each weight.
    return [(*trace(p.path), p.saved_s, x[i]) for i, p in enumerate(branches)]


def trace(path):
    """The skipped sublayers, and the names of the cheaper ways in which others are kept, from a branch's path."""
    skip_set, names = set(), {}
    while path:
        (item, name), path = path
        skip_set.update(item if name == "skip" else ())
        names.update({b: name for b in item if name != "skip"})
    return frozenset(skip_set), names


def prune(branches, far, gain, capacity, ahead_s, total_s, max_branches):
    """The branches that can still win: the one that saved least, and those whose course promises most, by time saved.

    A branch at its best skips all that is ahead at no further distance. Its course: time saved grows with the time
    of the items passed, and so does the squared distance. The first is there for texts that prove harder than the window.
    """
    far = far[[p.block for p in branches]].double().cpu()
    saved_s = torch.tensor([p.saved_s for p in branches], dtype=torch.float64)
    stretch = total_s / max(total_s - ahead_s, 1e-12)
    at_end_s = torch.cat((saved_s + ahead_s, saved_s * stretch)).clamp(max=capacity)
    hope, course = gain(torch.cat((far, far * stretch**0.5)), at_end_s).chunk(2)
    course[0] = math.inf
    course[hope <= 1] = -math.inf
    chosen = course.argsort(descending=True, stable=True)[:max_branches].sort().values
    return [branches[i] for i in chosen.tolist() if course[i] > -math.inf]


@torch.inference_mode()
def certified(model, target, draft):
    """Which rows of two sets of final states (N, H) provably have the same most likely token: (N,) bool.

    Let u and v be the directions of the target's and the draft's state, and fold the final norm's gain into the head's
    rows w_j. RMSNorm stretches u by a positive factor, whatever its ε: logits are that factor times w_j · u, and the top
    token depends on u alone. With i the target's, and for any j, by Cauchy and Schwarz on (w_i − w_j) · (u − v),

        (w_i − w_j) · v  ≥  (w_i − w_j) · u − ‖w_i − w_j‖ ‖u − v‖,        ‖u − v‖² = 2 (1 − cos(u, v)),

    so that i is the draft's as well where the right side exceeds 0 for every j ≠ i. That holds in exact arithmetic; it
    is evaluated in float64, and the model's own rounding can matter where it has two logits that are all but equal.
    Source: KnapSpec, lemma 4.1. Differs: a proof for one state, in place of a bound on how similar states are.
    """
    rows = (model.head.weight.to_dense() if model.head.packed else model.head.weight).double() * model.model.norm.weight
    u, v = (torch.nn.functional.normalize(h.double(), dim=-1) for h in (target, draft))
    along = u @ rows.T  # (N, V)
    top = along.argmax(-1)
    margin = along.gather(-1, top[:, None]) - along
    reach = torch.cdist(rows[top], rows, compute_mode="donot_use_mm_for_euclid_dist") * (u - v).norm(dim=-1, keepdim=True)
    return (margin > reach).scatter_(-1, top[:, None], True).all(-1)


# --- 3. The planner --------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """A skip set that the knapsack found, and what has been seen of it since."""

    skip_set: frozenset
    choices: tuple | None  # as in Plan
    far: float  # mean distance of its final states from the target's
    rejected: float  # mean chance of a rejection in the window: where draft and target sample differently
    accepted: float = 0.0  # of its drafts that were tried: those before a rejection, and the rejected one
    tried: float = 0.0


class KnapSpec(Planner):
    """The knapsack at intervals, tokens per time every round.

    latency: a profile.LatencyModel. choices: what may become of an item, {"full", "skip"} in the paper; further names
    must be in the model's table and the profile (shortcuts.py). gamma_max, window (W), interval (tokens between
    plannings), tau and budget are the method's. stop ends a draft: "fixed" at the plan's γ, "confidence" under
    `threshold`, "renewal" where no more tokens are worth their price (`keep_drafting`), γ being gamma_max.
    Ours, and how to turn it off: price "full" ("paper": no head, verification costs one step); alphas "pooled"
    ("share": each candidate's own share of the window); share, the largest part of the time to spend on planning
    (1.0); max_branches (None: all that can win); layers False (True: whole layers are kept or skipped).
    """

    PRIOR = 1.4, 2.0  # rejections and units of distance that count as seen before the first draft

    def __init__(self, latency, *, choices=("full", "skip"), gamma_max=8, window=8, interval=64, tau=0.5, budget=0.5,
                 stop="renewal", threshold=0.7, price="full", alphas="pooled", share=0.05, max_branches=4,
                 layers=False):  # fmt: skip
        self.latency, self.gamma_max, self.window, self.interval = latency, gamma_max, window, interval
        self.whole = ["full", *(name for name in choices if name == "int8")]  # ways that see all of the context
        self.narrow = [name for name in choices if name not in ("full", "int8", "skip")]
        self.tau, self.budget, self.stop, self.threshold = tau, budget, stop, threshold
        self.price, self.alphas, self.share, self.max_branches, self.layers = price, alphas, share, max_branches, layers
        self.speed, self.draft_factor = 1.0, 1.0  # measured / profiled: of verification, and of drafts relative to it
        # 1 − α grows in proportion to the distance (see `certified`): rejections per unit of distance.
        self.rejections, self.exposure = self.PRIOR
        # Which drafts are rejected grows in proportion to their 1 − confidence, summed here over those tried.
        self.missed, self.unsure = 0.0, 0.0
        self.made, self.spent = 0.0, 0.0  # tokens of the latest drafting rounds, and what they cost in plain steps

    # What things cost now: the profile, corrected by what this run really took.

    def draft_s(self, n, skip_set, n_layer, choices=None):
        """Seconds of one draft token behind n tokens."""
        if self.price == "paper":
            return self.latency.draft(skip_set, n, n_layer) - self.latency.head()
        return self.latency.draft(skip_set, n, n_layer, choices) * self.speed * self.draft_factor

    def verify_s(self, n, n_layer):
        """Seconds of verifying γ + 1 tokens, for each γ from 0 to gamma_max."""
        if self.price == "paper":
            return [self.draft_s(n, frozenset(), n_layer)] * (self.gamma_max + 1)
        return [self.latency.verify(n, k) * self.speed for k in range(1, self.gamma_max + 2)]

    def plan(self, session):
        """Plans anew where that is due and affordable, else chooses again among the candidates."""
        if session.generation.rounds == 0:  # another text: prices and slopes stay, plans do not
            self.candidates, self.current, self.chosen = [], Plan(), None
            self.next_position, self.wait, self.planned_s, self.retry = 0, self.interval, 0.0, math.inf
        n = session.cache.length
        branches = self._affordable(session) if n >= self.next_position else 0
        if branches > 0 and self.gamma_max > 0:
            self._replan(session, branches)
        elif self.current.gamma > 0 or n >= self.retry:
            if self.current.gamma == 0:  # plain decoding brings no news; what was seen of drafts loses half its weight
                self._fade()
                self.rejections, self.exposure = ((s + p) / 2 for s, p in zip((self.rejections, self.exposure), self.PRIOR))
            self._choose(session)
            if self.current.gamma == 0:  # too much was rejected here: ask again later, ever more seldom
                self.retry, self.patience = n + self.patience, 2 * self.patience
        return self.current

    def _fade(self):
        """What was seen of the candidates loses half its weight."""
        for c in self.candidates:
            c.accepted, c.tried = c.accepted / 2, c.tried / 2

    def _affordable(self, session):
        """How many branches keep all planning under `share` of the generation's time, at the speed now expected.

        A planning costs about what verifying as many tokens as it has rows would. The first may be a narrow one.
        """
        n, most = session.cache.length, self.max_branches or 32
        rate = self.current.tokens_per_second or 1 / (self.latency.verify(n, 1) * self.speed)
        spent_s = self.planned_s if session.temperature > 0 else session.generation.seconds["plan"]
        left_s = self.share * session.max_new_tokens / rate - spent_s
        for branches in range(most, min(most, 2) - 1, -1):  # one alone would be the branch that saves nothing
            price_s = self.latency.verify(n, self.window * (branches + bool(self.narrow))) * self.speed  # one more for `_replan`
            if price_s <= left_s:
                self.planned_s += price_s
                return branches
            if self.planned_s > 0:
                break
        return 0

    def _replan(self, session, branches):
        """The knapsack on the latest window; known candidates keep half the weight of what was seen of them."""
        n = session.cache.length
        states, target_probs = session.window(self.window)
        found = self._search(session, states, self.narrow, branches)
        if self.narrow and all(choices and set(choices) & set(self.narrow) for _, choices in found):
            found |= self._search(session, states, [], 1)  # for a text that needs all of its context
        self._fade()
        known, self.candidates = {(c.skip_set, c.choices): c for c in self.candidates}, []
        # 5. α: how often the draft samples what the target does; at temperature 0 the share of equal argmaxes.
        if found:
            x = torch.stack(list(found.values()))  # (C, W, H)
            head = session.model.way(-1, self._head())
            probs = sampling_probs(session.model.logits(x.flatten(0, 1), head), session.temperature, session.top_p)
            same = torch.minimum(probs.view(*x.shape[:2], -1), target_probs).sum(-1)  # (C, W)
            rejected, far = (1 - same).mean(-1).tolist(), distance(x, states[-1])[0].mean(-1).tolist()
            for key, *measured in zip(found, far, rejected):
                seen = known.get(key, Candidate(*key, 0.0, 0.0))
                self.candidates.append(Candidate(*key, *measured, seen.accepted, seen.tried))
            self.rejections, self.exposure = self.rejections + sum(rejected), self.exposure + sum(far)
        before = self.current
        self._choose(session)
        same = self.current.gamma == 0 == before.gamma or (self.current.skip_set, self.current.choices) == (before.skip_set, before.choices)
        self.wait = 2 * self.wait if same else self.interval
        self.retry, self.patience = math.inf, max(self.interval // 4, 1)
        self.next_position = n + self.wait

    def _search(self, session, states, narrow, branches):
        """{(skip_set, choices): final states (W, H)} that the knapsack finds; narrow: the ways of that kind it may use."""
        n, L = session.cache.length, session.model.config.n_layer
        ways = [self._ways(session.model, item, n, narrow) for item in range(2 * L)]
        kept = (*(way[0][0] for way in ways), self._head())
        full_s, verify_s = self.draft_s(n, frozenset(), L, kept), self.verify_s(n, L)

        def gain(far, saved_s):  # of the best γ ≥ 1 over plain decoding
            rates = tokens_per_time(self._alpha(far), full_s - saved_s * self.speed * self.draft_factor, verify_s)
            return rates[:, 1:].max(-1).values * verify_s[0]

        drafts = knapsack(session.model, session.cache, states, [way[0][1] for way in ways], budget=self.budget, tau=self.tau,
                          items=[(2 * i, 2 * i + 1) for i in range(L)] if self.layers else None,
                          ways=ways, gain=gain if self.max_branches else None, max_branches=branches)  # fmt: skip
        found = {}
        for skip_set, names, _, x in drafts:
            choices = tuple(names.get(b, name) for b, name in enumerate(kept))
            choices = None if set(choices) == {"full"} else choices
            if skip_set or choices:  # else it is plain decoding
                found[skip_set, choices] = x
        return found

    def _head(self):
        """The name of the cheapest way to compute the head."""
        return min(self.whole, key=lambda name: self.latency.way(name).head())

    def _ways(self, model, item, n, narrow):
        """How the item is kept at n, and the cheaper ways. One that saves a third is how it is kept."""
        whole, narrow = ([(name, self.latency.sublayer(item, n, name), model.way(item, name)) for name in names]
                         for names in (self.whole, narrow))  # fmt: skip
        least = min(whole, key=lambda way: way[1])
        cheaper = [way for way in narrow if way[2] not in [other[2] for other in whole]]  # on an MLP a window is no other way
        return [way for way in cheaper if way[1] <= least[1] * 2 / 3][:1] or [least, *cheaper]

    def _alpha(self, far):
        return 1 - (self.rejections / self.exposure * far).clamp(max=1)

    def _choose(self, session):
        """6. The (skip set, γ) with the most tokens per time, plain decoding included."""
        n, L = session.cache.length, session.model.config.n_layer
        verify_s = self.verify_s(n, L)
        self.current, self.chosen = Plan(tokens_per_second=1 / verify_s[0]), None
        if not self.candidates:
            return
        prior = torch.tensor([1 - c.rejected for c in self.candidates])
        if self.alphas == "pooled":
            prior = self._alpha(torch.tensor([c.far for c in self.candidates]))
        tried = torch.tensor([c.tried for c in self.candidates])
        accepted = torch.tensor([c.accepted for c in self.candidates])
        alpha = (self.window * prior + accepted) / (self.window + tried)  # a Beta posterior, its prior worth W tokens
        rates = tokens_per_time(alpha, [self.draft_s(n, c.skip_set, L, c.choices) for c in self.candidates], verify_s)
        choice, gamma = divmod(int(rates.argmax()), rates.size(1))
        if gamma > 0:
            best = self.chosen = self.candidates[choice]
            bound = self.gamma_max if self.stop == "renewal" else gamma  # that rule alone ends a draft
            self.current = Plan(best.skip_set, bound, alpha[choice].item(), rates[choice, gamma].item(), best.choices)

    def keep_drafting(self, session, plan, confidences):
        """confidences: of all tokens drafted so far. Source of "renewal": the renewal-reward theorem."""
        if self.stop == "fixed":
            return True
        if self.stop == "confidence":
            return confidences[-1] >= self.threshold
        # More tokens pay if those expected to be accepted exceed their price in tokens. The confidences tell the chance
        # that all so far are; α the chance of each further one, as many as pay best: a longer block can cost little more.
        n, L, k = session.cache.length, session.model.config.n_layer, len(confidences)
        risk = (self.window * (1 - plan.alpha) + self.missed) / (self.window * 0.35 + self.unsure)
        chance = math.prod(max(1 - risk * (1 - c), 0) for c in confidences)
        draft_s, verify_s = self.draft_s(n, plan.skip_set, L, plan.choices), self.verify_s(n, L)
        # The rate so far, in which the plan's own counts as if kept up for 4 steps; no more than is now thought possible.
        promised = plan.tokens_per_second * verify_s[0]
        rate = min(promised, (self.made + 4 * promised) / (self.spent + 4)) / verify_s[0]
        return any(chance * (expected_tokens(plan.alpha, m) - 1) > rate * (m * draft_s + verify_s[k + m] - verify_s[k])
                   for m in range(1, plan.gamma - k + 1))  # fmt: skip

    def observe(self, session, round):
        """Counts what was accepted, and corrects the profile by what the round took."""
        tried = min(round.accepted + 1, round.drafted)
        if self.chosen is not None:
            self.chosen.accepted += round.accepted
            self.chosen.tried += tried
            self.rejections += tried - round.accepted
            self.exposure += tried * self.chosen.far
        self.missed += tried - round.accepted
        self.unsure += sum(1 - c for c in round.confidences[:tried])
        n, L = round.position, session.model.config.n_layer
        if round.drafted:
            verify_s = self.verify_s(n, L)
            cost_s = round.drafted * self.draft_s(n, round.plan.skip_set, L, round.plan.choices) + verify_s[round.drafted]
            self.made, self.spent = 0.9 * self.made + round.accepted + 1, 0.9 * self.spent + cost_s / verify_s[0]
        if session.temperature > 0:  # plans must not depend on the clock: the same seed gives the same text
            return
        self.speed += 0.1 * (round.verify_s / self.latency.verify(n, round.drafted + 1) - self.speed)
        if round.drafted:
            profiled_s = round.drafted * self.latency.draft(round.plan.skip_set, n, L, round.plan.choices)
            self.draft_factor += 0.1 * (round.draft_s / profiled_s / self.speed - self.draft_factor)


if __name__ == "__main__":
    from cli.cli import main

    raise SystemExit(main())

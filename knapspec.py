"""KnapSpec (arXiv 2602.20217): the paper's planner, with nothing else in it.

A model of L layers has 2L sublayers: item 2i is the attention of layer i, item 2i + 1 its MLP. A draft skips some of
them. Which ones is a 0/1 knapsack: an item weighs what skipping it saves, measured at the present context; a skip set is
worth the cosine similarity to the full model's hidden states that it leaves.

Read it from top to bottom, by the numbers of the README's steps: 1 measures latencies (profile.py does), 2 turns them into
weights, 3 finds skip sets worth pricing, 4 says how often their drafts are accepted, and 5 takes what promises the most
tokens per time. Step 6, the loop that drafts, verifies and accepts, is in decoding.py; what goes past the paper is in
beyond/. Run this file to decode from the command line.
"""

if __name__ == "__main__":  # first, so that importing torch, which takes seconds, is part of the command
    from cli import main

    raise SystemExit(main())

from dataclasses import dataclass
from profile import latency_model

import torch

from decoding import Plan, Planner, generate, sampling_probs
from model import Context, attention_and_logsumexp

__all__ = ["KnapSpec", "generate", "knapsack", "tokens_per_time"]

# --- 1. Measure ------------------------------------------------------------------------------------------------------


def measured(session, gamma_max):
    """The LatencyModel of the session's model, from disk or measured now, for the prompt's context and some new tokens."""
    return latency_model(session.model, context=session.cache.length + min(session.remaining, 256), gamma_max=gamma_max)


# --- 2. Weigh --------------------------------------------------------------------------------------------------------


def integer_weights(attention_s, mlp_s, n_layer, max_ratio=None):
    """What each of the 2L items weighs: the cheaper kind 1, the other its multiple, rounded; at most max_ratio."""
    cheaper, dearer = sorted((attention_s, mlp_s))
    ratio = min(dearer / max(cheaper, 1e-3 * dearer), max_ratio or 1000) if dearer > 0 else 1  # one may be too fast to measure
    heavy = max(1, round(ratio))
    return [heavy if (item % 2 == 0) == (attention_s > mlp_s) else 1 for item in range(2 * n_layer)]


# --- 3. Solve the knapsack -------------------------------------------------------------------------------------------


class Branches(Context):
    """B drafts of the last W verified tokens side by side: rows (B * W, H), row b * W + w at the w-th position.

    A row sees the target's keys of all tokens before the window, shared by all branches and read in place, and in the
    window those of its own branch, up to its own. Nothing is written to the cache.
    """

    def __init__(self, cache, B, W):
        self.cache, self.start, self.W = cache, cache.length - W, W
        self.cos, self.sin = (table[self.start : cache.length].repeat(B, 1, 1) for table in (cache.cos, cache.sin))

    def attend(self, layer, q, k, v):
        """q (B * W, n_head, D), k and v (B * W, n_kv_head, D) -> (B * W, n_head * D).

        Attention in two parts, to the own keys and to the shared ones: no mask over all of them, and no copy. The sums of
        exponentials that each part was divided by say how to mix the two.
        """
        (N, n_head, D), n_kv_head = q.size(), k.size(1)
        k, v = (t.repeat_interleave(n_head // n_kv_head, 1) for t in (k, v))
        own, own_sums = attention_and_logsumexp(*(t.view(-1, self.W, n_head, D).transpose(1, 2) for t in (q, k, v)), is_causal=True)
        own, own_sums = own.transpose(1, 2).reshape(N, n_head, D), own_sums.transpose(1, 2).reshape(N, n_head)
        if self.start == 0:
            return own.flatten(1)
        rows = q.transpose(0, 1).reshape(1, n_kv_head, -1, D)  # those of query heads that share a key head, together
        shared, sums = attention_and_logsumexp(rows, *(t[layer, None, :, : self.start] for t in (self.cache.keys, self.cache.values)))
        shared, sums = shared.reshape(n_head, N, D).transpose(0, 1), sums.reshape(n_head, N).T
        return own.lerp(shared, (sums - own_sums).sigmoid()[..., None].to(own.dtype)).flatten(1)


@dataclass(frozen=True)
class Branch:
    """A way through the items so far, each kept or skipped; at the end, a draft. The states of all are one tensor, x."""

    skip_set: frozenset
    weight: int  # units of time saved
    cosine: float  # to the target's states behind the last item, mean over the window


@torch.inference_mode()
def knapsack(sublayers, weights, states, cache, *, budget, tau=0.5, select=None):
    """For each weight that can be saved, the skip set whose states stay closest to the target's.

    sublayers: 2L functions of states and a context. weights: what skipping each saves, whole numbers. states: the
    target's x_0 … x_2L at the last W verified positions, each (W, H), x_b behind b items; cache.length counts these
    positions in. budget: the most weight to save. tau: the least cosine of a branch. select(item, branches) may choose
    which branches go on behind each item. Returns ([Branch] by weight, their final states (B, W, H)). A heuristic: a
    branch that is beaten might have ended closer, since cosines do not add up as values in a knapsack do. Source:
    KnapSpec's dynamic program; it never skips the first and the last layer.
    """
    W, H = states[0].size()
    branches, x = [Branch(frozenset(), 0, 1.0)], states[0][None]  # x: (B, W, H)
    for item, sublayer in enumerate(sublayers):
        B = len(branches)
        # Keep the item: run it on all branches in one batched call. Skip it: the states as they are, and weight saved.
        x = torch.cat((sublayer(x.reshape(B * W, H), Branches(cache, B, W)).view(B, W, H), x))
        cosine = torch.cosine_similarity(x.float(), states[item + 1].float(), dim=-1).mean(-1).tolist()
        proposals = [Branch(b.skip_set, b.weight, c) for b, c in zip(branches, cosine)]
        if 2 <= item < len(sublayers) - 2:
            proposals += [Branch(b.skip_set | {item}, b.weight + weights[item], c) for b, c in zip(branches, cosine[B:])]
        # Drop what saves too much or fell under τ. Of equal weights keep the closest to the target.
        best = {}
        for row, branch in enumerate(proposals):
            fits = branch.weight <= budget and branch.cosine >= tau
            if fits and (branch.weight not in best or branch.cosine > best[branch.weight][0].cosine):
                best[branch.weight] = branch, row
        rows = dict(best[weight] for weight in sorted(best))
        branches = select(item, list(rows)) if select else list(rows)
        if not branches:
            return [], x[:0]
        x = x[[rows[branch] for branch in branches]]
    return branches, x


# --- 4. Estimate α ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def agreement(session, x, target_probs):
    """For final states x (B, W, H) the α of each branch: the chance that its sample is the target's, mean over the window.

    At temperature 0 that is the share of positions with the same argmax. target_probs (W, V): what the target samples
    from. Returns B floats.
    """
    shares = []
    for some in x.split(max(64 // x.size(1), 1)):  # (b, W, H), about 64 rows: the logits of all could take gigabytes
        draft_probs = sampling_probs(session.model.logits(some.flatten(0, 1)), session.temperature, session.top_p)
        shares += torch.minimum(draft_probs.view(*some.shape[:2], -1), target_probs).sum(-1).mean(-1).tolist()
    return shares


# --- 5. Choose -------------------------------------------------------------------------------------------------------


def expected_tokens(alpha, gamma):
    """Mean tokens of a round of gamma drafts: 1 + α + … + α^γ, the correction or bonus token included.

    alpha: the chance that a drafted token is accepted, the same for each, so that the i-th counts with α^i. Source:
    Leviathan et al. 2023, equation 1.
    """
    return gamma + 1 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def tokens_per_time(alpha, gamma, draft_s, verify_s):
    """TPT in tokens per second: draft_s are the seconds of one draft token, verify_s those of one verification.

    γ = 0 is plain decoding: one token for one verification. Source: KnapSpec's objective.
    """
    return expected_tokens(alpha, gamma) / (gamma * draft_s + verify_s)


class KnapSpec(Planner):
    """The paper's planner: every `interval` rounds the knapsack on the last `window` tokens, and the grid over its skip sets and γ.

    latency: a profile.LatencyModel, by default measured before the first plan. gamma_max: the longest draft. tau: the
    least cosine of a branch. budget: the largest share of all weight that a draft may save. threshold: a draft ends
    behind a token of less confidence; 0 turns that off. max_ratio: a cap on the ratio of weights. It bounds the number of
    branches, and with it the time of planning; but where attention costs more than that many MLPs, the knapsack takes it
    for cheaper than it is. Source: KnapSpec, and where the paper is silent its authors' code. Differs: no cap by default
    (theirs is 5), and the first plan follows the prompt, where theirs drafts with nothing skipped until five rounds are
    verified.
    """

    def __init__(self, latency=None, *, gamma_max=8, window=8, interval=64, tau=0.5, budget=0.5, threshold=0.7, max_ratio=None):
        self.latency, self.gamma_max, self.window, self.interval = latency, gamma_max, window, interval
        self.tau, self.budget, self.threshold, self.max_ratio = tau, budget, threshold, max_ratio
        self.current, self.branches, self.weighed = Plan(), None, []  # weighed: (skip set, way, α, seconds of a draft token)

    def plan(self, session):
        """If one is due: the knapsack, α of its survivors, tokens per time of each with every γ; the best stands for `interval` rounds."""
        if session.generation.rounds % self.interval == 0:
            self.latency = self.latency or measured(session, self.gamma_max)
            n, L = session.cache.length, session.model.config.n_layer
            attention_s, mlp_s = self.latency.attention(n), self.latency.mlp()
            states, target_probs = session.window(self.window)
            weights = integer_weights(attention_s, mlp_s, L, self.max_ratio)
            budget = int(self.budget * sum(weights))
            branches, x = knapsack(session.model.sublayers, weights, states, session.cache, budget=budget, tau=self.tau)
            alphas = agreement(session, x, target_probs) if branches else []
            # The grid. A draft token costs its kept sublayers, a verification all 2L of them, whatever γ.
            target_s = max(L * (attention_s + mlp_s), 1e-12)
            self.branches, self.weights, self.weighed, self.verify_s = branches, weights, [], [target_s] * (self.gamma_max + 1)
            self.current = Plan(tokens_per_second=1 / target_s)  # γ = 0: plain decoding
            for branch, alpha in zip(branches, alphas):
                if not branch.skip_set:  # the target itself: its drafts are as slow as plain decoding
                    continue
                draft_s = target_s - sum(mlp_s if item % 2 else attention_s for item in branch.skip_set)
                self.weighed.append((branch.skip_set, "full", alpha, draft_s))
                for gamma in range(1, self.gamma_max + 1):
                    rate = tokens_per_time(alpha, gamma, draft_s, target_s)
                    if rate > self.current.tokens_per_second:
                        self.current = Plan(branch.skip_set, gamma, alpha, rate)
        return self.current

    def keep_drafting(self, session, plan, confidences):
        """Until the draft is unsure of a token; that one is still submitted."""
        return confidences[-1] >= self.threshold

"""DEL: the exit layer and the length with the most tokens per layer."""

import math

import torch

from decoding import Plan
from knapspec import expected_tokens
from rivals.common import Rival, whole_blocks


def counted_columns(matches):
    """How many positions count: up to and including the first at which the exit layer disagreed."""
    return next((i + 1 for i, match in enumerate(matches) if not match), len(matches))


def most_tokens_per_layer(alphas, gamma_max):
    """(exit layer ℓ, length d) with the largest (1 + α + … + α^d) / (L + d ℓ); of equals the smallest ℓ, then d.

    alphas: share accepted at the exits 1 … L − 1, NaN where nothing is known. d is at most gamma_max − 1.
    """
    L = len(alphas) + 1
    best, choice = 1 / L, (1, 0)
    for layer, alpha in enumerate(alphas, 1):
        for d in range(1, gamma_max):
            tokens_per_layer = expected_tokens(alpha, d) / (L + d * layer)
            if tokens_per_layer > best:
                best, choice = tokens_per_layer, (layer, d)
    return choice


def shadow_tokens(model, states, chunk=64):
    """What each exit would draft: states (E, R, H) -> argmaxes (E, R) and their probabilities (E, R)."""
    tokens, confidences = [], []
    for x in states.flatten(0, 1).split(chunk):
        logits = model.logits(x).float()
        top, index = logits.max(-1)
        tokens.append(index)
        confidences.append((top - logits.logsumexp(-1)).exp())
    return torch.cat(tokens).view(states.shape[:2]), torch.cat(confidences).view(states.shape[:2])


def midway(matches, misses, match_confidences, miss_confidences):
    """Between the mean confidence at matches and that at misses, from counts and sums; NaN where one is unknown."""
    return (match_confidences / matches + miss_confidences / misses) / 2


class DEL(Rival):
    """Counts, for every exit layer, how often it would have drafted the target's token; exits where that pays most.

    Every round the states of all blocks at the verified positions pass through the LM head. Their matches and
    misses, and the confidences at each, are summed with weight `decay` (ω) a round; the exit layer and the draft's
    length follow from them, and so does the confidence that ends a draft: midway between the mean at matches and the
    mean at misses. The first round exits after block 1 with one token; after it the prompt's last `prompt_rows`
    positions are counted too. All counts restart with each prompt. Source: DEL (arXiv 2504.05598).
    Differs: KnapSpec's copy of it computes the length and drafts up to 10 tokens whatever it says; here, as in the
    paper's abstract, it is the length. When sampling, positions count up to the first rejection at most.
    The paper uses checkpoints trained as LayerSkip's.
    """

    def __init__(self, n_layer, *, gamma_max=18, decay=0.95, prompt_rows=32):
        self.n_layer, self.gamma, self.decay, self.prompt_rows = n_layer, gamma_max - 1, decay, prompt_rows
        self.window = prompt_rows + gamma_max

    def plan(self, session):
        n, L = session.cache.length, self.n_layer
        if session.generation.rounds == 0:
            # Of the exits 1 … L − 1: matches, misses, and the sums of the confidences at each.
            self.counts = torch.zeros(4, L - 1, dtype=torch.float64)
            self.exit_layer, length, alpha, self.threshold = 1, min(1, self.gamma), 1.0, math.nan
        else:
            self._count(session, n - self.position)
            alphas = (self.counts[0] / self.counts[:2].sum(0)).tolist()
            self.exit_layer, length = most_tokens_per_layer(alphas, self.gamma + 1)
            alpha, self.threshold = alphas[self.exit_layer - 1], midway(*self.counts[:, self.exit_layer - 1]).item()
        self.position = n
        return Plan(whole_blocks(range(self.exit_layer, L)) if length else frozenset(), length, alpha)

    def _count(self, session, new):
        """Adds the `new` latest positions and, after the first round, the prompt's."""
        states, target_probs = session.window(new + (self.prompt_rows if session.generation.rounds == 1 else 0))
        tokens, confidences = shadow_tokens(session.model, torch.stack(states[2:-1:2]))  # after blocks 1 … L − 1
        matches = tokens == target_probs.argmax(-1)  # (L − 1, rows)
        before = len(target_probs) - new
        columns = before + counted_columns(matches[self.exit_layer - 1, before:].tolist())
        matches, confidences = matches[:, :columns].cpu().double(), confidences[:, :columns].cpu().double()
        seen = (matches, 1 - matches, matches * confidences, (1 - matches) * confidences)
        self.counts = self.decay * self.counts + torch.stack([x.sum(-1) for x in seen])

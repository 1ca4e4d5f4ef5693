"""For the tests: tiny random models, and a machine on which forwards take exactly what a LatencyModel says."""

import random
import time
from profile import LatencyModel

import torch

from decoding import Plan, Planner
from model import Config, KVCache, Transformer


def tiny_config(**changes):
    usual = {
        "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "n_layer": 3, "n_head": 4, "n_kv_head": 2,
        "head_dim": 4, "max_position": 512, "norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    return Config(**usual | changes)


def random_model(config=None, *, seed=0, scale=0.3, device="cpu", dtype=torch.float32, faint=(), epsilon=0.0):
    """A Transformer with seeded random weights. What the items in `faint` add is scaled by epsilon; 0: they add nothing."""
    config = config or tiny_config()
    model = Transformer(config)
    rng = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(tensor.shape, generator=rng) * scale for name, tensor in model.state_dict().items()}
    for name in weights:
        if "norm" in name:
            weights[name] += 1
    weights["model.embed_tokens.weight"] /= scale
    for item in faint:
        output = "mlp.down_proj" if item % 2 else "self_attn.o_proj"
        for name in weights:
            if name.startswith(f"model.layers.{item // 2}.{output}."):
                weights[name] *= epsilon
    return model.load((name, tensor.to(device, dtype)) for name, tensor in weights.items())


def random_tokens(count, config, seed=0):
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def prefilled(model, tokens, room=0, **options):
    """A cache that holds all the tokens (a list or a tensor), filled by one forward, and that forward's logits."""
    cache = KVCache(model.config, len(tokens) + room, device=model.device, dtype=model.dtype)
    logits = model(torch.as_tensor(tokens), cache, **options)
    cache.length = len(tokens)
    return cache, logits


def latency_model(n_layer, *, attention_s=(1e-3, 1e-6), mlp_s=1e-3, head_s=1e-4, per_token=0.02):
    """A machine on which verifying one token more costs the share per_token of a step: the less, the more drafts pay."""
    step_s, slope_s = head_s + n_layer * (attention_s[0] + mlp_s), n_layer * attention_s[1]
    verify_s = tuple((k, step_s * (1 + per_token * (k - 1)), slope_s) for k in (1, 16))
    return LatencyModel(head_s, mlp_s, attention_s, verify_s, 0.0)


class SimulatedMachine:
    """A model whose forwards, and sublayers run one by one on many rows, take what a LatencyModel says; nothing else does.

    A forward that skips something, or keeps something in a cheaper way, is a draft's; any other is priced as a verification.
    A draft that is given runs no forward, and so costs nothing.
    """

    def __init__(self, model, latency, monkeypatch):
        self.simulated, self.latency, self.now_s = model, latency, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def __getattr__(self, name):
        return getattr(self.simulated, name)

    def __call__(self, tokens, cache, *, skip=frozenset(), choices=None, **options):
        n, L = cache.length, self.config.n_layer
        drafts = skip or choices
        self.now_s += self.latency.draft(skip, n, L, choices) if drafts else self.latency.verify(n, len(tokens))
        return self.simulated(tokens, cache, skip=skip, choices=choices, **options)

    @property
    def sublayers(self):
        return [self._timed(sublayer) for sublayer in self.simulated.sublayers]

    def way(self, item, name):
        function = self.simulated.way(item, name)
        return function if item == -1 else self._timed(function)

    def _timed(self, sublayer):
        def run(x, context):
            self.now_s += self.latency.verify(context.cache.length, x.size(0)) / (2 * self.config.n_layer)
            return sublayer(x, context)

        return run


class Restless(Planner):
    """Another random skip set and γ each round, drafts of random length, now and then all or nothing skipped.

    gives: the share of rounds whose draft is given: random ids, or what comes next in `text` (ids, prompt included), as far
    as that goes, often with one of them replaced.
    """

    def __init__(self, seed, *, gamma_max=12, window=0, gives=0.0, text=()):
        self.rng, self.gamma_max, self.window, self.rounds = random.Random(seed), gamma_max, window, []
        self.gives, self.text = gives, list(text)

    def plan(self, session):
        if self.rng.random() < self.gives:
            return self._given(session)
        share = self.rng.choice((0.0, 0.1, 0.3, 0.6, 1.0))
        skip_set = frozenset(i for i in range(2 * session.model.config.n_layer) if self.rng.random() < share)
        return Plan(skip_set, self.rng.randint(0, self.gamma_max))

    def _given(self, session):
        V = session.model.config.vocab_size
        tokens = self.text[len(session.tokens) :][: self.rng.randint(1, 2 * self.gamma_max)]
        if not tokens or self.rng.random() < 0.3:
            tokens = [self.rng.randrange(V) for _ in range(self.gamma_max)]
        elif self.rng.random() < 0.5:
            tokens[self.rng.randrange(len(tokens))] = self.rng.randrange(V)
        return Plan(gamma=self.rng.randint(1, min(self.gamma_max, len(tokens))), tokens=tuple(tokens))

    def keep_drafting(self, session, plan, confidences):
        return self.rng.random() < 0.9

    def observe(self, session, round):
        self.rounds.append(round)

"""A Llama / Qwen2 / Qwen3 transformer whose attention and MLP sublayers can be left out one by one.

Read it from top to bottom: Config, rotary tables, KVCache, the linear layer, the two kinds of sublayer, and
the Transformer that strings 2L of them together. Parameters carry Hugging Face's names.

Shapes: T new tokens, S keys, H hidden size, D head_dim, V vocabulary, L layers. States are rows (N, H): the T
tokens of one sequence, or the B * T tokens of B branches, since everything but attention treats rows alike.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """What fixes the shape and the arithmetic of a model."""

    vocab_size: int  # V, rows of the embedding and of the LM head
    hidden_size: int  # H, width of the residual stream
    intermediate_size: int  # width inside the MLP
    n_layer: int  # L
    n_head: int  # query heads
    n_kv_head: int  # key and value heads; each serves n_head / n_kv_head query heads
    head_dim: int  # D; not always hidden_size / n_head
    max_position: int  # longest sequence the model was made for
    norm_eps: float  # added to the mean square in RMSNorm
    rope_theta: float  # base of the rotary frequencies
    rope_scaling: dict | None = None  # None, or {"rope_type": "linear" | "llama3" | "yarn", ...}, Hugging Face's keys
    tied: bool = False  # the LM head is the embedding
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm on each query and key head, before the rotation


def rope_frequencies(config):
    """Angle per position of each rotated pair, (D/2,) float32, and the factor on cos and sin.

    Source: RoFormer; Llama 3's and YaRN's (Peng et al. 2023) ways to stretch it, numbers as in transformers.
    """
    D, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {"rope_type": "default"}
    frequencies = 1.0 / base ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    kind, factor = scaling["rope_type"], scaling.get("factor")
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    original = scaling.get("original_max_position_embeddings") or config.max_position
    if kind == "llama3":  # slow pairs are stretched, fast ones kept, those between blended
        turns = original * frequencies / (2 * math.pi)  # full turns over the original context
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / factor), 1.0
    if kind == "yarn":
        return _yarn_frequencies(frequencies, base, D, original, factor, scaling)
    raise ValueError(f"rope_type {kind!r} is not implemented")


def _yarn_frequencies(frequencies, base, D, original, factor, scaling):
    def pair_that_turns(times):  # the (fractional) pair that makes so many turns over the original context
        return D * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    ramp = (torch.arange(D // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    stretch = ramp.clamp(0, 1)

    def temperature(mscale):
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
    return frequencies * ((1 - stretch) + stretch / factor), attention_factor


class KVCache:
    """Keys and values of every layer, allocated once; `length`, the number of verified tokens, is set by the caller.

    A forward writes its keys and values behind `length` and leaves `length` alone. The caller then adds the tokens that
    stand; those of rejected ones are written over by the next forward, so that nothing has to be undone. The rotary
    tables live here too: they have a row for each position as well.
    """

    def __init__(self, config, max_length, *, device="cpu", dtype=torch.float32):
        shape = (config.n_layer, config.n_kv_head, max_length, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length, self.max_length = 0, max_length
        frequencies, factor = rope_frequencies(config)
        angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)  # (S, D/2), float32
        cos, sin = angles.cos() * factor, angles.sin() * factor
        # The first half of a head is rotated against its second half: x * cos + (second, first) * (-sin, sin).
        self.cos = torch.cat((cos, cos), -1)[:, None].to(device, dtype)  # (S, 1, D): the same for all heads
        self.sin = torch.cat((-sin, sin), -1)[:, None].to(device, dtype)


class Context:
    """What the sublayers of one forward share: where the T new tokens stand, and which keys each of them sees.

    `extend` writes new keys and values at positions start … start + T − 1 and hands out those of 0 … start + T − 1.
    """

    def __init__(self, cache, T):
        self.start, end = cache.length, cache.length + T
        assert end <= cache.max_length, f"{end} tokens in a cache of {cache.max_length}"
        self.cos, self.sin = cache.cos[self.start : end], cache.sin[self.start : end]
        # Views of each layer's part, made in one call each: (n_kv_head, T, D) to write, (1, n_kv_head, S, D) to read.
        self.new_keys, self.new_values = cache.keys[:, :, self.start : end].unbind(), cache.values[:, :, self.start : end].unbind()
        self.keys, self.values = cache.keys[:, None, :, :end].unbind(), cache.values[:, None, :, :end].unbind()
        self.mask = None
        if T > 1 and self.start > 0:  # new token t sees keys 0 … start + t: aligned to the bottom right
            self.mask = cache.keys.new_full((T, end), float("-inf")).triu_(self.start + 1)

    def extend(self, layer, k, v):
        """k and v (T, n_kv_head, D), rotated -> keys and values (1, n_kv_head, S, D)."""
        self.new_keys[layer].copy_(k.transpose(0, 1))
        self.new_values[layer].copy_(v.transpose(0, 1))
        return self.keys[layer], self.values[layer]

    def attend(self, layer, q, k, v):
        """q (T, n_head, D), k and v as in `extend` -> the heads' mixtures of the values that they see, (T, n_head * D)."""
        keys, values = self.extend(layer, k, v)
        return grouped_attention(q, keys, values, self.mask)


def grouped_attention(q, keys, values, mask=None):
    """Attention of q (N, n_head, D) over keys, values (1, n_kv_head, S, D) -> (N, n_head * D).

    mask is additive, (N, S); None lets the last query see all keys and each before it one less. Query heads that share
    a key head become rows of one matrix where they can: each key is read once, and never repeated.
    """
    N, n_head, D = q.size()
    n_kv_head = keys.size(1)
    groups = n_head // n_kv_head
    if mask is None and N > 1:
        assert keys.size(2) == N, f"{N} new tokens and {keys.size(2)} keys without a mask"
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(N, n_head * D)
    rows = q.view(N, n_kv_head, groups, D).permute(1, 2, 0, 3).reshape(1, n_kv_head, groups * N, D)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=None if mask is None else mask.repeat(groups, 1))
    return out.view(n_kv_head, groups, N, D).permute(2, 0, 1, 3).reshape(N, n_head * D)


def attention_and_logsumexp(q, keys, values, is_causal=False):
    """Attention of q (B, heads, N, D) over keys, values (B, heads, S, D), S > 0 -> the same shape, and what mixes it with
    attention over other keys: the log of the summed exponentials of each query's scores, (B, heads, N). Not yet run on a GPU."""
    if q.is_cuda:
        out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, keys, values, None, True, 0.0, is_causal)
        return out, sums[..., : q.size(2)]  # its rows are padded
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, is_causal)


class Linear:
    """x (N, in) -> (N, out), for one projection or for several stacked ones that read the same x.

    In float32 on a CPU a weight is laid out once for oneDNN, which then reads it at memory speed for 1 to 8 rows;
    torch's own F.linear takes up to four times as long there. A small weight is not worth the 35 µs that the call costs.
    """

    def __init__(self, *projections):
        weight = projections[0].weight if len(projections) == 1 else torch.cat([p.weight for p in projections])
        biases = [getattr(p, "bias", None) for p in projections]  # a tied head is the embedding: no bias
        self.bias = None if biases[0] is None else torch.cat(biases)
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.packed = on_cpu and weight.numel() > 2**17 and torch.backends.mkldnn.is_available()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8) if self.packed else weight

    def __call__(self, x):
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Scales each row of x (…, H) to a root mean square of 1 in float32, casts back, then multiplies by the weight."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, (N, H) -> (N, H); `pack` stacks q, k, v once the weights are there."""

    def __init__(self, config, layer):
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.layer, self.config = layer, config
        self.q_proj = nn.Linear(H, config.n_head * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(H, config.n_kv_head * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(H, config.n_kv_head * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, H, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, config.norm_eps), RMSNorm(D, config.norm_eps)

    def pack(self):
        self.qkv, self.out = Linear(self.q_proj, self.k_proj, self.v_proj), Linear(self.o_proj)
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj

    def forward(self, x, context):
        return self.out(context.attend(self.layer, *self.project(x, context.cos, context.sin)))

    def project(self, x, cos, sin):
        """x (N, H) -> q (N, n_head, D), rotated, k (N, n_kv_head, D), rotated, and v (N, n_kv_head, D)."""
        config = self.config
        heads = self.qkv(x).view(x.size(0), -1, config.head_dim)  # (N, n_head + 2 n_kv_head, D)
        qk, v = heads.split((config.n_head + config.n_kv_head, config.n_kv_head), 1)
        if config.qk_norm:
            q, k = qk.split((config.n_head, config.n_kv_head), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        qk = torch.addcmul(qk * cos, qk.roll(config.head_dim // 2, -1), sin)
        return *qk.split((config.n_head, config.n_kv_head), 1), v


class MLP(nn.Module):
    """SwiGLU, (N, H) -> (N, H): down(silu(gate(x)) * up(x))."""

    def __init__(self, config):
        super().__init__()
        H, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(H, inner, bias=bias)
        self.up_proj = nn.Linear(H, inner, bias=bias)
        self.down_proj = nn.Linear(inner, H, bias=bias)

    def pack(self):
        self.gate_up, self.down = Linear(self.gate_proj, self.up_proj), Linear(self.down_proj)
        del self.gate_proj, self.up_proj, self.down_proj

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Two sublayers, each with its own norm and its own residual add: (N, H) -> (N, H)."""

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def attention(self, x, context):
        return x + self.self_attn(self.input_layernorm(x), context)

    def feed_forward(self, x, context):
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """The whole model: embedding, 2L sublayers (2i the attention of layer i, 2i + 1 its MLP), final norm, LM head."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config, i) for i in range(config.n_layer)),
                "norm": RMSNorm(config.hidden_size, config.norm_eps),
            }
        )
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Item b of the knapsack: a function from states and context to states. The table may get cheaper ways to compute
        # the items and then the head, by name, in the same order: for drafts, never for the target.
        self.sublayers = [f for layer in self.model.layers for f in (layer.attention, layer.feed_forward)]
        self.table = {}

    def load(self, pairs):
        """Takes (name, tensor) pairs, names as in `state_dict()`, and packs each part when its last tensor is in.

        The tensors' device and dtype become the model's. After this the model can run, and `state_dict()` is spent.
        """
        owners = {name: self.get_submodule(name.rpartition(".")[0]) for name in self.state_dict()}
        packers = {f"model.layers.{i}.{part}.": getattr(layer, part)
                   for i, layer in enumerate(self.model.layers) for part in ("self_attn", "mlp")}  # fmt: skip
        waiting = {prefix: {n for n in owners if n.startswith(prefix)} for prefix in packers}
        for name, tensor in pairs:
            setattr(owners.pop(name), name.rpartition(".")[2], nn.Parameter(tensor, requires_grad=False))
            prefix = ".".join(name.split(".")[:4]) + "."
            if prefix in waiting:
                waiting[prefix].discard(name)
                if not waiting[prefix]:
                    packers[prefix].pack()
            elif name == "lm_head.weight":
                self.head, self.lm_head = Linear(self.lm_head), None
        assert not owners, f"no values for {sorted(owners)[:3]}"
        if self.config.tied:
            self.head = Linear(self.model.embed_tokens)
        return self

    @property
    def device(self):
        return self.model.norm.weight.device

    @property
    def dtype(self):
        return self.model.norm.weight.dtype

    def logits(self, x, head=None):
        """States after the last sublayer (N, H) -> logits (N, V)."""
        return (head or self.head)(self.model.norm(x))

    def way(self, item, name):
        """The function that computes an item (the head: item -1) in the named way."""
        return (*self.sublayers, self.head)[item] if name == "full" else self.table[name][item]

    @torch.inference_mode()
    def forward(self, tokens, cache, *, skip=frozenset(), choices=None, capture=None, last=None):
        """Logits after each new token, or after the `last` ones only.

        tokens (T,) int64 stand at positions cache.length …; their keys and values are written there, except
        for skipped attention, and cache.length stays. skip: items that are the identity. choices: for each item, and
        then for the head, "full" or a name in `table`. capture: a list that receives the 2L + 1 states
        x_0 … x_2L. Returns (last or T, V); captured states are (last or T, H).
        """
        context = Context(cache, tokens.size(0))

        def wanted(x):  # a copy, as a view would keep all rows of a long prompt
            return x if last is None else x[-last:].clone()

        x = self.model.embed_tokens(tokens)  # (T, H)
        for item, sublayer in enumerate(self.sublayers):
            if capture is not None:
                capture.append(wanted(x))
            if item not in skip:
                x = (self.way(item, choices[item]) if choices else sublayer)(x, context)
        if capture is not None:
            capture.append(wanted(x))
        return self.logits(wanted(x), self.way(-1, choices[-1]) if choices else None)

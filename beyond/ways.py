"""Cheaper ways to keep a sublayer in a draft: float16 weights, 8-bit weights, attention to a window of the context.

Between keeping and skipping an item stand these. Each fills one more row of the model's table (`Transformer.table`), which
the profile prices. Verification uses none of them, so the text stays the target's. A new one is an entry of WAYS.

Sources: drafts on fewer bits are quantised self-speculation; the window keeps the first positions as StreamingLLM (Xiao et
al. 2024) found necessary, and drafts with it as TriForce and MagicDec do.
"""

import itertools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from tqdm import tqdm

from loading.memory import free_bytes
from model import Context

LINEARS = {"self_attn": ("qkv", "out"), "mlp": ("gate_up", "down")}  # the parts of a layer and their linear layers
SINKS, WIDTH = 4, 256  # a window reads the first few cached positions and the last ones before the new tokens

# --- Copies of the weights in fewer bits -----------------------------------------------------------------------------


class HalfLinear:
    """x (N, in) -> about x W^T + b (N, out) from float16 copies of the weights: at memory speed for one row on a CPU."""

    bytes_per_weight = 2

    def __init__(self, linear):
        self.weight, self.bias = dense(linear).half(), None if linear.bias is None else linear.bias.half()

    def __call__(self, x):
        return torch.nn.functional.linear(x.half(), self.weight, self.bias).to(x.dtype)


class Int8Linear:
    """x (N, in) -> about x W^T + b (N, out), from weights in 8 bits with one scale for each output row.

    On a CPU: x is quantised on the fly, with one scale for all its rows, by torch's dynamic quantised linear.
    Its products are added in 16 bits where the processor lacks 8-bit dot products. Two of them fit if one factor has 7
    bits, and it does less harm to give 7 to the weights and 8 to x (torch's reduce_range does the opposite: twice the
    distance from the target). bfloat16 on a GPU: torch's weight-only kernel, 8 bits; not yet run on one.
    """

    bytes_per_weight = 1

    def __init__(self, linear):
        weight, self.bias = dense(linear), linear.bias
        on_cpu = weight.device.type == "cpu"
        scales = weight.abs().amax(1).clamp(min=1e-12).float() / (63 if on_cpu else 127)
        integers = (weight / scales[:, None]).round_().to(torch.int8)
        if on_cpu:
            zeros = torch.zeros(weight.size(0), dtype=torch.int64)
            with warnings.catch_warnings():  # torch will replace these tensors some day; the kernel has no other way in yet
                warnings.simplefilter("ignore", UserWarning)
                quantised = torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros, 0)
            self.weight = torch.ops.quantized.linear_prepack(quantised, None if self.bias is None else self.bias.float())
        else:
            self.weight, self.scales = integers, scales.to(weight.dtype)

    def __call__(self, x):
        if not isinstance(self.weight, torch.Tensor):
            return torch.ops.quantized.linear_dynamic(x.float(), self.weight).to(x.dtype)
        out = torch._weight_int8pack_mm(x, self.weight, self.scales)
        return out if self.bias is None else out + self.bias


def dense(linear):
    """A model.Linear's weight (out, in) in rows."""
    return linear.weight.to_dense() if linear.packed else linear.weight


def copy_bytes(model, kind):
    """What copies of all linear weights take, with the intermediate copies of the largest."""
    inner = [getattr(getattr(layer, part), name) for layer in model.model.layers for part in LINEARS for name in LINEARS[part]]
    sizes = [linear.weight.numel() for linear in (*inner, model.head)]
    return kind.bytes_per_weight * sum(sizes) + 8 * max(sizes)


def copies(model, kind, progress):
    """The table's row that computes every item and the head on copies of the weights: kind(linear) replaces each linear."""

    def of_part(layer, part):
        twin, inner = _shallow(layer), _shallow(getattr(layer, part))
        for name in LINEARS[part]:
            setattr(inner, name, kind(getattr(inner, name)))
        setattr(twin, part, inner)
        return twin

    def of_layer(layer):
        return of_part(layer, "self_attn").attention, of_part(layer, "mlp").feed_forward

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing, the longest part, uses one thread for each matrix
        head = pool.submit(kind, model.head)
        rows = list(tqdm(pool.map(of_layer, model.model.layers), total=model.config.n_layer, leave=False,
                         desc=f"Copying ({copy_bytes(model, kind) / 1e6:,.0f} MB)", disable=None if progress else True))  # fmt: skip
    return [*itertools.chain(*rows), head.result()]


def _shallow(module):
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin._modules = dict(module._modules)
    return twin


def _no_room(model, kind):
    needed, free = copy_bytes(model, kind), free_bytes(model.device)
    if free is not None and needed > free:
        return f"need {needed / 1e6:,.0f} MB of memory, {free / 1e6:,.0f} MB are free"
    return None


def _no_half(model):
    if (model.device.type, model.dtype) != ("cpu", torch.float32):
        return f"need float32 on a CPU, not {model.dtype} on {model.device}"
    return _no_room(model, HalfLinear)


def _no_int8(model):
    if model.device.type not in ("cpu", "cuda") or (model.device.type == "cuda" and model.dtype != torch.bfloat16):
        return f"need a CPU, or bfloat16 on a GPU, not {model.dtype} on {model.device}"
    supported = torch.backends.quantized.supported_engines
    if model.device.type == "cpu" and torch.backends.quantized.engine == "none":  # torch's wheels for Macs start so
        torch.backends.quantized.engine = next((engine for engine in ("x86", "fbgemm", "onednn", "qnnpack") if engine in supported), "none")
    try:
        probe = torch.nn.Linear(8, 8, device=model.device, dtype=model.dtype)
        probe.packed = False
        Int8Linear(probe)(torch.zeros(1, 8, device=model.device, dtype=model.dtype))
    except (RuntimeError, NotImplementedError, AttributeError):
        return f"need a kernel that this torch has not for {model.device.type}"
    return _no_room(model, Int8Linear)


# --- Attention to a window -------------------------------------------------------------------------------------------


class Windowed(Context):
    """A context of which the new tokens see the first SINKS and, before their own, the last WIDTH positions."""

    def __init__(self, context):
        self.context, self.cos, self.sin = context, context.cos, context.sin
        self.first = context.start - WIDTH
        self.mask = None if context.mask is None else self.cut(context.mask, 1)

    def cut(self, t, dim):
        """Without the positions between, along dim; nothing is between in a short context."""
        if self.first <= SINKS:
            return t
        return torch.cat((t.narrow(dim, 0, SINKS), t.narrow(dim, self.first, t.size(dim) - self.first)), dim)

    def extend(self, layer, k, v):
        keys, values = self.context.extend(layer, k, v)
        return self.cut(keys, 2), self.cut(values, 2)


def _windowed(model, progress):
    """Attention to a window, on the weights with the fewest bits that the table has."""
    base = model.table.get("int8") or model.table.get("half") or [*model.sublayers, model.head]

    def windowed(attention):
        def run(x, context):
            if not hasattr(context, "windowed"):
                context.windowed = Windowed(context)
            return attention(x, context.windowed)

        return run

    return [f if item % 2 or item == 2 * model.config.n_layer else windowed(f) for item, f in enumerate(base)]


# --- The registry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to keep a sublayer in a draft."""

    about: str  # for --help
    signs: tuple[str, str]  # in the strip that shows a plan, and where only ASCII can be shown
    alpha: float  # the chance that a draft kept in this way alone is accepted, until a text says otherwise
    obstacle: Callable  # model -> why it cannot have this way, in a few words, or None
    row: Callable  # (model, progress) -> functions for the 2L items and the head
    whole: bool = True  # an attention sees the whole context


WAYS = {  # in the order in which rows are made
    "half": Way("float16 weights", ("▒", "h"), 0.98, _no_half, lambda model, progress: copies(model, HalfLinear, progress)),
    "int8": Way("8-bit weights", ("▓", "8"), 0.9, _no_int8, lambda model, progress: copies(model, Int8Linear, progress)),
    "window": Way(f"attention to the first {SINKS} and last {WIDTH} positions, on the weights with the fewest bits", ("◫", "w"), 0.8,
                  lambda model: None, _windowed, whole=False),
}  # fmt: skip


def add_ways(model, names=None, *, progress=False):
    """Gives the model's table the rows in `names` (None: all that it can have) -> their names, in the registry's order.

    The model's own weights and results are untouched. Raises ValueError where a named one cannot be had, and why.
    """
    added = []
    for name, way in WAYS.items():
        if name in (WAYS if names is None else names):
            obstacle = None if name in model.table else way.obstacle(model)
            if obstacle and names is not None:
                raise ValueError(f"{name} drafts {obstacle}: leave {name} out of --choices")
            if not obstacle:
                if name not in model.table:
                    model.table[name] = way.row(model, progress)
                added.append(name)
    return added

"""Cheaper ways to keep a sublayer in a draft: 8-bit weights, and attention to a window of the context. Beyond the paper.

Between keeping and skipping an item stand these. Each fills one more row of the model's table, the profile prices it,
and the knapsack becomes a multiple-choice one. Verification uses none of them, so the text stays the target's.
Whoever deletes this file has the paper's method.

Sources: int8 drafts are quantised self-speculation; the window keeps the first positions as StreamingLLM (Xiao et al.
2024) found necessary, and drafts with it as TriForce and MagicDec do.
"""

import itertools
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

LINEARS = {"self_attn": ("qkv", "out"), "mlp": ("gate_up", "down")}  # the parts of a layer and their linear layers
SINKS, WIDTH = 4, 256  # a window reads the first few cached positions and the last ones before the new tokens


class Int8Linear:
    """x (N, in) -> about x W^T + b (N, out), from weights in 8 bits with one scale for each output row.

    float32 on a CPU: x is quantised on the fly, with one scale for all its rows, by torch's dynamic quantised linear.
    Its products are added in 16 bits where the processor lacks 8-bit dot products. Two of them fit if one factor has 7
    bits, and it does less harm to give 7 to the weights and 8 to x (torch's reduce_range does the opposite: twice the
    distance from the target). bfloat16 on a GPU: torch's weight-only kernel, 8 bits; not yet run on one.
    """

    def __init__(self, linear):
        weight = linear.weight.to_dense() if linear.packed else linear.weight
        self.bias, on_cpu = linear.bias, weight.device.type == "cpu"
        scales = weight.abs().amax(1).clamp(min=1e-12).float() / (63 if on_cpu else 127)
        integers = (weight / scales[:, None]).round_().to(torch.int8)
        if on_cpu:
            zeros = torch.zeros(weight.size(0), dtype=torch.int64)
            with warnings.catch_warnings():  # torch will replace these tensors some day; the kernel has no other way in yet
                warnings.simplefilter("ignore", UserWarning)
                quantised = torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros, 0)
            self.weight = torch.ops.quantized.linear_prepack(quantised, self.bias)
        else:
            self.weight, self.scales = integers, scales.to(weight.dtype)

    def __call__(self, x):
        if not isinstance(self.weight, torch.Tensor):
            return torch.ops.quantized.linear_dynamic(x, self.weight)
        out = torch._weight_int8pack_mm(x, self.weight, self.scales)
        return out if self.bias is None else out + self.bias


def available(model):
    """All choices that the model's device and dtype have kernels for, and the device room."""
    return ["full", "window", "skip"] if _obstacle(model) else ["full", "int8", "window", "skip"]


def int8_bytes(model):
    """What 8-bit copies of all linear weights take, with the intermediate copies of the largest."""
    inner = [getattr(getattr(layer, part), name) for layer in model.model.layers for part in LINEARS for name in LINEARS[part]]
    sizes = [linear.weight.numel() for linear in (*inner, model.head)]
    return sum(sizes) + 8 * max(sizes)


def free_bytes(device):
    """What the device has left, or None where it does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return int(re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
    except (OSError, TypeError):
        return None


def _obstacle(model):
    """Why the model cannot have 8-bit copies, in a few words; None if it can."""
    if (model.device.type, model.dtype) not in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        return f"need float32 on a CPU or bfloat16 on a GPU, not {model.dtype} on {model.device}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int8pack_mm", model.device.type.upper()):
        return f"need a kernel that this torch has not for {model.device.type}"
    needed, free = int8_bytes(model), free_bytes(model.device)
    if free is not None and needed > free:
        return f"need {needed / 1e6:,.0f} MB of memory, {free / 1e6:,.0f} MB are free"
    return None


def add_int8(model, *, progress=False):
    """Gives the model's table the row "int8": every sublayer and the head on 8-bit copies of their weights.

    The model's own weights and results are untouched. Raises ValueError where there is no kernel or no memory for it.
    """
    if obstacle := _obstacle(model):
        raise ValueError(f"int8 drafts {obstacle}: pass --choices full,skip")

    def copies(layer):
        return _copy(layer, "self_attn").attention, _copy(layer, "mlp").feed_forward

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing, the longest part, uses one thread for each matrix
        head = pool.submit(Int8Linear, model.head)
        rows = list(tqdm(pool.map(copies, model.model.layers), total=model.config.n_layer, leave=False,
                         desc=f"Quantising ({int8_bytes(model) / 1e6:,.0f} MB)", disable=None if progress else True))  # fmt: skip
    model.table["int8"] = [*itertools.chain(*rows), head.result()]


def _copy(layer, part):
    """A layer that shares all but the linear layers of one part, which are in 8 bits."""
    twin, inner = _shallow(layer), _shallow(getattr(layer, part))
    for name in LINEARS[part]:
        setattr(inner, name, Int8Linear(getattr(inner, name)))
    setattr(twin, part, inner)
    return twin


def _shallow(module):
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin._modules = dict(module._modules)
    return twin


class Windowed:
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


def add_window(model):
    """Gives the table the row "window": attention to a window, on 8-bit weights where the table has them."""
    base = model.table.get("int8") or [*model.sublayers, model.head]

    def windowed(attention):
        def run(x, context):
            if not hasattr(context, "windowed"):
                context.windowed = Windowed(context)
            return attention(x, context.windowed)

        return run

    model.table["window"] = [f if item % 2 or item == 2 * model.config.n_layer else windowed(f) for item, f in enumerate(base)]


def add_choices(model, choices=None, *, progress=False):
    """Fills the model's table with what `choices` (None: all available) names beyond "full" and "skip" -> the choices.

    Raises ValueError as `add_int8`.
    """
    choices = choices or available(model)
    if "int8" in choices and "int8" not in model.table:
        add_int8(model, progress=progress)
    if "window" in choices and "window" not in model.table:
        add_window(model)
    return choices

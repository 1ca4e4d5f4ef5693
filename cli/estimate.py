"""--estimate: what a model takes, and how fast it can be, from its configuration and this device's memory alone."""

import math
from profile import timed

import torch

from cli.methods import BEYOND, default
from knapspec import tokens_per_time
from loading import device_and_dtype, outline
from loading.memory import cache_bytes, free_bytes, weights_bytes
from model import Linear

if BEYOND:
    from beyond.ways import HalfLinear, Int8Linear


def estimate(args):
    """Prints the estimate and returns the exit status. No weights are read. Raises ValueError."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    model = outline(args.model, progress=not args.quiet)
    tokens = args.context or min(4096, model.config.max_position)
    if tokens > model.config.max_position:
        raise ValueError(f"--context {tokens} is longer than the {model.config.max_position} tokens that the model takes: pass fewer")
    print("\n".join(lines(model, tokens, device, dtype, bytes_per_second(device, dtype))))
    return 0


def lines(model, tokens, device, dtype, bandwidth):
    """The estimate as lines. model: on torch's device "meta". bandwidth: bytes per second that weights are read at."""
    config, shapes = model.config, model.state_dict()
    parameters, matrices = sum(t.numel() for t in shapes.values()), multiplied(model)
    weights, cache, free = weights_bytes(model, device, dtype), cache_bytes(config, tokens, dtype), free_bytes(device)
    told = [f"{parameters:,} parameters: {gigabytes(weights)} as {str(dtype).removeprefix('torch.')} on {device}"]
    told.append(f"cache of {tokens:,} tokens: {gigabytes(cache)}")
    if BEYOND:
        half, int8 = (gigabytes(kind.bytes_per_weight * matrices) for kind in (HalfLinear, Int8Linear))
        told.append(f"copies for drafts, where there is room: {half} in float16, {int8} in 8 bits")
    devices = 1 if free is None else math.ceil((weights + cache) / max(free, 1))
    fits = "it fits" if devices == 1 else f"it does not fit, and needs {devices} such devices"
    told.append(f"{device} does not tell how much it has left" if free is None else f"{gigabytes(free)} are left on {device}: {fits}")
    token_s = (matrices * dtype.itemsize + cache) / bandwidth / devices
    gamma, saved = default("knapspec", "gamma_max"), default("knapspec", "budget")
    best = tokens_per_time(1.0, gamma, (1 - saved) * token_s, token_s)
    told.append(f"plainly at most {1 / token_s:.2f} tokens/s: each reads all matrices and the cache, at {gigabytes(bandwidth)}/s as measured")
    told.append(f"in the paper's best case at most {best:.2f}: {gamma} drafts skip {saved:.0%} of the time and are all accepted, so that it is "
                f"({gamma} + 1) / ({gamma} · {1 - saved:g} + 1) = {best * token_s:.2f} times as fast (measured in the paper: up to 1.47)")  # fmt: skip
    return told


def multiplied(model):
    """How many weights a token is multiplied with: all matrices, the embedding only where it is the head too."""
    embedding = 0 if model.config.tied else model.config.vocab_size * model.config.hidden_size
    return sum(tensor.numel() for tensor in model.state_dict().values() if tensor.dim() == 2) - embedding


def gigabytes(count):
    return f"{count / 1e9:,.2f} GB"


@torch.inference_mode()
def bytes_per_second(device, dtype):
    """At which one row is multiplied with a matrix far larger than any cache of the device: the best of a few times."""
    projection = torch.nn.Linear(2**13, 2**16 if device.type == "cuda" else 2**13, bias=False, device="meta")
    projection.weight = torch.nn.Parameter(torch.ones(projection.weight.shape, device=device, dtype=dtype))
    linear, x = Linear(projection), torch.ones(1, 2**13, device=device, dtype=dtype)
    return projection.weight.nbytes / min(timed(device, lambda: linear(x)) for _ in range(8))

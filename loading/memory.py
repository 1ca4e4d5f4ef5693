"""How much memory a device has left, whoever limits it, and what a model takes."""

import contextlib
import re
from pathlib import Path

import torch


def weights_bytes(model, device, dtype):
    """What the weights of a model, itself on any device, take on that one."""
    counts = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    if model.config.tied and device.type == "cpu" and dtype == torch.float32:  # the head is laid out once more (model.Linear)
        counts["head"] = counts["model.embed_tokens.weight"]
    return sum(counts.values()) * dtype.itemsize


def cache_bytes(config, length, dtype):
    """What a KVCache of that many tokens takes: keys and values of all layers, and a row of both rotary tables."""
    return 2 * length * (config.n_layer * config.n_kv_head + 1) * config.head_dim * dtype.itemsize


def refuse_what_does_not_fit(what, needed, device, remedy):
    """Raises ValueError where the device has fewer than `needed` bytes left."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise ValueError(f"{what} take {needed / 1e6:,.2f} MB, and {device} has {free / 1e6:,.2f} MB left: {remedy}")


def free_bytes(device, *, proc=Path("/proc"), cgroups=Path("/sys/fs/cgroup")):
    """What a torch.device has left, a container's limits included; None where that is not known."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return None
    try:
        available = re.search(r"MemAvailable:\s*(\d+) kB", (proc / "meminfo").read_text())
        groups = (proc / "self/cgroup").read_text()
    except OSError:
        return None
    left = [int(available[1]) * 1024] if available else []
    for controllers, path in re.findall(r"^\d+:(.*?):/(.*)$", groups, re.MULTILINE):
        if controllers == "":
            left += _left(cgroups, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):  # cgroup version 1
            left += _left(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return max(min(left), 0) if left else None


def _left(top, path, limit, used, prefix):
    """For each limit on this group and on those above it: what is left, with the files in memory that can go."""
    left = []
    for group in (top / path, *(top / path).parents):
        with contextlib.suppress(OSError, ValueError):  # no limit, or another's folder
            room = int((group / limit).read_text()) - int((group / used).read_text())
            files = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            left.append(room + sum(map(int, files)))
    return left

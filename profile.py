"""Measure what a model's sublayers cost, and fit t(n): the weights of the knapsack.

KnapSpec's latency model (attention grows linearly with the context n, an MLP does not), completed by
what a draft cannot skip and by the price of verifying k tokens at once:

    draft(S, n)  = head + Σ over kept attention of (c3 + c2·n) + Σ over kept MLPs of c1
    verify(n, k) = a_k + b_k·n

The coefficients come from whole forwards, timed as a decode pays for them: with nothing skipped, all attention
skipped, all MLPs skipped, everything skipped. Each is a sweep over all layers in order, so no layer's weights
are found in the processor's cache because it has just been timed.

This file is named like a module of Python's own library, which cProfile imports: what is not defined here is
handed on from there (`__getattr__` at the end).
"""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import platform
import statistics
import sysconfig
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from loading.caches import cache_folder, write_text
from model import KVCache

REPEATS = 3
LENGTHS = 64, 512  # the short context that is always measured, and the least that counts as a long one


@dataclass(frozen=True)
class LatencyModel:
    """Seconds as functions of n, the tokens in the cache. Built by `measure`."""

    head_s: float  # embedding, final norm, LM head, choosing a token: paid by every draft
    mlp_s: float  # c1
    attention_s: tuple[float, float]  # c3, c2 of c3 + c2·n
    verify_s: tuple[tuple[int, float, float], ...]  # (k, a_k, b_k) for some k, ascending, from k = 1
    error: float  # of the fit: mean |fitted − measured| / measured over all that was timed
    ways: tuple = ()  # (name, LatencyModel) for each further entry of the model's table

    def way(self, name):
        """The latencies of one way to compute the items: "full", or a name in the model's table."""
        return self if name == "full" else dict(self.ways)[name]

    def head(self):
        return self.head_s

    def mlp(self):
        return self.mlp_s

    def attention(self, n):
        return self.attention_s[0] + self.attention_s[1] * n

    def sublayer(self, item, n, way="full"):
        """Item 2i is attention, 2i + 1 an MLP."""
        model = self.way(way)
        return model.mlp_s if item % 2 else model.attention(n)

    def draft(self, skip_set, n, n_layer, choices=None):
        """One draft token; choices as in `Transformer.forward`."""
        if choices:
            kept = Counter((choices[item], item % 2) for item in range(2 * n_layer) if item not in skip_set)
            return self.way(choices[-1]).head_s + sum(
                count * self.sublayer(kind, n, way) for (way, kind), count in kept.items()
            )
        attention_kept = n_layer - sum(item % 2 == 0 for item in skip_set)
        mlp_kept = 2 * n_layer - len(skip_set) - attention_kept
        return self.head_s + attention_kept * self.attention(n) + mlp_kept * self.mlp_s

    def verify(self, n, k):
        """One forward of the whole model over k new tokens; between and beyond the measured k on straight lines.

        It never falls as k grows: where more tokens were measured to take less, that is noise.
        """
        times = itertools.accumulate((a + b * n for _, a, b in self.verify_s), max)
        points = [(m, t) for (m, *_), t in zip(self.verify_s, times)]
        if len(points) == 1:
            return points[0][1]
        right = next((i for i, (m, _) in enumerate(points) if m >= k), len(points) - 1)
        (k0, t0), (k1, t1) = points[max(right, 1) - 1], points[max(right, 1)]
        return t0 + (t1 - t0) * (k - k0) / (k1 - k0)


def timed(device, function):
    """Seconds that function() takes, by CUDA events on a GPU and by the clock on a CPU."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


@torch.inference_mode()
def measure(model, *, context_lengths, gamma_max, progress=False):
    """Times whole forwards of `model` at the given context lengths and fits a LatencyModel.

    gamma_max: the longest draft, so verification is timed for up to gamma_max + 1 tokens.
    Source: KnapSpec's profiling; Differs: prices the head and verification, and times sweeps in place of one layer.
    """
    L = model.config.n_layer
    attention, mlp = frozenset(range(0, 2 * L, 2)), frozenset(range(1, 2 * L, 2))
    ks = sorted({k for k in (1, 5, 17, gamma_max + 1) if k <= gamma_max + 1})
    skips = [frozenset(), attention, mlp, attention | mlp]
    runs = [("full", frozenset(), k) for k in ks[1:]] + [(way, skip, 1) for way in ("full", *model.table) for skip in skips]
    cache = KVCache(model.config, max(context_lengths) + gamma_max + 1, device=model.device, dtype=model.dtype)
    cache.keys.zero_()
    cache.values.zero_()
    tokens = torch.zeros(gamma_max + 1, dtype=torch.int64, device=model.device)

    def forward(way, skip, k):
        choices = None if way == "full" else (way,) * (2 * L + 1)
        torch.softmax(model(tokens[:k], cache, skip=skip, choices=choices).float(), -1).max(-1).indices.tolist()

    times = {way: {} for way in ("full", *model.table)}  # way -> {(skip, k, n): seconds}
    bar = tqdm(total=len(context_lengths) * REPEATS, desc="measuring latency", leave=False,
               disable=None if progress else True)  # None: only on a terminal
    for n in context_lengths:
        cache.length = n
        samples = {run: [] for run in runs}
        warm_up = n == context_lengths[0]
        for repeat in range(-warm_up, REPEATS):  # the runs take turns, so that a slow second hits all of them
            for run in runs:
                seconds = timed(model.device, functools.partial(forward, *run))
                if repeat >= 0:
                    samples[run].append(seconds)
            bar.update(repeat >= 0)
        for (way, skip, k), seconds in samples.items():
            times[way][skip, k, n] = statistics.median(seconds)
    bar.close()
    return replace(fit(times.pop("full"), L), ways=tuple((way, fit(of_way, L)) for way, of_way in times.items()))


def fit(times, n_layer):
    """{(skip_set, k, n): seconds} -> LatencyModel, by least squares on relative errors."""
    steps = [(skip, n, s) for (skip, k, n), s in times.items() if k == 1]
    rows = []
    for skip, n, _ in steps:
        attention_kept = n_layer - sum(item % 2 == 0 for item in skip)
        mlp_kept = 2 * n_layer - len(skip) - attention_kept
        rows.append([1, mlp_kept, attention_kept, attention_kept * n])
    (head, c1, c3, c2), step_errors = _least_squares(rows, [s for *_, s in steps])
    verify, errors = [], list(step_errors)
    for k in sorted({k for _, k, _ in times}):
        points = [(n, s) for (skip, m, n), s in times.items() if m == k and not skip]
        (a, b), verify_errors = _least_squares([[1, n] for n, _ in points], [s for _, s in points])
        verify.append((k, a, b))
        errors += verify_errors
    return LatencyModel(head, c1, (c3, c2), tuple(verify), sum(errors) / len(errors))


def _least_squares(rows, seconds):
    """Coefficients ≥ 0 (time saved by doing more would be noise) and the relative error of each row."""
    scale = torch.tensor(seconds, dtype=torch.float64)
    A = torch.tensor(rows, dtype=torch.float64) / scale[:, None]
    free = list(range(A.size(1)))
    while True:
        solution = torch.linalg.lstsq(A[:, free], torch.ones(len(seconds), 1, dtype=torch.float64), driver="gelsd")
        coefficients = solution.solution[:, 0]
        if (coefficients >= 0).all() or len(free) == 1:
            break
        free.pop(int(coefficients.argmin()))
    result = [0.0] * A.size(1)
    for column, value in zip(free, coefficients.tolist()):
        result[column] = max(value, 0.0)
    errors = (A @ torch.tensor(result, dtype=torch.float64) - 1).abs().tolist()
    return result, errors


def latency_model(model, *, context, gamma_max, progress=False):
    """The LatencyModel for contexts of about `context` tokens: from the user's cache folder, or measured and kept there.

    Beyond `context` it goes on along its straight lines: pass what will be used, not what is allowed.
    It is kept under a name made of all that changes it: another model, device, dtype, thread count, library
    version or range of contexts never finds it.
    """
    room = max(model.config.max_position - gamma_max - 1, 1)
    lengths = sorted({min(LENGTHS[0], room), min(max(LENGTHS[1], 1 << (context - 1).bit_length()), room)})
    folder = Path(__file__).parent
    code = [folder / "model.py", folder / "profile.py", *sorted(folder.glob("beyond/*.py"))]  # what is timed, and how
    key = {
        "config": asdict(model.config), "device": device_name(model.device), "dtype": str(model.dtype),
        "threads": torch.get_num_threads(), "ways": sorted(model.table), "torch": torch.__version__, "lengths": lengths, "gamma_max": gamma_max,
        "sublayer": model.sublayers[0].__qualname__,  # another one where it runs as a CUDA graph
        "code": hashlib.sha256(b"".join(f.read_bytes() for f in code)).hexdigest(),
    }  # fmt: skip
    text = json.dumps(key, sort_keys=True)
    path = cache_folder() / "profiles" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if (latency := _read(path, json.loads(text))) is None:
        latency = measure(model, context_lengths=lengths, gamma_max=gamma_max, progress=progress)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs the next run its time, not this one
            write_text(path, json.dumps({"key": key, "latency": asdict(latency)}))
    return latency


def _read(path, key):
    """The LatencyModel kept at path under that key, or None if there is none, or another's, or a damaged one."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        if stored["key"] != key:
            return None
        latency = _from_values(stored["latency"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return latency if latency.verify_s else None


def _from_values(values):
    verify_s = tuple((int(k), *_seconds(line, 2)) for k, *line in values["verify_s"])
    head_s, mlp_s, error = _seconds([values[name] for name in ("head_s", "mlp_s", "error")], 3)
    ways = tuple((str(name), _from_values(way)) for name, way in values["ways"])
    return LatencyModel(head_s, mlp_s, _seconds(values["attention_s"], 2), verify_s, error, ways)


def _seconds(values, count):
    """`count` finite numbers that are not negative, as a tuple of floats. Raises ValueError otherwise."""
    numbers = tuple(map(float, values))
    if len(numbers) != count or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{values} is not {count} times")
    return numbers


def device_name(device):
    """The processor's or the GPU's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def _library_profile():
    spec = importlib.util.spec_from_file_location("_library_profile", Path(sysconfig.get_path("stdlib")) / "profile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_library_profile(), name)

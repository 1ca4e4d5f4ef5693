"""Rows of `speed` on single steps and what is around them: the forward, the profile, the start, memory."""

import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from profile import latency_model, timed
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from benchmark.bench import Row
from benchmark.runs import median
from beyond.ways import add_ways
from loading.config import read_config
from loading.default_model import default_model_folder
from loading.files import read_json
from loading.weights import read_header
from model import KVCache, Transformer

ROOT = Path(__file__).parent.parent


def step_seconds(bench):
    """{what: seconds of a forward at 256 tokens of context}: 1 and 5 tokens of the target, 1 of a draft in each way and of other dtypes."""

    def forward(model, count=1, **options):
        cache = KVCache(model.config, 261, device=model.device, dtype=model.dtype)
        cache.keys.zero_()
        cache.values.zero_()
        cache.length = 256
        return functools.partial(model, torch.zeros(count, dtype=torch.int64, device=model.device), cache, **options)

    model, _ = bench.load("smollm2")
    forwards = {"1 token": forward(model), "5 tokens": forward(model, 5)}
    for way in add_ways(model, progress=True):
        forwards[way] = forward(model, choices=(way,) * (2 * model.config.n_layer + 1))
    for dtype in ("float16", "bfloat16"):
        forwards[dtype] = forward(bench.load("smollm2", dtype)[0])
    found = {what: [] for what in forwards}
    for i in range(2 + 4 * bench.repeats):
        for what in list(forwards)[:: 1 if i % 2 else -1]:
            seconds = timed(model.device, lambda what=what: forwards[what]().argmax(-1).tolist())
            if i >= 2:  # the first ones warm up
                found[what].append(seconds)
    return {what: median(seconds) for what, seconds in found.items()}


def step_ratios(bench, wanted):
    """Forwards over that of one token. wanted: {what: the most, or None}; None is met where nothing is asked, or this machine has none of them."""
    found = bench.results.once("steps", lambda: step_seconds(bench))
    ratios = {what: found[what] / found["1 token"] for what in wanted if what in found}
    text = ", ".join(f"{what}: {ratio:.2f}" for what, ratio in ratios.items()) or "none here"
    bounds = {what: most for what, most in wanted.items() if most}
    met = all(ratios[what] <= bounds[what] for what in ratios) if ratios and bounds else None
    return Row(", ".join(f"{what}: ≤ {most:.2f}" for what, most in bounds.items()) or "–", f"{text} of {found['1 token'] * 1000:.1f} ms", met, found)


def profile(bench):
    """The first profile of the default model with all its ways, in plain steps of its own."""

    def measured():
        model, _ = bench.load("smollm2")
        add_ways(model, progress=True)
        with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, KNAPSPEC_CACHE=empty):
            start_s = time.perf_counter()
            latency = latency_model(model, context=512, gamma_max=16)
            return {"seconds": time.perf_counter() - start_s, "step_s": latency.verify(256, 1)}

    found = bench.results.once("profile", measured)
    steps = found["seconds"] / found["step_s"]
    return Row("≤ 60", f"{steps:.0f} ({found['seconds']:.1f} s)", steps <= 60, found)


def start(bench):
    """From the command to the first byte of text: the default model in the cache, its profile on disk."""

    def seconds():
        command = [sys.executable, "knapspec.py", "--prompt", "Explain why the sky is blue.", "--quiet"]
        start_s = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
            first = process.stdout.read(1)
            taken_s = time.perf_counter() - start_s
            process.kill()
            if not first:
                raise ValueError(f"knapspec.py prints nothing: {process.stderr.read().decode(errors='replace')}")
        return taken_s

    def several():
        seconds()  # fetches and profiles what is not there yet
        return [seconds() for _ in range(bench.repeats)]

    found = bench.results.once("start", several)
    return Row("≤ 3 s", f"{median(found):.1f} s", median(found) <= 3, {"seconds": found})


# Linux alone has VmHWM, which begins at 0 in each program; getrusage() tells at least what the program's parent held.
_LOAD = """
import re, sys, torch
from loading import load
def peak_bytes():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
torch.ones(1, device=sys.argv[3]).item()  # a GPU's library takes memory of the host too
before = peak_bytes()
load(sys.argv[1], device=sys.argv[3], dtype=sys.argv[2], progress=False)
print(peak_bytes() - before)
"""


def loading_bytes(folder, dtype, device="cpu"):
    """{"added_bytes": what loading adds at its peak to a process's memory on the host, "weights_bytes": what the weights have}."""
    done = subprocess.run([sys.executable, "-c", _LOAD, folder, dtype, device], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"loading {folder} in {dtype} failed: {done.stderr[-1000:]}")
    entries = [entry for path in Path(folder).glob("*.safetensors") for entry in read_header(path).values()]
    weights_bytes = sum(math.prod(shape) for _, shape, _ in entries) * getattr(torch, dtype).itemsize
    return {"added_bytes": int(done.stdout), "weights_bytes": weights_bytes}


def memory(bench):
    """What loading adds to a process at its peak, against the weights' own bytes. In float32 a tied head is there twice."""
    wanted = {"float32": 1.3, "bfloat16": 1.15}
    if not Path("/proc/self/status").exists():
        return Row("≤ 1.15× (1.30× in float32)", "Linux alone tells it", None, {})
    found = {dtype: bench.results.once(f"memory/{dtype}", lambda dtype=dtype: loading_bytes(bench.folder("smollm2"), dtype))
             for dtype in wanted}  # fmt: skip
    ratios = {dtype: of["added_bytes"] / of["weights_bytes"] for dtype, of in found.items()}
    text = ", ".join(f"{ratio:.2f}× in {dtype}" for dtype, ratio in ratios.items())
    return Row("≤ 1.15× (1.30× in float32)", text, all(ratios[dtype] <= wanted[dtype] for dtype in wanted), found)


SHARDS = 6
BIG = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 8,
       "tie_word_embeddings": False}  # fmt: skip


def write_big(folder, sizes=BIG):
    """A checkpoint of zeros in bfloat16 and SHARDS files, 3 GB with the default model's vocabulary, into a new folder."""
    folder.mkdir()
    raw = read_json(default_model_folder() / "config.json") | sizes
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(default_model_folder() / "tokenizer.json", folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Transformer(read_config(raw)).state_dict().items()}
    whole, before, weight_map = sum(map(math.prod, shapes.values())), 0, {}
    for name, shape in shapes.items():
        weight_map[name] = f"model-{SHARDS * before // whole}.safetensors"
        before += math.prod(shape)
    for file in {*weight_map.values()}:
        save_file({name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in shapes if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def shards(bench):
    """What loading a checkpoint of several files adds to the host's memory at its peak beside what stays there, over the largest file."""
    if not Path("/proc/self/status").exists():
        return Row("≤ 1.15", "Linux alone tells it", None, {})

    def measured():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with tempfile.TemporaryDirectory() as work:
            write_big(folder := Path(work, "big"))
            shard_bytes = max(path.stat().st_size for path in folder.glob("*.safetensors"))
            told = loading_bytes(folder, "bfloat16", device)
        return told | {"shard_bytes": shard_bytes, "stays_bytes": told["weights_bytes"] if device == "cpu" else 0}

    found = bench.results.once("shards", measured)
    ratio = (found["added_bytes"] - found["stays_bytes"]) / found["shard_bytes"]
    numbers = {name: f"{found[f'{name}_bytes'] / 1e6:,.0f} MB" for name in ("added", "stays", "weights", "shard")}
    text = "{added} of which {stays} stay, for {weights} in files of {shard}".format(**numbers)
    return Row("≤ 1.15", f"{ratio:.2f} ({text})", ratio <= 1.15, found)


ROWS = {
    "verify": ("time for verifying 5 tokens / for 1", functools.partial(step_ratios, wanted={"5 tokens": 1.4})),
    "draft_step": ("a draft's step / a plain step", functools.partial(step_ratios, wanted={"half": 0.42, "int8": 0.33})),
    "dtypes": ("a plain step in half precision / a plain step", functools.partial(step_ratios, wanted={"float16": None, "bfloat16": None})),
    "profile": ("the first profile, in plain steps", profile),
    "start": ("start to first token, default model", start),
    "memory": ("peak memory while loading / weights", memory),
    "shards": ("peak memory while loading 3 GB, beside what stays / largest file", shards),
}  # fmt: skip

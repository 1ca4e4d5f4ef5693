"""The numbers to reach, each a function that measures it: wanted, measured, met, and what stands behind it.

All times are compared in pairs, one run right after the other in alternating order, as a machine's speed drifts.
"""

import copy
import functools
import importlib.util
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from profile import device_name, measure, timed
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmark.comparison import (
    Recorder,
    decode,
    make_theirs,
    median,
    paired,
    read_prompts,
    table,
)
from benchmark.evidence import probe, tpt
from benchmark.planted import PLANTED, plant
from benchmark.sweep import contenders, sweep, told
from cli import cli
from decoding import FixedPlanner, Plan, Planner
from knapspec import certified, knapsack
from loading import load
from loading.config import read_config
from loading.default_model import default_model_folder
from loading.files import read_json
from model import KVCache, Transformer
from rivals.draft_verify import PROMPTS

# --- What the rows share ---------------------------------------------------------------------------------------------


class Row(NamedTuple):
    wanted: str
    measured: str
    met: bool | None  # None: not measured here, or nothing is wanted
    details: dict


class Bench:
    """Models, prompts, how much to measure, and all results so far, which are in a file as soon as they exist.

    planted: a folder that holds planted models as `split` and `blocks`; one that is missing is made there when needed.
    quick: few prompts and runs, to see that all works. max_new_tokens: of the compared runs. n_prompts: at most so many
    in a row. path: where the JSON file goes; with resume, what it holds is not measured again. Raises ValueError if it
    was made with other settings.
    """

    def __init__(self, planted, *, quick=False, max_new_tokens=128, n_prompts=24, path=None, resume=False, progress=True):
        self.planted, self.quick, self.max_new_tokens, self.path, self.progress = Path(planted), quick, max_new_tokens, path, progress
        self.repeats, self.n_prompts = (1, min(n_prompts, 2)) if quick else (5, n_prompts)
        self.loaded = (None, None, None)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        made_with = {"quick": quick, "max_new_tokens": max_new_tokens, "n_prompts": n_prompts, "device": device_name(device),
                     "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version()}  # fmt: skip
        self.results = {"made_with": made_with, "rows": {}, "runs": {}}
        if path and path.exists():
            if not resume:
                raise ValueError(f"--json {path} exists: add --resume to continue it, or name another file")
            self.results = _read_results(path, made_with)

    def once(self, key, measurement):
        """What measurement() returns, as JSON can hold it; from the results if it is there."""
        if key not in self.results["runs"]:
            self.results["runs"][key] = json.loads(json.dumps(measurement()))
            self.save()
        return self.results["runs"][key]

    def save(self):
        if self.path:
            cli.write_json(self.path, self.results)

    def folder(self, name):
        """Of "smollm2", the default model, or of "split" or "blocks", made from it."""
        if name == "smollm2":
            return default_model_folder(progress=self.progress)
        if not (self.planted / name).exists():
            plant(self.planted / name, kind=name, model=self.folder("smollm2"), progress=self.progress)
        return self.planted / name

    def model(self, name):
        """(model, tokenizer), warmed up. One is kept at a time."""
        if self.loaded[0] != name:
            self.loaded = (None, None, None)
            self.loaded = (name, *load(self.folder(name), progress=self.progress))
            decode(self.loaded[1], [1, 2, 3], Planner(), max_new_tokens=8)
        return self.loaded[1:]

    def prompts(self, count, tokenizer, config):
        """[(id, token ids)] of `count` prompts, evenly from the whole file."""
        return even_prompts(min(count, self.n_prompts), self.max_new_tokens, tokenizer, config)


def even_prompts(count, max_new_tokens, tokenizer, config):
    """[(id, token ids)] of at most `count` of the project's prompts, evenly from the whole file."""
    texts, options = read_prompts(PROMPTS), knapspec_options(max_new_tokens)
    count = min(count, len(texts))
    chosen = [texts[i * len(texts) // count] for i in range(count)]
    return [(prompt_id, cli.encode_prompt(options, text, tokenizer, config)) for prompt_id, text in chosen]


def _read_results(path, made_with):
    try:
        results = json.loads(path.read_text("utf-8"))
        before = results["made_with"]
        differs = [name for name in made_with if made_with[name] != before.get(name)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--json {path} holds no results of this command: name another file") from None
    if differs:
        name = differs[0]
        raise ValueError(f"--json {path} was made with {name} {before.get(name)}, not {made_with[name]}: name another file")
    return results


def knapspec_options(max_new_tokens):
    """The command line's options as they are when nothing is said."""
    return cli.parse(["--prompt", "", "--quiet", "--max-new-tokens", str(max_new_tokens)])


def knapspec_planner(model, tokenizer, prompt_tokens, max_new_tokens):
    """(planner, its LatencyModel) as the command line makes them."""
    return cli.make_planner(knapspec_options(max_new_tokens), model, tokenizer, prompt_tokens)


def geometric_mean(values):
    return math.exp(statistics.mean(math.log(value) for value in values)) if values else math.nan


# --- Against plain decoding ----------------------------------------------------------------------------------------------


def race(bench, name, prompt_ids, fixed=None):
    """Runs of KnapSpec, and of a fixed Plan, beside plain ones on one prompt, up to the end of the text."""
    model, tokenizer = bench.model(name)
    planner, _ = knapspec_planner(model, tokenizer, len(prompt_ids), bench.max_new_tokens)
    run = functools.partial(decode, model, prompt_ids, max_new_tokens=bench.max_new_tokens, eos_ids=tokenizer.eos_ids)
    others = {"knapspec": lambda: run(copy.deepcopy(planner))}  # it learns: each run starts anew, as a command does
    if fixed:
        others["fixed"] = lambda: run(FixedPlanner(fixed))
    runs = {method: [] for method in others}
    for result in paired(lambda: run(Planner()), others, repeats=bench.repeats):
        runs[result["method"]].append(result)
    return {
        "new_tokens": runs["knapspec"][0]["new_tokens"],
        "plain_tokens_per_second": median(r["plain_tokens_per_second"] for r in runs["knapspec"]),
        "speedups": {method: [r["speedup"] for r in results] for method, results in runs.items()},
        "drafted": [r["drafted"] for r in runs["knapspec"]],
        "accepted": [r["accepted"] for r in runs["knapspec"]],
        "identical": all(r["token_ids"] == r["plain_ids"] for results in runs.values() for r in results),
    }


def races(bench, name, count, fixed=None):
    """{prompt id: race()} -> also each prompt's median speed-up by method, where the text is long enough for one."""
    model, tokenizer = bench.model(name)
    prompts = bench.prompts(count, tokenizer, model.config)
    bar = tqdm(prompts, desc=name, unit="prompt", leave=False, disable=None if bench.progress else True)
    found = {prompt_id: bench.once(f"{name}/{prompt_id}", functools.partial(race, bench, name, ids, fixed)) for prompt_id, ids in bar}
    medians = {method: {} for method in ("knapspec", "fixed")[: 1 + (fixed is not None)]}
    for prompt_id, result in found.items():
        for method, of_prompt in medians.items():
            if (value := median(result["speedups"][method])) is not None:
                of_prompt[prompt_id] = value
    return found, medians


def differences(found):
    """To be told only where there are any, which would be a fault."""
    count = sum(not result["identical"] for result in found.values())
    return f", ANOTHER TEXT on {count}" if count else ""


def smollm2(bench):
    """A small model without sublayers to spare: no prompt may get slower, and 8-bit drafts should make most faster."""
    found, medians = races(bench, "smollm2", 24)
    speedups, drafted = list(medians["knapspec"].values()), sum(any(result["drafted"]) for result in found.values())
    worst, mean, n = min(speedups), geometric_mean(speedups), len(found)
    measured = f"mean {mean:.2f}×, {worst:.2f}× at least, drafts on {drafted} of {n} prompts" + differences(found)
    return Row("mean ≥ 1.20×, ≥ 0.98× on any prompt", measured, worst >= 0.98 and mean >= 1.2, {"median_speedup": medians["knapspec"]})


def long_contexts(bench):
    """Where reading the cache is most of a step. The text is what Python says about itself."""
    found, wanted = {}, {256: 1.0} if bench.quick else {4000: 1.4, 7000: 1.35}
    _, tokenizer = bench.model("smollm2")
    for n in wanted:
        ids = tokenizer.encode("\n\n".join(topics.values())[: 8 * n])[:n]
        found[n] = bench.once(f"long/{n}", functools.partial(race, bench, "smollm2", ids))
    speedups = {n: median(result["speedups"]["knapspec"]) for n, result in found.items()}
    text = ", ".join(f"{value:.2f}× at {n} tokens" for n, value in speedups.items()) + differences(found)
    met = all(speedups[n] >= wanted[n] for n in wanted)
    return Row(", ".join(f"≥ {value:.2f}× at {n}" for n, value in wanted.items()), text, met, {"median_speedup": speedups})


def find_fixed(bench, kind):
    model, tokenizer = bench.model(kind)
    prompts = [ids for _, ids in bench.prompts(4, tokenizer, model.config)]
    _, latency = knapspec_planner(model, tokenizer, max(map(len, prompts)), bench.max_new_tokens)
    plans = contenders(model, prompts[0], latency, kind=kind)
    plans, new_tokens = (plans[::8], 8) if bench.quick else (plans, 32)
    return told(*sweep(model, prompts, plans, max_new_tokens=new_tokens, progress=bench.progress)[-1][0])


def on_planted(bench, *, kind):
    """A model with redundancy: KnapSpec must find it, and come close to the best plan that a sweep finds."""
    best = bench.once(f"{kind}/sweep", functools.partial(find_fixed, bench, kind))
    plan = Plan(frozenset(best["skip_set"]), best["gamma"], choices=best["choices"] and tuple(best["choices"]))
    found, medians = races(bench, kind, 6, plan)
    mean, of_fixed = (geometric_mean(list(medians[method].values())) for method in ("knapspec", "fixed"))
    measured = f"{mean:.2f}×, {mean / of_fixed:.0%} of the best fixed plan's {of_fixed:.2f}×" + differences(found)
    met = mean >= 1.5 and mean >= 0.95 * of_fixed
    return Row("≥ 1.50×, ≥ 95% of the best fixed plan", measured, met, {"median_speedup": medians, "best_fixed": best})


def generations(bench):
    """{model: [what 256 tokens of one prompt tell of planning]}, in one run of KnapSpec for each prompt."""

    def generation(name, prompt_ids):
        model, tokenizer = bench.model(name)
        planner, _ = knapspec_planner(model, tokenizer, len(prompt_ids), 256)
        recorder = Recorder(planner)
        run = decode(model, prompt_ids, recorder, max_new_tokens=256)
        tried = [(round.plan.alpha, min(round.accepted + 1, round.drafted)) for round in recorder.rounds]
        return {
            "plan_share": run["seconds"]["plan"] / run["seconds"]["total"],
            "accepted": run["accepted"],
            "expected": sum(alpha * count for alpha, count in tried),
            "tried": run["tried"],
        }

    found = {}
    for name in ("smollm2", *PLANTED):
        model, tokenizer = bench.model(name)
        found[name] = [bench.once(f"generation/{name}/{prompt_id}", functools.partial(generation, name, ids))
                       for prompt_id, ids in bench.prompts(4, tokenizer, model.config)]  # fmt: skip
    return found


def planning(bench):
    """The share of a generation of 256 tokens that goes into planning: each model's median over prompts."""
    shares = {name: median(run["plan_share"] for run in runs) for name, runs in generations(bench).items()}
    text = ", ".join(f"{value:.1%} on {name}" for name, value in shares.items())
    return Row("≤ 5%", text, max(shares.values()) <= 0.05, shares)


# --- Predictions ---------------------------------------------------------------------------------------------------------


def predictions(bench):
    """{model: what evidence.tpt() measures}: skip sets × γ at two context lengths, priced by a profile made right before."""

    def settings(name):
        model, tokenizer = bench.model(name)
        text = [token for _, text in read_prompts(PROMPTS) for token in tokenizer.encode(text)]
        contexts, gammas = ((32, 64), (1, 4)) if bench.quick else ((128, 640), (1, 2, 4, 8))
        latency = measure(model, context_lengths=[contexts[0], sum(contexts) // 2, contexts[1] + 64], gamma_max=max(gammas))
        sizes = {"skip_sets": 2, "new_tokens": 8} if bench.quick else {"skip_sets": 6, "new_tokens": 48}
        return tpt(model, latency, text, contexts=contexts, gammas=gammas, progress=bench.progress, **sizes)

    return {name: bench.once(f"tpt/{name}", functools.partial(settings, name)) for name in ("smollm2", "split")}


def rates(bench):
    """Tokens per second as tokens per time predicts them, given the α of the setting, against those measured.

    The error is that of the ratio to plain decoding, predicted and right beside the run: what a machine that others use
    slows down since it was profiled is no fault of the prediction. The error without that is told as well.
    """
    found = [(row, len(result["points"])) for result in predictions(bench).values() for row in result["rows"]
             if (row["predictor"], row["alpha"]) == ("tpt", "measured")]  # fmt: skip
    correlations = [row["pearson"]["all"] for row, _ in found]
    errors, drifting = ([row[key] for row, _ in found] for key in ("speedup_error", "error"))
    text = f"Pearson {min(correlations):.3f}, mean error {max(errors):.1%}, {max(drifting):.1%} with the drift of the machine"
    text += f" ({sum(count for _, count in found)} settings, the worse of SmolLM2 and split)"
    met = min(correlations) >= 0.95 and max(errors) <= 0.1
    return Row("Pearson ≥ 0.95, mean error ≤ 10%", text, met, {"pearson": correlations, "mean_error": errors, "with_drift": drifting})


def alpha(bench):
    """The α by which KnapSpec decided, mean over a text's drafted tokens, against the share of them that was accepted.

    Also how far off the α is that a window alone gives, before any draft, for skip sets that the knapsack finds.
    """
    runs = [run for runs in generations(bench).values() for run in runs if run["tried"]]
    points = [p for result in predictions(bench).values() for p in result["points"] if p["kind"] == "knapsack"]
    before = statistics.mean(abs(p["alpha"] - p["expected_alpha"]) for p in points)
    text, error = "nothing was drafted", None
    if runs:
        error = statistics.mean(abs(run["expected"] - run["accepted"]) / run["tried"] for run in runs)
        text = f"mean error {error:.3f} on {len(runs)} texts with drafts"
    text += f"; {before:.3f} before the first draft"
    return Row("mean error ≤ 0.05", text, error <= 0.05 if runs else None, {"while_drafting": error, "before_drafting": before})


def certificate(bench):
    """How often `certified` proves, for drafts that skip 1, 4 or 12 sublayers, that the best token stays what it is.

    In the middle of a text, on the last 16 tokens. Beside it how often it is the same.
    """

    def look(session):
        states, _ = session.window(16)
        drafts = knapsack(session.model, session.cache, states, [1.0] * (len(states) - 1), budget=0.25)
        best = session.model.logits(states[-1]).argmax(-1)
        return {len(skip_set): (certified(session.model, states[-1], x).float().mean().item(),
                                (session.model.logits(x).argmax(-1) == best).float().mean().item())
                for skip_set, _, _, x in drafts if len(skip_set) in (1, 4, 12)}  # fmt: skip

    def shares():
        model, tokenizer = bench.model("smollm2")
        prompts = [ids for _, ids in bench.prompts(4, tokenizer, model.config)]
        texts = [ids + decode(model, ids, Planner(), max_new_tokens=32)["token_ids"] for ids in prompts]
        seen = [probe(model, text, look, window=16) for text in texts]
        counts = sorted(set.intersection(*map(set, seen)))
        return [[count, *(statistics.mean(pairs[count][i] for pairs in seen) for i in (0, 1))] for count in counts]

    found = bench.once("certificate", shares)
    text = "; ".join(f"{count} skipped: {proven:.1%} proven, {same:.1%} the same" for count, proven, same in found)
    return Row("–", text, None, {"skipped, proven, same": found})


# --- The step, and what is around it -------------------------------------------------------------------------------------


def transformers(bench):
    """Plain decoding beside transformers' generate() with the same weights, behind the first token."""
    wanted = "≥ 1.40×"
    if importlib.util.find_spec("transformers") is None:
        return Row(wanted, "transformers is not installed", None, {})

    def race():
        model, tokenizer = bench.model("smollm2")
        options = {"max_new_tokens": 16 if bench.quick else 64, "eos_ids": (), "temperature": 0.0, "seed": 0}
        theirs = make_theirs(model, bench.folder("smollm2"), ["transformers"], options)["transformers"]
        speedups, identical = {}, True
        for prompt_id, ids in bench.prompts(4, tokenizer, model.config):
            ours = functools.partial(decode, model, ids, Planner(), **options)
            runs = list(paired(functools.partial(theirs, ids), {"ours": ours}, repeats=bench.repeats))
            speedups[prompt_id] = median(run["speedup"] for run in runs)
            identical &= all(run["token_ids"] == run["plain_ids"] for run in runs)
        return {"speedups": speedups, "identical": identical}

    found = bench.once("transformers", race)
    mean = geometric_mean(list(found["speedups"].values()))
    return Row(wanted, f"{mean:.2f}×, {'the same' if found['identical'] else 'another'} text", mean >= 1.4, found)


def verify(bench):
    """One forward over five tokens against one over one, at 256 tokens of context."""

    def times():
        model, _ = bench.model("smollm2")
        cache = KVCache(model.config, 261, device=model.device, dtype=model.dtype)
        cache.keys.zero_()
        cache.values.zero_()
        cache.length, tokens = 256, torch.zeros(5, dtype=torch.int64, device=model.device)
        found = {1: [], 5: []}
        for i in range(2 + 4 * bench.repeats):
            for k in (1, 5) if i % 2 else (5, 1):
                seconds = timed(model.device, lambda k=k: model(tokens[:k], cache).argmax(-1).tolist())
                if i >= 2:  # the first ones warm up
                    found[k].append(seconds)
        return {f"{k}_tokens_s": statistics.median(seconds) for k, seconds in found.items()}

    found = bench.once("verify", times)
    ratio = found["5_tokens_s"] / found["1_tokens_s"]
    return Row("≤ 1.40", f"{ratio:.2f} ({found['1_tokens_s'] * 1000:.0f} ms for one)", ratio <= 1.4, found)


def start(bench):
    """From the command to the first byte of text: the default model in the cache, its profile on disk."""

    def seconds():
        command = [sys.executable, "knapspec.py", "--prompt", "Explain why the sky is blue.", "--quiet"]
        start_s = time.perf_counter()
        with subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
            first = process.stdout.read(1)
            taken_s = time.perf_counter() - start_s
            process.kill()
            if not first:
                raise ValueError(f"knapspec.py prints nothing: {process.stderr.read().decode(errors='replace')}")
        return taken_s

    def several():
        seconds()  # fetches and profiles what is not there yet
        return [seconds() for _ in range(bench.repeats)]

    found = bench.once("start", several)
    return Row("≤ 3 s", f"{median(found):.1f} s", median(found) <= 3, {"seconds": found})


# VmHWM begins at 0 in each program; getrusage() tells at least what the program's parent held.
_LOAD = """
import json, re, resource, sys
from loading import load
def peak_bytes():
    try:
        return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak_bytes()
load(sys.argv[1], device="cpu", dtype=sys.argv[2], progress=False)
print(peak_bytes() - before)
"""


def loading_bytes(folder, dtype):
    """{"added_bytes": what loading adds at its peak to a process on the CPU, "weights_bytes": what the weights have}."""
    command = [sys.executable, "-c", _LOAD, folder, dtype]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"loading {folder} in {dtype} failed: {done.stderr[-1000:]}")
    with torch.device("meta"):
        shapes = Transformer(read_config(read_json(Path(folder, "config.json")))).state_dict().values()
    weights_bytes = sum(tensor.numel() for tensor in shapes) * getattr(torch, dtype).itemsize
    return {"added_bytes": int(done.stdout), "weights_bytes": weights_bytes}


def memory(bench):
    """What loading adds to a process at its peak, against the weights' own bytes. In float32 a tied head is there twice."""
    found = {dtype: bench.once(f"memory/{dtype}", lambda dtype=dtype: loading_bytes(bench.folder("smollm2"), dtype))
             for dtype in ("float32", "bfloat16")}  # fmt: skip
    ratios = {dtype: f["added_bytes"] / f["weights_bytes"] for dtype, f in found.items()}
    met = ratios["float32"] <= 1.3 and ratios["bfloat16"] <= 1.15
    text = ", ".join(f"{ratio:.2f}× in {dtype}" for dtype, ratio in ratios.items())
    return Row("≤ 1.15× (1.30× in float32)", text, met, found)


# --- The table -----------------------------------------------------------------------------------------------------------

ROWS = {
    "transformers": ("plain decoding against transformers' generate", transformers),
    "verify": ("time for verifying 5 tokens / for 1", verify),
    "smollm2": ("KnapSpec against plain decoding, SmolLM2", smollm2),
    "long": ("the same, long contexts", long_contexts),
    "split": ("the same, planted SmolLM2 `split`", functools.partial(on_planted, kind="split")),
    "blocks": ("the same, planted SmolLM2 `blocks`", functools.partial(on_planted, kind="blocks")),
    "planning": ("planning's share of 256 new tokens", planning),
    "rates": ("predicted against measured tokens/s", rates),
    "alpha": ("predicted α against the share accepted", alpha),
    "certificate": ("drafts whose token is provably the target's, SmolLM2", certificate),
    "start": ("start to first token, default model", start),
    "memory": ("peak memory while loading / weights", memory),
}


def speed(bench, only=None):
    """Measures the rows named in `only`, or all, one after the other; bench.results holds them, also when interrupted."""
    for name in only or ROWS:
        what, measurement = ROWS[name]
        bench.results["rows"][name] = {"what": what, **measurement(bench)._asdict()}
        bench.save()
    return bench.results


def speed_table(results):
    """The table as Markdown, with what the figures depend on."""
    made_with = results["made_with"]
    where = f"{made_with['device']}, {made_with['threads']} threads, torch {made_with['torch']}, Python {made_with['python']}"
    lines = [where + ("; --quick: too few runs to judge by" if made_with["quick"] else ""), ""]
    signs = {True: "yes", False: "no", None: None}
    rows = [[row["what"], row["wanted"], row["measured"], signs[row["met"]]]
            for name in ROWS if (row := results["rows"].get(name))]  # fmt: skip
    return "\n".join([*lines, *table(["what", "wanted", "measured", "met"], rows)])

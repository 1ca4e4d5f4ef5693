"""Row of `speed` on long contexts: a model of small width at 32,768 real positions, from the prompt to the last token."""

import re
from pathlib import Path
from profile import latency_model
from unittest.mock import patch

import torch

from benchmark.bench import Row
from benchmark.planted import planted_items
from benchmark.runs import Prefills, Recorder
from beyond.adaptive import KnapSpecPlus
from decoding import Planner, generate
from knapspec import KnapSpec
from loading.memory import cache_bytes
from loading.weights import return_freed_memory
from model import Config, Transformer

CLEAR = Path("/proc/self/clear_refs")  # what is written there lets VmHWM start anew
POSITIONS, NEW_TOKENS = 2**15, 96
CONFIG = Config(vocab_size=1000, hidden_size=128, intermediate_size=512, n_layer=8, n_head=4, n_kv_head=2, head_dim=32,
                max_position=POSITIONS, norm_eps=1e-5, rope_theta=1e6)  # fmt: skip


def random_model(config, epsilon=0.05):
    """Seeded random weights; half of the sublayers hardly matter."""
    model, rng, faint = Transformer(config), torch.Generator().manual_seed(0), planted_items("split", config.n_layer)
    pairs = []
    for name, tensor in model.state_dict().items():
        weight = torch.ones_like(tensor) if "norm" in name else torch.randn(tensor.shape, generator=rng) * 0.1
        match = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn\.o_proj|mlp\.down_proj)\.weight", name)
        pairs.append((name, weight * epsilon if match and 2 * int(match[1]) + ("mlp" in name) in faint else weight))
    return model.load(pairs)


def resident_bytes(field):
    """VmRSS, what this process has in memory now, or VmHWM, the most since CLEAR was written to."""
    return int(re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class Weighed(Recorder):
    """Keeps the most bytes that one planning added to the process."""

    added = 0

    def plan(self, session):
        return_freed_memory()  # else what the prompt left behind would be used again unseen
        CLEAR.write_text("5")
        before = resident_bytes("VmRSS")
        plan = super().plan(session)
        self.added = max(self.added, resident_bytes("VmHWM") - before)
        return plan


def measure(config=CONFIG, new_tokens=NEW_TOKENS):
    """{method: {"identical": to plain decoding's ids, "drafted", "accepted", "added_bytes": by one planning}} and "cache_bytes"."""
    model = random_model(config)
    count = config.max_position - new_tokens
    prompt = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    latency = latency_model(model, context=config.max_position, gamma_max=8)
    methods = {"knapspec": KnapSpec(latency, threshold=0.0), "knapspec+": KnapSpecPlus(latency, gamma_max=8, without=("thrift", "lookup"))}  # the latter always plans
    found = {"cache_bytes": cache_bytes(config, config.max_position, torch.float32)}
    with patch("decoding.prefill", Prefills()):
        planner = Planner()
        planner.window = methods["knapspec"].window  # so that the prompt's forward, which takes the longest, serves all
        plain = generate(model, prompt, max_new_tokens=new_tokens, planner=planner)
        for name, planner in methods.items():
            weighed = Weighed(planner)
            generation = generate(model, prompt, max_new_tokens=new_tokens, planner=weighed)
            found[name] = {"identical": generation.token_ids == plain.token_ids, "drafted": generation.drafted,
                           "accepted": generation.accepted, "added_bytes": weighed.added}  # fmt: skip
    return found


def row(bench):
    if not CLEAR.exists():
        return Row("≤ 10%, ids the same", "Linux alone tells it", None, {})
    found = bench.results.once("long", measure)
    runs, whole = {name: run for name, run in found.items() if name != "cache_bytes"}, found["cache_bytes"]
    text = "; ".join(
        f"{name}: {run['added_bytes'] / whole:.1%}, {run['accepted']} of {run['drafted']} accepted, ids {'the same' if run['identical'] else 'OTHERS'}"
        for name, run in runs.items()
    )
    met = all(run["identical"] and run["added_bytes"] <= 0.1 * whole for run in runs.values()) and any(run["drafted"] for run in runs.values())
    return Row("≤ 10%, ids the same", f"of {whole / 1e6:.0f} MB, {text}", met, found)


ROWS = {"long": ("32,768 tokens: what one planning adds / the cache", row)}

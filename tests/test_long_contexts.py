"""Planning at 32,768 tokens: what it takes besides the cache does not grow with the context, counted in bytes."""

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark import long
from benchmark.bench import Bench
from benchmark.results import Results
from beyond.adaptive import KnapSpecPlus
from decoding import PREFILL_CHUNK, Planner, Session, generate, sampling_probs
from knapspec import Branches, KnapSpec, agreement
from model import KVCache
from tests.testing_models import (
    latency_model,
    random_model,
    random_tokens,
    tiny_config,
)

N = 2**15
CONFIG = tiny_config(n_layer=6, n_head=4, n_kv_head=2, head_dim=16, hidden_size=32, vocab_size=2000, max_position=N)


class Bytes(TorchDispatchMode):
    """The most bytes at once in tensors made while it is on."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **kwargs or {})
        old = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for result in torch.utils._pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor) and (storage := result.untyped_storage())._cdata not in old:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: (reference, size) for key, (reference, size) in self.made.items() if not reference.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return results


@torch.inference_mode()
def planned(planner, n):
    """Bytes of the planner's first plan behind n tokens, those of the cache, and the Plan."""
    model = random_model(CONFIG, seed=1, faint=range(2, 10), epsilon=0.1)
    cache, rng, states = KVCache(CONFIG, n), torch.Generator().manual_seed(0), []
    cache.keys.normal_(generator=rng), cache.values.normal_(generator=rng)
    cache.length = n - planner.window
    logits = model(random_tokens(planner.window, CONFIG), cache, capture=states)
    cache.length = n
    session = Session(model, cache, planner, 0.0, 1.0, 100)
    session.tokens = random_tokens(n + 1, CONFIG).tolist()
    session.remember(states, sampling_probs(logits, 0.0, 1.0))
    with Bytes() as counted:
        plan = planner.plan(session)
    return counted.peak, cache.keys.nbytes + cache.values.nbytes, plan


@pytest.mark.parametrize("kind, options", [(KnapSpec, {}), (KnapSpecPlus, {"without": ("thrift",)})])
def test_planning_takes_no_more_behind_a_long_context(kind, options):
    latency = latency_model(6, attention_s=(2e-3, 0.0))  # the same branches at any length
    short, cache_bytes, _ = planned(kind(latency, tau=-1.0, **options), 64)
    long, long_cache_bytes, plan = planned(kind(latency, tau=-1.0, **options), N)
    assert short == long < 0.1 * long_cache_bytes and long_cache_bytes == N // 64 * cache_bytes
    assert plan.skip_set and plan.gamma > 0


def test_logits_of_a_few_branches_at_a_time():
    """All together they would take B * W * V floats several times: gigabytes where V is 128,000."""
    model, planner = random_model(CONFIG), KnapSpec(latency_model(6))
    session, x = Session(model, None, planner, 0.0, 1.0, 1), torch.randn(100, 8, 32, generator=torch.Generator().manual_seed(0))
    target_probs = sampling_probs(model.logits(x[3]), 0.0, 1.0)
    with Bytes() as counted:
        alphas = agreement(session, x, target_probs)
    assert alphas == [agreement(session, one[None], target_probs)[0] for one in x] and alphas[3] == 1.0 > alphas[4]
    assert counted.peak < 4 * 100 * 8 * CONFIG.vocab_size


class Kept(Planner):
    window = 6

    def plan(self, session):
        self.session = session
        return super().plan(session)


def test_a_session_keeps_the_rows_of_its_window_and_no_more():
    model, planner = random_model(CONFIG), Kept()
    generate(model, random_tokens(2 * PREFILL_CHUNK, CONFIG).tolist(), max_new_tokens=1 + 1, planner=planner)
    (prompt, probs), (one_token, _) = planner.session.recent
    assert len(prompt) == len(one_token) == 2 * CONFIG.n_layer + 1 and len(probs) == 6
    assert {x.untyped_storage().nbytes() for x in prompt} == {6 * CONFIG.hidden_size * 4}
    assert {x.untyped_storage().nbytes() for x in one_token} == {CONFIG.hidden_size * 4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_a_gpu_is_called_as_torch_declares_it(monkeypatch, dtype):
    """On tensors without content: it says what shapes it takes and gives, and pads the rows of its sums."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    cache = KVCache(CONFIG, 40, device="meta", dtype=dtype)
    cache.length, rows = 30, {heads: torch.empty(3 * 7, heads, 16, device="meta", dtype=dtype) for heads in (4, 2)}
    mixed = Branches(cache, 3, 7).attend(0, rows[4], rows[2], rows[2])
    assert (mixed.device.type, mixed.dtype, mixed.shape) == ("meta", dtype, (3 * 7, 4 * 16))


def test_the_row_of_speed_decodes_as_plain_decoding_does_and_weighs_each_planning(tmp_path, monkeypatch):
    if not long.CLEAR.exists():
        pytest.skip("Linux alone tells what a process has")
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path))
    found = long.measure(replace(long.CONFIG, max_position=400, vocab_size=50), new_tokens=24)
    assert found.pop("cache_bytes") == 2 * 400 * (8 * 2 + 1) * 32 * 4
    assert {*found} == {"knapspec", "knapspec+"} and found["knapspec"]["drafted"] >= found["knapspec"]["accepted"] > 0
    assert all(run["identical"] and 0 <= run["added_bytes"] < 2**26 for run in found.values())


@pytest.mark.parametrize("change, met", [({}, True), ({"identical": False}, False), ({"drafted": 0}, False), ({"added_bytes": 11}, False)])
def test_the_row_of_speed_is_met_where_something_is_drafted_and_all_is_as_it_should_be(monkeypatch, change, met):
    idle = {"identical": True, "drafted": 0, "accepted": 0, "added_bytes": 10}
    drafts = idle | {"drafted": 9, "accepted": 4} | change
    monkeypatch.setattr(long, "measure", lambda: {"knapspec": drafts, "knapspec+": idle, "cache_bytes": 100})
    bench = Bench(Results({}), limit=1, max_new_tokens=1, repeats=1)
    assert long.row(bench).met == (met if long.CLEAR.exists() else None)

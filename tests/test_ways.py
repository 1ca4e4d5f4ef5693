"""beyond/ways.py: the target is untouched by cheaper ways, the text stays its own, and each computes what it says."""

from dataclasses import replace
from profile import measure

import pytest
import torch

from beyond import ways
from beyond.uniform import Uniform
from beyond.ways import WAYS, HalfLinear, Int8Linear, add_ways
from decoding import FixedPlanner, Plan, generate
from model import KVCache
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    random_tokens,
    tiny_config,
)

L = 4
EVERY = "half", "int8", "window"


def _model(**changes):
    return random_model(tiny_config(n_layer=L, **changes), faint=range(2, 6), epsilon=0.05)


def _all(way):
    return (way,) * (2 * L + 1)


# --- What each computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "qk_norm": True}, {"tied": True, "mlp_bias": True, "o_bias": True}])
def test_the_target_is_bitwise_what_it_was(changes):
    model = _model(**changes)
    tokens, cache = random_tokens(30, model.config), KVCache(model.config, 30)
    before = model(tokens, cache)
    assert add_ways(model) == [*EVERY] == list(model.table)
    assert torch.equal(before, model(tokens, cache))
    for way, least in (("half", 0.99999), ("int8", 0.99)):
        rough = model(tokens, cache, choices=_all(way))
        close = torch.cosine_similarity(before, rough, dim=-1)
        assert not torch.equal(before, rough) and close.min() > least, (way, close.min())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind, at_most", [(HalfLinear, 5e-4), (Int8Linear, 0.02)])
def test_copies_err_by_their_rounding_alone(kind, at_most, bias):
    model = random_model(tiny_config(hidden_size=64, vocab_size=3000, intermediate_size=2048, mlp_bias=bias))  # some are packed
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for linear in (model.head, model.model.layers[0].mlp.gate_up):
        assert linear.packed and (linear is model.head or (linear.bias is not None) == bias)
        exact, rough = linear(x), kind(linear)(x)
        error = ((rough - exact).norm() / exact.norm()).item()
        assert rough.dtype == exact.dtype and 0 < error < at_most, error


def test_a_choice_of_one_item_changes_that_item_alone():
    model = _model()
    add_ways(model, ["int8"])
    tokens, used = random_tokens(3, model.config), []

    def watched(item, function):
        return lambda *arguments: used.append(item) or function(*arguments)

    model.table["int8"] = [watched(item, function) for item, function in enumerate(model.table["int8"])]
    choices = tuple("int8" if item in (1, 4, 2 * L) else "full" for item in range(2 * L + 1))
    model(tokens, KVCache(model.config, 3), choices=choices)
    model(tokens, KVCache(model.config, 3), choices=choices, skip=frozenset({4, 5}))
    assert used == [1, 4, 2 * L, 1, 2 * L]


def test_a_window_sees_the_first_and_the_last_positions_only(monkeypatch):
    """Keys between do not matter, keys at the edges do; with nothing between it is full attention."""
    monkeypatch.setattr(ways, "WIDTH", 8)
    model = random_model(tiny_config(n_layer=L))
    add_ways(model, ["window"])
    cache = KVCache(model.config, 64)
    tokens = random_tokens(40, model.config)
    model(tokens, cache)

    def logits():
        return model(tokens[:1], cache, choices=_all("window"))

    cache.length = ways.SINKS + 8
    assert torch.equal(logits(), model(tokens[:1], cache))
    cache.length = 40
    seen = logits()
    assert not torch.equal(seen, model(tokens[:1], cache))
    cache.keys[:, :, ways.SINKS : 32] += 1.0
    assert torch.equal(seen, logits())
    for position in (ways.SINKS - 1, 32):
        cache.keys[:, :, position] += 1.0
        assert not torch.equal(seen, logits())
        cache.keys[:, :, position] -= 1.0


@pytest.mark.parametrize("names, base", [(EVERY, "int8"), (["half", "window"], "half"), (["window"], None)])
def test_a_window_runs_on_the_weights_with_the_fewest_bits(names, base):
    model = _model()
    add_ways(model, names)
    expected = model.table[base] if base else [*model.sublayers, model.head]
    assert [f is g for f, g in zip(model.table["window"], expected)] == [False, True] * L + [True]
    tokens, cache = random_tokens(9, model.config), KVCache(model.config, 9)  # nothing lies between: the same as its base
    assert torch.equal(model(tokens, cache, choices=_all("window")), model(tokens, cache, choices=_all(base or "full")))


# --- Texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EVERY)
def test_greedy_text_is_the_plain_text_whatever_drafts_use(way, monkeypatch):
    monkeypatch.setattr(ways, "WIDTH", 8)
    model, plan = _model(), Plan(frozenset({1, 2}), 4, choices=_all(way))
    add_ways(model)
    prompt = random_tokens(30, model.config, seed=5).tolist()
    plain = generate(model, prompt, max_new_tokens=50)
    drafted = generate(model, prompt, max_new_tokens=50, planner=FixedPlanner(plan))
    assert drafted.token_ids == plain.token_ids and 0 < drafted.accepted < drafted.drafted


def test_a_draft_that_is_kept_whole_in_another_way_is_mostly_right():
    model = _model()
    add_ways(model)
    prompt = random_tokens(30, model.config, seed=5).tolist()
    for way, least in (("half", 0.98), ("int8", 0.8)):
        drafted = generate(model, prompt, max_new_tokens=61, planner=FixedPlanner(Plan(gamma=4, choices=_all(way))))
        assert drafted.accepted >= least * drafted.drafted, way


def _priced(half_s, int8_s):
    """A machine on which a draft in these ways takes so many seconds, and a plain step 8 ms."""
    each = {name: latency_model(L, attention_s=(s / 8, 0.0), mlp_s=s / 8, head_s=0.0) for name, s in (("half", half_s), ("int8", int8_s))}
    return replace(latency_model(L, attention_s=(1e-3, 0.0), head_s=0.0), ways=tuple(each.items()))


@pytest.mark.parametrize("half_s, int8_s, best", [(4e-3, 1e-3, "int8"), (4e-3, 3.9e-3, "half"), (1e-3, 1e-3, "half"), (20e-3, 20e-3, None)])
def test_the_yardstick_drafts_in_the_way_with_the_most_tokens_per_time(half_s, int8_s, best, monkeypatch):
    model = _model()
    add_ways(model, ["half", "int8"])
    machine = SimulatedMachine(model, _priced(half_s, int8_s), monkeypatch)
    prompt, planner = random_tokens(30, model.config, seed=5).tolist(), Uniform(machine.latency, ways=["half", "int8"], gamma=6)
    generation = generate(machine, prompt, max_new_tokens=40, planner=planner)
    assert generation.token_ids == generate(model, prompt, max_new_tokens=40).token_ids
    assert [plan.choices for _, plan, _ in generation.plans] == [best and _all(best)]
    assert generation.plans[0][1].gamma == (6 if best else 0)


# --- The registry ----------------------------------------------------------------------------------------------------


def test_the_profile_prices_every_way():
    model = _model()
    add_ways(model)
    latency = measure(model, context_lengths=[8, 16], gamma_max=2)
    assert [name for name, _ in latency.ways] == [*EVERY]
    assert 0 < latency.draft(frozenset(range(2 * L)), 8, L, _all("int8")) == latency.way("int8").head_s
    mixed = latency.draft({1}, 8, L, ("window", *_all("int8")[1:]))
    parts = [latency.sublayer(0, 8, "window"), *(latency.sublayer(b, 8, "int8") for b in range(2, 2 * L))]
    assert mixed == pytest.approx(sum(parts) + latency.way("int8").head_s)


def test_rows_are_made_once_and_in_the_registrys_order():
    model = _model()
    assert add_ways(model, ["window"]) == ["window"] == list(model.table)
    row = model.table["window"]
    assert add_ways(model, ["window", "int8", "half"]) == [*EVERY]
    assert model.table["window"] is row and add_ways(model, []) == []


def test_what_has_no_kernel_is_left_out_or_refused_with_the_remedy():
    model = random_model(tiny_config(), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="half drafts need float32 on a CPU, not torch.bfloat16 on cpu: leave half out of --choices"):
        add_ways(model, ["half"])
    assert "half" not in add_ways(model) and "window" in model.table


def test_a_torch_without_an_8_bit_engine_offers_no_8_bits(monkeypatch):
    """Its wheels for Macs start with none chosen; one that works is taken where there is one."""

    def broken(linear):
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack NoQEngine")

    model = random_model()
    monkeypatch.setattr(ways, "Int8Linear", broken)
    assert add_ways(model) == ["half", "window"]
    with pytest.raises(ValueError, match="int8 drafts need a kernel that this torch has not for cpu"):
        add_ways(model, ["int8"])
    monkeypatch.undo()
    engine = torch.backends.quantized.engine
    try:
        if "none" in torch.backends.quantized.supported_engines:
            torch.backends.quantized.engine = "none"
        assert "int8" in add_ways(model) and torch.backends.quantized.engine != "none"
    finally:
        torch.backends.quantized.engine = engine


def test_what_has_no_room_is_left_out_or_refused_with_numbers(monkeypatch):
    model = random_model()
    inner = sum(getattr(part, name).weight.numel() for layer in model.model.layers
                for part, names in ((layer.self_attn, ("qkv", "out")), (layer.mlp, ("gate_up", "down"))) for name in names)  # fmt: skip
    total = inner + model.head.weight.numel()
    assert total <= ways.copy_bytes(model, Int8Linear) - 8 * 48 * 16 <= 1.1 * total  # a largest matrix of 48 x 16: its copies on the way
    assert ways.copy_bytes(model, HalfLinear) - ways.copy_bytes(model, Int8Linear) == total
    monkeypatch.setattr(ways, "free_bytes", lambda device: 1000)
    assert add_ways(random_model()) == ["window"]
    with pytest.raises(ValueError, match=r"int8 drafts need 0 MB of memory, 0 MB are free: leave int8 out"):
        add_ways(random_model(), ["int8"])
    monkeypatch.setattr(ways, "free_bytes", lambda device: None)  # a system that does not tell
    assert add_ways(random_model()) == [*EVERY]


def test_one_more_way_is_one_more_entry(monkeypatch):
    """Rounding to 16 levels as a toy: it is offered, priced, named where it is missing, and drafts without a word elsewhere."""

    class Coarse:
        bytes_per_weight = 1

        def __init__(self, linear):
            weight, self.bias = ways.dense(linear), linear.bias
            scale = weight.abs().amax(1, keepdim=True) / 7
            self.weight = (weight / scale).round() * scale

        def __call__(self, x):
            return torch.nn.functional.linear(x, self.weight, self.bias)

    coarse = ways.Way("4-bit weights", ("░", "4"), 0.7, lambda model: None, lambda model, progress: ways.copies(model, Coarse, progress))
    monkeypatch.setitem(WAYS, "coarse", coarse)
    model = _model()
    assert add_ways(model, ["coarse"]) == ["coarse"]
    prompt = random_tokens(30, model.config, seed=5).tolist()
    drafted = generate(model, prompt, max_new_tokens=40, planner=FixedPlanner(Plan(gamma=3, choices=_all("coarse"))))
    assert drafted.token_ids == generate(model, prompt, max_new_tokens=40).token_ids and drafted.accepted > 0
    latency = replace(_priced(4e-3, 4e-3), ways=(("coarse", latency_model(L, attention_s=(1e-4, 0.0), mlp_s=1e-4, head_s=0.0)),))
    uniform = generate(model, prompt, max_new_tokens=40, planner=Uniform(latency, ways=["coarse"], gamma=4))
    assert uniform.token_ids == drafted.token_ids and uniform.plans[0][1].choices == _all("coarse")


def test_every_entry_is_told_apart_in_the_strip():
    signs = [sign for way in WAYS.values() for sign in way.signs]
    assert len(set(signs)) == len(signs) and all(len(sign) == 1 for sign in signs)
    assert all(way.signs[1].isascii() and 0 < way.alpha < 1 and way.about for way in WAYS.values())

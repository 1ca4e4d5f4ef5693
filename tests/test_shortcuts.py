"""The shortcuts: the target is untouched by them, the text stays its own, and each computes what it says."""

from dataclasses import replace
from profile import measure

import pytest
import torch

from beyond import shortcuts
from decoding import FixedPlanner, Plan, generate
from knapspec import Branches, KnapSpec
from model import Context, KVCache
from tests.testing_models import random_model, random_tokens, tiny_config

L = 4
CHOICES = ["full", "int8", "window", "skip"]


def model_with_choices(**changes):
    model = random_model(tiny_config(n_layer=L, **changes), faint=range(2, 6), epsilon=0.05)
    shortcuts.add_choices(model, CHOICES)
    return model


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "qk_norm": True}, {"tied": True, "mlp_bias": True, "o_bias": True}])
def test_the_target_is_bitwise_what_it_was(changes):
    plain = random_model(tiny_config(n_layer=L, **changes), faint=range(2, 6), epsilon=0.05)
    tokens = random_tokens(30, plain.config)
    before = plain(tokens, KVCache(plain.config, 30))
    shortcuts.add_choices(plain, CHOICES)
    assert torch.equal(before, plain(tokens, KVCache(plain.config, 30)))
    int8 = plain(tokens, KVCache(plain.config, 30), choices=("int8",) * (2 * L + 1))
    close = torch.cosine_similarity(before, int8, dim=-1)
    assert not torch.equal(before, int8) and close.min() > 0.99, close.min()


def test_int8_rows_err_by_their_quantisation_alone():
    model = random_model(tiny_config(hidden_size=64, vocab_size=3000))  # large enough to be packed
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    exact, rough = model.head(x), shortcuts.Int8Linear(model.head)(x)
    assert ((rough - exact).norm() / exact.norm()).item() < 0.02


def test_a_window_sees_the_first_and_the_last_positions_only(monkeypatch):
    """Keys between do not matter, keys at the edges do; with nothing between it is full attention."""
    monkeypatch.setattr(shortcuts, "WIDTH", 8)
    model = random_model(tiny_config(n_layer=L))
    shortcuts.add_window(model)
    cache = KVCache(model.config, 64)
    tokens = random_tokens(40, model.config)
    model(tokens, cache)
    choices = ("window",) * (2 * L + 1)

    def logits():
        return model(tokens[:1], cache, choices=choices)

    cache.length = shortcuts.SINKS + 8
    assert torch.equal(logits(), model(tokens[:1], cache))
    cache.length = 40
    seen = logits()
    assert not torch.equal(seen, model(tokens[:1], cache))
    cache.keys[:, :, shortcuts.SINKS : 32] += 1.0
    assert torch.equal(seen, logits())
    for position in (shortcuts.SINKS - 1, 32):
        cache.keys[:, :, position] += 1.0
        assert not torch.equal(seen, logits())
        cache.keys[:, :, position] -= 1.0


def test_a_window_in_the_knapsack_is_the_window_of_a_draft(monkeypatch):
    monkeypatch.setattr(shortcuts, "WIDTH", 8)
    model = random_model(tiny_config(n_layer=L))
    cache, tokens = KVCache(model.config, 64), random_tokens(40, model.config)
    model(tokens, cache)
    cache.length = 39
    x = model.model.embed_tokens(tokens[39:])
    drafted = model.sublayers[0](x, shortcuts.Windowed(Context(cache, 1)))
    cache.length = 40
    branch = model.sublayers[0](x.repeat(2, 1), shortcuts.Windowed(Branches(cache, 2, 1)))
    assert torch.allclose(branch, drafted.expand(2, -1), atol=1e-6)


@pytest.mark.parametrize("way", ["int8", "window"])
def test_greedy_text_is_the_plain_text_whatever_drafts_use(way, monkeypatch):
    monkeypatch.setattr(shortcuts, "WIDTH", 8)
    model = model_with_choices()
    prompt = random_tokens(30, model.config, seed=5).tolist()
    plain = generate(model, prompt, max_new_tokens=50)
    plan = Plan(frozenset({1, 2}), 4, choices=(way,) * (2 * L + 1))
    drafted = generate(model, prompt, max_new_tokens=50, planner=FixedPlanner(plan))
    assert drafted.token_ids == plain.token_ids and 0 < drafted.accepted < drafted.drafted


def test_the_planner_uses_what_the_profile_says_is_cheap(monkeypatch):
    """With invented prices that favour 8 bits and windows, both are chosen, drafts stand, and the text is the target's."""
    monkeypatch.setattr(shortcuts, "WIDTH", 8)
    model = model_with_choices()
    latency = cheap_ways(L)
    prompt = random_tokens(60, model.config, seed=5).tolist()
    planner = KnapSpec(latency, choices=CHOICES, share=1.0)
    result = generate(model, prompt, max_new_tokens=50, planner=planner)
    assert result.token_ids == generate(model, prompt, max_new_tokens=50).token_ids
    used = {name for _, plan, _ in result.plans if plan.gamma for name in plan.choices}
    assert {"int8", "window"} <= used and result.accepted > 0


@pytest.mark.parametrize("choices", [CHOICES, ("full", "window", "skip")])
def test_an_attention_is_not_read_whole_where_a_window_saves_most_of_it(choices, monkeypatch):
    """Attention costs 61 ms or more, and 0.3 in a window. Whole layers as well as sublayers."""
    monkeypatch.setattr(shortcuts, "WIDTH", 8)
    model, prompt = model_with_choices(), random_tokens(60, random_model().config, seed=5).tolist()
    for layers in (False, True):
        planner = KnapSpec(cheap_ways(L, per_key=1e-3), choices=choices, share=1.0, layers=layers)
        result = generate(model, prompt, max_new_tokens=40, planner=planner, temperature=1.0)
        drafting = [plan for _, plan, _ in result.plans if plan.gamma]
        assert drafting and all({plan.choices[b] for b in range(0, 2 * L, 2)} == {"window"} for plan in drafting)


def test_a_text_that_needs_all_of_its_context_is_drafted_with_it(monkeypatch):
    """Windows take the place of whole attentions as in the test before, but here what they compute is noise."""
    model, prompt = model_with_choices(), random_tokens(60, random_model().config, seed=5).tolist()
    for b in range(0, 2 * L, 2):
        model.table["window"][b] = lambda x, context: torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    latency = cheap_ways(L, per_key=1e-4)
    planner = KnapSpec(replace(latency, ways=(("int8", replace(latency.way("int8"), attention_s=(2e-4, 2e-5))), latency.ways[1])),
                       choices=CHOICES, share=1.0)  # fmt: skip
    result = generate(model, prompt, max_new_tokens=40, planner=planner)
    assert result.token_ids == generate(model, prompt, max_new_tokens=40).token_ids and result.accepted > 10
    assert all("window" not in plan.choices for _, plan, _ in result.plans if plan.gamma)


def test_a_way_that_saves_next_to_nothing_does_not_hide_what_can_be_skipped(monkeypatch):
    """Windows that save a tenth, or that noise makes look cheaper for an MLP, on which they are the same function."""
    monkeypatch.setattr(shortcuts, "WIDTH", 8)
    model, prompt = model_with_choices(), random_tokens(60, random_model().config, seed=5).tolist()
    latency = cheap_ways(L, per_key=0.0)
    int8, window = latency.way("int8"), replace(latency.way("window"), attention_s=(1.8e-4, 0.0), mlp_s=2.5e-4)
    planner = KnapSpec(replace(latency, ways=(("int8", int8), ("window", window))), choices=CHOICES, share=1.0)
    result = generate(model, prompt, max_new_tokens=40, planner=planner, temperature=1.0)
    drafting = [plan for _, plan, _ in result.plans if plan.gamma]
    assert drafting and all(set(plan.choices[:-1]) == {"int8"} and plan.skip_set for plan in drafting)


def cheap_ways(n_layer, per_key=1e-4):
    from tests.testing_models import latency_model

    full = latency_model(n_layer, attention_s=(1e-3, per_key))
    int8 = latency_model(n_layer, attention_s=(2e-4, per_key), mlp_s=3e-4)
    window = latency_model(n_layer, attention_s=(3e-4, 0.0), mlp_s=3e-4)
    return replace(full, ways=(("int8", int8), ("window", window)))


def test_the_profile_prices_every_way():
    model = model_with_choices()
    latency = measure(model, context_lengths=[8, 16], gamma_max=2)
    assert [name for name, _ in latency.ways] == ["int8", "window"]
    kept = ("int8",) * (2 * L + 1)
    assert 0 < latency.draft(frozenset(range(2 * L)), 8, L, kept) == latency.way("int8").head_s
    mixed = latency.draft({1}, 8, L, ("window", *kept[1:]))
    parts = [latency.sublayer(0, 8, "window"), *(latency.sublayer(b, 8, "int8") for b in range(2, 2 * L))]
    assert mixed == pytest.approx(sum(parts) + latency.way("int8").head_s)


def test_what_has_no_kernel_is_refused_with_the_remedy():
    model = random_model(tiny_config(), dtype=torch.bfloat16)
    assert shortcuts.available(model) == ["full", "window", "skip"]
    with pytest.raises(ValueError, match="--choices full,skip"):
        shortcuts.add_choices(model, CHOICES)


def test_what_has_no_room_is_left_out_or_refused_with_numbers(monkeypatch):
    model = random_model()
    assert "int8" in shortcuts.available(model)
    monkeypatch.setattr(shortcuts, "free_bytes", lambda device: 1000)
    assert shortcuts.available(model) == ["full", "window", "skip"]
    needed = shortcuts.int8_bytes(model)
    assert needed > sum(p.numel() for layer in model.model.layers for p in (layer.mlp.gate_up.weight, layer.mlp.down.weight))
    with pytest.raises(ValueError, match=r"need 0 MB of memory, 0 MB are free: pass --choices full,skip"):
        shortcuts.add_choices(model, CHOICES)
    monkeypatch.setattr(shortcuts, "free_bytes", lambda device: None)  # a system that does not tell
    assert "int8" in shortcuts.available(model)

"""model.py: the numbers equal transformers', and skipping, caching and chunking change none of them.

case                                               tests
RoPE at position 4,095 and beyond, bfloat16        test_rotary_tables_in_half_precision_are_float32_ones_rounded_once, test_golden_logits,
                                                   test_rotary_tables_equal_transformers
RMSNorm in half precision                          test_rmsnorm_in_half_precision_is_computed_in_float32
several new tokens against a filled cache          test_any_chunking_gives_the_same_logits, test_new_tokens_see_all_before_and_none_behind
near-tied top logits in bfloat16                   test_decoding.py: test_in_bfloat16_the_first_difference_is_a_near_tie
long prompt, large vocabulary                      test_the_head_is_computed_on_the_last_rows_only, test_decoding.py: test_prefill_computes_the_head_on_the_window_only
NaN or infinite logits                             test_decoding.py: test_logits_that_are_not_finite_raise
loading, as far as it is about numbers             the tests against transformers
"""

import copy
import itertools
import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

from loading import load
from loading.config import read_config
from model import KVCache, Linear, RMSNorm, Transformer, grouped_attention
from tests.testing_models import (
    prefilled,
    random_model,
    random_tokens,
    tiny_config,
)

KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # transformers' names
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 1024},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    "yarn-betas": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 8.0,
                   "beta_slow": 2.0, "truncate": False},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "mscale": 0.7,
                    "mscale_all_dim": 1.0},
}  # fmt: skip
CONFIGS = {
    "llama": tiny_config(),
    "one key head": tiny_config(n_kv_head=1, tied=True),
    "qwen2": tiny_config(n_kv_head=4, qkv_bias=True, rope_scaling=ROPES["yarn"]),
    "qwen3": tiny_config(head_dim=6, qk_norm=True, rope_scaling=ROPES["llama3"]),
    "all biases": tiny_config(n_layer=1, qkv_bias=True, o_bias=True, mlp_bias=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


# --- Against transformers, stored ------------------------------------------------------------------------------------

GOLDEN = Path(__file__).with_name("golden_logits.json")


def _raw_config(kind, *, rope="default", **changes):
    """A config.json in the layout of transformers 5."""
    return {
        "model_type": kind, "vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, **ROPES[rope]}, "tie_word_embeddings": False,
        **({"sliding_window": None} if kind == "mistral" else {}),
    } | changes  # fmt: skip


def _golden_models():
    """(config.json, tokens): every architecture and rope kind, two of them past position 4,096."""
    yield _raw_config("llama", attention_bias=True, mlp_bias=True), 6
    yield _raw_config("llama", rope="llama3", tie_word_embeddings=True), 4200
    yield _raw_config("qwen2", num_key_value_heads=2), 6
    yield _raw_config("qwen2", rope="yarn", tie_word_embeddings=True), 4200
    yield _raw_config("qwen3", rope="linear", head_dim=6), 6
    yield _raw_config("qwen3", rope="yarn-attention-factor", attention_bias=True), 100


def _golden_weights(shapes):
    """The same float32 numbers on every machine: Python's generator, seeded with the tensor's name."""
    for name, shape in shapes.items():
        rng = random.Random(name)
        values = torch.tensor([rng.random() for _ in range(shape.numel())], dtype=torch.float64).view(shape)
        yield name, (values * 0.5 + 0.75 if "norm" in name else values * 1.5 - 0.75).float()


def _golden_tokens(count):
    return torch.tensor([(7 * i * i + 3 * i + 1) % 13 for i in range(count)])


def write_golden():
    """Writes golden_logits.json, transformers' logits of the last rows: python -c "import test_model; test_model.write_golden()"."""
    models = []
    for raw, count in _golden_models():
        theirs = _transformers_model(raw)
        for name, values in _golden_weights({name: parameter.shape for name, parameter in theirs.named_parameters()}):
            theirs.get_parameter(name).data = values
        with torch.no_grad():
            logits = theirs(_golden_tokens(count)[None]).logits[0, -4:]
        models.append({"config": raw, "tokens": count, "logits": [[float(f"{v:.6g}") for v in row] for row in logits.tolist()]})
    GOLDEN.write_text("[" + ",\n".join(json.dumps(model) for model in models) + "]\n")


@pytest.mark.parametrize("number", range(6))
def test_golden_logits(number):
    golden = json.loads(GOLDEN.read_text())[number]
    assert (golden["config"], golden["tokens"]) == list(_golden_models())[number]
    model = Transformer(read_config(golden["config"]))
    model.load(_golden_weights({name: tensor.shape for name, tensor in model.state_dict().items()}))
    _, logits = prefilled(model, _golden_tokens(golden["tokens"]))
    torch.testing.assert_close(logits[-4:], torch.tensor(golden["logits"]), rtol=0, atol=1e-4)


# --- Against transformers, installed ---------------------------------------------------------------------------------


def _transformers_model(raw, dtype=torch.float32):
    """transformers' model of a config.json, with random weights that none of its parts can hide behind."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name = KINDS[raw["model_type"]]
    known = raw if int(transformers.__version__.split(".")[0]) >= 5 else _older_layout(raw)  # 4 ignores rope_parameters
    config = getattr(transformers, name + "Config")(**{key: value for key, value in known.items() if key != "model_type"})
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    rng = torch.Generator().manual_seed(7)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=rng) * 0.3
        parameter.data = (noise + 1 if "norm" in parameter_name else noise).to(dtype)
    return model


def _their_logits(theirs, tokens, dtype):
    """transformers' logits in another dtype. Its rotary frequencies stay what they are: float32."""
    theirs = copy.deepcopy(theirs)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        return theirs(tokens[None]).logits[0]


def _ours(theirs, raw):
    """Our model with the weights of transformers'."""
    model = Transformer(read_config(raw))
    weights = theirs.state_dict()
    return model.load((name, weights[name].clone()) for name in model.state_dict())


def _older_layout(raw):
    """The same config.json as transformers 4 wrote it, the kind of rope under the older key `type` where it still was."""
    raw = dict(raw)
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] == "default":
        return raw | {"rope_scaling": None}
    if rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")
    return raw | {"rope_scaling": rope}


def _assert_same_logits(ours, theirs, tokens):
    """Within 1e-4, and 1e-5 of the norm, of what transformers computes in float64 from the same float32 weights."""
    wanted = _their_logits(theirs, tokens, torch.float64)
    _, logits = prefilled(ours, tokens)
    torch.testing.assert_close(logits.double(), wanted, rtol=0, atol=1e-4)
    assert (logits - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind, rope):
    """Every combination of tied, head_dim, key heads and bias occurs with every architecture, if not with every rope."""
    shift = list(ROPES).index(rope)
    for i, (n_kv_head, bias) in enumerate(itertools.product((1, 2, 4), (False, True))):
        tied, head_dim = [(False, 4), (False, 6), (True, 4), (True, 6)][(i + shift) % 4]
        raw = _raw_config(kind, rope=rope, tie_word_embeddings=tied, head_dim=head_dim, num_attention_heads=4,
                          num_key_value_heads=n_kv_head)  # fmt: skip
        if kind in ("llama", "qwen3"):  # Qwen2 has its bias always, Mistral never
            raw["attention_bias"] = bias
        assert read_config(_older_layout(raw)) == read_config(raw)
        theirs = _transformers_model(raw)
        _assert_same_logits(_ours(theirs, raw), theirs, random_tokens(70, tiny_config(vocab_size=13)))


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_logits_past_position_4096_equal_transformers(rope):
    raw = _raw_config("llama", rope=rope)
    theirs = _transformers_model(raw)
    _assert_same_logits(_ours(theirs, raw), theirs, random_tokens(4200, tiny_config(vocab_size=13)))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_tables_equal_transformers(rope, dtype):
    raw = _raw_config("llama", rope=rope, head_dim=64)
    positions = torch.tensor([0, 1, 63, 2047, 4095, 4096, 8191])
    with torch.no_grad():
        cos, sin = _transformers_model(raw).model.rotary_emb(torch.empty(0, dtype=dtype), positions[None])
    cache = KVCache(read_config(raw), 8192, dtype=dtype)
    half_signs = torch.tensor([-1.0] * 32 + [1.0] * 32, dtype=dtype)
    one_step = torch.finfo(dtype).eps + 1e-3  # a rounding either way, and that of an angle of thousands in float32
    torch.testing.assert_close(cache.cos[positions, 0], cos[0], rtol=0, atol=one_step)
    torch.testing.assert_close(cache.sin[positions, 0], sin[0] * half_signs, rtol=0, atol=one_step)


@pytest.mark.parametrize("layout", ["single", "sharded", "older"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_folders_saved_by_transformers_load_in_any_dtype(tmp_path, kind, stored, layout):
    raw = _raw_config(kind, rope="yarn", tie_word_embeddings=kind == "qwen2")
    theirs = _transformers_model(raw, stored)
    theirs.save_pretrained(tmp_path, max_shard_size="1KB" if layout == "sharded" else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or layout != "sharded"
    if layout == "older":
        path = tmp_path / "config.json"
        path.write_text(json.dumps(_older_layout(raw)))
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(13)}, unk_token="t0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    tokens = random_tokens(30, tiny_config(vocab_size=13))

    def loaded(dtype):
        model, _ = load(tmp_path, device="cpu", dtype=dtype, progress=False)
        return model

    in_bfloat16, exact = _their_logits(theirs, tokens, torch.bfloat16), _their_logits(theirs, tokens, torch.float64)
    _assert_same_logits(loaded(torch.float32), theirs, tokens)
    _, logits = prefilled(loaded(torch.bfloat16), tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits - exact).norm() < 1.5 * (in_bfloat16 - exact).norm()


# --- One forward, in whatever pieces ---------------------------------------------------------------------------------


@every_config
@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_gives_the_same_logits(config, seed):
    model, tokens = random_model(config, seed=seed), random_tokens(40, config, seed)
    whole_cache, whole = prefilled(model, tokens)
    rng = random.Random(seed)
    cuts = [0, *sorted(rng.sample(range(1, 40), rng.randint(1, 39))), 40]
    cache, parts = KVCache(config, 64), []
    for start, end in itertools.pairwise(cuts):
        parts.append(model(tokens[start:end], cache))
        cache.length = end
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.keys[:, :, :40], whole_cache.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.values[:, :, :40], whole_cache.values, rtol=1e-5, atol=1e-5)


@every_config
def test_new_tokens_see_all_before_and_none_behind(config):
    model, tokens = random_model(config), random_tokens(12, config)
    cache, _ = prefilled(model, tokens[:5], room=7)
    before = model(tokens[5:], cache)
    for position in range(12):
        changed = tokens.clone()
        changed[position] = (tokens[position] + 1) % config.vocab_size
        cache, _ = prefilled(model, changed[:5], room=7)
        differs = (model(changed[5:], cache) != before).any(-1)
        assert differs.tolist() == [5 + row >= position for row in range(7)]


@every_config
def test_rolling_back_is_a_fresh_prefill(config):
    model, tokens = random_model(config), random_tokens(20, config)
    cache, _ = prefilled(model, tokens[:12], room=8)
    for step in range(4):  # a draft of four tokens that leaves out some attention, then all is forgotten
        cache.length = 12 + step
        model(tokens[:1], cache, skip=frozenset({0, 3}))
    cache.length = 12
    logits = model(tokens[12:], cache)
    fresh, wanted = prefilled(model, tokens)
    torch.testing.assert_close(logits, wanted[12:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.keys, fresh.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.values, fresh.values, rtol=1e-5, atol=1e-5)


def test_a_forward_leaves_length_alone_and_refuses_to_pass_the_end():
    model = random_model()
    cache, _ = prefilled(model, [1, 2, 3], room=2)
    model(torch.tensor([4, 5]), cache)
    assert cache.length == 3
    with pytest.raises(AssertionError, match="6 tokens in a cache of 5"):
        model(torch.tensor([4, 5, 6]), cache)


# --- Skipping and capturing ------------------------------------------------------------------------------------------


@every_config
def test_a_skipped_item_is_the_identity(config):
    model, tokens = random_model(config), random_tokens(9, config)
    for item in range(2 * config.n_layer):
        states = []
        prefilled(model, tokens, skip=frozenset({item}), capture=states)
        unchanged = [torch.equal(states[b], states[b + 1]) for b in range(2 * config.n_layer)]
        assert unchanged == [b == item for b in range(2 * config.n_layer)]


@every_config
def test_skipping_everything_leaves_embedding_and_head(config):
    model, tokens = random_model(config), random_tokens(9, config)
    _, logits = prefilled(model, tokens, skip=frozenset(range(2 * config.n_layer)))
    assert torch.equal(logits, model.logits(F.embedding(tokens, model.model.embed_tokens.weight)))


def test_skipped_attention_writes_no_keys_and_values():
    model, tokens = random_model(), random_tokens(4, tiny_config())
    cache = KVCache(model.config, 4)
    cache.keys.fill_(7.0)
    cache.values.fill_(7.0)
    model(tokens, cache, skip=frozenset({2, 3, 5}))
    assert [(layer == 7.0).all().item() for layer in cache.keys] == [False, True, False]
    assert [(layer == 7.0).all().item() for layer in cache.values] == [False, True, False]


@every_config
@pytest.mark.parametrize("last", [1, 3, 9, 20, None])
def test_captured_states_are_those_around_each_item(config, last):
    model, tokens = random_model(config), random_tokens(9, config)
    states, kept = [], []
    _, logits = prefilled(model, tokens, capture=states, last=last)
    rows = min(last or 9, 9)
    assert [x.shape for x in states] == [(rows, config.hidden_size)] * (2 * config.n_layer + 1)
    assert torch.equal(states[0], F.embedding(tokens, model.model.embed_tokens.weight)[-rows:])
    assert torch.equal(logits, model.logits(states[-1]))
    prefilled(model, tokens, skip=frozenset({1}), capture=kept, last=last)  # items before the skipped one: the same states
    assert torch.equal(states[1], kept[1]) and not torch.equal(states[2], kept[2])
    mlp = model.model.layers[0].mlp
    normed = model.model.layers[0].post_attention_layernorm(states[1])
    torch.testing.assert_close(states[2], states[1] + mlp(normed), rtol=1e-5, atol=1e-5)


@every_config
def test_float64_is_a_finer_float32(config):
    tokens = random_tokens(9, config)
    (_, fine), (_, usual) = (prefilled(random_model(config, dtype=dtype), tokens) for dtype in (torch.float64, torch.float32))
    assert fine.dtype == torch.float64
    torch.testing.assert_close(fine.float(), usual, rtol=1e-4, atol=1e-5)


# --- The parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rmsnorm_in_half_precision_is_computed_in_float32(dtype):
    rng = torch.Generator().manual_seed(0)
    x = (torch.randn(50, 64, generator=rng) * 400).to(dtype)  # squares beyond float16, sums that bfloat16 cannot hold
    norm = RMSNorm(64, 1e-5)
    norm.weight = nn.Parameter((torch.randn(64, generator=rng) + 1).to(dtype))
    in_float32 = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    out = norm(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, in_float32.to(dtype) * norm.weight, rtol=torch.finfo(dtype).eps, atol=0)
    assert (out == in_float32.to(dtype) * norm.weight).float().mean() > 0.99  # the rest: the last bit of a float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rope", [None, *list(ROPES.values())[1:4]], ids=["default", "linear", "llama3", "yarn"])
def test_rotary_tables_in_half_precision_are_float32_ones_rounded_once(dtype, rope):
    config = tiny_config(head_dim=64, rope_scaling=rope)
    half, full = KVCache(config, 8192, dtype=dtype), KVCache(config, 8192)
    assert torch.equal(half.cos, full.cos.to(dtype)) and torch.equal(half.sin, full.sin.to(dtype))
    if rope is None:
        angles = torch.outer(torch.arange(8192).double(), 10000.0 ** -(torch.arange(0, 64, 2).double() / 64))
        torch.testing.assert_close(full.cos[:, 0, 32:].double(), angles.cos(), rtol=0, atol=1e-3)
        torch.testing.assert_close(full.sin[:, 0, 32:].double(), angles.sin(), rtol=0, atol=1e-3)
        torch.testing.assert_close(full.sin[:, 0, :32].double(), -angles.sin(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 240])  # of these only the large one is packed
def test_linear_equals_the_projections_it_stacks(rows, bias, dtype, width):
    torch.manual_seed(0)
    projections = [nn.Linear(width, size, bias=bias, dtype=dtype) for size in (400, 100, 100)]
    x = torch.randn(rows, width, dtype=dtype)
    with torch.no_grad():
        wanted, linear = torch.cat([projection(x) for projection in projections], -1), Linear(*projections)
        assert linear.packed == (width == 240 and dtype == torch.float32)
        torch.testing.assert_close(linear(x), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("n_kv_head", [1, 2, 3, 6])
def test_each_key_head_serves_its_group_of_query_heads(n_kv_head):
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(5, 6, 4, generator=rng)
    keys, values = torch.randn(1, n_kv_head, 9, 4, generator=rng), torch.randn(1, n_kv_head, 9, 4, generator=rng)
    mask = torch.zeros(5, 9).masked_fill(torch.rand(5, 9, generator=rng) < 0.4, float("-inf"))
    mask[:, 0] = 0
    wanted = []
    for head in range(6):
        k, v = keys[0, head // (6 // n_kv_head)], values[0, head // (6 // n_kv_head)]
        wanted.append(torch.softmax(q[:, head] @ k.T / 2 + mask, -1) @ v)  # 2 = sqrt(head_dim)
    torch.testing.assert_close(grouped_attention(q, keys, values, mask), torch.cat(wanted, -1), rtol=1e-5, atol=1e-5)


def test_the_head_is_computed_on_the_last_rows_only():
    model, tokens = random_model(), random_tokens(30, tiny_config())
    _, whole = prefilled(model, tokens)
    rows, head = [], model.head
    model.head = lambda x: rows.append(x.size(0)) or head(x)
    for last in (1, 5):
        _, logits = prefilled(model, tokens, last=last)
        torch.testing.assert_close(logits, whole[-last:], rtol=1e-5, atol=1e-5)
    assert rows == [1, 5]

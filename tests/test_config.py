"""Configurations: read as transformers reads them, or refused by name.

What goes wrong for users -> tests
  head_dim, num_key_value_heads        test_head_dim_and_kv_heads_follow_the_file_or_the_usual
  Qwen2 without attention_bias         test_biases_follow_the_architecture
  Qwen3 norms                          test_qwen3_has_head_norms, test_saved_by_transformers_gives_the_same_logits
  rope_scaling                         test_rope_scaling_in_every_spelling, test_rope_frequencies_equal_those_of_transformers,
                                       test_unclear_rope_is_refused
  layout of transformers 5             test_both_layouts_give_one_config, test_base_frequency_is_never_assumed
  features that change the numbers     test_what_changes_the_numbers_is_refused_by_name, test_harmless_keys_are_accepted
  absurd sizes                         test_config_sizes_are_checked_before_allocation
"""

import json

import pytest
import torch

from loading.config import read_config
from model import rope_frequencies
from tests.testing_checkpoints import (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    assert_refused,
    byte_tokenizer,
    logits,
    quiet_load,
    write_folder,
)


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
    assert [read_config(config).qk_norm for config in (LLAMA, MISTRAL, QWEN2, QWEN3)] == [False, False, False, True]


def test_both_layouts_give_one_config():
    for config in (LLAMA, MISTRAL, QWEN2, QWEN3):
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


@pytest.mark.parametrize(("change", "longest"), [
    ({}, 128),
    ({"max_position_embeddings": 160, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 512),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, 128),
    ({"max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}, 131072),
    ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_ROPE |
      {"factor": 32.0, "original_max_position_embeddings": 8192}}, 131072),  # Llama 3.2
    ({"max_position_embeddings": 16384, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),  # DeepSeek-Coder
    ({"max_position_embeddings": 4096, "max_sequence_length": 16384, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    ({"max_sequence_length": 256}, 128),  # not stretched
])  # fmt: skip
def test_context_is_the_stretched_one(change, longest):
    assert read_config(LLAMA | change).max_position == longest


@pytest.mark.parametrize("change", [
    {"rope_scaling": {"rope_type": "yarn", "factor": 1e29}}, {"rope_scaling": {"rope_type": "yarn", "factor": 1e9}},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "max_sequence_length": "16K"},
])  # fmt: skip
def test_absurd_stretched_context_is_refused(change):
    assert_refused("config.json", "rope_scaling", call=lambda: read_config(LLAMA | change))


def test_yarn_without_the_original_length_takes_the_position_table():
    config = read_config(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert config.rope_scaling["original_max_position_embeddings"] == 128


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "llama3"} | LLAMA3_ROPE, {"type": "yarn"} | YARN_ROPE,
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "truncate": False},
    {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7} | YARN_ROPE, None,
])  # fmt: skip
@pytest.mark.parametrize("base", [LLAMA, MISTRAL, QWEN2, QWEN3], ids=["llama", "mistral", "qwen2", "qwen3"])
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
    ({"rope_theta": 0}, "rope_theta"), ({"rope_theta": 1}, "rope_theta"), ({"rope_theta": "1e4"}, "rope_theta"), ({"rope_theta": float("inf")}, "rope_theta"),
])  # fmt: skip
def test_unclear_rope_is_refused(change, word):
    assert_refused("config.json", word, call=lambda: read_config(LLAMA | change))


def test_base_frequency_is_never_assumed():
    for config in (LLAMA, MISTRAL, QWEN2, QWEN3):
        bare = {key: value for key, value in config.items() if key != "rope_theta"}
        for more in ({}, {"rope_theta": None}, {"rope_parameters": {"rope_type": "default"}}, {"transformers_version": "4.40.1"}):
            assert_refused("rope_theta", call=lambda bare=bare, more=more: read_config(bare | more))
    llama2 = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"transformers_version": "4.31.0.dev0"}
    assert read_config(llama2).rope_theta == 10000.0, "at that time there was no other"


@pytest.mark.parametrize("change", [
    {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, {"architectures": ["MistralForCausalLM"]},
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


def test_sliding_window_of_mistral_is_on_unless_switched_off():
    assert read_config(MISTRAL) == read_config(LLAMA)
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    for used in (absent, MISTRAL | {"sliding_window": 4096}, MISTRAL | {"sliding_window": 64, "use_sliding_window": False}):
        assert_refused("sliding_window = ", call=lambda used=used: read_config(used))
    for key in ("attention_bias", "mlp_bias"):
        assert_refused(key, call=lambda key=key: read_config(MISTRAL | {key: True}))


def test_harmless_keys_are_accepted():
    """What real files of these families say besides: SmolLM2, Llama 3, TinyLlama, Qwen2.5, DeepSeek's distillations."""
    more = {
        "rope_interleaved": False, "is_llama_config": True, "pretraining_tp": 2, "initializer_range": 0.04, "use_cache": True,
        "transformers.js_config": {"dtype": "q4"}, "transformers_version": "4.42.3", "use_mrope": False, "pad_token_id": 0,
        "attention_dropout": 0.1, "residual_dropout": 0.1, "hidden_act": "silu", "quantization_config": None, "_name_or_path": "x", "torch_dtype": "float16",
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


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000, '{"a": "\\ud800"}', '{"a": ' + "1" * 5000 + "}"])
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
    @hypothesis.given(st.sampled_from([LLAMA, MISTRAL, QWEN2, QWEN3]), st.dictionaries(names, values, max_size=3))
    def read_or_refuse(base, change):
        try:
            config = read_config(base | change)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
        else:
            assert config.head_dim % 2 == 0 and config.n_head % config.n_kv_head == 0 and config.rope_theta > 0

    read_or_refuse()


@pytest.mark.parametrize("base", [LLAMA, MISTRAL, QWEN2, QWEN3], ids=["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", ["as saved", 4, 5])
def test_saved_by_transformers_gives_the_same_logits(tmp_path, base, layout):
    transformers = pytest.importorskip("transformers")
    classes = getattr(transformers, base["architectures"][0]), transformers.AutoConfig
    torch.manual_seed(0)
    theirs = classes[0](classes[1].for_model(**base)).eval()
    theirs.save_pretrained(tmp_path / "m")
    byte_tokenizer().save(str(tmp_path / "m" / "tokenizer.json"))
    raw = dict(base)
    if layout == 5:
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    if layout != "as saved":
        (tmp_path / "m" / "config.json").write_text(json.dumps(raw))
    model, _ = quiet_load(tmp_path / "m")
    assert model.config == read_config(base)
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(torch.tensor([[1, 2, 3]])).logits[0], rtol=1e-4, atol=1e-5)

"""From a config.json, in the layout of transformers 4 or 5, to a Config; what is not implemented is refused by name."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from model import Config


@dataclass(frozen=True)
class Architecture:
    """A decoder that is Llama but for a few fields of Config."""

    model_type: str  # as config.json has it
    fields: Callable = lambda raw: {}  # config.json's dict -> the fields of Config in which it differs


def _biases(raw):
    return dict.fromkeys(("qkv_bias", "o_bias"), _boolean(raw, "attention_bias"))


ARCHITECTURES = {  # by the name under `architectures` in config.json
    "LlamaForCausalLM": Architecture("llama", lambda raw: _biases(raw) | {"mlp_bias": _boolean(raw, "mlp_bias")}),
    "MistralForCausalLM": Architecture("mistral"),
    "Qwen2ForCausalLM": Architecture("qwen2", lambda raw: {"qkv_bias": True}),  # always, and config.json says nothing of it
    "Qwen3ForCausalLM": Architecture("qwen3", lambda raw: _biases(raw) | {"qk_norm": True}),
}
_ROPE_KEYS = {  # rope_type -> (keys that it must have, keys that it may have)
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor",), ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
                           "mscale_all_dim", "truncate")),
}  # fmt: skip
# A key that looks like one of these and is not read below may change the numbers, so its value must mean "off".
_MAY_CHANGE_NUMBERS = re.compile(
    "scal|multipl|softcap|logit_|expert|moe|window|chunk|alibi|norm|rope|rotary|mup|quant|compress|prun|adapter|lora"
    "|sparse|residual|auto_map|cross_attention|encoder_decoder|bidirectional|attention_type|attn_type"
)
_READ_BELOW = {"rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
               "max_window_layers"}  # fmt: skip


def read_config(raw):
    """Turns the dict of a config.json, in the layout of transformers 4 or 5, into a Config.

    Raises ValueError on another architecture, on anything that would change the numbers and is not implemented, and
    where a number that counts is missing or absurd. Source: transformers' configurations of these architectures.
    """
    architecture = _architecture(raw)
    kind = architecture.model_type
    n_layer = _integer(raw, "num_hidden_layers", 2**10)
    _refuse_unimplemented(raw, kind, n_layer)
    hidden, n_head = _integer(raw, "hidden_size", 2**17), _integer(raw, "num_attention_heads", 2**12)
    n_kv_head = _integer(raw, "num_key_value_heads", n_head, default=n_head)
    # Qwen3's own default is 128; elsewhere, and for a null, it is the quotient.
    usual = 128 if kind == "qwen3" and "head_dim" not in raw else hidden / n_head
    head_dim = _integer(raw, "head_dim", 2**12, default=int(usual) if usual == int(usual) else usual)
    if n_head % n_kv_head or head_dim % 2:
        heads = f"{n_head} heads, {n_kv_head} key-value heads and head_dim {head_dim}"
        raise ValueError(f"config.json: {heads} do not fit: heads must be a multiple, head_dim even; correct it")
    max_position = _integer(raw, "max_position_embeddings", 2**28)
    theta, scaling = _rope(raw, max_position)
    return Config(
        vocab_size=_integer(raw, "vocab_size", 2**24),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size", 2**20),
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        max_position=_context(raw, max_position, scaling),
        norm_eps=_number(raw, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=_boolean(raw, "tie_word_embeddings"),
        **architecture.fields(raw),
    )


def _architecture(raw):
    for name, architecture in ARCHITECTURES.items():
        if raw.get("model_type") == architecture.model_type and (raw.get("architectures") or [name]) == [name]:
            return architecture
    said = f"architectures {raw.get('architectures')!r:.100} with model_type {raw.get('model_type')!r:.100}"
    raise ValueError(f"config.json: {said} is not implemented: pass a dense {', '.join(ARCHITECTURES)}")


def _refuse_unimplemented(raw, kind, n_layer):
    def refuse(key, usual=None):
        value = f"{key:.100} = {raw.get(key, usual)!r:.100}"
        raise ValueError(f"config.json: {value} changes the numbers and is not implemented: pass a model without it")

    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act")
    if raw.get("is_causal") is False:
        refuse("is_causal")
    if raw.get("layer_types") not in (None, ["full_attention"] * n_layer):
        refuse("layer_types")
    if kind == "mistral":
        if raw.get("sliding_window", 4096) is not None:  # where the key is missing, it is on
            refuse("sliding_window", 4096)
        if raw.get("attention_bias"):
            refuse("attention_bias")
    elif kind == "llama":
        if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
            refuse("sliding_window")
    elif raw.get("use_sliding_window") and raw.get("layer_types") is None:
        first = raw.get("max_window_layers", 28)  # Qwen's layers below this see everything
        if type(first) is not int or first < n_layer:
            refuse("use_sliding_window")
    if kind != "llama" and raw.get("mlp_bias"):
        refuse("mlp_bias")
    for key, value in raw.items():
        off = (None, False, "", [], {})
        if re.search("factor|scal|multipl", key) and type(value) is not bool:
            off = (None, 1, {})
        if _MAY_CHANGE_NUMBERS.search(key) and key not in _READ_BELOW and not key.endswith("dropout") and value not in off:
            refuse(key)


def _rope(raw, max_position):
    """(rope_theta, rope_scaling or None) from either layout; what is said in several places must agree."""
    found = {}
    for place in ("rope_parameters", "rope_scaling"):
        if type(raw.get(place) or {}) is not dict:
            raise ValueError(f"config.json: {place} = {raw[place]!r:.100} is not an object: correct it")
    places = [raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}]
    places.append({key: raw.get(key) for key in ("rope_theta", "original_max_position_embeddings")})
    for key, value in (item for place in places for item in place.items()):
        key = "rope_type" if key == "type" else key
        if value is not None and found.setdefault(key, value) != value:
            raise ValueError(f"config.json: {key} is {value!r:.100} and {found[key]!r:.100}: correct it")

    kind = found.pop("rope_type", "default")
    if kind not in list(_ROPE_KEYS):
        known = ", ".join(_ROPE_KEYS)
        raise ValueError(f"config.json: rope_type {kind!r:.100} is not implemented: pass a model with {known}")
    if "rope_theta" not in found and _older_than_rope_theta(raw):
        found["rope_theta"] = 10000.0
    theta = _number(found, "rope_theta", above=1)
    required, optional = _ROPE_KEYS[kind]
    scaling = {key: found.pop(key) for key in required + optional if key in found}
    for key in dict.fromkeys((*required, *scaling)):
        if key == "truncate":
            _boolean(scaling, key)
        elif scaling.get(key) != 0 or not key.startswith(("mscale", "beta")):  # for these 0 means "the usual"
            _number(scaling, key)
    left = {key: value for key, value in found.items() if key not in ("rope_theta", "original_max_position_embeddings")}
    if left not in ({}, {"partial_rotary_factor": 1}):
        raise ValueError(f"config.json: {left!r:.100} with {kind} rope is not implemented: pass a model without it")
    if kind == "default":
        return theta, None
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", max_position)
    slow, fast = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", 1)
    if slow >= fast or (scaling.get("beta_fast") or 32) < (scaling.get("beta_slow") or 1):
        raise ValueError(f"config.json: the slow and the fast bound of {kind} rope are swapped: correct it")
    return theta, {"rope_type": kind, **scaling}


def _context(raw, max_position, scaling):
    """The longest sequence, in tokens, that the model was made for or, by stretched positions, made fit for.

    Where max_position_embeddings holds the original length, the stretched one counts. yarn: Qwen's instructions add it
    and leave the number. linear: DeepSeek-Coder's number is the stretched one; Vicuna's is not, and stands beside
    max_sequence_length, which is. llama3: the number is the stretched one (131072 in Llama 3.2, whose factor 32 times
    the original 8192 would be twice that).
    """
    kind, longest = (scaling or {}).get("rope_type"), None
    if kind == "yarn":
        longest = math.ceil(scaling["factor"] * scaling["original_max_position_embeddings"])
    elif kind == "linear":
        longest = raw.get("max_sequence_length")
    key = "the length that rope_scaling asks for"
    return max(max_position, _integer({key: longest}, key, 2**28, default=1))


def _older_than_rope_theta(raw):
    """Llama 1 and 2 were saved before transformers 4.33 brought the key rope_theta; until then it was 10000 for all."""
    version = re.match(r"(\d+)\.(\d+)", str(raw.get("transformers_version")))
    return raw.get("model_type") == "llama" and version is not None and tuple(map(int, version.groups())) < (4, 33)


def _integer(raw, key, most, default=None):
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"config.json: {key} = {value!r:.100} must be a whole number from 1 to {most}: correct it")
    return value


def _number(raw, key, above=0):
    value = raw.get(key)
    if type(value) not in (int, float) or not above < value < 1e30:
        raise ValueError(f"config.json: {key} = {value!r:.100} must be a number above {above}; none is assumed: correct it")
    return float(value)


def _boolean(raw, key):
    value = raw.get(key)
    if value is not None and type(value) is not bool:
        raise ValueError(f"config.json: {key} = {value!r:.100} must be true or false: correct it")
    return bool(value)

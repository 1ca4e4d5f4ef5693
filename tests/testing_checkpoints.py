"""For the tests: tiny checkpoints, written on the spot and loaded, and what a refusal must look like."""

import json

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from loading import load
from loading.config import read_config
from model import KVCache, Transformer

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": False,
    "eos_token_id": 257,
}  # fmt: skip
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
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
    """The model those weights make, without loading/'s reading."""
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


def streamed(tokenizer, ids):
    """The pieces of text, one for each id."""
    stream = tokenizer.stream()
    return [stream.push(i) for i in ids]

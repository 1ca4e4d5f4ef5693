"""For the tests of the command line: a tiny random checkpoint, and the command run on it."""

import json
import math
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

import cli
from loading.config import read_config
from model import Transformer

FOLDER = Path(__file__).parent.parent
N_LAYER = 5
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}bot:"
FIXED = ["--skip", "2,3,6", "--gamma", "3"]


def write_model(folder, *, bos=True, eos=True, template=True, max_position=160, nan=False):
    """A random Llama of N_LAYER layers; its byte-level tokenizer knows ASCII and, to print them only, longer characters."""
    characters = [chr(i) for i in range(32, 127)] + ["\n", "é", "中", "🙂"]
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [byte_level.pre_tokenize_str(c)[0][0] for c in characters]
    special = ["<s>", "</s>"]
    vocabulary = {piece: i for i, piece in enumerate(special + pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = byte_level, tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocabulary), "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": N_LAYER, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": max_position, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    config |= {"bos_token_id": 0} if bos else {}
    config |= {"eos_token_id": 1} if eos else {}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE} if template else {}))
    with torch.device("meta"):
        shapes = Transformer(read_config(config)).state_dict()
    rng = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(t.shape, generator=rng) * 0.3 + n.endswith("norm.weight") for n, t in shapes.items()}
    if nan:
        weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, cache):
    monkeypatch.setenv("KNAPSPEC_CACHE", str(cache))


@pytest.fixture
def knapspec(folder, capfd, tmp_path):
    """knapspec(*options) runs the command line -> (status, standard output, standard error, the JSON file's content)."""

    def run(*options, model=folder, prompt=("--prompt", "Why is the sky blue?")):
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        status = cli.main(["--model", str(model), *prompt, "--json", str(path), *options])
        out, err = capfd.readouterr()
        return status, out, err, json.loads(path.read_text("utf-8")) if path.exists() else None

    return run

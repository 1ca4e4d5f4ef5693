"""--estimate: what known models take, from their configurations alone, and how fast a device can be at best."""

import json
import math
import re

import pytest
import torch

import cli
from cli import estimate
from cli.methods import WAYS
from loading import outline
from loading.memory import cache_bytes, weights_bytes
from model import KVCache
from tests.testing_checkpoints import LLAMA, QWEN3, quiet_load, write_folder
from tests.testing_models import tiny_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# Vocabulary, hidden size, that inside the MLP, layers, heads, key-value heads, head_dim, tied -> parameters, as published.
KNOWN = {
    "Llama-3.2-1B": (128256, 2048, 8192, 16, 32, 8, 64, True, 1_235_814_400),
    "Llama-3.2-3B": (128256, 3072, 8192, 28, 24, 8, 128, True, 3_212_749_824),
    "Llama-3.1-8B": (128256, 4096, 14336, 32, 32, 8, 128, False, 8_030_261_248),
    "Llama-3.1-70B": (128256, 8192, 28672, 80, 64, 8, 128, False, 70_553_706_496),
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128, True, 596_049_920),
    "Qwen3-1.7B": (151936, 2048, 6144, 28, 16, 8, 128, True, 1_720_574_976),
    "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128, True, 4_022_468_096),
    "Qwen3-8B": (151936, 4096, 12288, 36, 32, 8, 128, False, 8_190_735_360),
    "Qwen3-14B": (151936, 5120, 17408, 40, 40, 8, 128, False, 14_768_307_200),
    "Qwen3-32B": (151936, 5120, 25600, 64, 64, 8, 128, False, 32_762_123_264),
}  # fmt: skip
KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "tie_word_embeddings")  # fmt: skip


def folder_of(tmp_path, name):
    """One that holds config.json and nothing else."""
    config = (QWEN3 if name.startswith("Qwen3") else LLAMA) | dict(zip(KEYS, KNOWN[name])) | {"max_position_embeddings": 2**15}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_from_config_json_alone(tmp_path, monkeypatch, name):
    parameters, model = KNOWN[name][-1], outline(folder_of(tmp_path, name))
    monkeypatch.setattr(estimate, "free_bytes", lambda device: 80e9)
    cache, weights = KVCache(model.config, 2**15, device="meta", dtype=torch.bfloat16), 2 * parameters
    of_cache = sum(tensor.nbytes for tensor in (cache.keys, cache.values, cache.cos, cache.sin))
    told = " ".join(estimate.lines(model, 2**15, GPU, torch.bfloat16, 2e12))
    assert f"{parameters:,} parameters: {weights / 1e9:,.2f} GB as bfloat16 on cuda" in told
    assert f"cache of 32,768 tokens: {of_cache / 1e9:,.2f} GB" in told
    devices = math.ceil((weights + of_cache) / 80e9)
    assert ("it fits" in told) == (devices == 1) == (name != "Llama-3.1-70B") and (devices == 1 or "needs 2 such devices" in told)
    V, H, *_, tied, _ = KNOWN[name]
    plain = 2e12 * devices / (weights - 2 * V * H * (not tied) + of_cache)
    said = [float(number) for number in re.findall(r"at most ([\d.]+)", told)]
    assert said == pytest.approx([plain, 1.8 * plain], rel=0.001) and "(8 + 1) / (8 · 0.5 + 1) = 1.80" in told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, QWEN3])
def test_bytes_are_those_of_a_loaded_model(tmp_path, dtype, changes):
    folder = write_folder(tmp_path / "m", LLAMA | changes | {"hidden_size": 128, "intermediate_size": 400, "vocab_size": 2000, "head_dim": 32})
    (model, _), shapes = quiet_load(folder, dtype=dtype), outline(folder)
    parts = [part for layer in model.model.layers for part in (layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down)]
    tensors = {id(t): t for t in (*model.parameters(), *(part.weight for part in (*parts, model.head)))}
    true = sum(t.numel() * t.element_size() for t in tensors.values())
    assert weights_bytes(shapes, CPU, dtype) == pytest.approx(true, rel=0.05)
    assert estimate.multiplied(shapes) == sum(part.weight.numel() for part in (*parts, model.head))


def test_bytes_of_a_cache():
    config = tiny_config(n_layer=5, n_kv_head=1, head_dim=6)
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(config, 100, dtype=dtype)
        assert cache_bytes(config, 100, dtype) == sum(tensor.nbytes for tensor in (cache.keys, cache.values, cache.cos, cache.sin))


def test_command_line(tmp_path, capfd):
    """As a whole, with the device's own bandwidth and memory."""
    arguments = ["--model", str(folder_of(tmp_path, "Qwen3-0.6B")), "--device", "cpu", "--estimate"]
    assert cli.main([*arguments, "--context", "1000"]) == 0
    out, err = capfd.readouterr()
    assert (err, len(out.splitlines())) == ("", 6 if WAYS else 5)
    assert "596,049,920 parameters: 3.01 GB as float32" in out and "cache of 1,000 tokens" in out
    assert all(0.01 < float(number) < 10_000 for number in re.findall(r"at most ([\d.]+)", out))
    for options, words in ((["--context", "40000"], "32768"), (["--temperature", "1"], "--temperature"), (["--prompt", "x"], "--prompt"),
                           (["--device", "mps"], "mps"), (["--model", str(tmp_path / "absent")], "absent")):  # fmt: skip
        assert cli.main([*arguments, *options]) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1) and words in err
    assert cli.main(["--prompt", "x", "--context", "3"]) == 2 and "--estimate" in capfd.readouterr().err

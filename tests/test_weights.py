"""Weights: what is read exactly, what is refused by name before it is read, and how little memory it takes.

What goes wrong for users -> tests
  tied embeddings, lm_head.weight      test_tied_head_is_the_embedding, test_head_beside_a_tied_embedding_is_ignored,
                                       test_missing_tensor_is_named
  shards with an index                 test_shards_load_as_the_index_says and the tests after it
  dtypes of files                      test_every_dtype_is_converted_exactly, test_loading_never_holds_the_model_twice
  big checkpoints                      test_sharded_loading_holds_at_most_one_shard_beside_what_stays
No code runs and nothing outside is read: test_index_cannot_leave_its_folder, test_damaged_safetensors_are_refused.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loading import load
from loading import weights as loading_weights
from loading.config import read_config
from model import KVCache, Transformer
from tests.testing_checkpoints import (
    LLAMA,
    QWEN2,
    QWEN3,
    assert_refused,
    from_weights,
    logits,
    quiet_load,
    random_weights,
    write_folder,
    write_index,
)


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
    monkeypatch.setattr(loading_weights, "_CHUNK_BYTES", 100)  # several pieces for each tensor
    weights = random_weights(LLAMA, dtype=stored)
    folder = write_folder(tmp_path / "m", weights=weights)
    wanted = getattr(torch, str(asked).removeprefix("torch."))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    found = loading_weights.find_tensors(lambda file, required=True: folder / file, shapes, tied=False)
    read = dict(loading_weights.read_tensors(found, torch.device("cpu"), wanted, progress=False))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name].to(wanted)) for name in weights)
    assert quiet_load(folder, dtype=asked)[0].dtype == wanted


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_part_of_a_tensor_is_read_by_itself(tmp_path, monkeypatch, stored):
    monkeypatch.setattr(loading_weights, "_CHUNK_BYTES", 12)  # several pieces for each row of a part
    weights = random_weights(LLAMA, dtype=stored)
    folder = write_folder(tmp_path / "m", weights=weights)
    names = [f"model.layers.1.{name}.weight" for name in ("self_attn.k_proj", "mlp.down_proj", "input_layernorm")]
    found = loading_weights.find_tensors(lambda file, required=True: folder / file, {n: tuple(w.shape) for n, w in weights.items()}, tied=False)
    for rank in range(2):
        wanted = dict(zip(names, (weights[names[0]].chunk(2, 0)[rank], weights[names[1]].chunk(2, 1)[rank], weights[names[2]])))
        parts = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        read = dict(loading_weights.read_tensors({n: found[n] for n in names}, torch.device("cpu"), torch.float32, False, parts, rank))
        assert all(torch.equal(read[name], wanted[name].float()) for name in names)


MEASURE = """
import re, sys
from loading import load
from loading.config import read_config
from loading.files import fetcher, read_json
from loading.weights import find_tensors, read_tensors
from model import Transformer
import torch
def peak_bytes():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
folder, dtype, kept = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "kept"
fetch = fetcher(folder)
config = read_config(read_json(fetch("config.json")))
with torch.device("meta"):
    shapes = {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}
before = peak_bytes()
if kept:
    model = load(folder, device="cpu", dtype=dtype, progress=False)
else:
    for name, tensor in read_tensors(find_tensors(fetch, shapes, config.tied), torch.device("cpu"), dtype, progress=False):
        del tensor
print(peak_bytes() - before)
"""
needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure a process's peak memory")


def peak_of_loading(folder, dtype, kept="kept"):
    """Bytes that loading adds at its peak to a process of its own; kept="dropped": each tensor leaves it, as to a GPU."""
    command = [sys.executable, "-c", MEASURE, folder, dtype, kept]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    return int(done.stdout)


def folder_of_zeros(folder, layers, shards=1):
    """A bfloat16 checkpoint as deep for its width as real ones are, and the number of its weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": layers}
    config = LLAMA | sizes | {"num_attention_heads": 8, "num_key_value_heads": 8}
    with torch.device("meta"):
        meta = Transformer(read_config(config)).state_dict()
    weights = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in meta.items()}
    return write_folder(folder, config, weights, shards=shards), sum(tensor.numel() for tensor in weights.values())


@needs_linux
def test_loading_never_holds_the_model_twice(tmp_path):
    folder, count = folder_of_zeros(tmp_path / "m", layers=20)
    peak = peak_of_loading(folder, "float32")
    assert 4 * count <= peak <= 1.15 * 4 * count, f"{peak / (4 * count):.3f} times the weights' bytes"


@needs_linux
def test_sharded_loading_holds_at_most_one_shard_beside_what_stays(tmp_path):
    folder, count = folder_of_zeros(tmp_path / "m", layers=20, shards=5)
    shard = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert peak_of_loading(folder, "bfloat16") <= 2 * count + 1.15 * shard
    assert peak_of_loading(folder, "bfloat16", "dropped") <= 1.15 * shard


def test_progress_goes_to_standard_error_of_a_terminal(tmp_path, capfd, monkeypatch):
    load(write_folder(tmp_path / "m"), device="cpu")
    assert capfd.readouterr() == ("", "")  # a log file gets no bars
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load(tmp_path / "m", device="cpu")
    out, err = capfd.readouterr()
    assert out == "" and "Loading" in err
    quiet_load(tmp_path / "m")
    assert capfd.readouterr() == ("", "")


# --- Shards and damage ------------------------------------------------------------------------------------------------------


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

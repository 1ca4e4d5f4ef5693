"""Planted checkpoints are what they say, and the sweep finds the best fixed plan of one."""

import json

import pytest
import torch
from safetensors.torch import load_file

from benchmark.__main__ import main
from benchmark.planted import SOFTEST, epsilons, plant, planted_items
from benchmark.sweep import GAMMAS, contenders, sweep
from decoding import FixedPlanner, Plan, generate
from model import KVCache
from tests.testing_benchmark import LATENCY, TEXT, L, simulated
from tests.testing_checkpoints import (
    CHATML,
    LLAMA,
    logits,
    quiet_load,
    random_weights,
    write_folder,
)
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    tiny_config,
)

CONFIG = LLAMA | {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True}  # biases wherever Llama can have them


def write_source(folder, dtype=torch.float32, **changes):
    weights = {name: tensor * 0.3 + name.endswith("norm.weight") for name, tensor in random_weights(CONFIG, dtype=dtype).items()}
    return write_folder(folder, CONFIG | changes, weights, chat_template_jinja=CHATML, generation_config_json={"eos_token_id": 7})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source") / "source")



# --- Planted checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), [("split", torch.float32), ("blocks", torch.bfloat16), ("soft", torch.float32)])
def test_skipping_the_planted_items_gives_the_source_model(tmp_path, kind, dtype):
    source = write_source(tmp_path / "source", dtype)
    plant(tmp_path / "planted", kind=kind, model=source)
    (model, _), (original, _) = (quiet_load(folder, dtype=torch.float32) for folder in (tmp_path / "planted", source))
    tokens, wanted = torch.tensor([1, 2, 3]), logits(original)
    without = model(tokens, KVCache(model.config, 3), skip=planted_items(kind, 6))
    torch.testing.assert_close(without, wanted, rtol=1e-5, atol=1e-5)
    change = (logits(model) - wanted).abs().max()
    assert 1e-3 < change < (0.2 if kind != "soft" else 2) * wanted.abs().max()  # they do something, but little


@pytest.mark.parametrize("kind", ["split", "blocks"])
def test_at_epsilon_zero_the_planted_sublayers_add_nothing(tmp_path, source, kind):
    plant(tmp_path / "planted", kind=kind, model=source, epsilon=0.0)
    models = [quiet_load(folder)[0] for folder in (tmp_path / "planted", source)]
    torch.testing.assert_close(*map(logits, models), rtol=1e-5, atol=1e-5)


def test_planted_items_are_half_of_all():
    assert planted_items("split", 4) == {1, 2, 5, 6}
    assert planted_items("blocks", 4) == {2, 3, 6, 7}


def test_soft_ones_rise_over_the_layers_in_turns_on_attention_and_mlp():
    soft = epsilons("soft", 6, 0.02)
    assert list(soft) == [1, 2, 5, 6, 9, 10] and sorted(soft.values()) == list(soft.values())
    assert (soft[1], soft[10]) == pytest.approx((0.02, SOFTEST)) and soft[2] - soft[1] == pytest.approx((SOFTEST - 0.02) / 5)
    assert set(epsilons("blocks", 6, 0.02).values()) == {0.02}


def test_planted_folder_keeps_dtypes_and_settings(tmp_path):
    source = write_source(tmp_path / "source", torch.bfloat16, layer_types=["full_attention"] * 3, max_window_layers=3)
    out = tmp_path / "new" / "planted"
    plant(out, kind="split", model=source)
    raw = json.loads((out / "config.json").read_text())
    assert (raw["num_hidden_layers"], raw["max_window_layers"], len(raw["layer_types"])) == (6, 6, 6)
    assert raw["knapspec_planted"] == {"kind": "split", "epsilon": 0.02, "source": "source"}
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["planted"]  # nothing unfinished is left


def test_mistakes_are_one_line_and_status_2(source, tmp_path, capsys):
    for arguments, reason in [
        (["--kind", "split", "--out", str(source), "--model", str(source)], "exists: pass a new folder"),
        (["--kind", "split", "--out", str(tmp_path / "new"), "--model", str(source), "--epsilon", "nan"], "'nan' is not a number from 0 to 1"),
        (["--kind", "split", "--out", str(tmp_path / "new"), "--model", str(tmp_path / "absent")], "no folder"),
        (["--kind", "whole", "--out", str(tmp_path / "new")], "invalid choice"),
    ]:
        assert main(["plant", *arguments]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- The sweep -------------------------------------------------------------------------------------------------------


def test_sweep_finds_the_best_of_all_plans(monkeypatch):
    latency = latency_model(4, per_token=0.05)
    model = SimulatedMachine(random_model(tiny_config(n_layer=4), faint=planted_items("split", 4)), latency, monkeypatch)
    plans = contenders(model, [1, 2, 3], latency, kind="split", new_tokens=16)
    truth = planted_items("split", 4) - {1, 6}  # the first and the last layer are kept
    assert {plan.gamma for plan in plans if plan.skip_set == truth} == set(GAMMAS)
    plans = [plan for plan in plans if plan.gamma in (1, 3, 8)]
    prompts = [[1, 2, 3], [4, 5]]
    rounds = sweep(model, prompts, plans, max_new_tokens=9)
    assert [len(results) for results in rounds[:2]] == [len(plans), len(plans) // 3]
    best, speedup = rounds[-1][0]

    def decoding_s(gamma):
        generation = generate(model, prompts[0], max_new_tokens=9, planner=FixedPlanner(Plan(truth, gamma)))
        assert generation.accepted == generation.drafted
        return generation.seconds["total"] - generation.seconds["prefill"]

    speedups = {gamma: decoding_s(0) / decoding_s(gamma) for gamma in (1, 3, 8)}
    assert (best.skip_set, best.gamma) == (truth, max(speedups, key=speedups.get))
    assert speedup == pytest.approx(speedups[best.gamma], rel=1e-2)  # the other prompt is a token shorter


def test_contenders_save_no_more_than_half_and_keep_the_outer_layers(monkeypatch):
    latency = latency_model(L, attention_s=(2e-3, 0.0))  # an attention weighs just two MLPs
    plans = contenders(simulated(monkeypatch, "split", latency=latency), TEXT[:3], latency, new_tokens=16)
    assert len(plans) == len({(plan.skip_set, plan.gamma) for plan in plans}) >= 3 * len(GAMMAS)
    assert all(plan.skip_set and not plan.skip_set & {0, 1, 2 * L - 2, 2 * L - 1} for plan in plans)
    assert all(sum(latency.sublayer(item, 0) for item in plan.skip_set) <= 0.5 * L * 3e-3 + 1e-9 for plan in plans)


def test_contenders_of_a_soft_model_are_its_faintest_sublayers_and_other_ways_are_tried_alike(monkeypatch):
    model = simulated(monkeypatch, "soft")
    tried = {plan.skip_set for plan in contenders(model, TEXT[:3], LATENCY, kind="soft", new_tokens=16)}
    truth = sorted(planted_items("soft", L) - {1, 2 * L - 2})
    assert sum(frozenset(truth[:count]) in tried for count in range(1, len(truth) + 1)) >= 4
    model.table["half"] = [*model.simulated.sublayers, model.head]
    of_half = LATENCY.__class__(**vars(LATENCY) | {"ways": (("half", LATENCY),)})
    plans = contenders(model, TEXT[:3], of_half, ways=("half",), new_tokens=16)
    assert frozenset() in {plan.skip_set for plan in plans} and all(plan.choices == ("half",) * (2 * L + 1) for plan in plans)


def test_sweep_prints_the_best_and_writes_all_rounds(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("benchmark.sweep.GAMMAS", (1, 2))
    planted, path, text = tmp_path / "planted", tmp_path / "sweep.json", tmp_path / "p.txt"
    plant(planted, kind="split", model=source)
    text.write_text("Hello")
    assert main(["sweep", "--model", str(planted), "--prompts", str(text), "--max-new-tokens", "4", "--json", str(path)]) == 0
    out, rounds = capsys.readouterr().out, json.loads(path.read_text())["runs"]["rounds"]
    best = rounds[-1][0]
    assert 1 <= len(rounds[-1]) <= 3 < len(rounds[0])
    first = next(line for line in out.splitlines() if line.startswith(("| full", "| half", "| int8")))
    assert f"{best['speedup']:.2f}×" in first and f"{len(best['skip_set'])} of 12" in first and "(planted: split" in out

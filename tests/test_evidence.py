"""tpt and context: on a simulated machine predictions come out as they must, and fitted latencies are found again."""

import functools
import json
from profile import LatencyModel

import pytest
import torch

from benchmark.__main__ import main
from benchmark.context import at_length, context_table
from benchmark.predictions import (
    PREDICTORS,
    pearson,
    predict,
    skip_sets_to_try,
    tpt,
    tpt_table,
)
from benchmark.runs import probe
from decoding import FixedPlanner, Plan, generate
from tests.testing_benchmark import (
    CONFIG,
    LATENCY,
    TEXT,
    L,
    results,
    simulated,
    tiny_folder,
)
from tests.testing_models import SimulatedMachine, latency_model, random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory)


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    """Profiles made here stay out of the user's folder."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(folder.parent / "cache"))


def test_pearson():
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [1, 0, 1]) == pytest.approx(0, abs=1e-12)
    assert pearson([1, 1, 1], [1, 2, 3]) is None


def test_predictors_by_hand():
    latency = LatencyModel(0.1, 0.2, (0.3, 0.01), ((1, 2.0, 0.0), (3, 4.0, 0.0)), 0.0)
    # Two layers at n = 10: a step is 0.1 + 2 * (0.4 + 0.2) = 1.3, a draft without items 2 and 3 is 0.7.
    said = predict(latency, {2, 3}, 2, 0.5, 10, 2)
    tokens = 1 + 0.5 + 0.25
    assert said["tpt"] == pytest.approx(tokens / (2 * 0.7 + 4.0))
    assert said["paper_tpt"] == pytest.approx(tokens / (2 * 0.6 + 1.2))
    assert said["acceptance_rate"] == pytest.approx(0.75 / 2)
    assert said["tokens_per_layer"] == pytest.approx(tokens / (2 + 2 * 1))


def test_skip_sets_to_try_are_half_random_and_of_the_same_sizes(monkeypatch):
    look = functools.partial(skip_sets_to_try, latency=LATENCY, count=6, rng=torch.Generator().manual_seed(0))
    tried = probe(simulated(monkeypatch, "split", epsilon=0.05), TEXT[:60], look, window=8)
    sizes = [len(skip_set) for skip_set, _ in tried]
    assert sizes[:3] == sizes[3:] and sizes[0] < sizes[2]
    assert all(1 < item < 2 * L - 2 for skip_set, _ in tried for item in skip_set)
    assert all(0 <= alpha <= 1 for _, alpha in tried[:3]) and [alpha for _, alpha in tried[3:]] == [None] * 3


def test_full_price_predicts_a_simulated_machine_and_the_paper_s_does_not(monkeypatch):
    costly = latency_model(L, attention_s=(1e-3, 1e-5), head_s=4e-3, per_token=0.3)
    machine = simulated(monkeypatch, "split", epsilon=0.05, latency=costly)
    points, rows = tpt(results(), machine, costly, TEXT, contexts=[32, 96], gammas=[1, 4], skip_sets=2, new_tokens=32, progress=False)
    assert len(points) == 2 * 2 * 2
    full, paper, accepted, _ = rows
    assert [row["predictor"] for row in rows] == list(PREDICTORS)
    assert full["pearson"]["all"] > 0.97 and list(full["pearson"]) == ["32", "96", "all", "speed-up"]
    assert full["error"] < 0.06 and full["speedup_error"] < 0.06 < paper["error"]
    for key in ("all", "speed-up"):
        assert full["pearson"][key] > max(paper["pearson"][key], accepted["pearson"][key])
    for point in points:
        assert point["speedup"] == pytest.approx(point["tokens_per_second"] / point["plain"], rel=0.02)
    plan = Plan(frozenset(point["skip_set"]), point["gamma"])
    run = generate(machine, TEXT[: point["context"]], max_new_tokens=32, planner=FixedPlanner(plan))
    assert point["predicted"]["acceptance_rate"] == run.accepted / run.drafted
    assert "| TPT, full price " in "\n".join(tpt_table(points, rows))


def test_context_finds_the_fitted_latencies_again_and_tells_what_is_skipped(monkeypatch):
    machine = simulated(monkeypatch, "split")
    rows = [at_length(machine, LATENCY, TEXT[:n], new_tokens=64) for n in (32, 128)]
    for row in rows:
        assert row["measured_s"] == pytest.approx(row["fitted_s"], rel=1e-3)
        assert row["acceptance_rate"] > 0.2 and all(0 < part < 1 for part in row["skipped"].values())
        assert row["attention_among_skipped"] == row["skipped"]["attention"] / sum(row["skipped"].values())
    assert rows[1]["fitted_s"]["attention"] - rows[0]["fitted_s"]["attention"] == pytest.approx(96e-5)
    assert context_table(rows)[0].startswith("| context |")


def test_context_where_nothing_is_drafted_skips_nothing(monkeypatch):
    machine = SimulatedMachine(random_model(CONFIG), LATENCY, monkeypatch)
    row = at_length(machine, LATENCY, TEXT[:32], new_tokens=8, budget=0.0)
    assert row["acceptance_rate"] is row["attention_among_skipped"] is None
    assert not any(row["skipped"].values()) and row["speedup"] <= 1


# --- Command line ----------------------------------------------------------------------------------------------------


def small(folder, tmp_path):
    """Options for a short run on the model in `folder`, told in out.json."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hello there, how are you?"}\n{"text": "Once upon a time"}')
    return ["--model", str(folder), "--max-new-tokens", "8", "--prompts", str(tmp_path / "p.jsonl"), "--json", str(tmp_path / "out.json")]


def test_tpt_writes_its_points(folder, tmp_path, capsys):
    command = ["tpt", "--contexts", "40,20", "--gammas", "2,1", "--skip-sets", "2", *small(folder, tmp_path)]
    assert main(command) == 0
    data, out = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert [[(p["context"], p["gamma"]) for p in data["runs"][n]] for n in ("20", "40")] == [[(n, 1), (n, 2)] * 2 for n in (20, 40)]
    assert data["settings"]["gammas"] == [1, 2] and data["settings"]["model"] == "tiny"
    assert out.startswith("### tpt: tiny\n")
    assert main([*command, "--resume"]) == 0 and capsys.readouterr().out == out


def test_context_goes_up_to_the_limit(folder, tmp_path, capsys):
    command = ["context", "--max-context", "160", *small(folder, tmp_path), "--plot", str(tmp_path / "out.png")]
    assert main(command) == 0
    assert list(json.loads((tmp_path / "out.json").read_text())["runs"]) == ["128", "152"]
    assert "context 128 to 160 tokens" in capsys.readouterr().out
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("arguments", "reason"), [
    (["tpt", "--contexts", "768,20"], "at most 704"), (["tpt", "--contexts", "0"], "whole number"),
    (["tpt", "--skip-sets", "1"], "of at least 2"), (["tpt", "--max-new-tokens", "2"], "of at least 3"),
    (["context", "--max-context", "8", "--max-new-tokens", "8"], "no room for 8 new tokens"),
])  # fmt: skip
def test_mistakes_are_one_line_and_status_2(folder, capsys, arguments, reason):
    assert main([*arguments, "--model", str(folder)]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1

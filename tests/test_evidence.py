"""The experiments: judgements equal the knapsack's own, and on a simulated machine predictions come out as they must."""

import functools
import importlib.util
import json
from profile import LatencyModel

import pytest
import torch

from benchmark import commands as benchmark
from benchmark import evidence
from benchmark.evidence import (
    judge,
    pearson,
    planned,
    pooled_alphas,
    predict,
    probe,
    skip_sets_to_try,
    spread,
)
from benchmark.planted import planted_items
from decoding import FixedPlanner, Plan, generate
from tests.test_cli import write_model
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    random_tokens,
    tiny_config,
)

L = 8
CONFIG = tiny_config(n_layer=L)
TEXT = random_tokens(200, CONFIG).tolist()
LATENCY = latency_model(L, attention_s=(1e-3, 1e-5))
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    """Profiles made here stay out of the user's folder."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(folder.parent / "cache"))


@pytest.fixture
def machine(monkeypatch):
    """A split model whose planted sublayers add a little, on a machine that takes what LATENCY says."""
    return SimulatedMachine(random_model(CONFIG, faint=planted_items("split", L), epsilon=0.05), LATENCY, monkeypatch)


# --- A window's judgement --------------------------------------------------------------------------------------------


def test_judgement_is_that_of_the_knapsack():
    model = random_model(CONFIG, faint=planted_items("split", L), epsilon=0.1)

    def look(session):
        planner = planned(session, LATENCY, max_branches=None)
        judged = [judge(session, c.skip_set, planner.window) for c in planner.candidates]
        return planner, judged

    planner, judged = probe(model, TEXT[:60], look, window=8)
    assert len(judged) > 5
    torch.testing.assert_close(judged, [(c.far, c.rejected) for c in planner.candidates], rtol=1e-4, atol=1e-4)
    # One slope for all candidates, as the planner has it after its first planning.
    slope = planner.rejections / planner.exposure
    wanted = [1 - min(slope * far, 1.0) for far, _ in judged]
    torch.testing.assert_close(pooled_alphas(judged), wanted, rtol=1e-4, atol=1e-4)


def test_nothing_skipped_is_judged_perfect_and_own_keys_change_the_judgement():
    model, skip_set = random_model(CONFIG), frozenset({2, 5, 6})

    def look(session):
        views = [judge(session, skip_set, W, own) for W in (1, 8) for own in (False, True)]
        return judge(session, frozenset(), 8, True), views

    nothing, views = probe(model, TEXT[:60], look, window=8)
    assert nothing == pytest.approx((0.0, 0.0), abs=2e-3)
    assert views[0] == views[1]  # a single token has no earlier ones in its window
    assert views[2][0] != pytest.approx(views[3][0], rel=1e-3)


def test_spread_takes_some_of_a_list():
    assert spread(list(range(9)), 3) == [1, 4, 7]
    assert spread([5], 3) == [5] and spread([], 3) == []
    assert spread([3, 1, 2], 3) == [3, 1, 2]


def test_pearson():
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [1, 0, 1]) == pytest.approx(0, abs=1e-12)
    assert pearson([1, 1, 1], [1, 2, 3]) is None


# --- tpt -------------------------------------------------------------------------------------------------------------


def test_predictors_by_hand():
    latency = LatencyModel(0.1, 0.2, (0.3, 0.01), ((1, 2.0, 0.0), (3, 4.0, 0.0)), 0.0)
    # Two layers at n = 10: a step is 0.1 + 2 * (0.4 + 0.2) = 1.3, a draft without items 2 and 3 is 0.7.
    said = predict(latency, {2, 3}, 2, 0.5, 10, 2)
    tokens = 1 + 0.5 + 0.25
    assert said["tpt"] == pytest.approx(tokens / (2 * 0.7 + 4.0))
    assert said["paper_tpt"] == pytest.approx(tokens / (2 * 0.6 + 1.2))
    assert said["acceptance_rate"] == pytest.approx(0.75 / 2)
    assert said["tokens_per_layer"] == pytest.approx(tokens / (2 + 2 * 1))


def test_skip_sets_to_try_are_half_random_and_of_the_same_sizes(machine):
    look = functools.partial(skip_sets_to_try, latency=LATENCY, count=6, window=8, rng=torch.Generator().manual_seed(0))
    tried = probe(machine, TEXT[:60], look, window=8)
    sizes = [len(skip_set) for skip_set, *_ in tried]
    assert [kind for _, kind, _ in tried] == ["knapsack"] * 3 + ["random"] * 3
    assert sizes[:3] == sizes[3:] and sizes[0] < sizes[2]
    assert all(1 < item < 2 * L - 2 for skip_set, *_ in tried for item in skip_set)
    assert all(found[2] > chance[2] for found, chance in zip(tried[:3], tried[3:]))  # the α expected of each


def test_full_price_predicts_a_simulated_machine_and_the_paper_s_does_not(machine):
    costly = latency_model(L, attention_s=(1e-3, 1e-5), head_s=4e-3, per_token=0.3)
    machine.latency = costly
    result = evidence.tpt(machine, costly, TEXT, contexts=[32, 96], gammas=[1, 4], skip_sets=2, new_tokens=32)
    assert len(result["points"]) == 2 * 2 * 2
    rows = {(row["predictor"], row["alpha"]): row for row in result["rows"]}
    full, paper = rows["tpt", "measured"], rows["paper_tpt", "measured"]
    assert full["pearson"]["all"] > 0.97 and list(full["pearson"]) == ["32", "96", "all", "speed-up"]
    assert full["error"] < 0.06 and full["speedup_error"] < 0.06
    for key in ("all", "speed-up"):
        assert full["pearson"][key] > max(paper["pearson"][key], rows["acceptance_rate", "measured"]["pearson"][key])
    for point in result["points"]:
        assert point["speedup"] == pytest.approx(point["tokens_per_second"] / point["plain"], rel=0.02)
    plan = Plan(frozenset(point["skip_set"]), point["gamma"])
    run = generate(machine, TEXT[: point["context"]], max_new_tokens=32, planner=FixedPlanner(plan))
    assert point["measured"]["acceptance_rate"] == run.accepted / run.drafted
    assert "| TPT, full price " in "\n".join(evidence.tpt_table(result))


# --- context ---------------------------------------------------------------------------------------------------------


def test_context_finds_the_fitted_latencies_again_and_tells_what_is_skipped(machine):
    rows = evidence.context(machine, LATENCY, TEXT, contexts=[32, 128], new_tokens=64)["rows"]
    for row in rows:
        assert row["measured_s"] == pytest.approx(row["fitted_s"], rel=1e-3)
        assert row["speedup"] > 1.1 and all(0 < row["shares"][kind]["skip"] < 1 for kind in ("attention", "mlp"))
        attention, mlp = (row["shares"][kind]["skip"] for kind in ("attention", "mlp"))
        assert row["attention_among_skipped"] == attention / (attention + mlp)
    assert rows[1]["fitted_s"]["attention"] - rows[0]["fitted_s"]["attention"] == pytest.approx(96e-5)
    assert evidence.context_table({"rows": rows})[0].startswith("| context |")


def test_context_where_nothing_is_drafted_skips_nothing(monkeypatch):
    costly = latency_model(L, per_token=2.0)
    machine = SimulatedMachine(random_model(CONFIG), costly, monkeypatch)
    (row,) = evidence.context(machine, costly, TEXT, contexts=[32], new_tokens=8)["rows"]
    assert row["acceptance_rate"] is row["attention_among_skipped"] is None
    assert not any(any(shares.values()) for shares in row["shares"].values())
    assert row["speedup"] == pytest.approx(1)


# --- window ----------------------------------------------------------------------------------------------------------


def test_window_judges_plannings_by_what_is_really_accepted(monkeypatch):
    model = random_model(CONFIG, faint=planted_items("split", L), epsilon=0.0)
    monkeypatch.setattr(evidence, "PLANNINGS", {"one item": {"budget": 0.07}, "default": {}})
    monkeypatch.setattr(evidence, "VIEWS", [(1, False), (1, True), (4, False), (4, True)])
    result = evidence.window(model, LATENCY, [TEXT[:25], TEXT[20:45]], new_tokens=16, lead_in=8)
    one, default = result["plannings"]
    # The planted sublayers add nothing, so that every draft without one of them, or all, is accepted. The budget allows an
    # MLP, but no attention.
    assert one["worth"] == pytest.approx(evidence.speedup(LATENCY, {5}, 1.0, 33, L), rel=1e-3)
    assert default["worth"] > one["worth"] > 1 and default["skip_sets"] > one["skip_sets"] >= 1
    assert all(row["plan_s"] > 0 for row in result["plannings"])
    errors = {(row["window"], row["own_window"], row["alpha"]): row["error"] for row in result["alphas"]}
    assert errors[1, False, "share"] == errors[1, True, "share"] != errors[4, False, "share"]
    assert all(0 <= error <= 1 for error in errors.values())
    assert sum(line.startswith("| ") for line in evidence.window_table(result)) == 4 + 4


def test_speedup_is_that_of_the_best_gamma():
    latency = LatencyModel(0.1, 0.2, (0.3, 0.0), ((1, 1.1, 0.0), (3, 1.5, 0.0)), 0.0)
    draft_s = 0.1 + 0.5  # two layers, one of them skipped
    assert evidence.speedup(latency, {2, 3}, 0.9, 10, 2, gamma_max=2) == pytest.approx(1.1 * 2.71 / (2 * draft_s + 1.5))
    assert evidence.speedup(latency, {2, 3}, 0.0, 10, 2, gamma_max=2) == 1


# --- Command line ----------------------------------------------------------------------------------------------------


def small(folder, tmp_path):
    """Options for a short run on the model in `folder`, told in out.json."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hello there, how are you?"}\n{"text": "Once upon a time"}')
    files = ["--prompts", str(tmp_path / "p.jsonl"), "--json", str(tmp_path / "out.json")]
    return ["--model", str(folder), "--max-new-tokens", "8", *files]


def test_tpt_writes_its_points(folder, tmp_path, capsys):
    command = ["tpt", "--contexts", "40,20", "--gammas", "2,1", "--skip-sets", "2"]
    assert benchmark.main([*command, *small(folder, tmp_path)]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert sorted({(p["context"], p["gamma"], p["kind"]) for p in result["points"]}) == [
        (n, gamma, kind) for n in (20, 40) for gamma in (1, 2) for kind in ("knapsack", "random")
    ]
    assert result["settings"]["gammas"] == [1, 2] and result["settings"]["model"] == "tiny"
    assert capsys.readouterr().out.startswith("### tpt: tiny\n")


def test_context_goes_up_to_the_limit(folder, tmp_path, capsys):
    assert benchmark.main(["context", *small(folder, tmp_path)]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["context"] for row in rows] == [128, 152]  # 160 is the model's limit
    assert "context 128 to 160 tokens" in capsys.readouterr().out
    assert benchmark.main(["context", "--max-context", "50", *small(folder, tmp_path)]) == 0
    assert [row["context"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == [42]


def test_window_writes_what_each_planning_and_each_view_gave(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "PLANNINGS", {"default": {}, "all branches": {"max_branches": None}})
    assert benchmark.main(["window", "--limit", "1", *small(folder, tmp_path)]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["planning"] for row in result["plannings"]] == ["default", "all branches"]
    assert len(result["alphas"]) == 16 and all(0 <= row["error"] <= 1 for row in result["alphas"])


def test_choices_are_compared_and_int8_alone_is_told_apart(folder, tmp_path, capsys):
    command = ["choices", "--contexts", "20,100", *small(folder, tmp_path)]
    assert benchmark.main(command) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["context"] for row in rows] == [20] * 4 + [100] * 4
    for row in rows:
        alone = row["choices"] == evidence.INT8_ALONE
        assert alone == ("same_tokens" in row) and (alone or row["identical"])
        assert all(sum(row["shares"][kind].values()) == pytest.approx(float(row["acceptance_rate"] is not None)) for kind in row["shares"])
    assert "not lossless" in capsys.readouterr().out


@needs_matplotlib
@pytest.mark.parametrize("arguments", [
    ["tpt", "--contexts", "20", "--gammas", "1,2", "--skip-sets", "2"], ["context", "--max-context", "50"],
    ["choices", "--contexts", "20,40"], ["window", "--limit", "1"], ["compare", "--methods", "layerskip,knapspec"], ["decouple"],
], ids=lambda arguments: arguments[0])  # fmt: skip
def test_pictures_are_drawn(folder, tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(evidence, "PLANNINGS", {"all branches": {"max_branches": None}})
    picture = tmp_path / "out.png"
    assert benchmark.main([*arguments, *small(folder, tmp_path), "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 5000


def test_a_missing_matplotlib_is_one_line_before_any_work(folder, tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(evidence, "load", lambda *_, **__: pytest.fail("nothing is loaded"))
    assert benchmark.main(["tpt", "--model", str(folder), "--plot", str(tmp_path / "out.png")]) == 2
    assert capsys.readouterr().err == "benchmark.py: --plot needs the package matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(("arguments", "reason"), [
    (["tpt", "--contexts", "128,20"], "more than the model's 160"), (["tpt", "--contexts", "0"], "whole number"),
    (["tpt", "--skip-sets", "1"], "of at least 2"), (["window", "--max-new-tokens", "2"], "of at least 3"),
    (["context", "--max-context", "8", "--max-new-tokens", "8"], "no room for 8 new tokens"),
    (["choices", "--contexts", "159"], "at most 64"), (["window", "--plot", "nowhere/out.png"], "--plot"),
])  # fmt: skip
def test_mistakes_are_one_line_and_status_2(folder, capsys, arguments, reason):
    assert benchmark.main([*arguments, "--model", str(folder)]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1

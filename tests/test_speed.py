"""The numbers to reach: rows that judge what was measured rightly, on a simulated machine and on figures put in."""

import importlib.util
import json

import pytest

from benchmark import methods, races, speed, steps
from benchmark.__main__ import main
from benchmark.bench import Bench, Row
from benchmark.planted import planted_items
from benchmark.results import Results
from benchmark.sweep import GAMMAS
from beyond.adaptive import KnapSpecPlus
from beyond.uniform import Uniform
from knapspec import KnapSpec
from loading import load
from tests.testing_benchmark import ABOUT, TOKENIZER, L, simulated, tiny_folder
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    tiny_config,
)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """bench(machine) -> a Bench on which every name is that machine, with the latencies it really has and no cheaper ways."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path / "cache"))

    def make(machine=None, **options):
        here = Bench(Results(ABOUT), planted=tmp_path, **{"limit": 1, "max_new_tokens": 24, "repeats": 1} | options)
        if machine:
            monkeypatch.setattr(here, "load", lambda name, dtype=None: (machine, TOKENIZER))
            for module in ("benchmark.methods", "benchmark.steps", "benchmark.sweep", "cli.methods"):
                monkeypatch.setattr(f"{module}.add_ways", lambda model, names=None, progress=False: [])
        return here

    return make


def found(**values):
    """What side_by_side() returns: method -> speed-ups, one for each prompt."""
    count = len(next(iter(values.values())))
    return {str(i): {"prompt_tokens": 9, "runs": [{"method": method, "speedup": of[i], "identical": True, "drafted": i} for method, of in values.items()]}
            for i in range(count)}  # fmt: skip


# --- Races -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "values", "met"), [
    ("prompts", {"knapspec+": [4.0, 1.5]}, True), ("prompts", {"knapspec+": [4.0, 1.4]}, False),
    ("prompts", {"knapspec+": [1.9, 1.9]}, False), ("short", {"knapspec+": [2.0, 1.0]}, True),
    ("split", {"knapspec+": [1.6, 1.5], "fixed": [1.7, 1.4]}, True), ("split", {"knapspec+": [1.6, 1.5], "fixed": [1.7, 1.8]}, False),
    ("soft", {races.FULL_SKIP: [0.5, 1.0], "fixed": [0.5, 1.0]}, True),
])  # fmt: skip
def test_a_race_is_held_against_what_is_wanted(monkeypatch, name, values, met):
    monkeypatch.setattr(races, "run_race", lambda bench, name: found(**values))
    row = races.against_plain(None, name)
    assert row.met == met and row.wanted.count("≥") == len([x for x in races.RACES[name][2:5] if x])
    assert "drafts in 1 of 2 runs" in row.measured


def test_the_floor_is_that_of_the_worst_text(monkeypatch):
    values = {"prompts": [1.0, 0.99], "short": [1.1, 0.97]}
    monkeypatch.setattr(races, "run_race", lambda bench, name: found(**{races.FULL_SKIP: values[name]}))
    row = races.skipping_alone(None)
    assert not row.met and "0.97× at least (short/1)" in row.measured


def test_where_no_draft_pays_the_race_says_so(monkeypatch, bench):
    latency = latency_model(4, per_token=1.0)
    machine = SimulatedMachine(random_model(tiny_config(n_layer=4)), latency, monkeypatch)
    row = races.against_plain(bench(machine), "prompts")
    assert row.met is False and "drafts in 0 of 1 runs" in row.measured
    (value,) = row.details["speedups"].values()
    assert 0.95 < value <= 1


def test_a_planted_model_is_held_against_the_best_fixed_plan(monkeypatch, bench):
    latency = latency_model(4, per_token=0.0)
    machine = SimulatedMachine(random_model(tiny_config(n_layer=4), faint=planted_items("split", 4)), latency, monkeypatch)
    here = bench(machine, max_new_tokens=96)
    row, best = races.against_plain(here, "split"), here.results.data["runs"]["sweep/split"]
    (value,) = row.details["speedups"].values()
    assert value > 1.1 < row.details["fixed"]
    assert row.met == (value >= 1.5 and value >= 0.95 * row.details["fixed"])
    assert best["skip_set"] and best["gamma"] in GAMMAS
    (prompt,) = row.details["speedups"]
    assert {run["method"] for run in here.results.data["runs"][f"split/{prompt}"]["runs"]} == {"knapspec+", races.FULL_SKIP, "fixed"}


def test_methods_are_the_planners_of_their_names(monkeypatch):
    for module in ("benchmark.methods", "cli.methods"):
        monkeypatch.setattr(f"{module}.add_ways", lambda *_, **__: ["half"])
    monkeypatch.setattr("cli.methods.latency_model", lambda *_, **__: latency_model(L))
    monkeypatch.setattr(methods, "fresh", lambda model, planner, options: planner)
    names = ["knapspec", "uniform", "knapspec+", races.FULL_SKIP]
    made = methods.make_methods(names, random_model(), None, [("a", [1])], {"max_new_tokens": 8})
    assert [type(planner) for planner in made.values()] == [KnapSpec, Uniform, KnapSpecPlus, KnapSpecPlus]
    assert "half" in made["knapspec+"].ways and "half" not in made[races.FULL_SKIP].ways
    assert "lookup" in made["knapspec+"].parts and not made[races.FULL_SKIP].parts & {"lookup", "ways"}


# --- Planning --------------------------------------------------------------------------------------------------------


def test_planning_and_alpha_are_told_from_the_races_runs(monkeypatch):
    run = {"method": "knapspec+", "seconds": {"plan": 0.04, "total": 1.0}, "expected": 7.0, "accepted": 6, "tried": 10}
    short = run | {"seconds": {"plan": 0.06, "total": 1.0}, "tried": 0}
    monkeypatch.setattr(races, "run_race", lambda bench, name: {"a": {"runs": [short if name == "short" else run]}})
    row = races.planning(None)
    assert not row.met and row.details == {"prompts": 0.04, "split": 0.04, "blocks": 0.04, "short": 0.06}
    row = races.alpha(None)
    assert not row.met and row.details["error"] == pytest.approx(0.1) and "in 3 runs" in row.measured


# --- Steps -----------------------------------------------------------------------------------------------------------


def test_steps_take_what_the_machine_says(monkeypatch, bench):
    latency = latency_model(L, per_token=0.2)
    here = bench(simulated(monkeypatch, latency=latency))
    row = steps.ROWS["verify"][1](here)
    ratio = latency.verify(256, 5) / latency.verify(256, 1)
    assert row.measured.startswith(f"5 tokens: {ratio:.2f} of") and row.met is False
    assert steps.ROWS["draft_step"][1](here).met is None  # no copies of the weights
    assert steps.ROWS["dtypes"][1](here).measured.startswith("float16: 1.00, bfloat16: 1.00 of") and steps.ROWS["dtypes"][1](here).met is None
    assert 0 < steps.profile(here).details["seconds"]


@pytest.mark.parametrize(("half", "int8", "met"), [(0.42, 0.33, True), (0.43, 0.3, False), (0.4, 0.34, False)])
def test_draft_steps_are_held_against_both_bounds(bench, half, int8, met):
    here = bench()
    here.results.once("steps", lambda: {"1 token": 1.0, "5 tokens": 1.4, "half": half, "int8": int8})
    assert steps.ROWS["draft_step"][1](here).met == met and steps.ROWS["verify"][1](here).met


def test_start_is_timed_up_to_the_first_byte(monkeypatch, bench, tmp_path):
    program = tmp_path / "python"
    monkeypatch.setattr(steps.sys, "executable", str(program))

    def says(commands):
        program.write_text(f"#!/bin/sh\n{commands}\n")
        program.chmod(0o755)

    says("sleep 0.2; echo text; sleep 60")
    row = steps.start(bench())
    assert 0.2 <= row.details["seconds"][0] < 30
    assert row.met == (row.details["seconds"][0] <= 3)
    says("echo no model >&2; exit 2")
    with pytest.raises(ValueError, match="prints nothing: no model"):
        steps.start(bench())


@pytest.mark.parametrize(("of_float32", "of_bfloat16", "met"), [(1.3, 1.15, True), (1.31, 1.0, False), (1.0, 1.16, False)])
def test_memory_is_held_against_both_bounds(bench, of_float32, of_bfloat16, met):
    here = bench()
    for dtype, ratio in ("float32", of_float32), ("bfloat16", of_bfloat16):
        here.results.once(f"memory/{dtype}", lambda ratio=ratio: {"added_bytes": 100 * ratio, "weights_bytes": 100})
    assert steps.memory(here).met == met


def test_memory_is_that_of_a_program_of_its_own(tmp_path_factory):
    told = steps.loading_bytes(tiny_folder(tmp_path_factory), "float32")
    assert told["added_bytes"] >= 0 and 5e4 < told["weights_bytes"] < 1e7


@pytest.mark.parametrize(("added", "stays", "met"), [(1115, 1000, True), (1116, 1000, False), (115, 0, True), (116, 0, False)])
def test_loading_files_is_held_against_the_largest(bench, added, stays, met):
    here = bench()
    here.results.once("shards", lambda: {"added_bytes": added, "stays_bytes": stays, "weights_bytes": 1000, "shard_bytes": 100})
    assert steps.shards(here).met == met


def test_the_big_checkpoint_loads(monkeypatch, tmp_path, tmp_path_factory):
    monkeypatch.setattr(steps, "default_model_folder", lambda: tiny_folder(tmp_path_factory))
    steps.write_big(tmp_path / "big", {"num_hidden_layers": 20})
    sizes = [path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors")]
    assert len(sizes) == steps.SHARDS and load(tmp_path / "big", progress=False)[0].config.n_layer == 20
    assert steps.loading_bytes(tmp_path / "big", "bfloat16")["weights_bytes"] == pytest.approx(sum(sizes), rel=0.2)


def test_transformers_is_not_needed(monkeypatch, bench):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    row = races.ROWS["transformers"][1](bench())
    assert (row.measured, row.met) == ("transformers is not installed", None)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("name", "wanted"), [("transformers", 1.7), ("prompt_lookup", 1.5)])
def test_transformers_says_the_same(monkeypatch, bench, tmp_path_factory, name, wanted):
    folder = tiny_folder(tmp_path_factory)
    monkeypatch.setattr("benchmark.bench.default_model_folder", lambda: folder)
    here = bench(limit=2, max_new_tokens=8)
    monkeypatch.setattr(Bench, "prompts", lambda *_: [("story-a", list(b"Once upon a time")), ("code-b", list(b"for i in range"))])
    row = races.ROWS[name][1](here)
    assert "the same text in 2 of 2 runs" in row.measured and set(row.details["kinds"]) == {"story", "code"}
    assert row.met == (min(row.details["kinds"].values()) >= wanted)


# --- The command line ------------------------------------------------------------------------------------------------


def test_interrupted_speed_keeps_what_it_measured(tmp_path, capsys, monkeypatch):
    def interrupted(bench):
        raise KeyboardInterrupt

    def says(text):
        return "the first", lambda bench: Row("1", bench.results.once("x", lambda: text), True, {})

    monkeypatch.setattr(speed, "ROWS", {"first": says("one"), "second": ("the second", interrupted)})
    path = tmp_path / "speed.json"
    assert main(["speed", "--json", str(path)]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    monkeypatch.setattr(speed, "ROWS", {"first": says("another")})
    assert main(["speed", "--json", str(path)]) == 0
    assert "one" in capsys.readouterr().out
    assert json.loads(path.read_text())["rows"]["first"]["measured"] == "one"


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--only", "split", "blocked"], "invalid choice: 'blocked'"), (["--json", "."], "not a file"),
])  # fmt: skip
def test_wrong_options_are_refused_before_any_work(arguments, reason, capsys):
    assert main(["speed", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1

"""compare: figures that are right, methods that keep the text, and a command line that says what is wrong."""

import importlib.util
import json
import re
import types

import pytest
import torch

from benchmark import compare
from benchmark.__main__ import main
from benchmark.compare import report, summary
from benchmark.methods import make_methods, race
from benchmark.planted import planted_items
from benchmark.runs import decode
from benchmark.theirs import THEIRS, make_theirs
from cli.methods import METHODS
from decoding import FixedPlanner, Plan, generate
from loading import load
from tests.testing_benchmark import (
    CONFIG,
    OPTIONS,
    PROMPTS,
    TOKENIZER,
    L,
    results,
    simulated,
    tiny_folder,
)
from tests.testing_models import latency_model, random_model

installed = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not installed, reason="transformers is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory)


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    """Profiles made here stay out of the user's folder."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(folder.parent / "cache"))


# --- Figures ---------------------------------------------------------------------------------------------------------


def compared(model):
    """What two fixed plans give: one that drafts what is accepted, one that skips nothing."""
    planners = {"good": FixedPlanner(Plan(planted_items("blocks", L), 3)), "bad": FixedPlanner(Plan(frozenset(), 3))}
    return race(results(), (), model, TOKENIZER, PROMPTS, repeats=1, planners=planners, **OPTIONS)


def test_a_row_tells_a_method_s_speedup_and_what_it_drafts(monkeypatch):
    latency = latency_model(L, attention_s=(1e-3, 0.0))
    found = compared(simulated(monkeypatch, latency=latency))
    good, bad = (summary(name, found) for name in ("good", "bad"))
    assert good["identical"] == bad["identical"] == [3, 3]
    assert good["tokens_per_second"] * latency.verify(0, 1) == pytest.approx(good["speedup"])
    assert good["speedup"] > 1.25 and bad["speedup"] < 1
    assert good["quartiles"] == pytest.approx([good["speedup"]] * 2)  # the simulated machine has no noise
    assert (good["acceptance_rate"], good["skipped_attention"], good["skipped_mlp"]) == (1.0, 4.0, 4.0)
    assert good["tokens_per_round"] == pytest.approx(16 / 4)
    assert (bad["skipped_attention"], bad["skipped_mlp"], bad["plan_share"], bad["search_s"]) == (0.0, 0.0, 0.0, None)


def test_the_report_has_a_column_for_each_figure(monkeypatch):
    found, kept = compared(simulated(monkeypatch)), results()
    kept.save(rows=[summary(name, found) for name in ("good", "bad")])
    lines = report(kept.data, found, L).splitlines()
    assert lines[0] == "### compare: tiny" and "context 20 to 39 tokens" in lines[2]
    cells = [re.split(r" *\| *", line) for line in lines if line.startswith("|")]
    assert len(cells) == 4 and {len(row) for row in cells} == {12} and len({len(line) for line in lines[4:8]}) == 1
    assert cells[2][1] == "good" and cells[2][4] == "100%" and cells[2][-2] == "yes"
    assert "Prompts: 3; repeats: 1; new tokens: up to 17, greedy." in lines[-1]


def test_search_while_decoding_counts_as_search_and_not_as_planning():
    run = {"method": "swift", "speedup": 1.0, "tokens_per_second": 3.0, "identical": True, "new_tokens": 31, "rounds": 10,
           "drafted": 0, "accepted": 0, "given": 0, "search_s": 2.0, "searched_s": 2.5,
           "seconds": {"plan": 3.0, "prefill": 1.0, "total": 11.0}}  # fmt: skip
    row = summary("swift", {"a": {"runs": [run]}})
    assert (row["search_s"], row["plan_share"], row["tokens_per_round"]) == (2.5, 0.1, 3.0)


# --- Methods ---------------------------------------------------------------------------------------------------------


def test_a_lasting_planner_goes_on_learning_and_its_search_is_told(monkeypatch):
    monkeypatch.setattr("benchmark.methods.make_planner", lambda name, *_, **__: (types.SimpleNamespace(search_s=3.0), None))
    monkeypatch.setattr("benchmark.methods.decode", lambda model, prompt_ids, planner, **options: planner)
    method = make_methods(["swift"], None, None, PROMPTS, OPTIONS, lasting=True)["swift"]
    assert method([1]) is method([2])
    model, planner = random_model(CONFIG), FixedPlanner(Plan())
    planner.search_s = 3.0  # before the first prompt
    run = decode(model, [1, 2], planner, **OPTIONS)
    assert (run["search_s"], run["searched_s"]) == (0.0, 3.0)


@needs_transformers
def test_transformers_rows_have_the_same_text(folder):
    model, tokenizer = load(folder, device="cpu", dtype=torch.float32, progress=False)
    ids = tokenizer.encode("Hello there. Hello there")
    methods = make_theirs(model, folder, list(THEIRS), OPTIONS | {"eos_ids": tokenizer.eos_ids})
    wanted = generate(model, ids, max_new_tokens=17, eos_ids=tokenizer.eos_ids).token_ids
    assert list(methods) == ["transformers", "transformers_early_exit", "transformers_prompt_lookup"]
    for method in methods.values():
        run = method(ids)
        assert run["token_ids"] == wanted and run["tokens_per_second"] > 0


# --- Command line ----------------------------------------------------------------------------------------------------


def test_compare_prints_a_table_writes_json_and_takes_it_up_again(folder, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n{"text": "You"}\n{"text": "third"}')
    path, names = tmp_path / "out.json", ["autoregressive", "layerskip", "knapspec", "knapspec+", "uniform"]
    command = ["compare", "--model", str(folder), "--methods", *names, "--limit", "2", "--max-new-tokens", "9",
               "--prompts", str(tmp_path / "p.jsonl"), "--json", str(path)]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr().out
    data = json.loads(path.read_text())
    assert [row["method"] for row in data["rows"]] == names
    assert all(row["identical"] == [2, 2] for row in data["rows"]) and shown.startswith("### compare: tiny")
    before = path.read_bytes()
    assert main(command) == 0
    assert capsys.readouterr().out == shown and path.read_bytes() == before
    assert main([*command, "--temperature", "0.5"]) == 2
    assert "was made with temperature 0.0, not 0.5" in capsys.readouterr().err


def test_sampled_comparison_does_not_speak_of_the_same_text(folder, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("Hello there")
    assert main(["compare", "--model", str(folder), "--methods", "layerskip", "--max-new-tokens", "9",
                 "--temperature", "0.7", "--top-p", "0.9", "--prompts", str(tmp_path / "p.txt")]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "temperature 0.7, top-p 0.9" in out and re.search(r"\| layerskip .*\| +– \|\n", out)


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--methods", "layerskip", "turbo"], "invalid choice: 'turbo'"), (["--limit", "0"], "whole number"),
    (["--prompts", "absent.jsonl"], "cannot read --prompts"), (["--json", "."], "is not a file"),
])  # fmt: skip
def test_mistakes_are_one_line_and_status_2(folder, capsys, arguments, reason):
    assert main(["compare", "--model", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_methods_whose_package_is_missing_are_left_out_by_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = compare.missing()
    assert absent["swift"] == absent["draft_verify"] == "bayes_opt" and absent["transformers"] == "transformers"
    assert compare.names_here() == [name for name in METHODS if name not in ("swift", "draft_verify")]

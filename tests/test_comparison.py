"""Comparisons: prompts in every form, runs that take turns, counts and ratios that are right, and runs that resume."""

import functools
import importlib.util
import json
import re

import pytest
import torch

from benchmark import commands as benchmark
from benchmark import comparison
from benchmark.comparison import (
    begin,
    compare,
    decode,
    make_rivals,
    paired,
    read_prompts,
    report,
    summary,
    table,
)
from benchmark.planted import planted_items
from decoding import FixedPlanner, Plan, Planner, generate
from knapspec import KnapSpec
from loading import load
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
PROMPTS = [(f"prompt {seed}", random_tokens(20 + seed, CONFIG, seed).tolist()) for seed in range(3)]
OPTIONS = {"max_new_tokens": 17, "temperature": 0.0, "top_p": 1.0, "seed": 0, "eos_ids": ()}
NO_SEARCH = {"search_s": 0.0, "progress": False}
ABOUT = {"model": "tiny", "planted": None, "machine": "none", "dtype": "float32", "torch": "0"}
SETTINGS = ABOUT | {"max_new_tokens": 17, "temperature": 0.0, "prompts": 3, "repeats": 1}
installed = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not installed, reason="transformers is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    """Profiles made here stay out of the user's folder."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(folder.parent / "cache"))


def simulated(monkeypatch, kind="blocks"):
    """A machine, and a model on it whose planted sublayers add nothing."""
    latency = latency_model(L, attention_s=(1e-3, 0.0))
    return SimulatedMachine(random_model(CONFIG, faint=planted_items(kind, L)), latency, monkeypatch), latency


# --- Prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_of_every_form(tmp_path):
    lines = [
        {"id": "a", "prompt": "one"}, {"text": "two\u2028lines"}, {"question_id": 81, "turns": ["three", "later"]},
        {"prompt": None, "text": " ", "turns": ["four"]},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", "utf-8-sig")
    assert read_prompts(path) == [("a", "one"), ("3", "two\u2028lines"), ("81", "three"), ("7", "four")]
    path = tmp_path / "plain.txt"
    path.write_text('{"prompt": "a plain text all the same"}\nof two lines', "utf-8")
    assert read_prompts(path) == [("plain.txt", '{"prompt": "a plain text all the same"}\nof two lines')]


@pytest.mark.parametrize(("content", "reason"), [
    (b"", "is empty"), (b"{}\n", "line 1 has no text"), (b'{"turns": []}', "has no text"), (b"[1]", "has no text"),
    (b'{"prompt": "x"}\nhello', "line 2 is not JSON"), (b"\xff", "not UTF-8"), (None, "cannot read"),
])  # fmt: skip
def test_prompts_that_cannot_be_read_are_one_line(tmp_path, content, reason):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)


# --- Runs that take turns --------------------------------------------------------------------------------------------


def take_turns(count, **options):
    """The order of the calls, and the runs; a run's token id is the number of its call, its rate grows with its name."""
    calls = []

    def run(name):
        calls.append(name)
        return {"token_ids": [len(calls)], "tokens_per_second": 1 + "-abcde".index(name)}

    others = {name: functools.partial(run, name) for name in "abcde"[:count]}
    runs = list(paired(functools.partial(run, "-"), others, **options))
    return "".join(calls), runs


def test_runs_take_turns():
    assert take_turns(3, repeats=2)[0] == "a-bc-" + "-cb-a"
    assert take_turns(2, repeats=1, backwards=True)[0] == "b-a"


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("backwards", [False, True])
def test_each_run_is_beside_its_plain_run_as_often_before_as_behind(count, backwards):
    _, runs = take_turns(count, repeats=4, backwards=backwards)
    assert sorted(run["method"] for run in runs) == sorted("abcde"[:count] * 4)
    for name in "abcde"[:count]:
        steps = [run["plain_ids"][0] - run["token_ids"][0] for run in runs if run["method"] == name]
        assert sorted(steps) == [-1, -1, 1, 1]
        assert {run["speedup"] for run in runs if run["method"] == name} == {1 + "-abcde".index(name)}


def test_a_run_of_one_token_has_no_speedup():
    plain, short = ({"token_ids": [1], "tokens_per_second": rate} for rate in (5.0, None))
    assert [run["speedup"] for run in paired(lambda: plain, {"a": lambda: short})] == [None]


# --- One run ---------------------------------------------------------------------------------------------------------


class Logged(FixedPlanner):
    """Keeps its rounds and ends a draft on odd tokens."""

    def __init__(self, plan):
        super().__init__(plan)
        self.rounds = []

    def keep_drafting(self, session, plan, confidences):
        return confidences[-1] > 0.5

    def observe(self, session, round):
        self.rounds.append(round)


def test_a_run_counts_what_was_drafted_accepted_and_skipped():
    model = random_model(CONFIG, faint=planted_items("blocks", L), epsilon=0.5)
    planner = Logged(Plan(planted_items("blocks", L) | {0}, 3))
    run = decode(model, PROMPTS[0][1], planner, max_new_tokens=60)
    assert run["token_ids"] == generate(model, PROMPTS[0][1], max_new_tokens=60).token_ids
    assert (run["new_tokens"], run["rounds"]) == (60, len(planner.rounds))
    assert 0 < run["accepted"] < run["drafted"] < 3 * run["rounds"]
    assert run["tried"] - run["accepted"] == sum(r.accepted < r.drafted for r in planner.rounds)  # one rejection in each
    assert (run["used"]["attention"]["skip"], run["used"]["mlp"]["skip"]) == (5 * run["drafted"], 4 * run["drafted"])


def test_a_recorded_planner_decides_as_it_does_alone(monkeypatch):
    model, latency = simulated(monkeypatch)
    alone = generate(model, PROMPTS[0][1], max_new_tokens=60, planner=KnapSpec(latency))
    run = decode(model, PROMPTS[0][1], KnapSpec(latency), max_new_tokens=60)
    assert run["drafted"] > 0
    assert [run[name] for name in ("token_ids", "rounds", "drafted", "accepted")] == [
        alone.token_ids, alone.rounds, alone.drafted, alone.accepted,
    ]  # fmt: skip


def test_sampled_runs_of_one_seed_are_the_same():
    sampled = {"max_new_tokens": 20, "temperature": 1.0}
    model = random_model(CONFIG)
    runs = [decode(model, PROMPTS[0][1], Planner(), seed=seed, **sampled)["token_ids"] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_rates_follow_the_prices_of_a_simulated_machine(monkeypatch):
    model, latency = simulated(monkeypatch)
    skip_set = planted_items("blocks", L)  # adds nothing: all drafts are accepted
    run = decode(model, PROMPTS[0][1], FixedPlanner(Plan(skip_set, 3)), max_new_tokens=41)
    assert (run["rounds"], run["drafted"], run["accepted"], run["tried"]) == (10, 30, 30, 30)
    assert run["tokens_per_second"] == pytest.approx(4 / (3 * latency.draft(skip_set, 0, L) + latency.verify(0, 4)))


# --- Comparing -------------------------------------------------------------------------------------------------------


def fixed_methods(model, calls):
    """Two fixed plans; calls collects what runs."""

    def method(name, planner, prompt_ids):
        calls.append((name, len(prompt_ids)))
        return decode(model, prompt_ids, planner, **OPTIONS)

    plans = {"good": Plan(planted_items("blocks", L), 3), "bad": Plan(frozenset(), 3)}
    return lambda state: {name: functools.partial(method, name, FixedPlanner(plan)) for name, plan in plans.items()}


def test_compare_tells_each_methods_speedup_and_share(monkeypatch):
    model, latency = simulated(monkeypatch)
    state = compare(model, PROMPTS, fixed_methods(model, []), begin(None, SETTINGS), options=OPTIONS)
    good, bad = state["rows"]
    plain = 1 / latency.verify(0, 1)
    assert [prompt["id"] for prompt in state["prompts"]] == ["prompt 0", "prompt 1", "prompt 2"]
    assert good["identical"] == bad["identical"] == [3, 3]
    assert good["tokens_per_second"] / plain == pytest.approx(good["speedup"])
    assert good["speedup"] > 1.25 and bad["speedup"] < 1
    assert good["quartiles"] == pytest.approx([good["speedup"]] * 2)  # the simulated machine has no noise
    assert (good["acceptance_rate"], good["skipped_attention"], good["skipped_mlp"]) == (1.0, 4.0, 4.0)
    assert good["tokens_per_round"] == pytest.approx(16 / 4)
    assert (bad["skipped_attention"], bad["skipped_mlp"], bad["plan_s"], bad["search_s"]) == (0.0, 0.0, 0.0, 0.0)


def test_text_that_differs_is_told(monkeypatch):
    model, _ = simulated(monkeypatch)

    def wrong(prompt_ids):
        run = decode(model, prompt_ids, Planner(), **OPTIONS)
        return run | {"token_ids": run["token_ids"][:-1] + [(run["token_ids"][-1] + 1) % CONFIG.vocab_size]}

    state = compare(model, PROMPTS[:2], lambda state: {"wrong": wrong}, begin(None, SETTINGS), options=OPTIONS)
    assert state["rows"][0]["identical"] == [0, 2]
    assert "from new token 17 on" in state["prompts"][0]["runs"][0]["difference"]
    assert " 0 of 2 |" in report("compare", state, L)


def test_an_interrupted_comparison_resumes_without_repeating_a_prompt(monkeypatch, tmp_path):
    model, _ = simulated(monkeypatch)
    whole = compare(model, PROMPTS, fixed_methods(model, []), begin(None, SETTINGS), options=OPTIONS)
    path, calls = tmp_path / "result.json", []
    methods = fixed_methods(model, calls)

    def interrupted(state):
        def stop(prompt_ids):
            if len(prompt_ids) == 21:  # the second prompt
                raise KeyboardInterrupt
            return methods(state)["bad"](prompt_ids)

        return methods(state) | {"bad": stop}

    with pytest.raises(KeyboardInterrupt):
        compare(model, PROMPTS, interrupted, begin(path, SETTINGS), options=OPTIONS, path=path)
    assert [prompt["id"] for prompt in json.loads(path.read_text())["prompts"]] == ["prompt 0"]
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    calls.clear()
    state = compare(model, PROMPTS, methods, begin(path, SETTINGS, resume=True), options=OPTIONS, path=path)
    assert sorted(calls) == [("bad", 21), ("bad", 22), ("good", 21), ("good", 22)]
    assert json.loads(path.read_text()) == state
    for row, expected in zip(state["rows"], whole["rows"], strict=True):
        assert row["speedup"] == pytest.approx(expected["speedup"]) and row["identical"] == expected["identical"]
    finished = begin(path, SETTINGS, resume=True)
    assert compare(model, PROMPTS, lambda state: pytest.fail("nothing is left"), finished, options=OPTIONS) == state


def test_a_file_of_other_settings_is_refused(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(begin(None, SETTINGS)))
    assert begin(path, dict(SETTINGS), resume=True)["settings"] == SETTINGS
    with pytest.raises(ValueError, match="was made with max_new_tokens 17, not 65"):
        begin(path, SETTINGS | {"max_new_tokens": 65}, resume=True)
    with pytest.raises(ValueError, match="was made with dtype float32, not bfloat16"):
        begin(path, SETTINGS | {"dtype": "bfloat16"}, resume=True)
    with pytest.raises(ValueError, match="exists: add --resume"):
        begin(path, SETTINGS)
    for content in ("", "[]", "{}", '{"settings": 3, "prompts": []}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="holds no comparison"):
            begin(path, SETTINGS, resume=True)


# --- Methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["split", "blocks"])
def test_rivals_keep_the_text_and_knapspec_gains(monkeypatch, kind):
    model, latency = simulated(monkeypatch, kind)
    names = ["autoregressive", "layerskip", "kangaroo", "del", "asd", "clasp", "knapspec"]
    options = OPTIONS | {"max_new_tokens": 64}  # enough for a planning to pay
    make = functools.partial(make_rivals, model, None, None, names, latency=lambda: latency, options=options, **NO_SEARCH)
    state = compare(model, PROMPTS[:1], make, begin(None, SETTINGS), options=options)
    rows = {row["method"]: row for row in state["rows"]}
    assert list(rows) == names
    assert all(row["identical"] == [1, 1] for row in rows.values())
    assert rows["autoregressive"]["speedup"] == pytest.approx(1) and "acceptance_rate" not in rows["autoregressive"]
    assert rows["knapspec"]["speedup"] == max(row["speedup"] for row in rows.values()) > 1.1


def test_draft_verify_takes_up_what_it_found_before_and_searches_only_once():
    state = begin(None, SETTINGS) | {"draft_verify": [2, 3], "search_s": {"draft_verify": 120.0}}
    model = random_model(CONFIG)
    methods = make_rivals(model, None, None, ["draft_verify"], state, latency=None, options=OPTIONS, **NO_SEARCH)
    run = methods["draft_verify"](PROMPTS[0][1])
    assert run["used"]["attention"]["skip"] == run["used"]["mlp"]["skip"] == run["drafted"] > 0
    run |= {"method": "draft_verify", "speedup": 1.0, "identical": True}
    state["prompts"] = [{"id": "a", "prompt_tokens": 20, "runs": [run]}]
    assert summary("draft_verify", state)["search_s"] == 120.0


def test_search_while_decoding_counts_as_search_and_not_as_planning():
    run = {"method": "swift", "speedup": 1.0, "tokens_per_second": 3.0, "identical": True, "new_tokens": 31, "rounds": 10,
           "drafted": 0, "accepted": 0, "search_s": 2.0,
           "seconds": {"plan": 3.0, "prefill": 1.0, "total": 11.0}}  # fmt: skip
    row = summary("swift", {"prompts": [{"runs": [run]}], "search_s": {"swift": 0.5}})
    assert (row["search_s"], row["plan_s"], row["plan_share"], row["tokens_per_round"]) == (2.5, 1.0, 0.1, 3.0)


@needs_transformers
def test_transformers_rows_have_the_same_text(folder):
    model, tokenizer = load(folder, device="cpu", dtype=torch.float32, progress=False)
    ids = tokenizer.encode("Hello there")
    options = OPTIONS | {"eos_ids": tokenizer.eos_ids}
    methods = make_rivals(model, tokenizer, folder, list(comparison.THEIRS), {}, latency=None, options=options, **NO_SEARCH)
    wanted = generate(model, ids, max_new_tokens=17, eos_ids=tokenizer.eos_ids).token_ids
    for method in methods.values():
        run = method(ids)
        assert run["token_ids"] == wanted and run["tokens_per_second"] > 0
    assert list(methods) == ["transformers", "transformers_early_exit"]


# --- The table -------------------------------------------------------------------------------------------------------


def test_table_is_markdown_and_lines_up():
    assert table(["name", "x"], [["a", 1.5], ["longer", None]]) == [
        "| name   |   x |",
        "| ------ | --: |",
        "| a      | 1.5 |",
        "| longer |   – |",
    ]


def test_report_says_what_was_measured_where(monkeypatch):
    model, _ = simulated(monkeypatch)
    planted = {"kind": "split", "epsilon": 0.02, "source": "real"}
    state = compare(model, PROMPTS, fixed_methods(model, []), begin(None, SETTINGS | {"planted": planted}), options=OPTIONS)
    state["date"] = "2026-01-31"
    lines = report("compare", state, L).splitlines()
    assert lines[0] == "### compare: tiny (planted: split, epsilon 0.02, from real)"
    assert lines[2] == "none, float32, torch 0; context 20 to 39 tokens; 2026-01-31"
    cells = [re.split(r" *\| *", line) for line in lines if line.startswith("|")]
    assert len(cells) == 4 and {len(row) for row in cells} == {12} and len({len(line) for line in lines[4:8]}) == 1
    assert cells[2][1] == "good" and cells[2][4] == "100%" and cells[2][-2] == "yes"
    assert "Prompts: 3; repeats: 1; new tokens: up to 17, greedy." in lines[-1]


# --- Command line ----------------------------------------------------------------------------------------------------


def test_compare_prints_a_table_writes_json_and_takes_it_up_again(folder, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n{"text": "You"}\n{"text": "third"}')
    path = tmp_path / "out.json"
    command = ["compare", "--model", str(folder), "--methods", "autoregressive,layerskip,knapspec", "--limit", "2",
               "--max-new-tokens", "9", "--prompts", str(tmp_path / "p.jsonl"), "--json", str(path), "--resume"]  # fmt: skip
    assert benchmark.main(command) == 0
    shown = capsys.readouterr().out
    state = json.loads(path.read_text())
    assert [row["method"] for row in state["rows"]] == ["autoregressive", "layerskip", "knapspec"]
    assert all(row["identical"] == [2, 2] for row in state["rows"]) and shown.startswith("### compare: tiny")
    before = path.read_bytes()
    assert benchmark.main(command) == 0
    assert capsys.readouterr().out == shown and path.read_bytes() == before
    assert benchmark.main(command[:-1]) == 2
    assert "add --resume" in capsys.readouterr().err
    assert benchmark.main([*command, "--temperature", "0.5"]) == 2
    assert "was made with temperature 0.0, not 0.5" in capsys.readouterr().err


def test_sampled_comparison_does_not_speak_of_the_same_text(folder, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("Hello there")
    assert benchmark.main(["compare", "--model", str(folder), "--methods", "layerskip", "--max-new-tokens", "9",
                           "--temperature", "0.7", "--top-p", "0.9", "--prompts", str(tmp_path / "p.txt")]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "temperature 0.7, top-p 0.9" in out and re.search(r"\| layerskip .*\| +– \|\n", out)


@pytest.mark.parametrize(("name", "variants"), [
    ("decouple", ["sublayers", "whole layers"]), ("cost", ["full price", "paper's price"]),
    ("stop", ["fixed", "confidence", "renewal"]),
])  # fmt: skip
def test_variants_of_knapspec_are_compared_alike(folder, tmp_path, capsys, name, variants):
    (tmp_path / "p.txt").write_text("Hello there")
    command = [name, "--model", str(folder), "--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "9", "--repeats", "2"]
    assert benchmark.main([*command, "--json", str(tmp_path / "out.json")]) == 0
    state = json.loads((tmp_path / "out.json").read_text())
    assert [row["method"] for row in state["rows"]] == variants
    assert all(row["identical"] == [2, 2] for row in state["rows"])


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--methods", "layerskip,turbo"], "'turbo' is none of knapspec"), (["--limit", "0"], "whole number"),
    (["--prompts", "absent.jsonl"], "cannot read --prompts"), (["--plot", "out.txt"], "--plot"),
    (["--json", "."], "is not a file"),
])  # fmt: skip
def test_mistakes_are_one_line_and_status_2(folder, capsys, arguments, reason):
    assert benchmark.main(["compare", "--model", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1

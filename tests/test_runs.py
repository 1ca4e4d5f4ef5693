"""Runs that take turns, counts and ratios that are right, prompts in every form, and results that resume."""

import copy
import functools
import json

import pytest

from benchmark.planted import planted_items
from benchmark.results import Results, heading, table
from benchmark.runs import (
    beside_plain,
    decode,
    median,
    other_texts,
    runs_of,
    side_by_side,
    speedups,
)
from benchmark.texts import (
    DOCUMENTS,
    SHORT,
    documents,
    own_prompts,
    read_prompts,
    running_text,
    spread,
)
from decoding import FixedPlanner, Plan, Planner, generate, prefill
from knapspec import KnapSpec
from loading import load
from tests.testing_benchmark import (
    ABOUT,
    CONFIG,
    LATENCY,
    OPTIONS,
    PROMPTS,
    TOKENIZER,
    L,
    results,
    simulated,
    tiny_folder,
)
from tests.testing_models import latency_model, prefilled, random_model

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
    (b"", "is empty"), (b"{}\n", "line 1 is no"), (b'{"turns": []}', "line 1 is no"), (b"[1]", "is no JSON object with a text"),
    (b'{"prompt": "x"}\nhello', "line 2 is no"), (b'{"turns": 3}', "line 1 is no"), (b"\xff", "utf-8"), (None, "cannot read"),
])  # fmt: skip
def test_prompts_that_cannot_be_read_are_one_line(tmp_path, content, reason):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)


def test_spread_takes_some_of_a_list():
    assert spread(list(range(9)), 3) == [1, 4, 7]
    assert spread([5], 3) == [5] and spread([], 3) == []
    assert spread([3, 1, 2], 3) == [3, 1, 2]


def test_the_project_s_prompts_have_distinct_ids_that_begin_with_their_kind():
    from rivals.draft_verify import PROMPTS as path

    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({line["id"] for line in lines}) == len(lines) == 24
    assert all(line.keys() == {"id", "kind", "prompt"} and line["prompt"].strip() for line in lines)
    assert all(line["id"].startswith(line["kind"] + "-") for line in lines)
    assert len(own_prompts(5, TOKENIZER, CONFIG)) == 5 and len(SHORT) == 6


def test_documents_are_cut_and_asked_about(tmp_path_factory):
    model, tokenizer = load(tiny_folder(tmp_path_factory), device="cpu", progress=False)
    prompts = documents(tokenizer, model.config)  # a context of 768: 256 tokens of each
    assert [name for name, _ in prompts] == list(DOCUMENTS)
    for name, ids in prompts:
        text = tokenizer.decode(ids)
        assert DOCUMENTS[name][1] in text and 200 < len(text) < 500 and len(ids) < 500
    assert {tokens for tokens, _ in DOCUMENTS.values()} > {4000, 6000, 7000}


def test_a_running_text_is_as_long_as_asked():
    assert running_text(["ab", "c"], TOKENIZER, 12) == (TOKENIZER.encode("ab\n\nc") * 3)[:12]


# --- Runs that take turns --------------------------------------------------------------------------------------------


@pytest.fixture
def take_turns(monkeypatch):
    """take_turns(count) -> the order of the calls, and the runs: each knows the number of its call, plain ones tell it as their rate."""

    def take(count, **options):
        calls = []

        def run(name, *_, **__):
            calls.append(name)
            return {"token_ids": [1], "call": len(calls), "tokens_per_second": len(calls) if name == "-" else 10.0}

        monkeypatch.setattr("benchmark.runs.decode", functools.partial(run, "-"))
        others = {name: functools.partial(run, name) for name in "abcde"[:count]}
        runs = list(beside_plain(None, [1], others, options={}, **options))
        return "".join(calls), runs

    return take


def test_runs_take_turns(take_turns):
    assert take_turns(3, repeats=2)[0] == "a-bc-" + "-cb-a"
    assert take_turns(2, repeats=1, backwards=True)[0] == "b-a"


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("backwards", [False, True])
def test_each_comes_as_often_before_as_behind(take_turns, count, backwards):
    _, runs = take_turns(count, repeats=4, backwards=backwards)
    assert sorted(run["method"] for run in runs) == sorted("abcde"[:count] * 4)
    for name in "abcde"[:count]:
        steps = [10.0 / run["speedup"] - run["call"] for run in runs if run["method"] == name]
        assert sorted(map(round, steps)) == [-1, -1, 1, 1]  # the plain run that it is held against is the one beside it


def test_a_run_of_one_token_has_no_speedup(monkeypatch):
    monkeypatch.setattr("benchmark.runs.decode", lambda *_, **__: {"token_ids": [1], "tokens_per_second": 5.0})
    short = {"token_ids": [1], "tokens_per_second": None}
    assert [run["speedup"] for run in beside_plain(None, [1], {"a": lambda _: dict(short)}, options={})] == [None]


def test_a_text_that_differs_is_told():
    model = random_model(CONFIG)

    def wrong(prompt_ids):
        run = decode(model, prompt_ids, Planner(), **OPTIONS)
        return run | {"token_ids": run["token_ids"][:-1] + [(run["token_ids"][-1] + 1) % CONFIG.vocab_size]}

    (run,) = beside_plain(model, PROMPTS[0][1], {"wrong": wrong}, options=OPTIONS)
    first, second = prefilled(model, PROMPTS[0][1] + decode(model, PROMPTS[0][1], Planner(), **OPTIONS)["token_ids"][:-1])[1][-1].topk(2).values
    assert run["identical"] is False and run["gap"] == pytest.approx(float(first - second), abs=1e-5)
    assert "token_ids" not in run
    runs = [run, {"identical": False, "gap": 9.0}, {"identical": True}]
    assert other_texts({"a": {"runs": runs}}) == ", ANOTHER TEXT in 2 runs: the two best logits are up to 9 apart where it begins"
    assert other_texts({"a": {"runs": [{"identical": True}, {}]}}) == ""


def test_a_prompt_s_forward_is_made_once_and_copied(monkeypatch):
    model, prompts, made = random_model(CONFIG), PROMPTS[:2], []
    monkeypatch.setattr("benchmark.runs.prefill", lambda session, tokens: made.append((session.wanted, tokens)) or prefill(session, tokens))
    planner = KnapSpec(LATENCY, threshold=0.0, interval=2)
    alone = {prompt_id: generate(model, ids, planner=copy.deepcopy(planner), max_new_tokens=17) for prompt_id, ids in prompts}

    def methods():
        return {"knapspec": lambda ids: decode(model, ids, copy.deepcopy(planner), **OPTIONS)}

    found = side_by_side(results(), model, prompts, methods, options=OPTIONS, repeats=2)
    once = [(wanted, ids) for _, ids in prompts for wanted in (planner.window, 0)]  # for those that look at states, and for plain decoding
    assert sorted(made) == sorted(once)
    for run in runs_of(found, "knapspec"):
        assert run["identical"]
    for prompt_id, generation in alone.items():
        assert [run["drafted"] for run in found[prompt_id]["runs"]] == [generation.drafted] * 2


def test_medians():
    assert median([3, None, 1, 2]) == 2 and median([None]) is None
    found = {name: {"runs": [{"method": "m", "speedup": value} for value in values]} for name, values in
             {"a": [1, 3, 2], "b": [None, 4], "c": [None]}.items()}  # fmt: skip
    assert speedups(found, "m") == {"a": 2, "b": 4}


# --- One run ---------------------------------------------------------------------------------------------------------


class Logged(FixedPlanner):
    """Keeps its rounds and ends a draft on tokens it is unsure of."""

    def __init__(self, plan):
        super().__init__(plan)
        self.rounds = []

    def keep_drafting(self, session, plan, confidences):
        return confidences[-1] > 0.5

    def observe(self, session, round):
        self.rounds.append(round)


def test_a_run_counts_what_was_drafted_accepted_and_skipped():
    model = random_model(CONFIG, faint=planted_items("blocks", L), epsilon=0.5)
    planner = Logged(Plan(planted_items("blocks", L) | {0}, 3, alpha=0.75))
    run = decode(model, PROMPTS[0][1], planner, max_new_tokens=60)
    assert run["token_ids"] == generate(model, PROMPTS[0][1], max_new_tokens=60).token_ids
    assert (run["new_tokens"], run["rounds"]) == (60, len(planner.rounds))
    assert 0 < run["accepted"] < run["drafted"] < 3 * run["rounds"]
    assert run["tried"] - run["accepted"] == sum(r.accepted < r.drafted for r in planner.rounds)  # one rejection in each
    assert run["expected"] == 0.75 * run["tried"]
    assert (run["skipped_attention"], run["skipped_mlp"]) == (5 * run["drafted"], 4 * run["drafted"])


def test_what_the_text_drafts_is_counted_apart():
    plan = Plan(frozenset({2}), gamma=2, tokens=(1, 2), alpha=0.5)
    run = decode(random_model(CONFIG), PROMPTS[0][1], FixedPlanner(plan), max_new_tokens=20)
    assert run["given"] == run["drafted"] > 0 and run["given_accepted"] == run["accepted"]
    assert run["skipped_attention"] == run["skipped_mlp"] == 0


def test_a_recorded_planner_decides_as_it_does_alone(monkeypatch):
    model = simulated(monkeypatch)
    alone = generate(model, PROMPTS[0][1], max_new_tokens=60, planner=KnapSpec(LATENCY))
    run = decode(model, PROMPTS[0][1], KnapSpec(LATENCY), max_new_tokens=60)
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
    latency = latency_model(L, attention_s=(1e-3, 0.0))
    model, skip_set = simulated(monkeypatch, latency=latency), planted_items("blocks", L)  # adds nothing: all drafts are accepted
    run = decode(model, PROMPTS[0][1], FixedPlanner(Plan(skip_set, 3)), max_new_tokens=41)
    assert (run["rounds"], run["drafted"], run["accepted"], run["tried"]) == (10, 30, 30, 30)
    assert run["tokens_per_second"] == pytest.approx(4 / (3 * latency.draft(skip_set, 0, L) + latency.verify(0, 4)))


# --- Results ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_measurement_resumes_without_repeating_a_prompt(monkeypatch, tmp_path):
    model, path, calls = simulated(monkeypatch), tmp_path / "result.json", []

    def method(prompt_ids):
        calls.append(len(prompt_ids))
        if calls == [20, 21]:  # the second prompt
            raise KeyboardInterrupt
        return decode(model, prompt_ids, FixedPlanner(Plan(planted_items("blocks", L), 3)), **OPTIONS)

    def measure(make_methods=lambda: {"good": method}):
        return side_by_side(Results(ABOUT, path), model, PROMPTS, make_methods, options=OPTIONS, key="text/")

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert list(json.loads(path.read_text())["runs"]) == ["text/prompt 0"]
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    found = measure()
    assert calls == [20, 21, 21, 22] and list(found) == [prompt_id for prompt_id, _ in PROMPTS]
    assert measure(lambda: pytest.fail("nothing is left")) == found
    assert set(speedups(found, "good")) == set(found) and min(speedups(found, "good").values()) > 1.25


def test_what_the_file_holds_is_not_measured_again(tmp_path):
    path, settings = tmp_path / "result.json", ABOUT | {"max_new_tokens": 17}
    assert Results(settings, path).once("a", lambda: {"x": (1, 2)}) == {"x": [1, 2]}
    assert Results(settings, path).once("a", lambda: 1 / 0) == {"x": [1, 2]}
    with pytest.raises(ValueError, match="was made with max_new_tokens 17, not 64"):
        Results(settings | {"max_new_tokens": 64}, path)
    with pytest.raises(ValueError, match="was made with extra None, not 1"):
        Results(settings | {"extra": 1}, path)
    for content in ("", "{", "[]", "{}", '{"settings": 3, "date": "", "runs": {}}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="name another file"):
            Results(settings, path)
    with pytest.raises(ValueError, match="not a file"):
        Results(settings, tmp_path)


def test_table_is_markdown_and_lines_up():
    assert table(["name", "x"], [["a", 1.5], ["longer", None]]) == [
        "| name   |   x |",
        "| ------ | --: |",
        "| a      | 1.5 |",
        "| longer |   – |",
    ]


def test_a_heading_says_what_was_measured_where():
    data = results().data | {"date": "2026-01-31"}
    data["settings"]["planted"] = {"kind": "split", "epsilon": 0.02, "source": "real"}
    lines = heading("compare", data, [39, 20])
    assert lines[0] == "### compare: tiny (planted: split, epsilon 0.02, from real)"
    assert lines[2] == "none, float32, torch 0, Python 3; context 20 to 39 tokens; 2026-01-31"
    of_machine = {"date": "2026-01-31", "settings": {"machine": "none", "torch": "0", "python": "3"}}
    assert heading("speed", of_machine)[0::2] == ["### speed", "none, torch 0, Python 3; 2026-01-31"]

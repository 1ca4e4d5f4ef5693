"""cli/trace.py and cli/explain.py: recording changes nothing, every token is told for what it was, and the numbers add up."""

import io
import sys

import pytest
import torch

from beyond.adaptive import KnapSpecPlus
from cli import explain, running
from cli.methods import METHODS
from cli.terminal import label
from cli.trace import KINDS, Trace, likeliest
from decoding import FixedPlanner, Plan, Planner, generate
from knapspec import KnapSpec, tokens_per_time
from model import KVCache
from tests.test_tokenizer import llama2_tokenizer, tokenizer_of
from tests.testing_cli import (
    FIXED,
    cache,
    folder,
    knapspec,
    own_cache,
)
from tests.testing_models import (
    Restless,
    SimulatedMachine,
    latency_model,
    random_model,
    tiny_config,
)

__all__ = ["cache", "folder", "knapspec", "own_cache"]  # fixtures

PROMPT = [8, 3, 1, 4, 1]


@pytest.fixture(scope="module")
def model():
    return random_model(tiny_config(n_layer=5), faint=range(2, 8), epsilon=0.2)


def traced(model, planner, **options):
    trace = Trace(planner, model)
    return trace, generate(trace.model, PROMPT, planner=trace, **options)


# --- The record ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda text: KnapSpecPlus(latency_model(5), interval=4), lambda text: KnapSpec(latency_model(5), interval=4),
    lambda text: Restless(0, gives=0.4, text=PROMPT + text), lambda text: Planner(),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recording_changes_nothing(model, monkeypatch, make, temperature):
    text = generate(model, PROMPT, max_new_tokens=60).token_ids
    options = {"max_new_tokens": 60, "temperature": temperature}
    machine = SimulatedMachine(model, latency_model(5), monkeypatch)
    alone = generate(machine, PROMPT, planner=make(text), **options)
    machine.now_s = 0.0
    trace, generation = traced(machine, make(text), **options)
    assert generation == alone  # tokens, plans and seconds, on a clock that recording does not move
    told = [token for tokens in trace.told(generation.token_ids) for token in tokens]
    assert [token.id for token in told if token.kind not in ("rejected", "unread")] == generation.token_ids
    assert sum(token.kind in ("accepted", "looked-up") for token in told) == generation.accepted
    assert sum(token.kind not in ("first", "correction", "bonus", "plain") for token in told) == generation.drafted
    assert len(trace.steps) == generation.rounds
    assert temperature or all(token.target[0][0] == token.id for token in told if token.kind not in ("rejected", "unread"))


def test_of_a_prompt_in_many_chunks_only_the_last_logits_are_kept(model):
    trace = Trace(Planner(), model)
    for token in PROMPT:
        trace.model(torch.tensor([token]), KVCache(model.config, 1))
    assert [tokens.item() for tokens, _ in trace.model.calls] == PROMPT[-1:]


class Script(Planner):
    """Gives these drafts, one a round, and then none."""

    def __init__(self, *drafts):
        self.drafts = [*drafts]

    def plan(self, session):
        tokens = self.drafts.pop(0) if self.drafts else ()
        return Plan(gamma=len(tokens), tokens=tuple(tokens))


def test_each_token_is_told_for_what_it_was(model):
    text = generate(model, PROMPT, max_new_tokens=12).token_ids
    wrong = (text[3] + 1) % model.config.vocab_size
    trace, generation = traced(model, Script([*text[1:3], wrong, 7, 7], text[4:6]), max_new_tokens=8)
    assert generation.token_ids == text[:8]
    assert [[(token.kind, token.id) for token in tokens] for tokens in trace.told(text[:8])] == [
        [("first", text[0])],
        [("looked-up", text[1]), ("looked-up", text[2]), ("rejected", wrong), ("unread", 7), ("unread", 7), ("correction", text[3])],
        [("looked-up", text[4]), ("looked-up", text[5]), ("bonus", text[6])],
        [("plain", text[7])],
    ]
    interrupted = trace.told(text[:3])  # before the correction was shown
    assert [token.kind for token in interrupted[1]] == ["looked-up", "looked-up", "rejected", "unread", "unread"]
    assert trace.told([]) == []


def test_drafts_behind_the_end_of_the_text_are_neither_accepted_nor_rejected(model):
    text = generate(model, PROMPT, max_new_tokens=12).token_ids
    end = next(i for i in range(2, 12) if text[i] not in text[:i])
    trace, generation = traced(model, Script(text[1 : end + 2]), max_new_tokens=12, eos_ids={text[end]})
    assert generation.token_ids == text[: end + 1]
    assert [token.kind for token in trace.told(generation.token_ids)[1]] == ["looked-up"] * end + ["unread"]


def test_the_likeliest_tokens_are_those_of_the_softmax(model):
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [0.0, 0.5, 5.0, 1.0]])
    probs = torch.softmax(logits, -1)
    assert [[i for i, _ in row] for row in likeliest(logits)] == [[1, 2, 0], [2, 3, 1]]
    assert [p for row in likeliest(logits) for _, p in row] == pytest.approx([p for row in probs for p in row.sort(descending=True).values[:3].tolist()])
    assert len(likeliest(logits[:, :2])[0]) == 2  # a vocabulary of two


def test_what_draft_and_target_held_likely_stands_beside_the_token_that_came(model):
    trace, generation = traced(model, FixedPlanner(Plan(frozenset({2, 4, 5}), 4)), max_new_tokens=40)
    tokens = [token for tokens in trace.told(generation.token_ids) for token in tokens]
    assert {"accepted", "rejected", "correction", "bonus"} < {token.kind for token in tokens}
    for token, after in zip(tokens, [*tokens[1:], None]):
        if token.kind in ("accepted", "first", "correction", "bonus"):
            assert token.target[0][0] == token.id
        if token.kind in ("accepted", "rejected", "unread"):
            assert token.draft[0][0] == token.id
        if token.kind == "rejected":
            assert token.target[0][0] != token.id
        if token.kind in ("first", "bonus"):
            assert token.draft == []
    rejected, corrections = ([token for token in tokens if token.kind == kind] for kind in ("rejected", "correction"))
    assert [(token.target, token.draft) for token in rejected] == [(token.target, token.draft) for token in corrections]


def test_the_decision_holds_what_the_knapsack_left_and_what_was_weighed(model):
    latency = latency_model(5)
    trace, _ = traced(model, planner := KnapSpec(latency, interval=4), max_new_tokens=40)
    decision, branches = trace.decision, {branch.skip_set: branch for branch in planner.branches if branch.skip_set}
    assert trace.solved > 1 and decision.position == trace.steps[4 * (trace.solved - 1)].round.position
    assert {draft.skip_set for draft in decision.drafts} == {*branches} != set()
    for draft in decision.drafts:
        branch = branches[draft.skip_set]
        assert (draft.weight, draft.cosine) == (branch.weight, branch.cosine)
    rate, gamma = decision.winner.best
    assert (rate, gamma, decision.winner.skip_set) == (planner.current.tokens_per_second, planner.current.gamma, planner.current.skip_set)
    assert rate == max(draft.best[0] for draft in decision.drafts)
    assert decision.weights == (planner.weights[0], planner.weights[1]) and decision.plain == decision.winner.rates[0]
    *_, alpha, draft_s = planner.weighed[0]
    assert decision.drafts[0].rates[2] == tokens_per_time(alpha, 2, draft_s, planner.verify_s[2])


def test_the_adaptive_planner_s_decision_holds_what_the_knapsack_left_too(model, monkeypatch):
    latency = latency_model(5)
    machine = SimulatedMachine(model, latency, monkeypatch)
    trace, _ = traced(machine, planner := KnapSpecPlus(latency, budget=0.9, without=("thrift", "lookup")), max_new_tokens=8)
    decision, branches = trace.decision, {branch.skip_set: branch for branch in planner.branches}
    assert trace.solved == 1 and decision.position == len(PROMPT) and decision.weights == tuple(planner.weights[:2])
    assert {draft.skip_set for draft in decision.drafts} == {skip_set for skip_set in branches if skip_set} != set()
    assert all((draft.weight, draft.cosine) == (branches[draft.skip_set].weight, branches[draft.skip_set].cosine) for draft in decision.drafts)


# --- The words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("draft_verify", "swift")])
def test_every_method_can_be_explained(knapspec, method):
    options = ["--method", method, "--max-new-tokens", "12"]
    status, out, err, result = knapspec(*options, "--explain")
    assert (status, out) == (0, result["text"] + "\n") and result["token_ids"] == knapspec(*options)[3]["token_ids"]
    words = err.split("\n\n")[-1]
    priced = method in ("knapspec+", "knapspec", "uniform")
    assert words.startswith("latencies with" if priced else "latencies: none") and ("chosen: " in words) == priced
    assert words.count("prompt: ^'") == 1


def test_a_decision_is_told_with_its_numbers(model):
    latency = latency_model(5, attention_s=(2e-3, 0.0))
    trace, generation = traced(model, KnapSpec(latency, budget=0.9), max_new_tokens=30)
    lines = [*explain.latency_lines(trace.decision, latency, 5), *explain.decision_lines(trace, latency)]
    assert "  full:    attention 2 ms, MLP 1 ms, head 0.1 ms; a draft token that skips nothing 15.1 ms" in lines
    assert "  verifying 1: 15.1 ms, 16: 19.6 ms (by the number of tokens)" in lines
    assert "  weights: skipping an attention saves 2, an MLP 1" in lines
    ((_, plan, _),) = generation.plans
    attention, mlp = sum(item % 2 == 0 for item in plan.skip_set), sum(item % 2 for item in plan.skip_set)
    (row,) = [line.split() for line in lines if line.startswith(" >")]
    assert row[1:4] == [str(2 * attention + mlp), str(attention), str(mlp)] and attention and mlp
    assert row[5:] == [f"{plan.alpha:.3f}", str(plan.gamma), f"{plan.tokens_per_second:.1f}", "full"]
    skipping, plain = f"full, skipping {attention} attention and {mlp} MLP, gamma {plan.gamma}", 1 / 15e-3
    assert f"chosen: {skipping}, {plan.tokens_per_second:.1f} tokens/s expected: {plan.tokens_per_second / plain:.2f} times plain decoding's 66.7" in lines
    rates = sorted(draft.best[0] for draft in trace.decision.drafts)
    assert lines[-1].startswith("  next best: full, skipping ") and lines[-1].endswith(f"{rates[-2]:.1f} tokens/s ({rates[-2] / rates[-1] - 1:+.1%})")


def test_plain_decoding_that_wins_is_told_with_the_draft_that_came_next(model):
    dear = latency_model(5, per_token=1.0)  # verifying costs as much as decoding one by one
    trace, _ = traced(model, KnapSpec(dear), max_new_tokens=4)
    trace.decision.plan = Plan(tokens_per_second=1.0)
    trace.decision.drafts[0].rates = [1.0, 1.02]
    for draft in trace.decision.drafts[1:]:
        draft.rates = [1.0, 0.5]
    chosen, other = explain.verdict(trace.decision, dear)
    assert chosen == "chosen: plain decoding, 1.0 tokens/s expected"
    assert other.endswith("gamma 1, 1.0 tokens/s (+2.0%, less than the margin asked of a draft)")


def test_where_one_draft_was_weighed_plain_decoding_is_the_next_best(model):
    trace, _ = traced(model, KnapSpec(latency_model(5), budget=0.9), max_new_tokens=4)
    trace.decision.drafts = [trace.decision.winner]
    plain = trace.decision.plain
    assert explain.verdict(trace.decision, None)[1].startswith(f"next best: plain decoding, {plain:.1f} tokens/s (-")


def test_a_planner_that_does_not_say_what_else_it_weighed_has_no_next_best(model):
    latency = latency_model(5, attention_s=(1e-3, 0.0))
    trace, _ = traced(model, FixedPlanner(Plan(frozenset({2}), 4, tokens_per_second=150.0)), max_new_tokens=4)
    plain = 1 / latency.verify(len(PROMPT), 1)
    assert explain.verdict(trace.decision, latency) == [
        f"chosen: full, skipping 1 attention and 0 MLP, gamma 4, 150.0 tokens/s expected: {150 / plain:.2f} times plain decoding's {plain:.1f}"]


def test_the_best_of_many_drafts_are_listed_by_what_they_save(model, monkeypatch):
    latency = latency_model(5)
    trace, _ = traced(model, KnapSpec(latency, budget=0.9), max_new_tokens=4)
    monkeypatch.setattr(explain, "ROWS", 3)
    rows = [line[2:].split() for line in explain.decision_lines(trace, latency)[2:5]]
    rates = sorted((draft.best[0] for draft in trace.decision.drafts), reverse=True)
    assert sorted((row[6] for row in rows), key=float, reverse=True) == [f"{rate:.1f}" for rate in rates[:3]]
    assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)
    assert f"  and {len(rates) - 3} with fewer tokens/s" in explain.decision_lines(trace, latency)


def test_plain_rounds_are_told_together_and_drafting_ones_apart(model, monkeypatch):
    text = generate(model, PROMPT, max_new_tokens=12).token_ids
    trace, generation = traced(model, Script((), (), text[3:5], text[6:8], (), ()), max_new_tokens=11)
    monkeypatch.setattr(explain, "label", lambda tokenizer, token_id: "a")
    heads = [line.partition(":")[0] for line in explain.round_lines(trace, None, generation.token_ids) if " at " in line]
    assert heads == ["  1-2 at 5, plain decoding", "  3 at 7, looked up", "  4 at 10, looked up", "  5-6 at 13, plain decoding"]


def test_plain_decoding_is_told_in_one_line_and_no_decision_as_such(knapspec):
    err = knapspec("--gamma", "0", "--max-new-tokens", "6", "--explain")[2]
    (line,) = [line for line in err.splitlines() if line.startswith("  1-5 at 31, plain decoding: |")]
    assert line.count(" |") == 5
    for count in ("0", "1"):
        assert "no round was needed" in knapspec("--max-new-tokens", count, "--explain", *FIXED)[2]


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize(("encoding", "environment", "expected"), [
    ("utf-8", {}, "\033[32m+' é'\033[0m"), ("utf-8", {"NO_COLOR": "1"}, "+' é'"), ("ascii", {"NO_COLOR": "1"}, "+' \\xe9'"), ("utf-8", {"TERM": "dumb"}, "+' é'"),
])  # fmt: skip
def test_colours_on_a_terminal_and_marks_everywhere(model, monkeypatch, encoding, environment, expected):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trace, generation = traced(model, FixedPlanner(Plan(frozenset(), 2)), max_new_tokens=6)
    monkeypatch.setattr(explain, "label", lambda tokenizer, token_id: " é")
    monkeypatch.setattr(sys, "stderr", Terminal(io.BytesIO(), encoding))
    lines = explain.round_lines(trace, None, generation.token_ids)
    assert f"  1 at 5, full, skipping nothing: {expected} " in "".join(lines)
    assert ("\033" in "".join(lines)) == ("\033" in expected)


def test_marks_and_colours_are_told_apart():
    assert len({mark for mark, _, _ in KINDS.values()}) == len({colour for _, colour, _ in KINDS.values()}) == len(KINDS)


def test_a_label_is_the_text_or_the_bytes_or_the_name(tmp_path):
    tokenizer = tokenizer_of(tmp_path)  # one token for each byte
    half, space, end = tokenizer.encode("é")[0], tokenizer.encode(" ")[0], 257
    assert [label(tokenizer, i) for i in (half, space, end, 999)] == ["<C3>", " ", "<|im_end|>", "token 999"]
    (tmp_path / "llama2").mkdir()
    tokenizer = tokenizer_of(tmp_path / "llama2", backend=llama2_tokenizer())
    names = "▁a", "b", "▁", "<0x0A>", "<0xE4>"
    assert [label(tokenizer, tokenizer.backend.token_to_id(name)) for name in names] == [" a", "b", " ", "\n", "<0xE4>"]


def test_ctrl_c_is_explained_as_far_as_it_went(knapspec, monkeypatch):
    class Interrupted(running.Printer):
        def __call__(self, token_id):
            super().__call__(token_id)
            if token_id != 1 and self.stream.shown and len(self.text) > 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(running, "Printer", Interrupted)
    status, _, err, result = knapspec("--max-new-tokens", "40", "--explain", *FIXED)
    assert status == 130 and result["stop_reason"] == "interrupted" and "round by round:" in err and "Traceback" not in err

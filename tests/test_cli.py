"""The command line, run as a user runs it, on a tiny random checkpoint.

Case -> test:
- end with what was printed and a report on Ctrl-C -> test_ctrl_c_keeps_what_was_printed, test_a_real_ctrl_c_...
- max_new_tokens 0, 1; negative -> test_exactly_as_many_tokens_as_asked_for, test_a_mistake_is_one_line_that_helps
- prompt longer than the context, or prompt + new tokens -> test_a_prompt_that_fills_the_context_is_refused,
  test_generation_is_shortened_at_the_end_of_the_context
- empty prompt, with and without a begin-of-text token -> test_an_empty_prompt_starts_from_the_begin_of_text_token
- no chat template and chat asked for -> test_without_a_chat_template_the_prompt_is_continued
- characters beyond ASCII: stream = final text -> test_what_is_printed_is_the_json_text, test_the_text_is_utf8_...
- the same seed in sampled plain and speculative decoding -> test_a_sampled_comparison_says_what_it_can
- NaN or infinite logits -> test_logits_that_are_not_finite_are_one_line
- speculation slower than plain decoding -> test_the_report_says_why_nothing_was_drafted
"""

import functools

import pytest
import torch

import cli
from beyond.adaptive import KnapSpecPlus
from cli import methods, report
from cli.methods import METHODS
from cli.options import VERSION, parse
from cli.running import compare
from decoding import Generation, Planner
from loading import load
from model import KVCache
from rivals import RIVALS
from tests.testing_cli import (
    FIXED,
    N_LAYER,
    cache,
    folder,
    knapspec,
    own_cache,
    write_model,
)
from tests.testing_models import latency_model

__all__ = ["cache", "folder", "knapspec", "own_cache"]  # fixtures

# --- What a run tells ------------------------------------------------------------------------------------------------


def test_what_is_printed_is_the_json_text(knapspec):
    whole = ""
    for seed in range(3):
        status, out, _, result = knapspec("--temperature", "3", "--seed", str(seed), "--max-new-tokens", "40", *FIXED)
        assert status == 0
        assert out == result["text"] + "\n"
        assert "\ufffd" not in out
        assert len(result["token_ids"]) == result["new_tokens"] > 5
        whole += out
    assert not whole.isascii()


def test_the_json_file_has_exactly_the_documented_fields(knapspec, folder):
    _, _, _, result = knapspec("--max-new-tokens", "20", "--compare")
    assert list(result) == [
        "model", "device", "dtype", "prompt_tokens", "new_tokens", "token_ids", "text", "stop_reason", "seconds",
        "tokens_per_second", "rounds", "drafted", "accepted", "acceptance_rate", "looked_up", "looked_up_accepted", "tokens_per_round",
        "latency", "plans",
        "baseline", "speedup", "identical",
    ]  # fmt: skip
    assert set(result["seconds"]) == {"load", "profile", "prefill", "plan", "draft", "verify", "total"}
    fields = {"position", "skip_set", "choices", "gamma", "alpha", "predicted_tokens_per_second", "seconds"}
    assert all(plan.keys() == fields for plan in result["plans"]) and result["plans"]
    assert set(result["baseline"]) == {"tokens_per_second", "token_ids"}
    assert result["model"] == str(folder) and result["dtype"] == "float32" and result["latency"]["mlp_s"] > 0
    assert result["prompt_tokens"] == len("user: Why is the sky blue?\nbot:")


def test_rates_and_shares_follow_from_the_counts(knapspec):
    _, _, err, result = knapspec("--max-new-tokens", "40", *FIXED)
    seconds = result["seconds"]
    assert result["tokens_per_second"] == pytest.approx((result["new_tokens"] - 1) / (seconds["total"] - seconds["prefill"]))
    assert result["tokens_per_round"] == pytest.approx((result["new_tokens"] - 1) / result["rounds"])
    assert result["acceptance_rate"] == pytest.approx(result["accepted"] / result["drafted"])
    assert result["latency"] is None  # a fixed plan needs no profile
    assert f"{result['accepted']} of {result['drafted']} drafted tokens accepted" in err


def test_the_report_draws_the_plan_in_use(knapspec):
    _, _, err, result = knapspec("--max-new-tokens", "20", *FIXED)
    (plan,) = result["plans"]
    assert (plan["position"], plan["skip_set"], plan["gamma"], plan["alpha"]) == (31, [2, 3, 6], 3, 1.0)
    assert plan["predicted_tokens_per_second"] is None and plan["seconds"] >= 0
    assert "  attention █░█░█\n  MLP       █░███\n" in err


@pytest.mark.parametrize(("options", "told"), [
    (["--method", "knapspec"], "plain decoding: no draft promised to be faster"),
    (["--choices", "full,skip"], "plain decoding: no gain was in sight that would have paid for solving the knapsack"),
    (["--method", "autoregressive"], "plain decoding: no draft was made"),
    (["--max-new-tokens", "1"], "no plan was made: plans are for the tokens after the first"),
    (["--max-new-tokens", "0", "--method", "layerskip"], "no plan was made: plans are for the tokens after the first"),
])  # fmt: skip
def test_the_report_says_why_nothing_was_drafted(knapspec, monkeypatch, options, told):
    dear = latency_model(N_LAYER, per_token=1.0)  # verifying costs as much as decoding one by one
    monkeypatch.setattr(methods, "latency_model", lambda *args, **options: dear)
    status, _, err, result = knapspec("--max-new-tokens", "20", *options)
    assert status == 0 and told in err.splitlines()
    assert result["drafted"] == 0 and result["acceptance_rate"] is None and result["tokens_per_round"] in (1, None)


def test_a_knapsack_that_was_solved_in_vain_is_no_draft_that_promised_to_be_faster():
    planner = KnapSpecPlus(latency_model(3))
    for planned_s, told in [(0.0, "solving the knapsack"), (0.1, "promised to be faster")]:
        planner.planned_s = planned_s
        (line,) = report.plan_lines("knapspec+", 3, {"plans": [{"gamma": 0}], "looked_up": 0}, planner)
        assert line.startswith("plain decoding: ") and told in line


def test_the_report_says_when_drafting_ended():
    plans = [{"skip_set": [2], "choices": None, "gamma": 2, "predicted_tokens_per_second": 5.0}, {"gamma": 0}]
    lines = report.plan_lines("knapspec+", 3, {"plans": plans, "looked_up": 0})
    assert lines[0].startswith("plan: skip 1 of 6 sublayers") and "5.0 tokens/s expected" in lines[0]
    assert "at the end plain decoding was expected to be faster" in lines[-1]


def test_quiet_prints_the_text_and_nothing_else(knapspec):
    status, out, err, result = knapspec("--quiet", "--compare", "--max-new-tokens", "10")
    assert (status, out, err) == (0, result["text"] + "\n", "")


def test_version_and_help_end_with_status_0(capsys):
    for option, start in [("--version", f"knapspec {VERSION}"), ("--help", "usage: knapspec.py")]:
        with pytest.raises(SystemExit) as exit:
            cli.main([option])
        assert exit.value.code == 0
        assert capsys.readouterr().out.startswith(start)


# --- Comparison ------------------------------------------------------------------------------------------------------


def test_a_greedy_comparison_finds_the_same_token_ids(knapspec):
    _, _, err, result = knapspec("--compare", "--max-new-tokens", "24", *FIXED)
    assert result["identical"] is True
    assert result["baseline"]["token_ids"] == result["token_ids"]
    assert 0 < result["drafted"] > result["accepted"]
    assert result["speedup"] > 0 and result["baseline"]["tokens_per_second"] > 0
    assert "token ids: the same" in err and f"speed-up {result['speedup']:.2f}" in err


def test_a_sampled_comparison_says_what_it_can(knapspec):
    _, _, err, result = knapspec("--compare", "--max-new-tokens", "20", "--temperature", "0.9", *FIXED)
    assert result["identical"] is None
    assert "same distribution, not the same text" in err


def run_of(seconds, count, prefill_s=5.0):
    generation = Generation(token_ids=list(range(count)))
    generation.seconds |= {"prefill": prefill_s, "total": prefill_s + seconds}
    return generation


def test_the_speed_up_counts_two_silent_runs_of_each_in_turn(folder):
    model, _ = load(folder, progress=False)
    planners, fresh = [], "a new planner"
    runs = iter([run_of(4, 11), run_of(1, 11), run_of(3, 11), run_of(6, 11, prefill_s=50.0)])

    def decode(planner):
        planners.append(planner)
        return next(runs)

    args = parse(["--prompt", "", "--quiet"])
    result, _ = compare(args, model, [5, 6], run_of(100, 11), decode, fresh)
    assert planners == [None, fresh, fresh, None]
    assert result["speedup"] == pytest.approx((4 + 6) / (1 + 3))
    assert result["baseline"]["tokens_per_second"] == pytest.approx(20 / 10)
    assert result["identical"] is True


def test_a_difference_is_told_with_its_place_and_the_gap_there(folder):
    model, _ = load(folder, progress=False)
    runs = iter([run_of(1, 4), run_of(1, 4), run_of(1, 4), run_of(1, 4)])
    shown = run_of(1, 4)
    shown.token_ids = [0, 1, 9, 3]
    result, lines = compare(parse(["--prompt", "", "--quiet"]), model, [5, 6], shown, lambda planner: next(runs), None)
    first, second = model(torch.tensor([5, 6, 0, 1]), KVCache(model.config, 4), last=1)[0].topk(2).values
    assert result["identical"] is False
    assert lines[-1] == f"  token ids: different from new token 3 on, where the target's two best logits are {first - second:.2g} apart"


def test_a_run_too_short_for_a_rate_has_none(knapspec):
    for count in (0, 1):
        _, _, err, result = knapspec("--compare", "--max-new-tokens", str(count))
        assert (result["tokens_per_second"], result["speedup"], result["tokens_per_round"]) == (None, None, None)
        assert result["identical"] is True and "too short for a rate" in err


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("autoregressive", "draft_verify")])
def test_every_method_gives_the_text_of_plain_decoding(knapspec, method):
    if method == "swift":
        pytest.importorskip("bayes_opt")
    options = ["--max-new-tokens", "24"]
    expected = knapspec("--method", "autoregressive", *options)[3]["token_ids"]
    bounded = ["--gamma-max", "3"] if method != "uniform" else []
    status, _, _, result = knapspec("--method", method, *options, *bounded)
    assert status == 0 and result["token_ids"] == expected
    assert not bounded or all(plan["gamma"] <= 3 for plan in result["plans"])


def test_the_methods_are_those_that_there_are():
    assert tuple(METHODS) == ("knapspec+", "knapspec", "uniform", "autoregressive", *RIVALS)


@pytest.mark.parametrize("method, kind", [("knapspec", "KnapSpec"), ("knapspec+", "KnapSpecPlus")])
def test_options_of_the_planner_arrive_and_the_others_keep_its_defaults(knapspec, monkeypatch, method, kind):
    planners = []

    make = getattr(methods, kind).__init__

    @functools.wraps(make)
    def seen(self, latency, **given):
        planners.append((latency, given))
        make(self, latency, **given)

    monkeypatch.setattr(getattr(methods, kind), "__init__", seen)
    knapspec("--max-new-tokens", "2", "--method", method, "--gamma-max", "3", "--window", "4", "--tau", "0.9", "--budget", "0.25", "--interval", "16")
    latency, given = planners[0]
    assert {"gamma_max": 3, "window": 4, "tau": 0.9, "budget": 0.25, "interval": 16}.items() <= given.items()
    assert [k for k, *_ in latency.verify_s] == [1, 4]


@pytest.mark.parametrize("choices, ways, without", [
    ("full,skip", [], ("lookup",)), ("full,skip,lookup", [], ()), ("full,skip,window,lookup", ["window"], ()),
])  # fmt: skip
def test_choices_are_what_may_be_drafted_with(knapspec, monkeypatch, choices, ways, without):
    planners = []
    monkeypatch.setattr(methods, "KnapSpecPlus", lambda latency, **given: planners.append(given) or Planner())
    knapspec("--max-new-tokens", "2", "--choices", choices)
    assert planners == [{"ways": ways, "without": without}]


def test_the_same_seed_gives_the_same_text_and_another_another(knapspec):
    options = ["--temperature", "0.8", "--top-p", "0.9", *FIXED, "--max-new-tokens", "30", "--seed"]
    first, again, other = (knapspec(*options, seed)[3]["token_ids"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_exactly_as_many_tokens_as_asked_for(knapspec):
    for count in (0, 1, 2, 7):
        status, out, _, result = knapspec("--max-new-tokens", str(count), *FIXED)
        assert (status, len(result["token_ids"]), result["stop_reason"]) == (0, count, "length")
        assert out == result["text"] + "\n"


def test_the_prompt_can_come_from_a_file(knapspec, tmp_path):
    expected = knapspec("--max-new-tokens", "5")[3]
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfWhy is the sky blue?")  # a byte-order mark is no text
    assert knapspec("--max-new-tokens", "5", prompt=("--prompt-file", str(path)))[3]["token_ids"] == expected["token_ids"]


def test_system_and_raw_change_what_the_model_reads(knapspec):
    count = len("Why is the sky blue?")
    assert knapspec("--raw", "--max-new-tokens", "1")[3]["prompt_tokens"] == count
    assert knapspec("--system", "Hm", "--max-new-tokens", "1")[3]["prompt_tokens"] == count + len("system: Hm\nuser: \nbot:")


def test_without_a_chat_template_the_prompt_is_continued(knapspec, tmp_path):
    model = write_model(tmp_path / "base", template=False)
    assert knapspec("--max-new-tokens", "1", model=model)[3]["prompt_tokens"] == len("Why is the sky blue?")
    status, _, err, _ = knapspec("--system", "Be kind.", model=model)
    assert status == 2 and "no chat template" in err and err.count("\n") == 1


def test_an_empty_prompt_starts_from_the_begin_of_text_token(knapspec, tmp_path):
    status, _, _, result = knapspec("--raw", "--max-new-tokens", "5", prompt=("--prompt", ""))
    assert (status, result["prompt_tokens"], result["new_tokens"]) == (0, 1, 5)
    status, out, err, _ = knapspec("--raw", model=write_model(tmp_path / "no-bos", bos=False), prompt=("--prompt", ""))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "begin-of-text" in err


def test_a_prompt_that_fills_the_context_is_refused(knapspec, monkeypatch):
    monkeypatch.setattr(methods, "latency_model", None)  # no profiling before that
    status, out, err, _ = knapspec("--raw", prompt=("--prompt", "a" * 160))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "160 tokens" in err and "159" in err


def test_generation_is_shortened_at_the_end_of_the_context(knapspec):
    status, _, err, result = knapspec("--raw", "--max-new-tokens", "50", prompt=("--prompt", "a" * 150))
    assert (status, result["new_tokens"], result["stop_reason"]) == (0, 10, "context")
    assert "shortened: the model's context of 160 tokens is full" in err

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
- speculation slower than plain decoding -> test_the_report_says_when_no_draft_pays
"""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from cli import cli
from decoding import Generation, Plan
from loading import load
from loading.config import read_config
from model import Transformer
from rivals import RIVALS
from tests.testing_models import latency_model

FOLDER = Path(__file__).parent.parent
N_LAYER = 5
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}bot:"
FIXED = ["--skip", "2,3,6", "--gamma", "3"]


def write_model(folder, *, bos=True, eos=True, template=True, max_position=160, nan=False):
    """A random Llama of N_LAYER layers; its byte-level tokenizer knows ASCII and, to print them only, longer characters."""
    characters = [chr(i) for i in range(32, 127)] + ["\n", "é", "中", "🙂"]
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [byte_level.pre_tokenize_str(c)[0][0] for c in characters]
    special = ["<s>", "</s>"]
    vocabulary = {piece: i for i, piece in enumerate(special + pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = byte_level, tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocabulary), "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": N_LAYER, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": max_position, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    config |= {"bos_token_id": 0} if bos else {}
    config |= {"eos_token_id": 1} if eos else {}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE} if template else {}))
    with torch.device("meta"):
        shapes = Transformer(read_config(config)).state_dict()
    rng = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(t.shape, generator=rng) * 0.3 + n.endswith("norm.weight") for n, t in shapes.items()}
    if nan:
        weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, cache):
    monkeypatch.setenv("KNAPSPEC_CACHE", str(cache))


@pytest.fixture
def knapspec(folder, capfd, tmp_path):
    """knapspec(*options) runs the command line -> (status, standard output, standard error, the JSON file's content)."""

    def run(*options, model=folder, prompt=("--prompt", "Why is the sky blue?")):
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        status = cli.main(["--model", str(model), *prompt, "--json", str(path), *options])
        out, err = capfd.readouterr()
        return status, out, err, json.loads(path.read_text("utf-8")) if path.exists() else None

    return run


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
        "tokens_per_second", "rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round", "latency", "plans",
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


def test_the_report_says_when_no_draft_pays(knapspec, monkeypatch):
    dear = latency_model(N_LAYER, per_token=1.0)  # verifying costs as much as decoding one by one
    monkeypatch.setattr(cli, "latency_model", lambda *args, **options: dear)
    _, _, err, result = knapspec("--max-new-tokens", "20")
    assert result["drafted"] == 0 and result["acceptance_rate"] is None and result["tokens_per_round"] == 1
    assert "plain decoding: the planner chose not to draft" in err
    _, _, err, _ = knapspec("--max-new-tokens", "20", "--method", "autoregressive")
    assert "plain decoding: no draft was made" in err


def test_the_report_says_when_drafting_ended():
    plans = [{"skip_set": [2], "choices": None, "gamma": 2, "predicted_tokens_per_second": 5.0}, {"gamma": 0}]
    lines = cli.plan_lines(cli.parse(["--prompt", ""]), 3, plans)
    assert lines[0].startswith("plan: skip 1 of 6 sublayers") and "5.0 tokens/s expected" in lines[0]
    assert "at the end the planner chose not to draft" in lines[-1]


def test_quiet_prints_the_text_and_nothing_else(knapspec):
    status, out, err, result = knapspec("--quiet", "--compare", "--max-new-tokens", "10")
    assert (status, out, err) == (0, result["text"] + "\n", "")


def test_version_and_help_end_with_status_0(capsys):
    for option, start in [("--version", f"knapspec {cli.VERSION}"), ("--help", "usage: knapspec.py")]:
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
    planners, fresh = [], object()
    runs = iter([run_of(4, 11), run_of(1, 11), run_of(3, 11), run_of(6, 11, prefill_s=50.0)])

    def decode(planner):
        planners.append(planner)
        return next(runs)

    args = cli.parse(["--prompt", "", "--quiet"])
    result, _ = cli.compare(args, model, [5, 6], run_of(100, 11), decode, fresh)
    assert planners == [None, fresh, fresh, None]
    assert result["speedup"] == pytest.approx((4 + 6) / (1 + 3))
    assert result["baseline"]["tokens_per_second"] == pytest.approx(20 / 10)
    assert result["identical"] is True


def test_a_difference_is_told_with_its_place_and_the_gap_there(folder):
    model, _ = load(folder, progress=False)
    runs = iter([run_of(1, 4), run_of(1, 4), run_of(1, 4), run_of(1, 4)])
    shown = run_of(1, 4)
    shown.token_ids = [0, 1, 9, 3]
    result, lines = cli.compare(cli.parse(["--prompt", "", "--quiet"]), model, [5, 6], shown, lambda planner: next(runs), None)
    first, second = model(torch.tensor([5, 6, 0, 1]), cli.KVCache(model.config, 4), last=1)[0].topk(2).values
    assert result["identical"] is False
    assert lines[-1] == f"  token ids: different from new token 3 on, where the target's two best logits are {first - second:.2g} apart"


def test_a_run_too_short_for_a_rate_has_none(knapspec):
    for count in (0, 1):
        _, _, err, result = knapspec("--compare", "--max-new-tokens", str(count))
        assert (result["tokens_per_second"], result["speedup"], result["tokens_per_round"]) == (None, None, None)
        assert result["identical"] is True and "too short for a rate" in err


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in cli.METHODS if m not in ("autoregressive", "draft_verify")])
def test_every_method_gives_the_text_of_plain_decoding(knapspec, method):
    if method == "swift":
        pytest.importorskip("bayes_opt")
    options = ["--max-new-tokens", "24"]
    expected = knapspec("--method", "autoregressive", *options)[3]["token_ids"]
    status, _, _, result = knapspec("--method", method, *options, "--gamma-max", "3")
    assert status == 0 and result["token_ids"] == expected
    assert all(plan["gamma"] <= 3 for plan in result["plans"])


def test_the_methods_are_those_that_there_are():
    assert set(cli.METHODS) == {"knapspec", "autoregressive", *RIVALS}


def test_options_of_the_planner_arrive_and_the_others_keep_its_defaults(knapspec, monkeypatch):
    planners = []
    monkeypatch.setattr(cli, "KnapSpec", lambda latency, **given: planners.append((latency, given)) or cli.Planner())
    knapspec("--max-new-tokens", "2", "--gamma-max", "3", "--window", "4", "--tau", "0.9", "--budget", "0.25", "--interval", "16")
    knapspec("--max-new-tokens", "2", "--choices", "full,skip")
    (latency, given), (_, none) = planners
    assert given | {"choices": None} == {"gamma_max": 3, "window": 4, "tau": 0.9, "budget": 0.25, "interval": 16, "choices": None}
    assert none == {"choices": ["full", "skip"]}
    assert [k for k, *_ in latency.verify_s] == [1, 2, 3, 4]


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
    monkeypatch.setattr(cli, "latency_model", None)  # no profiling before that
    status, out, err, _ = knapspec("--raw", prompt=("--prompt", "a" * 160))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "160 tokens" in err and "159" in err


def test_generation_is_shortened_at_the_end_of_the_context(knapspec):
    status, _, err, result = knapspec("--raw", "--max-new-tokens", "50", prompt=("--prompt", "a" * 150))
    assert (status, result["new_tokens"], result["stop_reason"]) == (0, 10, "context")
    assert "shortened: the model's context of 160 tokens is full" in err


# --- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    (["--max-new-tokens", "-1"], "of at least 0"), (["--max-new-tokens", "1.5"], "whole number"),
    (["--temperature", "-0.1"], "of at least 0"), (["--temperature", "nan"], "of at least 0"), (["--temperature", "inf"], "'inf'"),
    (["--top-p", "1.1"], "from 0 to 1"), (["--top-p", "-0.1"], "from 0 to 1"), (["--top-p", "x"], "from 0 to 1"),
    (["--tau", "1.5"], "from -1 to 1"), (["--budget", "-0.1"], "from 0 to 1"), (["--budget", "nan"], "from 0 to 1"),
    (["--gamma-max", "-1"], "from 0 to 64"), (["--window", "0"], "from 1 to 4096"), (["--interval", "0"], "of at least 1"),
    (["--seed", "-1"], "from 0 to"), (["--method", "magic"], "layerskip"), (["--choices", "full,int4"], "full,skip"), (["--choices", "skip"], "full,skip"),
    (["--choices", "full,skip", "--gamma", "1"], "drop one"),
    (["--skip", "1,x", "--gamma", "1"], "such as 20,21,24"), (["--skip", "10", "--gamma", "1"], "from 0 to 9"),
    (["--skip", "-1,2", "--gamma", "1"], "--skip"), (["--skip", "2"], "--gamma"), (["--gamma", "2", "--method", "swift"], "drop one"),
    (["--tau", "0.5", "--method", "swift"], "drop one"), (["--gamma-max", "2", "--gamma", "2"], "drop one"),
    (["--raw", "--system", "x"], "drop one"), (["--colour"], "--help"), (["--device", "cuda:99"], "--device cpu"),
    (["--dtype", "int8"], "float32"), (["--max"], "--help"), (["--prompt-file", "x"], "--prompt"),
    (["--json", "/no/such/folder/out.json"], "--json"), (["--json", "."], "--json"),
])  # fmt: skip
def test_a_mistake_is_one_line_that_helps(knapspec, options, words):
    status, out, err, result = knapspec(*options)
    assert (status, out, err.count("\n"), result) == (2, "", 1, None), err
    assert err.startswith("knapspec.py: ") and words in err


@pytest.mark.parametrize(("prompt", "words"), [
    ((), "--prompt"), (("--prompt-file", "absent.txt"), "absent.txt"), (("--prompt-file", "."), "cannot read"),
    (("--prompt-file", "latin1.txt"), "not UTF-8"), (("--prompt", "half \udce4"), "UTF-8"),
])  # fmt: skip
def test_a_prompt_that_cannot_be_read_is_one_line(knapspec, tmp_path, monkeypatch, prompt, words):
    monkeypatch.chdir(tmp_path)
    Path("latin1.txt").write_bytes("Grüße".encode("latin-1"))
    status, out, err, _ = knapspec(prompt=prompt)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert words in err


def test_an_unknown_model_is_one_line(knapspec, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in (tmp_path / "absent", tmp_path):
        status, out, err, _ = knapspec(model=model)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert str(model) in err


def test_logits_that_are_not_finite_are_one_line(knapspec, tmp_path):
    status, _, err, result = knapspec("--gamma", "0", model=write_model(tmp_path / "nan", nan=True))
    assert (status, err.count("\n"), result) == (2, 1, None)
    assert "not finite" in err


def test_too_little_memory_is_one_line_and_a_bug_is_none(knapspec, monkeypatch):
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
                  RuntimeError("DefaultCPUAllocator: can't allocate memory")):  # fmt: skip
        monkeypatch.setattr(cli, "load", raising(error))
        status, _, err, _ = knapspec()
        assert status == 2 and "out of memory" in err and err.count("\n") == 1
    monkeypatch.setattr(cli, "load", raising(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        knapspec()


def raising(error):
    def stand_in(*args, **options):
        raise error

    return stand_in


def test_an_old_json_file_stays_whole_where_no_new_one_is_made(knapspec, tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    path.write_text("old")
    monkeypatch.setattr(cli, "load", raising(ValueError("no")))
    assert knapspec("--json", str(path))[0] == 2
    with pytest.raises(TypeError):
        cli.write_json(path, {"a": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_json_file_replaces_the_file_behind_a_link(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    cli.write_json(tmp_path / "link.json", {"text": "中"})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text("utf-8")) == {"text": "中"}


# --- Ctrl-C and pipes ------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_printed(knapspec, monkeypatch):
    printed = []

    class Interrupted(cli.Printer):
        def __call__(self, token_id):
            super().__call__(token_id)
            printed.append(token_id)
            if len(printed) == 9:
                raise KeyboardInterrupt

    whole = knapspec("--max-new-tokens", "20", "--compare")[3]
    monkeypatch.setattr(cli, "Printer", Interrupted)
    status, out, err, result = knapspec("--max-new-tokens", "20", "--compare")
    assert status == 130
    assert out == result["text"] + "\n" and whole["text"].startswith(result["text"]) and result["text"]
    assert result["stop_reason"] == "interrupted" and "baseline" not in result
    assert "(interrupted)" in err and "Traceback" not in err


def test_ctrl_c_while_comparing_keeps_the_result(knapspec, monkeypatch):
    monkeypatch.setattr(cli, "compare", raising(KeyboardInterrupt()))
    status, out, err, result = knapspec("--max-new-tokens", "10", "--compare")
    assert status == 130 and out == result["text"] + "\n"
    assert "the comparison was interrupted" in err and result["stop_reason"] == "length"


@pytest.mark.parametrize("step", ["load", "latency_model"])
def test_ctrl_c_before_the_first_token_is_one_line(knapspec, monkeypatch, step):
    monkeypatch.setattr(cli, step, raising(KeyboardInterrupt()))
    assert knapspec() == (130, "", "interrupted\n", None)


def start(model, *options, **settings):
    command = [sys.executable, "knapspec.py", "--model", str(model), "--raw", *options, *FIXED]
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
    return subprocess.Popen(command, cwd=FOLDER, **settings)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that never ends its text and has room for more than any test waits for."""
    return write_model(tmp_path_factory.mktemp("models") / "endless", eos=False, max_position=100_000)


def test_a_real_ctrl_c_ends_with_a_report_and_status_130(endless, tmp_path):
    path = tmp_path / "out.json"
    process = start(endless, "--prompt", "abc", "--max-new-tokens", "90000", "--json", str(path))
    first = process.stdout.read(5)  # decoding has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    result = json.loads(path.read_text("utf-8"))
    assert process.returncode == 130
    assert (first + out).decode() == result["text"] + "\n"
    assert result["stop_reason"] == "interrupted" and b"Traceback" not in err and b"tokens/s" in err


def test_a_reader_that_closes_the_pipe_ends_it_quietly(endless):
    process = start(endless, "--prompt", "abc", "--max-new-tokens", "90000")
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait() == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_the_text_is_utf8_whatever_the_locale_and_the_prompt_may_come_from_a_pipe(folder, tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    path = tmp_path / "out.json"
    process = start(folder, "--prompt-file", "-", "--temperature", "3", "--json", str(path), stdin=subprocess.PIPE,
                    env=os.environ | ascii_only)  # fmt: skip
    out, err = process.communicate(b"ab")
    result = json.loads(path.read_text("utf-8"))
    assert process.returncode == 0, err
    assert result["prompt_tokens"] == 2
    assert out.decode("utf-8") == result["text"] + "\n" and not out.isascii()
    assert b"  attention #.#.#" in err and err.isascii()


def test_a_plan_can_be_made_by_hand(folder):
    model, tokenizer = load(folder, progress=False)
    planner, latency = cli.make_planner(cli.parse(["--prompt", "", *FIXED]), model, tokenizer, 5)
    assert planner.plan(None) == Plan(frozenset({2, 3, 6}), 3) and latency is None

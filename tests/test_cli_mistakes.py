"""Mistakes of a user, Ctrl-C and closed pipes: one line each, and nothing is lost."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli import methods, report, running
from cli.options import parse
from cli.report import write_json
from cli.running import Printer, planner_for
from decoding import Plan
from loading import load, memory
from tests.testing_cli import (
    FIXED,
    FOLDER,
    cache,
    folder,
    knapspec,
    own_cache,
    write_model,
)

__all__ = ["cache", "folder", "knapspec", "own_cache"]  # fixtures

# --- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    (["--max-new-tokens", "-1"], "of at least 0"), (["--max-new-tokens", "1.5"], "whole number"),
    (["--temperature", "-0.1"], "of at least 0"), (["--temperature", "nan"], "of at least 0"), (["--temperature", "inf"], "'inf'"),
    (["--top-p", "1.1"], "from 0 to 1"), (["--top-p", "-0.1"], "from 0 to 1"), (["--top-p", "x"], "from 0 to 1"),
    (["--tau", "1.5"], "from -1 to 1"), (["--budget", "-0.1"], "from 0 to 1"), (["--budget", "nan"], "from 0 to 1"),
    (["--gamma-max", "-1"], "from 0 to 64"), (["--window", "0"], "from 1 to 512"), (["--interval", "0"], "of at least 1"),
    (["--seed", "-1"], "from 0 to"), (["--method", "magic"], "layerskip"), (["--choices", "full,int4"], "full,skip"), (["--choices", "skip"], "full,skip"),
    (["--choices", "full,skip", "--gamma", "1"], "drop one"),
    (["--skip", "1,x", "--gamma", "1"], "such as 20,21,24"), (["--skip", "10", "--gamma", "1"], "from 0 to 9"),
    (["--skip", "-1,2", "--gamma", "1"], "--skip"), (["--skip", "2"], "--gamma"), (["--gamma", "2", "--method", "swift"], "drop one"),
    (["--tau", "0.5", "--method", "swift"], "drop one"), (["--gamma-max", "2", "--gamma", "2"], "drop one"),
    (["--raw", "--system", "x"], "drop one"), (["--colour"], "--help"), (["--device", "cuda:99"], "--device cpu"),
    (["--dtype", "int8"], "float32"), (["--max"], "--help"), (["--prompt-file", "x"], "--prompt"),
    (["--json", "/no/such/folder/out.json"], "--json"), (["--json", "."], "--json"),
    (["--json", ""], "is not a file"), (["--json", "-"], "is not a file"), (["--json", "/dev/stdout"], "--json /dev/stdout is"),
    (["--window", "513"], "from 1 to 512"), (["--choices", "full,half"], "full,skip"), (["--choices", "full,skip", "--method", "uniform"], "drop one"),
    (["--max-new-tokens", "1" * 5000], "whole number"), (["--explain", "--quiet"], "drop one"), (["--html", "/no/such/folder/page.html"], "cannot write --html"),
    (["--html", "."], "--html . is not a file"), (["--html", "/dev/stdout"], "--html /dev/stdout is"),
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
                  RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")):  # fmt: skip
        monkeypatch.setattr(running, "load", raising(error))
        status, _, err, _ = knapspec()
        assert status == 2 and "out of memory: pass a smaller --max-new-tokens" in err and err.count("\n") == 1
    monkeypatch.setattr(running, "load", raising(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        knapspec()


@pytest.mark.parametrize("rooms", [[1e4], [1e9, 1e4]], ids=["before the profile", "behind the copies"])
def test_a_cache_that_does_not_fit_is_refused_with_numbers(knapspec, monkeypatch, rooms):
    """160 tokens at most, of 5 layers and both rotary tables: 2 * (5 * 2 + 1) * 4 numbers of 4 bytes each."""
    left = iter([1e9, *rooms])  # the first is asked for the weights
    monkeypatch.setattr(memory, "free_bytes", lambda device: next(left))
    status, out, err, _ = knapspec("--max-new-tokens", "1000")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert "160 tokens as torch.float32 take 0.06 MB, and cpu has 0.01 MB left: pass a smaller --max-new-tokens" in err


def raising(error):
    def stand_in(*args, **options):
        raise error

    return stand_in


def test_an_old_json_file_stays_whole_where_no_new_one_is_made(knapspec, tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    path.write_text("old")
    monkeypatch.setattr(running, "load", raising(ValueError("no")))
    assert knapspec("--json", str(path))[0] == 2
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_json_file_replaces_the_file_behind_a_link(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_json(tmp_path / "link.json", {"text": "中"})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text("utf-8")) == {"text": "中"}


# --- Ctrl-C and pipes ------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_printed(knapspec, monkeypatch):
    printed = []

    class Interrupted(Printer):
        def __call__(self, token_id):
            super().__call__(token_id)
            printed.append(token_id)
            if len(printed) == 9:
                raise KeyboardInterrupt

    whole = knapspec("--max-new-tokens", "20", "--compare")[3]
    monkeypatch.setattr(running, "Printer", Interrupted)
    status, out, err, result = knapspec("--max-new-tokens", "20", "--compare")
    assert status == 130
    assert out == result["text"] + "\n" and whole["text"].startswith(result["text"]) and result["text"]
    assert result["stop_reason"] == "interrupted" and "baseline" not in result
    assert "(interrupted)" in err and "Traceback" not in err


def test_ctrl_c_while_comparing_keeps_the_result(knapspec, monkeypatch):
    monkeypatch.setattr(running, "compare", raising(KeyboardInterrupt()))
    status, out, err, result = knapspec("--max-new-tokens", "10", "--compare")
    assert status == 130 and out == result["text"] + "\n"
    assert "the comparison was interrupted" in err and result["stop_reason"] == "length"


@pytest.mark.parametrize("step", ["load", "latency_model"])
def test_ctrl_c_before_the_first_token_is_one_line(knapspec, monkeypatch, step):
    monkeypatch.setattr(running if step == "load" else methods, step, raising(KeyboardInterrupt()))
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
    planner, latency = planner_for(parse(["--prompt", "", *FIXED]), model, tokenizer, 5)
    assert planner.plan(None) == Plan(frozenset({2, 3, 6}), 3) and latency is None


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    """A torch that takes its time, and swallows exceptions as the real one does now and then."""
    (tmp_path / "torch.py").write_text("import contextlib, time\nprint('importing', flush=True)\n"
                                       "while True:\n    with contextlib.suppress(BaseException):\n        time.sleep(60)\n")  # fmt: skip
    command = [sys.executable, "knapspec.py", "--prompt", "x"]
    with subprocess.Popen(command, cwd=FOLDER, env=os.environ | {"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"interrupted\n")


def test_the_report_tells_what_was_looked_up(knapspec):
    options = ["--method", "knapspec+", "--choices", "full,skip,lookup", "--max-new-tokens", "100"]
    _, _, err, result = knapspec(*options, "--raw", prompt=("--prompt", "abcabcabcabcabcabcabcabc"))
    accepted, looked_up = result["looked_up_accepted"], result["looked_up"]
    assert 0 <= accepted <= looked_up <= result["drafted"] and looked_up > 0
    assert f"drafted tokens accepted ({result['acceptance_rate']:.0%}), of these {accepted} of {looked_up} looked up in the text, " in err
    assert report.plan_lines("knapspec+", 3, {"plans": [{"gamma": 0}], "looked_up": 4}) == ["all drafts were looked up"]


def test_a_prompt_without_a_template_is_told(tmp_path, knapspec):
    write_model(tmp_path / "model", template=False)
    assert "has no chat template" in knapspec("--max-new-tokens", "4", *FIXED, model=tmp_path / "model")[2]
    assert "has no chat template" not in knapspec("--max-new-tokens", "4", "--raw", *FIXED, model=tmp_path / "model")[2]


def test_a_report_that_nobody_can_read_costs_nothing_else(knapspec, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    status, out, _, result = knapspec("--max-new-tokens", "4", *FIXED)
    assert (status, out) == (0, result["text"] + "\n")
    assert knapspec("--bad")[0] == 2

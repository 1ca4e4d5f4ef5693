"""beyond/parallel.py: several processes say what one says, and whatever happens to one of them ends all, told in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cli
from beyond import parallel
from tests.testing_checkpoints import (
    CHATML,
    LLAMA,
    QWEN3,
    quiet_load,
    random_weights,
    write_folder,
)
from tests.testing_parallel import COMMAND, WAYS, linear_weights, told

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
CHECKPOINTS = {"model": LLAMA | SIZES | {"attention_bias": True, "mlp_bias": True}, "tied": QWEN3 | SIZES | {"tie_word_embeddings": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all scenarios have run."""
    folder = tmp_path_factory.mktemp("parallel")
    for checkpoint, config in CHECKPOINTS.items():
        weights = {name: tensor * 0.3 + ("norm" in name) for name, tensor in random_weights(config, seed=2).items()}
        for name in weights:
            if name.startswith(("model.layers.1", "model.layers.2")) and name.split(".")[-2] in ("o_proj", "down_proj"):
                weights[name] *= 0.3  # there are drafts to find
        write_folder(folder / checkpoint, config, weights, tokenizer_config_json={"chat_template": CHATML})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KNAPSPEC_CACHE": str(folder / "cache")}
    ran = subprocess.run([sys.executable, "-m", "tests.testing_parallel", folder], cwd=Path(__file__).parent.parent, env=environment,
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert ran.returncode == 0 and ran.stdout == "", ran.stderr
    return folder


def said(folder, scenario):
    """(exit status, standard output, standard error) of process 0 of the scenario, and the statuses of the others, which say nothing."""
    statuses = json.loads((folder / "statuses.json").read_text())[scenario]
    texts = [[(folder / f"{scenario}-{rank}.{kind}").read_text("utf-8") for kind in ("out", "err")] for rank in range(len(statuses))]
    assert texts[1:] == [["", ""]] * (len(statuses) - 1)
    return (statuses[0], *texts[0]), statuses[1:]


@pytest.mark.parametrize("checkpoint, count", [("model", 4), ("tied", 2)])
def test_several_processes_say_what_one_says(folder, checkpoint, count):
    (status, out, _), others = said(folder, checkpoint)
    assert (status, others) == (0, [0] * (count - 1))
    model, _ = quiet_load(folder / checkpoint)
    (found, logits, weights), (alone, alone_logits) = json.loads(out), told(model)
    assert weights == linear_weights(model) / count
    assert found.pop("in other ways")["token_ids"] == alone.pop("in other ways")["token_ids"] == alone["plain"]["token_ids"]
    assert found == alone
    assert alone["fixed"]["accepted"] > 0 and len({str(skipped) for skipped in alone["planned"]["skipped"]}) > 2
    assert {"kept", "of states", *WAYS} == {*logits}
    for name, values in logits.items():
        one, several = torch.tensor(alone_logits[name]), torch.tensor(values)
        if name in ("kept", "of states"):
            torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-4)
        else:  # each part is rounded by itself
            assert torch.cosine_similarity(several, one, dim=-1).min() > (0.9999 if name == "half" else 0.97), name


def test_the_command_is_that_of_one_process(folder, capfd, monkeypatch):
    (status, out, err), others = said(folder, "command")
    assert (status, others) == (0, [0]) and "token ids: the same" in err
    told_of = json.loads((folder / "out.json").read_text())
    assert told_of["identical"] and max(told_of["latency"]["verify_s"][-1][1:]) > 0
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun says it of one
    monkeypatch.setattr(parallel, "lead", None)
    assert cli.main(["--model", str(folder / "model"), *COMMAND, "--gamma", "0", "--quiet"]) == 0
    assert capfd.readouterr() == (out, "") and told_of["text"] + "\n" == out


@pytest.mark.parametrize("scenario, line, others", [
    ("killed", "another process was ended, or all are to end", [-9]),
    ("failed", "process 1 failed: KeyError: 'a fault", [1]),
    ("undivided", "n_head 8 cannot be divided among 3 processes: pass another --nproc-per-node", [1, 1]),
])  # fmt: skip
def test_what_ends_one_process_ends_all_in_one_line(folder, scenario, line, others):
    (status, _, err), statuses = said(folder, scenario)
    assert (status, statuses) == (2, others)
    assert err.startswith("knapspec.py: ") and line in err and err.count("\n") == 1


def test_ctrl_c_keeps_what_was_printed(folder):
    (status, out, err), others = said(folder, "interrupted")
    assert (status, others) == (130, [0]) and "(interrupted)" in err
    assert len(out) > 1 and said(folder, "command")[0][1].startswith(out[:-1])


@pytest.mark.parametrize("options, words", [
    (["--method", "swift"], ["swift", "cache"]), (["--device", "cuda:1"], ["cuda:1", "cpu"]), (["--device", "cuda"], ["2 processes", "GPUs"]),
    (["--gamma", "x"], ["--gamma", "'x'"]),
])  # fmt: skip
def test_a_mistake_is_one_line_of_process_0(capfd, monkeypatch, options, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["--prompt", "x", *options]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and all(word in err for word in words)
    monkeypatch.setenv("RANK", "1")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))  # which are put back after this
    assert cli.main(["--prompt", "x", *options]) == 2
    assert capfd.readouterr() == ("", "")

"""The command line where something is not there: a folder that was deleted, a package, a newer Python."""

import ast
import io
import os
import shutil
import subprocess
import sys

import pytest

import cli
from beyond.ways import WAYS
from cli import methods, options, report
from tests.testing_cli import FOLDER, cache, folder, knapspec, own_cache

__all__ = ["cache", "folder", "knapspec", "own_cache"]  # fixtures


def copy_without(rooms, target):
    """The project in a new folder, as it is where these folders are deleted; what Python left of them stays."""
    shutil.copytree(FOLDER, target, ignore=lambda folder, names: {*names} & {".git", "tests", "benchmark", "__pycache__", "shared", *rooms})
    for room in rooms:
        (target / room / "__pycache__").mkdir(parents=True)
    return target


def decode(project, model, *arguments):
    command = [sys.executable, "knapspec.py", "--model", str(model), "--prompt", "ab", "--max-new-tokens", "6", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout, ran.stderr


def test_without_beyond_and_the_rivals_the_paper_s_method_is_the_default(folder, tmp_path):
    project = copy_without(["beyond", "rivals"], tmp_path / "project")
    status, out, err = decode(project, folder)
    assert status == 0 and out.endswith("\n") and "tokens/s" in err
    assert err.startswith("beyond/ is not there: the default is --method knapspec\n")
    assert decode(project, folder, "--method", "autoregressive", "--quiet") == (0, out, "")
    status, _, err = decode(project, folder, "--method", "knapspec+")
    assert (status, err.count("\n")) == (2, 1) and "'knapspec', 'autoregressive')" in err


def test_an_older_python_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(sys, "version", "3.9.18 (main)")
    assert cli.main(["--prompt", "x"]) == 2
    assert capsys.readouterr().err == "knapspec.py: Python 3.10 or newer is needed, and this is 3.9.18\n"


def test_what_an_older_python_reads_is_written_for_it():
    """It reads these files before it can be told."""
    for name in ("knapspec.py", "cli/__init__.py", "cli/terminal.py"):
        ast.parse((FOLDER / name).read_text("utf-8"), feature_version=(3, 8))


def test_a_missing_package_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    command = [sys.executable, "knapspec.py", "--prompt", "x"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "knapspec.py: No module named 'torch': run pip install -r requirements.txt\n"


@pytest.mark.parametrize("method", ["swift", "draft_verify"])
def test_a_method_that_needs_an_optional_package_says_how_to_get_it(knapspec, monkeypatch, method):
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    status, out, err, _ = knapspec("--method", method)
    assert (status, out, err.count("\n")) == (2, "", 1) and "pip install bayesian-optimization" in err


def test_importing_cli_brings_nothing_heavy():
    ran = subprocess.run([sys.executable, "-c", "import cli, sys; print(*sys.modules)"], cwd=FOLDER, capture_output=True, text=True, check=True)
    assert not {"torch", "knapspec", "loading", "argparse"} & {*ran.stdout.split()}


def test_a_new_way_needs_no_edit_here(monkeypatch):
    """What the registry of ways says of it is drawn, and offered."""
    way = WAYS["int8"].__class__("4-bit weights", ("▚", "4"), 0.8, lambda model: None, lambda model, progress: [])
    monkeypatch.setitem(WAYS, "int4", way)
    plan = {"skip_set": [2], "choices": ["int4"] * 4 + ["full"] * 3, "gamma": 2, "predicted_tokens_per_second": None}
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert report.plan_lines("knapspec+", 3, {"plans": [plan], "looked_up": 0}) == [
        "plan: skip 1 of 6 sublayers, draft up to 2 tokens (█ full, ░ skip, ▚ int4)", "  attention ▚░█", "  MLP       ▚▚█",
    ]  # fmt: skip
    assert methods.WAYS is WAYS and {"full", "skip", "lookup"} < {*methods.CHOICES}
    assert options.choice_list("full, skip,half") == ["full", "skip", "half"]

"""README.md and RESULTS.md hold: what they tell to run runs as it stands, with a small random model in the default one's place."""

import ast
import contextlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import beyond.ways
import cli
import loading.config
from benchmark.__main__ import COMMANDS, build_parser
from benchmark.__main__ import main as benchmark
from cli.options import parse
from decoding import generate
from tests.testing_checkpoints import (
    CHATML,
    LLAMA,
    from_weights,
    logits,
    write_folder,
)

ROOT = Path(__file__).parent.parent
# What is not run here and why, by how it begins. Its options are parsed nevertheless.
NOT_RUN = {
    "pip install": "needs the network; .ci/run does it",
    "pytest": "is what runs now",
    "python knapspec.py --model meta-llama/": "needs the Hub",
    "torchrun": "needs the Hub; test_parallel.py starts several processes",
    "python -m benchmark speed": "takes minutes to an hour",
    "python -m benchmark compare": "takes minutes to an hour",
    "python -m benchmark parts": "takes minutes to an hour",
    "python -m benchmark documents": "takes minutes to an hour",
    "python -m benchmark plot": "draws what these have measured",
}
ELSEWHERE = "--method middle"  # this method is there only in test_a_rival_…


def fenced(document, *languages):
    """The code blocks in some languages, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / document).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert {language for language, _ in found} <= {"sh", "python", "text", "bibtex"}, "a block in no language that is known here"
    return [text for language, text in found if language in languages]


def told():
    """[(document, commands that run one after the other)]: each block of sh, and each command in the running text."""
    for document in "README.md", "RESULTS.md":
        for block in fenced(document, "sh"):
            yield document, [command.strip() for line in block.splitlines() for command in line.partition(" #")[0].split("&&")]
        text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"`([^`]+)`", text.replace("\n", " ")):
            if " " in code and code.split()[0] in ("python", "pip", *COMMANDS):  # half a command, `speed --only rates`, is none
                yield document, [code]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache whose default model is small and random."""
    cache = tmp_path_factory.mktemp("cache")
    config = LLAMA | {"num_hidden_layers": 30, "max_position_embeddings": 80}  # as many layers as the real one, and short texts
    write_folder(cache / "SmolLM2-135M-Instruct", config, tokenizer_config_json={"chat_template": CHATML})
    return cache


@pytest.fixture(autouse=True)
def there(cache, tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KNAPSPEC_CACHE", str(cache))


@pytest.mark.parametrize(("document", "commands"), list(told()), ids=lambda value: value if isinstance(value, str) else value[0])
def test_commands_run_as_they_stand(document, commands, capfd):
    not_run = []
    for command in commands:
        reason = next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)
        match shlex.split(command):
            case ["python", "knapspec.py", *options] | ["torchrun", _, _, "knapspec.py", *options]:
                run, check = cli.main, parse
            case ["python", "-m", "benchmark", *options]:
                run, check = benchmark, build_parser().parse_args
            case _:
                assert reason, f"{command} in {document} is neither run nor listed"
                run = check = options = None
        if ELSEWHERE in command:
            reason = "is run with its rival"
        elif reason and check:
            check(options)
        if "--plot" in command and importlib.util.find_spec("matplotlib") is None:
            reason = "matplotlib is not installed"
        if reason:
            not_run.append(f"{command}: {reason}")
        else:
            with contextlib.suppress(SystemExit):  # of --help
                assert run(options) == 0, capfd.readouterr().err
            assert "--compare" not in command or "token ids: the same" in capfd.readouterr().err
    if len(not_run) == len(commands):
        pytest.skip("; ".join(not_run))


@pytest.mark.parametrize("document", ["README.md", "RESULTS.md"])
def test_links_and_pictures_lead_somewhere(document):
    text = (ROOT / document).read_text("utf-8")
    paths = [path for path in re.findall(r'(?:\]\(|src(?:set)?=")([^)"#]+)', text) if not path.startswith("http")]
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_the_example_is_what_its_command_prints(capsys):
    assert benchmark(["example"]) == 0
    assert capsys.readouterr().out in fenced("README.md", "text")


def test_readme_is_short_and_ci_runs_its_set_up():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 250
    for line in fenced("README.md", "sh")[0].splitlines():
        assert f"  {line}\n" in (ROOT / ".ci/run").read_text()


# --- "Change it" -----------------------------------------------------------------------------------------------------


def block(word):
    """The one block of Python in the README with that word."""
    (found,) = [text for text in fenced("README.md", "python") if word in text]
    return found


def executed(code):
    """The names that it leaves."""
    path = Path("example.py")
    path.write_text(code, "utf-8")
    return runpy.run_path(str(path))


def test_there_are_four_examples_of_about_twenty_lines():
    blocks = fenced("README.md", "python")
    assert blocks == [block(word) for word in ("(Planner)", "(AdaptiveStop)", "WAYS[", "ARCHITECTURES[")]
    assert all(ast.parse(text) and len(text.splitlines()) <= 20 for text in blocks)


def test_a_planner(capsys):
    names = executed(block("(Planner)"))
    result, model, planner = names["result"], names["model"], names["planner"]
    assert result.token_ids == generate(model, names["prompt_ids"], max_new_tokens=60).token_ids[: len(result.token_ids)]
    (_, plan, _), *others = result.plans
    assert (plan.skip_set, plan.gamma) == ({20, 24, 40}, 2) and all(abs(b[1].gamma - a[1].gamma) == 1 for a, b in zip(result.plans, others))
    assert f"{result.accepted} of {result.drafted} accepted, γ is now {planner.gamma}\n" in capsys.readouterr().out and result.drafted


def in_a_copy(folder, changes, command):
    """Runs a command in a copy of the code in which changes[path](old text) replaces files -> what it reports."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for path in ROOT.glob("*/__init__.py"):
        shutil.copytree(path.parent, folder / path.parent.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, change in changes.items():
        path = folder / name
        path.write_text(change(path.read_text("utf-8") if path.exists() else ""), "utf-8")
    _, *arguments = shlex.split(command)
    ran = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def test_a_rival_is_its_file_and_one_line(tmp_path):
    code, text = block("(AdaptiveStop)"), (ROOT / "README.md").read_text("utf-8")
    (line,) = re.findall(r'`("middle": Entry.*?)`', text)
    (command,) = [command for _, commands in told() for command in commands if ELSEWHERE in command]
    changes = {code.splitlines()[0].removeprefix("# "): lambda _: code, "rivals/__init__.py": lambda old: old.replace("RIVALS = {", f"RIVALS = {{\n    {line}")}
    report = in_a_copy(tmp_path, changes, command)
    assert "drafted tokens accepted" in report and "plan: skip 4 of 60 sublayers" in report and "token ids: the same" in report


def test_a_way_to_keep_a_sublayer(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(beyond.ways, "WAYS", dict(beyond.ways.WAYS))
    code = block("WAYS[")
    names = executed(code)
    result, model = names["result"], names["model"]
    assert list(model.table) == ["bfloat16"] and 0 < result.accepted <= result.drafted
    assert capsys.readouterr().out == f"{result.accepted} of {result.drafted} accepted\n"
    # Put into the file, it is an option too.
    changes = {"beyond/ways.py": lambda old: old + code.partition("model, tokenizer = load()")[0]}
    in_a_copy(tmp_path, changes, "python knapspec.py --prompt x --choices full,skip,bfloat16 --json out.json --max-new-tokens 20")
    assert "bfloat16" in json.loads((tmp_path / "out.json").read_text())["latency"]["ways"][0]


def test_an_architecture(monkeypatch):
    monkeypatch.setattr(loading.config, "ARCHITECTURES", dict(loading.config.ARCHITECTURES))
    names = executed(block("ARCHITECTURES["))
    config = names["model"].config
    assert config.qkv_bias and not config.o_bias
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "SeedOssConfig"):
        pytest.skip("this transformers does not know the architecture")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**names["raw"], head_dim=8)).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn(parameter.size(), generator=torch.Generator().manual_seed(1))  # biases too, which start at 0
    tokens = list(range(3, 12))
    expected = theirs(torch.tensor([tokens])).logits[0].detach()
    assert torch.allclose(logits(from_weights(names["raw"], theirs.state_dict()), tokens), expected, atol=1e-5)

"""The house: the floor stands without its rooms, imports point one way, and files and classes stay small."""

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decoding import generate
from tests.testing_checkpoints import (
    CHATML,
    LLAMA,
    quiet_load,
    random_weights,
    write_folder,
)

ROOT = Path(__file__).parent.parent
FLOOR = "model", "decoding", "profile", "knapspec", "loading"  # the paper's method as a library
ROOMS = "beyond", "rivals", "benchmark", "cli"
MAY_IMPORT = {  # besides files of the same folder
    "model": "", "decoding": "model", "loading": "model", "profile": "model loading", "knapspec": "model decoding loading profile",
    "beyond": " ".join(FLOOR), "rivals": " ".join((*FLOOR, "beyond")), "cli": " ".join((*FLOOR, "beyond", "rivals")),
    "benchmark": " ".join((*FLOOR, "beyond", "rivals", "cli")),
}  # fmt: skip


@functools.cache
def _files():
    """{dotted name: syntax tree} of all Python files besides the tests. A path's first part is the file's or folder's name."""
    paths = [path for path in ROOT.glob("*.py") if path.name != "conftest.py" and not path.name.startswith("test_")]
    for room in ROOT.iterdir():
        if (room / "__init__.py").exists() and room.name != "tests":
            paths += room.rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8")) for path in paths}


def _is_main(node):
    """if __name__ == "__main__": ..."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _imports(name):
    """Dotted names of what a file imports anywhere in it, the lines that run it as a command excepted for knapspec.py."""
    body = [node for node in _files()[name].body if not (name == "knapspec" and _is_main(node))]
    for node in (inner for outer in body for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (longer if longer in _files() else node.module for longer in whole)


def _ours(name):
    """Which of our files it imports."""
    for imported in _imports(name):
        if imported in _files():
            yield imported
        elif f"{imported}.__init__" in _files():
            yield f"{imported}.__init__"


def test_imports_point_one_way():
    """model <- decoding <- knapspec <- beyond <- rivals <- cli <- benchmark, and model <- loading <- profile <- knapspec."""
    wrong, seen = [], 0
    for name in _files():
        here = name.partition(".")[0]
        allowed = {here, *MAY_IMPORT[here].split()}
        others = {imported.partition(".")[0] for imported in _imports(name)} & {*MAY_IMPORT, "tests", "conftest"}
        wrong += [f"{name} imports {other}" for other in others - allowed]
        seen += len(others)
    assert not wrong and seen > 40, wrong


def test_no_file_imports_itself_by_way_of_others():
    state = {}

    def visit(name, path):
        assert state.get(name) != "open", f"imports go round: {' -> '.join([*path, name])}"
        if name not in state:
            state[name] = "open"
            for imported in _ours(name):
                if imported != name:
                    visit(imported, [*path, name])
            state[name] = "done"

    for name in _files():
        visit(name, [])
    assert "decoding" in _ours("knapspec") and "model" in _ours("decoding")  # else nothing would have been seen


@pytest.mark.parametrize("floor", FLOOR)
def test_the_floor_needs_no_room(floor):
    files = [name for name in _files() if name.partition(".")[0] == floor]
    assert files
    for name in files:
        assert not {imported.partition(".")[0] for imported in _imports(name)} & {*ROOMS}, name


EXAMPLE = """
import json, sys
from knapspec import KnapSpec, generate
from loading import load

model, tokenizer = load(sys.argv[1])
prompt, results = tokenizer.chat("Tides."), []
for planner in (KnapSpec(), KnapSpec(interval=4, threshold=0.0)):  # which measure the model, or find it measured
    result = generate(model, prompt, max_new_tokens=24, eos_ids=tokenizer.eos_ids, planner=planner)
    results.append([tokenizer.decode(result.token_ids), result.token_ids, result.drafted, result.accepted])
from profile import latency_model
assert latency_model(model, context=len(prompt) + 24, gamma_max=8) == planner.latency
print(json.dumps(results))
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def test_the_library_works_without_the_rooms(tmp_path):
    """Whoever deletes beyond/, rivals/, benchmark/ and cli/ keeps the paper's method, and it drafts."""
    for floor in FLOOR:
        path = ROOT / f"{floor}.py"
        if path.exists():
            shutil.copy(path, tmp_path)
        else:
            shutil.copytree(ROOT / floor, tmp_path / floor, ignore=shutil.ignore_patterns("__pycache__"))
    config = LLAMA | {"num_hidden_layers": 6}
    weights = random_weights(config)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")) and name.split(".")[2] in "1234":
            weights[name] *= 1e-3  # the inner layers hardly matter
    folder = write_folder(tmp_path / "a-model", config, weights, tokenizer_config_json={"chat_template": CHATML})
    environment = {**os.environ, "KNAPSPEC_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    (tmp_path / "example.py").write_text(EXAMPLE)
    ran = subprocess.run([sys.executable, "example.py", folder], cwd=tmp_path, env=environment, capture_output=True, text=True,
                         check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert not {*ROOMS} & {*ran.stderr.split()} and {*FLOOR} <= {*ran.stderr.split()}
    assert len(list((tmp_path / "cache/profiles").iterdir())) == 1
    model, tokenizer = quiet_load(folder)
    plain = generate(model, tokenizer.chat("Tides."), max_new_tokens=24, eos_ids=tokenizer.eos_ids)
    for text, token_ids, drafted, accepted in json.loads(ran.stdout):
        assert token_ids == plain.token_ids and text == tokenizer.decode(plain.token_ids)
        assert 0 < accepted <= drafted


def test_files_and_classes_stay_small():
    long = {name: lines for name in _files() if (lines := len((ROOT / f"{name.replace('.', '/')}.py").read_text("utf-8").splitlines())) > 400}
    classes = {
        f"{name}.{node.name}": lines
        for name, tree in _files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and (lines := node.end_lineno - node.lineno + 1) > 120
    }
    assert (long, classes) == ({}, {})


def test_no_test_file_is_longer_than_500_lines():
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in (*ROOT.glob("test_*.py"), *ROOT.glob("tests/*.py"))}
    assert "test_house.py" in lengths and not {name: lines for name, lines in lengths.items() if lines > 500}

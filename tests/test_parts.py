"""parts and documents: every row is measured once beside plain decoding, and the tables say what each part changes."""

import itertools
import json

import pytest

from benchmark import parts
from benchmark.__main__ import main
from benchmark.documents import METHODS, documents_table
from benchmark.methods import FULL_SKIP
from benchmark.texts import DOCUMENTS
from beyond.adaptive import PARTS
from tests.testing_benchmark import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory)


@pytest.fixture(autouse=True)
def small(folder, monkeypatch, tmp_path):
    """The tiny model is the default one, and prompts are short; profiles stay out of the user's folder."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(folder.parent / "cache"))
    monkeypatch.setattr("benchmark.bench.default_model_folder", lambda: folder)
    monkeypatch.setattr("benchmark.planted.default_model_folder", lambda: folder)
    monkeypatch.setattr("benchmark.bench.own_prompts", lambda limit, *_: [("a", list(b"Once upon a time")), ("b", list(b"I am"))][:limit])


def test_the_ladder_begins_with_the_paper_and_ends_with_all_parts():
    rungs = list(parts.LADDER.values())
    assert rungs[0] == "knapspec" and rungs[-1] == "knapspec+" and len(rungs) == 2 + len(PARTS)
    dropped = [set(rung.partition(" without ")[2].split(",")) - {""} for rung in rungs[1:]]
    assert dropped[0] == set(PARTS) and [tuple(a - b) for a, b in itertools.pairwise(dropped)] == [(part,) for part in PARTS]
    assert len(parts.LEFT_OUT) == 1 + len(PARTS) and FULL_SKIP in parts.LADDER.values()


def test_the_table_tells_the_mean_the_lowest_and_the_change():
    found = {"smollm2": {name: {"runs": [{"method": "m", "speedup": m}, {"method": "n", "speedup": n}]} for name, m, n in
                         (("a", 1.0, 1.5), ("b", 4.0, 6.0))}}  # fmt: skip
    lines = parts.parts_table(found, {"first": "m", "second": "n"}, {"second": "first"})
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["first", "2.00 (1.00)"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["second", "3.00 (1.50) +50%"]


def test_parts_prints_two_tables_and_takes_up_where_it_was(tmp_path, capsys, monkeypatch):
    path = tmp_path / "parts.json"
    command = ["parts", "--limit", "1", "--max-new-tokens", "8", "--planted", str(tmp_path), "--json", str(path)]
    assert main([*command, "--only", "smollm2"]) == 0
    out, runs = capsys.readouterr().out, json.loads(path.read_text())["runs"]
    assert list(runs) == ["smollm2/a"] and all(run["identical"] for run in runs["smollm2/a"]["runs"])
    methods = [run["method"] for run in runs["smollm2/a"]["runs"]]
    rows = {*parts.LEFT_OUT.values(), *parts.LADDER.values(), *parts.YARDSTICKS.values()}
    assert len(methods) == len(rows) and set(methods) == rows  # what stands in both tables is run once
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 * 2 + len(parts.LEFT_OUT) + len(parts.LADDER) + len(parts.YARDSTICKS) and "ANOTHER TEXT" not in out
    assert main([*command, "--only", "smollm2", "blocks"]) == 0  # other texts may follow, the rows stay
    assert list(json.loads(path.read_text())["runs"]) == ["smollm2/a", "blocks/a"] and (tmp_path / "blocks").is_dir()
    monkeypatch.setattr(parts, "METHODS", parts.METHODS[:2])
    assert main([*command, "--only", "smollm2"]) == 2
    assert "was made with methods" in capsys.readouterr().err


def test_parts_on_documents(capsys):
    assert main(["parts", "--limit", "1", "--max-new-tokens", "4", "--only", "documents"]) == 0
    assert "1 of documents" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--only", "split", "steps"], "invalid choice: 'steps'"), (["--json", "."], "is not a file"),
])  # fmt: skip
def test_mistakes_are_one_line_before_any_work(monkeypatch, capsys, arguments, reason):
    monkeypatch.setattr("benchmark.bench.load", lambda *_, **__: pytest.fail("nothing is loaded"))
    assert main(["parts", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_documents_are_told_one_by_one(folder, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["documents", "--model", str(folder), "--limit", "2", "--max-new-tokens", "4", "--repeats", "2", "--json", str(path)]) == 0
    out, runs = capsys.readouterr().out, json.loads(path.read_text())["runs"]
    assert len(runs) == 2 and all(len(document["runs"]) == 3 * 2 for document in runs.values())
    assert out.startswith("### documents: tiny") and all(name in DOCUMENTS and name in out for name in runs)


def test_documents_table_has_mean_and_minimum():
    found = {name: {"prompt_tokens": 7, "runs": [{"method": method, "speedup": value} for method in METHODS for value in values]}
             for name, values in {"types": [0.5, 1.0, 1.5], "compound": [4.0]}.items()}  # fmt: skip
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in documents_table(found)[2:6]]
    assert cells[0] == ["types", "7", "Summarise", *["1.00 (0.50 to 1.50)"] * 3]
    assert cells[2] == ["geometric mean", "–", "–", *["2.00"] * 3] and cells[3][3] == "1.00"

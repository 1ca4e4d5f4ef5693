"""example and plot: numbers that hold, pictures that are the same whenever they are drawn, in light and in dark."""

import importlib.util
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmark import example
from benchmark.__main__ import main
from benchmark.plot import read_speedups
from knapspec import integer_weights

PICTURES = Path(__file__).parent.parent / "pictures"
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def degrees(branch):
    return round(math.degrees(math.acos(min(branch.cosine, 1.0))))


def test_the_table_tells_who_beats_whom():
    session, weights = example.example_session(), integer_weights(example.ATTENTION_S, example.MLP_S, example.L)
    rows = example.table_of_states(session, weights, budget=3)
    told = [{w: (set(b.skip_set), degrees(b), [(set(x.skip_set), degrees(x)) for x in beaten]) for w, (b, beaten) in row.items()} for row in rows]
    first, second = {0: (set(), 0, [])}, {0: (set(), 0, []), 1: ({2}, 40, [])}
    third = {0: (set(), 0, []), 1: ({3}, 30, [({2}, 40)]), 2: ({2, 3}, 10, [])}
    last = {weight: (s, off, []) for weight, (s, off, _) in third.items()}
    assert told == [first, first, second, third, last, last]


def test_the_example_s_numbers(capsys):
    assert main(["example"]) == 0
    out = capsys.readouterr().out
    for words in (
        "1 + 0.8 + 0.64 + 0.512 + 0.4096 = 3.36 tokens in 4 · 40 + 120 = 280 ms", "12.0 tokens/s, plainly 10.0",  # 3.3616 / 0.28
        "{2,3}  α = 0.875, a draft step  84 ms, best γ = 2: 2.64 tokens in 294 ms, 8.98 tokens/s",  # 1 + 7/8 + 49/64; 2 · 84 + 126
        "plan: skip {2,3}, draft 2 tokens", "Here 0 of 1 stands, and B follows", "residual  0.00  0.30  0.05", "sum       0.35  0.40  0.25",
    ):  # fmt: skip
        assert words in out, words


def texts(path):
    """What is written in an SVG file."""
    return {" ".join("".join(node.itertext()).split()) for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}


@needs_matplotlib
def test_the_table_s_picture_is_the_one_in_the_folder(tmp_path, capsys):
    assert main(["example", "--plot", str(tmp_path / "table.svg")]) == 0
    light, dark = (tmp_path / f"table{suffix}.svg" for suffix in ("", "-dark"))
    assert capsys.readouterr().out.endswith(f"drawn: {light}, and {dark} for dark pages\n")
    assert light.read_text() != dark.read_text() and "<dc:date>" not in light.read_text()
    for path in light, dark:
        assert texts(path) == texts(PICTURES / path.name) >= {"{3} 0.866", "{2} 0.766", "{2,3} 0.985", "units of time saved"}


def measured(path, repeats, **methods):
    runs = {key: {"prompt_tokens": 9, "runs": [{"method": m, "repeat": i, "speedup": base + i} for m, base in methods.items() for i in range(repeats)]}
            for key in ("prompts/story-a", "prompts/story-b", "prompts/code-a")}  # fmt: skip
    path.write_text(json.dumps({"date": "", "settings": {}, "runs": {"steps": {"1 token": 0.1}, "sweep/x": [[1]], **runs}}))
    return path


def test_a_row_is_a_kind_or_a_method(tmp_path):
    path = measured(tmp_path / "r.json", 3, a=1.0, b=2.0)
    by_kind, by_method = read_speedups(path, "kind"), read_speedups(path, "method")
    assert by_kind == {"prompts": {"story": {"a": [1, 2, 3] * 2, "b": [2, 3, 4] * 2}, "code-a": {"a": [1, 2, 3], "b": [2, 3, 4]}}}
    assert by_method == {"prompts": {"a": {"": [1, 2, 3] * 3}, "b": {"": [2, 3, 4] * 3}}}


@needs_matplotlib
@pytest.mark.parametrize("by", ["kind", "method"])
def test_a_picture_is_the_same_whenever_it_is_drawn(tmp_path, by):
    path, pictures = measured(tmp_path / "r.json", 3, a=1.0, b=2.0), []
    for name in "one.svg", "two.svg":
        assert main(["plot", str(path), "--out", str(tmp_path / name), "--by", by]) == 0
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1] and {"prompts", "speed-up over plain decoding", "median, lowest to highest run"} <= texts(tmp_path / "one-dark.svg")
    assert ({"story", "code-a", "a", "b"} if by == "kind" else {"a", "b"}) <= texts(tmp_path / "one.svg")


@needs_matplotlib
def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys):
    few, none, wrong = measured(tmp_path / "few.json", 2, a=1.0), measured(tmp_path / "none.json", 0, a=1.0), tmp_path / "wrong.json"
    wrong.write_text("[]")
    out = str(tmp_path / "out.svg")
    for arguments, reason in [
        ([str(few), "--out", out], "2 runs of a on prompts/story-a: measure with --repeats 3 or more"), ([str(none), "--out", out], "no speed-ups"),
        ([str(wrong), "--out", out], "holds no results"), ([str(tmp_path / "away.json"), "--out", out], "holds no results"),
        ([str(few), "--out", "out.txt"], "--out out.txt cannot be drawn"), ([str(few), "--out", "nowhere/out.svg"], "a folder that is there"),
    ]:  # fmt: skip
        assert main(["plot", *arguments]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
    assert not (tmp_path / "out.svg").exists()


def test_a_missing_matplotlib_is_one_line_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["example", "--plot", str(tmp_path / "out.svg")]) == 2
    assert capsys.readouterr() == ("", "benchmark: --plot needs the package matplotlib: pip install matplotlib\n")

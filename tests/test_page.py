"""cli/page.py: the page of --html holds the text, whatever it is, needs nothing from elsewhere, and works in a browser."""

import html.parser
import itertools
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from cli import page, running
from cli.methods import METHODS
from cli.trace import Trace
from decoding import FixedPlanner, Plan, Planner, generate
from knapspec import KnapSpec
from tests.testing_checkpoints import LLAMA, write_folder
from tests.testing_cli import (
    FIXED,
    N_LAYER,
    cache,
    folder,
    knapspec,
    own_cache,
    write_model,
)
from tests.testing_models import latency_model, random_model, tiny_config

__all__ = ["cache", "folder", "knapspec", "own_cache"]  # fixtures

HOSTILE = """</script><script>alert("x")</script> & 'quotes' {{ 7 * 7 }} <!-- """
HOT = "--temperature", "5", "--raw", *FIXED


class Page(html.parser.HTMLParser):
    """elements: (tag, attributes, text in them); spans: those of the text's tokens."""

    def __init__(self, path):
        super().__init__()
        self.source, self.elements, self.open = path.read_text("utf-8"), [], []
        self.feed(self.source)
        start = next(i for i, (_, attributes, _) in enumerate(self.elements) if attributes.get("class") == "text")
        end = next(i for i, (tag, *_) in enumerate(self.elements) if i > start and tag != "span")
        self.spans = self.elements[start + 1 : end]

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])
        self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def of(self, tag):
        return [element for element in self.elements if element[0] == tag]


@pytest.fixture
def written(knapspec, tmp_path):
    """written(*options) runs the command line with --html -> (the Page, the JSON file's content)."""

    def run(*options, **settings):
        path = tmp_path / "page.html"
        status, out, _, result = knapspec("--html", str(path), *options, **settings)
        assert (status, out) == (0, result["text"] + "\n")
        return Page(path), result

    return run


def test_the_tokens_of_the_page_are_the_text_with_all_that_is_told_of_them(written):
    found, result = written("--max-new-tokens", "40", *FIXED)
    assert "".join(text for *_, text in found.spans) == result["text"] and len(found.spans) == result["new_tokens"]
    kinds = [attributes["class"].split()[1] for _, attributes, _ in found.spans]
    assert kinds[0] == "first" and kinds.count("accepted") == result["accepted"]
    for kind, (_, attributes, text) in zip(kinds, found.spans):
        target, draft = json.loads(attributes["data-target"]), json.loads(attributes["data-draft"])
        assert target[0][0] == attributes["data-label"] and text.replace("\n", "\\n") in (attributes["data-label"], "")
        assert len(target) == 3 and 1 >= target[0][1] >= target[1][1] >= target[2][1] > 0
        assert len(draft) == (3 if kind in ("accepted", "correction") else 0)
    assert len([attributes for _, attributes, _ in found.of("div") if attributes.get("class") == "round"]) == result["rounds"]


def test_a_page_needs_nothing_from_elsewhere(written):
    found, _ = written("--max-new-tokens", "10", *FIXED)
    assert not re.search(r"https?:|url\(|@import|<link|<iframe| src=| href=", found.source)
    assert "default-src 'none'" in found.of("meta")[2][1]["content"]


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_whatever_is_written_is_text_and_no_markup(written, tmp_path, kind):
    if kind == "bytes":  # one token each, half characters and control characters too
        model = write_folder(tmp_path / "bytes", LLAMA | {"vocab_size": 259, "max_position_embeddings": 2000, "num_hidden_layers": N_LAYER, "eos_token_id": []})
    else:
        model = write_model(tmp_path / "characters", eos=False, max_position=2000)
    found, result = written("--max-new-tokens", "400", *HOT, model=model, prompt=("--prompt", HOSTILE))
    assert len(found.of("script")) == 1 and HOSTILE in [text for *_, text in found.of("blockquote")]
    assert "\ufffd" not in found.source and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", found.source)
    assert len(found.spans) == len(result["token_ids"]) > 300
    expected = re.sub("[\ufffd\x00-\x08\x0b-\x1f\x7f-\x9f]", "", result["text"])
    assert "".join(text for *_, text in found.spans) == expected
    if kind == "bytes":
        labels = {attributes["data-label"] for _, attributes, text in found.spans if not text}
        assert all(re.fullmatch(r"<[89A-F][0-9A-F]>|\\x[0-9a-f]{2}|\\r|<.*\|?>|token \d+", name) for name in labels) and len(labels) > 100
    else:
        assert {"<", "'", '"', "&"} <= set(result["text"])


@pytest.mark.parametrize("options", [*[["--method", m] for m in METHODS if m not in ("draft_verify", "swift")], ["--gamma", "0"],
                                     ["--gamma-max", "0"], ["--temperature", "0.7", "--quiet"]])  # fmt: skip
def test_every_method_has_a_page(written, options):
    found, result = written("--max-new-tokens", "8", *options)
    assert len(found.spans) == 8 and sum(attributes.get("class") == "use" for _, attributes, _ in found.elements) >= 1
    assert bool(found.of("table")) == (result["latency"] is not None)


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_text_without_rounds_has_a_page(written, count):
    found, _ = written("--max-new-tokens", count, *FIXED)
    assert len(found.spans) == int(count) and "Rounds in time" not in found.source


def test_an_interrupted_run_has_a_page(knapspec, tmp_path, monkeypatch):
    class Interrupted(running.Printer):
        def __call__(self, token_id):
            super().__call__(token_id)
            if len(self.text) == 9:
                raise KeyboardInterrupt

    monkeypatch.setattr(running, "Printer", Interrupted)
    status, _, _, result = knapspec("--max-new-tokens", "40", "--html", str(tmp_path / "page.html"), *FIXED)
    found = Page(tmp_path / "page.html")
    assert (status, len(found.spans)) == (130, result["new_tokens"]) and "".join(text for *_, text in found.spans) == result["text"]


def traced(planner=None, **options):
    model = random_model(tiny_config(n_layer=5), faint=range(2, 8), epsilon=0.2)
    trace = Trace(planner or KnapSpec(latency_model(5), budget=0.9, **options), model)
    trace.token_ids = generate(trace.model, [3, 1, 4], max_new_tokens=40, planner=trace).token_ids
    return trace


def test_of_an_interrupted_round_the_page_has_what_was_shown():
    trace = traced(FixedPlanner(Plan(frozenset(), 4)))
    stand_in = SimpleNamespace(stream=lambda: SimpleNamespace(push=str))
    for count in (0, 1, 3, 6, 8):
        shown = page.text(trace.told(trace.token_ids[:count]), stand_in, count)
        assert [piece for *_, piece in shown] == [str(token_id) for token_id in trace.token_ids[:count]]


class InTurn(Planner):
    """Two drafts that skip as much as each other."""

    def plan(self, session):
        return Plan(frozenset({2, 4 + 2 * (session.generation.rounds % 2)}), 2)


def test_what_was_drafted_with_adds_up_and_covers_the_context():
    trace = traced(InTurn())
    uses = page.drafts(trace.steps, 5)
    assert len(uses) == 2 and sum(use["rounds"] for use in uses) == len(trace.steps) and sum(use["tokens"] for use in uses) == 39
    places = sorted(place for use in uses for place in use["places"])
    assert places[0][0] == uses[0]["start"] == 3 and sum(places[-1]) == uses[0]["end"]
    assert all(start + count == after for (start, count), (after, _) in itertools.pairwise(places))
    assert uses[0]["items"] == ["skip" if item in trace.steps[0].round.plan.skip_set else "full" for item in range(10)]


def test_the_chart_s_lines_are_the_rates_of_the_drafts_and_its_point_the_chosen_one():
    decision = traced().decision
    drawn = page.chart(decision)
    assert len(drawn["lines"]) == len(decision.drafts) and [line["chosen"] for line in drawn["lines"]].count(True) == 1
    chosen, (rate, gamma) = drawn["lines"][-1], decision.winner.best
    points = [tuple(map(float, point.split(","))) for point in chosen["points"].split()]
    assert points[gamma] == (chosen["x"], chosen["y"]) == min(points, key=lambda point: point[1])
    assert points[0][1] == drawn["plain"] and f"gamma {gamma}, {rate:.1f} tokens/s" in chosen["told"]
    ys = {name: y for y, name in drawn["rates"]}
    per_token = (ys["0"] - ys[max(ys, key=float)]) / float(max(ys, key=float))
    assert ys["0"] - chosen["y"] == pytest.approx(rate * per_token, abs=0.2)
    assert page.chart(traced(gamma_max=0).decision) is None


# --- The file --------------------------------------------------------------------------------------------------------


def test_a_page_that_cannot_be_written_is_refused_before_any_work(knapspec, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "load", None)
    (tmp_path / "link").symlink_to(tmp_path / "out.json")
    for path, words in (("/no/such/folder/page.html", "cannot write --html"), (tmp_path / "out.json", "pass two files"), (tmp_path / "link", "pass two files")):
        status, out, err, _ = knapspec("--html", str(path))
        assert (status, out, err.count("\n")) == (2, "", 1) and words in err


# --- A browser -------------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
def test_a_browser_shows_the_text_and_what_is_told_of_a_token(written, tmp_path):
    found, _ = written("--max-new-tokens", "30", *HOT, prompt=("--prompt", HOSTILE))
    point = "<script>document.title = document.querySelector('.text').textContent.length; document.querySelectorAll('.text .t')[4].focus()</script>"
    (tmp_path / "page.html").write_text(found.source.replace("</body>", point + "</body>"), "utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/page.html"]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    (tmp_path / "dom.html").write_text(dom, "utf-8")
    seen = Page(tmp_path / "dom.html")
    assert [text for *_, text in seen.spans] == [text for *_, text in found.spans]
    assert seen.of("title")[0][2] == str(sum(len(text.encode("utf-16-le")) // 2 for *_, text in found.spans))
    _, attributes, _ = seen.spans[4]
    shown = [text for *_, text in seen.elements[seen.elements.index(seen.of("h3")[0]) :]]
    assert shown[0] == attributes["data-label"] and f"round {attributes['data-round']}: {attributes['data-told']}" in shown
    for name, prob in json.loads(attributes["data-target"]):
        assert name in shown and f"{100 * prob:.1f}%" in shown

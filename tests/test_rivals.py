"""The rivals all together: none changes the text, and the registry makes them by name."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decoding import generate
from rivals import RIVALS, draft_verify, make_planner, swift
from rivals.asd import ASD
from rivals.clasp import Clasp
from rivals.del_ import DEL
from rivals.draft_verify import DraftVerify
from rivals.kangaroo import Kangaroo
from rivals.layerskip import LayerSkip
from rivals.prompt_lookup import PromptLookup
from rivals.swift import Swift
from tests.testing_models import random_model, tiny_config
from tests.testing_rivals import CONFIG, PROMPT, L, NoSuggestions

FOLDER = Path(__file__).parent.parent
MADE = {
    "layerskip": lambda: LayerSkip(L),
    "kangaroo": lambda: Kangaroo(L),
    "del": lambda: DEL(L),
    "asd": lambda: ASD(similarity=0.5),
    "draft_verify": lambda: DraftVerify(frozenset({2, 5, 6})),
    "swift": lambda: Swift(L, context=4, bayes_interval=None),
    "clasp": lambda: Clasp(L, interval=2),
    "prompt_lookup": PromptLookup,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_greedy_text_is_that_of_plain_decoding(make):
    model, planner = random_model(CONFIG), make()
    for prompt, new in ((PROMPT, 40), (PROMPT[:1], 15)):  # a planner outlives a prompt
        wanted = generate(model, prompt, max_new_tokens=new).token_ids
        generation = generate(model, prompt, max_new_tokens=new, planner=planner)
        assert generation.token_ids == wanted
        assert generation.drafted > 0


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_sampled_text_depends_on_the_seed_alone(make):
    model = random_model(CONFIG)
    runs = [generate(model, PROMPT, max_new_tokens=12, temperature=0.8, top_p=0.9, planner=make(),
                     rng=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]  # fmt: skip
    assert runs[0].token_ids == runs[1].token_ids != runs[2].token_ids
    assert runs[0].drafted > 0


def test_make_planner_makes_every_rival_and_nothing_else(monkeypatch):
    for module in (draft_verify, swift):
        monkeypatch.setattr(module, "Bayes", NoSuggestions)
    model = random_model(CONFIG)
    made = {name: make_planner(name, model, calibration=[PROMPT], search_s=0.0) for name in RIVALS}
    assert {name: type(planner) for name, planner in made.items()} == {name: type(make()) for name, make in MADE.items()}
    with pytest.raises(ValueError, match="unknown method 'medusa': choose one of layerskip, kangaroo"):
        make_planner("medusa", model)
    with pytest.raises(ValueError, match="pass calibration"):
        make_planner("draft_verify", model)


def test_only_what_needs_no_layers_is_made_for_a_model_of_two_blocks():
    model = random_model(tiny_config(n_layer=2))
    for name in RIVALS.keys() - {"prompt_lookup"}:
        with pytest.raises(ValueError, match=f"{name} needs a model of at least 3 blocks; this one has 2"):
            make_planner(name, model)
    assert isinstance(make_planner("prompt_lookup", model), PromptLookup)


def test_gamma_max_bounds_each_methods_own_longest_draft():
    model = random_model(CONFIG)
    own = {"layerskip": 6, "kangaroo": 6, "del": 17, "asd": 12, "clasp": 10, "prompt_lookup": 10}
    assert {name: make_planner(name, model).gamma for name in own} == own
    assert {name: make_planner(name, model, gamma_max=8).gamma for name in own} == {name: min(own[name], 8) for name in own}


@pytest.mark.parametrize("name", RIVALS)
def test_the_registry_tells_who_needs_a_package_and_the_error_says_how_to_install_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    refused = pytest.raises(ValueError, match="pip install bayesian-optimization$")
    with refused if RIVALS[name].needs == "bayes_opt" else contextlib.nullcontext():
        make_planner(name, random_model(CONFIG), calibration=[PROMPT])
    assert RIVALS[name].needs in (None, "bayes_opt")


def test_reading_the_registry_imports_no_rival():
    program = "import sys, rivals; print([m for m in sys.modules if m.startswith('rivals.') or m in ('torch', 'decoding')])"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=FOLDER, text=True).strip() == "[]"

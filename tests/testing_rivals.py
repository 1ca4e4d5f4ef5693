"""For the tests of the rivals: a small setting, a model that is as sure as it is told, and no Bayesian search."""

import importlib.util

import pytest
import torch

from decoding import Plan, draft
from model import KVCache
from tests.testing_models import random_tokens, tiny_config

L = 6
CONFIG = tiny_config(n_layer=L)
PROMPT = random_tokens(40, CONFIG).tolist()
needs_bayes = pytest.mark.skipif(importlib.util.find_spec("bayes_opt") is None, reason="bayesian-optimization is not installed")


class Confident:
    """In place of a model: the confidence of each drafted token in turn; every token is 0."""

    device = torch.device("cpu")

    def __init__(self, confidences, V=50):
        self.rows = [torch.full((1, V), (1 - c) / (V - 1)).index_fill_(1, torch.tensor([0]), c).log() for c in confidences]

    def __call__(self, tokens, cache, **options):
        return self.rows.pop(0)


def submitted(planner, confidences):
    """How many tokens a planner submits when drafting with these confidences."""
    plan, cache = Plan(planner.skip_set, planner.gamma), KVCache(CONFIG, 1)
    return len(draft(Confident(confidences), cache, 0, plan, lambda c: planner.keep_drafting(None, plan, c), 0.0, 1.0, None)[0])


class NoSuggestions:
    """In place of Bayes where the first guesses are all that is tried."""

    def __init__(self, n, **_):
        self.seen = []

    def register(self, point, score):
        self.seen.append((point, score))

    def suggest(self):
        raise AssertionError("no suggestion was wanted")

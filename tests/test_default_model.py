"""The default model, a real one: its text does not depend on what is drafted. Skipped where it is not in the cache.

Rejection, acceptance and end-of-text are seen where they really occur.
`ALL_PROMPTS=1 pytest test_default_model.py` runs 64 tokens of the whole of prompts.jsonl in place of 16 of a short prompt.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from decoding import FixedPlanner, Plan, generate
from loading import checkpoint

PROMPTS = [json.loads(line) for line in (Path(__file__).parent.parent / "benchmark" / "prompts.jsonl").read_text("utf-8").splitlines()]
FEW = [prompt for prompt in PROMPTS if prompt["id"] == "code-merge"]


@pytest.fixture(scope="module")
def default_model():
    if not (checkpoint.cache_folder() / "SmolLM2-135M-Instruct").is_dir():
        pytest.skip("the default model is not in the cache: run python knapspec.py once")
    return checkpoint.load(dtype=torch.float32, device="cpu", progress=False)


@pytest.mark.parametrize("prompt", PROMPTS if os.environ.get("ALL_PROMPTS") else FEW, ids=lambda prompt: prompt["id"])
def test_drafts_do_not_change_the_text(default_model, prompt):
    model, tokenizer = default_model
    ids = tokenizer.chat(prompt["prompt"])
    options = {"max_new_tokens": 64 if os.environ.get("ALL_PROMPTS") else 16, "eos_ids": tokenizer.eos_ids}
    plain = generate(model, ids, **options)
    generation = generate(model, ids, planner=FixedPlanner(Plan(frozenset({20, 21, 24, 33, 40, 41}), 4)), **options)
    assert generation.token_ids == plain.token_ids
    assert 0 < generation.accepted < generation.drafted

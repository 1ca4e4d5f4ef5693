"""Draft & Verify: a skip set found beforehand by Bayesian optimisation of the speed on a few prompts."""

import functools
import json
import math
import time
from pathlib import Path

from tqdm import tqdm

from decoding import generate
from rivals.common import AdaptiveStop, Bayes, odd_blocks, whole_blocks

PROMPTS = Path(__file__).parent.parent / "benchmark" / "prompts.jsonl"


class DraftVerify(AdaptiveStop):
    """Drafts with a skip set that search_skip_set found beforehand.

    Source: Draft & Verify (arXiv 2309.08168); defaults of its evaluation notebooks. Differs: the threshold's rule is
    the same when sampling, where the published code begins at another threshold.
    """

    def __init__(self, skip_set, **stop):
        super().__init__(**stop)
        self.skip_set = skip_set

    @classmethod
    def make(cls, model, *, progress, tokenizer, calibration, search_s):
        prompts, start_s = calibration or first_prompts(tokenizer), time.perf_counter()
        L, objective = model.config.n_layer, functools.partial(speed, model, prompts)
        planner = cls(search_skip_set(L, objective, seconds=search_s, progress=progress))
        planner.search_s = time.perf_counter() - start_s
        return planner


def first_prompts(tokenizer):
    """The first 8 of prompts.jsonl as lists of token ids. Raises ValueError without a tokenizer."""
    if tokenizer is None:
        raise ValueError("draft_verify searches on prompts: pass calibration (lists of token ids) or a tokenizer")
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text("utf-8").splitlines()[:8]]
    return [tokenizer.encode(p) if tokenizer.chat_template is None else tokenizer.chat(p) for p in prompts]


def search_skip_set(n_layer, objective, *, iterations=1000, seconds=math.inf, kappa=2.576, seed=1, progress=False):
    """The skip set with the largest objective(skip_set) seen: two first guesses, then Bayesian optimisation.

    Every sublayer is a coordinate in [0, 1], skipped above 0.5, none protected. Ends after `iterations` suggestions or
    before the first evaluation that would begin after `seconds`; without any, it is the first guess. Source: Draft &
    Verify's searching.py. Differs: its first guesses, masks known for its models, are the odd blocks and their attention.
    """
    bayes = Bayes(2 * n_layer, kappa=kappa, seed=seed)
    odd = whole_blocks(odd_blocks(n_layer))
    guesses = [odd, frozenset(item for item in odd if item % 2 == 0)]
    best, best_skip_set, start_s = -math.inf, guesses[0], time.perf_counter()
    for i in tqdm(range(2 + iterations), desc="searching a skip set", disable=None if progress else True, leave=False):
        if time.perf_counter() - start_s >= seconds:
            break
        point = [float(item in guesses[i]) for item in range(2 * n_layer)] if i < len(guesses) else bayes.suggest()
        skip_set = skipped_above_half(point)
        score = objective(skip_set)
        bayes.register(point, score)
        if score > best:
            best, best_skip_set = score, skip_set
    return best_skip_set


def skipped_above_half(point):
    return frozenset(item for item, x in enumerate(point) if x > 0.5)


def speed(model, prompts, skip_set, new_tokens=32):
    """Tokens per second over all prompts (lists of ids): Draft & Verify's objective, at its code's default stopping."""
    planner = DraftVerify(skip_set, gamma=8, threshold=0.8)
    runs = [generate(model, prompt, max_new_tokens=new_tokens, planner=planner) for prompt in prompts]
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds["total"] for run in runs)

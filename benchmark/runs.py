"""Runs: one decode and what it tells, methods that take turns with plain decoding, and what many runs say together."""

import copy
import functools
import statistics
from collections import deque
from unittest.mock import patch

import torch
from tqdm import tqdm

from cli.report import rate
from cli.running import difference
from decoding import Planner, generate, prefill


class Recorder(Planner):
    """Leaves every decision to another planner, and keeps the rounds."""

    def __init__(self, planner):
        self.planner, self.window, self.rounds = planner, planner.window, []

    def plan(self, session):
        return self.planner.plan(session)

    def keep_drafting(self, session, plan, confidences):
        return self.planner.keep_drafting(session, plan, confidences)

    def observe(self, session, round):
        self.rounds.append(round)
        self.planner.observe(session, round)


def decode(model, prompt_ids, planner, *, seed=0, **options):
    """generate() with its options -> the run: new token ids, tokens per second, seconds, counts.

    tried: drafted tokens up to and including the first that was rejected, so that accepted / tried is the chance that
    one is accepted; expected: how many of them the plans' α promised. skipped_attention, skipped_mlp: summed over the
    tokens that a model drafted. search_s: a part of the seconds for planning; searched_s: with the planner's runs before.
    """
    recorder, searched_s = Recorder(planner), getattr(planner, "search_s", 0.0)
    generation = generate(model, prompt_ids, planner=recorder, rng=torch.Generator().manual_seed(seed), **options)
    run = {name: getattr(generation, name) for name in ("token_ids", "seconds", "rounds", "drafted", "accepted", "given", "given_accepted")}
    run |= {"new_tokens": len(generation.token_ids), "tokens_per_second": rate(generation)}
    tried = [min(r.accepted + 1, r.drafted) for r in recorder.rounds]
    run |= {"tried": sum(tried), "expected": sum(r.plan.alpha * count for r, count in zip(recorder.rounds, tried))}
    for i, kind in enumerate(("attention", "mlp")):
        drafts = [r for r in recorder.rounds if not r.plan.tokens]
        run[f"skipped_{kind}"] = sum(r.drafted * sum(item % 2 == i for item in r.plan.skip_set) for r in drafts)
    searched_now_s = getattr(planner, "search_s", 0.0)
    return run | {"search_s": searched_now_s - searched_s, "searched_s": searched_now_s}


class Prefills:
    """decoding.prefill for runs of one prompt after another: a prompt's forward, which no rate counts, is made once and copied."""

    def __init__(self):
        self.prompt, self.made = None, {}

    def __call__(self, session, tokens):
        if self.prompt != (session.model, tokens):
            self.prompt, self.made = (session.model, tokens), {}
        cache, settings = session.cache, (session.wanted, session.temperature, session.top_p)
        if settings not in self.made:
            target_probs = prefill(session, tokens)
            parts = [t[:, :, : cache.length].clone() for t in (cache.keys, cache.values)]
            self.made[settings] = *parts, list(session.recent), target_probs
        keys, values, recent, target_probs = self.made[settings]
        cache.length = len(tokens)
        cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length] = keys, values
        session.recent = deque(recent)
        return target_probs


def fresh(model, planner, options):
    """A method: prompt ids -> a run, by a new copy of the planner each time, as a command has one."""
    return lambda prompt_ids: decode(model, prompt_ids, copy.deepcopy(planner), **options)


def beside_plain(model, prompt_ids, methods, *, options, repeats=1, backwards=False):
    """Each method ({name: function of the ids}) beside plain decoding -> yields its runs, each with its speed-up over the plain one.

    Two of them share the plain run between them: a, plain, b, c, plain, d. Every other repeat, and the first if
    `backwards`, goes the other way, so that each comes before its plain run as often as after it.
    options: of decode(). A greedy run tells whether its text is `identical` or where the `difference` is.
    """
    names = list(methods)
    groups = [(names[i], None, *names[i + 1 : i + 2]) for i in range(0, len(names), 2)]
    for repeat in range(repeats):
        step = 1 if repeat % 2 == backwards else -1
        for group in groups[::step]:
            runs = {name: decode(model, prompt_ids, Planner(), **options) if name is None else methods[name](prompt_ids) for name in group[::step]}
            plain = runs.pop(None)
            for name, run in runs.items():
                token_ids, rates = run.pop("token_ids"), (run["tokens_per_second"], plain["tokens_per_second"])
                run |= {"method": name, "repeat": repeat, "speedup": rates[0] / rates[1] if all(rates) else None}
                if options.get("temperature", 0.0) == 0:
                    run["identical"] = token_ids == plain["token_ids"]
                    if not run["identical"]:
                        _, run["gap"] = difference(model, prompt_ids, token_ids, plain["token_ids"])
                yield run


def side_by_side(results, model, prompts, make_methods, *, options, repeats=1, key=""):
    """Each method on each prompt beside plain decoding -> {prompt id: {"prompt_tokens", "runs"}}, kept after each prompt.

    prompts: [(id, token ids)]; key: before the id in results. make_methods() -> {name: function of a prompt's ids that
    returns a run}, called only if anything is left to do.
    """
    ready, found = functools.cache(make_methods), {}
    bar = tqdm(prompts, unit="prompt", leave=False, disable=None)

    def measure(prompt_ids, backwards):
        if not ready.cache_info().currsize:
            decode(model, prompt_ids, Planner(), **options | {"max_new_tokens": 4})  # the first forwards are slow
        methods = ready()
        with patch("decoding.prefill", Prefills()):
            runs = list(beside_plain(model, prompt_ids, methods, options=options, repeats=repeats, backwards=backwards))
        return {"prompt_tokens": len(prompt_ids), "runs": runs}

    for i, (prompt_id, prompt_ids) in enumerate(bar):
        bar.set_description(key + prompt_id)
        found[prompt_id] = results.once(key + prompt_id, functools.partial(measure, prompt_ids, i % 2 == 1))
    return found


def median(values):
    """Of those that are not None; None if there is none."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def runs_of(found, method):
    """All runs of one method in what side_by_side() returns."""
    return [run for prompt in found.values() for run in prompt["runs"] if run["method"] == method]


def speedups(found, method):
    """{prompt id: the method's median speed-up there}, where the text is long enough for one."""
    medians = {prompt_id: median(run["speedup"] for run in runs_of({0: prompt}, method)) for prompt_id, prompt in found.items()}
    return {prompt_id: value for prompt_id, value in medians.items() if value is not None}


def other_texts(found):
    """To be told only where a text was not plain decoding's: a fault in float32, in half precision a near-tie if the gap is small."""
    gaps = [run["gap"] for prompt in found.values() for run in prompt["runs"] if not run.get("identical", True)]
    return f", ANOTHER TEXT in {len(gaps)} runs: the two best logits are up to {max(gaps):.2g} apart where it begins" if gaps else ""

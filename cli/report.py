"""What is told of a run: the fields of the JSON file, and the short report on standard error."""

import dataclasses
import json
import os
import sys
import tempfile

from cli.methods import WAYS
from cli.terminal import ascii_only
from loading.caches import write_text


def rate(*generations):
    """Tokens per second after the first token, which the prompt's own forward gives. None if there are no more."""
    tokens = sum(max(len(g.token_ids) - 1, 0) for g in generations)
    seconds = sum(g.seconds["total"] - g.seconds["prefill"] for g in generations)
    return tokens / seconds if tokens else None


def measurements(generation, text, clock, latency):
    """The fields of the JSON file that tell of one run. clock: before loading, before and after profiling."""
    new, rounds, drafted, accepted = len(generation.token_ids), generation.rounds, generation.drafted, generation.accepted
    return {
        "new_tokens": new, "token_ids": generation.token_ids, "text": text, "stop_reason": generation.stop_reason,
        "seconds": {"load": clock[1] - clock[0], "profile": clock[2] - clock[1], **generation.seconds},
        "tokens_per_second": rate(generation),
        "rounds": rounds, "drafted": drafted, "accepted": accepted, "acceptance_rate": accepted / drafted if drafted else None,
        "looked_up": generation.given, "looked_up_accepted": generation.given_accepted,
        "tokens_per_round": (new - 1) / rounds if rounds else None,
        "latency": latency and dataclasses.asdict(latency),
        "plans": [
            {"position": position, "skip_set": sorted(plan.skip_set), "choices": plan.choices, "gamma": plan.gamma,
             "alpha": plan.alpha, "predicted_tokens_per_second": plan.tokens_per_second, "seconds": seconds}
            for position, plan, seconds in generation.plans
        ],
    }  # fmt: skip


def check_writable(option, path):
    """Raises ValueError before much work is spent on a file that cannot be written. option: which one names it."""
    if path.name in ("", "-") or path.exists() and not path.is_file():
        raise ValueError(f"{option} {path} is not a file: pass the name of one")
    if path.exists() and sys.stdout and os.path.samestat(path.stat(), os.fstat(1)):  # it would take the text's place
        raise ValueError(f"{option} {path} is where the text goes: pass another file")
    try:
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ValueError(f"cannot write {option} {path} ({error.strerror}): pass a file in a folder of your own") from None


def write_json(path, result):
    """Whoever reads the file never sees half of it."""
    write_text(path, json.dumps(result, ensure_ascii=False, indent=1) + "\n")


def lines(method, config, result, *, untemplated, planner):
    """The short report on standard error, as lines. untemplated: there was no chat template to set the prompt in."""
    reasons = {"eos": "end of text", "length": "--max-new-tokens reached", "interrupted": "interrupted",
               "context": f"shortened: the model's context of {config.max_position} tokens is full"}  # fmt: skip
    count = f"{result['new_tokens']} new tokens after {result['prompt_tokens']} of prompt"
    told = [f"{count}: {per_second(result['tokens_per_second'])} ({reasons[result['stop_reason']]})"]
    if untemplated:
        told.append("the model has no chat template: the prompt was continued as it stands")
    if result["drafted"]:
        accepted = f"{result['accepted']} of {result['drafted']} drafted tokens accepted ({result['acceptance_rate']:.0%})"
        given = f", of these {result['looked_up_accepted']} of {result['looked_up']} looked up in the text" if result["looked_up"] else ""
        told.append(f"{accepted}{given}, {result['tokens_per_round']:.2f} tokens per round")
    told += plan_lines(method, config.n_layer, result, planner)
    parts = {"load": "loading", "profile": "profiling", "prefill": "prompt", "draft": "drafting", "verify": "verifying", "plan": "planning"}
    return [*told, "seconds: " + ", ".join(f"{name} {result['seconds'][key]:.2f}" for key, name in parts.items())]


def per_second(tokens):
    return "too short for a rate" if tokens is None else f"{tokens:.1f} tokens/s"


def plan_lines(method, n_layer, result, planner=None):
    """The plan in use as a strip of 2L cells, attention over MLP; or what happened where the model drafted nothing."""
    plans, drafting = result["plans"], [plan for plan in result["plans"] if plan["gamma"] > 0]
    if not drafting and result["looked_up"]:
        return ["all drafts were looked up"]
    if not plans:
        return ["no plan was made: plans are for the tokens after the first"]
    if not drafting and getattr(planner, "planned_s", None) == 0:  # knapspec+ looked, and did not begin
        return ["plain decoding: no gain was in sight that would have paid for solving the knapsack"]
    if not drafting:
        return [f"plain decoding: no draft {'promised to be faster' if method in ('knapspec+', 'knapspec', 'uniform') else 'was made'}"]
    plan, plainly = drafting[-1], ascii_only()
    signs = {"full": ("█", "#"), "skip": ("░", "."), **{name: way.signs for name, way in WAYS.items()}}
    choices = plan["choices"] or ["full"] * (2 * n_layer)
    names = ["skip" if item in plan["skip_set"] else choices[item] for item in range(2 * n_layer)]
    cells = "".join(signs[name][plainly] for name in names)
    legend = ", ".join(f"{sign[plainly]} {name}" for name, sign in signs.items() if name in names)
    predicted = plan["predicted_tokens_per_second"]
    expected = "" if predicted is None else f", {predicted:.1f} tokens/s expected"
    skipped = f"skip {len(plan['skip_set'])} of {2 * n_layer} sublayers, draft up to {plan['gamma']} tokens"
    at_the_end = [] if plans[-1] is plan else ["  at the end plain decoding was expected to be faster"]
    return [f"plan: {skipped}{expected} ({legend})", f"  attention {cells[::2]}", f"  MLP       {cells[1::2]}", *at_the_end]

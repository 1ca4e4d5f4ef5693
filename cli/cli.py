"""The command line of knapspec.py: options, the text while it is made, the report, the comparison, the JSON file.

Standard output carries the text alone, closed by a newline; everything else goes to standard error. A mistake of the
user is one line and exit status 2; Ctrl-C keeps what was printed and is 130; a reader that closes the pipe is 0.
"""

import argparse
import copy
import dataclasses
import inspect
import json
import logging
import math
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from profile import latency_model

import torch
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from beyond.graphs import use_graphs
from decoding import FixedPlanner, Plan, Planner, generate
from knapspec import KnapSpec
from loading import load
from model import KVCache
from rivals import RIVALS
from rivals import make_planner as make_rival

VERSION = "0.1.0"
METHODS = ("knapspec", "autoregressive", *RIVALS)
KNAPSPEC_OPTIONS = ("gamma_max", "window", "interval", "tau", "budget")  # handed on where given
DEFAULTS = {name: inspect.signature(KnapSpec).parameters[name].default for name in KNAPSPEC_OPTIONS}


def main(argv=None):
    """Runs the command line and returns the exit status; argv None is that of the process."""
    try:
        if sys.stdout:
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale
        return run(parse(argv))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what standard output could not take would fail again at the exit
        return 0 if isinstance(error, BrokenPipeError) else fail(error)
    except (ValueError, FloatingPointError) as error:
        return fail(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):  # torch has no class of its own for the CPU's
            raise
        return fail("out of memory: pass a smaller --max-new-tokens, a shorter prompt or a smaller model")


def fail(error):
    say(f"knapspec.py: {' '.join(str(error).split())}")  # one line, whatever the error holds
    return 2


def say(text):
    if sys.stderr:  # None where it is closed, and print would take standard output
        print(text, file=sys.stderr)


# --- Options ---------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def number(kind, low, high=math.inf):
    """An argparse type: an int or a float from low to high."""

    def parse_number(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf:
            bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number {bounds}")
        return value

    return parse_number


def item_list(text):
    try:
        return frozenset(int(item) for item in text.split(",") if item)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of items such as 20,21,24") from None


def choice_list(text):
    names = text.split(",")
    if not {"full", "skip"} <= set(names) <= {"full", "int8", "window", "skip"}:
        raise argparse.ArgumentTypeError(f"{text!r}: pass full,skip and, if wanted, int8 and window: full,int8,window,skip")
    return names


def build_parser():
    """All options of knapspec.py; one that belongs to a method is None where it was not given."""
    parser = Parser(
        prog="knapspec.py", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Decode with a language model that drafts for itself: the same text as plain decoding, in less time.",
        epilog="Items: 2i is the attention of layer i, 2i + 1 its MLP. Tokens/s count the tokens after the first, and the\n"
               "time from the first token to the last, planning included; the first comes out of the prompt.",
    )  # fmt: skip
    add = parser.add_argument
    add("--model", metavar="NAME", help="folder or Hugging Face Hub id (default: SmolLM2-135M-Instruct)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to answer or, with --raw, to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file; - is standard input")
    add("--system", metavar="TEXT", help="system message for the chat template")
    add("--raw", action="store_true", help="no chat template: continue the prompt as it stands")
    add("--max-new-tokens", type=number(int, 0), default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0 takes the likeliest token (default)")
    add("--top-p", type=number(float, 0, 1), default=1.0, metavar="P", help="sample from the likeliest tokens up to this mass")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="for sampling (default: %(default)s)")
    add("--method", choices=METHODS, help="how drafts are made (default: knapspec); autoregressive makes none")
    add("--gamma-max", type=number(int, 0, 64), metavar="N", help=f"longest draft (knapspec: {DEFAULTS['gamma_max']})")
    add("--window", type=number(int, 1, 4096), metavar="N", help=f"tokens to judge a plan on (default: {DEFAULTS['window']})")
    add("--interval", type=number(int, 1), metavar="N", help=f"tokens between plans (default: {DEFAULTS['interval']})")
    add("--tau", type=number(float, -1, 1), metavar="X", help=f"least cosine of drafted states (default: {DEFAULTS['tau']})")
    budget = f"largest share of the sublayers' time that a draft may save (default: {DEFAULTS['budget']})"
    add("--budget", type=number(float, 0, 1), metavar="X", help=budget)
    add("--choices", type=choice_list, metavar="LIST", help="what may become of an item in a draft: full,skip is the paper;"
        " int8 keeps it on 8-bit weights, window lets attention see a part of the context (default: all that can be had)")
    add("--skip", type=item_list, metavar="LIST", help="fixed plan: skip these items, as in 20,21,24; needs --gamma")
    add("--gamma", type=number(int, 0), metavar="N", help="fixed plan: draft N tokens a round; 0 is plain decoding")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)")
    add("--compare", action="store_true", help="also time this method against plain decoding, two silent runs of each")
    add("--json", metavar="FILE", help="write everything measured to FILE")
    add("--quiet", action="store_true", help="no progress bars and no report")
    versions = f"knapspec {VERSION} (torch {torch.__version__}, Python {platform.python_version()})"
    add("--version", action="version", version=versions)
    return parser


def parse(argv):
    """Options as an argparse.Namespace; method None stands for a fixed plan. Raises ValueError."""
    args = build_parser().parse_args(argv)
    args.quiet, fixed = args.quiet or not sys.stderr, args.gamma is not None
    if args.raw and args.system is not None:
        raise ValueError("--system is part of the chat template, which --raw leaves out: drop one of them")
    if args.skip is not None and not fixed:
        raise ValueError("--skip is half of a fixed plan: add --gamma, the number of tokens to draft")
    if fixed and args.method:
        raise ValueError("--gamma fixes the plan, so --method has nothing to choose: drop one of them")
    args.method = None if fixed else args.method or "knapspec"
    for name in (*KNAPSPEC_OPTIONS, "choices"):
        rival = name == "gamma_max" and args.method not in (None, "autoregressive")
        if getattr(args, name) is not None and args.method != "knapspec" and not rival:
            used = "a fixed plan" if fixed else f"--method {args.method}"
            raise ValueError(f"--{name.replace('_', '-')} means nothing to {used}: drop one of them")
    return args


def read_prompt(args):
    """The text of --prompt, or of --prompt-file, in UTF-8. Raises ValueError."""
    if args.prompt is not None:
        return args.prompt
    source = 0 if args.prompt_file == "-" else args.prompt_file
    try:
        with open(source, "rb", closefd=source != 0) as file:
            return file.read().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read --prompt-file {args.prompt_file} ({error.strerror}): pass a text file") from None
    except UnicodeDecodeError:
        raise ValueError(f"--prompt-file {args.prompt_file} is not UTF-8: convert it, for example with iconv") from None


def encode_prompt(args, prompt, tokenizer, config):
    """The prompt's token ids, in the chat template if there is one. Raises ValueError if they are none or too many."""
    plain = args.raw or (tokenizer.chat_template is None and args.system is None)
    ids = tokenizer.encode(prompt) if plain else tokenizer.chat(prompt, args.system)
    if not ids and tokenizer.bos_id is None:
        raise ValueError("the prompt is empty and the model has no begin-of-text token to start from: pass some text")
    ids = ids or [tokenizer.bos_id]
    if len(ids) >= config.max_position:
        raise ValueError(f"the prompt has {len(ids)} tokens, the model takes {config.max_position - 1} at most: shorten it")
    return ids


# --- Running ---------------------------------------------------------------------------------------------------------


class Printer:
    """Prints the text of new tokens as it becomes certain, and keeps it."""

    def __init__(self, tokenizer):
        self.stream, self.text = tokenizer.stream(), ""

    def __call__(self, token_id):
        if piece := self.stream.push(token_id):
            self.text += piece
            print(piece, end="", flush=True)


def run(args):
    """Loads, profiles, decodes, compares and reports; returns the exit status."""
    prompt = read_prompt(args)
    if args.json:
        check_writable(Path(args.json))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what failed in the end is told in our line
    if args.quiet:
        disable_progress_bars()
    clock = [time.perf_counter()]
    model, tokenizer = load(args.model, device=args.device, dtype=args.dtype, progress=not args.quiet)
    if model.device.type == "cuda":
        use_graphs(model)
    clock.append(time.perf_counter())
    prompt_ids = encode_prompt(args, prompt, tokenizer, model.config)
    fresh, latency = make_planner(args, model, tokenizer, len(prompt_ids))
    clock.append(time.perf_counter())

    def decode(planner, on_token=None):
        return generate(
            model, prompt_ids, max_new_tokens=args.max_new_tokens, eos_ids=tokenizer.eos_ids,
            temperature=args.temperature, top_p=args.top_p, rng=torch.Generator().manual_seed(args.seed),
            planner=copy.deepcopy(planner), on_token=on_token,  # a planner learns: each run gets a fresh one
        )  # fmt: skip

    status, printer, comparison = 0, Printer(tokenizer), ({}, [])
    try:
        generation = decode(fresh, printer)
    except KeyboardInterrupt as interrupt:
        if not hasattr(interrupt, "generation"):
            raise
        status, generation = 130, interrupt.generation
    print(flush=True)
    if args.compare and status == 0:
        try:
            comparison = compare(args, model, prompt_ids, generation, decode, fresh)
        except KeyboardInterrupt:
            status, comparison = 130, ({}, ["the comparison was interrupted"])
    result = {"model": args.model or "SmolLM2-135M-Instruct", "device": str(model.device)}
    result |= {"dtype": str(model.dtype).removeprefix("torch."), "prompt_tokens": len(prompt_ids)}
    result |= measurements(generation, printer.text, clock, latency) | comparison[0]
    if not args.quiet:
        say("\n".join(["", *report(args, model.config, result), *comparison[1]]))
    if args.json:
        write_json(Path(args.json), result)
    return status


def make_planner(args, model, tokenizer, prompt_tokens):
    """The planner that the options ask for, and the LatencyModel that it needed or None. Raises ValueError."""
    if args.method is None:
        skip_set, items = args.skip or frozenset(), 2 * model.config.n_layer
        if not skip_set <= set(range(items)):
            outside = min(skip_set - set(range(items)))
            raise ValueError(f"--skip {outside} is no item of this model: pass numbers from 0 to {items - 1}")
        return FixedPlanner(Plan(skip_set, args.gamma)), None
    if args.method == "autoregressive":
        return Planner(), None
    if args.method == "knapspec":
        given = {name: getattr(args, name) for name in KNAPSPEC_OPTIONS if getattr(args, name) is not None}
        context = min(prompt_tokens + args.max_new_tokens, model.config.max_position)
        gamma_max = given.get("gamma_max", DEFAULTS["gamma_max"])
        choices = find_choices(args, model)
        latency = latency_model(model, context=context, gamma_max=gamma_max, progress=not args.quiet)
        return KnapSpec(latency, choices=choices, **given), latency
    options = {"gamma_max": args.gamma_max, "progress": not args.quiet, "tokenizer": tokenizer}
    return make_rival(args.method, model, **options), None


def find_choices(args, model):
    """What may become of an item; the model's table gets what it lacks for that. Raises ValueError."""
    try:
        from beyond import shortcuts
    except ImportError:  # without that file this is the paper's method
        if set(args.choices or ()) - {"full", "skip"}:
            raise ValueError("shortcuts.py is missing: pass --choices full,skip") from None
        return ["full", "skip"]
    return shortcuts.add_choices(model, args.choices, progress=not args.quiet)


def rate(*generations):
    """Tokens per second after the first token, which the prompt's own forward gives. None if there are no more."""
    tokens = sum(max(len(g.token_ids) - 1, 0) for g in generations)
    seconds = sum(g.seconds["total"] - g.seconds["prefill"] for g in generations)
    return tokens / seconds if tokens else None


def compare(args, model, prompt_ids, shown, decode, fresh):
    """Plain decoding against the method, in turn -> the fields of the JSON file, and lines of the report.

    The run that was shown is checked, but does not count: it warmed the machine up.
    """
    plain, drafted = [], []
    turns = [(plain, None), (drafted, fresh), (drafted, fresh), (plain, None)]
    for runs, planner in tqdm(turns, desc="Comparing", unit="run", leave=False, disable=True if args.quiet else None):
        runs.append(decode(planner))
    rates, token_ids = (rate(*drafted), rate(*plain)), plain[0].token_ids
    speedup = rates[0] / rates[1] if all(rates) else None
    lines = ["compared with plain decoding, two more runs of each in turn (planning counts, the prompt does not):"]
    if speedup:
        lines.append(f"  speed-up {speedup:.2f}: {per_second(rates[0])}, plainly {per_second(rates[1])}")
    identical = None
    if args.temperature > 0:
        lines.append("  same distribution, not the same text: both are sampled")
    else:
        others = [g.token_ids for g in (shown, *drafted) if g.token_ids != token_ids]
        identical = not others
        lines.append(f"  token ids: {'the same' if identical else difference(model, prompt_ids, others[0], token_ids)}")
    baseline = {"tokens_per_second": rates[1], "token_ids": token_ids}
    return {"baseline": baseline, "speedup": speedup, "identical": identical}, lines


def difference(model, prompt_ids, a, b):
    """Where two lists of new token ids part, and how close the target's decision was there."""
    position = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    tokens = torch.tensor([*prompt_ids, *a[:position]], device=model.device)
    cache = KVCache(model.config, len(tokens), device=model.device, dtype=model.dtype)
    first, second = model(tokens, cache, last=1)[0].float().topk(2).values.tolist()
    return f"different from new token {position + 1} on, where the target's two best logits are {first - second:.2g} apart"


# --- What is told ----------------------------------------------------------------------------------------------------


def measurements(generation, text, clock, latency):
    """The fields of the JSON file that tell of one run. clock: before loading, before and after profiling."""
    new, rounds, drafted, accepted = len(generation.token_ids), generation.rounds, generation.drafted, generation.accepted
    return {
        "new_tokens": new,
        "token_ids": generation.token_ids,
        "text": text,
        "stop_reason": generation.stop_reason,
        "seconds": {"load": clock[1] - clock[0], "profile": clock[2] - clock[1], **generation.seconds},
        "tokens_per_second": rate(generation),
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": (new - 1) / rounds if rounds else None,
        "latency": latency and dataclasses.asdict(latency),
        "plans": [
            {"position": position, "skip_set": sorted(plan.skip_set), "choices": plan.choices, "gamma": plan.gamma,
             "alpha": plan.alpha, "predicted_tokens_per_second": plan.tokens_per_second, "seconds": seconds}
            for position, plan, seconds in generation.plans
        ],
    }  # fmt: skip


def check_writable(path):
    """Raises ValueError before much work is spent on a file that cannot be written."""
    if path.exists() and not path.is_file():
        raise ValueError(f"--json {path} is not a file: pass the name of one")
    try:
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ValueError(f"cannot write --json {path} ({error.strerror}): pass a file in a folder of your own") from None


def write_json(path, result):
    """Writes beside the file, then renames: whoever reads it never sees half."""
    path = path.resolve()  # a link stays one
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def report(args, config, result):
    """The short report on standard error, as lines."""
    reasons = {"eos": "end of text", "length": "--max-new-tokens reached", "interrupted": "interrupted",
               "context": f"shortened: the model's context of {config.max_position} tokens is full"}  # fmt: skip
    count = f"{result['new_tokens']} new tokens after {result['prompt_tokens']} of prompt"
    lines = [f"{count}: {per_second(result['tokens_per_second'])} ({reasons[result['stop_reason']]})"]
    if result["drafted"]:
        share = f"{result['accepted']} of {result['drafted']} drafted tokens accepted ({result['acceptance_rate']:.0%})"
        lines.append(f"{share}, {result['tokens_per_round']:.2f} tokens per round")
    if result["plans"]:
        lines += plan_lines(args, config.n_layer, result["plans"])
    parts = {"load": "loading", "profile": "profiling", "prefill": "prompt", "draft": "drafting", "verify": "verifying",
             "plan": "planning"}  # fmt: skip
    lines.append("seconds: " + ", ".join(f"{name} {result['seconds'][key]:.2f}" for key, name in parts.items()))
    return lines


def per_second(tokens):
    return "too short for a rate" if tokens is None else f"{tokens:.1f} tokens/s"


def plan_lines(args, n_layer, plans):
    """The plan in use as a strip of 2L cells, attention over MLP; or that nothing was drafted, and why."""
    drafting = [plan for plan in plans if plan["gamma"] > 0]
    if not drafting:
        if args.method != "knapspec":
            return ["plain decoding: no draft was made"]
        return ["plain decoding: the planner chose not to draft, as by its measurements no draft would have been faster"]
    plan = drafting[-1]
    predicted, skipped = plan["predicted_tokens_per_second"], f"{len(plan['skip_set'])} of {2 * n_layer} sublayers"
    expected = "" if predicted is None else f", {predicted:.1f} tokens/s expected"
    signs = dict(zip(("full", "int8", "window", "skip"), "█▓▒░" if "utf" in (sys.stderr.encoding or "").lower() else "#8w."))
    choices = plan["choices"] or ["full"] * (2 * n_layer)
    cells = [signs["skip" if item in plan["skip_set"] else choices[item]] for item in range(2 * n_layer)]
    legend = ", ".join(f"{sign} {name}" for name, sign in signs.items() if sign in cells)
    lines = [f"plan: skip {skipped}, draft up to {plan['gamma']} tokens{expected} ({legend})"]
    lines += ["  attention " + "".join(cells[::2]), "  MLP       " + "".join(cells[1::2])]
    if plans[-1] is not plan:
        lines.append("  at the end the planner chose not to draft, as plain decoding was expected to be faster")
    return lines

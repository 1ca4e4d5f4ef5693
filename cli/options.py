"""The options of the command line, and the prompt that they name."""

import argparse
import contextlib
import math
import sys

import torch

from cli.methods import CHOICES, DEFAULT_METHOD, METHODS, PLANNER_OPTIONS, default
from decoding import PREFILL_CHUNK

VERSION = "0.2.0"
ESTIMATE_OPTIONS = "estimate", "context", "model", "device", "dtype", "quiet"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def number(kind, low, high=math.inf):
    """An argparse type: an int or a float from low to high."""

    def parse_number(text):
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high and value < math.inf:
                return value
        bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a {'whole ' if kind is int else ''}number {bounds}")

    return parse_number


def item_list(text):
    try:
        return frozenset(int(item) for item in text.split(",") if item)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of items such as 20,21,24") from None


def choice_list(text):
    names = [name.strip() for name in text.split(",")]
    if not {"full", "skip"} <= set(names) <= set(CHOICES):
        raise argparse.ArgumentTypeError(f"{text!r}: pass full,skip and, if wanted, some of {','.join(list(CHOICES)[2:])}")
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
    usual = {name: ", for knapspec ".join(dict.fromkeys(str(default(m, name)) for m in (DEFAULT_METHOD, "knapspec"))) for name in PLANNER_OPTIONS}
    add("--model", metavar="NAME", help="folder or Hugging Face Hub id (default: SmolLM2-135M-Instruct)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to answer or, with --raw, to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file; - is standard input")
    prompt.add_argument("--estimate", action="store_true", help="answer nothing: say what the model takes and how fast it can be")
    add("--context", type=number(int, 1), metavar="N", help="for --estimate: tokens in the cache (default: 4096, or as many as the model takes)")
    add("--system", metavar="TEXT", help="system message for the chat template")
    add("--raw", action="store_true", help="no chat template: continue the prompt as it stands")
    add("--max-new-tokens", type=number(int, 0), default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0 takes the likeliest token (default)")
    add("--top-p", type=number(float, 0, 1), default=1.0, metavar="P", help="sample from the likeliest tokens up to this mass")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="for sampling (default: %(default)s)")
    add("--method", choices=METHODS, metavar="NAME", help=f"how drafts are made: one of {', '.join(METHODS)} (default: {DEFAULT_METHOD})")
    add("--gamma-max", type=number(int, 0, 64), metavar="N", help=f"longest draft (default: {usual['gamma_max']}; rivals have their own)")
    add("--window", type=number(int, 1, PREFILL_CHUNK), metavar="N", help=f"tokens to judge a plan on (default: {usual['window']})")
    add("--interval", type=number(int, 1), metavar="N", help=f"rounds between plans (default: {usual['interval']})")
    add("--tau", type=number(float, -1, 1), metavar="X", help=f"least cosine of drafted states (default: {usual['tau']})")
    add("--budget", type=number(float, 0, 1), metavar="X", help=f"most of the sublayers' time that a draft may save (default: {usual['budget']})")
    about = "; ".join(f"{name}: {what}" for name, what in CHOICES.items())
    add("--choices", type=choice_list, metavar="LIST", help=f"what knapspec+ may draft with, by default all that can be had. {about}")
    add("--skip", type=item_list, metavar="LIST", help="fixed plan: skip these items, as in 20,21,24; needs --gamma")
    add("--gamma", type=number(int, 0), metavar="N", help="fixed plan: draft N tokens a round; 0 is plain decoding")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)")
    add("--compare", action="store_true", help="also time this method against plain decoding, two silent runs of each")
    add("--explain", action="store_true", help="also tell what was weighed, why the plan was chosen, and what became of each draft")
    add("--html", metavar="FILE", help="write all that --explain tells to FILE, as a page to look at and pass on")
    add("--json", metavar="FILE", help="write everything measured to FILE")
    add("--quiet", action="store_true", help="no progress bars and no report")
    add("--version", action="version", version=f"knapspec {VERSION} (torch {torch.__version__}, Python {sys.version.split()[0]})")
    return parser


def parse(argv):
    """Options as an argparse.Namespace; method None stands for a fixed plan. Raises ValueError."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if args.estimate and name not in ESTIMATE_OPTIONS and value != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} means nothing to --estimate: drop one of them")
    if args.context and not args.estimate:
        raise ValueError("--context is for --estimate: drop it, or ask for that in place of an answer")
    if args.quiet and args.explain:
        raise ValueError("--explain is part of the report, which --quiet leaves out: drop one of them")
    args.quiet, fixed = args.quiet or not sys.stderr, args.gamma is not None
    if args.raw and args.system is not None:
        raise ValueError("--system is part of the chat template, which --raw leaves out: drop one of them")
    if args.skip is not None and not fixed:
        raise ValueError("--skip is half of a fixed plan: add --gamma, the number of tokens to draft")
    if fixed and args.method:
        raise ValueError("--gamma fixes the plan, so --method has nothing to choose: drop one of them")
    args.method = None if fixed else args.method or DEFAULT_METHOD
    args.given = {name: value for name in (*PLANNER_OPTIONS, "choices") if (value := getattr(args, name)) is not None}
    for name in args.given:
        if fixed or name not in METHODS[args.method]:
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

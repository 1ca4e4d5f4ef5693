"""What commands share: options, and what they ask for: a model, prompts, results under their settings."""

import functools
import hashlib
import json
from pathlib import Path

from benchmark.results import Results, describe
from benchmark.texts import encoded, read_prompts, spread
from cli.options import number
from cli.report import check_writable
from loading import load
from rivals.draft_verify import PROMPTS

# Figures do not depend on how these are named; what they stand for is among the settings.
NAMES = ("run", "model", "device", "dtype", "prompts", "planted", "only", "json")


def add_amount(add, *, new_tokens, repeats=1, limit=None):
    """Options on how much to measure, and on where it goes."""
    add("--limit", type=number(int, 1), default=limit, metavar="N", help="only N of the prompts, evenly spread")
    add("--max-new-tokens", type=number(int, 3), default=new_tokens, metavar="N", help="of each run (default: %(default)s)")
    add("--repeats", type=number(int, 1), default=repeats, metavar="N", help="runs of each kind (default: %(default)s)")
    add("--json", metavar="FILE", help="keep what is measured in FILE, and do not measure again what it already holds")


def add_model(add, prompts=True):
    """Options on one model and, unless the command has its own, on prompts."""
    add("--model", metavar="NAME", help="folder or Hugging Face Hub id (default: SmolLM2-135M-Instruct)")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)")
    if prompts:
        add("--prompts", default=PROMPTS, metavar="FILE", help="JSON lines with `prompt`, `text` or `turns`; or a text (default: the project's)")


def add_planted(add):
    add("--planted", metavar="FOLDER", help="where planted models are, named by their kind, or will be (default: for this run only)")


def prepare(arguments, prompts_of=None):
    """-> (model, tokenizer, [(id, token ids)], Results), after all that can be checked before the work. Raises ValueError.

    prompts_of: (tokenizer, config) -> [(id, token ids)]; by default they are those of --prompts.
    """
    prompts_of = prompts_of or functools.partial(encoded, read_prompts(arguments.prompts))
    if arguments.json:
        check_writable("--json", Path(arguments.json))
    model, tokenizer = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    prompts = prompts_of(tokenizer, model.config)
    prompts = spread(prompts, arguments.limit or len(prompts))
    return model, tokenizer, prompts, results_of(arguments, describe(model, arguments.model), prompts)


def results_of(arguments, about, prompts=()):
    """Results that depend on the options given, on what `about` tells, and on the prompts."""
    given = {name: value for name, value in vars(arguments).items() if name not in NAMES}
    given["prompt_hash"] = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    return Results(given | about, arguments.json)

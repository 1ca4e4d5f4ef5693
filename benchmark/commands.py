"""What commands share: options, and what they ask for: a model, prompts, results under their settings."""

import argparse
import hashlib
import importlib.util
import json
from pathlib import Path

from benchmark import texts
from benchmark.results import Results, check_file, describe
from cli.options import number
from loading import load
from rivals.draft_verify import PROMPTS

# Figures do not depend on how these are named; what they stand for is among the settings.
NAMES = ("run", "model", "device", "dtype", "prompts", "planted", "only", "json", "resume", "plot")


def counts(text):
    """An argparse type: whole numbers from 1 with commas between, sorted."""
    return sorted({number(int, 1)(part) for part in text.split(",")})


def names_of(known):
    """An argparse type: names out of `known` with commas between."""

    def names(text):
        chosen = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return chosen

    return names


def add_amount(add, *, new_tokens, repeats=1, limit=None, plot=False, planted=False):
    """Options on how much to measure, and on where it goes."""
    add("--limit", type=number(int, 1), default=limit, metavar="N", help="only N of the prompts, evenly spread")
    add("--max-new-tokens", type=number(int, 3), default=new_tokens, metavar="N", help="of each run (default: %(default)s)")
    add("--repeats", type=number(int, 1), default=repeats, metavar="N", help="runs of each kind (default: %(default)s)")
    add("--json", metavar="FILE", help="write everything measured to FILE, each part as soon as it is there")
    add("--resume", action="store_true", help="take from FILE what it already holds")
    if plot:
        add("--plot", metavar="FILE", help="draw a picture, for example result.png")
    if planted:
        add("--planted", metavar="FOLDER", help="where planted models are, named by their kind, or will be (default: for this run only)")


def add_model(add, prompts=True):
    """Options on one model and, unless the command has its own, on prompts."""
    add("--model", metavar="NAME", help="folder or Hugging Face Hub id (default: SmolLM2-135M-Instruct)")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)")
    if prompts:
        add("--prompts", default=PROMPTS, metavar="FILE", help="JSON lines with `prompt`, `text` or `turns`; or a text (default: the project's)")


def check_files(arguments):
    """Raises ValueError, before any work, where a file could not be written."""
    check_file(arguments.json, arguments.resume)
    if (plot := getattr(arguments, "plot", None)) is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs the package matplotlib: pip install matplotlib")
    if Path(plot).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {plot} is no picture: name a .png, .svg or .pdf file")
    if not Path(plot).resolve().parent.is_dir():
        raise ValueError(f"--plot {plot} is in no folder: make the folder first")


def prepare(arguments):
    """-> (model, tokenizer, [(id, text)]), after all that can be checked before the work. Raises ValueError."""
    prompts = texts.read_prompts(arguments.prompts) if hasattr(arguments, "prompts") else []
    check_files(arguments)
    model, tokenizer = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    return model, tokenizer, texts.spread(prompts, arguments.limit or len(prompts))


def results_of(arguments, about=None, *, model=None, prompts=()):
    """Results that depend on the options given, on the model (or what `about` tells in its place), and on the prompts."""
    given = {name: value for name, value in vars(arguments).items() if name not in NAMES}
    given["prompt_hash"] = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    return Results(given | (about or describe(model, arguments.model)), arguments.json, arguments.resume)

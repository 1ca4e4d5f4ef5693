"""One run of the command line: load, decode, compare, report."""

import copy
import logging
import time
from pathlib import Path

import torch
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from cli.methods import KNAPSPEC_OPTIONS, NEW_TOKENS, make_planner, prepare
from cli.options import encode_prompt, read_prompt
from cli.report import (
    check_writable,
    measurements,
    per_second,
    rate,
    report,
    say,
    write_json,
)
from decoding import FixedPlanner, Plan, generate
from loading import load
from model import KVCache


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
    prepare(model)
    clock.append(time.perf_counter())
    prompt_ids = encode_prompt(args, prompt, tokenizer, model.config)
    fresh, latency = planner_for(args, model, tokenizer, len(prompt_ids))
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
        raw = not args.raw and tokenizer.chat_template is None
        say("\n".join(["", *report(args.method, model.config, result, raw=raw), *comparison[1]]))
    if args.json:
        write_json(Path(args.json), result)
    return status


def planner_for(args, model, tokenizer, prompt_tokens):
    """The planner that the options ask for, and the LatencyModel that it needs or None. Raises ValueError."""
    if args.method is not None:
        given = {name: getattr(args, name) for name in (*KNAPSPEC_OPTIONS, "choices") if getattr(args, name) is not None}
        context = prompt_tokens + min(args.max_new_tokens, NEW_TOKENS)
        return make_planner(args.method, model, tokenizer, context=context, progress=not args.quiet, **given)
    skip_set, items = args.skip or frozenset(), 2 * model.config.n_layer
    if not skip_set <= set(range(items)):
        outside = min(skip_set - set(range(items)))
        raise ValueError(f"--skip {outside} is no item of this model: pass numbers from 0 to {items - 1}")
    return FixedPlanner(Plan(skip_set, args.gamma)), None


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

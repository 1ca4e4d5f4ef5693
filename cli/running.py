"""One run of the command line: load, decode, compare, report."""

import copy
import logging
import os
import time
from pathlib import Path

import torch
from tqdm import tqdm

from cli import explain, page, report
from cli.estimate import estimate
from cli.methods import BEYOND, NEW_TOKENS, make_planner
from cli.options import encode_prompt, read_prompt
from cli.terminal import LESS_MEMORY, Printer, say
from cli.trace import Trace
from decoding import FixedPlanner, Plan, generate
from loading import load
from loading.caches import write_text
from loading.memory import cache_bytes, refuse_what_does_not_fit
from model import KVCache


def run(args):
    """Loads, profiles, decodes, compares and reports; returns the exit status."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what failed in the end is told in our line
    parallel = int(os.environ.get("WORLD_SIZE", "1")) > 1  # set by torchrun
    if args.estimate:
        if parallel:
            raise ValueError("--estimate needs no processes: start it without torchrun")
        return estimate(args)
    if parallel:
        from beyond.parallel import follow, lead

        if args.method == "swift":
            raise ValueError("--method swift rewrites the cache, which several processes share: pass another, or start one process")
        if int(os.environ.get("RANK", "0")):
            return follow(args.model, device=args.device, dtype=args.dtype)
    prompt = read_prompt(args)
    for option, path in (("--json", args.json), ("--html", args.html)):
        if path is not None:
            report.check_writable(option, Path(path))
    if None not in (args.json, args.html) and Path(args.json).resolve() == Path(args.html).resolve():
        raise ValueError(f"--json and --html are both {args.html}: pass two files")
    if not BEYOND and not args.quiet:
        say("beyond/ is not there: the default is --method knapspec")
    clock = [time.perf_counter()]
    model, tokenizer = (lead if parallel else load)(args.model, device=args.device, dtype=args.dtype, progress=not args.quiet)
    if BEYOND and not parallel and model.device.type == "cuda":
        from beyond.graphs import use_graphs

        if (told := use_graphs(model)) and not args.quiet:
            say(told)
    clock.append(time.perf_counter())
    prompt_ids = encode_prompt(args, prompt, tokenizer, model.config)
    check_room(args, model, len(prompt_ids))
    fresh, latency = planner_for(args, model, tokenizer, len(prompt_ids))
    check_room(args, model, len(prompt_ids))  # copies of the weights have taken theirs
    clock.append(time.perf_counter())

    def decode(planner, on_token=None, model=model):
        return generate(
            model, prompt_ids, max_new_tokens=args.max_new_tokens, eos_ids=tokenizer.eos_ids, temperature=args.temperature,
            top_p=args.top_p, rng=torch.Generator().manual_seed(args.seed), planner=planner, on_token=on_token,
        )  # fmt: skip

    status, printer, comparison, planner = 0, Printer(tokenizer), ({}, []), copy.deepcopy(fresh)
    trace = Trace(planner, model) if args.explain or args.html is not None else None
    try:
        generation = decode(trace, printer, trace.model) if trace else decode(planner, printer)
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
    result = {
        "model": args.model or "SmolLM2-135M-Instruct", "device": str(model.device), "dtype": str(model.dtype).removeprefix("torch."),
        "prompt_tokens": len(prompt_ids), **report.measurements(generation, printer.text, clock, latency), **comparison[0],
    }  # fmt: skip
    if not args.quiet:
        untemplated = tokenizer.chat_template is None and not args.raw
        say("\n".join(["", *report.lines(args.method, model.config, result, untemplated=untemplated, planner=planner), *comparison[1]]))
    if args.explain and not args.quiet:
        say("\n".join(["", *explain.lines(trace, tokenizer, generation.token_ids, latency, model.config.n_layer)]))
    if args.json is not None:
        report.write_json(Path(args.json), result)
    if args.html is not None:
        write_text(Path(args.html), page.render(prompt, trace, tokenizer, result, latency, model.config, args.method))
    return status


def check_room(args, model, prompt_tokens):
    """Raises ValueError where the cache, if the answer gets as long as is allowed, does not fit."""
    tokens = min(prompt_tokens + args.max_new_tokens, model.config.max_position)
    what = f"keys and values of {tokens:,} tokens as {model.dtype}"
    refuse_what_does_not_fit(what, cache_bytes(model.config, tokens, model.dtype), model.device, LESS_MEMORY)


def planner_for(args, model, tokenizer, prompt_tokens):
    """The planner that the options ask for, and the LatencyModel that it needs or None. Raises ValueError."""
    if args.method is not None:
        context = prompt_tokens + min(args.max_new_tokens, NEW_TOKENS)
        return make_planner(args.method, model, tokenizer, context=context, progress=not args.quiet, **args.given)
    skip_set, items = args.skip or frozenset(), 2 * model.config.n_layer
    if outside := skip_set - set(range(items)):
        raise ValueError(f"--skip {min(outside)} is no item of this model: pass numbers from 0 to {items - 1}")
    return FixedPlanner(Plan(skip_set, args.gamma)), None


def compare(args, model, prompt_ids, shown, decode, fresh):
    """Plain decoding against the method, in turn -> the fields of the JSON file, and lines of the report.

    fresh: the planner before it learns. The run that was shown is checked, but does not count: it warmed the machine up.
    """
    plain, drafted = [], []
    turns = [(plain, None), (drafted, fresh), (drafted, fresh), (plain, None)]
    for runs, planner in tqdm(turns, desc="Comparing", unit="run", leave=False, disable=True if args.quiet else None):
        runs.append(decode(copy.deepcopy(planner)))
    rates, token_ids = (report.rate(*drafted), report.rate(*plain)), plain[0].token_ids
    speedup = rates[0] / rates[1] if all(rates) else None
    lines = ["compared with plain decoding, two more runs of each in turn (planning counts, the prompt does not):"]
    if speedup:
        lines.append(f"  speed-up {speedup:.2f}: {report.per_second(rates[0])}, plainly {report.per_second(rates[1])}")
    others = [g.token_ids for g in (shown, *drafted) if g.token_ids != token_ids]
    identical = None if args.temperature > 0 else not others
    if identical is None:
        lines.append("  same distribution, not the same text: both are sampled")
    else:
        lines.append("  token ids: the same" if identical else f"  token ids: {told(*difference(model, prompt_ids, others[0], token_ids))}")
    baseline = {"tokens_per_second": rates[1], "token_ids": token_ids}
    return {"baseline": baseline, "speedup": speedup, "identical": identical}, lines


def difference(model, prompt_ids, a, b):
    """Where two lists of new token ids part, and how far apart the target's two best logits are there."""
    position = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    tokens = torch.tensor([*prompt_ids, *a[:position]], device=model.device)
    cache = KVCache(model.config, len(tokens), device=model.device, dtype=model.dtype)
    first, second = model(tokens, cache, last=1)[0].float().topk(2).values.tolist()
    return position, first - second


def told(position, gap):
    return f"different from new token {position + 1} on, where the target's two best logits are {gap:.2g} apart"

"""The paper's evidence on any model and machine: experiments on KnapSpec's predictions, and the command line of them all.

Read it from top to bottom: how the knapsack's window judges a draft; tpt, context, choices and window, each a function
of its settings that returns what its JSON file holds, with its table; the subcommands of `benchmark.py`, to which those of
comparison.py belong: compare, decouple, cost, tau, stop.
"""

import argparse
import datetime
import functools
import hashlib
import importlib.util
import json
import math
import statistics
import time
from pathlib import Path
from profile import latency_model, measure

import torch
from tqdm import tqdm

from benchmark import comparison, plots
from benchmark.comparison import decode, heading, median, paired, shown, table
from cli.cli import DEFAULTS, METHODS, check_writable, encode_prompt, number, write_json
from decoding import FixedPlanner, Plan, Planner, generate, sampling_probs
from knapspec import Branches, KnapSpec, distance, expected_tokens, tokens_per_time
from loading import load
from model import KVCache
from rivals import RIVALS
from rivals.draft_verify import PROMPTS

# --- 1. A window's judgement -----------------------------------------------------------------------------------------


class Probe(Planner):
    """Decodes plainly; before the first round it calls look(session) and keeps what that returns."""

    def __init__(self, look, window):
        self.look, self.window = look, window

    def plan(self, session):
        if session.generation.rounds == 0:
            self.seen = self.look(session)
        return Plan()


def probe(model, prompt_ids, look, *, window):
    """What look(session) returns behind the prompt, where the states of its last `window` tokens are at hand."""
    planner = Probe(look, window)
    generate(model, prompt_ids, max_new_tokens=2, planner=planner)
    return planner.seen


def planned(session, latency, **keywords):
    """A KnapSpec planner that has just planned on the session, whatever it took."""
    planner = KnapSpec(latency, share=math.inf, **keywords)
    planner.plan(session)
    return planner


@torch.inference_mode()
def judge(session, skip_set, W, own_window=False):
    """A draft's (mean distance, share rejected) over the last W tokens: `far` and `rejected` of KnapSpec's candidates."""
    states, target_probs = session.window(W)
    context, x = Branches(session.cache, 1, len(states[0]), own_window), states[0]
    for item, sublayer in enumerate(session.model.sublayers):
        if item not in skip_set:
            x = sublayer(x, context)
    probs = sampling_probs(session.model.logits(x), session.temperature, session.top_p)
    return distance(x, states[-1])[0].mean().item(), 1 - torch.minimum(probs, target_probs).sum(-1).mean().item()


def pooled_alphas(judged):
    """KnapSpec's α for each (far, rejected): one slope through all of them."""
    prior = KnapSpec(None)
    rejections = prior.rejections + sum(rejected for _, rejected in judged)
    slope = rejections / (prior.exposure + sum(far for far, _ in judged))
    return [1 - min(slope * far, 1.0) for far, _ in judged]


def spread(values, count):
    """At most `count` of a list, evenly spread."""
    return [values[i] for i in sorted({(2 * i + 1) * len(values) // (2 * count) for i in range(count)})] if values else []


def pearson(x, y):
    """The correlation of two lists; None where one of them is constant."""
    r = torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1].item()
    return r if math.isfinite(r) else None


# --- 2. tpt: predicted against measured speed ------------------------------------------------------------------------

PREDICTORS = {"tpt": "TPT, full price", "paper_tpt": "TPT, paper's price", "acceptance_rate": "acceptance rate",
              "tokens_per_layer": "tokens per layer"}  # fmt: skip


def predict(latency, skip_set, gamma, alpha, n, n_layer):
    """What each of PREDICTORS says of a plan at n tokens of context; the first two in tokens per second."""
    tokens, head_s = expected_tokens(alpha, gamma), latency.head()
    draft_s, step_s = (latency.draft(s, n, n_layer) for s in (skip_set, frozenset()))
    verify_s = torch.tensor([latency.verify(n, k) for k in range(1, gamma + 2)], dtype=torch.float64)
    steps_s = torch.full_like(verify_s, step_s - head_s)
    return {
        "tpt": tokens_per_time([alpha], [draft_s], verify_s)[0, gamma].item(),
        "paper_tpt": tokens_per_time([alpha], [draft_s - head_s], steps_s)[0, gamma].item(),
        "acceptance_rate": (tokens - 1) / gamma,
        "tokens_per_layer": tokens / (n_layer + gamma * (n_layer - len(skip_set) / 2)),  # DEL's; two sublayers are a layer
    }


def skip_sets_to_try(session, latency, count, *, window, rng):
    """[(skip set, kind, α that a planner expects)]: half are the knapsack's, evenly spread, half random and as large."""
    planner = planned(session, latency, window=window, max_branches=None)  # at all savings, whether they pay or not
    found = spread([candidate.skip_set for candidate in planner.candidates], count // 2)
    if not found:
        raise ValueError("the knapsack finds nothing to skip in this model: there is nothing to predict")
    free = 2 * session.model.config.n_layer - 4  # the first and the last layer are kept
    chance = [frozenset((2 + torch.randperm(free, generator=rng)[: len(skip_set)]).tolist()) for skip_set in found]
    alphas = pooled_alphas([judge(session, skip_set, window) for skip_set in found + chance])
    return list(zip(found + chance, ["knapsack"] * len(found) + ["random"] * len(chance), alphas))


def tpt(model, latency, text_ids, *, contexts, gammas, skip_sets=6, new_tokens=64, repeats=1, window=8, seed=0,
        progress=True):  # fmt: skip
    """Predicted against measured tokens per second over skip sets × fixed gammas, at each context length.

    Each predictor is tried twice: with the α measured in the very setting (accepted / tried), and with the α that a
    planner expects from the window before the first draft. Source: KnapSpec's correlation of TPT with throughput.
    """
    L, rng, points = model.config.n_layer, torch.Generator().manual_seed(seed), []
    count = len(contexts) * skip_sets * len(gammas) * repeats
    bar = tqdm(total=count, desc="tpt", unit="run", disable=None if progress else True)
    for n in contexts:
        look = functools.partial(skip_sets_to_try, latency=latency, count=skip_sets, window=window, rng=rng)
        plans = [(*s, gamma) for s in probe(model, text_ids[:n], look, window=window) for gamma in gammas]
        run = functools.partial(decode, model, text_ids[:n], max_new_tokens=new_tokens)
        others = {i: functools.partial(run, FixedPlanner(Plan(s, gamma))) for i, (s, _, _, gamma) in enumerate(plans)}
        runs = {i: [] for i in others}
        for result in paired(functools.partial(run, Planner()), others, repeats=repeats):
            runs[result["method"]].append(result)
            bar.update()
        for i, (skip_set, kind, expected_alpha, gamma) in enumerate(plans):
            total = {key: sum(r[key] for r in runs[i]) for key in ("drafted", "accepted", "tried")}
            alpha, middle = total["accepted"] / total["tried"], n + new_tokens // 2
            measured = predict(latency, skip_set, gamma, alpha, middle, L)
            points.append({
                "context": n, "kind": kind, "skip_set": sorted(skip_set), "gamma": gamma,
                **{key: median(r[key] for r in runs[i]) for key in ("tokens_per_second", "speedup")},
                "alpha": alpha, "expected_alpha": expected_alpha, "plain": 1 / latency.verify(middle, 1),
                "measured": measured | {"acceptance_rate": total["accepted"] / total["drafted"]},
                "expected": predict(latency, skip_set, gamma, expected_alpha, middle, L),
            })  # fmt: skip
    bar.close()
    rows = [_worth(points, source, name) for source in ("measured", "expected") for name in PREDICTORS]
    return {"points": points, "rows": rows}


def _worth(points, source, name):
    """One predictor: its correlations with tokens per second, by context and over all, and how far it is off."""
    row = {"predictor": name, "label": PREDICTORS[name], "alpha": source, "pearson": {}}
    for n in (*sorted({p["context"] for p in points}), "all"):
        some = [p for p in points if n in (p["context"], "all")]
        row["pearson"][str(n)] = pearson([p[source][name] for p in some], [p["tokens_per_second"] for p in some])
    # A machine that is slower now than when it was profiled slows plain decoding as well: speed-ups are compared, too.
    speedups = [p["speedup"] for p in points]
    predicted = [p[source][name] / (p["plain"] if name in ("tpt", "paper_tpt") else 1) for p in points]
    row["pearson"]["speed-up"] = pearson(predicted, speedups)
    if name in ("tpt", "paper_tpt"):
        row["error"] = statistics.mean(abs(p[source][name] / p["tokens_per_second"] - 1) for p in points)
    if name == "tpt":
        row["speedup_error"] = statistics.mean(abs(x / y - 1) for x, y in zip(predicted, speedups))
    return row


def tpt_table(result):
    """Lines of Markdown that tell what tpt() returned."""
    lengths = list(result["rows"][0]["pearson"])
    columns = ["predictor", "α", *(f"Pearson, {n}" for n in lengths), "error", "error of speed-up"]
    rows = []
    for row in result["rows"]:
        cells = [*(shown(row["pearson"][n], "{:.3f}") for n in lengths), shown(row.get("error"), "{:.1%}")]
        rows.append([row["label"], row["alpha"], *cells, shown(row.get("speedup_error"), "{:.1%}")])
    points = result["points"]
    errors = {kind: statistics.mean(abs(p["alpha"] - p["expected_alpha"]) for p in points if p["kind"] == kind)
              for kind in ("knapsack", "random")}  # fmt: skip
    notes = (
        f"{len(points)} settings. Pearson: with measured tokens/s, by context and over all, and with the speed-up over the "
        f"plain run beside it. α: measured in the setting itself, or expected from the window before it; the two differ by "
        f"{errors['knapsack']:.3f} for the knapsack's skip sets and by {errors['random']:.3f} for random ones (means)."
    )
    return [*table(columns, rows), "", notes]


# --- 3. context: latencies and plans as the context grows ------------------------------------------------------------

CHOICES = "full", "int8", "window", "skip"
SPEEDS = {"acceptance_rate": "{:.0%}", "tokens_per_second": "{:.1f}", "speedup": "{:.2f}"}  # columns and their form


def context(model, latency, text_ids, *, contexts, new_tokens=64, repeats=1, budget=DEFAULTS["budget"], progress=True):
    """At each context length: fitted latencies against those measured there, what KnapSpec skips, and its speed-up."""
    L, rows = model.config.n_layer, []
    for n in tqdm(contexts, desc="context", unit="length", disable=None if progress else True):
        here = measure(model, context_lengths=[n], gamma_max=0)
        run = functools.partial(decode, model, text_ids[:n], max_new_tokens=new_tokens)
        others = {"knapspec": functools.partial(run, KnapSpec(latency, budget=budget))}
        runs = list(paired(functools.partial(run, Planner()), others, repeats=repeats))
        rows.append({
            "context": n,
            "fitted_s": {"attention": latency.attention(n), "mlp": latency.mlp(), "step": latency.verify(n, 1)},
            "measured_s": {"attention": here.attention(n), "mlp": here.mlp(), "step": here.verify(n, 1)},
            **_drafts(runs, L),
        })  # fmt: skip
        skipped = [rows[-1]["shares"][kind]["skip"] for kind in ("attention", "mlp")]
        rows[-1]["attention_among_skipped"] = skipped[0] / sum(skipped) if sum(skipped) else None
    return {"rows": rows}


def _drafts(runs, n_layer):
    """Speed of some runs, and what their drafts were made of: shares of all attention and of all MLPs, by choice."""
    drafted, accepted = (sum(run[key] for run in runs) for key in ("drafted", "accepted"))
    shares = {kind: {choice: sum(run["used"][kind].get(choice, 0) for run in runs) / (n_layer * max(drafted, 1))
                     for choice in CHOICES} for kind in ("attention", "mlp")}  # fmt: skip
    rates = {key: median(run[key] for run in runs) for key in ("tokens_per_second", "speedup")}
    return {"shares": shares, "acceptance_rate": accepted / drafted if drafted else None, **rates}


def context_table(result):
    """Lines of Markdown that tell what context() returned."""
    columns = ["context", "attention", "MLP", "step", "skipped attention", "skipped MLP", "attention among skipped",
               "accepted", "tokens/s", "speed-up"]  # fmt: skip
    rows = []
    for row in result["rows"]:
        times = [(1e3 * row["fitted_s"][key], 1e3 * row["measured_s"][key]) for key in ("attention", "mlp", "step")]
        skipped = [*(row["shares"][kind]["skip"] for kind in ("attention", "mlp")), row["attention_among_skipped"]]
        skipped = [shown(share, "{:.0%}") for share in skipped]
        speeds = [shown(row[key], form) for key, form in SPEEDS.items()]
        rows.append([row["context"], *("{:.2f} / {:.2f}".format(*pair) for pair in times), *skipped, *speeds])
    notes = "Times in ms, fitted / measured: an attention, an MLP, a whole step. Skipped: shares, mean over drafted tokens."
    return [*table(columns, rows), "", notes]


# --- 4. choices: which ways to keep an item pay at which context length --------------------------------------------------

SETS = [("full", "skip"), ("full", "int8", "skip")]  # then all; where there are 8-bit weights, windows use them
INT8_ALONE = "plain decoding in int8: not lossless"


class InInt8:
    """A model that computes everything on 8-bit weights. Not lossless: it is another model."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, cache, **options):
        return self.model(tokens, cache, **options | {"choices": ("int8",) * (2 * self.config.n_layer + 1)})


def choices(model, latency, text_ids, *, sets, contexts, new_tokens=64, repeats=1, progress=True):
    """At each context length: KnapSpec's speed-up with each set of choices, and what it makes its drafts of.

    Where int8 is among them, also plain decoding in int8, for orientation, and the share of its tokens that are the
    target's at their place in the target's text.
    """
    L, rows = model.config.n_layer, []
    in_int8 = InInt8(model) if "int8" in model.table else None
    for n in tqdm(contexts, desc="choices", unit="length", disable=None if progress else True):
        prompt = text_ids[:n]
        run = functools.partial(decode, model, prompt, max_new_tokens=new_tokens)
        others = {",".join(names): functools.partial(run, KnapSpec(latency, choices=names)) for names in sets}
        if in_int8:
            others[INT8_ALONE] = functools.partial(decode, in_int8, prompt, Planner(), max_new_tokens=new_tokens)
        found = {name: [] for name in others}
        for result in paired(functools.partial(run, Planner()), others, repeats=repeats):
            found[result["method"]].append(result)
        for name, runs in found.items():
            same = all(r["token_ids"] == r["plain_ids"] for r in runs)
            rows.append({"context": n, "choices": name, "identical": same, **_drafts(runs, L)})
        if in_int8:
            rows[-1]["same_tokens"] = _same_tokens(in_int8, prompt, found[INT8_ALONE][0]["plain_ids"])
    return {"rows": rows}


def _same_tokens(model, prompt_ids, token_ids):
    """The share of a text's tokens that the model, too, finds the likeliest at their place."""
    ids = torch.tensor([*prompt_ids, *token_ids[:-1]], device=model.device)
    logits = model(ids, KVCache(model.config, len(ids), device=model.device, dtype=model.dtype), last=len(token_ids))
    return (logits.argmax(-1).cpu() == torch.tensor(token_ids)).double().mean().item()


def choices_table(result):
    """Lines of Markdown that tell what choices() returned."""
    columns = ["context", "choices", *(f"{kind}: int8, window, skip" for kind in ("attention", "MLP")), "accepted", "tokens/s",
               "speed-up", "same text"]  # fmt: skip
    rows = []
    for row in result["rows"]:
        alone = row.get("same_tokens")
        shares = [" ".join(f"{row['shares'][kind][choice]:.0%}" for choice in CHOICES[1:]) for kind in ("attention", "mlp")]
        same = shown(alone, "{:.0%} of tokens") or ("yes" if row["identical"] else "no")
        cells = [None, None] if alone is not None or row["acceptance_rate"] is None else shares
        rows.append([row["context"], row["choices"], *cells, *(shown(row[key], form) for key, form in SPEEDS.items()), same])
    return [*table(columns, rows), "", "Shares of all attention and of all MLPs, mean over drafted tokens; a dash: no drafts."]


# --- 5. window: what planning costs, and what it knows -----------------------------------------------------------------

PLANNINGS = {
    "default": {}, "window 4": {"window": 4}, "window 16": {"window": 16}, "window 32": {"window": 32},
    "budget 0.3": {"budget": 0.3}, "budget 0.7": {"budget": 0.7}, "branches 8": {"max_branches": 8},
    "branches 16": {"max_branches": 16}, "all branches": {"max_branches": None},
}  # fmt: skip
VIEWS = [(W, own_window) for W in (4, 8, 16, 32) for own_window in (False, True)]


def window(model, latency, prompts, *, gamma=4, new_tokens=64, lead_in=32, progress=True):
    """What a planning costs and finds under each of PLANNINGS, and how well a window's α's agree with what is accepted.

    prompts: lists of ids; planning comes `lead_in` tokens later. "worth": the speed-up, at full price, of the skip set
    that KnapSpec then chooses, with the share of its drafts that is really accepted. For the α's the same six skip sets
    are judged through windows of each size, where a token sees the target's keys of the window's earlier tokens, as in
    the knapsack, or the draft's own; α is KnapSpec's pooled one, or the share of the window's tokens that agree.
    """
    plannings = {name: {"plan_s": [], "skip_sets": [], "worth": []} for name in PLANNINGS}
    errors = {(*view, alpha): [] for view in VIEWS for alpha in ("pooled", "share")}
    for prompt_ids in tqdm(prompts, desc="window", unit="prompt", disable=None if progress else True):
        start_ids = prompt_ids + generate(model, prompt_ids, max_new_tokens=lead_in).token_ids
        accepted = functools.cache(functools.partial(share_accepted, model, start_ids, gamma=gamma, new_tokens=new_tokens))
        look = functools.partial(_plannings_and_views, latency=latency)
        found, judged = probe(model, start_ids, look, window=max(W for W, _ in VIEWS))
        for name, plan_s, count, chosen in found:
            worth = speedup(latency, chosen, accepted(chosen), len(start_ids), model.config.n_layer) if chosen else 1.0
            for key, value in (("plan_s", plan_s), ("skip_sets", count), ("worth", worth)):
                plannings[name][key].append(value)
        for view, skip_sets, pairs in judged:
            alphas = {"pooled": pooled_alphas(pairs), "share": [1 - rejected for _, rejected in pairs]}
            for alpha, values in alphas.items():
                errors[*view, alpha] += [abs(value - accepted(s)) for value, s in zip(values, skip_sets)]
    rows = [{"planning": name} | {key: median(values) for key, values in lists.items()} for name, lists in plannings.items()]
    alphas = [{"window": W, "own_window": own_window, "alpha": alpha, "error": statistics.mean(values) if values else None}
              for (W, own_window, alpha), values in errors.items()]  # fmt: skip
    return {"plannings": rows, "alphas": alphas}


def share_accepted(model, prompt_ids, skip_set, *, gamma, new_tokens):
    """The chance that a draft without skip_set is accepted, counted over a text."""
    run = decode(model, prompt_ids, FixedPlanner(Plan(skip_set, gamma)), max_new_tokens=new_tokens)
    return run["accepted"] / run["tried"]


def _plannings_and_views(session, latency):
    """[(name, seconds, skip sets found, the one chosen)] of PLANNINGS, [(view, six skip sets, their judgement)] of VIEWS."""
    every = [candidate.skip_set for candidate in planned(session, latency, max_branches=None).candidates]
    found = []
    for name, keywords in PLANNINGS.items():
        start_s = time.perf_counter()
        planner = planned(session, latency, **keywords)
        found.append((name, time.perf_counter() - start_s, len(planner.candidates), planner.current.skip_set))
    same = spread(every, 6)
    return found, [((W, own), same, [judge(session, s, W, own) for s in same]) for W, own in VIEWS]


def speedup(latency, skip_set, alpha, n, n_layer, gamma_max=DEFAULTS["gamma_max"]):
    """The most that drafts without skip_set give over plain decoding at full price, at any γ; 1 is not to draft."""
    verify_s = torch.tensor([latency.verify(n, k) for k in range(1, gamma_max + 2)], dtype=torch.float64)
    return (tokens_per_time([alpha], [latency.draft(skip_set, n, n_layer)], verify_s).max() * verify_s[0]).item()


def window_table(result):
    """Lines of Markdown that tell what window() returned."""
    forms = {"planning": "{}", "plan_s": "{:.3f}", "skip_sets": "{:.0f}", "worth": "{:.2f}"}
    rows = [[form.format(row[key]) for key, form in forms.items()] for row in result["plannings"]]
    lines = table(["planning", "seconds", "skip sets", "worth"], rows)
    errors = {(row["window"], row["own_window"], row["alpha"]): shown(row["error"], "{:.3f}") for row in result["alphas"]}
    columns = [(own, alpha) for alpha in ("pooled", "share") for own in (False, True)]
    names = [f"{alpha}, {'own' if own else 'target'} keys" for own, alpha in columns]
    rows = [[f"window {W}", *(errors[W, own, alpha] for own, alpha in columns)] for W in sorted({W for W, _ in VIEWS})]
    notes = (
        "Worth: speed-up at full price of the skip set chosen, with what is really accepted of it. Below: mean distance of α "
        "from the share of tried drafts that is really accepted, over the same skip sets."
    )
    return [*lines, "", notes, "", *table(["α from", *names], rows)]


# --- 6. Command line -------------------------------------------------------------------------------------------------


def _prepare(arguments):
    """Checks all that can be checked before the work, then loads -> model, tokenizer, [(id, text)]. Raises ValueError."""
    prompts = comparison.read_prompts(arguments.prompts)
    prompts = spread(prompts, arguments.limit or len(prompts))
    if arguments.json:
        check_writable(Path(arguments.json))
    if arguments.plot:
        plots.check(arguments.plot)
    return *load(arguments.model, device=arguments.device, dtype=arguments.dtype), prompts


def _run_comparison(arguments):
    model, tokenizer, prompts = _prepare(arguments)
    prompts = [(prompt_id, encode_prompt(arguments, text, tokenizer, model.config)) for prompt_id, text in prompts]
    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    variants = comparison.VARIANTS.get(arguments.experiment)
    names = list(variants or arguments.methods)
    settings = comparison.describe(model, arguments.model) | options | {
        "experiment": arguments.experiment, "methods": names, "repeats": arguments.repeats, "prompts": len(prompts),
        "prompt_ids": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }  # fmt: skip
    path = Path(arguments.json) if arguments.json else None
    state = comparison.begin(path, settings, arguments.resume)
    options["eos_ids"] = tokenizer.eos_ids
    latency = functools.partial(_latency, model, max(len(ids) for _, ids in prompts) + arguments.max_new_tokens)

    def make_methods(state):
        if variants:
            return comparison.make_variants(model, variants, latency=latency(), options=options)
        return comparison.make_rivals(model, tokenizer, arguments.model, names, state, latency=latency, options=options,
                                      search_s=arguments.search_seconds, progress=True)  # fmt: skip

    state = comparison.compare(model, prompts, make_methods, state, options=options, repeats=arguments.repeats, path=path)
    if arguments.plot:
        plots.comparison(state, arguments.plot)
    return comparison.report(arguments.experiment, state, model.config.n_layer)


def _latency(model, longest, gamma_max=DEFAULTS["gamma_max"]):
    return latency_model(model, context=min(longest, model.config.max_position), gamma_max=gamma_max, progress=True)


def _text_ids(tokenizer, prompts, length):
    """The prompts as one text without a template, again and again until it is long enough."""
    ids = tokenizer.encode("\n\n".join(text for _, text in prompts))
    return (ids * -(-length // len(ids)))[:length]


def _report(arguments, model, result, lines, lengths):
    """Writes the JSON file and the picture that were asked for -> the table under its heading."""
    about, date = comparison.describe(model, arguments.model), datetime.date.today().isoformat()
    if arguments.json:
        write_json(Path(arguments.json), {"date": date, "settings": about | _given(arguments), **result})
    if arguments.plot:
        getattr(plots, arguments.experiment)(result, arguments.plot)
    return "\n".join([*heading(arguments.experiment, about, date, lengths), *lines])


def _given(arguments):
    names = ("experiment", "contexts", "max_context", "budget", "gammas", "skip_sets", "max_new_tokens", "repeats", "limit",
             "seed")  # fmt: skip
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def _longest(arguments, config):
    """The tokens of the longest of --contexts with the new ones. Raises ValueError where the model takes fewer."""
    longest, limit = arguments.contexts[-1] + arguments.max_new_tokens, config.max_position
    if longest > limit:
        raise ValueError(f"{longest} tokens, the longest of --contexts and the new ones, are more than the model's {limit}: "
                         f"pass --contexts of at most {limit - arguments.max_new_tokens}, or fewer new tokens")  # fmt: skip
    return longest


def _run_tpt(arguments):
    model, tokenizer, prompts = _prepare(arguments)
    longest = _longest(arguments, model.config)
    latency, text_ids = _latency(model, longest, arguments.gammas[-1]), _text_ids(tokenizer, prompts, longest)
    result = tpt(model, latency, text_ids, contexts=arguments.contexts, gammas=arguments.gammas,
                 skip_sets=arguments.skip_sets, new_tokens=arguments.max_new_tokens, repeats=arguments.repeats,
                 seed=arguments.seed)  # fmt: skip
    return _report(arguments, model, result, tpt_table(result), [arguments.contexts[0], longest])


def _run_context(arguments):
    model, tokenizer, prompts = _prepare(arguments)
    longest = min(arguments.max_context or math.inf, model.config.max_position)
    last = longest - arguments.max_new_tokens
    if last < 1:
        raise ValueError(f"no room for {arguments.max_new_tokens} new tokens in a context of {longest}: pass fewer")
    contexts = [128 << i for i in range(32) if 128 << i < 0.9 * last] + [last]
    result = context(model, _latency(model, longest), _text_ids(tokenizer, prompts, longest), contexts=contexts,
                     new_tokens=arguments.max_new_tokens, repeats=arguments.repeats, budget=arguments.budget)  # fmt: skip
    return _report(arguments, model, result, context_table(result), [contexts[0], longest])


def _run_choices(arguments):
    model, tokenizer, prompts = _prepare(arguments)
    longest = _longest(arguments, model.config)
    try:
        from beyond import shortcuts
    except ImportError:
        raise ValueError("shortcuts.py is missing: there is only full and skip to choose from") from None
    every = shortcuts.add_choices(model, progress=True)
    sets = [*(names for names in SETS if set(names) <= set(every)), tuple(every)]
    result = choices(model, _latency(model, longest), _text_ids(tokenizer, prompts, longest), sets=sets,
                     contexts=arguments.contexts, new_tokens=arguments.max_new_tokens, repeats=arguments.repeats)  # fmt: skip
    return _report(arguments, model, result, choices_table(result), [arguments.contexts[0], longest])


def _run_window(arguments):
    model, tokenizer, prompts = _prepare(arguments)
    prompts = [encode_prompt(arguments, text, tokenizer, model.config) for _, text in prompts]
    longest = max(map(len, prompts)) + 32 + arguments.max_new_tokens
    result = window(model, _latency(model, longest), prompts, new_tokens=arguments.max_new_tokens)
    return _report(arguments, model, result, window_table(result), [min(map(len, prompts)), longest])


def methods(text):
    """An argparse type: names with commas between, or "all" that can be had: transformers' only where it is installed."""
    needs = dict.fromkeys(METHODS) | {name: rival.needs for name, rival in RIVALS.items()}
    needs |= {"knapspec+": "beyond.shortcuts"} | dict.fromkeys(comparison.THEIRS, "transformers")
    here = [name for name, module in needs.items() if module is None or importlib.util.find_spec(module)]
    names = here if text == "all" else list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in here:
            reason = f"needs {needs[name]}, which is not there" if name in needs else f"is none of {', '.join(here)}"
            raise argparse.ArgumentTypeError(f"{name!r} {reason}")
    return names


def counts(text):
    """An argparse type: whole numbers from 1 with commas between, sorted."""
    return sorted({number(int, 1)(part) for part in text.split(",")})


def add_subcommands(commands):
    """Adds the experiments to benchmark.py's subcommands."""
    for name, text in {
        "compare": "KnapSpec, its rivals and plain decoding on the same prompts",
        "decouple": "KnapSpec on sublayers and on whole layers",
        "cost": "KnapSpec at the full price and at the paper's",
        "tau": "KnapSpec at several least cosines",
        "stop": "KnapSpec with each way to end a draft",
    }.items():
        add = _add_command(commands, name, text, _run_comparison, new_tokens=128)
        if name == "compare":
            add("--methods", type=methods, default="all", metavar="LIST", help="names with commas between (default: all)")
            add("--search-seconds", type=number(float, 0), default=120.0, metavar="S",
                help="for draft_verify's search, before the first prompt (default: %(default)s)")  # fmt: skip
        add("--raw", action="store_true", help="no chat template: continue the prompts as they stand")
        add("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0: always the likeliest token (default)")
        add("--top-p", type=number(float, 0, 1), default=1.0, metavar="P", help="sample from the likeliest up to this mass")
        add("--resume", action="store_true", help="continue the interrupted run in the --json file")
    add = _add_command(commands, "tpt", "predicted against measured speed of many drafts", _run_tpt, new_tokens=64)
    add("--contexts", type=counts, default="128,1024", metavar="LIST", help="context lengths (default: %(default)s)")
    add("--gammas", type=counts, default="1,2,4,8", metavar="LIST", help="draft lengths (default: %(default)s)")
    add("--skip-sets", type=number(int, 2), default=6, metavar="N", help="half found, half random (default: %(default)s)")
    add = _add_command(commands, "context", "latencies, plans and speed-up as contexts grow", _run_context, new_tokens=128)
    add("--max-context", type=number(int, 2), metavar="N", help="default: the model's limit")
    add("--budget", type=number(float, 0, 1), default=DEFAULTS["budget"], metavar="X",
        help="largest share of the sublayers' time that a draft may save (default: %(default)s)")  # fmt: skip
    add = _add_command(commands, "choices", "which shortcuts pay at which context length", _run_choices, new_tokens=96)
    add("--contexts", type=counts, default="128,512,2000,4000,7000", metavar="LIST", help="lengths (default: %(default)s)")
    add = _add_command(commands, "window", "what a planning costs, and how well it knows α", _run_window, new_tokens=64)
    add("--raw", action="store_true", help="no chat template: continue the prompts as they stand")


def _add_command(commands, name, text, run, *, new_tokens):
    """A subcommand with the options that all experiments share -> its add_argument."""
    command = commands.add_parser(name, help=text, allow_abbrev=False)
    command.set_defaults(run=run, experiment=name, system=None)
    add = command.add_argument
    add("--model", metavar="NAME", help="folder or Hugging Face Hub id (default: SmolLM2-135M-Instruct)")
    add("--prompts", default=PROMPTS, metavar="FILE", help="JSON lines with `prompt`, `text` or `turns`; or a text")
    add("--limit", type=number(int, 1), metavar="N", help="only N of the prompts, evenly spread")
    add("--max-new-tokens", type=number(int, 3), default=new_tokens, metavar="N", help="default: %(default)s")
    if name != "window":
        add("--repeats", type=number(int, 1), default=1, metavar="N", help="runs of each kind (default: %(default)s)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="for sampling (default: %(default)s)")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)")
    add("--json", metavar="FILE", help="write everything measured to FILE")
    add("--plot", metavar="FILE", help="draw a picture, for example result.png")
    return add

"""Methods side by side on the same prompts: every run is held against a run of plain decoding next to it.

Read it from top to bottom: prompts; one run, and runs that take turns; compare(), for rivals and for variants of
KnapSpec alike; the methods; the table. A run is a dict of numbers, and compare() returns what the JSON file holds.
"""

import datetime
import functools
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from profile import device_name

import torch
from tqdm import tqdm

from cli.cli import difference, rate, write_json
from decoding import Planner, generate
from knapspec import KnapSpec
from loading.default_model import default_model_folder
from rivals import make_planner
from rivals.draft_verify import DraftVerify

# --- 1. Prompts ------------------------------------------------------------------------------------------------------


def read_prompts(path):
    """[(id, text)] of a file: *.jsonl has a prompt in each line, any other file is one.

    A line holds `prompt`, `text` or `turns`, of which the first is taken (Spec-Bench), and maybe `id` or `question_id`.
    Raises ValueError.
    """
    path = Path(path)
    try:
        content = path.read_text("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read --prompts {path} ({error.strerror}): pass a text file or JSON lines") from None
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {path} is not UTF-8: convert it, for example with iconv") from None
    if not content.strip():
        raise ValueError(f"--prompts {path} is empty: pass a file with text")
    if path.suffix != ".jsonl":
        return [(path.name, content)]
    lines = [(i, line) for i, line in enumerate(content.split("\n"), 1) if line.strip()]
    return [_read_line(line, i, f"--prompts {path}, line {i}") for i, line in lines]


def _read_line(line, i, where):
    try:
        values = json.loads(line)
    except ValueError:
        raise ValueError(f"{where} is not JSON: put one object in each line; plain text needs another name") from None
    values = values if isinstance(values, dict) else {}
    turns = values.get("turns")
    texts = [values.get("prompt"), values.get("text"), turns[0] if isinstance(turns, list) and turns else None]
    text = next((text for text in texts if isinstance(text, str) and text.strip()), None)
    if text is None:
        raise ValueError(f"{where} has no text as `prompt`, `text` or the first of `turns`: add one")
    return str(values.get("id", values.get("question_id", i))), text


# --- 2. One run, and runs that take turns ----------------------------------------------------------------------------


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
    one is accepted. used: {"attention" or "mlp": {choice: sublayers, summed over the drafted tokens}}. search_s: a part
    of the seconds for planning.
    """
    recorder, searched_s = Recorder(planner), getattr(planner, "search_s", 0.0)
    generation = generate(model, prompt_ids, planner=recorder, rng=torch.Generator().manual_seed(seed), **options)
    run = {name: getattr(generation, name) for name in ("token_ids", "seconds", "rounds", "drafted", "accepted")}
    run |= {"new_tokens": len(generation.token_ids), "tokens_per_second": rate(generation)}
    run["tried"] = sum(min(r.accepted + 1, r.drafted) for r in recorder.rounds)
    run["used"] = {"attention": Counter(), "mlp": Counter()}
    for r in recorder.rounds:
        for item in range(2 * model.config.n_layer if r.drafted else 0):
            choice = "skip" if item in r.plan.skip_set else r.plan.choices[item] if r.plan.choices else "full"
            run["used"]["mlp" if item % 2 else "attention"][choice] += r.drafted
    return run | {"search_s": getattr(planner, "search_s", 0.0) - searched_s}


def paired(plain, others, *, repeats=1, backwards=False):
    """Runs each of `others` ({name: function}) beside plain() -> yields the runs, each with its speed-up over plain.

    Two of them share the plain run between them: a, plain, b, c, plain, d. Every other repeat, and the first if
    `backwards`, goes the other way, so that each comes before its plain run as often as after it.
    """
    names = list(others)
    groups = [(names[i], None, *names[i + 1 : i + 2]) for i in range(0, len(names), 2)]
    for repeat in range(repeats):
        step = 1 if repeat % 2 == backwards else -1
        for group in groups[::step]:
            runs = {name: plain() if name is None else others[name]() for name in group[::step]}
            reference = runs.pop(None)
            for name, run in runs.items():
                rates = run["tokens_per_second"], reference["tokens_per_second"]
                yield run | {
                    "method": name, "repeat": repeat, "speedup": rates[0] / rates[1] if all(rates) else None,
                    "plain_tokens_per_second": rates[1], "plain_ids": reference["token_ids"],
                }  # fmt: skip


def median(values):
    """Of those that are not None; None if there is none."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


# --- 3. Comparing ----------------------------------------------------------------------------------------------------


def begin(path, settings, resume=False):
    """What compare() continues: nothing yet or, to resume, the state kept at `path`. Raises ValueError."""
    if path is None or not path.exists():
        date = datetime.date.today().isoformat()
        return {"date": date, "settings": settings, "search_s": {}, "prompts": [], "rows": []}
    if not resume:
        raise ValueError(f"{path} exists: add --resume to continue it, or name another file")
    try:
        state = json.loads(path.read_text("utf-8"))
        before, _ = state["settings"], state["prompts"]
        differs = [name for name in settings | before if settings.get(name) != before.get(name)]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} holds no comparison: name another file") from None
    if differs:
        name = differs[0]
        raise ValueError(f"{path} was made with {name} {before.get(name)}, not {settings.get(name)}: name another file")
    return state


def compare(model, prompts, make_methods, state, *, options, repeats=1, path=None, progress=True):
    """Each method on each prompt, every run beside a plain one -> the state, complete; kept at `path` after each prompt.

    prompts: [(id, token ids)]. make_methods(state) -> {name: function of a prompt's ids that returns a run}, called only
    if anything is left to do. options: of decode(). state: what begin() gave; its prompts are not run again.
    """
    done = len(state["prompts"])
    if done == len(prompts):
        return state
    methods, plain = make_methods(state), functools.partial(decode, model, planner=Planner(), **options)
    decode(model, prompts[0][1], Planner(), **options | {"max_new_tokens": 4})  # the first forwards are slow
    bar = tqdm(total=(len(prompts) - done) * len(methods) * repeats, unit="run", disable=None if progress else True)
    for index, (prompt_id, prompt_ids) in enumerate(prompts[done:], done):
        bar.set_description(prompt_id)
        here, runs = {name: functools.partial(method, prompt_ids) for name, method in methods.items()}, []
        for run in paired(functools.partial(plain, prompt_ids), here, repeats=repeats, backwards=index % 2 == 1):
            token_ids, plain_ids = run.pop("token_ids"), run.pop("plain_ids")
            if options["temperature"] == 0:
                run["identical"] = token_ids == plain_ids
                if not run["identical"]:
                    run["difference"] = difference(model, prompt_ids, token_ids, plain_ids)
            runs.append(run)
            bar.update()
        state["prompts"].append({"id": prompt_id, "prompt_tokens": len(prompt_ids), "runs": runs})
        state["rows"] = [summary(name, state) for name in methods]
        if path:
            write_json(path, state)
    bar.close()
    return state


def summary(name, state):
    """One method over all prompts: a row of the table, as a dict without what it has no figures for."""
    runs = [run for prompt in state["prompts"] for run in prompt["runs"] if run["method"] == name]
    speedups = [run["speedup"] for run in runs if run["speedup"] is not None]
    rates = [run["tokens_per_second"] for run in runs]
    row = {"method": name, "tokens_per_second": median(rates), "speedup": median(speedups)}
    if len(speedups) > 1:
        row["quartiles"] = statistics.quantiles(speedups, n=4, method="inclusive")[::2]
    if "identical" in runs[0]:
        row["identical"] = [sum(run["identical"] for run in runs), len(runs)]
    if "rounds" not in runs[0]:  # transformers does not tell
        return row
    total = {key: sum(run[key] for run in runs) for key in ("new_tokens", "rounds", "drafted", "accepted", "search_s")}
    seconds = {key: sum(run["seconds"][key] for run in runs) for key in ("plan", "prefill", "total")}
    if total["drafted"]:
        row["acceptance_rate"] = total["accepted"] / total["drafted"]
        for kind in ("attention", "mlp"):
            row[f"skipped_{kind}"] = sum(run["used"][kind].get("skip", 0) for run in runs) / total["drafted"]
    if total["rounds"]:
        row["tokens_per_round"] = (total["new_tokens"] - len(runs)) / total["rounds"]
        row["plan_share"] = (seconds["plan"] - total["search_s"]) / (seconds["total"] - seconds["prefill"])
    row["plan_s"] = seconds["plan"] - total["search_s"]
    return row | {"search_s": total["search_s"] + state["search_s"].get(name, 0.0)}


# --- 4. Methods ------------------------------------------------------------------------------------------------------

THEIRS = {"transformers": None, "transformers_early_exit": 4}  # name -> its drafts run one layer of so many
VARIANTS = {
    "decouple": {"sublayers": {}, "whole layers": {"layers": True}},
    "cost": {"full price": {}, "paper's price": {"price": "paper"}},
    "tau": {f"tau {tau}": {"tau": tau} for tau in (-1.0, 0.3, 0.5, 0.7, 0.9, 0.95)},
    "stop": {stop: {"stop": stop} for stop in ("fixed", "confidence", "renewal")},
}


def make_variants(model, variants, *, latency, options):
    """{name: method} for KnapSpec with each variant's keywords. The planners last for all prompts."""
    return {name: functools.partial(decode, model, planner=KnapSpec(latency, **keywords), **options)
            for name, keywords in variants.items()}  # fmt: skip


def make_rivals(model, tokenizer, folder, names, state, *, latency, options, search_s, progress):
    """{name: method} for names of cli.METHODS, "knapspec+" and names of THEIRS. The planners last for all prompts.

    knapspec chooses between full and skip, knapspec+ between all that shortcuts.py has. latency() gives the LatencyModel.
    What draft_verify found stays in the state, so that it searches only once.
    """
    methods = {}
    if "knapspec+" in names:
        from beyond import shortcuts

        choices = shortcuts.add_choices(model, progress=progress)
    for name in names:
        if name in THEIRS:
            continue
        if name == "draft_verify" and name in state:
            planner = DraftVerify(frozenset(state[name]))
        elif name == "knapspec+":
            planner = KnapSpec(latency(), choices=choices)
        elif name == "knapspec":
            planner = KnapSpec(latency())
        elif name == "autoregressive":
            planner = Planner()
        else:
            planner = make_planner(name, model, tokenizer=tokenizer, search_s=search_s, progress=progress)
        if name == "draft_verify" and name not in state:
            state[name], state["search_s"][name] = sorted(planner.skip_set), planner.search_s
        methods[name] = functools.partial(decode, model, planner=planner, **options)
    theirs = [name for name in names if name in THEIRS]
    return methods | (make_theirs(model, folder, theirs, options) if theirs else {})


def make_theirs(model, folder, names, options):
    """{name: method} for transformers' generate() on the same folder or Hub id, None being the default model."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = default_model_folder() if folder is None else folder
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
    sampled, eos_ids = options["temperature"] > 0, sorted(options["eos_ids"]) or None
    settings = {"max_new_tokens": options["max_new_tokens"], "eos_token_id": eos_ids, "pad_token_id": 0}
    settings["do_sample"] = sampled
    if sampled:
        settings |= {"temperature": options["temperature"], "top_p": options["top_p"], "top_k": 0}

    def run(prompt_ids, config):
        torch.manual_seed(options["seed"])
        prompt, clock = torch.tensor([prompt_ids], device=model.device), Clock()
        out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=clock)
        token_ids = out[0, len(prompt_ids) :].tolist()
        return {"token_ids": token_ids, "new_tokens": len(token_ids), "tokens_per_second": clock.rate()}

    exits = {name: THEIRS[name] and max(1, model.config.n_layer // THEIRS[name]) for name in names}
    configs = {name: transformers.GenerationConfig(**settings, assistant_early_exit=exits[name]) for name in names}
    return {name: functools.partial(run, config=config) for name, config in configs.items()}


class Clock:
    """A streamer for transformers: it is handed the prompt, then the new tokens, and keeps how many came when."""

    def __init__(self):
        self.arrivals = []

    def put(self, tokens):
        self.arrivals.append((tokens.numel(), time.perf_counter()))

    def end(self):
        pass

    def rate(self):
        """Tokens per second behind the first ones, which come with the prompt's forward. None if there are no more."""
        later = self.arrivals[2:]
        return sum(count for count, _ in later) / (later[-1][1] - self.arrivals[1][1]) if later else None


# --- 5. The table ----------------------------------------------------------------------------------------------------


def describe(model, name_or_path):
    """What figures depend on besides the method: model, machine, number format, versions."""
    folder = default_model_folder() if name_or_path is None else Path(name_or_path)
    planted = json.loads((folder / "config.json").read_text("utf-8")).get("knapspec_planted") if folder.is_dir() else None
    threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
    return {
        "model": folder.resolve().name if folder.is_dir() else name_or_path,  # no path of this machine
        "planted": planted,
        "machine": device_name(model.device) + threads,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def heading(title, about, date, lengths):
    """Lines of Markdown that say what a table shows. about: what describe() gives; lengths: of contexts, in tokens."""
    model, planted = about["model"], about["planted"]
    if planted:
        model += f" (planted: {planted['kind']}, epsilon {planted['epsilon']}, from {planted['source']})"
    where = f"{about['machine']}, {about['dtype']}, torch {about['torch']}"
    return [f"### {title}: {model}", "", f"{where}; context {min(lengths)} to {max(lengths)} tokens; {date}", ""]


def table(columns, rows):
    """Lines of a Markdown table that line up in a terminal too; None becomes a dash. Figures stand to the right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(columns, *cells)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in [columns, *cells]]
    aligned.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return ["| " + " | ".join(line) + " |" for line in aligned]


def shown(value, form):
    """A cell of a table: "{:.2f}" or the like, filled in; None stays."""
    return None if value is None else form.format(value)


def report(title, state, n_layer):
    """The table of a comparison, as Markdown."""
    runs = [(prompt["prompt_tokens"], run["new_tokens"]) for prompt in state["prompts"] for run in prompt["runs"]]
    lines = heading(title, state["settings"], state["date"], [tokens for n, new in runs for tokens in (n, n + new)])
    columns = ["method", "tokens/s", "speed-up", "accepted", "tokens/round", "planning", "search", "skipped attention",
               "skipped MLP", "same text"]  # fmt: skip
    rows = []
    for row in state["rows"]:
        row = row | {"search_s": row.get("search_s") or None}  # most methods do not search
        cells = [shown(row.get(key), form) for key, form in (
            ("tokens_per_second", "{:.1f}"), ("speedup", "{:.2f}"), ("acceptance_rate", "{:.0%}"),
            ("tokens_per_round", "{:.2f}"), ("plan_share", "{:.1%}"), ("search_s", "{:.1f} s"),
            ("skipped_attention", "{:.1f}"), ("skipped_mlp", "{:.1f}"),
        )]  # fmt: skip
        if "quartiles" in row:
            cells[1] += " ({:.2f} to {:.2f})".format(*row["quartiles"])
        same, count = row.get("identical", (None, None))
        rows.append([row["method"], *cells, None if same is None else "yes" if same == count else f"{same} of {count}"])
    settings = state["settings"]
    sampled = settings["temperature"] > 0
    how = f"temperature {settings['temperature']}, top-p {settings['top_p']}" if sampled else "greedy"
    count = f"Prompts: {settings['prompts']}; repeats: {settings['repeats']}; new tokens: up to {settings['max_new_tokens']}"
    notes = (
        f"{count}, {how}. Tokens/s: median, behind the first token, planning included. Speed-up: over the plain run "
        f"beside it, median (quartiles). Skipped: of {n_layer} each, mean over drafted tokens."
    )
    return "\n".join([*lines, *table(columns, rows), "", notes])

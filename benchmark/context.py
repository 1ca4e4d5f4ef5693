"""`context`: latencies, what the paper's planner skips, and its speed-up, as the context grows."""

from profile import measure

from tqdm import tqdm

from benchmark import commands, plots
from benchmark.methods import latency_for
from benchmark.results import heading, shown, table
from benchmark.runs import beside_plain, fresh, median
from benchmark.texts import running_text
from cli.options import number
from knapspec import KnapSpec

SPEEDS = {"acceptance_rate": "{:.0%}", "tokens_per_second": "{:.1f}", "speedup": "{:.2f}"}  # columns and their form


def at_length(model, latency, prompt_ids, *, new_tokens=64, repeats=1, budget=0.5):
    """Fitted latencies against those measured here, which part of all attention and of all MLPs drafts skip, the speed-up."""
    n, L, options = len(prompt_ids), model.config.n_layer, {"max_new_tokens": new_tokens}
    here, planner = measure(model, context_lengths=[n], gamma_max=0), fresh(model, KnapSpec(latency, budget=budget), options)
    runs = list(beside_plain(model, prompt_ids, {"knapspec": planner}, options=options, repeats=repeats))
    drafted, accepted = (sum(run[key] for run in runs) for key in ("drafted", "accepted"))
    skipped = {kind: sum(run["used"][kind].get("skip", 0) for run in runs) / (L * max(drafted, 1)) for kind in ("attention", "mlp")}
    return {
        "context": n,
        "fitted_s": {"attention": latency.attention(n), "mlp": latency.mlp(), "step": latency.verify(n, 1)},
        "measured_s": {"attention": here.attention(n), "mlp": here.mlp(), "step": here.verify(n, 1)},
        "skipped": skipped,
        "attention_among_skipped": skipped["attention"] / sum(skipped.values()) if any(skipped.values()) else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        **{key: median(run[key] for run in runs) for key in ("tokens_per_second", "speedup")},
    }


def context_table(rows):
    """Lines of Markdown that tell what at_length() returned for each length."""
    columns = ["context", "attention", "MLP", "step", "skipped attention", "skipped MLP", "attention among skipped",
               "accepted", "tokens/s", "speed-up"]  # fmt: skip
    lines = []
    for row in rows:
        times = [(1e3 * row["fitted_s"][key], 1e3 * row["measured_s"][key]) for key in ("attention", "mlp", "step")]
        skipped = [shown(value, "{:.0%}") for value in (*row["skipped"].values(), row["attention_among_skipped"])]
        speeds = [shown(row[key], form) for key, form in SPEEDS.items()]
        lines.append([row["context"], *("{:.2f} / {:.2f}".format(*pair) for pair in times), *skipped, *speeds])
    notes = "Times in ms, fitted / measured: an attention, an MLP, a whole step. Skipped: of all, mean over drafted tokens."
    return [*table(columns, lines), "", notes]


def add_options(add):
    commands.add_model(add)
    commands.add_amount(add, new_tokens=128, plot=True)
    add("--max-context", type=number(int, 2), metavar="N", help="default: the model's limit")
    add("--budget", type=number(float, 0, 1), default=0.5, metavar="X",
        help="largest part of the sublayers' time that a draft may save (default: %(default)s)")  # fmt: skip


def run(arguments):
    model, tokenizer, prompts = commands.prepare(arguments)
    longest = min(arguments.max_context or model.config.max_position, model.config.max_position)
    last = longest - arguments.max_new_tokens
    if last < 1:
        raise ValueError(f"no room for {arguments.max_new_tokens} new tokens in a context of {longest}: pass fewer")
    results = commands.results_of(arguments, model=model, prompts=prompts)
    latency, text_ids = latency_for(model, longest), running_text([text for _, text in prompts], tokenizer, longest)
    given = {"new_tokens": arguments.max_new_tokens, "repeats": arguments.repeats, "budget": arguments.budget}
    lengths = [n for n in (128 << i for i in range(32)) if n < 0.9 * last] + [last]
    bar = tqdm(lengths, desc="context", unit="length", disable=None)
    rows = [results.once(str(n), lambda n=n: at_length(model, latency, text_ids[:n], **given)) for n in bar]
    if arguments.plot:
        plots.context(rows, arguments.plot)
    return "\n".join([*heading("context", results.data, [lengths[0], longest]), *context_table(rows)])

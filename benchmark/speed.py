"""`speed`: the numbers to reach: wanted, measured, met. A row is a function of a Bench, in races.py, promises.py or steps.py."""

from benchmark import commands, promises, races, steps
from benchmark.bench import Bench
from benchmark.models import models_at
from benchmark.results import heading, machine, table
from cli.terminal import say

ROWS = steps.ROWS | races.ROWS | promises.ROWS  # name -> (what, function of a Bench that returns a Row)


def speed(bench, only=None):
    """Measures the rows named in `only`, or all, one after the other; the results hold each as soon as it is there."""
    rows = bench.results.data.setdefault("rows", {})
    for name in only or ROWS:
        what, measurement = ROWS[name]
        rows[name] = {"what": what, **measurement(bench)._asdict()}
        bench.results.save()


def speed_table(data):
    """The table as Markdown, with what the figures depend on. data: of Results."""
    signs = {True: "yes", False: "no", None: None}
    rows = [[row["what"], row["wanted"], row["measured"], signs[row["met"]]] for name in ROWS if (row := data["rows"].get(name))]
    lines = heading("speed, too few and short runs to judge by" if data["settings"]["quick"] else "speed", data)
    return "\n".join([*lines, *table(["what", "wanted", "measured", "met"], rows)])


def add_options(add):
    commands.add_amount(add, new_tokens=128, limit=24, repeats=5, planted=True)
    add("--only", type=commands.names_of(ROWS), metavar="LIST", help=f"some of {','.join(ROWS)}")
    add("--quick", action="store_true", help="few and short runs: shows that all works, not how fast it is")


def run(arguments):
    commands.check_files(arguments)
    results = commands.results_of(arguments, machine())
    quick, n_prompts, repeats = arguments.quick, arguments.limit, arguments.repeats
    with models_at(arguments.planted) as models:
        bench = Bench(models, results, quick, min(n_prompts, 2) if quick else n_prompts, arguments.max_new_tokens, 1 if quick else repeats)
        try:
            speed(bench, arguments.only)
        except KeyboardInterrupt:
            say(speed_table(results.data))
            raise
    return speed_table(results.data)

"""`speed`: the numbers to reach: wanted, measured, met. A row is a function of a Bench, in steps.py, races.py, predictions.py or long.py."""

from benchmark import commands, long, predictions, races, steps
from benchmark.bench import Bench
from benchmark.results import heading, machine, table

ROWS = steps.ROWS | races.ROWS | predictions.ROWS | long.ROWS  # name -> (what, function of a Bench that returns a Row)


def add_options(add):
    commands.add_amount(add, new_tokens=128, limit=24, repeats=5)
    commands.add_planted(add)
    add("--only", nargs="+", choices=ROWS, metavar="ROW", help=f"some of {', '.join(ROWS)}")


def run(arguments):
    results = commands.results_of(arguments, machine())
    bench = Bench(results, **{name: getattr(arguments, name) for name in ("limit", "max_new_tokens", "repeats", "planted")})
    rows = results.data.setdefault("rows", {})
    for name in arguments.only or ROWS:
        what, measurement = ROWS[name]
        rows[name] = {"what": what, **measurement(bench)._asdict()}
        results.save()  # each row as soon as it is there
    told, signs = [rows[name] for name in ROWS if name in rows], {True: "yes", False: "no", None: None}
    cells = [[row["what"], row["wanted"], row["measured"], signs[row["met"]]] for row in told]
    return "\n".join([*heading("speed", results.data), *table(["what", "wanted", "measured", "met"], cells)])

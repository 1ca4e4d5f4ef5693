"""The command line of all experiments: `python -m benchmark COMMAND --help`. Each prints its table."""

import argparse
import tempfile
from pathlib import Path

from benchmark import evidence
from benchmark.planted import PLANTED, plant, planted_items
from benchmark.speed import (
    ROWS,
    Bench,
    even_prompts,
    knapspec_planner,
    speed,
    speed_table,
)
from benchmark.sweep import contenders, sweep, sweep_table, told
from cli import cli
from cli.cli import Parser, number, say
from loading import load
from loading.default_model import default_model_folder
from loading.files import fetcher, read_json


def main(argv=None):
    """Runs one subcommand, prints what it returns, and returns the exit status; argv None is that of the process."""
    try:
        arguments = build_parser().parse_args(argv)
        print(arguments.run(arguments))
        return 0
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (ValueError, OSError) as error:
        say(f"benchmark.py: {' '.join(str(error).split())}")
        return 2


def build_parser():
    """One subcommand for each measurement, which sets `run`, the function that carries it out."""
    parser = Parser(prog="benchmark.py", allow_abbrev=False, description="Measure KnapSpec, and make models to measure it on.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser("plant", help="double a model's layers with sublayers that hardly matter")
    command.add_argument("--kind", choices=sorted(PLANTED), required=True, help="split: sublayers are redundant; blocks: whole layers are")
    command.add_argument("--out", required=True, metavar="FOLDER", help="where to write the planted model")
    command.add_argument("--model", metavar="FOLDER_OR_ID", help="the real model (default: SmolLM2-135M-Instruct)")
    command.add_argument("--epsilon", type=float, default=0.02, help="weight of the redundant sublayers (default: %(default)s)")
    command.set_defaults(run=_run_plant)

    command = commands.add_parser("sweep", help="find the best fixed plan, skip set and gamma, by trying many")
    command.add_argument("--model", metavar="FOLDER_OR_ID", help="default: SmolLM2-135M-Instruct")
    command.add_argument("--limit", type=number(int, 1), default=4, metavar="N", help="use N prompts (default: %(default)s)")
    command.add_argument("--max-new-tokens", type=number(int, 2), default=32, metavar="N", help="of each run (default: %(default)s)")
    command.add_argument("--json", metavar="FILE", help="write every round to FILE")
    command.set_defaults(run=_run_sweep)

    command = commands.add_parser("speed", help="all numbers to reach, wanted and measured")
    command.add_argument("--only", type=row_names, metavar="LIST", help=f"some of {','.join(ROWS)}")
    command.add_argument("--quick", action="store_true", help="few and short runs: shows that all works, not how fast it is")
    command.add_argument("--planted", metavar="FOLDER", help="where planted models are as `split` and `blocks`, or will be (default: for this run only)")
    command.add_argument("--limit", type=number(int, 1), default=24, metavar="N", help="at most N prompts in a row (default: %(default)s)")
    command.add_argument("--max-new-tokens", type=number(int, 2), default=128, metavar="N",
                         help="of the runs beside plain decoding (default: %(default)s)")  # fmt: skip
    command.add_argument("--json", metavar="FILE", help="write all results to FILE, each as soon as it is there")
    command.add_argument("--resume", action="store_true", help="take from FILE what it already holds")
    command.set_defaults(run=_run_speed)

    evidence.add_subcommands(commands)
    return parser


def row_names(text):
    """An argparse type: names of rows with commas between."""
    names = text.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {','.join(ROWS)}")
    return names


def _run_plant(arguments):
    plant(arguments.out, kind=arguments.kind, model=arguments.model, epsilon=arguments.epsilon)
    return f"{arguments.out} holds the planted model: python knapspec.py --model {arguments.out} …"


def _run_sweep(arguments):
    if arguments.json:
        cli.check_writable(Path(arguments.json))
    name = default_model_folder() if arguments.model is None else arguments.model
    model, tokenizer = load(name)
    kind = read_json(fetcher(name)("config.json")).get("knapspec_planted", {}).get("kind")
    prompts = [ids for _, ids in even_prompts(arguments.limit, arguments.max_new_tokens, tokenizer, model.config)]
    _, latency = knapspec_planner(model, tokenizer, max(map(len, prompts)), arguments.max_new_tokens)
    rounds = sweep(model, prompts, contenders(model, prompts[0], latency, kind=kind), max_new_tokens=arguments.max_new_tokens)
    if arguments.json:
        cli.write_json(Path(arguments.json), {"model": str(arguments.model), "planted": kind,
                                              "rounds": [[told(*result) for result in results] for results in rounds]})  # fmt: skip
    return sweep_table(rounds, model.config.n_layer, planted_items(kind, model.config.n_layer) if kind else frozenset())


def _run_speed(arguments):
    path = arguments.json and Path(arguments.json)
    if path:
        cli.check_writable(path)
    elif arguments.resume:
        raise ValueError("--resume continues the file that --json names: name it")
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(arguments.planted or work, quick=arguments.quick, max_new_tokens=arguments.max_new_tokens,
                      n_prompts=arguments.limit, path=path, resume=arguments.resume)  # fmt: skip
        try:
            return speed_table(speed(bench, arguments.only))
        except KeyboardInterrupt:
            say(speed_table(bench.results))
            raise

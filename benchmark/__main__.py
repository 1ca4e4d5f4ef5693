"""`python -m benchmark COMMAND`: a command is a file with add_options(add), and run(arguments), which returns its table."""

import sys
from importlib import import_module

from cli.options import Parser
from cli.terminal import say

COMMANDS = {  # name -> (file, what it does)
    "speed": ("speed", "all numbers to reach, wanted and measured"),
    "compare": ("compare", "knapspec+, knapspec, its rivals and plain decoding on the same prompts"),
    "parts": ("parts", "what each part of the adaptive planner brings: left out in turn, and added one by one"),
    "documents": ("documents", "long documents, summarised or asked about"),
    "sweep": ("sweep", "find the best fixed plan, skip set and gamma, by trying many"),
    "plot": ("plot", "draw what speed, documents or parts measured"),
    "example": ("example", "the method on numbers small enough to follow by hand"),
    "plant": ("planted", "double a model's layers with sublayers that hardly matter"),
}


def build_parser():
    """All commands with their options; what is parsed has the command's run()."""
    parser = Parser(prog="python -m benchmark", allow_abbrev=False, description="Measure KnapSpec, and make models to measure it on.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (file, what) in COMMANDS.items():
        module, command = import_module(f"benchmark.{file}"), commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        module.add_options(command.add_argument)
        command.set_defaults(run=module.run)
    return parser


def main(argv=None):
    """Runs one command, prints what it returns, and returns the exit status; argv None is that of the process."""
    try:
        arguments = build_parser().parse_args(argv)
        print(arguments.run(arguments))
        return 0
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (ValueError, OSError) as error:
        say(f"benchmark: {' '.join(str(error).split())}")
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""The command line of knapspec.py.

Standard output carries the text alone, closed by a newline; everything else goes to standard error. A mistake of the
user is one line and exit status 2; Ctrl-C keeps what was printed and is 130; a reader that closes the pipe is 0.
"""

import os
import signal
import sys

from cli.terminal import LESS_MEMORY, say

__all__ = ["main"]


def main(argv=None):
    """Runs the command line and returns the exit status; argv None is that of the process."""
    try:
        if sys.version_info < (3, 10):  # noqa: UP036, this is where an older one ends
            raise ValueError(f"Python 3.10 or newer is needed, and this is {sys.version.split()[0]}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK", "0") != "0":
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, of torchrun's processes the first alone speaks
        if sys.stdout:
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale
        # These import torch, which takes seconds, and where it runs Python from C it swallows a KeyboardInterrupt.
        whole = signal.signal(signal.SIGINT, lambda *_: (say("interrupted"), os._exit(130)))
        from cli.options import parse
        from cli.running import run

        signal.signal(signal.SIGINT, whole)
        return run(parse(argv))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except ModuleNotFoundError as error:
        return fail(f"{error}: run pip install -r requirements.txt")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what standard output could not take would fail again at the exit
        return 0 if isinstance(error, BrokenPipeError) else fail(error)
    except (ValueError, FloatingPointError) as error:
        return fail(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error).lower():  # torch has no class of its own for the CPU's, nor for cuBLAS's
            raise
        return fail(f"out of memory: {LESS_MEMORY}")


def fail(error):
    say(f"knapspec.py: {' '.join(str(error).split())}")  # one line, whatever the error holds
    return 2

"""What is printed: the text on standard output, everything else on standard error."""

import contextlib
import sys


def say(text):
    if sys.stderr:  # None where it is closed, and print would take standard output
        with contextlib.suppress(OSError):  # a full disk there, or a reader that left, costs these lines alone
            print(text, file=sys.stderr)


class Printer:
    """Prints the text of new tokens as it becomes certain, and keeps it."""

    def __init__(self, tokenizer):
        self.stream, self.text = tokenizer.stream(), ""

    def __call__(self, token_id):
        if piece := self.stream.push(token_id):
            self.text += piece
            print(piece, end="", flush=True)

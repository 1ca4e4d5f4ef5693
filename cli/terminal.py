"""What is printed: the text on standard output, everything else on standard error."""

import contextlib
import functools
import os
import sys

LESS_MEMORY = "pass a smaller --max-new-tokens or a shorter prompt, draft without copies (--choices full,skip), or pass a smaller --dtype or --model"


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


def ascii_only():
    """Can standard error show no more than ASCII?"""
    return "utf" not in (getattr(sys.stderr, "encoding", None) or "").lower()


def coloured():
    """Is standard error a terminal on which colours are wanted? See no-color.org."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@functools.cache
def _bytes():
    """The characters for which byte-level tokenizers write bytes. Source: GPT-2's encoder."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in own)
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


def label(tokenizer, token_id):
    """A token's text; where that is no whole characters, its bytes, as <F0 9F>; the name of a special one."""
    once, twice = tokenizer.decode([token_id]), tokenizer.decode([token_id] * 2)
    text = twice[len(once) :]  # at the start of a text some tokenizers drop a space
    if text and "\ufffd" not in text:
        return text
    name = tokenizer.backend.id_to_token(token_id) or f"token {token_id}"
    numbers = [_bytes().get(character, 0) for character in name]
    whole = 0 in numbers or max(numbers) < 128  # the name of a special token, or <0xF0> as SentencePiece writes a byte
    return name if whole else f"<{bytes(numbers).hex(' ').upper()}>"

"""What `speed` and `parts` measure on: models by name, the project's prompts, results, and how much of all."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmark.planted import plant
from benchmark.runs import decode
from benchmark.texts import own_prompts
from decoding import Planner
from loading import load
from loading.default_model import default_model_folder


class Row(NamedTuple):
    """What a row of `speed` found."""

    wanted: str
    measured: str
    met: bool | None  # None: not measured here, or nothing is wanted
    details: dict


class Bench:
    """limit: at most so many prompts; max_new_tokens: of runs beside plain decoding.

    planted: the folder of the planted models, by default one for this run only; what is missing there is made.
    """

    def __init__(self, results, *, limit, max_new_tokens, repeats, planted=None):
        self.results, self.limit, self.max_new_tokens, self.repeats = results, limit, max_new_tokens, repeats
        self.work = tempfile.TemporaryDirectory()  # until the end of the program
        self.planted, self.loaded = Path(planted or self.work.name), (None, None, None)

    def folder(self, name):
        """That of the default model, `smollm2`, or of the one of this kind planted in it."""
        if name == "smollm2":
            return default_model_folder()
        if not (self.planted / name).exists():
            plant(self.planted / name, kind=name)
        return self.planted / name

    def load(self, name, dtype=None):
        """(model, tokenizer), warmed up. One is kept at a time."""
        if self.loaded[0] != (name, dtype):
            self.loaded = (None, None, None)
            self.loaded = ((name, dtype), *load(self.folder(name), dtype=dtype))
            decode(self.loaded[1], [1, 2, 3], Planner(), max_new_tokens=8)
        return self.loaded[1:]

    def prompts(self, count, tokenizer, config):
        """[(id, token ids)] of at most `count` of the project's prompts."""
        return own_prompts(min(count, self.limit), tokenizer, config)

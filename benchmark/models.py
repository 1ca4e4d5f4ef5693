"""The models that are measured by name: the default one as `smollm2`, and those planted in it by their kind."""

import contextlib
import tempfile
from pathlib import Path

from benchmark.planted import plant
from benchmark.runs import decode
from decoding import Planner
from loading import load
from loading.default_model import default_model_folder


class Models:
    """planted: the folder of the planted models; one that is missing is made there when it is asked for."""

    def __init__(self, planted, progress=True):
        self.planted, self.progress, self.loaded = Path(planted), progress, (None, None, None)

    def folder(self, name):
        if name == "smollm2":
            return default_model_folder(progress=self.progress)
        if not (self.planted / name).exists():
            plant(self.planted / name, kind=name, model=self.folder("smollm2"), progress=self.progress)
        return self.planted / name

    def load(self, name, dtype=None):
        """(model, tokenizer), warmed up. One is kept at a time."""
        if self.loaded[0] != (name, dtype):
            self.loaded = (None, None, None)
            self.loaded = ((name, dtype), *load(self.folder(name), dtype=dtype, progress=self.progress))
            decode(self.loaded[1], [1, 2, 3], Planner(), max_new_tokens=8)
        return self.loaded[1:]


@contextlib.contextmanager
def models_at(planted):
    """Models whose planted ones are in that folder, or for None only here and now."""
    with tempfile.TemporaryDirectory() as work:
        yield Models(planted or work)

"""What the rows of `speed` share: models, results, and how much to measure."""

from typing import NamedTuple

from benchmark.models import Models
from benchmark.results import Results
from benchmark.texts import own_prompts


class Row(NamedTuple):
    wanted: str
    measured: str
    met: bool | None  # None: not measured here, or nothing is wanted
    details: dict


class Bench(NamedTuple):
    models: Models
    results: Results
    quick: bool = False  # few and short runs, to see that all works
    n_prompts: int = 24  # at most so many in a row
    max_new_tokens: int = 128  # of the runs beside plain decoding
    repeats: int = 5
    progress: bool = True

    def prompts(self, count, tokenizer, config):
        """[(id, token ids)] of at most `count` of the project's prompts."""
        return own_prompts(min(count, self.n_prompts), tokenizer, config)

"""For the tests of benchmark/: a tiny checkpoint, prompts, a planted model on a simulated machine."""

import types

from benchmark.planted import planted_items
from benchmark.results import Results
from tests.testing_checkpoints import CHATML, LLAMA, write_folder
from tests.testing_models import (
    SimulatedMachine,
    latency_model,
    random_model,
    random_tokens,
    tiny_config,
)

L = 8
CONFIG = tiny_config(n_layer=L)
TEXT = random_tokens(200, CONFIG).tolist()
LATENCY = latency_model(L, attention_s=(1e-3, 1e-5))
PROMPTS = [(f"prompt {seed}", random_tokens(20 + seed, CONFIG, seed).tolist()) for seed in range(3)]
OPTIONS = {"max_new_tokens": 17, "temperature": 0.0, "top_p": 1.0, "seed": 0, "eos_ids": ()}
ABOUT = {"model": "tiny", "planted": None, "dtype": "float32", "machine": "none", "torch": "0", "python": "3"}
TOKENIZER = types.SimpleNamespace(encode=lambda text: [b % 31 for b in text.encode()][:24], chat_template=None, eos_ids=(), bos_id=None)


def tiny_folder(tmp_path_factory):
    """A random Llama of six layers whose tokenizer has a token for each byte."""
    config = LLAMA | {"num_hidden_layers": 6, "max_position_embeddings": 768}
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", config, tokenizer_config_json={"chat_template": CHATML})


def simulated(monkeypatch, kind="blocks", *, epsilon=0.0, latency=LATENCY):
    """A machine that takes what `latency` says, and a model on it whose planted sublayers add epsilon times what they would."""
    return SimulatedMachine(random_model(CONFIG, faint=planted_items(kind, L), epsilon=epsilon), latency, monkeypatch)


def results():
    return Results(ABOUT | {"max_new_tokens": 17, "temperature": 0.0, "repeats": 1})

"""`plant`: checkpoints whose redundancy is known, a real model with twice the layers, half of whose sublayers hardly matter."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from cli.options import number
from loading.config import read_config
from loading.default_model import default_model_folder
from loading.files import fetcher, read_json
from loading.weights import DTYPES, find_tensors, read_tensors
from model import Transformer

# Which of the four sublayers that a real layer becomes (attention, MLP, attention, MLP) hardly matter.
PLANTED = {"split": (1, 2), "blocks": (2, 3), "soft": (1, 2)}
SOFTEST = 0.5  # ε of the last redundant sublayer of "soft", where skipping more and more costs acceptance as in real models
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "generation_config.json", "LICENSE",
)  # fmt: skip


def planted_items(kind, n_layer):
    """The redundant items of a planted model of n_layer layers: the truth by which to judge what a method skips.

    kind: one of PLANTED. Skipping just these gives the model from which it was made. Returns a frozenset.
    """
    assert n_layer % 2 == 0, f"a planted model has an even number of layers, not {n_layer}"
    return frozenset(4 * i + item for i in range(n_layer // 2) for item in PLANTED[kind])


def epsilons(kind, n_layer, epsilon):
    """{redundant item: the weight of what it adds}: all alike, but of "soft" they rise evenly from epsilon to SOFTEST."""
    items = sorted(planted_items(kind, n_layer))
    last = SOFTEST if kind == "soft" else epsilon
    return {item: epsilon + (last - epsilon) * i / (len(items) - 1) for i, item in enumerate(items)}


def plant(out, *, kind, model=None, epsilon=0.02):
    """Writes a checkpoint with known redundancy to the folder out: each layer of a real model becomes two.

    Both layers of a pair hold the real layer's weights, but those in `planted_items(kind, ...)` add only epsilon
    times what they would add. "split": the real attention with an epsilon MLP, then an epsilon attention with the
    real MLP, so that no whole layer can be skipped. "blocks": the real layer, then a whole epsilon layer. "soft": as
    "split", but epsilon rises over the layers, so that each further skip costs more. model: a folder, a Hub id, or
    None for the default model. The result is an ordinary Hugging Face folder in the model's own dtypes, held in memory
    while it is made. Raises ValueError if out exists, and on what loading/ does not load.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists: pass a new folder as --out, or delete it first")
    model = default_model_folder() if model is None else model
    fetch = fetcher(model)
    raw = read_json(fetch("config.json"))
    config = read_config(raw)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}
    entries = find_tensors(fetch, expected, config.tied)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".unfinished-", ignore_cleanup_errors=True) as work:
        made = Path(work, "model")
        made.mkdir()
        tensors = _planted_tensors(entries, epsilons(kind, 2 * config.n_layer, epsilon))
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        source = Path(model).resolve().name if Path(model).is_dir() else model  # no path of this machine
        origin = {"kind": kind, "epsilon": f"{epsilon} to {SOFTEST}" if kind == "soft" else epsilon, "source": source}
        (made / "config.json").write_text(json.dumps(_planted_config(raw) | {"knapspec_planted": origin}, indent=2), "utf-8")
        for file in _COPIED:
            if path := fetch(file, required=False):
                shutil.copyfile(path, made / file)
        made.rename(out)


def _planted_config(raw):
    """The config.json for twice as many layers; every key that counts or lists layers follows."""
    planted = raw | {key: 2 * raw[key] for key in ("num_hidden_layers", "max_window_layers") if raw.get(key) is not None}
    if raw.get("layer_types"):
        planted["layer_types"] = [kind for kind in raw["layer_types"] for _ in range(2)]
    return planted


def _planted_tensors(entries, factors):
    """{name: tensor} of a planted model.

    entries: what find_tensors returns for the source. factors: by which the output of redundant items is scaled.
    """
    planted = {}
    for name, entry in tqdm(entries.items(), desc="planting", unit="tensor", disable=None, leave=False):
        ((_, tensor),) = read_tensors({"": entry}, "cpu", DTYPES[entry[1]], progress=False)
        if not (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)):
            planted[name] = tensor
            continue
        for layer in (2 * int(match[1]), 2 * int(match[1]) + 1):
            writes = re.match(r"self_attn\.o_proj|mlp\.down_proj", match[2])  # what a sublayer adds comes from there, bias and all
            item = 2 * layer + match[2].startswith("mlp")
            planted[f"model.layers.{layer}.{match[2]}"] = tensor * (factors.get(item, 1) if writes else 1)
    return planted


def add_options(add):
    add("--kind", choices=sorted(PLANTED), required=True,
        help="split: sublayers are redundant; blocks: whole layers are; soft: sublayers, the later the less")  # fmt: skip
    add("--out", required=True, metavar="FOLDER", help="where to write the planted model")
    add("--model", metavar="NAME", help="the real model, a folder or Hugging Face Hub id (default: SmolLM2-135M-Instruct)")
    add("--epsilon", type=number(float, 0, 1), default=0.02, help="weight of the redundant sublayers (default: %(default)s)")


def run(arguments):
    plant(arguments.out, kind=arguments.kind, model=arguments.model, epsilon=arguments.epsilon)
    return f"{arguments.out} holds the planted model: python knapspec.py --model {arguments.out} …"

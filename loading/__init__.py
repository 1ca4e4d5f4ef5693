"""From a name or a folder to a loaded model and its tokenizer: `from loading import load`.

files.py finds the files, config.py, tokenizer.py and weights.py read them, default_model.py makes a model for whoever
names none, and caches.py says where what is made once is kept. Nothing is ever loaded approximately, and no code that
comes with a checkpoint runs. Every mistake of a user and every fault of a checkpoint raises ValueError: one line that
names it and the remedy.
"""

import torch
from torch.overrides import TorchFunctionMode

from loading.config import read_config
from loading.default_model import default_model_folder
from loading.files import fetcher, first_line, read_json, read_text
from loading.memory import refuse_what_does_not_fit, weights_bytes
from loading.tokenizer import Tokenizer, build_tokenizer
from loading.weights import find_tensors, read_tensors
from model import Transformer

__all__ = ["device_and_dtype", "load", "outline"]


def load(name_or_path=None, *, device=None, dtype=None, progress=True, make=Transformer, rank=0) -> tuple[Transformer, Tokenizer]:
    """Loads a model and its tokenizer from a local folder, a Hub id or, for None, the default model.

    device: "cpu", "cuda", ...; default: cuda where there is one. dtype: torch.dtype or its name; default: float32
    on a CPU, bfloat16 elsewhere. progress: bars on standard error. make(config): what is to be filled; where it has a
    tensor smaller than the checkpoint's along one dimension, it gets that tensor's part number `rank`. Raises ValueError.
    The configuration, and whether the model fits, is judged before weights are fetched; their headers before they are read.
    """
    device, dtype = device_and_dtype(device, dtype)
    try:
        return _load(_fetcher(name_or_path, progress), device, dtype, progress, make, rank)
    except torch.OutOfMemoryError:
        raise ValueError(f"the model does not fit on {device}: pass --device cpu, or a smaller --model") from None
    except OSError as error:
        raise ValueError(f"cannot read the model ({first_line(error)}): see to its files, or pass another") from None


def outline(name_or_path=None, *, progress=True) -> Transformer:
    """The model without its weights, on torch's device "meta": of its files config.json alone is read. Raises ValueError."""
    return _outline(read_config(read_json(_fetcher(name_or_path, progress)("config.json"))))


def _fetcher(name_or_path, progress):
    return fetcher(default_model_folder(progress=progress) if name_or_path is None else name_or_path, progress=progress)


def _outline(config, make=Transformer):
    with torch.device("meta"), _WithoutInit():  # shapes only: nothing is allocated
        return make(config)


def _load(fetch, device, dtype, progress, make, rank):
    raw = read_json(fetch("config.json"))
    config = read_config(raw)
    tokenizer = _read_tokenizer(fetch, raw, config.vocab_size)
    model = _outline(config, make)
    needed = weights_bytes(model, device, dtype)
    refuse_what_does_not_fit(f"the weights as {dtype}", needed, device, "pass a smaller --dtype, another --device or a smaller --model")
    whole = model if make is Transformer else _outline(config)
    shapes, parts = ({name: tuple(tensor.shape) for name, tensor in m.state_dict().items()} for m in (whole, model))
    tensors = find_tensors(fetch, shapes, config.tied)
    return model.load(read_tensors(tensors, device, dtype, progress, parts, rank)), tokenizer


def _read_tokenizer(fetch, raw, vocab_size):
    names = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
    generation, settings, template = paths = [fetch(name, required=False) for name in names]
    settings = read_json(settings) if settings else {}
    if "added_tokens_decoder" not in settings and (older := fetch("special_tokens_map.json", required=False)):
        settings |= read_json(older)  # as in transformers
    return build_tokenizer(
        fetch("tokenizer.json"),
        vocab_size=vocab_size,
        config=raw,
        generation=read_json(generation) if generation else {},
        settings=settings,
        template=read_text(template) if template else None,
        unasked=[name for name, path in zip(names[1:], paths[1:]) if path is False],
    )


class _WithoutInit(TorchFunctionMode):
    """Leaves out the random initialisation of weights that are about to be loaded."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return function(*args, **kwargs)


def device_and_dtype(device, dtype):
    """The torch.device and torch.dtype that `load`'s arguments ask for. Raises ValueError."""
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", "cuda"):  # "mps", for example, has no float64, which sampling needs
            raise ValueError(f"device {str(device)!r} is not supported: pass --device cpu, or cuda on a GPU")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        raise ValueError(f"device {str(device)!r} is not there: pass --device cpu, or cuda on a GPU") from None
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise ValueError(f"dtype {name!r} is not supported: pass float32, bfloat16, float16 or float64")
    return device, getattr(torch, name)

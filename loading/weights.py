"""From safetensors files to tensors on their device, one by one; headers are judged before anything is read."""

import contextlib
import ctypes
import json
import math
import re

import torch
from tqdm import tqdm

from loading.files import first_line, read_json

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
        if not index:
            fetch("model.safetensors")  # raises, with the remedy
        weight_map = _read_weight_map(index)
        _compare_names(weight_map, shapes, tied, index)
        files = {name: fetch(name) for name in sorted(set(weight_map.values()))}
    found = {}
    for file, path in files.items():
        for name, entry in read_header(path).items():
            if name in found:
                raise ValueError(f"{path} repeats the tensor {name!r:.100} of {found[name][0].name}: download the model again")
            if index and weight_map.get(name) != file:
                raise ValueError(f"{path} holds {name!r:.100}, which {index.name} does not place there: download both again")
            found[name] = (path, *entry)
    _compare_names(found, shapes, tied, index or single)
    for name, shape in shapes.items():
        path, dtype, found_shape, _ = found[name]
        if dtype not in DTYPES:
            readable = ", ".join(DTYPES)
            raise ValueError(f"{path}: {name} is {dtype!r:.100}, but only {readable} are read: pass an unquantised model")
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
            raise ValueError(f"{index} places {name!r:.100} in {file!r:.100}, not a safetensors file beside it: distrust it")
    return weight_map


def _compare_names(found, shapes, tied, where):
    for name in shapes:
        if name not in found:
            raise ValueError(f"{where} lacks the tensor {name}: it is incomplete, or config.json is another model's")
    for name in found:
        harmless = name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
        if name not in shapes and not harmless:
            raise ValueError(f"{where} holds the unexpected tensor {name!r:.100}: pass a model whose config.json explains it")


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
            raise ValueError(f"{name!r:.50} is {dtype!r:.20} {list(shape)} at {start} to {end}")
        position = end
    return position


def _unique(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def read_tensors(tensors, device, dtype, progress=True, parts=None, rank=0):
    """Yields (name, tensor) in dtype on device for find_tensors' answer, one by one, and keeps none.

    parts: {name: shape} of what is wanted: all, or part number `rank` along the one dimension that is smaller.
    Files are read, not mapped: mapped pages would count as this process's memory for as long as the mapping lives.
    """
    parts = parts or {name: shape for name, (_, _, shape, _) in tensors.items()}
    sizes = {name: math.prod(parts[name]) * DTYPES[kind].itemsize for name, (_, kind, _, _) in tensors.items()}
    buffer, untrimmed = torch.empty(_CHUNK_BYTES, dtype=torch.uint8), 0
    bar = tqdm(desc="Loading", total=sum(sizes.values()), unit="B", unit_scale=True, leave=False, disable=None if progress else True)
    with contextlib.ExitStack() as stack, bar:
        paths = {path for path, *_ in tensors.values()}
        files = {path: stack.enter_context(open(path, "rb", buffering=0)) for path in paths}
        for name, (path, kind, shape, offset) in tensors.items():
            tensor = torch.empty(parts[name], dtype=dtype, device=device)
            for piece, start in _pieces(tensor, shape, rank):
                files[path].seek(offset + start * DTYPES[kind].itemsize)
                for chunk in piece.split(_CHUNK_BYTES // DTYPES[kind].itemsize):
                    raw = buffer[: chunk.numel() * DTYPES[kind].itemsize]
                    if files[path].readinto(raw.numpy()) != raw.numel():
                        raise ValueError(f"{path} ended while it was read: download it again")
                    chunk.copy_(raw.view(DTYPES[kind]))
                    bar.update(raw.numel())
            del piece, chunk
            yield name, tensor
            del tensor
            untrimmed += sizes[name]
            if untrimmed > 2**23:
                return_freed_memory()
                untrimmed = 0
    return_freed_memory()


def _pieces(tensor, shape, rank):
    """The runs of a tensor that lie in one piece in the file, which holds one of that shape: [(a run, flat; its first element there)]."""
    if tensor.shape[1:] == shape[1:]:  # whole rows
        return [(tensor.view(-1), rank * tensor.numel() if tensor.shape != shape else 0)]
    return [(row, i * shape[1] + rank * len(row)) for i, row in enumerate(tensor)]


def return_freed_memory():
    """As the model packs weights into copies and drops them, glibc would hold on to a fifth of the model in holes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)

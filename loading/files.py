"""Where a checkpoint's files come from: a local folder or the Hugging Face Hub."""

import json
import os
import re
from pathlib import Path

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub import errors as hub_errors


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


def first_line(error):
    """What an error says, as one line."""
    return (str(error).strip().splitlines() or ["no message"])[0]

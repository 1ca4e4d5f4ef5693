"""Where a checkpoint's files come from: a local folder or the Hugging Face Hub."""

import errno
import json
import os
from pathlib import Path

# huggingface_hub is imported where the Hub is asked: that takes a fifth of a second.

# Where huggingface_hub cannot keep a file, rather than not get it.
_DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR)


def fetcher(name_or_path, *, progress=True):
    """Returns fetch(file name, required=True) -> its local Path. progress: bars while the Hub is fetched from.

    What is not required may be None, where the model has no such file, and False, where it may have one but the Hub
    could not be asked. Both raise ValueError, with the remedy: for a name that is no folder and no Hub id, for a
    required file that is missing.
    """
    name = os.fspath(name_or_path)
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return lambda file, required=True: _local_file(folder, file, required)
    if os.path.lexists(folder):
        raise ValueError(f"{name} is no folder: pass the one that holds config.json, tokenizer.json and the weights")
    from huggingface_hub import errors, utils

    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError:
        missing = f"there is no folder {name!r:.200}"
        raise ValueError(f"{missing}: pass one that exists, or a Hub id such as Qwen/Qwen3-0.6B") from None
    if not progress:
        utils.disable_progress_bars()
    return lambda file, required=True: _hub_file(name, file, required)


def _local_file(folder, file, required):
    path = folder / file
    if path.is_file():
        return path
    if os.path.lexists(path):
        raise ValueError(f"{path} is no file, or a link to none: copy or download it again")
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
    import huggingface_hub
    from huggingface_hub import errors

    try:
        if not required and huggingface_hub.try_to_load_from_cache(repo, file) is huggingface_hub._CACHED_NO_EXIST:
            return None  # as this very revision is known to lack it; without network, asking would take half a minute
        return Path(huggingface_hub.hf_hub_download(repo, file))
    except errors.GatedRepoError:
        reason = f"access to {repo} is gated: ask for it at https://huggingface.co/{repo}, then run hf auth login"
    except errors.RepositoryNotFoundError:
        reason = f"no folder and no Hub model is called {repo!r}: check the name; if it is private, run hf auth login"
    except errors.LocalEntryNotFoundError:
        if not required:
            return False
        reason = f"the Hub is out of reach and {file} of {repo} is not cached: go online, or pass a local folder"
    except errors.EntryNotFoundError:
        reason = required and f"{repo} has no {file}: {_remedy(file)}"
    except Exception as error:  # noqa: BLE001, the HTTP library below huggingface_hub and its errors differ by version
        problem = f"cannot fetch {file} of {repo} from the Hub ({type(error).__name__}: {first_line(error)})"
        reason = f"{problem}: {_hub_remedy(error)}, or pass a local folder"
    if reason:
        raise ValueError(reason)
    return None


def _hub_remedy(error):
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        return "log in with a token that may read it (hf auth login)"
    if getattr(error, "errno", None) in _DISK_ERRORS:
        return "set HF_HOME to a folder of your own with enough room"
    return "try again"


def read_text(path):
    """What a UTF-8 file holds. Raises ValueError for one that is not."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}): download it again") from None


def read_json(path):
    """The object that a JSON file holds, as a dict. Raises ValueError for anything else."""
    text = read_text(path)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair, which JSON can escape
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({first_line(error)}): download it again") from None
    if type(value) is not dict:
        raise ValueError(f"{path} does not hold a JSON object: download it again")
    return value


def first_line(error):
    """What an error says, as one line of at most 200 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]

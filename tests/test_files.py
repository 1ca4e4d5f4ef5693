"""Local folders, the Hub and devices: what is fetched, and one line with the remedy where it cannot be.

What goes wrong for users -> tests
  gated, unknown, no network, ...      test_hub_failure_is_one_line_with_a_remedy, test_hub_fetches_only_what_is_needed,
                                       test_wrong_path_is_one_line, test_trailing_slash
  pickles, adapters, GGUF              test_folder_without_safetensors_says_what_it_holds
"""

import errno
import os
import types
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import _CACHED_NO_EXIST
from huggingface_hub import errors as hub_errors

from loading import load
from loading.config import read_config
from tests.testing_checkpoints import (
    CHATML,
    LLAMA,
    assert_refused,
    byte_tokenizer,
    from_weights,
    logits,
    quiet_load,
    random_weights,
    write_folder,
)


def test_trailing_slash(tmp_path, monkeypatch):
    write_folder(tmp_path / "m")
    for name in (f"{tmp_path}/m/", f"{tmp_path}/m//", tmp_path / "m"):
        assert quiet_load(name)[0].config == read_config(LLAMA)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert quiet_load("~/m/")[0].config == read_config(LLAMA)


@pytest.mark.parametrize(("files", "words"), [
    ([], ["config.json"]),
    (["adapter_config.json", "adapter_model.safetensors"], ["adapter", "merge"]),
    (["model-q4.gguf"], ["GGUF"]),
    (["consolidated.00.pth", "params.json"], ["config.json"]),
    (["config.json"], ["tokenizer.json", "AutoTokenizer"]),
    (["config.json", "tokenizer.json", "pytorch_model.bin"], ["model.safetensors", "pickled", "never loaded"]),
    (["config.json", "tokenizer.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], ["pickled"]),
    (["config.json", "tokenizer.json"], ["model.safetensors", "download it again"]),
])  # fmt: skip
def test_folder_without_safetensors_says_what_it_holds(tmp_path, files, words):
    whole = write_folder(tmp_path / "whole")
    folder = tmp_path / "m"
    folder.mkdir()
    for name in files:  # what would be run if it were unpickled stays unread
        pickled = b"cos\nsystem\n(S'exit'\ntR."
        (folder / name).write_bytes((whole / name).read_bytes() if (whole / name).exists() else pickled)
    assert_refused(str(folder), *words, call=lambda: quiet_load(folder))


@pytest.mark.parametrize("name", [
    "./missing", "/no/such/folder", "missing/", "a/b/c", "..", "", "~/missing", "~nobody-here/m", "a b", "a" * 5000, "a\0b", "a--b", "-a", "a.git", "https://huggingface.co/a/b",
])  # fmt: skip
def test_wrong_path_is_one_line(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: pytest.fail("not a Hub id"))
    call = (lambda: quiet_load(name)) if name != ".." else (lambda: quiet_load(tmp_path))
    assert_refused("pass", call=call)


@pytest.mark.parametrize("file", ["config.json", "chat_template.jinja", "model.safetensors"])
def test_unreadable_file_is_one_line(tmp_path, monkeypatch, file):
    folder = write_folder(tmp_path / "m", chat_template_jinja=CHATML)
    (folder / file).rename(folder / "kept")
    os.symlink(folder / "kept" / "no folder", folder / file)
    monkeypatch.setattr(Path, "is_file", os.path.lexists)  # so that only opening fails, as where permission is denied
    assert_refused(file, "cannot read", call=lambda: quiet_load(folder))


def test_home_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does for a user without one
    assert_refused("there is no folder '~/m'", call=lambda: quiet_load("~/m"))


def test_file_instead_of_folder(tmp_path):
    file = write_folder(tmp_path / "m") / "model.safetensors"
    assert_refused("is no folder", "pass the one", call=lambda: quiet_load(file))
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert_refused("is no folder", "pass the one", call=lambda: quiet_load(tmp_path / "link"))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "chat_template.jinja", "model.safetensors"])
@pytest.mark.parametrize("kind", ["broken link", "folder", "loop"])
def test_what_is_there_but_no_file_is_never_taken_for_absent(tmp_path, file, kind):
    path = write_folder(tmp_path / "m") / file
    path.unlink(missing_ok=True)
    path.mkdir() if kind == "folder" else path.symlink_to(path if kind == "loop" else tmp_path / "gone")
    assert_refused(str(path), "again", call=lambda: quiet_load(tmp_path / "m"))


class FakeHub:
    """hf_hub_download that serves a folder and notes what is asked for."""

    def __init__(self, folder, missing=hub_errors.EntryNotFoundError):
        self.folder, self.missing, self.asked = folder, missing, []

    def __call__(self, repo, file):
        assert repo == "someone/model"
        self.asked.append(file)
        if not (self.folder / file).exists():
            raise an(self.missing)
        return str(self.folder / file)


def an(kind, message="several\nlines"):
    """An error as huggingface_hub raises it; how they are made differs between its versions."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("missing", [hub_errors.EntryNotFoundError, hub_errors.LocalEntryNotFoundError], ids=["online", "offline"])
def test_hub_fetches_only_what_is_needed(tmp_path, monkeypatch, shards, missing):
    weights = random_weights(LLAMA)
    folder = write_folder(tmp_path / "m", weights=weights, shards=shards, generation_config_json={"eos_token_id": 9})
    for other in ("pytorch_model.bin", "README.md", "original.safetensors"):
        (folder / other).write_bytes(b"?")
    hub = FakeHub(folder, missing)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    model, tokenizer = quiet_load("someone/model")
    assert torch.equal(logits(model), logits(from_weights(LLAMA, weights))) and tokenizer.eos_ids == {257, 9}
    settings = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    settings |= {"special_tokens_map.json"}
    index = {"model.safetensors.index.json", "model-0.safetensors", "model-1.safetensors"} if shards == 2 else set()
    assert set(hub.asked) == settings | {"model.safetensors"} | index
    assert not any(file.endswith(".safetensors") for file in hub.asked[:6]), "weights last"


@pytest.mark.parametrize(("settings", "cached"), [({}, "chat_template.jinja"), (None, "tokenizer_config.json and chat_template.jinja")])
def test_template_that_could_not_be_asked_for_is_told_from_none(tmp_path, monkeypatch, settings, cached):
    """Another program filled the cache, and now there is no network."""
    files = {} if settings is None else {"tokenizer_config_json": settings}
    folder = write_folder(tmp_path / "m", **files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", FakeHub(folder, hub_errors.LocalEntryNotFoundError))
    tokenizer = quiet_load("someone/model")[1]
    assert tokenizer.chat_template == "" and tokenizer.encode("hi") == byte_tokenizer().encode("hi").ids
    assert_refused(f"lacks {cached}", "online", "--raw", call=lambda: tokenizer.chat("hi"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", FakeHub(folder))
    assert quiet_load("someone/model")[1].chat_template is None, "the Hub says that there is none"
    write_folder(folder, tokenizer_config_json={"chat_template": CHATML})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", FakeHub(folder, hub_errors.LocalEntryNotFoundError))
    assert quiet_load("someone/model")[1].chat_template == CHATML


def test_hub_model_is_refused_before_its_weights_are_fetched(tmp_path, monkeypatch):
    hub = FakeHub(write_folder(tmp_path / "a", LLAMA | {"hidden_act": "gelu"}, {}))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    assert_refused("hidden_act", call=lambda: quiet_load("someone/model"))
    assert hub.asked == ["config.json"]
    hub = FakeHub(write_folder(tmp_path / "b", LLAMA, random_weights(LLAMA) | {"odd": torch.ones(1)}, shards=2))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    assert_refused("odd", call=lambda: quiet_load("someone/model"))
    assert hub.asked[-1] == "model.safetensors.index.json"


def test_file_that_the_cache_knows_to_be_absent_is_not_asked_for(tmp_path, monkeypatch):
    hub = FakeHub(write_folder(tmp_path / "m"))
    absent = ("chat_template.jinja", "tokenizer_config.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, file: _CACHED_NO_EXIST if file in absent else None)
    quiet_load("someone/model")
    assert not set(absent) & set(hub.asked)


@pytest.mark.parametrize(("kind", "words"), [
    (hub_errors.GatedRepoError, ["gated", "hf auth login"]),
    (hub_errors.RepositoryNotFoundError, ["someone/model", "check the name"]),
    (hub_errors.LocalEntryNotFoundError, ["out of reach", "local folder"]),
    (hub_errors.EntryNotFoundError, ["has no config.json"]),
    (hub_errors.HfHubHTTPError, ["HfHubHTTPError: several", "try again"]),
    (ConnectionError, ["ConnectionError", "local folder"]),
    (OSError, ["OSError", "try again"]),
])  # fmt: skip
def test_hub_failure_is_one_line_with_a_remedy(monkeypatch, kind, words):
    def fail(repo, file):
        raise an(kind)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert_refused(*words, call=lambda: quiet_load("someone/model"))


@pytest.mark.parametrize(("error", "remedy"), [
    (OSError(errno.ENOSPC, "No space left on device"), "HF_HOME"), (OSError(errno.EROFS, "Read-only file system"), "HF_HOME"),
    (PermissionError(errno.EACCES, "Permission denied"), "HF_HOME"), (ConnectionRefusedError(errno.ECONNREFUSED, "no"), "try again"),
    (401, "hf auth login"), (403, "hf auth login"), (500, "try again"),
])  # fmt: skip
def test_remedy_follows_what_keeps_a_file_of_the_hub_away(monkeypatch, error, remedy):
    if type(error) is int:
        status, error = error, an(hub_errors.HfHubHTTPError)
        error.response = types.SimpleNamespace(status_code=status)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: (_ for _ in ()).throw(error))
    assert_refused("config.json of someone/model", remedy, call=lambda: quiet_load("someone/model"))


def test_weights_that_are_not_cached_are_asked_for_in_one_line(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", FakeHub(folder, hub_errors.LocalEntryNotFoundError))
    assert_refused("out of reach", "model.safetensors", call=lambda: quiet_load("someone/model"))


def test_hub_without_network_is_one_line(monkeypatch, tmp_path):
    """The real library, with its real offline mode and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert_refused("out of reach", call=lambda: quiet_load("someone/model"))


def test_hub_repository_with_pickled_weights_only(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"?")
    hub = FakeHub(folder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    assert_refused("model.safetensors", "pickled", call=lambda: quiet_load("someone/model"))
    assert "pytorch_model.bin" not in hub.asked


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "cpu:x", "privateuseone", "mps", "xpu"])
def test_device_that_is_not_there(tmp_path, device):
    assert_refused("device", device, "cpu", call=lambda: load(tmp_path, device=device))


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.int8, "nn", "float33"])
def test_dtype_that_is_not_supported(tmp_path, dtype):
    assert_refused("dtype", "float32", call=lambda: load(tmp_path, device="cpu", dtype=dtype))

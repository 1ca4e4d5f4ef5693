"""What is kept on the user's disk: where, and that a reader sees all of a file or none."""

import os
from pathlib import Path

import pytest

from loading import load
from loading.caches import cache_folder, write_text
from tests.testing_checkpoints import assert_refused


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("KNAPSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "knapspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/knapspec")
    monkeypatch.setenv("KNAPSPEC_CACHE", "/k")
    assert cache_folder() == Path("/k")


def test_without_a_home_caches_are_done_without(monkeypatch):
    for name in ("KNAPSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does for a user without one
    with pytest.raises(OSError):
        (cache_folder() / "profiles" / "x.json").read_text()
    with pytest.raises(OSError):
        write_text(cache_folder() / "profiles" / "x.json", "{}")
    assert_refused("default model", "set KNAPSPEC_CACHE", call=lambda: load(device="cpu", progress=False))


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / ("x" * 250)
    write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    (tmp_path / "link").symlink_to(path)
    write_text(tmp_path / "link", "b")
    assert path.read_text() == "b" and (tmp_path / "link").is_symlink()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_text(path, "c")
    assert path.read_text() == "b" and os.listdir(path.parent) == [path.name], "nothing unfinished is left"

"""What is kept on the user's disk: where, and that a reader sees all of a file or none."""

from pathlib import Path

from loading.caches import cache_folder


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("KNAPSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "knapspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/knapspec")
    monkeypatch.setenv("KNAPSPEC_CACHE", "/k")
    assert cache_folder() == Path("/k")

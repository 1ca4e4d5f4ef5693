"""Where what is made once is kept on the user's disk, and how it is written."""

import os
import tempfile
from pathlib import Path


def cache_folder():
    """Where to keep what is made once: $KNAPSPEC_CACHE, else $XDG_CACHE_HOME/knapspec, else ~/.cache/knapspec.

    Whoever has no home gets a folder that cannot be: reading and writing in it raise OSError, as on a full disk.
    """
    if own := os.environ.get("KNAPSPEC_CACHE"):
        return Path(own)
    home = os.path.expanduser("~")  # stays "~" where there is none
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(os.devnull if home == "~" else home, ".cache")) / "knapspec"


def write_text(path, text):
    """Writes beside the file, then renames: whoever reads it sees all of it or none. Makes its folder. Raises OSError."""
    path = Path(path).resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as work:
        beside = Path(work, "made")
        beside.write_text(text, "utf-8")
        beside.replace(path)

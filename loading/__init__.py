"""From a name or a folder to a loaded model and its tokenizer."""

from loading.checkpoint import load

__all__ = ["load"]

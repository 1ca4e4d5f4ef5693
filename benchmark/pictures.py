"""Pictures: each is drawn twice, for light pages and for dark ones, byte for byte the same whenever it is drawn again."""

import importlib.util
from pathlib import Path

INK = {"": "#1f2328", "-dark": "#e6edf3"}  # behind the file's name -> what is written and drawn in; the paper shows through
COLOURS = "#3b82c4", "#d9822b", "#3a9a5b", "#9a6bc4"  # to be told apart on both
MUTED = "#8b949e"


def check(option, path):
    """Raises ValueError, before any work, where no picture can be drawn there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs the package matplotlib: pip install matplotlib")
    if Path(path).suffix not in (".png", ".svg") or not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{option} {path} cannot be drawn: name a .png or .svg file in a folder that is there")


def draw(path, size, paint):
    """paint(figure) draws a picture of so many inches. Writes NAME.svg and NAME-dark.svg -> a line that names both."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path = Path(path)
    for suffix, ink in INK.items():
        inked = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
        with rc_context({**inked, "svg.fonttype": "none", "svg.hashsalt": "knapspec", "font.family": "sans-serif"}):
            figure = Figure(size, layout="constrained")
            paint(figure)
            dated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
            figure.savefig(path.with_stem(path.stem + suffix), transparent=True, dpi=150, **dated)
    return f"drawn: {path}, and {path.with_stem(path.stem + '-dark')} for dark pages"

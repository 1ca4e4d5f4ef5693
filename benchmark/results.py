"""What was measured: kept in a file as soon as it is there, and told as a Markdown table under what it depends on."""

import datetime
import json
import platform
from pathlib import Path
from profile import device_name

import torch

from cli.report import check_writable, write_json
from loading.default_model import default_model_folder


class Results:
    """Everything measured so far, by key; at `path` as soon as it is there, and what the file holds is not measured again.

    settings: what the figures depend on, as JSON can hold it. Raises ValueError, before any work, where the file cannot be
    written, was made with other settings, or is none of ours.
    """

    def __init__(self, settings, path=None):
        settings = json.loads(json.dumps(settings))
        self.path = path and Path(path)
        self.data = {"date": datetime.date.today().isoformat(), "settings": settings, "runs": {}}
        if self.path:
            check_writable("--json", self.path)
        if self.path and self.path.exists():
            self.data = _read(self.path, settings)

    def once(self, key, measurement):
        """What measurement() returns, as JSON can hold it; from the file if it is there."""
        if key not in self.data["runs"]:
            self.data["runs"][key] = json.loads(json.dumps(measurement()))
            self.save()
        return self.data["runs"][key]

    def save(self, **conclusions):
        """Writes the file, with what follows from the runs."""
        self.data |= conclusions
        if self.path:
            write_json(self.path, self.data)


def _read(path, settings):
    try:
        data = json.loads(path.read_text("utf-8"))
        before, _, _ = data["settings"], data["date"], data["runs"].keys()
        differs = [name for name in settings | before if settings.get(name) != before.get(name)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--json {path} holds no results of this command: name another file") from None
    if differs:
        name = differs[0]
        raise ValueError(f"--json {path} was made with {name} {before.get(name)}, not {settings.get(name)}: name another file")
    return data


def machine(device=None):
    """What all figures depend on besides the model. device: a torch.device, by default the one that models are loaded to."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return {"machine": device_name(device) + threads, "torch": torch.__version__, "python": platform.python_version()}


def describe(model, name_or_path):
    """What figures depend on besides the method: model, machine, number format, versions."""
    folder = default_model_folder() if name_or_path is None else Path(name_or_path)
    planted = json.loads((folder / "config.json").read_text("utf-8")).get("knapspec_planted") if folder.is_dir() else None
    return {
        "model": folder.resolve().name if folder.is_dir() else name_or_path,  # no path of this machine
        "planted": planted,
        "dtype": str(model.dtype).removeprefix("torch."),
        **machine(model.device),
    }


def heading(title, data, lengths=()):
    """Lines of Markdown that say what a table shows. data: of Results; lengths: of contexts, in tokens."""
    about = data["settings"]
    title += f": {about['model']}" if "model" in about else ""
    if planted := about.get("planted"):
        title += f" (planted: {planted['kind']}, epsilon {planted['epsilon']}, from {planted['source']})"
    where = [about["machine"], *([about["dtype"]] if "dtype" in about else []), f"torch {about['torch']}, Python {about['python']}"]
    context = f"; context {min(lengths)} to {max(lengths)} tokens" if lengths else ""
    return [f"### {title}", "", f"{', '.join(where)}{context}; {data['date']}", ""]


def table(columns, rows):
    """Lines of a Markdown table that line up in a terminal too; None becomes a dash. Figures stand to the right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(columns, *cells)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in [columns, *cells]]
    aligned.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return ["| " + " | ".join(line) + " |" for line in aligned]

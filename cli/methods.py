"""The methods by name: the same in the command line, the benchmarks, the tables and the JSON files."""

import inspect
from pathlib import Path
from profile import latency_model

from decoding import Planner
from knapspec import KnapSpec

ROOT = Path(__file__).parent.parent
BEYOND, RIVALS, WAYS = (ROOT / "beyond/__init__.py").exists(), {}, {}  # beyond/ and rivals/ can be deleted
if (ROOT / "rivals/__init__.py").exists():
    from rivals import RIVALS
    from rivals import make_planner as make_rival
if BEYOND:
    from beyond.adaptive import KnapSpecPlus
    from beyond.uniform import Uniform
    from beyond.ways import WAYS, add_ways

PLANNER_OPTIONS = ("gamma_max", "window", "interval", "tau", "budget")
METHODS = {  # name -> the options that mean something to it
    "knapspec+": (*PLANNER_OPTIONS, "choices"), "knapspec": PLANNER_OPTIONS, "uniform": (), "autoregressive": (),
    **dict.fromkeys(RIVALS, ("gamma_max",)),
}  # fmt: skip
if not BEYOND:
    del METHODS["knapspec+"], METHODS["uniform"]
DEFAULT_METHOD = next(iter(METHODS))
CHOICES = {"full": "as the target has it", "skip": "left out", **{name: way.about for name, way in WAYS.items()}, "lookup": "the text so far"}
NEW_TOKENS = 256  # that a profile counts on: the answer may be shorter or longer than what is allowed


def default(name, option):
    """What knapspec+ or knapspec does where one of PLANNER_OPTIONS is not given."""
    kinds = [KnapSpecPlus, KnapSpec] if name == "knapspec+" else [KnapSpec]
    return next(p[option].default for p in (inspect.signature(kind).parameters for kind in kinds) if option in p)


def make_planner(name, model, tokenizer, *, context, progress=False, choices=None, search_s=120.0, **given):
    """A new planner for a name of METHODS, and its LatencyModel or None. The model gets the ways that it drafts in.

    context: tokens that the text is likely to have. choices: names of CHOICES for knapspec+ (None: all that can be had).
    search_s: the most seconds of a rival's search. given: others of the options in METHODS[name]. Raises ValueError.
    """
    if name == "autoregressive":
        return Planner(), None
    if name in RIVALS:
        return make_rival(name, model, progress=progress, tokenizer=tokenizer, search_s=search_s, **given), None
    ways = ()
    if name != "knapspec":
        ways = add_ways(model, choices and [way for way in WAYS if way in choices], progress=progress)
    gamma_max = given.get("gamma_max", default(name if name == "knapspec" else "knapspec+", "gamma_max"))
    context = min(context, model.config.max_position)
    latency = latency_model(model, context=context, gamma_max=gamma_max, progress=progress)
    if name == "knapspec":
        return KnapSpec(latency, **given), latency
    if name == "uniform":
        return Uniform(latency, ways=ways), latency
    without = () if choices is None or "lookup" in choices else ("lookup",)
    return KnapSpecPlus(latency, ways=ways, without=without, **given), latency

"""The methods by name: the same in the command line, the benchmarks, the tables and the JSON files."""

import inspect
from importlib.util import find_spec
from profile import latency_model

from decoding import Planner
from knapspec import KnapSpec

BEYOND, RIVALS, WAYS = find_spec("beyond"), {}, {}  # either folder can be deleted
if find_spec("rivals"):
    from rivals import RIVALS
    from rivals import make_planner as make_rival
CHOICES = {"full": "the sublayer as the target has it", "skip": "none"}  # what knapspec+ may draft with
if BEYOND:
    from beyond.adaptive import KnapSpecPlus
    from beyond.graphs import use_graphs
    from beyond.uniform import Uniform
    from beyond.ways import WAYS, add_ways

    CHOICES |= {name: way.about for name, way in WAYS.items()} | {"lookup": "the text so far"}

METHODS = (*(["knapspec+"] if BEYOND else []), "knapspec", *(["uniform"] if BEYOND else []), "autoregressive", *RIVALS)
DEFAULT_METHOD = METHODS[0]
KNAPSPEC_OPTIONS = ("gamma_max", "window", "interval", "tau", "budget")  # handed on where given
NEW_TOKENS = 256  # that a profile counts on: the answer may be shorter or longer than what is allowed


def takes(name):
    """The options that mean something to a method."""
    return (*KNAPSPEC_OPTIONS, "choices") if name == "knapspec+" else KNAPSPEC_OPTIONS if name == "knapspec" else ("gamma_max",) * (name in RIVALS)


def default(name, option):
    """What a method does where an option is not given."""
    kinds = [KnapSpecPlus, KnapSpec] if name == "knapspec+" else [KnapSpec]
    return next(p[option].default for p in (inspect.signature(kind).parameters for kind in kinds) if option in p)


def make_planner(name, model, tokenizer, *, context, progress=False, choices=None, search_s=120.0, **given):
    """A new planner for a name of METHODS, and its LatencyModel or None. The model gets the ways that it drafts in.

    context: tokens that the text is likely to have. choices: names of CHOICES for knapspec+ (None: all that can be had).
    given: what takes(name) says, of the other names. Raises ValueError.
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


def prepare(model):
    """What makes every method faster on the model's device."""
    if BEYOND and model.device.type == "cuda":
        use_graphs(model)

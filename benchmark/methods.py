"""Methods by name: those of the command line, knapspec+ without some of its parts, and transformers'; and how they take turns."""

import functools

from benchmark.runs import decode, fresh, side_by_side
from benchmark.theirs import THEIRS, make_theirs
from beyond.adaptive import KnapSpecPlus
from beyond.ways import add_ways
from cli.methods import make_planner


def without(*parts):
    """The name of knapspec+ without these parts."""
    return f"knapspec+ without {','.join(parts)}" if parts else "knapspec+"


FULL_SKIP = without("ways", "lookup")  # skipping alone, as by --choices full,skip


def make_methods(names, model, tokenizer, prompts, options, *, folder=None, lasting=False):
    """{name: method} for [(id, token ids)]. options: of decode(); folder: the model's, for transformers.

    Each run has a new planner, as a command has one; or, if lasting, the same for all prompts: some go on learning.
    """

    context = max(len(ids) for _, ids in prompts) + options["max_new_tokens"]

    def planner(name):
        name, _, parts = name.partition(" without ")
        whole, latency = make_planner(name, model, tokenizer, context=context, progress=True)
        return KnapSpecPlus(latency, ways=add_ways(model, progress=True), without=parts.split(",")) if parts else whole

    def method(name):
        return functools.partial(decode, model, planner=planner(name), **options) if lasting else fresh(model, planner(name), options)

    theirs = [name for name in names if name in THEIRS]
    return {name: method(name) for name in names if name not in THEIRS} | (make_theirs(model, folder, theirs, options) if theirs else {})


def race(results, names, model, tokenizer, prompts, *, repeats, key="", planners=(), folder=None, lasting=False, **options):
    """side_by_side() of methods by their names. planners: {name: planner} that race as well; options: of decode()."""
    options = {"eos_ids": tokenizer.eos_ids, **options}

    def make():
        methods = make_methods(names, model, tokenizer, prompts, options, folder=folder, lasting=lasting)
        return methods | {name: fresh(model, planner, options) for name, planner in dict(planners).items()}

    return side_by_side(results, model, prompts, make, options=options, repeats=repeats, key=key)

"""The methods that commands measure, by name: those of the command line, and knapspec+ without some of its parts."""

from profile import latency_model

from benchmark.runs import fresh
from beyond.adaptive import KnapSpecPlus
from beyond.ways import add_ways
from cli.methods import make_planner


def without(*parts):
    """The name of knapspec+ without these parts."""
    return f"knapspec+ without {','.join(parts)}" if parts else "knapspec+"


FULL_SKIP = without("ways", "lookup")  # skipping alone, as by --choices full,skip


def longest(prompts, new_tokens):
    """Tokens of the longest of [(id, token ids)] with the new ones."""
    return max(len(ids) for _, ids in prompts) + new_tokens


def latency_for(model, context, gamma_max=16):
    """The LatencyModel for contexts of up to so many tokens."""
    return latency_model(model, context=min(context, model.config.max_position), gamma_max=gamma_max, progress=True)


def make_methods(names, model, tokenizer, prompts, options):
    """{name: method} for [(id, token ids)], each run by a new planner. options: of decode()."""
    ways, context = add_ways(model, progress=True), longest(prompts, options["max_new_tokens"])

    def planner(name):
        name, _, parts = name.partition(" without ")
        whole, latency = make_planner(name, model, tokenizer, context=context, progress=True)
        return KnapSpecPlus(latency, ways=ways, without=parts.split(",")) if parts else whole

    return {name: fresh(model, planner(name), options) for name in names}

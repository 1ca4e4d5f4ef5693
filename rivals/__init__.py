"""Rivals of KnapSpec as planners for the same generate(): only the draft differs, never the text.

One file for each, what they share in common.py, and here the registry: a new rival is its file and one line below.
The decisions are the papers' own; what a paper trains is not trained here, and said.

Differs, for all: verification runs the whole model, where layerskip, kangaroo and del would reuse what the draft
computed; layerskip, del and prompt_lookup also draft their first token, which comes from the prefill here. Drafted
tokens under a threshold are still submitted, as in every implementation read. E, ℓ and M count blocks (attention with
MLP) from 1, as in the papers; sets of blocks count from 0, as the rest of the code.
"""

from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Entry:
    """Where a rival's class is: imported only when it is made."""

    file: str
    name: str
    needs: str | None = None  # the optional module without which making it raises ValueError


RIVALS = {
    "layerskip": Entry("layerskip", "LayerSkip"),
    "kangaroo": Entry("kangaroo", "Kangaroo"),
    "del": Entry("del_", "DEL"),
    "asd": Entry("asd", "ASD"),
    "draft_verify": Entry("draft_verify", "DraftVerify", needs="bayes_opt"),
    "swift": Entry("swift", "Swift", needs="bayes_opt"),
    "clasp": Entry("clasp", "Clasp"),
    "prompt_lookup": Entry("prompt_lookup", "PromptLookup"),
}


def make_planner(name, model, *, gamma_max=None, progress=False, tokenizer=None, calibration=None, search_s=120.0):
    """A new planner for a name of RIVALS; keep it across prompts, since some go on learning.

    gamma_max: no draft is longer (None: as long as the method's own default). tokenizer: its eos_ids end prompt_lookup's
    drafts. draft_verify searches here, before any decoding, on `calibration` (lists of token ids) or on the first 8 of
    prompts.jsonl through the tokenizer, to its advantage where these are decoded afterwards. No evaluation begins after
    search_s seconds, where the paper takes 1000 evaluations; the planner's own search_s says what it took. progress: show
    a bar. Raises ValueError for an unknown name, a missing package, a model too small, and where there are no prompts.
    """
    if name not in RIVALS:
        raise ValueError(f"unknown method {name!r}: choose one of {', '.join(RIVALS)}")
    kind = getattr(import_module(f"rivals.{RIVALS[name].file}"), RIVALS[name].name)
    if model.config.n_layer < kind.least_blocks:
        raise ValueError(f"{name} needs a model of at least {kind.least_blocks} blocks; this one has {model.config.n_layer}")
    planner = kind.make(model, progress=progress, tokenizer=tokenizer, calibration=calibration, search_s=search_s)
    if gamma_max is not None:
        planner.gamma = min(planner.gamma, gamma_max)
    return planner

"""Prompt lookup: no model drafts, the text so far does."""

from decoding import Plan
from rivals.common import Rival


def looked_up(tokens, max_ngram, longest):
    """What followed the last n of these tokens where they stood first, up to `longest` tokens; [] if they are new.

    n goes from max_ngram down to 1 until there is an earlier place, the first from the left. tokens is a list.
    """
    for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
        ngram, place = tokens[-n:], -1
        while (place := tokens.index(ngram[0], place + 1)) < len(tokens) - n:  # found there at the latest
            if tokens[place : place + n] == ngram:
                return tokens[place + n : place + n + longest]
    return []


class PromptLookup(Rival):
    """Drafts what followed an earlier occurrence of the last tokens, in prompt or new text; without one, nothing.

    max_ngram: how many last tokens are looked for at most; eos_ids: a draft ends before any of these. Nothing is
    planned or learnt. Source: prompt lookup decoding (Saxena 2023), by the rule and the numbers of transformers'
    PromptLookupCandidateGenerator with prompt_lookup_num_tokens=10. Differs: theirs also ends a draft before a token
    that a logits processor forbids; here the ordinary accept rule rejects it.
    """

    least_blocks = 1

    def __init__(self, *, gamma=10, max_ngram=2, eos_ids=()):
        self.gamma, self.max_ngram, self.eos_ids = gamma, max_ngram, eos_ids

    @classmethod
    def make(cls, model, *, tokenizer, **options):
        return cls(eos_ids=tokenizer.eos_ids if tokenizer else ())

    def plan(self, session):
        tokens = looked_up(session.tokens, self.max_ngram, self.gamma)
        end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
        return Plan(gamma=end, tokens=tuple(tokens[:end]))

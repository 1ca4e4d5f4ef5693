"""Drafts that cost nothing: what followed the last few tokens where they stood before, in the prompt or in the text.

In tokens per time such a draft's t_draft is 0. Its α is learnt from the text, by the length of the match: every guess is
held against the tokens that came, whether it was drafted or not, so that learning costs nothing either.

Source: prompt lookup decoding (Saxena 2023). Differs: the latest place counts and the longest match, and a guess is
drafted only where its tokens per time are the most.
"""

# Tokens of a match, tried from the longest, and the chance that a guess from it is right in one more token, until this text
# says otherwise: a little less than 0.97, 0.90, 0.87, 0.80 and 0.72, which SmolLM2's answers to prompts.jsonl give.
USUAL = {8: 0.95, 6: 0.87, 4: 0.8, 3: 0.7, 2: 0.6}
PRIOR_TOKENS = 8  # what is usual counts as much as so many tried tokens
FADE = 0.9  # what was seen of a size loses so much with each further guess of it
LONGEST = 16  # tokens of a guess


class Lookup:
    """The guesses for one text."""

    def __init__(self):
        self.places, self.indexed = {}, 0  # last tokens -> where the token behind them stands; how many tokens are indexed
        self.seen = {size: (alpha * PRIOR_TOKENS, PRIOR_TOKENS) for size, alpha in USUAL.items()}  # size -> (accepted, tried)
        self.size, self.guessed = None, ()

    def guess(self, tokens):
        """The tokens expected behind `tokens` (a list that only grows), and the chance that one of them is right.

        Returns (tuple of LONGEST ids, α), or ((), 0.0) where the last tokens never stood before.
        """
        self._learn(tokens[self.indexed :])
        for end in range(self.indexed, len(tokens)):  # not yet the last tokens themselves: nothing follows them
            for size in USUAL:
                if end >= size:
                    self.places[tuple(tokens[end - size : end])] = end
        self.indexed, self.size, self.guessed = len(tokens), None, ()
        for size in USUAL:
            start = self.places.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if start is not None:
                period = len(tokens) - start  # a guess that reaches the present goes on with itself
                self.size, self.guessed = size, tuple(tokens[start + i % period] for i in range(LONGEST))
                accepted, tried = self.seen[size]
                return self.guessed, accepted / tried
        return (), 0.0

    def _learn(self, came):
        """Counts how much of the last guess was right, drafted or not."""
        pairs = list(zip(self.guessed, came))
        if pairs:
            right = next((i for i, (guessed, token) in enumerate(pairs) if guessed != token), len(pairs))
            accepted, tried = self.seen[self.size]
            self.seen[self.size] = FADE * accepted + right, FADE * tried + min(right + 1, len(pairs))

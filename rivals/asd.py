import torch

from decoding import Plan
from rivals.common import AdaptiveStop


class ASD(AdaptiveStop):
    """Skips the attention sublayers that hardly turn the states of this prompt; keeps every MLP.

    Once per prompt: attention ℓ is skipped where the mean cosine of its input x and its output x + attention(x), over
    the prompt's last `window` positions, exceeds `similarity`. Source: Draft on the Fly (arXiv 2410.01028).
    Differs: this is ASD with the threshold only. The paper's threshold and its two structural rules could not be
    found: 0.99 is ours (it leaves out a third of SmolLM2-135M's attention), and so are the mean, the window, planning
    once, and Draft & Verify's way to end a draft. Where nothing is skipped, it decodes plainly.
    """

    def __init__(self, *, similarity=0.99, window=64, **stop):
        super().__init__(**stop)
        self.similarity, self.window = similarity, window

    @classmethod
    def make(cls, model, **options):
        return cls()

    def plan(self, session):
        if session.generation.rounds == 0:
            states, _ = session.window(self.window)
            around = zip(states[::2], states[1::2])  # each attention sublayer's input and output
            self.skip_set = self.similar([torch.cosine_similarity(x.float(), y.float(), dim=-1).mean().item() for x, y in around])
        plan = super().plan(session)
        return plan if self.skip_set else Plan()

    def similar(self, cosines):
        return frozenset(2 * i for i, cosine in enumerate(cosines) if cosine > self.similarity)

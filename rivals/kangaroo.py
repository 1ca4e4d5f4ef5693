from rivals.common import Rival, whole_blocks


class Kangaroo(Rival):
    """Drafts with the first ℓ blocks until the confidence is under η, at most gamma tokens.

    exit_layer: ℓ; threshold: η, which never adapts, 0.6 as in its code's function and README (0.4 on its command
    line). Source: Kangaroo (arXiv 2404.18911) and its evaluation/inference_kangaroo.py. Differs: the trained adapter
    between exit and LM head is left out, without which two blocks are probably too shallow.
    """

    def __init__(self, n_layer, *, exit_layer=2, gamma=6, threshold=0.6):
        self.skip_set, self.gamma, self.threshold = whole_blocks(range(exit_layer, n_layer)), gamma, threshold

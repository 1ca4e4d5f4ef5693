from rivals.common import Rival, whole_blocks


class LayerSkip(Rival):
    """Drafts a fixed number of tokens with the first blocks, the final norm and the LM head.

    exit_layer: E, by default a quarter of the blocks, which is the paper's 8 of Llama-2-7B's 32; gamma: d, the
    paper's 6 for code (it has 12 for summaries). Source: LayerSkip (arXiv 2404.16710), section 4.3 and table 3.
    Differs: the paper trains with layer dropout and an early-exit loss, so that exits predict well; an untrained
    model's do not. Its E and d come from a sweep over a model's speed.
    """

    def __init__(self, n_layer, *, exit_layer=None, gamma=6):
        exit_layer = max(1, n_layer // 4) if exit_layer is None else exit_layer
        self.skip_set, self.gamma = whole_blocks(range(exit_layer, n_layer)), gamma

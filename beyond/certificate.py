"""A proof for single states that a draft's most likely token is the target's: KnapSpec's lemma, made computable."""

import torch


@torch.inference_mode()
def certified(model, target, draft):
    """Which rows of two sets of final states (N, H) provably have the same most likely token: (N,) bool.

    Let u and v be the directions of the target's and the draft's state, and fold the final norm's gain into the head's
    rows w_j. RMSNorm stretches u by a positive factor, whatever its ε: logits are that factor times w_j · u, and the top
    token depends on u alone. With i the target's, and for any j, by Cauchy and Schwarz on (w_i − w_j) · (u − v),

        (w_i − w_j) · v  ≥  (w_i − w_j) · u − ‖w_i − w_j‖ ‖u − v‖,        ‖u − v‖² = 2 (1 − cos(u, v)),

    so that i is the draft's as well where the right side exceeds 0 for every j ≠ i. That holds in exact arithmetic; it
    is evaluated in float64, and the model's own rounding can matter where it has two logits that are all but equal.
    Source: KnapSpec, lemma 4.1. Differs: a proof for one state, in place of a bound on how similar states are.
    """
    rows = (model.head.weight.to_dense() if model.head.packed else model.head.weight).double() * model.model.norm.weight
    u, v = (torch.nn.functional.normalize(h.double(), dim=-1) for h in (target, draft))
    along = u @ rows.T  # (N, V)
    top = along.argmax(-1)
    margin = along.gather(-1, top[:, None]) - along
    reach = torch.cdist(rows[top], rows, compute_mode="donot_use_mm_for_euclid_dist") * (u - v).norm(dim=-1, keepdim=True)
    return (margin > reach).scatter_(-1, top[:, None], True).all(-1)

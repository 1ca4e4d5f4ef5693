"""beyond/certificate.py: what is certified never disagrees, and the certificate is neither empty nor wider than it may be."""

import itertools

import pytest
import torch

from beyond.certificate import certified
from tests.testing_models import random_model, tiny_config


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-8])  # √ε of the norm is 0.003
@pytest.mark.parametrize("tied", [False, True])
def test_no_certified_state_disagrees(size, tied):
    model = random_model(tiny_config(vocab_size=101, n_layer=1, tied=tied))
    rng = torch.Generator().manual_seed(0)
    proven, agreed = 0, 0
    for nearness, other_size in itertools.product((1.0, 0.3, 0.1, 0.03, 0.01), (1.0, 0.1, 30.0)):
        target = torch.randn(200, 16, generator=rng)
        draft = target + nearness * torch.randn(200, 16, generator=rng)
        same = model.logits(target * size).argmax(-1) == model.logits(draft * size * other_size).argmax(-1)
        certain = certified(model, target * size, draft * size * other_size)
        assert same[certain].all()
        proven, agreed = proven + certain.sum().item(), agreed + same.sum().item()
    assert 0.2 * agreed < proven < agreed


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_the_nearer_the_more_is_certified(size):
    model, rng = random_model(tiny_config(n_layer=1)), torch.Generator().manual_seed(0)
    target, noise = torch.randn(400, 16, generator=rng) * size, torch.randn(400, 16, generator=rng) * size
    proven = [certified(model, target, target + nearness * noise).sum().item() for nearness in (1.0, 0.1, 0.01, 1e-3)]
    assert proven[0] < proven[1] < proven[2] < proven[3] and proven[3] > 380, proven


def test_the_certificate_cannot_be_widened():
    """Turned straight at the runner-up, a state is certified up to where the tokens change, and not much less far."""
    model = random_model(tiny_config(vocab_size=7, n_layer=1))
    rows = (model.head.weight.to_dense() if model.head.packed else model.head.weight) * model.model.norm.weight
    for target in torch.randn(40, 16, generator=torch.Generator().manual_seed(0)):
        first, second = (rows @ target).topk(2).indices
        toward = torch.nn.functional.normalize(rows[second] - rows[first], dim=0)
        drafts = target + torch.linspace(0, 8, 2001)[:, None] * toward
        same = model.logits(drafts).argmax(-1) == first
        certain = certified(model, target.expand(2001, -1), drafts)
        assert certain[0] and same[certain].all() and not same.all()
        assert certain.sum() > 0.5 * same.sum()


def test_nothing_is_certified_without_a_margin_or_a_direction():
    model = random_model(tiny_config(n_layer=1))
    state, zero = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 16)
    assert certified(model, state, state).tolist() == [True]
    assert certified(model, state, 5 * state).tolist() == [True]
    assert certified(model, state, -state).tolist() == [False]
    assert certified(model, state, zero).tolist() == certified(model, zero, state).tolist() == [False]
    assert certified(model, zero, zero).tolist() == [False]

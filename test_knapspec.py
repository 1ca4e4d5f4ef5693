"""KnapSpec by hand: four worked examples, smallest first, whose numbers you can check on paper, and a model that drafts. The proofs are in tests/."""

import math
from types import SimpleNamespace

import pytest
import torch

from decoding import Plan, accept, sampling_probs
from knapspec import KnapSpec, expected_tokens, generate, knapsack, tokens_per_time
from model import KVCache
from tests.testing_models import latency_model, random_model, random_tokens, tiny_config


def test_tokens_per_time():
    """A plain step takes 100 ms. A draft token takes 40 ms and is accepted with α = 0.8; verifying γ = 4 of them, 120 ms.

    A round yields 1 + 0.8 + 0.64 + 0.512 + 0.4096 = 3.3616 tokens: its own token for certain, the first draft with 0.8,
    the second with 0.8², … They take 4 · 40 + 120 = 280 ms: 12.0 tokens per second, against 10 of plain decoding.
    """
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert tokens_per_time(0.8, 4, draft_s=0.040, verify_s=0.120) == pytest.approx(3.3616 / 0.280) == pytest.approx(12.0, abs=0.01)
    assert tokens_per_time(0.8, 0, draft_s=0.040, verify_s=0.100) == pytest.approx(10)  # γ = 0 is plain decoding
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.0, 4) == 1  # all drafts stand; none does


# A model of 4 layers whose states are directions in the plane. Each of its 8 items turns the state by so many degrees;
# even items are attention, odd ones MLPs. The first and the last layer (items 0, 1, 6, 7) are never skipped.
TURNS = [15, 25, 40, 10, 30, -20, 5, 35]
WEIGHTS = [2, 1] * 4  # skipping an attention saves twice as much as skipping an MLP


def turned(x, degrees):
    """Rows (N, 2) of directions, each turned by so many degrees."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return x @ torch.tensor([[c, s], [-s, c]])


def toy(final_degrees):
    """Its sublayers, the states x_0 … x_8 of a window that ends in these directions, and a cache that holds the window."""
    sublayers = [lambda x, context, turn=turn: turned(x, turn) for turn in TURNS]
    start = torch.tensor([[1.0, 0.0]])
    states = [torch.cat([turned(start, final - sum(TURNS[b:])) for final in final_degrees]) for b in range(9)]
    cache = KVCache(tiny_config(), 8)
    cache.length = len(final_degrees)
    return sublayers, states, cache


def test_the_table_of_the_knapsack():
    """A branch that skips S is off by the sum of what S would have turned; its cosine is the cosine of that angle.

    Each row is the table behind one item: for each weight saved so far, the branch least off. τ = 0.5 allows 60 degrees.

      behind    saved 0   1           2             3            4
      item 2    {}  0°                {2}    40°
      item 3    {}  0°    {3}   10°   {2}    40°    {2,3} 50°
      item 4    {}  0°    {3}   10°   {4}    30°    {3,4} 40°                    {4} beats {2}, {3,4} beats {2,3}; {2,4}: 70°, {2,3,4}: 80°
      item 5    {}  0°    {3}   10°   {3,5} −10°    {4,5} 10°    {3,4,5} 20°     5 turns back: {3,5} beats {4}, {4,5} beats {3,4}; {5}: −20°

    A table is not a search of all subsets: {2,4,5} would be off by 50° and save 5, but {2,4} was dropped on the way.
    """
    sublayers, states, cache = toy([0])
    rows = {}

    def watch(item, branches):
        rows[item] = {branch.weight: (set(branch.skip_set), branch.cosine) for branch in branches}
        return branches

    branches, x = knapsack(sublayers, WEIGHTS, states, cache, budget=6, tau=0.5, select=watch)  # 6: half of all weight
    expected = {
        0: {0: (set(), 0)},
        1: {0: (set(), 0)},
        2: {0: (set(), 0), 2: ({2}, 40)},
        3: {0: (set(), 0), 1: ({3}, 10), 2: ({2}, 40), 3: ({2, 3}, 50)},
        4: {0: (set(), 0), 1: ({3}, 10), 2: ({4}, 30), 3: ({3, 4}, 40)},
        5: {0: (set(), 0), 1: ({3}, 10), 2: ({3, 5}, -10), 3: ({4, 5}, 10), 4: ({3, 4, 5}, 20)},
    }
    expected[6] = expected[7] = expected[5]  # the last layer is kept by all, and changes no angle between them
    for item, row in expected.items():
        assert {weight: skip_set for weight, (skip_set, _) in rows[item].items()} == {weight: s for weight, (s, _) in row.items()}
        for weight, (_, degrees) in row.items():
            assert rows[item][weight][1] == pytest.approx(math.cos(math.radians(degrees)), abs=1e-6)
    assert [set(branch.skip_set) for branch in branches] == [set(), {3}, {3, 5}, {4, 5}, {3, 4, 5}]
    assert torch.allclose(x[4], turned(states[-1], -20), atol=1e-6)  # {3, 4, 5} lacks 10 + 30 − 20 degrees
    cheap, _ = knapsack(sublayers, WEIGHTS, states, cache, budget=3, tau=0.5)
    assert cheap == branches[:4]  # a smaller budget is the same table with fewer columns


def test_one_round_with_a_rejection(monkeypatch):
    """Two drafts, tokens 0 and 0, and what draft and target thought of tokens 0, 1, 2:

                draft              target
      first     0.25  0.75  0      0.5   0.5   0       0.5 / 0.25 ≥ 1: accepted for certain
      second    0.7   0.1   0.2    0.35  0.4   0.25    0.35 / 0.7 = 0.5: a draw of 0.6 rejects it

    The residual max(0, target − draft) = 0, 0.3, 0.05 says what the draft left out: token 1 is drawn with 6/7, 2 with 1/7.
    That makes the second token exactly the target's: 0 comes with 0.7 · 0.5 = 0.35; 0.35 is rejected, and so 1 comes with
    0.1 + 0.35 · 6/7 = 0.4 and 2 with 0.2 + 0.35 · 1/7 = 0.25.
    """
    draft_probs = torch.tensor([[0.25, 0.75, 0], [0.7, 0.1, 0.2]])
    target_probs = torch.tensor([[0.5, 0.5, 0], [0.35, 0.4, 0.25], [0, 0, 1]])  # the last one: for a bonus token
    for draws, expected in [
        ([0.99, 0.6, 0.85], (1, 1)),  # one draft stands, then the correction: 0.85 < 6/7
        ([0.99, 0.6, 0.86], (1, 2)),  # 0.86 > 6/7
        ([0.99, 0.4, 0.5], (2, 2)),  # 0.4 < 0.5: both stand, then the bonus token
    ]:
        monkeypatch.setattr(torch, "rand", lambda *_, draws=draws, **__: torch.tensor(draws.pop(0), dtype=torch.float64))
        assert accept(target_probs, [0, 0], draft_probs, rng=None) == expected and not draws


def test_one_whole_plan():
    """The model above, attention 20 ms and MLP 10 ms: a plain step takes 120 ms, 8.33 tokens/s. Four tokens, one in each quarter
    of the plane: the nearest to the final state is said. At the window's five positions the target ends at −40°, −30°, 0°, 10°, 20°,
    all of them nearest to token 0, at 0°, whose quarter ends at ±45°. With γ up to 4:

      skipped    turned by   still token 0   α     draft     best γ and tokens per time
      {3}        −10°        not −50°        0.8   110 ms    1: 1.8 / 230 ms = 7.83     (γ = 0: 8.33)
      {3,5}      +10°        all             1     100 ms    4: 5   / 520 ms = 9.62     the best
      {4,5}      −10°        not −50°        0.8    90 ms    1: 1.8 / 210 ms = 8.57
      {3,4,5}    −20°        not −60°, −50°  0.6    80 ms    1: 1.6 / 200 ms = 8.00
    """
    sublayers, states, cache = toy([-40, -30, 0, 10, 20])
    head = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    model = SimpleNamespace(sublayers=sublayers, config=SimpleNamespace(n_layer=4), logits=lambda x: x @ head.T)
    target_probs = sampling_probs(model.logits(states[-1]), 0.0, 1.0)
    session = SimpleNamespace(model=model, cache=cache, temperature=0.0, top_p=1.0, generation=SimpleNamespace(rounds=0),
                              window=lambda W: (states, target_probs))  # fmt: skip
    latency = latency_model(4, attention_s=(20e-3, 0.0), mlp_s=10e-3)
    planner = KnapSpec(latency, gamma_max=4, interval=64)
    plan = planner.plan(session)
    assert plan == Plan(frozenset({3, 5}), 4, 1.0, pytest.approx(5 / 0.520))
    session.generation.rounds = 63
    assert planner.plan(session) is plan  # it stands for 64 rounds
    assert planner.keep_drafting(session, plan, [0.9, 0.7]) and not planner.keep_drafting(session, plan, [0.9, 0.69])

    # Where the target's states end nearer to the border, 10 degrees are too many: α = 3/5 pays for nothing but plain decoding ({3,4,5}, 20 degrees off, has no more).
    session.generation.rounds = 64
    states[:] = toy([-40, -41, 0, 40, 41])[1]
    assert planner.plan(session) == Plan(tokens_per_second=pytest.approx(1 / 0.120))


def test_drafts_change_how_fast_a_text_comes_and_not_the_text():
    """The items of the four inner layers of this model hardly matter. The planner finds that out, and the text is the plain one."""
    model = random_model(tiny_config(n_layer=6), faint=range(2, 10), epsilon=0.01)
    prompt = random_tokens(12, model.config).tolist()
    plain = generate(model, prompt, max_new_tokens=40)
    drafted = generate(model, prompt, max_new_tokens=40, planner=KnapSpec(latency_model(6), threshold=0.0))
    assert drafted.token_ids == plain.token_ids
    assert plain.rounds == 39 and drafted.rounds < 20 and drafted.accepted > 20  # 40 tokens by so many forwards of the target

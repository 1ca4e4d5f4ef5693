"""Properties over random configurations, prompts, skip sets, draft lengths, temperatures and cut-off points.

`HYPOTHESIS_PROFILE=long pytest test_properties.py -k plain_text --hypothesis-seed=0` fuzzes 2,000 generations.
"""

import copy
import itertools
import os

import pytest
import torch

from decoding import FixedPlanner, Plan, generate, sampling_probs
from knapspec import KnapSpec, certified, knapsack
from model import KVCache
from tests.testing_models import (
    Restless,
    SimulatedMachine,
    latency_model,
    prefilled,
    random_model,
    tiny_config,
)

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
given, st = hypothesis.given, hypothesis.strategies

for _name, _options in {"short": {"max_examples": 30, "derandomize": True}, "long": {"max_examples": 2000}}.items():
    hypothesis.settings.register_profile(_name, deadline=None, database=None, **_options)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

ROPES = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
]


@st.composite
def models(draw):
    """A random model of a random configuration; in some the inner layers hardly matter, so that drafts are right."""
    n_layer, n_kv_head = draw(st.sampled_from([3, 5, 4, 2, 1])), draw(st.sampled_from([2, 1, 3]))
    booleans = {name: draw(st.booleans()) for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied")}
    config = tiny_config(
        n_layer=n_layer,
        n_kv_head=n_kv_head,
        n_head=n_kv_head * draw(st.sampled_from([1, 2, 3])),
        head_dim=draw(st.sampled_from([2, 4, 6, 16])),
        hidden_size=draw(st.sampled_from([6, 16, 20])),
        vocab_size=draw(st.sampled_from([40, 200, 3, 2])),
        rope_scaling=draw(st.sampled_from(ROPES)),
        max_position=draw(st.sampled_from([64, 90, 400])),
        **booleans,
    )
    epsilon = draw(st.sampled_from([0.2, 1.0, 0.02]))
    return random_model(config, seed=draw(st.integers(0, 10**6)), faint=range(2, 2 * n_layer - 2), epsilon=epsilon)


@st.composite
def prompts(draw, config, most=60):
    """Ids of the vocabulary, at least one, and short of the model's context."""
    return draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=1, max_size=min(most, config.max_position - 1)))


@st.composite
def planners(draw, config):
    """A planner that drafts: the same plan always, another one each round, or KnapSpec's where drafts look cheap."""
    L, seed = config.n_layer, draw(st.integers(0, 10**6))
    kind = draw(st.sampled_from(["restless", "fixed", "knapspec"] if L > 2 else ["restless", "fixed"]))
    if kind == "fixed":
        skip_set = draw(st.frozensets(st.integers(0, 2 * L - 1), max_size=draw(st.sampled_from([2, 1, 2 * L]))))
        return FixedPlanner(Plan(skip_set, draw(st.sampled_from([4, 1, 2, 12, 0]))))
    if kind == "restless":
        return Restless(seed, gamma_max=draw(st.sampled_from([4, 1, 2, 12])), window=draw(st.sampled_from([0, 1, 5])))
    options = {
        "stop": draw(st.sampled_from(["fixed", "confidence", "renewal"])),
        "window": draw(st.integers(1, 9)),
        "interval": draw(st.integers(1, 6)),
        "tau": draw(st.sampled_from([-1.0, 0.5])),
        "budget": draw(st.sampled_from([0.3, 0.9])),
        "gamma_max": draw(st.sampled_from([4, 1, 2, 12])),
        "max_branches": draw(st.sampled_from([None, 1, 8])),
        "layers": draw(st.booleans()),
    }
    return KnapSpec(latency_model(L, per_token=0.01), share=10.0, **options)


@given(st.data())
def test_every_planner_leads_to_the_plain_text(data):
    model = data.draw(models(), "model")
    prompt, planner = data.draw(prompts(model.config), "prompt"), data.draw(planners(model.config), "planner")
    count = data.draw(st.sampled_from([40, 60, 20, 10, 3, 2, 1, 0]), "max_new_tokens")
    ends = [generate(model, prompt, max_new_tokens=1).token_ids[0], data.draw(st.integers(0, model.config.vocab_size - 1), "end")]
    eos_ids = data.draw(st.sampled_from([frozenset(), frozenset(ends[1:]), frozenset(), frozenset(ends[1:]), frozenset(ends)]), "eos_ids")
    plain = generate(model, prompt, max_new_tokens=count, eos_ids=eos_ids)
    shown = []
    with pytest.MonkeyPatch.context() as patch:  # on a clock of its own: the planner decides alike each time
        machine = SimulatedMachine(model, latency_model(model.config.n_layer, per_token=0.01), patch)
        found = generate(machine, prompt, max_new_tokens=count, eos_ids=eos_ids, planner=planner, on_token=shown.append)
    assert found.token_ids == shown == plain.token_ids and found.stop_reason == plain.stop_reason
    assert len(shown) <= min(count, model.config.max_position - len(prompt))
    assert not eos_ids & set(shown[:-1])
    assert 0 <= found.accepted <= found.drafted
    if shown:
        corrections = found.rounds - (shown[-1] in eos_ids)  # a round that ends with a drafted end-of-text has none
        assert corrections <= len(shown) - 1 - found.accepted <= found.rounds
    accepted = "no drafts" if not found.drafted else {0: "none", found.drafted: "all"}.get(found.accepted, "some")
    hypothesis.event(f"accepted: {accepted}")


@given(st.data())
def test_sampled_text_is_what_the_target_can_say(data):
    model = data.draw(models(), "model")
    prompt, planner = data.draw(prompts(model.config, 20), "prompt"), data.draw(planners(model.config), "planner")
    temperature = data.draw(st.sampled_from([1e-10, 1e-3, 0.3, 1.0, 3.0]), "temperature")
    top_p, seed = data.draw(st.sampled_from([0.0, 1e-8, 0.3, 0.9, 1.0]), "top_p"), data.draw(st.integers(0, 2**40), "seed")
    options = {"max_new_tokens": 12, "temperature": temperature, "top_p": top_p}
    texts = [generate(model, prompt, planner=copy.deepcopy(planner), rng=torch.Generator().manual_seed(seed), **options).token_ids
             for _ in range(2)]  # fmt: skip
    assert texts[0] == texts[1]
    _, logits = prefilled(model, prompt + texts[0][:-1])
    probs = sampling_probs(logits[len(prompt) - 1 :], temperature, min(top_p + 1e-3, 1.0))  # rounding may shift the edge
    chances = probs.gather(-1, torch.tensor(texts[0])[:, None])
    assert (chances > 0).all()


@given(st.data())
def test_any_chunking_is_as_one_forward(data):
    model = data.draw(models(), "model")
    tokens = torch.tensor(data.draw(prompts(model.config), "tokens"))
    skip = data.draw(st.frozensets(st.integers(0, 2 * model.config.n_layer - 1)), "skip")
    cuts = sorted(data.draw(st.frozensets(st.integers(1, max(len(tokens) - 1, 1))), "cuts") | {0, len(tokens)})
    _, whole = prefilled(model, tokens, skip=skip)
    cache, parts = KVCache(model.config, len(tokens)), []
    for start, end in itertools.pairwise(cuts):
        parts.append(model(tokens[start:end], cache, skip=skip))
        cache.length = end
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-3, atol=1e-4)


@given(st.data())
def test_every_survivor_of_the_knapsack_is_what_it_says(data):
    model = data.draw(models(), "model")
    L, prompt = model.config.n_layer, data.draw(prompts(model.config), "prompt")
    costs = data.draw(st.lists(st.sampled_from([0.0, 1e-15, 1e-4, 3e-4, 1e-3, 0.2]), min_size=2 * L, max_size=2 * L), "costs")
    budget, tau = data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])), data.draw(st.sampled_from([-1.0, 0.5, 0.99]))
    states = []
    cache, _ = prefilled(model, prompt, capture=states, last=data.draw(st.integers(1, 9), "window"))
    found, again = (knapsack(model, cache, states, costs, budget=budget, tau=tau) for _ in range(2))
    assert [(a, b, c) for a, b, c, _ in found] == [(a, b, c) for a, b, c, _ in again]
    for skip_set, names, saved_s, x in found:
        assert skip_set <= set(range(2, 2 * L - 2)) and not names
        assert saved_s == pytest.approx(sum(costs[b] for b in skip_set)) and saved_s <= budget * sum(costs) + 1e-12
        assert x.isfinite().all() and torch.cosine_similarity(x, states[-1], dim=-1).mean() >= tau - 1e-5
        if not skip_set:
            torch.testing.assert_close(x, states[-1], rtol=1e-3, atol=1e-4)


@given(st.data())
def test_what_is_certified_agrees(data):
    model = data.draw(models(), "model")
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6), "seed"))
    target = torch.randn(50, model.config.hidden_size, generator=rng) * data.draw(st.sampled_from([1e-6, 1e-3, 1.0, 1e3]), "size")
    nearness = data.draw(st.sampled_from([1e-3, 0.03, 0.3, 1.0]), "nearness")
    draft = target + nearness * target.norm(dim=-1, keepdim=True) * torch.randn(target.shape, generator=rng) / 4
    same = model.logits(target).argmax(-1) == model.logits(draft).argmax(-1)
    assert same[certified(model, target, draft)].all()


@given(st.data())
def test_probabilities_are_a_nucleus(data):
    size, rows = data.draw(st.sampled_from([1, 2, 5, 1024, 1100])), data.draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6), "seed"))
    logits = torch.randn(rows, size, generator=rng) * data.draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0]), "spread")
    temperature, top_p = data.draw(st.floats(0, 5), "temperature"), data.draw(st.floats(0, 1), "top_p")
    probs = sampling_probs(logits, temperature, top_p)
    assert probs.dtype == torch.float32 and probs.isfinite().all() and (probs >= 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(rows), rtol=0, atol=1e-4)
    assert (probs.gather(-1, logits.argmax(-1, keepdim=True)) > 0).all()
    kept = [set(row.nonzero()[:, 0].tolist()) for row in probs]
    for row, stay in zip(logits, kept):
        assert min(row[list(stay)]) >= max([row[i] for i in range(size) if i not in stay], default=-torch.inf)

"""Properties over random configurations, prompts, skip sets, draft lengths, temperatures and cut-off points.

`HYPOTHESIS_PROFILE=long pytest tests/test_properties.py -k plain_text --hypothesis-seed=0` fuzzes 2,000 generations for each
kind of planner.
"""

import copy
import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from beyond.adaptive import PARTS, KnapSpecPlus
from beyond.certificate import certified
from beyond.ways import add_ways
from decoding import FixedPlanner, Plan, generate, sampling_probs
from knapspec import KnapSpec, agreement, knapsack
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

for _name, _options in {"short": {"max_examples": 15, "derandomize": True}, "long": {"max_examples": 2000}}.items():
    hypothesis.settings.register_profile(_name, deadline=None, database=None, **_options)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

ROPES = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
]


@st.composite
def models(draw, redundant=False):
    """A random model of a random configuration; in some, most if redundant, the inner layers hardly matter: drafts are right."""
    n_layer, n_kv_head = draw(st.sampled_from([6, 5, 4, 3] if redundant else [3, 5, 4, 2, 1])), draw(st.sampled_from([2, 1, 3]))
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
    epsilon = draw(st.sampled_from([0.02, 0.1, 0.2, 1.0] if redundant else [0.2, 1.0, 0.02]))
    return random_model(config, seed=draw(st.integers(0, 10**6)), faint=range(2, 2 * n_layer - 2), epsilon=epsilon)


@st.composite
def prompts(draw, config, most=60):
    """Ids of the vocabulary, at least one, and short of the model's context."""
    return draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=1, max_size=min(most, config.max_position - 1)))


WAYS = "half", "int8", "window"
KINDS = "restless", "fixed", "knapspec", "knapspec+"


def priced(config):
    """A machine on which drafts look cheap, and those in a cheaper way cheaper still."""
    usual = {"per_token": 0.01, "attention_s": (1e-3, 1e-5)}
    ways = {"half": {"mlp_s": 7e-4}, "int8": {"mlp_s": 4e-4}, "window": {"mlp_s": 4e-4, "attention_s": (6e-4, 0.0)}}
    L = config.n_layer
    return replace(latency_model(L, **usual), ways=tuple((name, latency_model(L, **usual | way)) for name, way in ways.items()))


@st.composite
def planners(draw, kind, model, text):
    """A planner that drafts: the same plan always, another one each round, or one of ours where drafts look cheap.

    text: ids of which the part behind the text so far may be given as a draft.
    """
    L, seed, gamma_max = model.config.n_layer, draw(st.integers(0, 10**6), "seed"), draw(st.sampled_from([4, 1, 2, 12]))
    if kind == "fixed":
        skip_set = draw(st.frozensets(st.integers(0, 2 * L - 1), max_size=draw(st.sampled_from([2, 1, 2 * L]))))
        way = draw(st.sampled_from(["full", *model.table]))
        return FixedPlanner(Plan(skip_set, draw(st.sampled_from([4, 1, 2, 12, 0])), choices=None if way == "full" else (way,) * (2 * L + 1)))
    if kind == "restless":
        gives = draw(st.sampled_from([0.0, 0.4, 1.0]))
        return Restless(seed, gamma_max=gamma_max, window=draw(st.sampled_from([0, 1, 5])), gives=gives, text=text)
    options = {
        "window": draw(st.integers(1, 9)),
        "interval": draw(st.integers(1, 6)),
        "tau": draw(st.sampled_from([-1.0, 0.5])),
        "budget": draw(st.sampled_from([0.9, 0.5, 0.3])),
        "gamma_max": gamma_max,
        "threshold": draw(st.sampled_from([0.0, 0.1, 0.7])),
        "max_ratio": draw(st.sampled_from([None, 5])),
    }
    if kind == "knapspec":
        return KnapSpec(priced(model.config), **options)
    without = draw(st.sampled_from([(), ("lookup",), ("thrift", "lookup"), *((part,) for part in PARTS), PARTS]))
    return KnapSpecPlus(priced(model.config), ways=[*model.table], without=without, **options)


def with_ways(data, model):
    """The model, with cheaper ways to compute in its table now and then."""
    add_ways(model, data.draw(st.sampled_from([(), WAYS, ("half",), ("int8", "window")]), "ways"))
    return model


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_every_planner_leads_to_the_plain_text(kind, data):
    model = with_ways(data, data.draw(models(redundant="knapspec" in kind), "model"))
    prompt = data.draw(prompts(model.config), "prompt")
    count = data.draw(st.sampled_from([40, 60, 50, 30, 25, 20, 15, 10, 3, 2, 1, 0]), "max_new_tokens")
    text = generate(model, prompt, max_new_tokens=count).token_ids
    planner = data.draw(planners(kind, model, prompt + text), "planner")
    ends = [*text[:1], data.draw(st.integers(0, model.config.vocab_size - 1), "end")]
    eos_ids = data.draw(st.sampled_from([frozenset(), frozenset(ends[-1:]), frozenset(), frozenset(ends[-1:]), frozenset(ends)]), "eos_ids")
    plain = generate(model, prompt, max_new_tokens=count, eos_ids=eos_ids)
    shown = []
    with pytest.MonkeyPatch.context() as patch:  # on a clock of its own: the planner decides alike each time
        machine = SimulatedMachine(model, priced(model.config), patch)
        found = generate(machine, prompt, max_new_tokens=count, eos_ids=eos_ids, planner=planner, on_token=shown.append)
    assert found.token_ids == shown == plain.token_ids and found.stop_reason == plain.stop_reason
    assert len(shown) <= min(count, model.config.max_position - len(prompt))
    assert not eos_ids & set(shown[:-1])
    assert 0 <= found.accepted <= found.drafted and 0 <= found.given_accepted <= found.given <= found.drafted
    if shown:
        corrections = found.rounds - (shown[-1] in eos_ids)  # a round that ends with a drafted end-of-text has none
        assert corrections <= len(shown) - 1 - found.accepted <= found.rounds
    accepted = "no drafts" if not found.drafted else {0: "none", found.drafted: "all"}.get(found.accepted, "some")
    hypothesis.event(f"accepted: {accepted}")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_sampled_text_is_what_the_target_can_say(kind, data):
    model = with_ways(data, data.draw(models(redundant="knapspec" in kind), "model"))
    prompt = data.draw(prompts(model.config, 20), "prompt")
    planner = data.draw(planners(kind, model, prompt + generate(model, prompt, max_new_tokens=12).token_ids), "planner")
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
    weights = data.draw(st.lists(st.sampled_from([1, 1, 2, 3, 200]), min_size=2 * L, max_size=2 * L), "weights")
    budget = int(data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]), "budget") * sum(weights))
    tau = data.draw(st.sampled_from([-1.0, 0.5, 0.99]), "tau")
    states = []
    cache, logits = prefilled(model, prompt, capture=states, last=data.draw(st.integers(1, 9), "window"))
    (found, x), (again, _) = (knapsack(model.sublayers, weights, states, cache, budget=budget, tau=tau) for _ in range(2))
    assert found == again and [branch.weight for branch in found] == sorted({branch.weight for branch in found})
    for branch, x_branch in zip(found, x):
        assert branch.skip_set <= set(range(2, 2 * L - 2))
        assert branch.weight == sum(weights[b] for b in branch.skip_set) <= budget
        assert branch.cosine >= tau and x_branch.isfinite().all()
        assert torch.cosine_similarity(x_branch, states[-1], dim=-1).mean().item() == pytest.approx(branch.cosine, abs=1e-5)
        if not branch.skip_set:
            torch.testing.assert_close(x_branch, states[-1], rtol=1e-3, atol=1e-4)
    temperature, top_p = data.draw(st.sampled_from([0.0, 0.7]), "temperature"), data.draw(st.sampled_from([0.5, 1.0]), "top_p")
    session = SimpleNamespace(model=model, temperature=temperature, top_p=top_p)
    target_probs = sampling_probs(logits[-len(states[0]) :], temperature, top_p)
    for alpha in agreement(session, x, target_probs) if found else []:
        assert -1e-6 <= alpha <= 1 + 1e-5


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

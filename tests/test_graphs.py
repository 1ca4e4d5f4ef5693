"""CUDA graphs: here with a stand-in for the capture that runs the captured function again; on a GPU with the real one."""

import math
import re
from itertools import product

import pytest
import torch

from beyond import graphs
from beyond.graphs import SIZES, Buffers, use_graphs
from beyond.ways import add_ways
from decoding import FixedPlanner, Plan, generate
from knapspec import Branches, KnapSpec
from model import Context, KVCache
from tests.testing_models import (
    Restless,
    latency_model,
    prefilled,
    random_model,
    random_tokens,
    tiny_config,
)

MODELS = [tiny_config(), tiny_config(n_kv_head=1, qkv_bias=True, tied=True), tiny_config(qk_norm=True, head_dim=6, n_kv_head=4)]


class Replay:
    """Stands in for graphs.Capture: a function runs once when captured, and again at each replay."""

    def __init__(self, device):
        self.captured = 0

    def __call__(self, function):
        self.captured += 1
        function()
        return function

    def free_bytes(self):
        return 10**9 - 10**6 * self.captured


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(graphs, "Capture", Replay)


def pair(config, **options):
    """A model without graphs, and the same with them."""
    plain, with_graphs = (random_model(config, **options) for _ in range(2))
    before = with_graphs.sublayers
    use_graphs(with_graphs)
    assert not {*before} & {*with_graphs.sublayers}
    return plain, with_graphs


@pytest.mark.parametrize("config, N", [*product(MODELS, (1, 3, 8, 17, 32, 33))])
def test_graphs_give_the_same_logits_and_states(stand_in, config, N):
    skip, tokens, results = frozenset({1, 2}), random_tokens(N, config, seed=1), []
    for model in pair(config):
        cache, _ = prefilled(model, random_tokens(20, config), room=N)
        states = []
        for skipped in (frozenset(), skip, frozenset()):  # states that were captured stay when more is computed
            states.append([])
            logits = model(tokens, cache, skip=skipped, capture=states[-1])
        results.append([logits, *(x for of_one in states for x in of_one), cache.keys[:, :, : 20 + N]])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)  # other numbers of rows round differently


@pytest.mark.parametrize("item", [0, 1])
def test_sublayers_with_graphs_return_tensors_of_their_own(stand_in, item):
    """The knapsack runs a sublayer on several branches in turn and keeps what each gave."""
    _, model = pair(tiny_config())
    cache = KVCache(model.config, 8)
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    same = x.clone()
    first = model.sublayers[item](x, Context(cache, 2))
    kept = first.clone()
    model.sublayers[item](first, Context(cache, 2))
    assert torch.equal(first, kept) and torch.equal(x, same) and cache.length == 0


@pytest.mark.parametrize("config", MODELS)
def test_generations_are_the_same_with_graphs(stand_in, config):
    (plain, model), prompt = pair(config), random_tokens(300, config).tolist()
    expected = generate(plain, prompt, max_new_tokens=40).token_ids
    assert generate(model, prompt, max_new_tokens=40).token_ids == expected
    for seed in range(3):
        assert generate(model, prompt, max_new_tokens=40, planner=Restless(seed)).token_ids == expected
    add_ways(model, ["window"])  # on the sublayers that replay graphs
    way = ("window",) * (2 * config.n_layer + 1)
    knapspec = KnapSpec(latency_model(config.n_layer, attention_s=(1e-3, 0.0)), tau=-1.0, interval=4, threshold=0.0, window=2)
    for planner in (FixedPlanner(Plan(frozenset({3}), 4, choices=way)), knapspec):
        generation = generate(model, prompt, max_new_tokens=40, planner=planner)
        assert generation.token_ids == expected and generation.drafted > 0


def test_what_is_padded_does_not_matter(stand_in, monkeypatch):
    made = []
    monkeypatch.setattr(graphs, "Buffers", lambda *options: made.append(Buffers(*options)) or made[-1])
    plain, model = pair(tiny_config())
    for buffers in made:
        buffers.x.fill_(math.nan), buffers.mixed.fill_(math.nan)
    logits = [m(random_tokens(9, m.config), KVCache(m.config, 16)) for m in (plain, model)]
    assert made[-1].x.isnan().any()
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-4)


def test_one_set_of_graphs_per_sublayer_and_size_and_its_price_is_told(monkeypatch):
    made = []
    monkeypatch.setattr(graphs, "Capture", lambda device: made.append(Replay(device)) or made[0])
    told = use_graphs(random_model(tiny_config(n_layer=3)))
    assert made[0].captured == 3 * 3 * len(SIZES) == 27
    assert re.fullmatch(r"27 CUDA graphs captured in \d+\.\d s, 27 MB", told)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_the_knapsacks_rows_run_on_graphs(monkeypatch, rows):
    """Four branches of eight tokens, as many as knapspec+ follows: no sublayer runs as it is."""
    monkeypatch.setattr(graphs, "Capture", Counted)
    model = random_model()
    use_graphs(model)
    assert model.sublayers[0].__qualname__ != random_model().sublayers[0].__qualname__  # so that the profile is another
    Counted.replayed, cache = 0, KVCache(model.config, 20)
    cache.keys.zero_(), cache.values.zero_()
    cache.length = 20
    for item in (0, 1):
        model.sublayers[item](torch.randn(rows, 16), Branches(cache, -(-rows // 8), min(rows, 8)))
    assert Counted.replayed == 2 + 1


class Counted(Replay):
    replayed = 0

    def __call__(self, function):
        def replay():
            Counted.replayed += 1
            function()

        return replay


class Failing(Replay):
    def __call__(self, function):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Wrong(Replay):
    def __call__(self, function):
        return lambda: None


@pytest.mark.parametrize("capture, told", [(Failing, "not permitted"), (Wrong, "other logits")])
def test_without_graphs_where_they_fail_or_are_wrong(monkeypatch, capture, told):
    monkeypatch.setattr(graphs, "Capture", capture)
    model, tokens = random_model(), [3, 1, 4]
    expected = generate(model, tokens, max_new_tokens=8).token_ids
    plain = model.sublayers
    with pytest.warns(UserWarning, match=f"no CUDA graphs.*{told}") as caught:
        use_graphs(model)
    assert "\n" not in str(caught[0].message) and model.sublayers is plain
    assert generate(model, tokens, max_new_tokens=8).token_ids == expected


def test_a_layer_of_another_shape_runs_without_graphs(stand_in):
    model = random_model()
    plain = model.sublayers
    del model.model.layers[1].input_layernorm  # as where a norm stands behind the sublayer, or nowhere
    model.sublayers = plain = [lambda x, context: x for _ in plain]
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        use_graphs(model)
    assert model.sublayers is plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("config", MODELS)
def test_graphs_on_a_gpu(config):
    (plain, model), prompt = pair(config, device="cuda"), random_tokens(30, config).tolist()
    expected = generate(plain, prompt, max_new_tokens=60).token_ids
    for planner in (None, *map(Restless, range(5))):
        assert generate(model, prompt, max_new_tokens=60, planner=planner).token_ids == expected

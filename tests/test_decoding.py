"""decoding.py, sections 2 to 4: drafts change how fast a text comes, never the text. (Sampling: test_sampling.py.)

case                                                 tests
rejection at each position; everything accepted      test_the_cache_after_every_round_is_that_of_a_fresh_prefill
the draft skipped attention in some layers           the same; test_model.py: test_rolling_back_is_a_fresh_prefill
end-of-text first, inside the drafts, as bonus       test_nothing_comes_behind_an_end_of_text, test_a_rejected_end_of_text_ends_nothing
end-of-text ids as a list, or in two files           test_any_of_several_end_of_text_ids_ends_the_text; test_tokenizer.py
max_new_tokens 0, 1, inside a round                  test_exactly_as_many_tokens_as_asked_for
prompt longer than the context, or with new tokens   test_the_context_is_never_passed
empty prompt, with and without begin-of-text         test_mistakes_are_refused; test_cli.py
a prompt that already begins with begin-of-text      test_tokenizer.py
no chat template; a template that calls Python       test_tokenizer.py, test_cli.py
characters that span tokens                          test_tokenizer.py, test_cli.py
temperature and top_p at their ends                  test_sampling.py; test_extreme_settings_give_the_greedy_text
temperature and top-p in draft and target            test_sampling.py
draft equal to target                                test_a_draft_equal_to_the_target_is_accepted_whole; test_sampling.py
γ 0, 1; nothing, everything skipped                  test_greedy_text_is_the_plain_text, test_skipping_nothing_or_everything_is_never_wrong
the same seed, plain and speculative                 test_the_same_seed_gives_the_same_text_twice; test_cli.py
two calls; an exception or Ctrl-C inside a draft     test_an_interrupted_call_leaves_the_model_fit, test_a_draft_puts_the_cache_back
near ties in bfloat16                                test_in_bfloat16_the_first_difference_is_a_near_tie
acceptance statistics                                test_only_the_accepted_prefix_counts
The same on a real model: test_default_model.py.
"""

import itertools

import pytest
import torch

import decoding
from beyond.ways import add_ways
from decoding import FixedPlanner, Plan, draft, generate
from knapspec import KnapSpec
from tests.testing_models import (
    Restless,
    latency_model,
    prefilled,
    random_model,
    random_tokens,
    tiny_config,
)

VOCAB = 101  # enough for texts that do not go round in circles at once
CONFIGS = {
    "llama": tiny_config(n_layer=3, vocab_size=VOCAB),
    "one layer": tiny_config(n_layer=1, n_kv_head=1, vocab_size=VOCAB),
    "qwen2": tiny_config(n_layer=4, n_kv_head=4, qkv_bias=True, vocab_size=VOCAB),
    "qwen3": tiny_config(n_layer=2, head_dim=6, qk_norm=True, vocab_size=VOCAB),
}
DEEP = tiny_config(n_layer=5, vocab_size=VOCAB)
FAINT = frozenset({2, 3, 5, 6})  # of DEEP: what it hardly needs


class Watching(FixedPlanner):
    """Always the same plan; keeps the session and its rounds."""

    def __init__(self, plan):
        super().__init__(plan)
        self.rounds = []

    def observe(self, session, round):
        self.session = session
        self.rounds.append(round)


def _prompt(count, seed=0):
    return random_tokens(count, DEEP, seed).tolist()


# --- Greedy text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("prompt_tokens", [1, 2, 17, 300])
def test_greedy_text_is_the_plain_text(config, prompt_tokens):
    rounds = []
    for seed in range(2):
        model, prompt = random_model(config, seed=seed), _prompt(prompt_tokens, seed)
        plain = generate(model, prompt, max_new_tokens=20)
        planner = Restless(seed, window=seed * 5)
        assert generate(model, prompt, max_new_tokens=20, planner=planner).token_ids == plain.token_ids
        assert (plain.rounds, plain.drafted, len(plain.token_ids)) == (19, 0, 20)
        rounds += planner.rounds
    assert any(0 < r.accepted == r.drafted for r in rounds) and any(r.accepted < r.drafted for r in rounds)


@pytest.mark.parametrize("prompt_tokens", [1, 300])
def test_greedy_text_is_the_plain_text_while_knapspec_plans_again_and_again(prompt_tokens):
    drafted = accepted = plans = 0
    for seed in range(3):
        model, prompt = random_model(DEEP, seed=seed, faint=FAINT, epsilon=0.15), _prompt(prompt_tokens, seed)
        planner = KnapSpec(latency_model(5), interval=2, threshold=0.1, gamma_max=12)
        generation = generate(model, prompt, max_new_tokens=30, planner=planner)
        assert generation.token_ids == generate(model, prompt, max_new_tokens=30).token_ids
        drafted, accepted = drafted + generation.drafted, accepted + generation.accepted
        plans += len(generation.plans)
    assert 0 < accepted < drafted and plans > 6


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("prompt_tokens", [1, 17])
def test_greedy_text_is_the_plain_text_when_drafts_are_given(prompt_tokens, share):
    rounds = []
    for seed, config in enumerate(CONFIGS.values()):
        model, prompt = random_model(config, seed=seed), _prompt(prompt_tokens, seed)
        plain = generate(model, prompt, max_new_tokens=30).token_ids
        planner = Restless(seed, gives=share, text=prompt + plain)
        generation = generate(model, prompt, max_new_tokens=30, planner=planner)
        assert generation.token_ids == plain
        given = [r for r in planner.rounds if r.plan.tokens]
        assert generation.given == sum(r.drafted for r in given) and generation.given_accepted == sum(r.accepted for r in given)
        assert generation.given == generation.drafted or share < 1
        assert all(not r.confidences for r in given) and not any(plan.tokens for _, plan, _ in generation.plans)
        rounds += given
    assert {0 < r.accepted == r.drafted for r in rounds} == {0 < r.accepted < r.drafted for r in rounds} == {True, False}
    assert any(r.accepted == 0 for r in rounds) and any(len(r.plan.tokens) > r.plan.gamma >= r.drafted for r in rounds)


def test_no_model_runs_for_a_draft_that_is_given(monkeypatch):
    model = random_model(DEEP)
    cache, _ = prefilled(model, _prompt(6), room=5)
    monkeypatch.setattr(model, "forward", lambda *arguments, **options: pytest.fail("a forward"))
    drafts, probs, confidences = draft(model, cache, 1, Plan(gamma=2, tokens=(7, 5, 3)), None, 0.7, 0.9, None)
    assert (drafts, confidences, cache.length) == ([7, 5], [], 6)
    assert probs.nonzero().tolist() == [[0, 7], [1, 5]] and probs.sum(-1).tolist() == [1, 1]  # certain, as what was sampled from


def test_skipping_nothing_or_everything_is_never_wrong():
    model, prompt = random_model(DEEP), _prompt(9)
    plain = generate(model, prompt, max_new_tokens=30).token_ids
    for skip_set, gamma in itertools.product((frozenset(), frozenset(range(10))), (0, 1, 2, 12)):
        generation = generate(model, prompt, max_new_tokens=30, planner=FixedPlanner(Plan(skip_set, gamma)))
        assert generation.token_ids == plain
        assert generation.drafted == 0 if gamma == 0 else generation.drafted > 0


def test_extreme_settings_give_the_greedy_text():
    model, prompt = random_model(DEEP, faint=FAINT, epsilon=0.15), _prompt(9)
    greedy = generate(model, prompt, max_new_tokens=24).token_ids
    for temperature, top_p in [(1e-4, 1.0), (1e-10, 1.0), (1e-10, 0.0), (1.0, 0.0), (1.0, 1e-8), (0.0, 1.0)]:
        options = {"temperature": temperature, "top_p": top_p, "rng": torch.Generator().manual_seed(0)}
        assert generate(model, prompt, max_new_tokens=24, **options).token_ids == greedy
        generation = generate(model, prompt, max_new_tokens=24, planner=FixedPlanner(Plan(FAINT, 4)), **options)
        assert generation.token_ids == greedy and 0 < generation.accepted < generation.drafted


@pytest.mark.parametrize("eight_bits", [False, True])
def test_in_bfloat16_the_first_difference_is_a_near_tie(eight_bits):
    differences = 0
    for seed in range(4):
        model, prompt = random_model(DEEP, seed=seed, dtype=torch.bfloat16), _prompt(9, seed)
        plain = generate(model, prompt, max_new_tokens=40).token_ids
        if eight_bits:
            add_ways(model, ["int8"])
        planner = FixedPlanner(Plan(frozenset(), 3, choices=("int8",) * (2 * DEEP.n_layer + 1))) if eight_bits else Restless(seed)
        other = generate(model, prompt, max_new_tokens=40, planner=planner).token_ids
        first = next((i for i, pair in enumerate(zip(plain, other)) if pair[0] != pair[1]), None)
        if first is not None:
            differences += 1
            _, logits = prefilled(model, prompt + plain[:first])
            gap = logits[-1, plain[first]] - logits[-1, other[first]]
            assert gap.abs() <= 0.03 * logits[-1].abs().max()  # a few steps of bfloat16, whose mantissa has 8 bits
    assert differences < 4


# --- The cache -------------------------------------------------------------------------------------------------------


def _check(session):
    """Cache and window are what one fresh forward over the text gives."""
    cache, text, states = session.cache, session.tokens[:-1], []
    assert cache.length == len(text)
    fresh, logits = prefilled(session.model, text, capture=states)
    torch.testing.assert_close(cache.keys[:, :, : len(text)], fresh.keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.values[:, :, : len(text)], fresh.values, rtol=1e-4, atol=1e-5)
    recent, target_probs = session.window(5)
    rows = min(5, len(text))
    torch.testing.assert_close(torch.stack(recent), torch.stack(states)[:, -rows:], rtol=1e-4, atol=1e-5)
    wanted = decoding.sampling_probs(logits[-rows:], session.temperature, session.top_p)
    torch.testing.assert_close(target_probs, wanted, rtol=1e-4, atol=1e-5)


class Checked:
    """Mixed into a planner: _check before each round."""

    window = 5

    def plan(self, session):
        _check(session)
        return super().plan(session)


class CheckedRestless(Checked, Restless):
    pass


class CheckedWatching(Checked, Watching):
    pass


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_cache_after_every_round_is_that_of_a_fresh_prefill(config, temperature):
    for seed in range(2):
        planner, rng = CheckedRestless(seed, gamma_max=5, window=5), torch.Generator().manual_seed(seed)
        generate(random_model(config, seed=seed), _prompt(7 * seed + 1), max_new_tokens=24, temperature=temperature, rng=rng,
                 planner=planner)  # fmt: skip
        assert 0 < sum(r.accepted for r in planner.rounds) < sum(r.drafted for r in planner.rounds)


class Misleading:
    """A model without need of FAINT, whose drafts are right but for the `wrong`-th of each round."""

    def __init__(self, wrong):
        self.model, self.wrong, self.drafted = random_model(DEEP, faint=FAINT), wrong, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, cache, *, skip=frozenset(), **options):
        logits = self.model(tokens, cache, skip=skip, **options)
        self.drafted = self.drafted + 1 if skip else 0
        return logits.roll(1, -1) if self.drafted == self.wrong else logits


@pytest.mark.parametrize("wrong", [1, 2, 3, 4, None])
def test_the_cache_is_right_wherever_a_draft_is_rejected(wrong):
    planner, accepted = CheckedWatching(Plan(FAINT, 4)), 4 if wrong is None else wrong - 1
    generation = generate(Misleading(wrong), _prompt(9), max_new_tokens=21, planner=planner)
    assert generation.token_ids == generate(random_model(DEEP, faint=FAINT), _prompt(9), max_new_tokens=21).token_ids
    assert {(r.drafted, r.accepted) for r in planner.rounds if r.drafted == 4} == {(4, accepted)}


@pytest.mark.parametrize("prompt_tokens", [1, 6, 7, 8, 13, 14, 15, 50])
def test_a_prompt_read_in_chunks_is_as_one_read_whole(monkeypatch, prompt_tokens):
    monkeypatch.setattr(decoding, "PREFILL_CHUNK", 7)
    planner = CheckedRestless(0, window=5)
    generate(random_model(DEEP), _prompt(prompt_tokens), max_new_tokens=3, planner=planner)
    assert planner.rounds


def test_prefill_computes_the_head_on_the_window_only():
    model, rows = random_model(DEEP), []
    head = model.head
    model.head = lambda x: rows.append(x.size(0)) or head(x)
    generate(model, _prompt(100), max_new_tokens=1)
    generate(model, _prompt(100), max_new_tokens=1, planner=Restless(0, window=8))
    assert rows == [1, 8]


def test_a_draft_puts_the_cache_back():
    model, seen = random_model(DEEP), []
    cache, _ = prefilled(model, _prompt(6), room=8)

    def interrupted(confidences):
        seen.append(cache.length)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        draft(model, cache, 1, Plan(frozenset({2}), 5), interrupted, 0.0, 1.0, None)
    assert seen == [7, 8, 9] and cache.length == 6


# --- Where a text ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_nothing_comes_behind_an_end_of_text(gamma):
    model, prompt = random_model(DEEP, seed=1, faint=FAINT), _prompt(9)  # what FAINT adds is nothing: every draft is right
    plain = generate(model, prompt, max_new_tokens=20).token_ids
    places = set()
    for end in dict.fromkeys(plain):
        position, shown, planner = plain.index(end), [], CheckedWatching(Plan(FAINT, gamma))
        generation = generate(model, prompt, max_new_tokens=60, eos_ids=[end], planner=planner, on_token=shown.append)
        assert generation.token_ids == shown == plain[: position + 1] and generation.stop_reason == "eos"
        in_draft = position % (gamma + 1) > 0  # else it is the first token of all, or a bonus token
        assert generation.rounds == len(planner.rounds) == -(-position // (gamma + 1))
        assert generation.drafted == generation.accepted == position - generation.rounds + in_draft  # none is drafted behind the end
        if position > 0:
            assert planner.session.tokens == prompt + shown
            _check(planner.session)
        places.add(position and 1 + (position - 1) % (gamma + 1))
    assert places == set(range(gamma + 2))  # first of all, at each place of a draft, as bonus


def test_a_rejected_end_of_text_ends_nothing(monkeypatch):
    model, prompt, planner = random_model(DEEP), _prompt(9), FixedPlanner(Plan(frozenset({2, 3, 4, 5}), 4))
    plain, drafted = generate(model, prompt, max_new_tokens=40).token_ids, set()

    def recorded(*arguments):
        answer = draft(*arguments)
        drafted.update(answer[0])
        return answer

    monkeypatch.setattr(decoding, "draft", recorded)
    generate(model, prompt, max_new_tokens=40, planner=planner)
    wrong = drafted - set(plain)
    assert len(wrong) > 3
    for end in sorted(wrong)[:3]:
        generation = generate(model, prompt, max_new_tokens=40, eos_ids={end}, planner=planner)
        assert generation.token_ids == plain and generation.stop_reason == "length"


def test_any_of_several_end_of_text_ids_ends_the_text():
    model, prompt = random_model(DEEP), _prompt(9)
    plain = generate(model, prompt, max_new_tokens=30).token_ids
    for ends in ([plain[7], plain[4]], (plain[4], plain[7]), {plain[7], plain[4], 10**6}, frozenset(plain)):
        first = min(map(plain.index, set(ends) & set(plain)))
        assert generate(model, prompt, max_new_tokens=30, eos_ids=ends).token_ids == plain[: first + 1]
        assert generate(model, prompt, max_new_tokens=30, eos_ids=ends, planner=Restless(1)).token_ids == plain[: first + 1]


@pytest.mark.parametrize("planner", [None, FixedPlanner(Plan(FAINT, 5))], ids=["plain", "drafts"])
def test_exactly_as_many_tokens_as_asked_for(planner):
    model, prompt = random_model(DEEP, faint=FAINT), _prompt(9)
    plain = generate(model, prompt, max_new_tokens=20).token_ids
    for count in (0, 1, 2, 5, 6, 7, 8, 14):
        shown = []
        generation = generate(model, prompt, max_new_tokens=count, planner=planner, on_token=shown.append)
        assert generation.token_ids == shown == plain[:count] and generation.stop_reason == "length"


@pytest.mark.parametrize("planner", [None, FixedPlanner(Plan(FAINT, 5)), Restless(0, window=3)], ids=["plain", "drafts", "random"])
def test_the_context_is_never_passed(planner):
    config = tiny_config(n_layer=5, max_position=24, vocab_size=VOCAB)
    model = random_model(config, faint=FAINT)
    longer = random_model(DEEP, faint=FAINT)
    for prompt_tokens in (1, 12, 22, 23):
        prompt, room = _prompt(prompt_tokens), 24 - prompt_tokens
        generation = generate(model, prompt, max_new_tokens=100, planner=planner)
        assert generation.token_ids == generate(longer, prompt, max_new_tokens=room).token_ids
        assert generation.stop_reason == "context"
        assert generate(model, prompt, max_new_tokens=room, planner=planner).stop_reason == "length"
    for prompt_tokens in (24, 25):
        with pytest.raises(ValueError, match=f"the prompt has {prompt_tokens} tokens; the model takes 23 at most"):
            generate(model, _prompt(prompt_tokens), max_new_tokens=1, planner=planner)


def test_mistakes_are_refused():
    model = random_model()
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(model, [], max_new_tokens=3)
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        generate(model, [1], max_new_tokens=-1)


# --- Statistics, chance and interruptions ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_a_draft_equal_to_the_target_is_accepted_whole(temperature):
    options = {"temperature": temperature, "top_p": 0.9, "rng": torch.Generator().manual_seed(0)}
    planner = FixedPlanner(Plan(frozenset(), 4))
    generation = generate(random_model(DEEP), _prompt(9), max_new_tokens=51, planner=planner, **options)
    assert (generation.drafted, generation.accepted, generation.rounds) == (40, 40, 10)


def test_only_the_accepted_prefix_counts(monkeypatch):
    model, prompt, drafted = random_model(DEEP, faint=FAINT, epsilon=0.2), _prompt(9), []

    def recorded(*arguments):
        answer = draft(*arguments)
        drafted.append(answer[0])
        return answer

    monkeypatch.setattr(decoding, "draft", recorded)
    planner = Watching(Plan(FAINT, 6))
    generation = generate(model, prompt, max_new_tokens=80, planner=planner)
    position, by_hand = 1, []
    for drafts in drafted:  # as many as agree with the text, up to the first that does not
        agree = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, generation.token_ids[position:])))
        by_hand.append((len(drafts), len(agree)))
        position += len(agree) + 1
    assert [(r.drafted, r.accepted) for r in planner.rounds] == by_hand
    assert any(d[a + 1 :] and generation.token_ids for d, (_, a) in zip(drafted, by_hand))  # tokens behind a rejected one
    assert position == len(generation.token_ids) == 80
    assert generation.rounds == len(by_hand)
    assert (generation.drafted, generation.accepted) == tuple(map(sum, zip(*by_hand)))
    assert 0 < generation.accepted < generation.drafted
    assert [r.position for r in planner.rounds] == [9 + sum(a + 1 for _, a in by_hand[:i]) for i in range(len(by_hand))]
    assert all(len(r.confidences) == r.drafted and 0 < min(r.confidences) <= max(r.confidences) <= 1 for r in planner.rounds[:-1])


def test_the_same_seed_gives_the_same_text_twice():
    model, prompt = random_model(DEEP, faint=FAINT, epsilon=0.2), _prompt(9)

    def text(seed, planner=None):
        options = {"temperature": 0.9, "top_p": 0.95, "rng": torch.Generator().manual_seed(seed)}
        return generate(model, prompt, max_new_tokens=40, planner=planner, **options).token_ids

    for planner in (None, FixedPlanner(Plan(FAINT, 3))):
        assert text(1, planner) == text(1, planner) != text(2, planner)


def test_torchs_own_generator_is_never_touched():
    model, before = random_model(DEEP), torch.get_rng_state()
    for temperature in (0.0, 1.0):
        generate(model, _prompt(4), max_new_tokens=9, temperature=temperature, planner=Restless(0))
    assert torch.equal(torch.get_rng_state(), before)


class Failing(Restless):
    """Raises at its `countdown`-th call of one method."""

    def __init__(self, method, countdown, error):
        super().__init__(0, gamma_max=5)
        self.countdown = countdown
        setattr(self, method, self._failing(getattr(self, method), error))

    def _failing(self, method, error):
        def call(*arguments):
            self.countdown -= 1
            if self.countdown == 0:
                raise error
            return method(*arguments)

        return call


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["plan", "keep_drafting", "observe", "on_token", "model"])
@pytest.mark.parametrize("count", [1, 6])
def test_an_interrupted_call_leaves_the_model_fit(where, count, error):
    model, prompt, shown = random_model(DEEP, faint=FAINT, epsilon=0.2), _prompt(9), []
    plain, sublayers = generate(model, prompt, max_new_tokens=16).token_ids, model.sublayers
    planner = Restless(0, gamma_max=5) if where in ("on_token", "model") else Failing(where, count, error)
    calls = itertools.count(1)

    def attention(x, context):  # of layer 2, in the middle of a forward
        if next(calls) == count:
            raise error
        return sublayers[4](x, context)

    def on_token(token):
        shown.append(token)
        if where == "on_token" and len(shown) == count:
            raise error

    if where == "model":
        model.sublayers = [*sublayers[:4], attention, *sublayers[5:]]
    with pytest.raises(error) as caught:
        generate(model, prompt, max_new_tokens=16, planner=planner, on_token=on_token)
    if error is KeyboardInterrupt:
        generation = caught.value.generation
        assert generation.token_ids == shown == plain[: len(shown)] and len(shown) < 16
        assert generation.stop_reason == "interrupted" and generation.seconds["total"] > 0
    for again in (None, planner):
        assert generate(model, prompt, max_new_tokens=8, planner=again).token_ids == plain[:8]

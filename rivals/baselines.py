"""Seven rivals of KnapSpec for the same generate(): only the skip set, the draft's length and its end differ.

Read it from top to bottom: what the rivals share, then one class for each, from a fixed exit to Bayesian searches,
then make_planner. The decisions are the papers' own; what a paper trains is not trained here, and said.

Differs, for all: verification runs the whole model, where layerskip, kangaroo and del would reuse what the draft
computed; layerskip and del also draft their first token, which comes from the prefill here; an end-of-text does not
end a draft, which costs time but changes no text. Drafted tokens under a threshold are still submitted, as in
every implementation read. E, ℓ and M count blocks (attention with MLP) from 1, as in the papers; sets of blocks
count from 0, as the rest of the code.
"""

import contextlib
import json
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from decoding import Plan, Planner, generate
from knapspec import Branches, KnapSpec, expected_tokens

# --- What they share -------------------------------------------------------------------------------------------------


def whole_blocks(blocks):
    """The skip set of both sublayers of each block, counted from 0."""
    return frozenset(item for i in blocks for item in (2 * i, 2 * i + 1))


def odd_blocks(n_layer):
    """1, 3, … without the last block: SWIFT's first guess."""
    return range(1, n_layer - 1, 2)


class Rival(Planner):
    """Drafts up to gamma tokens without skip_set, or until the confidence is under a threshold."""

    skip_set = frozenset()
    gamma = 0  # the longest draft
    threshold = 0.0
    search_s = 0.0  # seconds spent on searching for a skip set

    def plan(self, session):
        return Plan(self.skip_set, self.gamma)

    def keep_drafting(self, session, plan, confidences):
        return not confidences[-1] < self.threshold  # never stops at a threshold that is not a number


# --- 1. LayerSkip, 2. Kangaroo: a fixed exit -------------------------------------------------------------------------


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


class Kangaroo(Rival):
    """Drafts with the first ℓ blocks until the confidence is under η, at most gamma tokens.

    exit_layer: ℓ; threshold: η, which never adapts, 0.6 as in its code's function and README (0.4 on its command
    line). Source: Kangaroo (arXiv 2404.18911) and its evaluation/inference_kangaroo.py. Differs: the trained adapter
    between exit and LM head is left out, without which two blocks are probably too shallow.
    """

    def __init__(self, n_layer, *, exit_layer=2, gamma=6, threshold=0.6):
        self.skip_set, self.gamma, self.threshold = whole_blocks(range(exit_layer, n_layer)), gamma, threshold


# --- 3. DEL: the exit layer and the length with the most tokens per layer --------------------------------------------


def counted_columns(matches):
    """How many positions count: up to and including the first at which the exit layer disagreed."""
    return next((i + 1 for i, match in enumerate(matches) if not match), len(matches))


def most_tokens_per_layer(alphas, gamma_max):
    """(exit layer ℓ, length d) with the largest (1 + α + … + α^d) / (L + d ℓ); of equals the smallest ℓ, then d.

    alphas: share accepted at the exits 1 … L − 1, NaN where nothing is known. d is at most gamma_max − 1.
    """
    L = len(alphas) + 1
    best, choice = 1 / L, (1, 0)
    for layer, alpha in enumerate(alphas, 1):
        for d in range(1, gamma_max):
            tokens_per_layer = expected_tokens(alpha, d) / (L + d * layer)
            if tokens_per_layer > best:
                best, choice = tokens_per_layer, (layer, d)
    return choice


def shadow_tokens(model, states, chunk=64):
    """What each exit would draft: states (E, R, H) -> argmaxes (E, R) and their probabilities (E, R)."""
    tokens, confidences = [], []
    for x in states.flatten(0, 1).split(chunk):
        logits = model.logits(x).float()
        top, index = logits.max(-1)
        tokens.append(index)
        confidences.append((top - logits.logsumexp(-1)).exp())
    return torch.cat(tokens).view(states.shape[:2]), torch.cat(confidences).view(states.shape[:2])


def midway(matches, misses, match_confidences, miss_confidences):
    """Between the mean confidence at matches and that at misses, from counts and sums; NaN where one is unknown."""
    return (match_confidences / matches + miss_confidences / misses) / 2


class DEL(Rival):
    """Counts, for every exit layer, how often it would have drafted the target's token; exits where that pays most.

    Every round the states of all blocks at the verified positions pass through the LM head. Their matches and
    misses, and the confidences at each, are summed with weight `decay` (ω) a round; the exit layer and the draft's
    length follow from them, and so does the confidence that ends a draft: midway between the mean at matches and the
    mean at misses. The first round exits after block 1 with one token; after it the prompt's last `prompt_rows`
    positions are counted too. All counts restart with each prompt. Source: DEL (arXiv 2504.05598).
    Differs: KnapSpec's copy of it computes the length and drafts up to 10 tokens whatever it says; here, as in the
    paper's abstract, it is the length. When sampling, positions count up to the first rejection at most.
    The paper uses checkpoints trained as LayerSkip's.
    """

    def __init__(self, n_layer, *, gamma_max=18, decay=0.95, prompt_rows=32):
        self.n_layer, self.gamma, self.decay, self.prompt_rows = n_layer, gamma_max - 1, decay, prompt_rows
        self.window = prompt_rows + gamma_max

    def plan(self, session):
        n, L = session.cache.length, self.n_layer
        if session.generation.rounds == 0:
            # Of the exits 1 … L − 1: matches, misses, and the sums of the confidences at each.
            self.counts = torch.zeros(4, L - 1, dtype=torch.float64)
            self.exit_layer, length, alpha, self.threshold = 1, min(1, self.gamma), 1.0, math.nan
        else:
            self._count(session, n - self.position)
            alphas = (self.counts[0] / self.counts[:2].sum(0)).tolist()
            self.exit_layer, length = most_tokens_per_layer(alphas, self.gamma + 1)
            alpha, self.threshold = alphas[self.exit_layer - 1], midway(*self.counts[:, self.exit_layer - 1]).item()
        self.position = n
        return Plan(whole_blocks(range(self.exit_layer, L)) if length else frozenset(), length, alpha)

    def _count(self, session, new):
        """Adds the `new` latest positions and, after the first round, the prompt's."""
        states, target_probs = session.window(new + (self.prompt_rows if session.generation.rounds == 1 else 0))
        tokens, confidences = shadow_tokens(session.model, torch.stack(states[2:-1:2]))  # after blocks 1 … L − 1
        matches = tokens == target_probs.argmax(-1)  # (L − 1, rows)
        before = len(target_probs) - new
        columns = before + counted_columns(matches[self.exit_layer - 1, before:].tolist())
        matches, confidences = matches[:, :columns].cpu().double(), confidences[:, :columns].cpu().double()
        seen = (matches, 1 - matches, matches * confidences, (1 - matches) * confidences)
        self.counts = self.decay * self.counts + torch.stack([x.sum(-1) for x in seen])


# --- 4. Draft on the Fly, 5. Draft & Verify: a threshold that follows the acceptance ---------------------------------


class AdaptiveStop(Rival):
    """Moves the threshold up while too few drafts are accepted, and down while they are accepted but stop too early.

    `rate`, the share accepted, is a running mean (β₁) that restarts with each prompt; the threshold moves a step ε,
    damped (β₂), and carries over. Source: Draft & Verify (arXiv 2309.08168), its adaptive draft-exiting mechanism.
    """

    def __init__(self, *, gamma=12, threshold=0.6, target_rate=0.90, step=0.01, rate_decay=0.5, threshold_decay=0.9):
        self.gamma, self.threshold, self.rate = gamma, threshold, 0.0
        self.target_rate, self.step, self.rate_decay, self.threshold_decay = target_rate, step, rate_decay, threshold_decay

    def plan(self, session):
        if session.generation.rounds == 0:
            self.rate = 0.0
        return super().plan(session)

    def adapt(self, drafted, accepted):
        self.rate = self.rate_decay * self.rate + (1 - self.rate_decay) * accepted / drafted
        wanted = self.threshold
        if self.rate < self.target_rate:
            wanted += self.step
        elif drafted < self.gamma:
            wanted -= self.step
        self.threshold = self.threshold_decay * self.threshold + (1 - self.threshold_decay) * wanted

    def observe(self, session, round):
        if round.drafted:
            self.adapt(round.drafted, round.accepted)


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

    def plan(self, session):
        if session.generation.rounds == 0:
            states, _ = session.window(self.window)
            cosines = [torch.cosine_similarity(x.float(), y.float(), dim=-1).mean().item() for x, y in zip(states[::2], states[1::2])]
            self.skip_set = self.similar(cosines)
        plan = super().plan(session)
        return plan if self.skip_set else Plan()

    def similar(self, cosines):
        return frozenset(2 * i for i, cosine in enumerate(cosines) if cosine > self.similarity)


class DraftVerify(AdaptiveStop):
    """Drafts with a skip set that search_skip_set found beforehand.

    Source: Draft & Verify (arXiv 2309.08168); defaults of its evaluation notebooks. Differs: the threshold's rule is
    the same when sampling, where the published code begins at another threshold.
    """

    def __init__(self, skip_set, **stop):
        super().__init__(**stop)
        self.skip_set = skip_set


class Bayes:
    """Bayesian optimisation over [0, 1]^n: a Gaussian process, and the point with the largest upper confidence bound.

    Raises ValueError where the optional package bayesian-optimization is missing.
    """

    def __init__(self, n, *, kappa, seed, noise=1e-2):
        try:
            from bayes_opt import BayesianOptimization
            from bayes_opt.acquisition import UpperConfidenceBound
        except ImportError:
            raise ValueError("this method searches with the package bayesian-optimization: pip install bayesian-optimization") from None
        bounds = {f"{i:06d}": (0.0, 1.0) for i in range(n)}
        self.optimizer = BayesianOptimization(None, bounds, acquisition_function=UpperConfidenceBound(kappa=kappa),
                                              random_state=seed, verbose=0, allow_duplicate_points=True)  # fmt: skip
        self.optimizer.set_gp_params(alpha=noise)

    def suggest(self):
        return [float(x) for x in self.optimizer.suggest().values()]

    def register(self, point, score):
        with contextlib.redirect_stdout(None):  # where it would print a notice for each point that it knows already
            self.optimizer.register(dict(zip(self.optimizer.space.keys, point, strict=True)), score)


def search_skip_set(n_layer, objective, *, iterations=1000, seconds=math.inf, kappa=2.576, seed=1, progress=False):
    """The skip set with the largest objective(skip_set) seen: two first guesses, then Bayesian optimisation.

    Every sublayer is a coordinate in [0, 1], skipped above 0.5, none protected. Ends after `iterations` suggestions or
    before the first evaluation that would begin after `seconds`; without any, it is the first guess. Source: Draft & Verify (arXiv 2309.08168) and its
    searching.py. Differs: the two first guesses, masks known for its own models, are the odd blocks and their attention.
    """
    bayes = Bayes(2 * n_layer, kappa=kappa, seed=seed)
    odd = whole_blocks(odd_blocks(n_layer))
    guesses = [odd, frozenset(item for item in odd if item % 2 == 0)]
    best, best_skip_set, start_s = -math.inf, guesses[0], time.perf_counter()
    turns = range(len(guesses) + iterations)
    for i in tqdm(turns, desc="searching a skip set", disable=None if progress else True, leave=False):
        if time.perf_counter() - start_s >= seconds:
            break
        point = [float(item in guesses[i]) for item in range(2 * n_layer)] if i < len(guesses) else bayes.suggest()
        skip_set = skipped_above_half(point)
        score = objective(skip_set)
        bayes.register(point, score)
        if score > best:
            best, best_skip_set = score, skip_set
    return best_skip_set


def skipped_above_half(point):
    return frozenset(item for item, x in enumerate(point) if x > 0.5)


def speed(model, prompts, skip_set, new_tokens=32):
    """Tokens per second over all prompts (lists of ids): Draft & Verify's objective, at its code's default stopping."""
    planner = DraftVerify(skip_set, gamma=8, threshold=0.8)
    runs = [generate(model, prompt, max_new_tokens=new_tokens, planner=planner) for prompt in prompts]
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds["total"] for run in runs)


# --- 6. SWIFT: random and Bayesian candidates, scored on the text generated so far -----------------------------------


def parallel_draft(model, cache, tokens, start, skip_set):
    """Logits (T, V) of a draft over tokens (T,) at positions start …, in one pass; the cache is left as it was."""
    rows, length = slice(start, start + len(tokens)), cache.length
    keys, values = cache.keys[:, :, rows].clone(), cache.values[:, :, rows].clone()
    cache.length = start
    logits = model(tokens, cache, skip=skip_set)
    cache.length, cache.keys[:, :, rows], cache.values[:, :, rows] = length, keys, values
    return logits


def matchness(choices, tokens):
    """Share of positions at which the choice is the token that came next; tokens are one more than choices."""
    return sum(choice == token for choice, token in zip(choices, tokens[1:], strict=True)) / len(choices)


class Swift(Rival):
    """Tries one candidate skip set a round, keeps the best, and stops when it is good enough.

    A candidate skips exactly int(2 (L − 2) share) sublayers, of no first or last block: a random set, and every
    `bayes_interval`-th time the largest coordinates of a Bayesian suggestion. Its score is the share of the request's
    first `context` new tokens after which it would choose the next one. The search goes on across prompts, until a
    score exceeds max_score, `tolerance` candidates in a row were no better, or max_iterations are exceeded. search_s
    is part of the generations' time for planning. seed: of the candidates. bayes_interval None needs no package.
    Source: SWIFT (arXiv 2410.06916) and its model/swift/utils.py; defaults of its command line, search switched on.
    Differs: drafts a single line of tokens, not a tree.
    """

    def __init__(self, n_layer, *, share=0.45, interval=1, bayes_interval=25, max_iterations=1000, tolerance=300,
                 max_score=0.95, context=32, gamma=25, threshold=0.8, seed=0):  # fmt: skip
        self.free = range(2, 2 * n_layer - 2)
        self.n_skipped = int(2 * (n_layer - 2) * share)
        self.interval, self.bayes_interval, self.context = interval, bayes_interval, context
        self.max_iterations, self.tolerance, self.max_score = max_iterations, tolerance, max_score
        self.skip_set, self.gamma, self.threshold = whole_blocks(odd_blocks(n_layer)), gamma, threshold
        self.rng = torch.Generator().manual_seed(seed)
        self.bayes = Bayes(len(self.free), kappa=2.5, seed=seed) if bayes_interval else None
        self.best_score, self.iterations, self.streak, self.searching = 0.0, 0, 0, True

    def plan(self, session):
        generation, start_s = session.generation, time.perf_counter()
        if self.searching and generation.rounds % self.interval == 0 and len(generation.token_ids) > self.context + 1:
            candidate = self.candidate()
            tokens = generation.token_ids[: self.context + 1]
            first = len(session.tokens) - len(generation.token_ids)  # position of the first new token
            inputs = torch.tensor(tokens[:-1], device=session.model.device)
            logits = parallel_draft(session.model, session.cache, inputs, first, candidate)
            self.consider(candidate, matchness(logits.argmax(-1).tolist(), tokens))
            self.search_s += time.perf_counter() - start_s
        return super().plan(session)

    def candidate(self):
        if self.bayes and (self.iterations + 1) % self.bayes_interval == 0:
            order = torch.tensor(self.bayes.suggest()).argsort(descending=True)
        else:
            order = torch.randperm(len(self.free), generator=self.rng)
        return frozenset(self.free[i] for i in order[: self.n_skipped].tolist())

    def consider(self, candidate, score):
        """Adopts a candidate that scores more than any before; decides whether to search on."""
        if self.bayes:
            self.bayes.register([float(item in candidate) for item in self.free], score)
        self.iterations, self.streak = self.iterations + 1, self.streak + 1
        if score > self.best_score:
            self.best_score, self.skip_set, self.streak = score, candidate, 0
        done = score > self.max_score or self.streak > self.tolerance or self.iterations > self.max_iterations
        self.searching = not done


# --- 7. CLaSp: a dynamic program over whole blocks -------------------------------------------------------------------


def most_similar_blocks(states, run_block, n_skipped):
    """The n_skipped blocks, counted from 0, whose absence turns the final state least, by CLaSp's dynamic program.

    states: x_0 … x_L (L + 1, H) of one token; run_block(i, x) applies block i to x (B, H). g[j], with j of the blocks
    so far skipped, is the better of running block i on g[j] and of skipping it from g[j − 1], in cosine to x_{i+1};
    of equals, skipping. n_skipped is at most L. Source: CLaSp (arXiv 2505.24196), algorithm 1.
    """
    g, paths = states[:1], [()]  # row j: j blocks skipped; paths[j]: which
    for i, target in enumerate(states[1:]):
        ran = torch.cat((target[None], run_block(i, g[1:]))) if len(g) > 1 else target[None]
        ran_cosines = torch.cosine_similarity(ran.float(), target.float(), dim=-1).tolist()
        skip_cosines = torch.cosine_similarity(g.float(), target.float(), dim=-1).tolist()
        rows, new_paths = [ran[0]], [paths[0]]
        for j in range(1, min(i + 1, n_skipped) + 1):
            if j < len(g) and ran_cosines[j] > skip_cosines[j - 1]:
                rows.append(ran[j])
                new_paths.append(paths[j])
            else:
                rows.append(g[j - 1])
                new_paths.append((*paths[j - 1], i))
        g, paths = torch.stack(rows), new_paths
    return frozenset(paths[n_skipped])


class Clasp(Rival):
    """Every `interval` rounds skips the blocks that hardly mattered for the last verified token.

    n_skipped: M, by default half the blocks: the paper skips 50 to 60 % (44 of 80 in LLaMA3-70B). threshold is the
    paper's; gamma 10 and interval 64 are those with which KnapSpec ran it. The first round skips nothing.
    Source: CLaSp (arXiv 2505.24196). Differs: the paper's γ was not found.
    """

    window = 1

    def __init__(self, n_layer, *, n_skipped=None, gamma=10, interval=64, threshold=0.7):
        self.n_skipped = n_layer // 2 if n_skipped is None else n_skipped
        self.gamma, self.interval, self.threshold = gamma, interval, threshold

    def plan(self, session):
        rounds = session.generation.rounds
        if rounds == 0:
            self.skip_set = frozenset()
        elif (rounds - 1) % self.interval == 0:
            sublayers, contexts = session.model.sublayers, {}

            def run_block(i, x):
                B = len(x)
                context = contexts.get(B) or contexts.setdefault(B, Branches(session.cache, B, 1))
                return sublayers[2 * i + 1](sublayers[2 * i](x, context), context)

            states, _ = session.window(1)
            self.skip_set = whole_blocks(most_similar_blocks(torch.cat(states[::2]), run_block, self.n_skipped))
        return super().plan(session)


# --- By name ---------------------------------------------------------------------------------------------------------

METHODS = ("autoregressive", "layerskip", "kangaroo", "del", "asd", "draft_verify", "swift", "clasp", "knapspec")
PROMPTS = Path(__file__).parent.parent / "benchmark" / "prompts.jsonl"


def make_planner(name, model, latency, *, gamma_max=None, progress=False, tokenizer=None, calibration=None, search_s=120.0):
    """A new planner for one of METHODS; keep it across prompts, since some go on learning.

    gamma_max: no draft is longer (None: as long as the method's own default). latency: a profile.LatencyModel, for
    knapspec only. draft_verify searches here, before any decoding, on `calibration` (lists of token ids) or on the first
    8 of prompts.jsonl through `tokenizer` (a checkpoint.Tokenizer), to its advantage where these are decoded afterwards.
    No evaluation begins after search_s seconds, where the paper takes 1000 evaluations; the planner's own search_s says
    what it took. progress: show a bar. Raises ValueError for an unknown name, a missing package, and where draft_verify
    has no prompts to search on.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}")
    if name == "autoregressive":
        return Planner()
    if name == "knapspec":
        return KnapSpec(latency) if gamma_max is None else KnapSpec(latency, gamma_max=gamma_max)
    L = model.config.n_layer
    if L < 3:
        raise ValueError(f"{name} needs a model of at least 3 blocks; this one has {L}")
    if name == "draft_verify":
        planner = _searched(model, calibration or _calibration(tokenizer), search_s, progress)
    elif name == "asd":
        planner = ASD()
    else:
        planner = {"layerskip": LayerSkip, "kangaroo": Kangaroo, "del": DEL, "swift": Swift, "clasp": Clasp}[name](L)
    if gamma_max is not None:
        planner.gamma = min(planner.gamma, gamma_max)
    return planner


def _searched(model, prompts, seconds, progress):
    start_s = time.perf_counter()
    skip_set = search_skip_set(model.config.n_layer, lambda s: speed(model, prompts, s), seconds=seconds, progress=progress)
    planner = DraftVerify(skip_set)
    planner.search_s = time.perf_counter() - start_s
    return planner


def _calibration(tokenizer):
    if tokenizer is None:
        raise ValueError("draft_verify searches on prompts: pass calibration (lists of token ids) or a tokenizer")
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text("utf-8").splitlines()[:8]]
    return [tokenizer.encode(p) if tokenizer.chat_template is None else tokenizer.chat(p) for p in prompts]

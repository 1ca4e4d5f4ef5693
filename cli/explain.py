"""--explain: what was measured, weighed, decided and drafted, in words and numbers."""

from cli.terminal import ascii_only, coloured, label
from cli.trace import KINDS, describe, describe_plan, skipped

ROWS = 20  # of drafts that were weighed, the best


def lines(trace, tokenizer, token_ids, latency, n_layer):
    """The explanation, as lines for standard error. latency: a profile.LatencyModel or None."""
    if not trace.decision:
        return ["no round was needed, so nothing was decided: plans are for the tokens after the first"]
    return [*latency_lines(trace.decision, latency, n_layer), *decision_lines(trace, latency), *round_lines(trace, tokenizer, token_ids)]


def ms(seconds):
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def latency_table(latency, n, n_layer):
    """For each way to compute: its name, and the seconds of an attention, an MLP, the head and a draft token that skips nothing."""
    ways = [("full", latency), *latency.ways]
    return [(name, way.attention(n), way.mlp(), way.head(), way.draft(frozenset(), n, n_layer)) for name, way in ways]


def latency_lines(decision, latency, n_layer):
    if not latency:
        return ["latencies: none, since this method weighs no times"]
    n = decision.position
    told = [f"latencies with {n} tokens in the cache (the fit is off by {latency.error:.1%} on average):"]
    told += [f"  {name + ':':8} attention {ms(attention_s)}, MLP {ms(mlp_s)}, head {ms(head_s)}; a draft token that skips nothing {ms(draft_s)}"
             for name, attention_s, mlp_s, head_s, draft_s in latency_table(latency, n, n_layer)]  # fmt: skip
    told.append("  verifying " + ", ".join(f"{k}: {ms(latency.verify(n, k))}" for k, *_ in latency.verify_s) + " (by the number of tokens)")
    if decision.weights:
        told.append("  weights: skipping an attention saves {}, an MLP {}".format(*decision.weights))
    return told


def verdict(decision, latency):
    """What was chosen, by how much over plain decoding and, if it is known, over the next best, as one or two sentences."""
    plan, plain = decision.plan, decision.plain or 1 / latency.verify(decision.position, 1)
    rate, drafts = plan.tokens_per_second, [draft for draft in decision.drafts if draft is not decision.winner]
    gain = f": {rate / plain:.2f} times plain decoding's {plain:.1f}" if plan.gamma else ""
    told = [f"chosen: {describe_plan(plan)}, {rate:.1f} tokens/s expected{gain}"]
    others = [(*draft.best, f"{describe(draft.skip_set, draft.way)}, gamma {draft.best[1]}") for draft in drafts]
    if plan.gamma and decision.plain:  # a planner that does not say what else it weighed has no next best
        others.append((plain, 0, "plain decoding"))
    if others:
        other, _, words = max(others)
        margin = "" if other <= rate else ", less than the margin asked of a draft"
        told.append(f"next best: {words}, {other:.1f} tokens/s ({other / rate - 1:+.1%}{margin})")
    return told


def decision_lines(trace, latency):
    decision = trace.decision
    if not latency:
        return [f"the last plan, weighed against no other: {describe_plan(decision.plan)}"]
    told = [f"knapsacks solved: {trace.solved}; this was weighed with {decision.position} tokens in the cache:"]
    drafts = sorted(decision.drafts, key=lambda draft: draft.best, reverse=True)
    if drafts:
        told.append("   saved  attention  MLP  cosine  alpha  gamma  tokens/s  kept")
    for draft in sorted(drafts[:ROWS], key=lambda draft: draft.weight):
        cosine, (rate, gamma) = "-" if draft.cosine is None else f"{draft.cosine:.4f}", draft.best
        attention, mlp = skipped(draft.skip_set)
        row = f"{draft.weight:6}  {attention:9}  {mlp:3}  {cosine:>6}  {draft.alpha:5.3f}  {gamma:5}  {rate:8.1f}  {draft.way}"
        told.append(f" {'>' if draft is decision.winner else ' '}{row}")
    if len(drafts) > ROWS:
        told.append(f"  and {len(drafts) - ROWS} with fewer tokens/s")
    chosen, *others = verdict(decision, latency)
    return [*told, chosen, *(f"  {other}" for other in others)]


def round_lines(trace, tokenizer, token_ids):
    """Each round's tokens, each with its mark, and on a terminal in its colour; rounds of one plain token together."""
    colours, write = coloured(), ascii if ascii_only() else repr

    def paint(kind, text):
        mark, colour, _ = KINDS[kind]
        return f"\033[{colour}m{mark}{text}\033[0m" if colours else f"{mark}{text}"

    told = trace.told(token_ids)
    kinds = {token.kind for tokens in told for token in tokens}
    result = ["round by round:", *(f"  {paint(kind, '')} {about}" for kind, (*_, about) in KINDS.items() if kind in kinds)]
    rounds = []  # [number, the last one's number, Step, its tokens]
    for number, (step, tokens) in enumerate(zip([None, *trace.steps], told)):
        if number > 1 and not step.drafts and not rounds[-1][2].drafts:
            rounds[-1][1], rounds[-1][3] = number, rounds[-1][3] + tokens
        else:
            rounds.append([number, number, step, tokens])
    for number, end, step, tokens in rounds:
        where = f"{number}-{end}" if end > number else number
        head = f"{where} at {step.round.position}, {describe_plan(step.round.plan, bound=False)}" if step else "prompt"
        result.append(f"  {head}: " + " ".join(paint(token.kind, write(label(tokenizer, token.id))) for token in tokens))
    return result

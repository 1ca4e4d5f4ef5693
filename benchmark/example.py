"""`example`: the method on numbers small enough to follow by hand, computed by the functions that also decode."""

import math
from profile import LatencyModel
from types import SimpleNamespace

import torch

from benchmark import pictures
from decoding import accept, sampling_probs
from knapspec import (
    KnapSpec,
    expected_tokens,
    integer_weights,
    knapsack,
    tokens_per_time,
)
from model import Config, KVCache

# A model of 3 layers whose states are directions in a plane: each of its 6 items turns the state by so many degrees. Four
# tokens lie at 0, 90, 180 and 270 degrees; the one nearest to the final state is said.
L, TURNS = 3, (15, 25, 40, -30, 10, 5)
ATTENTION_S, MLP_S = 0.022, 0.020
ENDS = 0, 20, -40, 65, 110, 170, 200, 270  # where the target's states end in the window, in degrees


def turned(x, degrees):
    """Rows (N, 2) of directions, each turned by so many degrees."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return x @ torch.tensor([[c, s], [-s, c]])


def example_session():
    """What a planner sees when the last eight tokens of that model are verified."""
    sublayers = [lambda x, context, turn=turn: turned(x, turn) for turn in TURNS]
    tokens = torch.cat([turned(torch.tensor([[1.0, 0.0]]), 90 * i) for i in range(4)])
    config = Config(vocab_size=4, hidden_size=2, intermediate_size=1, n_layer=L, n_head=1, n_kv_head=1, head_dim=2,
                    max_position=8, norm_eps=1e-5, rope_theta=1e4)  # fmt: skip
    model = SimpleNamespace(config=config, sublayers=sublayers, logits=lambda x: x @ tokens.T)
    states = [torch.cat([turned(tokens[:1], end - sum(TURNS)) for end in ENDS])]
    for sublayer in sublayers:
        states.append(sublayer(states[-1], None))
    window = states, sampling_probs(model.logits(states[-1]), 0.0, 1.0)
    cache = KVCache(config, len(ENDS))
    cache.length = len(ENDS)
    return SimpleNamespace(model=model, cache=cache, window=lambda W: window, temperature=0.0, top_p=1.0,
                           generation=SimpleNamespace(rounds=0))  # fmt: skip


def solved(session, weights, **options):
    """The knapsack's branches behind each item."""
    rows = []

    def watch(item, branches):
        rows.append(branches)
        return branches

    knapsack(session.model.sublayers, weights, session.window(8)[0], session.cache, select=watch, **options)
    return rows


def table_of_states(session, weights, budget):
    """[{weight saved: (the Branch that goes on, those it beats)}] behind each item."""
    survivors = solved(session, weights, budget=budget)
    # With weights of 1, 2, 4 … no two branches weigh alike, so that all go on: this tells what the beaten ones are worth.
    every = solved(session, [2**item for item in range(2 * L)], budget=4**L, tau=-1.0)
    rows, before = [], {frozenset()}
    for item, (stay, tried) in enumerate(zip(survivors, every)):
        sets = {branch.skip_set for branch in stay}
        beaten = [branch for branch in tried if branch.skip_set - {item} in before and branch.skip_set not in sets]
        rows.append({b.weight: (b, [lost for lost in beaten if sum(weights[i] for i in lost.skip_set) == b.weight]) for b in stay})
        before = sets
    return rows


def name(skip_set):
    return "{" + ",".join(map(str, sorted(skip_set))) + "}"


def cell(branch, beaten):
    return " beats ".join(f"{name(b.skip_set)} {b.cosine:.3f}" for b in (branch, *beaten))


def ms(seconds):
    return f"{seconds * 1e3:.0f}"


def tokens_per_time_told():
    alpha, gamma, draft_s, plain_s, verify_s = 0.8, 4, 0.040, 0.100, 0.120
    chances, tokens = " + ".join(f"{alpha**i:.4g}" for i in range(gamma + 1)), expected_tokens(alpha, gamma)
    drafting, plainly = tokens_per_time(alpha, gamma, draft_s, verify_s), tokens_per_time(alpha, 0, draft_s, plain_s)
    paper = tokens_per_time(alpha, gamma, draft_s, plain_s)
    return f"""\
1. Tokens per time. α = {alpha}, γ = {gamma}; a draft step takes {ms(draft_s)} ms, a plain step {ms(plain_s)}, a verification {ms(verify_s)}.
   A round gives {chances} = {tokens:.2f} tokens in {gamma} · {ms(draft_s)} + {ms(verify_s)} = {ms(gamma * draft_s + verify_s)} ms:
   {drafting:.1f} tokens/s, plainly {plainly:.1f}. (The paper prices the verification as a plain step: {paper:.1f}.)"""


def table_told(weights, rows):
    cells = [[cell(*row[weight]) if weight in row else "" for weight in range(max(rows[-1]) + 1)] for row in rows]
    cells = [["behind", *(f"saved {i}" for i in range(len(cells[0])))], *([f"item {i}", *row] for i, row in enumerate(cells))]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["   " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return f"""\
2. The knapsack. {L} layers, {2 * L} items; they turn the state by {", ".join(map(str, TURNS))} degrees. A branch is off by
   what its skipped items would have turned; its cosine is that angle's. The first and the last layer are kept.
   Attention {ms(ATTENTION_S)} ms / MLP {ms(MLP_S)} ms = {ATTENTION_S / MLP_S:.1f}, rounded: each weighs {weights[0]}. \
Of equal weight the highest cosine goes on:
""" + "\n".join(lines)


def choice_told(session):
    plain_s = L * (ATTENTION_S + MLP_S)
    planner = KnapSpec(LatencyModel(0.0, MLP_S, (ATTENTION_S, 0.0), ((1, plain_s, 0.0),), 0.0))
    plan = planner.plan(session)
    lines = [f"3. The choice. α is the share of {len(ENDS)} tokens that a branch says as the target does. A plain step takes {ms(plain_s)} ms."]
    for skip_set, _, alpha, draft_s in [(frozenset(), "full", 1.0, plain_s), *planner.weighed]:
        rates = [tokens_per_time(alpha, gamma, draft_s, plain_s) for gamma in range(9)]
        gamma = max(range(1, 9), key=rates.__getitem__) if skip_set else 0  # skipping nothing is plain decoding
        what = f"best γ = {gamma}: {expected_tokens(alpha, gamma):.2f} tokens in {ms(gamma * draft_s + plain_s)} ms"
        lines.append(f"   {name(skip_set):5}  α = {alpha:.3f}, a draft step {ms(draft_s):>3} ms, {what}, {rates[gamma]:.2f} tokens/s")
    return "\n".join([*lines, f"   The plan: skip {name(plan.skip_set)}, draft {plan.gamma} tokens, {plan.tokens_per_second:.2f} tokens/s expected."])


def rejection_told():
    draft_probs, target_probs = torch.tensor([[0.7, 0.1, 0.2]]), torch.tensor([[0.35, 0.4, 0.25], [0.2, 0.3, 0.5]])
    (draft,), target = draft_probs, target_probs[0]
    count, token = accept(target_probs, [0], draft_probs, torch.Generator().manual_seed(0))
    stands, residual = torch.minimum(draft, target), (target - draft).clamp(min=0)

    def row(probs):
        return "  ".join(f"{p:.2f}" for p in probs.tolist())

    return f"""\
4. A rejection. A is drafted; it stands with probability 0.35 / 0.7 = {target[0] / draft[0]:.1f}. Here {count} of 1 stands, and {"ABC"[token]} follows.
             A     B     C
   draft     {row(draft)}
   target    {row(target)}
   stands    {row(stands)}  the smaller of the two: a draft stands with {stands.sum():.2f}
   residual  {row(residual)}  what the target has more: with {residual.sum():.2f} it replaces a rejected draft
   sum       {row(stands + residual)}  the target's again, whatever the draft was"""


def paint(rows):
    """-> a function that draws the table: a column for each weight saved, a row for each item, arrows from branch to branch."""

    def box(axes, weight, item, branch, survives):
        text = f"{name(branch.skip_set)}  {branch.cosine:.3f}"
        edge = pictures.COLOURS[0] if survives else pictures.MUTED
        axes.text(weight + (0 if survives else 0.42), item, text, ha="center", va="center", fontsize=9, zorder=3,
                  color=None if survives else pictures.MUTED,
                  bbox={"boxstyle": "round,pad=0.35", "fc": "none", "ec": edge, "ls": "-" if survives else ":"})  # fmt: skip

    def paint_table(figure):
        axes = figure.add_subplot()
        for item, row in enumerate(rows):
            for weight, (branch, beaten) in row.items():
                box(axes, weight, item, branch, True)
                for loser in beaten:
                    box(axes, weight, item, loser, False)
                if item:
                    skips = item in branch.skip_set
                    start = next(w for w, (b, _) in rows[item - 1].items() if b.skip_set == branch.skip_set - {item})
                    axes.annotate("", (weight, item - 0.2), (start, item - 0.75), zorder=1, arrowprops={
                        "arrowstyle": "->", "color": pictures.COLOURS[1 if skips else 0], "shrinkA": 2, "shrinkB": 2})  # fmt: skip
        axes.set(xlim=(-0.5, max(rows[-1]) + 0.5), ylim=(len(rows) - 0.4, -0.5), xlabel="units of time saved",
                 xticks=range(max(rows[-1]) + 1), yticks=range(len(rows)),
                 yticklabels=[f"behind item {i}\n({'MLP' if i % 2 else 'attention'})" for i in range(len(rows))])  # fmt: skip
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8)
        axes.set_title("skip set and cosine of the branches that go on; dotted: one that is beaten\n"
                       "arrows: down, the item is kept; to the right, it is skipped", fontsize=9)  # fmt: skip

    return paint_table


def add_options(add):
    add("--plot", metavar="FILE", help="draw the table of states to FILE, such as pictures/table.svg, and for dark pages beside it")


def run(arguments):
    if arguments.plot:
        pictures.check("--plot", arguments.plot)
    session, weights = example_session(), integer_weights(ATTENTION_S, MLP_S, L)
    rows = table_of_states(session, weights, budget=sum(weights) // 2)
    told = [tokens_per_time_told(), table_told(weights, rows), choice_told(session), rejection_told()]
    if arguments.plot:
        told.append(pictures.draw(arguments.plot, (7, 5), paint(rows)))
    return "\n\n".join(told)

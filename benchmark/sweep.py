"""`sweep`: the best fixed plan of a model, found by trying many, which a planner that decides on the spot is held against."""

from profile import latency_model
from statistics import geometric_mean

from tqdm import tqdm

from benchmark import commands
from benchmark.planted import planted_items
from benchmark.results import heading, table
from benchmark.runs import beside_plain, decode, fresh
from beyond.ways import WAYS, add_ways
from decoding import FixedPlanner, Plan, Planner, generate
from knapspec import integer_weights, knapsack

GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16)
SAVINGS = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the sublayers' time in a draft


class Look(Planner):
    """Decodes plainly; before the first round, with the states of the prompt's last `window` tokens at hand, it keeps what look(session) returns."""

    def __init__(self, look, window):
        self.look, self.window = look, window

    def plan(self, session):
        if session.generation.rounds == 0:
            self.seen = self.look(session)
        return Plan()


def contenders(model, prompt_ids, latency, *, kind=None, ways=("full",), window=16, new_tokens=64):
    """Plans to try: every γ with skip sets of the knapsack in the middle of a text, and with the planted truth.

    prompt_ids: a list of ids; its plain continuation by new_tokens is the text. kind: that of a planted model. ways: in
    which all that is not skipped is kept, each by itself. Returns a list of Plan.
    """
    L = model.config.n_layer
    text = prompt_ids + generate(model, prompt_ids, max_new_tokens=new_tokens).token_ids
    truth = sorted(planted_items(kind, L) - {0, 1, 2 * L - 2, 2 * L - 1}) if kind else []  # not the first and the last layer

    def look(session):
        (states, _), n, found = session.window(window), session.cache.length, {}  # (skip set, way): a dict, since that has an order
        for way in ways:
            weights = integer_weights(latency.sublayer(0, n, way), latency.sublayer(1, n, way), L)
            limits = [int(saving * sum(weights)) for saving in SAVINGS]
            sublayers = [model.way(item, way) for item in range(2 * L)]
            branches, _ = knapsack(sublayers, weights, states, session.cache, budget=limits[-1])
            within = [[branch for branch in branches if branch.weight <= limit] for limit in limits]
            skip_sets = [max(some, key=lambda branch: branch.weight).skip_set for some in within if some]
            # What hardly matters comes first in the truth; but for "soft" all of it is alike, and only the whole worth trying.
            fits = [sum(weights[item] for item in truth[:i]) for i in range(1, len(truth) + 1)]
            planted = [truth[: sum(weight <= limit for weight in fits)] for limit in limits] if kind == "soft" else [truth]
            found |= dict.fromkeys((s, way) for s in map(frozenset, [*skip_sets, *planted, ()]) if s or way != "full")
        return found

    middle = Look(look, window)
    generate(model, text, max_new_tokens=2, planner=middle)
    return [Plan(s, gamma, choices=None if way == "full" else (way,) * (2 * L + 1)) for s, way in middle.seen for gamma in GAMMAS]


def sweep(model, prompts, plans, *, max_new_tokens=32):
    """Successive halving: [[(Plan, speed-up)]] for each round, the best first; the last round's first is the best of all.

    prompts: lists of ids. Every run decodes max_new_tokens, over any end of text, beside a plain run. A round takes
    twice as many prompts as the one before, and the best third of its plans go on. The last one, of up to three plans,
    takes all prompts, in both orders. Speed-up: over plain decoding, the geometric mean over prompts.
    """
    options = {"max_new_tokens": max_new_tokens}
    decode(model, prompts[0], Planner(), **options)  # the first forwards are slow
    rounds, count = [], 1
    while True:
        last = len(plans) <= 3
        chosen = prompts if last else prompts[:count]
        methods = {i: fresh(model, FixedPlanner(plan), options) for i, plan in enumerate(plans)}
        found = {i: [] for i in methods}
        bar = tqdm(total=len(chosen) * len(plans) * (1 + last), desc=f"{len(plans)} plans", unit="run", leave=False, disable=None)
        for prompt_ids in chosen:
            for run in beside_plain(model, prompt_ids, methods, options=options, repeats=1 + last):
                found[run["method"]].append(run["speedup"])
                bar.update()
        bar.close()
        rounds.append(sorted(((plans[i], geometric_mean(values)) for i, values in found.items()), key=lambda pair: -pair[1]))
        if last:
            return rounds
        plans, count = [plan for plan, _ in rounds[-1][: max(len(plans) // 3, 1)]], 2 * count


def best_plans(model, prompts, *, kind, max_new_tokens=32, skip_only=False):
    """sweep() of contenders, each pair told as JSON can hold it. prompts: [(id, token ids)]."""
    ids, ways = [ids for _, ids in prompts], [] if skip_only else [way for way in add_ways(model, progress=True) if WAYS[way].whole]
    context = min(max(map(len, ids)) + max_new_tokens, model.config.max_position)
    latency = latency_model(model, context=context, gamma_max=max(GAMMAS), progress=True)
    plans = contenders(model, ids[0], latency, kind=kind, ways=["full", *ways])
    rounds = sweep(model, ids, plans, max_new_tokens=max_new_tokens)
    return [[told(*pair) for pair in pairs] for pairs in rounds]


def told(plan, speedup):
    """A plan and its speed-up as JSON can hold them."""
    return {"skip_set": sorted(plan.skip_set), "gamma": plan.gamma, "choices": plan.choices, "speedup": speedup}


def plan_of(values):
    """The Plan that was told()."""
    return Plan(frozenset(values["skip_set"]), values["gamma"], choices=values["choices"] and tuple(values["choices"]))


def sweep_table(best, n_layer, truth=frozenset()):
    """The plans of the last round of best_plans() as Markdown. truth: a planted model's redundant items; a column tells how many are skipped."""
    rows = []
    for plan in best:
        hits = f"{len(truth.intersection(plan['skip_set']))} of {len(truth)}" if truth else None
        kept = plan["choices"][0] if plan["choices"] else "full"
        rows.append([kept, f"{len(plan['skip_set'])} of {2 * n_layer}", hits, plan["gamma"], f"{plan['speedup']:.2f}×"])
    return table(["the rest is kept as", "skipped", "planted ones among them", "gamma", "over plain decoding"], rows)


def add_options(add):
    commands.add_model(add)
    commands.add_amount(add, new_tokens=32, limit=4)


def run(arguments):
    model, _, prompts, results = commands.prepare(arguments)
    kind, L = (results.data["settings"]["planted"] or {}).get("kind"), model.config.n_layer
    best = results.once("rounds", lambda: best_plans(model, prompts, kind=kind, max_new_tokens=arguments.max_new_tokens))[-1]
    lines = sweep_table(best, L, planted_items(kind, L) if kind else frozenset())
    return "\n".join([*heading("sweep", results.data, [len(ids) for _, ids in prompts]), *lines])

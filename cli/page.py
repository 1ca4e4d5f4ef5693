"""--html: the run as one page that needs nothing from elsewhere."""

import functools
from pathlib import Path

import jinja2

from cli.explain import latency_table, ms, verdict
from cli.methods import WAYS
from cli.report import per_second
from cli.terminal import label
from cli.trace import KINDS, describe, describe_plan

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 400, 220, 36, 14, 34  # of the chart, and of its margins


def render(prompt, trace, tokenizer, result, latency, config, method):
    """The page as text. result: the fields of the JSON file. Whatever a prompt or a model may write is escaped."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
                                     undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    environment.filters |= {"ms": ms, "per_second": per_second, "plan": describe_plan, "label": functools.cache(lambda token_id: printable(label(tokenizer, token_id)))}
    told, decision, weighed = trace.told(result["token_ids"]), trace.decision, None
    if decision and latency:
        weighed = {"position": decision.position, "verdict": verdict(decision, latency), "chart": chart(decision), "solved": trace.solved}
    return environment.get_template("page.html").render(
        prompt=prompt, result=result, method=method or "a fixed plan", kinds=KINDS, told=told, steps=trace.steps, latency=latency, weighed=weighed,
        model=Path(result["model"]).name if Path(result["model"]).exists() else result["model"],
        text=text(told, tokenizer, len(result["token_ids"])), drafts=drafts(trace.steps, config.n_layer),
        latencies=latency_table(latency, decision.position, config.n_layer) if weighed else [],
        heights={"full": 0.9} | {name: 0.7 - 0.2 * i for i, name in enumerate(WAYS)},
    )  # fmt: skip


def printable(text):
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def text(told, tokenizer, count):
    """[(round, Token, what it adds to the text)] of the new tokens. One that ends no character, or is not to be seen, adds nothing."""
    stream = tokenizer.stream()
    shown = [(number, token) for number, tokens in enumerate(told) for token in tokens if token.kind not in ("rejected", "unread")]
    pieces = (stream.push(token.id) for _, token in shown)
    visible = ("".join(c for c in piece if c in "\n\t" or c >= " " and not "\x7f" <= c < "\xa0" and c != "\ufffd") for piece in pieces)
    return [(number, token, piece) for (number, token), piece in zip(shown[:count], visible)]


def drafts(steps, n_layer):
    """What was drafted with, in the order of its first use: in which rounds, with what success, and where in the context."""
    found, end = {}, steps[-1].round.position + steps[-1].shown if steps else 0
    for step in steps:
        round, plan = step.round, step.round.plan
        words = describe_plan(plan, bound=False)
        key = (words, plan.skip_set)
        if key not in found:
            choices = plan.choices or ["full"] * 2 * n_layer
            names = ["skip" if item in plan.skip_set else choices[item] for item in range(2 * n_layer)]
            found[key] = {"words": words, "items": None if plan.tokens or not plan.gamma else names, "rounds": 0, "drafted": 0, "accepted": 0,
                          "tokens": 0, "places": [], "start": steps[0].round.position, "end": end}  # fmt: skip
        row = found[key]
        row["places"].append((round.position, step.shown))
        for name, count in (("rounds", 1), ("drafted", round.drafted), ("accepted", round.accepted), ("tokens", step.shown)):
            row[name] += count
    return list(found.values())


def chart(decision):
    """Tokens per second over γ as points of an SVG: a line for each draft that was weighed, the chosen one's last; None where there are none."""
    if not decision.drafts:
        return None
    most, gamma_max = 1.1 * max(max(draft.rates) for draft in decision.drafts), len(decision.drafts[0].rates) - 1

    def x(gamma):
        return round(LEFT + (WIDTH - LEFT - 10) * gamma / gamma_max, 1)

    def y(rate):
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rate / most, 1)

    lines = []
    for draft in sorted(decision.drafts, key=lambda draft: draft is decision.winner):
        rate, gamma = draft.best
        points = " ".join(f"{x(gamma)},{y(rate)}" for gamma, rate in enumerate(draft.rates))
        told = f"{describe(draft.skip_set, draft.way)}: alpha {draft.alpha:.3f}, gamma {gamma}, {rate:.1f} tokens/s"
        lines.append({"points": points, "told": told, "chosen": draft is decision.winner, "x": x(gamma), "y": y(rate)})
    step = next(step for step in (m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5)) if most / step <= 5)
    return {
        "lines": lines, "width": WIDTH, "height": HEIGHT, "left": LEFT, "bottom": HEIGHT - BOTTOM, "plain": y(decision.plain),
        "rates": [(y(i * step), f"{i * step:g}") for i in range(int(most / step) + 1)],
        "gammas": [(x(gamma), gamma) for gamma in range(0, gamma_max + 1, max(gamma_max // 8, 1))],
    }  # fmt: skip

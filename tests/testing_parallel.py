"""For the tests of beyond/parallel.py: `python -m tests.testing_parallel FOLDER` runs each of SCENARIOS in processes of its own.

They are forked from this one, so that torch is imported once. FOLDER holds the checkpoints `model` and `tied`, and gets
what each process says, `SCENARIO-RANK.out` and `.err`, and `statuses.json`.
"""

import functools
import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import torch

import cli
from beyond import parallel
from beyond.adaptive import KnapSpecPlus
from beyond.ways import add_ways
from decoding import FixedPlanner, Plan, Planner, generate
from knapspec import KnapSpec
from model import KVCache
from tests.testing_models import latency_model, random_tokens

WAYS = "half", "int8", "window"
COMMAND = ["--prompt", "Tides.", "--max-new-tokens", "20", "--device", "cpu"]


def told(model):
    """What a model says in all sorts of ways, as JSON can hold it: the same in one process and in several."""
    L, prompt, found = model.config.n_layer, random_tokens(40, model.config, seed=3).tolist(), {}
    latency = latency_model(L)
    cheaper = replace(latency, ways=tuple((way, latency_model(L, mlp_s=1e-4)) for way in WAYS))
    add_ways(model)
    for name, ids, planner, options in (
        ("plain", prompt, Planner(), {}),
        ("one token", prompt[:1], FixedPlanner(Plan(frozenset({4, 5}), 3)), {}),
        ("fixed", prompt, FixedPlanner(Plan(frozenset({2, 4, 5}), 4)), {}),
        ("sampled", prompt, FixedPlanner(Plan(frozenset({2, 4, 5}), 4)), {"temperature": 0.8, "top_p": 0.9}),
        ("planned", prompt, KnapSpec(latency, interval=1, tau=-1, threshold=0), {}),
        ("in other ways", prompt, KnapSpecPlus(cheaper, ways=WAYS, interval=2, tau=-1), {}),
    ):
        made = generate(model, ids, max_new_tokens=8, planner=planner, rng=torch.Generator().manual_seed(5), **options)
        skipped = [sorted(plan.skip_set) for _, plan, _ in made.plans]
        found[name] = {"token_ids": made.token_ids, "drafted": made.drafted, "accepted": made.accepted, "skipped": skipped}
    first, second = (KVCache(model.config, 40) for _ in range(2))
    tokens = torch.tensor(prompt)
    model(tokens[:20], first)
    model(tokens[20:], second)
    first.length, states = 20, []
    logits = {"kept": model(tokens[20:], first, capture=states), "of states": model.logits(states[-1])}
    logits |= {way: model(tokens[20:], first, choices=(way,) * (2 * L + 1)) for way in WAYS}
    return found, {name: values.tolist() for name, values in logits.items()}


def library(rank, folder, name):
    if rank:
        return parallel.follow(folder / name, device="cpu")
    model, _ = parallel.lead(folder / name, device="cpu", progress=False)
    print(json.dumps([*told(model), linear_weights(model)]))
    return 0


def linear_weights(model):
    """How many weights all layers' projections have."""
    parts = [part for layer in model.model.layers for part in (layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down)]
    return sum(part.weight.numel() for part in parts)


def command(rank, folder, *options):
    return cli.main(["--model", str(folder / "model"), *COMMAND, *options])


def compared(rank, folder):
    return command(rank, folder, "--choices", "full,skip", "--compare", "--json", str(folder / "out.json"))


def from_the_ninth_forward(action):
    """A command in which process 1 does that from its ninth forward on."""

    def run(rank, folder):
        forward, calls = parallel.Part.forward, []

        def counted(part, *arguments, **options):
            calls.append(1)
            if rank and len(calls) >= 9:  # again where Python swallowed an interrupt, as C code at times lets it
                action()
            return forward(part, *arguments, **options)

        parallel.Part.forward = counted
        return command(rank, folder, "--gamma", "2", "--skip", "2,3")

    return run


def fail():
    raise KeyError("a fault\nof one process")


def interrupt():
    for pid in (PIDS[0], os.getpid()):
        os.kill(pid, signal.SIGINT)


SCENARIOS = {  # name -> (processes, what each does: function of its rank and the folder)
    "model": (4, functools.partial(library, name="model")),
    "tied": (2, functools.partial(library, name="tied")),
    "command": (2, compared),
    "killed": (2, from_the_ninth_forward(lambda: os.kill(os.getpid(), signal.SIGKILL))),
    "failed": (2, from_the_ninth_forward(fail)),
    "interrupted": (2, from_the_ninth_forward(interrupt)),
    "undivided": (3, command),
}  # fmt: skip
PIDS = []  # of the processes started so far in this scenario


def run(name, folder):
    """Exit statuses of the scenario's processes; a negative one is the signal that ended it."""
    count, main = SCENARIOS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    PIDS.clear()
    for rank in range(count):
        if (pid := os.fork()) == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            for descriptor, ending in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{name}-{rank}.{ending}", os.O_CREAT | os.O_WRONLY), descriptor)
            raise SystemExit(main(rank, folder))
        PIDS.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in PIDS]


if __name__ == "__main__":
    here = Path(sys.argv[1])
    (here / "statuses.json").write_text(json.dumps({name: run(name, here) for name in SCENARIOS}))

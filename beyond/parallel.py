"""One model, several processes (tensor parallel): `torchrun --nproc-per-node 8 knapspec.py --model …`. Not yet run on a GPU.

Each process holds a part of every layer: some heads of each attention, some inner columns of each MLP, and, where the LM
head is not the embedding, some of its rows. A sublayer's output is the sum of what the parts give, so each ends in an
all-reduce, in every way of ways.py too. Source: Megatron-LM (Shoeybi et al. 2019).

Process 0 leads. It alone has the text, the planner, the clock and the random numbers, and before each forward it tells the
others what to run. They decide nothing, so that they cannot decide otherwise. What is told and summed takes time: the
profile measures it with the rest. There are no CUDA graphs: a sum among processes in a graph is not tried.
"""

import atexit
import contextlib
import functools
import itertools
import os
import signal
import weakref
from dataclasses import replace

import torch
import torch.distributed as dist

from beyond.ways import add_ways
from knapspec import Branches
from loading import load
from loading.files import first_line
from model import KVCache, Transformer


class Group:
    """The processes that torchrun started, with device "cpu" or "cuda", one GPU each. Raises ValueError for another device."""

    def __init__(self, device=None):
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if device not in ("cpu", "cuda"):
            raise ValueError(f"--device {device} is not for several processes: pass cpu, or cuda for one GPU each")
        if device == "cuda" and here > torch.cuda.device_count():
            raise ValueError(f"{here} processes and {torch.cuda.device_count()} GPUs: pass a smaller --nproc-per-node, or --device cpu")
        self.device = "cpu" if device == "cpu" else f"cuda:{local}"
        self.store, self.rank, self.size = next(dist.rendezvous("env://"))
        if self.rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: self.ended("SIGTERM"))  # torchrun ends all where one ends: a line first
            atexit.register(self.close)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        self.joint(dist.init_process_group, backend, store=self.store, rank=self.rank, world_size=self.size)
        self.joint(dist.barrier)  # none may be gone before all are there

    def close(self):
        """For process 0, where the run is over: what torchrun has to say of it then is not waited for."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dist.is_initialized():
            dist.destroy_process_group()

    def ended(self, sign):
        """Raises ConnectionError: another process is gone, for the reason that it left if it could. sign: how this one knows."""
        self.close()
        if self.store.check(["failure"]):
            raise ConnectionError(self.store.get("failure").decode())
        raise ConnectionError(f"another process was ended, or all are to end ({sign}): see whether memory was short, and start again")

    def joint(self, operation, *arguments, **options):
        """An operation of torch.distributed, in which all processes take part. Raises ConnectionError where one is gone."""
        try:
            operation(*arguments, **options)
        except RuntimeError as error:
            if self.rank:
                raise ConnectionError from None
            self.ended(first_line(error)[:120])


class Part(Transformer):
    """The part of a model that one process holds; `config` has the part's numbers. Raises ValueError where it cannot be divided."""

    def __init__(self, config, group):
        divided = {name: getattr(config, name) for name in ("n_head", "n_kv_head", "intermediate_size")}
        for name, value in divided.items():
            if value % group.size:
                raise ValueError(f"{name} {value} cannot be divided among {group.size} processes: pass another --nproc-per-node")
        super().__init__(replace(config, **{name: value // group.size for name, value in divided.items()}))
        self.group, self.divides_head = group, not config.tied and config.vocab_size % group.size == 0
        if self.divides_head:
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size // group.size, bias=False)
        for layer in self.model.layers:
            for part in (layer.self_attn, layer.mlp):  # their copies in ways.py have the hook too
                part.register_forward_hook(lambda module, inputs, out: group.joint(dist.all_reduce, out))

    def load(self, pairs):
        super().load(pairs)
        if self.group.rank:  # a bias is no sum: process 0 adds it
            for layer in self.model.layers:
                layer.self_attn.out.bias = layer.mlp.down.bias = None
        return self

    def logits(self, x, head=None):
        logits = super().logits(x, head)
        if not self.divides_head:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.group.size)]
        self.group.joint(dist.all_gather, parts, logits)
        return torch.cat(parts, -1)


class Leader(Part):
    """Process 0's part. Used like any Transformer, it has all others run theirs."""

    def __init__(self, config, group):
        super().__init__(config, group)
        self.numbers, self.count = weakref.WeakKeyDictionary(), itertools.count()  # of the caches in use: the others have their own
        self.together = False  # in what all of them run
        self.sublayers = [self._led(item, sublayer) for item, sublayer in enumerate(self.sublayers)]

    @contextlib.contextmanager
    def _tell(self, what, x, cache=None, **options):
        """The others do as this process does inside, on the same x. If it does not get to the end, the run is over."""
        place = cache and (self.numbers.setdefault(cache, next(self.count)), cache.max_length, cache.length)
        order = what, x.shape, x.dtype, place, {*self.numbers.values()}, [*self.table], options
        self.group.joint(dist.broadcast_object_list, [order], 0)
        self.group.joint(dist.broadcast, x.contiguous(), 0)
        self.together = True
        try:
            yield
        except BaseException:
            self.group.close()
            raise
        finally:
            self.together = False

    def _led(self, item, sublayer):
        def run(x, context):
            if self.together:
                return sublayer(x, context)
            W = context.cache.length - context.start  # the context is one of Branches
            with self._tell(item, x, context.cache, B=x.size(0) // W, W=W):
                return sublayer(x, context)

        run.__qualname__ = f"{self.group.size} processes"  # a part of the profile's key
        return run

    def forward(self, tokens, cache, *, capture=None, **options):
        with self._tell("forward", tokens, cache, **options):
            return super().forward(tokens, cache, capture=capture, **options)

    def logits(self, x, head=None):
        if self.together or not self.divides_head:
            return super().logits(x, head)
        with self._tell("logits", x):
            return super().logits(x, head)


def lead(name=None, *, device=None, **options):
    """What loading.load returns, for process 0: a Leader and the tokenizer. Raises ValueError, and ConnectionError later on."""
    group = Group(device)
    try:
        return load(name, device=group.device, make=functools.partial(Leader, group=group), **options)
    except BaseException:
        group.close()
        raise


def follow(name=None, *, device=None, dtype=None):
    """Any other process, from loading to its end. It says nothing: the reason of a failure is process 0's to tell."""
    group, status = Group(device), 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 has something to tell then, and ends
    try:
        part, _ = load(name, device=group.device, dtype=dtype, progress=False, make=functools.partial(Part, group=group), rank=group.rank)
        _serve(part)
    except ConnectionError:  # process 0 has ended, or will for the same reason
        pass
    except BaseException as error:  # noqa: BLE001, whatever it is, it must be told
        group.store.set("failure", f"process {group.rank} failed: {type(error).__name__}: {first_line(error)}")
        status = 1
    os._exit(status)  # with nothing to wait for


@torch.inference_mode()
def _serve(part):
    """Runs what process 0 tells, on and on."""
    caches, key, context = {}, None, None
    while True:
        order = [None]
        part.group.joint(dist.broadcast_object_list, order, 0)
        what, shape, dtype, place, alive, ways, options = order[0]
        x = torch.empty(shape, dtype=dtype, device=part.device)
        part.group.joint(dist.broadcast, x, 0)
        caches = {number: cache for number, cache in caches.items() if number in alive}
        if place:
            number, max_length, length = place
            if number not in caches:
                caches[number] = KVCache(part.config, max_length, device=part.device, dtype=part.dtype)
                caches[number].keys.zero_(), caches[number].values.zero_()  # the profile reads them as they are
            caches[number].length = length
        if [*part.table] != ways:
            add_ways(part, ways)
        if what == "logits":
            part.logits(x)
        elif what == "forward":
            key, context = None, None
            part(x, caches[number], **options)
        else:
            if key != (place, options):
                key, context = (place, options), Branches(caches[number], **options)
            part.sublayers[what](x, context)

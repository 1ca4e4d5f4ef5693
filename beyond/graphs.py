"""On a GPU: what a sublayer does to each token by itself, as CUDA graphs. Not yet run on a GPU.

A sublayer is ten to twenty small kernels, and starting them one by one can take longer than running them. A CUDA graph
starts all of its kernels at once, but its shapes and addresses are fixed. So an MLP becomes one graph and an attention
two, around attention proper, whose keys grow with each token (as vLLM's piecewise graphs do). Such graphs know neither the
context nor what is skipped: captured once, when the model is loaded, they serve the target and every draft.
"""

import functools
import itertools
import time
import warnings

import torch

from model import KVCache

# Rows of x; fewer are padded to the next size, more run without graphs. So few rows take about the time in which the weights
# are read. A step has one, a verification γ + 1, and the knapsack of knapspec+ four branches of eight, priced like 32 verified.
SIZES = 1, 8, 32


class Buffers:
    """What the graphs of one size read and write: x, in place, and what goes into and comes out of attention proper."""

    def __init__(self, model, size):
        H, D, n_head, n_kv_head = (getattr(model.config, f) for f in ("hidden_size", "head_dim", "n_head", "n_kv_head"))
        shapes = {"x": (H,), "cos": (1, D), "sin": (1, D), "q": (n_head, D), "k": (n_kv_head, D), "v": (n_kv_head, D), "mixed": (n_head * D,)}
        self.size = size
        for name, shape in shapes.items():
            setattr(self, name, torch.zeros(size, *shape, device=model.device, dtype=model.dtype))


class Capture:
    """capture(function) -> what does the same by replaying a CUDA graph. Source: PyTorch's own recipe.

    All graphs share one pool of memory: whatever one leaves there, none needs later.
    """

    def __init__(self, device):
        self.device, self.stream, self.pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.stream.wait_stream(torch.cuda.current_stream(device))  # which loads the weights

    def __call__(self, function):
        with torch.cuda.stream(self.stream):
            function()  # libraries set themselves up, which a capture does not allow
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            function()
        return graph.replay

    def free_bytes(self):
        return torch.cuda.mem_get_info(self.device)[0]


def graphed(layer, buffers, capture):
    """Functions like layer.attention and layer.feed_forward, (x, context) -> x, that replay graphs."""
    attention = layer.self_attn

    def before(b):
        q, k, v = attention.project(layer.input_layernorm(b.x), b.cos, b.sin)
        b.q.copy_(q), b.k.copy_(k), b.v.copy_(v)

    def after(b):
        b.x.add_(attention.out(b.mixed))

    def whole(b):
        b.x.copy_(layer.feed_forward(b.x, None))

    replay = {(part, b): capture(functools.partial(part, b)) for b in buffers for part in (before, after, whole)}

    def with_graphs(sublayer, steps):
        """sublayer by steps(buffers, N, context) on the smallest buffers that hold x, or as it is where none do."""

        def run(x, context):
            N = x.size(0)
            b = next((b for b in buffers if b.size >= N), None)
            if b is None:
                return sublayer(x, context)
            b.x[:N].copy_(x)
            steps(b, N, context)
            return b.x[:N].clone()

        return run

    def attention_steps(b, N, context):
        b.cos[:N].copy_(context.cos), b.sin[:N].copy_(context.sin)
        replay[before, b]()
        b.mixed[:N].copy_(context.attend(attention.layer, b.q[:N], b.k[:N], b.v[:N]))
        replay[after, b]()

    def mlp_steps(b, N, context):
        replay[whole, b]()

    return with_graphs(layer.attention, attention_steps), with_graphs(layer.feed_forward, mlp_steps)


def use_graphs(model):
    """Lets the model's sublayers run as graphs -> how many there are and what they cost, in a line.

    Where that fails or gives other logits, it warns, leaves the sublayers as they were and returns None.
    """
    plain, cache = model.sublayers, KVCache(model.config, max(SIZES), device=model.device, dtype=model.dtype)
    tokens = torch.arange(max(SIZES), device=model.device) % model.config.vocab_size

    def logits():
        return torch.cat([model(tokens[:N], cache).float() for N in sorted({max(size - less, 1) for size in SIZES for less in (0, 1)})])

    try:
        expected, capture, start_s = logits(), Capture(model.device), time.perf_counter()
        free, buffers = capture.free_bytes(), [Buffers(model, size) for size in SIZES]
        model.sublayers = list(itertools.chain(*(graphed(layer, buffers, capture) for layer in model.model.layers)))
        taken_s, taken_bytes = time.perf_counter() - start_s, free - capture.free_bytes()
        if not (logits() - expected).norm() < 0.1 * expected.norm():  # far more than rounding, far less than a wrong sublayer
            raise RuntimeError("the graphs give other logits")
        count = 3 * len(SIZES) * model.config.n_layer
        return f"{count} CUDA graphs captured in {taken_s:.1f} s, {taken_bytes / 1e6:,.0f} MB"
    except (RuntimeError, AttributeError, TypeError) as error:  # the two latter: a layer of another shape than model.Layer
        model.sublayers = plain
        warnings.warn(f"no CUDA graphs, so decoding is slower: {str(error).strip().partition(chr(10))[0]}")

"""The PyTorch side of ``bench_torch.py``: a process that trains GPTs by torch.distributed.pipelining, or one without. It is run
by a Python that has torch, and needs nothing of jaxpipe.

Its argument is JSON: ``sizes`` of the model and the batch, ``rank``, ``port``, ``threads``, ``cuts`` by configuration. Each
line on standard input, ``NAME STEPS``, asks for that many steps of a configuration after one that does not count; the answer
is a line of JSON: ``step_s`` (a number a step), ``cpu_s`` (of this process, all steps), ``loss``. With ``core`` it keeps to
that core, the one configuration is the functions of a stage alone, and ``functions`` has the CPU seconds of each.
"""

import collections
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

RANKS = 2
SCHEDULES = {
    "1F1B": pipelining.Schedule1F1B,
    "ZB1P": pipelining.ScheduleInterleavedZeroBubble,  # with one stage a rank
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "ZBV": pipelining.ScheduleZBVZeroBubble,
}


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c["vocab_size"], c["d_model"])
        self.positions = nn.Parameter(torch.empty(c["seq_len"], c["d_model"]))

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.heads = c["d_model"], c["num_heads"]
        self.norm_attn, self.norm_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_attn(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c["d_model"])
        self.kernel = nn.Linear(c["d_model"], c["vocab_size"], bias=False)

    def forward(self, x):
        return self.kernel(self.norm(x))


def layers(c):
    torch.manual_seed(0)
    modules = [Embed(c), *(Block(c) for _ in range(c["num_layers"])), Head(c)]
    for layer in modules:
        for name, p in layer.named_parameters():
            if p.dim() > 1:
                small = name in ("out.weight", "down.weight")
                nn.init.normal_(p, std=0.02 / (2 * c["num_layers"]) ** 0.5 if small else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
    return modules


def loss_of(logits, targets):
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def optimizer_of(c, modules):
    parameters = [p for m in modules for p in m.parameters()]
    return torch.optim.AdamW(parameters, lr=c["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)


def pipelined(c, rank, name, cuts, batch):
    starts = [0, *cuts]
    stages = len(starts)
    stage_ids = [rank] if stages == RANKS else [rank, stages - 1 - rank if name == "ZBV" else rank + RANKS]
    all_layers = layers(c)
    ends = [*starts[1:], len(all_layers)]
    modules = {s: nn.Sequential(*all_layers[starts[s] : ends[s]]) for s in stage_ids}
    pipeline_stages = [pipelining.PipelineStage(modules[s], s, stages, torch.device("cpu")) for s in stage_ids]
    single = name == "1F1B"
    schedule = SCHEDULES[name](pipeline_stages[0] if single else pipeline_stages, c["microbatches"], loss_fn=loss_of)
    optimizer = optimizer_of(c, modules.values())
    tokens, targets = batch

    def step():
        losses = []
        arguments = (tokens,) if 0 in stage_ids else ()
        last = {"target": targets, "losses": losses} if stages - 1 in stage_ids else {}
        schedule.step(*arguments, **last, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def unpipelined(c, batch):
    model = nn.Sequential(*layers(c))
    optimizer = optimizer_of(c, [model])
    m = c["microbatches"]

    def step():
        total = 0.0
        for tokens, targets in zip(batch[0].chunk(m), batch[1].chunk(m), strict=True):
            loss = loss_of(model(tokens), targets) / m
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def alone(c, seconds):
    """Forward and backward passes of a stage of blocks, and of layers that mostly reduce."""
    b, t, d, heads, words = (c[n] for n in ("microbatch_size", "seq_len", "d_model", "num_heads", "vocab_size"))
    targets = torch.randint(0, words, (b, t))
    blocks = nn.Sequential(*(Block(c) for _ in range(c["blocks"])))
    layers = {
        "softmax": (nn.Softmax(-1), (b, heads, t, t)),
        "layer norm": (nn.LayerNorm(d), (b, t, d)),
        "RMS norm": (nn.RMSNorm(d), (b, t, d)),
        "cross entropy": (lambda logits: loss_of(logits, targets), (b, t, words)),
    }

    def timed(name, run):
        began = time.process_time()
        output = run()
        seconds[name].append(time.process_time() - began)
        return output

    inputs = {name: torch.randn(shape, requires_grad=True) for name, (_, shape) in layers.items()}
    x, dy = torch.randn(b, t, d, requires_grad=True), torch.randn(b, t, d)

    def step():
        y = timed("F", lambda: blocks(x))
        _, groups = timed("B", lambda: stage_backward_input([y], [dy], [x], blocks.parameters()))
        timed("W", lambda: stage_backward_weight(blocks.parameters(), groups))
        y = blocks(x)
        timed("BW", lambda: y.backward(dy))
        x.grad = None
        for name, (layer, _) in layers.items():
            layer_input = inputs[name]
            layer_output = timed(f"{name} F", lambda layer=layer, layer_input=layer_input: layer(layer_input))
            cotangent = torch.randn_like(layer_output)
            timed(f"{name} BW", lambda layer_output=layer_output, cotangent=cotangent: layer_output.backward(cotangent))
            layer_input.grad = None

    return step


def main():
    request = json.loads(sys.argv[1])
    c, rank = request["sizes"], request["rank"]
    seconds = collections.defaultdict(list)
    if "core" in request:
        os.sched_setaffinity(0, {request["core"]})
    torch.set_num_threads(request["threads"])
    torch.manual_seed(1)
    ids = torch.randint(0, c["vocab_size"], (c["microbatches"] * c["microbatch_size"], c["seq_len"] + 1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if "core" in request:
        steps = {"alone": alone(c, seconds)}
    elif rank is None:
        steps = {"unpipelined": unpipelined(c, batch)}
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        steps = {name: pipelined(c, rank, name, cuts, batch) for name, cuts in request["cuts"].items()}
    print(json.dumps({"ready": torch.__version__}), flush=True)
    for line in sys.stdin:
        name, count = line.split()
        began = time.process_time()
        steps[name]()
        first_s = time.process_time() - began
        seconds.clear()
        step_s, loss, began = [], None, time.process_time()
        for _ in range(int(count)):
            start = time.perf_counter()
            loss = steps[name]()
            step_s.append(time.perf_counter() - start)
        record = {"step_s": step_s, "cpu_s": time.process_time() - began, "first_cpu_s": first_s, "loss": loss}
        print(json.dumps({**record, "functions": seconds}), flush=True)
    if rank is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

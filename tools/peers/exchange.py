"""What exchanges cost over the GPUs of a machine: the same plan captured and issued by the host, and an all-to-all of
the process group with the copies that it needs around it. Every rank calls ``measure``, one process a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.stages import Stage
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.plan import Plan, Run, Send
from stepgraph.planner.schedule import read_schedule
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session
from stepgraph.runtime.transport.collective import on_host

LAYERS = 32
"""Exchanges in a step. What else the step moves, one gather of o for the most part, is a hundredth of it, and is
counted in."""
HEAD_DIM = 128
HANDSHAKES = ("memop", "copy", "kernel")
WARM = 3
TRACED = 3
"""Steps in a trace."""
SCHEDULE = """
version: 1
name: exchange
model: {layers: 1, hidden: 128, heads: 1, head_dim: 128, ffn: 128, dtype: bfloat16}
mesh: {ulysses: 1, tensor: 1}
shape: {batch: 1, seq: 1}
inputs: {latents: {shape: [batch, seq, 8]}}
outputs: [noise]
streams: {compute: {}, copy: {}}
defaults: {handshake: memop}
blocks:
  exchange:
    - linear: {name: qkv, in: x, out: {q: heads, k: kv_heads, v: kv_heads}, split: column}
    - send: v
    - send: q
    - send: {in: k, barrier: true}
    - call: {name: gemm, in: x, out: x, like: x}
    - attention: {in: [q, k, v], out: o}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - layers: exchange
  - gather: {in: o, via: copy}
  - linear: {name: out_proj, in: o, out: {a: hidden}, split: row}
  - all_reduce: {in: a, via: copy}
  - call: {name: head, in: [x, a], out: noise, shape: [batch, seq, 8]}
  - all_gather: {in: noise, via: copy}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one rank has of q, of k and of v before an exchange."""

    name: str
    rows: int
    heads: int
    tensor: int = 1
    """Ranks that share the model's heads, each with ``heads``; 1 where there are fewer than twice as many ranks."""

    def plan(self, ranks: int, handshake: str, layers: int) -> Plan:
        """A step of ``layers`` exchanges."""
        tensor = self.tensor if ranks >= 2 * self.tensor else 1
        ulysses = ranks // tensor
        values = {
            "model.layers": layers,
            "model.heads": self.heads * tensor,
            "model.head_dim": HEAD_DIM,
            "mesh.ulysses": ulysses,
            "mesh.tensor": tensor,
            "shape.seq": self.rows * ulysses,
            "defaults.handshake": handshake,
        }
        settings = tuple((path, str(value)) for path, value in values.items())
        return compile_schedule(read_schedule(SCHEDULE, "exchange.yaml", settings))


SHAPES = (
    Shape("MiniMax H3, U4", 4736, 56),
    Shape("MiniMax H3, TP2 x U2", 9472, 28, tensor=2),
    Shape("LingBot-World v2, U4", 1560, 40),
    Shape("a handshake, and next to nothing", 1, 8),
)
GEMM = (4736, 5376, 5376)
"""The matrix product that runs beside exchanges, (m, k, n)."""


class FixedStages:
    """Stages that give what was drawn before, and take no time; that of ``gemm`` multiplies two matrices if wanted."""

    def __init__(self, gemm: bool, device: torch.device) -> None:
        self.gemm, self.device = gemm, device
        self.drawn: dict[tuple[object, ...], Tensor] = {}
        m, k, n = GEMM
        self.a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        self.b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        self.c = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return []

    def multiply(self) -> None:
        torch.mm(self.a, self.b, out=self.c)

    def multiply_all(self) -> None:
        for _ in range(LAYERS):
            self.multiply()

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        program, op, gives = plan.ranks[rank], plan.ops[run.op], []
        for number in program.made_by(run):
            buffer = program.buffers[number]
            # Other memory than that of the layer before: what a stage hands back of its operands is copied.
            key = (op.name, (op.layer or 0) % 2, buffer.name)
            if key not in self.drawn:
                drawn = torch.randn(buffer.batch, buffer.rows, buffer.cols, device=self.device)
                self.drawn[key] = drawn.to(torch_dtype(buffer.dtype))
            gives.append(self.drawn[key])
        multiplies = self.gemm and op.name.endswith("gemm")

        def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            if multiplies:
                self.multiply()
            return gives

        return stage


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """``work`` as a graph."""
    for _ in range(WARM):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


class AllToAll:
    """What a user has without peers' memory: q, k and v packed by peer, one all-to-all, and unpacked."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.members = group, dist.get_world_size(group)
        self.fused = torch.randn(shape.rows, 3, shape.heads, HEAD_DIM, device=device).to(torch.bfloat16)

    def exchange(self) -> Tensor:
        """(3, rows of all, own heads, head_dim)"""
        rows, three, heads, dim = self.fused.shape
        by_peer = self.fused.view(rows, three, self.members, heads // self.members, dim)
        packed = by_peer.permute(2, 1, 0, 3, 4).contiguous()
        came = torch.empty_like(packed)
        dist.all_to_all_single(came, packed, group=self.group)
        return came.transpose(0, 1).reshape(three, self.members * rows, heads // self.members, dim)

    def step(self) -> None:
        for _ in range(LAYERS):
            self.exchange()


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank saw."""

    rounds: Mapping[tuple[str, str], Sequence[float]]
    """(shape, way) -> milliseconds an exchange, in each round."""
    sent: Mapping[str, int]
    """Shape -> bytes that the rank sends to others in an exchange."""
    traces: Mapping[str, Mapping[str, Mapping[str, tuple[int, float]]]]
    """Shape -> handshake -> name of what ran on the GPU -> how often, and microseconds in all, in ``TRACED`` captured
    steps. Waits and writes that the driver's stream memory operations do are in no trace."""
    left_out: Mapping[str, str]
    """Way -> why it was not measured."""


def sent_bytes(plan: Plan, rank: int) -> int:
    """Bytes that a rank sends to others in one exchange of q, k and v."""
    sends = [item for item in plan.ranks[rank].instructions if isinstance(item, Send)]
    return sum(
        item.region.rows * item.region.cols * plan.ranks[item.peer].buffers[item.target].dtype.itemsize
        for item in sends
        if item.peer != rank and item.exchange == sends[0].exchange
    )


def measure(shapes: Sequence[Shape], rounds: int, steps: int, rank: int) -> Measured:
    """Time every way of ``shapes`` in turn, ``rounds`` times ``steps`` steps of each. Collective."""
    times: dict[tuple[str, str], list[float]] = {}
    sent: dict[str, int] = {}
    traces: dict[str, Mapping[str, Mapping[str, tuple[int, float]]]] = {}
    left_out: dict[str, str] = {}
    with torch.inference_mode(False), torch.no_grad():
        for shape in shapes:
            with ExitStack() as stack:
                plans = {kind: shape.plan(dist.get_world_size(), kind, LAYERS) for kind in HANDSHAKES}
                ways = _ways(shape, plans, stack, left_out)
                for work in ways.values():
                    _timed(work, WARM)
                for _ in range(rounds):
                    for way, work in ways.items():
                        times.setdefault((shape.name, way), []).append(_timed(work, steps) / LAYERS)
                traces[shape.name] = {kind: _trace(ways[f"{kind}, captured"]) for kind in HANDSHAKES}
            sent[shape.name] = sent_bytes(plans["memop"], rank)
    return Measured(times, sent, traces, left_out)


def _ways(
    shape: Shape, plans: Mapping[str, Plan], stack: ExitStack, left_out: dict[str, str]
) -> dict[str, Callable[[], None]]:
    """What is timed: each a step of ``LAYERS`` exchanges, of as many matrix products, or of both."""
    device = torch.device("cuda", torch.cuda.current_device())
    found: dict[str, Callable[[], None]] = {}

    def opened(handshake: str, gemm: bool, eager: bool = False) -> Callable[[], None]:
        stages = FixedStages(gemm, device)
        return step_of(stack.enter_context(Session(plans[handshake], device="cuda", stages=stages, eager=eager)))

    for handshake in HANDSHAKES:
        found[f"{handshake}, captured"] = opened(handshake, gemm=False)
    found["memop, host-issued"] = opened("memop", gemm=False, eager=True)
    group = _own_group(plans["memop"])
    divides = shape.heads % dist.get_world_size(group) == 0
    if on_host(group):
        left_out["all-to-all"] = "no NCCL: ranks share a GPU"
    elif not divides:
        left_out[f"all-to-all, {shape.name}"] = f"{shape.heads} heads are not divided by {dist.get_world_size(group)}"
    else:
        plain = AllToAll(shape, group, device)
        found["all-to-all, host-issued"] = plain.step
        found["all-to-all, captured"] = captured(plain.step)
    stages = FixedStages(True, device)
    found["gemm alone, captured"] = captured(stages.multiply_all)
    for handshake in HANDSHAKES:
        found[f"{handshake}, captured, beside a gemm"] = opened(handshake, gemm=True)
    return found


def step_of(session: Session) -> Callable[[], None]:
    """A step of a session, on inputs that are drawn here, once."""
    step, device = session.capture(outputs="view"), session.backend.device
    inputs = {name: tensor.to(device) for name, tensor in random_inputs(step.plan, 0).items()}

    def call() -> None:
        step(**inputs)

    return call


def exchanging(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that exchange q, k and v with ``rank``, itself among them."""
    send = next(item for item in plan.ranks[rank].instructions if isinstance(item, Send))
    return plan.groups[plan.exchanges[send.exchange].group]


def _own_group(plan: Plan) -> dist.ProcessGroup:
    """A process group of the ranks that exchange with this one. Collective."""
    made = {members: dist.new_group(list(members)) for members in plan.groups if len(members) > 1}
    group = made[exchanging(plan, dist.get_rank())]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _timed(work: Callable[[], None], steps: int) -> float:
    """Milliseconds a step, on the GPU."""
    torch.cuda.synchronize()
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / steps


def _trace(work: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """What ran on the GPU, in all of ``TRACED`` steps: name -> how often, and microseconds in all."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        dist.barrier()  # everybody's profiler is loaded before anybody waits for a peer
        for _ in range(TRACED):
            work()
        torch.cuda.synchronize()
        dist.barrier()
    every = profile.key_averages()
    return {event.key: (event.count, event.self_device_time_total) for event in every if event.self_device_time_total}

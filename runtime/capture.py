"""Captures a rank's step as one CUDA graph, and notes which nodes each instruction became."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from cuda.bindings import driver

from stepgraph.kernels.stages import Stage
from stepgraph.planner.plan import Plan, Reset, Signal, Wait
from stepgraph.runtime.cuda import CudaRank, checked
from stepgraph.runtime.executor import issue

Nodes = frozenset[int]
"""Handles of CUDA graph nodes."""


@dataclass(frozen=True, slots=True)
class Capture:
    graph: torch.cuda.CUDAGraph
    """Captured, not yet instantiated."""
    marks: Mapping[int, Nodes]
    """For each instruction, the last nodes on its stream once it was issued."""
    seconds: float
    pool_bytes: int
    """What the capture has reserved for tensors."""


def last_nodes(stream: torch.cuda.Stream) -> Nodes:
    """The nodes that the next piece of work on a capturing stream would depend on."""
    info = checked(driver.cuStreamGetCaptureInfo(driver.CUstream(stream.cuda_stream)))
    nodes = next(
        (part for part in info if isinstance(part, list) and part and isinstance(part[0], driver.CUgraphNode)), []
    )
    return frozenset(int(node) for node in nodes)


def capture(plan: Plan, rank: int, device: CudaRank, stages: Mapping[int, Stage]) -> Capture:
    """Capture one replay. Everything that allocates outside of the graph's pool, or loads a kernel, has happened."""
    items = plan.ranks[rank].instructions
    marks: dict[int, Nodes] = {}
    batched: list[int] = []

    def after(number: int) -> None:
        item = items[number]
        if isinstance(item, Signal | Wait | Reset):
            batched.append(number)
            following = items[number + 1] if number + 1 < len(items) else None
            if isinstance(following, Signal | Wait | Reset) and following.exchange == item.exchange:
                return  # the batch goes on
            device.finish()
        nodes = last_nodes(device.streams[item.stream])
        for done in [*batched, number]:
            marks[done] = nodes
        batched.clear()

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    before = torch.cuda.memory_reserved(device.device)
    started = time.perf_counter()
    with torch.cuda.graph(graph, stream=device.streams[0], capture_error_mode="thread_local"):
        issue(plan, rank, device, stages, after)
    seconds = time.perf_counter() - started
    return Capture(graph, marks, seconds, torch.cuda.memory_reserved(device.device) - before)

"""Captures a rank's step as one CUDA graph, and notes which nodes each instruction became."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from cuda.bindings import driver

from stepgraph.kernels.cuda_call import checked
from stepgraph.kernels.stages import Stage
from stepgraph.runtime.cuda import CudaRank
from stepgraph.runtime.executor import issue, issued_together

Nodes = frozenset[int]
"""Handles of CUDA graph nodes."""


@dataclass(frozen=True, slots=True)
class Capture:
    graph: torch.cuda.CUDAGraph
    """Captured, not yet instantiated."""
    marks: Mapping[int, Nodes]
    """For each instruction, the last nodes on its stream once it was issued."""
    counts: Mapping[int, int]
    """For each instruction, how many nodes the graph had once it was issued."""
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


def node_count(stream: torch.cuda.Stream) -> int:
    """How many nodes the graph has so far that a stream is captured into."""
    info = checked(driver.cuStreamGetCaptureInfo(driver.CUstream(stream.cuda_stream)))
    graph = next(part for part in info if isinstance(part, driver.CUgraph))
    return int(checked(driver.cuGraphGetNodes(graph, 0))[1])


@contextmanager
def _no_symmetric_allocation() -> Iterator[None]:
    """Allocating or mapping symmetric memory under capture breaks it, or the graph, in silence: here it raises. Guarded
    is what torch's functions call, since a stage may have imported those by name."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory as symmetric
    except ImportError:  # this torch has none
        yield
        return

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("symmetric memory can't be allocated or mapped while a step is captured")

    originals = {name: vars(symmetric)[name] for name in ("empty_strided_p2p", "rendezvous")}
    for name in originals:
        setattr(symmetric, name, refuse)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(symmetric, name, original)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing or unmapping memory is not allowed under capture, and the destructor of a mapping ends the process when
    it fails: what nobody holds any more is collected before, and not within."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def capture(device: CudaRank, stages: Mapping[int, Stage]) -> Capture:
    """Capture one replay. Everything that allocates outside of the graph's pool, or loads a kernel, has happened.

    Raises:
        StageError: E610 where a stage can't be captured.
    """
    plan, rank = device.plan, device.site.rank
    items = plan.ranks[rank].instructions
    pieces = {piece.stop - 1: piece for piece in issued_together(items)}
    marks: dict[int, Nodes] = {}
    counts: dict[int, int] = {}

    def after(number: int) -> None:
        if number in pieces:
            device.channel.flush()
            stream = device.streams[items[number].stream]
            nodes, count = last_nodes(stream), node_count(stream)
            for done in pieces[number]:
                marks[done], counts[done] = nodes, count

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    started = time.perf_counter()
    failure: Exception | None = None
    try:
        with (
            _no_symmetric_allocation(),
            _no_garbage_collection(),
            torch.cuda.graph(graph, stream=device.streams[0], capture_error_mode="thread_local"),
        ):
            device.capturing = True
            try:
                issue(plan, rank, device, stages, after)
            except Exception as error:
                failure = error
                raise
            finally:
                device.capturing = False
    except Exception:
        if failure is not None:  # that the capture could not end is what follows from it
            raise failure from failure.__cause__
        raise
    seconds = time.perf_counter() - started
    return Capture(graph, marks, counts, seconds, _pool_bytes(graph))


def _pool_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """What the graph's private pool has reserved."""
    segments = torch.cuda.memory_snapshot()
    return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(graph.pool()))

"""The cuda device's own code without a GPU. Ranks are processes; arenas and flags are memory that they share; a stream
does at once what it is given, which the order of issue allows; a graph issues its step anew. Copies, flags and epochs
are real, and a wait that nobody answers fails."""

import contextlib
import ctypes
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stepgraph.runtime.launch import on_ranks

Result = TypeVar("Result")
PATIENCE = 20.0
"""Seconds that a wait may take."""


class _Event:
    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> _Event:
        return _Event()


class _Torch(types.ModuleType):
    """torch, whose GPU is the host."""

    cuda = types.SimpleNamespace(
        Event=_Event,
        Stream=_Stream,
        current_device=lambda: 0,
        current_stream=lambda *_: _Stream(),
        device_count=lambda: 1,
        is_available=lambda: True,
        stream=lambda _: contextlib.nullcontext(),
        synchronize=lambda *_: None,
    )

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Shared:
    """A transport over files that all ranks map."""

    name, one_host = "ipc", True

    def unavailable(self) -> str | None:
        return None

    def reserve(self, nbytes: int) -> torch.Tensor:
        handle, self.path = tempfile.mkstemp()
        os.truncate(handle, nbytes)
        os.close(handle)
        return torch.from_file(self.path, shared=True, size=nbytes, dtype=torch.uint8)

    def connect(self, block: torch.Tensor) -> Any:
        from stepgraph.runtime.transport.mapping import PeerMemory

        paths = [""] * dist.get_world_size()
        dist.all_gather_object(paths, self.path)
        mapped = [torch.from_file(path, shared=True, size=block.numel(), dtype=torch.uint8) for path in paths]
        mapped[dist.get_rank()] = block
        dist.barrier()
        os.unlink(self.path)
        return PeerMemory(block, tuple(found.data_ptr() for found in mapped), mapped)

    def channel(self, site: Any) -> Any:
        from stepgraph.runtime.transport.mapped import MappedChannel

        return MappedChannel(site)


def _copy(copy: Any, stream: int) -> None:
    for row in range(copy.height):
        into, source = (
            copy.destination + row * copy.destination_pitch,
            copy.source + row * copy.source_pitch,
        )
        ctypes.memmove(into, source, copy.width)


def _wait(address: int, enough: Callable[[int], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not enough(ctypes.c_int64.from_address(address).value):
        if time.monotonic() > limit:
            raise RuntimeError("a wait that nobody answers")
        time.sleep(0)


def _memops(operations: Any, stream: int, device: int) -> None:
    for operation in operations:
        if operation.waits:
            _wait(operation.address, lambda word, value=operation.value: word == value)
        else:
            ctypes.c_int64.from_address(operation.address).value = operation.value


def _epochs(self: Any, stream: object) -> None:
    words, epoch = self.words.tolist(), int(self.epoch) + 1
    for address in words[: self.writes]:
        ctypes.c_int64.from_address(address).value = epoch
    for address in words[self.writes :]:
        _wait(address, lambda word: word >= epoch)
    if self.waits:
        self.epoch.fill_(epoch)


class _Graph:
    def __init__(self, device: Any, stages: Any) -> None:
        self.device, self.stages = device, stages

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        from stepgraph.runtime.executor import issue

        issue(self.device.plan, self.device.site.rank, self.device, self.stages)


def _install() -> None:
    torch.set_num_threads(1)
    for name in ("cuda", "cuda.bindings"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["cuda.bindings"].driver = types.ModuleType("driver")  # type: ignore[attr-defined]
    from stepgraph.kernels import copy2d, handshake
    from stepgraph.runtime import cuda_backend, cuda_step, rank_run, readback, session
    from stepgraph.runtime.capture import Capture
    from stepgraph.runtime.transport import mapped

    assert rank_run
    host = _Torch("torch")
    for name, module in list(sys.modules.items()):
        if name.startswith("stepgraph.") and getattr(module, "torch", None) is torch:
            module.torch = host  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign, assignment]
    copy2d.enqueue, mapped.enqueue_memops, mapped.wait_flags = _copy, _memops, lambda device: 1
    mapped.has_triton = lambda: True
    handshake.EpochHandshake.enqueue = _epochs  # type: ignore[method-assign]
    session.has_bindings = lambda: True
    cuda_backend.transports = lambda device: (_Shared(),)
    cuda_step.capture = lambda device, stages: Capture(_Graph(device, stages), {}, {}, 0.0, 0)  # type: ignore[arg-type]
    readback.facts_of = lambda capture: readback.GraphFacts((), {}, ())
    readback.check = lambda *_: None


def _installed(work: Callable[[int], Result], rank: int) -> Result:
    _install()
    return work(rank)


def on_host_gpus(ranks: int, work: Callable[[int], Result]) -> list[Result]:
    """``work(rank)`` of every rank, in a process each."""
    return on_ranks(ranks, partial(_installed, work))

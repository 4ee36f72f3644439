"""What the other ranks, and whoever started them, see of a rank whose process is killed between two steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.runtime.launch import on_ranks
from stepgraph.runtime.session import Session
from stepgraph.tools.peers.exchange import SHAPES, Shape, step_of

STEPS = 50
"""That all ranks take before one is killed."""
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Loss:
    told: str
    """What the starting process raised."""
    seconds: float
    """From the kill until it did, all processes ended."""
    waited: tuple[int, ...]
    """Ranks whose next step was not over when they were ended."""
    goes_on: bool
    """Whether a new group on the same GPUs ran the plan right away."""


def lose_one(world: int) -> Loss:
    """Kill the last of ``world`` ranks in a loop of captured steps."""
    with TemporaryDirectory() as folder:
        try:
            on_ranks(world, partial(_dies, SHAPES[-1], folder))
        except StepgraphError as error:
            told, ended = str(error).splitlines()[0], time.time()
        else:
            raise RuntimeError("a rank was killed, and nobody noticed")
        waited = tuple(rank for rank in range(world - 1) if not (Path(folder) / f"over{rank}").exists())
        seconds = ended - float((Path(folder) / "killed").read_text())
    return Loss(told, seconds, waited, on_ranks(world, partial(_runs, SHAPES[-1])) == [True] * world)


def _take(step: Callable[[], None], count: int) -> None:
    for _ in range(count):
        step()
    torch.cuda.synchronize()


def _dies(shape: Shape, folder: str, rank: int) -> None:
    world = dist.get_world_size()
    with Session(shape.plan(world, "memop", LAYERS), device="cuda") as session:
        step = step_of(session)
        _take(step, STEPS)
        dist.barrier()
        if rank == world - 1:
            (Path(folder) / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        _take(step, 1)
        (Path(folder) / f"over{rank}").touch()
        time.sleep(60)


def _runs(shape: Shape, rank: int) -> bool:
    with Session(shape.plan(dist.get_world_size(), "memop", LAYERS), device="cuda") as session:
        _take(step_of(session), STEPS)
    return True

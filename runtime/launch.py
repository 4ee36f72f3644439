"""Processes of a group, one a rank: started here, or by torchrun."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import TypeVar

import torch
import torch.distributed as dist

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError

Result = TypeVar("Result")
GRACE = 3.0
"""Seconds that the other ranks have to tell their errors after the first."""
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Lets ranks of a group share a GPU; read by torch when it first allocates symmetric memory."""


class LaunchError(StepgraphError):
    """A process of a rank ended early (E612)."""


def launched() -> bool:
    """Whether torchrun, or something like it, has started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def join_group() -> None:
    """Make this process the rank that its environment says, on a GPU of its own where there are enough; with NCCL
    there, else with gloo alone. Does nothing in a group."""
    if dist.is_initialized():
        return
    os.environ.setdefault(OVERLAPPING, "1")
    # Who starts ranks without torchrun may not tell which are on this machine: then all are taken to be.
    local, ranks_here = (int(os.environ.get(f"LOCAL_{name}", os.environ[name])) for name in ("RANK", "WORLD_SIZE"))
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(local % gpus)
    own_gpu = gpus >= ranks_here and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")


def leave_group() -> None:
    dist.destroy_process_group()


def run_ranks(world: int, work: Callable[[int], Result]) -> list[Result] | None:
    """``work(rank)`` of every rank, in order: in this process's group where torchrun has started it, else in processes
    that are started for it. None in processes that are ranks other than 0.

    Raises:
        StepgraphError: as ``on_ranks`` and ``work`` do.
    """
    if not launched():
        return on_ranks(world, work)
    joined = not dist.is_initialized()
    join_group()
    rank = dist.get_rank()
    mine = work(rank)
    every = [mine] * dist.get_world_size()
    dist.gather_object(mine, every if rank == 0 else None)
    if joined:
        dist.barrier()  # nobody leaves while another still needs it
        leave_group()
    return every if rank == 0 else None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def be_rank(rank: int, world: int, port: int) -> None:
    """Join a group of processes of this machine."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
    )
    join_group()


def _end_with_parent() -> None:
    """Ends this process when the one that has started it is gone, however that ended: a rank that waits for its peers
    on the GPU would stay there."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _worker(
    rank: int, world: int, port: int, work: Callable[[int], object], results: Queue[tuple[int, bytes, object]]
) -> None:
    try:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        be_rank(rank, world, port)
        value = work(rank)
        dist.barrier()  # nobody leaves while another still needs it
        # Pickled here, or a tensor would be fetched from this process when it has ended.
        results.put((rank, pickle.dumps(value), None))
        leave_group()
    except StepgraphError as error:
        results.put((rank, b"", error))
    except Exception:
        results.put((rank, b"", traceback.format_exc()))


def on_ranks(world: int, work: Callable[[int], Result]) -> list[Result]:
    """``work(rank)`` in a fresh process for each rank of a group, in order. Work and results are pickled.

    Raises:
        StepgraphError: a rank's own; E612 where a process died.
        RuntimeError: another error of a rank, with its traceback.
    """
    context = torch.multiprocessing.get_context("spawn")
    results: Queue[tuple[int, bytes, object]] = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_worker, args=(rank, world, port, work, results), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    found: dict[int, Result] = {}
    errors: dict[int, object] = {}
    deadline = math.inf
    try:
        while len(found) < world and time.monotonic() < deadline:
            try:
                rank, value, error = results.get(timeout=0.5)
            except queue.Empty:
                lost = {
                    n: p.exitcode
                    for n, p in enumerate(processes)
                    if p.exitcode is not None and n not in {*found, *errors}
                }
                errors |= {n: LaunchError([_died(n, code)]) for n, code in lost.items()}
            else:
                if error is None:
                    found[rank] = pickle.loads(value)  # from a process of ours
                else:
                    errors[rank] = error
            if errors and deadline == math.inf:
                deadline = time.monotonic() + GRACE
        for error in sorted(errors.values(), key=_precedence):
            raise error if isinstance(error, StepgraphError) else RuntimeError(f"a rank failed: {error}")
        return [found[rank] for rank in range(world)]
    finally:
        for process in processes:
            process.join(5 if len(found) == world else 0)
            process.kill()


def _died(rank: int, code: int | None) -> Diagnostic:
    return Diagnostic("E612", f"the process of rank {rank} ended early", None, "a result", f"exit code {code}")


def _precedence(error: object) -> int:
    """Which of several errors tells the cause: a rank's own, then a death, then another rank's failure, then what
    follows from a peer that is gone."""
    if not isinstance(error, StepgraphError):
        return 3
    return {"E612": 1, "E607": 2}.get(error.diagnostics[0].code, 0)

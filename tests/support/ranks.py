"""Runs a function in one process a rank, in a gloo group, and gathers what each gives."""

import os
import socket
import traceback
from collections.abc import Callable

import torch
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _worker(rank: int, world: int, port: int, work: Callable[[int], object], results: "mp.SimpleQueue[object]") -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    try:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
        results.put((rank, work(rank), ""))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception:
        results.put((rank, None, traceback.format_exc()))


def on_ranks(world: int, work: Callable[[int], object], seconds: float = 120) -> list[object]:
    """``work(rank)`` of every rank, in order. Raises RuntimeError with the traceback of the first that failed."""
    context = mp.get_context("spawn")
    results = context.Queue()
    port = free_port()
    processes = [context.Process(target=_worker, args=(rank, world, port, work, results)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        found: dict[int, object] = {}
        for _ in range(world):
            rank, value, error = results.get(timeout=seconds)
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            found[rank] = value
        return [found[rank] for rank in range(world)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()

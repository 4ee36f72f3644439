"""Ranks for tests on a GPU: processes that stay, so that a test does not pay for their start."""

import atexit
import functools
import os
import queue
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable

import torch
import torch.multiprocessing as mp

from stepgraph.runtime.launch import be_rank, free_port

START_AND_TEST = 90.0
"""Seconds."""


def _serve(
    rank: int, world: int, port: int, tasks: "mp.Queue[Callable[[int], object]]", results: "mp.Queue[object]"
) -> None:
    be_rank(rank, world, port)
    while True:
        work = tasks.get()
        try:
            results.put((rank, work(rank), ""))
        except Exception:
            results.put((rank, None, traceback.format_exc()))


class Ranks:
    """A gloo group of processes. After an error it is of no more use."""

    def __init__(self, world: int, environment: dict[str, str]) -> None:
        self.world = world
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(world)]
        port = free_port()
        before = dict(os.environ)
        os.environ.update(environment)
        self.processes = [
            context.Process(target=_serve, args=(rank, world, port, self.tasks[rank], self.results), daemon=True)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()
        os.environ.clear()
        os.environ.update(before)

    def run(self, work: Callable[[int], object], seconds: float) -> list[object]:
        for tasks in self.tasks:
            tasks.put(work)
        found: dict[int, object] = {}
        for _ in range(self.world):
            try:
                rank, value, error = self.results.get(timeout=seconds)
            except queue.Empty:
                late = sorted(set(range(self.world)) - set(found))
                raise RuntimeError(f"ranks {late} gave nothing in {seconds} s") from None
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            found[rank] = value
        return [found[rank] for rank in range(self.world)]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


_kept: dict[int, Ranks] = {}


def own_gpus(world: int) -> bool:
    """Whether every rank has a GPU of its own, and so the group NCCL."""
    return torch.cuda.device_count() >= world


@functools.cache
def mps() -> dict[str, str]:
    """Starts CUDA's multi-process service, where it is there; gives the environment of its clients. Without it the
    driver takes turns between processes."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return {}
    folder = tempfile.mkdtemp()
    found = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in found.values():
        os.mkdir(path)
    environment = {**os.environ, **found}
    if subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=False).returncode:
        return {}
    atexit.register(_end, environment)
    return found


def _end(environment: dict[str, str]) -> None:
    for ranks in _kept.values():
        ranks.end()
    subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, timeout=10, check=False)


def on_ranks(world: int, work: Callable[[int], object], seconds: float = START_AND_TEST) -> list[object]:
    """``work(rank)`` of every rank, in order. Raises RuntimeError with the traceback of the first that failed."""
    if world not in _kept:
        _kept[world] = Ranks(world, mps())
    try:
        return _kept[world].run(work, seconds)
    except BaseException:
        _kept.pop(world).end()
        raise


def on_fresh_ranks(world: int, work: Callable[[int], object], seconds: float = START_AND_TEST) -> list[object]:
    """As ``on_ranks``, in processes of their own and without the multi-process service: for what may break them."""
    ranks = Ranks(world, {})
    try:
        return ranks.run(work, seconds)
    finally:
        ranks.end()

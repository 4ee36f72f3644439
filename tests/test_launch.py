"""How ranks are started, and how they end with who has started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepgraph.runtime import launch

ROOT = Path(__file__).parents[1]
WAITS = """
import os, time
from stepgraph.runtime.launch import on_ranks

def work(rank):
    os.write(1, f"RANK {os.getpid()}\\n".encode())
    time.sleep(300)

if __name__ == "__main__":
    on_ranks(2, work)
"""


@pytest.mark.parametrize(
    ("told", "gpu", "backend"),
    [
        ({}, 3, "gloo"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, "cpu:gloo,cuda:nccl"),
        ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, 1, "gloo"),
    ],
)
def test_every_rank_takes_a_gpu_of_its_own_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], gpu: int, backend: str
) -> None:
    """Without a word of which ranks are on this machine, as by hand: all, or they would share the first GPU."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "7", "WORLD_SIZE": "8", **told}.items():
        monkeypatch.setenv(name, value)
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", taken.append)
    launch.join_group()
    assert taken == [gpu, backend]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not dist.is_gloo_available() or not Path("/proc").is_dir(), reason="needs gloo and /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_who_has_started_them(tmp_path: Path, how: signal.Signals) -> None:
    """Else they would wait for their peers for ever, with the GPU's memory."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ranks = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
        try:
            parent.send_signal(how)
            limit = time.monotonic() + 20
            while any(map(is_running, ranks)) and time.monotonic() < limit:
                time.sleep(0.1)
            assert not any(map(is_running, ranks))
        finally:
            for rank in filter(is_running, ranks):
                os.kill(rank, signal.SIGKILL)

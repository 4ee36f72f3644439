"""``stepgraph bench peers``: the check over peers without a GPU, what it relates to, and on a GPU the whole command."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist

from stepgraph.runtime.launch import on_ranks
from stepgraph.tools import cli
from stepgraph.tools.peers.check import APART, LAYERS, check
from stepgraph.tools.peers.exchange import HEAD_DIM, SHAPES, AllToAll, Shape, sent_bytes
from stepgraph.tools.peers.report import Beside

from support.host_gpu import on_host_gpus

SMALL = Shape("small", 6, 7)
TENSOR = Shape("small, tensor", 6, 5, tensor=2)


def checked(shape: Shape, handshake: str, rank: int) -> tuple[int, int, bool]:
    found = check(shape, handshake, APART + 2, rank)
    return found.exchanges, found.wrong, found.noticed


@pytest.mark.parametrize(
    ("shape", "ranks", "handshake"), [(SMALL, 2, "memop"), (SMALL, 3, "kernel"), (TENSOR, 4, "copy")]
)
def test_exchanges_of_new_data_are_right(shape: Shape, ranks: int, handshake: str) -> None:
    found = on_host_gpus(ranks, partial(checked, shape, handshake))
    assert found == [((APART + 2) * LAYERS, 0, True)] * ranks


def loses_a_copy(rank: int) -> tuple[int, int, bool]:
    """As ``checked``, where one copy of a replay is left out."""
    from stepgraph.kernels import copy2d
    from stepgraph.runtime.transport import mapped

    assert mapped
    copies, enqueue = 0, copy2d.enqueue

    def leaves_one_out(copy: copy2d.Copy2D, stream: int) -> None:
        nonlocal copies
        copies += 1
        if copies != 100 or rank != 1:
            enqueue(copy, stream)

    copy2d.enqueue = leaves_one_out
    return checked(SMALL, "memop", rank)


def test_a_lost_copy_is_noticed() -> None:
    (_, first, _), (_, second, _) = on_host_gpus(2, loses_a_copy)
    assert first + second == 1


def exchanged(rank: int) -> bool:
    torch.manual_seed(rank)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    plain = AllToAll(Shape("small", 3, 4), group, torch.device("cpu"))
    every = [torch.empty_like(plain.fused) for _ in range(2)]
    dist.all_gather(every, plain.fused)
    wanted = torch.cat(every).transpose(0, 1)[:, :, 2 * rank : 2 * rank + 2]
    return torch.equal(plain.exchange(), wanted)


def test_the_all_to_all_brings_each_rank_its_heads() -> None:
    assert on_ranks(2, exchanged) == [True, True]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_are_what_a_rank_has(shape: Shape, ranks: int) -> None:
    plan = shape.plan(ranks, "memop", LAYERS)
    tensor = shape.tensor if ranks >= 2 * shape.tensor else 1
    others = sum(sent_bytes(plan, rank) for rank in range(ranks))
    ulysses = ranks // tensor
    assert plan.world_size == ranks
    assert others == ranks * 3 * shape.rows * shape.heads * HEAD_DIM * 2 * (ulysses - 1) // ulysses


def test_what_is_hidden() -> None:
    assert Beside("", "", exchange=2.0, gemm=3.0, both=3.0).hidden == 1
    assert Beside("", "", exchange=2.0, gemm=3.0, both=5.0).hidden == 0


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.run(["bench", "peers"]) == 3
    assert "E601" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.xdist_group("gpu")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the multi-process service, where ranks share a GPU: slow."""
    command = ["bench", "peers", "--ranks", "2", "--rounds", "1", "--steps", "1", "--replays", "5", "--format", "json"]
    assert cli.run(command) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"]
    assert len(data["beside"]) == 3 * len(SHAPES)
    assert all(row["ms"] > 0 for row in data["rows"])
    assert data["loss"]["told"].startswith("E612")
    assert data["loss"]["waited"] == [0]
    traces = [trace for traced in data["traces"].values() for trace in traced.values()]
    assert len(traces) == 3 * len(SHAPES)
    assert all(any("emcpy" in name for name in trace) for trace in traces)
    assert all(count and micros for trace in traces for count, micros in trace.values())

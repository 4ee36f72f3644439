"""The cuda device: several processes, one a rank, that may share one GPU; captured, eager, cpu and unsharded agree."""

import json
import os
import random
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from stepgraph.kernels.stages import MadeUpStages, Stage
from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan, Run
from stepgraph.runtime.compare import compare
from stepgraph.runtime.denoise import denoise, sigma_pairs
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import report_of, schedule_of
from stepgraph.tools import cli

from support.ranks import on_fresh_ranks, on_ranks, own_gpus
from support.sizes import SHIPPED, small_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 3
COPIES = {f"defaults__{kind}__via": "copy" for kind in ("gather", "all_gather", "all_reduce")}
CPU_TOLERANCE = 1e-4
"""Of float32 steps on the GPU against the cpu device, by the largest output."""


def run_all(plans: list[Plan], rank: int) -> list[object]:
    from stepgraph.runtime.rank_run import run_rank

    return [run_rank(plan, STEPS, 0, eager=False) for plan in plans]


def on_cpu(plan: Plan) -> list[tuple[torch.Tensor, ...]]:
    seen: list[tuple[torch.Tensor, ...]] = []
    inputs = random_inputs(plan, 0)
    with torch.no_grad(), Session(plan, device="cpu", seed=0) as session:
        session.drive(lambda rank: denoise(plan, inputs, sigma_pairs(STEPS), seen if rank == 0 else []))
    return seen


def run_and_compare(plans: list[Plan]) -> list[object]:
    """Runs plans of one size; gives their reports. Replays equal the eager steps bit for bit, what moved is exact, and
    every step is near the unsharded model and the cpu device."""
    every = on_ranks(plans[0].world_size, partial(run_all, plans))
    reports = []
    for number, plan in enumerate(plans):
        runs = [found[number] for found in every]
        report = report_of(plan, STEPS, 0, runs, torch.device("cpu"))
        assert report.ok, (plan.transport, report)
        for got, want in zip(runs[-1].outputs, on_cpu(plan), strict=True):
            for one, two in zip(got, want, strict=True):
                assert (one - two).abs().max() <= CPU_TOLERANCE * two.abs().max()
        reports.append(report)
    return reports


def sizes_of(name: str) -> dict[int, dict[str, str]]:
    """Settings for 2, 4 and 8 ranks. A rank needs a head for each chunk."""
    tensor = 2 if "tp2" in name else 1
    heads = {"model__heads": "17"} if "chunks" in name else {}
    return {ranks: {"mesh__ulysses": str(ranks // tensor), **heads} for ranks in (2, 4, 8)}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "nccl_baseline_u4"])
def test_shipped_schedules_over_both_mappings(name: str, ranks: int) -> None:
    settings = {"model__dtype": "float32", **COPIES, **sizes_of(name)[ranks]}
    plans = [small_plan(name, defaults__transport=transport, **settings) for transport in ("symmetric", "ipc")]
    for plan, report in zip(plans, run_and_compare(plans), strict=True):
        assert report.facts.transport == plan.transport
        assert report.captured_equals_eager
        assert report.movements_checked > 0
        items, nodes = plan.ranks[0].instructions, report.facts.nodes
        copies = sum(plan.ranks[i.peer].buffers[i.target].batch for i in items if i.do == "send")
        stored = (plan.ranks[0].views[i.view].buffer for i in items if i.do == "store")
        copies += sum(plan.ranks[0].buffers[buffer].batch for buffer in stored if buffer < len(plan.targets))
        handshakes = sum(item.do == "signal" for item in items)
        assert report.facts.planned_nodes == {"batch_mem_op": handshakes, "memcpy": copies}
        assert nodes["batch_mem_op"] == handshakes
        assert nodes["memcpy"] >= copies


@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_handshakes(handshake: str) -> None:
    plans = [
        small_plan("uneven_u4", defaults__transport=transport, defaults__handshake=handshake)
        for transport in ("symmetric", "ipc")
    ]
    for report in run_and_compare(plans):
        assert report.captured_equals_eager
        assert ("kernel" in report.facts.planned_nodes) == (handshake == "kernel")


def test_bfloat16() -> None:
    plan = small_plan("minimax_h3_u4", model__dtype="bfloat16", **COPIES)
    (found,) = zip(*on_ranks(4, partial(run_all, [plan])), strict=True)
    report = report_of(plan, STEPS, 0, list(found), torch.device("cpu"))
    assert report.ok, report
    assert report.captured_equals_eager


def test_collectives_are_captured_unless_the_group_is_on_the_host() -> None:
    """The serial baseline, and a plan of sends over the transport that needs no peer's memory. Where ranks share a GPU
    the group is gloo's, which can't be captured: this is told, and the results are the same."""
    plans = [
        small_plan("nccl_baseline_u4", model__dtype="float32"),
        small_plan("minimax_h3_tp2_u2", model__dtype="float32"),
        small_plan("quickstart", defaults__transport="nccl"),
        small_plan("uneven_u4", defaults__transport="nccl"),
        small_plan("flux_1024_u4", model__dtype="float32", defaults__transport="nccl"),
    ]
    for report in run_and_compare(plans):
        if own_gpus(4):
            assert report.facts.eager_because == ""
            assert report.captured_equals_eager
        else:
            assert "gloo moves data through the host" in report.facts.eager_because
            assert report.captured_equals_eager is None


def test_fallback_gives_the_same_bits() -> None:
    plans = [small_plan("uneven_u4", defaults__transport=transport) for transport in ("symmetric", "nccl")]
    mapped, fallback = zip(*on_ranks(4, partial(run_all, plans)), strict=True)
    for one, two in zip(mapped, fallback, strict=True):
        for step, same in zip(one.outputs, two.outputs, strict=True):
            assert torch.equal(step[0], same[0])


# Reading the graph back (CASES 29)


def dropped(plan: Plan, what: str, rank: int) -> str:
    """What reading the graph back says when a captured step lacks one copy, handshake, or wait for an event."""
    from stepgraph.runtime.cuda import CudaRank

    original = getattr(CudaRank, what)
    seen = 0

    def skipping(self: CudaRank, number: int, item: object) -> None:
        nonlocal seen
        seen += self.capturing
        if seen != 3:
            original(self, number, item)

    setattr(CudaRank, what, skipping)
    try:
        with Session(plan, device="cuda", seed=0):
            return "accepted"
    except StepgraphError as error:
        return str(error)
    finally:
        setattr(CudaRank, what, original)


DROPS = [("send", "memop"), ("wait_event", "memop"), ("reset", "memop"), ("reset", "copy")]
DROPS += [(what, handshake) for what in ("signal", "wait") for handshake in ("memop", "copy", "kernel")]


@pytest.mark.parametrize(("what", "handshake"), DROPS)
def test_what_is_dropped_under_capture_is_read_back(what: str, handshake: str) -> None:
    plan = small_plan("quickstart", mesh__ulysses="2", defaults__handshake=handshake)
    for told in on_ranks(2, partial(dropped, plan, what)):
        assert isinstance(told, str)
        assert "E608" in told, told


def redirected(plan: Plan, part: str, rank: int) -> str:
    """As ``dropped``, where one captured copy starts or ends somewhere else, or takes other rows."""
    from dataclasses import replace

    from stepgraph.kernels import copy2d

    original, seen = copy2d.enqueue, 0

    def further(copy: copy2d.Copy2D, stream: int) -> None:
        nonlocal seen
        seen += torch.cuda.is_current_stream_capturing()
        original(replace(copy, **{part: getattr(copy, part) + 16}) if seen == 3 else copy, stream)

    copy2d.enqueue = further
    try:
        with Session(plan, device="cuda", seed=0):
            return "accepted"
    except StepgraphError as error:
        return str(error)
    finally:
        copy2d.enqueue = original


@pytest.mark.parametrize("part", ["destination", "source", "destination_pitch", "source_pitch"])
def test_a_copy_that_is_not_the_planned_one_is_read_back(part: str) -> None:
    for told in on_ranks(2, partial(redirected, small_plan("quickstart", mesh__ulysses="2"), part)):
        assert isinstance(told, str)
        assert "E608" in told, told


# Commands


class WrongMlp(MadeUpStages):
    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        stage, op = super().__call__(plan, rank, run), plan.ops[run.op]
        wrong = ".mlp" in op.name and op.layer == 1 and rank == 1
        return (lambda tensors: [stage(tensors)[0] * 1.01]) if wrong else stage


def test_compare_op_by_op_with_captured_steps() -> None:
    plan = small_plan("flux_1024_u4", model__dtype="float32")
    assert [row for row in compare(plan, 0, "cuda") if row.differs] == []
    first = next(row for row in compare(plan, 0, "cuda", WrongMlp) if row.differs)
    assert first.where == "dual.mlp.img[1]"


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--set=shape.seq=21,model.layers=2"
    assert cli.run(["run", "quickstart", "--ranks", "2", "--steps", "2", "--format", "json", small]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["device"], data["ranks"], data["captured_equals_eager"]) == ("cuda", 2, True)
    assert data["capture"]["nodes"]["batch_mem_op"] == data["capture"]["planned_nodes"]["batch_mem_op"] > 0
    assert data["capture"]["pool_bytes"] > 0
    assert cli.run(["run", "quickstart", "--ranks", "2", "--steps", "2", "--eager", small]) == 0
    assert "not captured     eager was asked for" in capsys.readouterr().out
    assert cli.run(["run", "minimax_h3_u4", "--solo", small]) == 3
    assert "defaults.gather.via=copy" in capsys.readouterr().err


def test_torchrun() -> None:
    """Each process that torchrun starts is a rank; one tells the result."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "stepgraph.tools.cli"]
    done = subprocess.run(
        [*torchrun, "run", "quickstart", "--ranks", "2", "--steps", "2", "--format", "json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["ok"]
    assert (data["ranks"], data["captured_equals_eager"]) == (2, True)


@pytest.mark.exhaustive
def test_minimax_h3_alone_at_its_true_shape_and_depth(capsys: pytest.CaptureFixture[str]) -> None:
    copy = "--set=defaults.gather.via=copy"
    assert cli.run(["run", "minimax_h3_u4", "--solo", "--steps", "10", "--format", "json", copy]) == 0
    data = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        print("\n", {key: value for key, value in data.items() if key != "capture"}, data["capture"])
    assert data["peak_bytes"] < 139 << 30
    assert data["capture"]["nodes"]["batch_mem_op"] == data["capture"]["planned_nodes"]["batch_mem_op"] == 101


# Replays (CASES 1, 7, 12)


def fresh_inputs(plan: Plan, number: int, first: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs of replay ``number``: everything but tables is new."""
    generator = torch.Generator("cuda").manual_seed(number)
    return {
        name: tensor
        if name == "rope"
        else torch.randn(tensor.shape, generator=generator, device="cuda").to(tensor.dtype)
        for name, tensor in first.items()
    }


def jittered(plan: Plan, replays: int, rank: int) -> tuple[int, int, float]:
    """Of many replays with fresh data and random delays of this rank's host: how many differ from rank 0's word for it
    in any bit, how many of rank 0's are not near the unsharded model, and seconds a replay."""
    delays = random.Random(rank)
    outputs = []
    with Session(plan, device="cuda", seed=0) as session:
        step = session.capture()
        first = {name: tensor.cuda() for name, tensor in random_inputs(plan, 0).items()}
        started = time.perf_counter()
        for number in range(replays):
            inputs = fresh_inputs(plan, number, first)
            if delays.random() < 0.1:
                time.sleep(delays.random() * 0.01)
            output = step(**inputs)
            assert isinstance(output, torch.Tensor)
            outputs.append(output)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / replays
    mine = torch.stack(outputs)
    theirs = mine.cpu()
    dist.broadcast(theirs, 0)
    differ = int((mine.cpu().view(torch.uint8) != theirs.view(torch.uint8)).flatten(1).any(1).sum())
    wrong = 0
    if rank == 0:
        model = Unsharded(schedule_of(plan), 0, torch.float64, torch.device("cuda"))
        for number in range(replays):
            (want,) = model(fresh_inputs(plan, number, first))
            error = (mine[number].double() - want).abs().max() / want.abs().max()
            wrong += not error < CPU_TOLERANCE
    dist.barrier()
    return differ, wrong, seconds


@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_replays_with_random_delays(handshake: str) -> None:
    """CASES 1: each replay has fresh data and is checked, while ranks run ahead of each other."""
    plan = small_plan("quickstart", defaults__handshake=handshake)
    for differ, wrong, _ in on_ranks(4, partial(jittered, plan, 100)):
        assert differ == wrong == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_a_thousand_replays_of_sixty_layers_on_eight_ranks(handshake: str) -> None:
    plan = small_plan("quickstart", model__layers="60", mesh__ulysses="8", defaults__handshake=handshake)
    found = on_ranks(8, partial(jittered, plan, 1000 if handshake == "memop" else 100), seconds=500)
    print(f"\n{handshake}: 8 ranks, 60 layers, {1e3 * found[0][2]:.1f} ms a replay with the service")
    assert [one[:2] for one in found] == [(0, 0)] * 8


@pytest.mark.exhaustive
def test_sixty_layers_without_the_service() -> None:
    plan = small_plan("quickstart", model__layers="60", mesh__ulysses="8")
    found = on_fresh_ranks(8, partial(jittered, plan, 20), seconds=400)
    shared = on_ranks(8, partial(jittered, plan, 20), seconds=400)
    ratio = found[0][2] / shared[0][2]
    print(f"\nwithout the service: {1e3 * found[0][2]:.1f} ms a replay, {ratio:.1f} times as long as with it")
    assert [one[:2] for one in found] == [(0, 0)] * 8


def many(plan: Plan, replays: int, rank: int) -> tuple[int, float]:
    """How many of many replays of a small plan differ in any bit from what the eager step makes of the same inputs,
    and seconds a replay. No replay has the inputs of the one before it."""
    kinds, order = 97, random.Random(5)
    with Session(plan, device="cuda", seed=0, eager=True) as session:
        step = session.capture()
        first = {name: tensor.cuda() for name, tensor in random_inputs(plan, 0).items()}
        inputs = [fresh_inputs(plan, number, first) for number in range(kinds)]
        wanted = [step(**found) for found in inputs]
    assert len({tuple(want.flatten()[:8].tolist()) for want in wanted}) == kinds
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    delays, last = random.Random(rank), 0
    with Session(plan, device="cuda", seed=0) as session:
        step = session.capture(outputs="view")
        started = time.perf_counter()
        for number in range(replays):
            last = (last + order.randrange(1, kinds)) % kinds
            if delays.random() < 0.001:
                time.sleep(delays.random() * 0.01)
            output = step(**inputs[last])
            wrong += (output != wanted[last]).any()
            if number % 1000 == 0:
                torch.cuda.synchronize()  # a host that is far ahead tells nothing
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / replays
    return int(wrong), seconds


def test_many_replays_of_a_small_plan() -> None:
    plan = small_plan("quickstart", mesh__ulysses="2", model__layers="1")
    assert [wrong for wrong, _ in on_ranks(2, partial(many, plan, 2000))] == [0, 0]


@pytest.mark.exhaustive
def test_a_hundred_thousand_replays_of_a_small_plan() -> None:
    plan = small_plan("quickstart", mesh__ulysses="2", model__layers="1")
    found = on_ranks(2, partial(many, plan, 100_000), seconds=400)
    print(f"\n2 ranks, 1 layer: {1e6 * found[0][1]:.0f} us a replay")
    assert [wrong for wrong, _ in found] == [0, 0]

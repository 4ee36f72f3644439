"""What ranks tell each other, and how they are started, in gloo groups of processes without a GPU."""

import inspect
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, StepgraphError
from stepgraph.planner.schedule import read_schedule
from stepgraph.runtime import group
from stepgraph.runtime.bindings import ParameterWatch
from stepgraph.runtime.executor import issued_together
from stepgraph.runtime.launch import LaunchError, on_ranks
from stepgraph.runtime.transport.collective import all_to_all

from support.sizes import small_plan

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
ROOT = Path(__file__).parents[1]


class Fake:
    """A transport of which only the vote is real."""

    def __init__(self, name: str, missing_on: int | None = None, hangs: bool = False) -> None:
        self.name, self.missing_on, self.hangs = name, missing_on, hangs
        self.one_host = name == "near"

    def unavailable(self) -> str | None:
        return "it is broken here" if dist.get_rank() == self.missing_on else None


def attempt(transport: Fake) -> None:
    if transport.hangs:
        raise group.SelfTestError(
            [Diagnostic("E611", "the second replay did not finish in time", None, "", "on rank 1")]
        )


def vote(rank: int) -> tuple[str, tuple[str, ...]]:
    choices = (Fake("first", missing_on=1), Fake("second", hangs=True), Fake("third"))
    found, passed_over = group.choose("auto", choices, attempt)
    return found.name, passed_over


def test_ranks_take_the_first_transport_that_all_have_and_that_passes_its_self_test() -> None:
    """CASES 16, 17: one rank lacks the first, the second hangs."""
    reasons = ("first: rank 1: it is broken here", "second: the second replay did not finish in time, on rank 1")
    assert on_ranks(2, vote) == [("third", reasons)] * 2


def on_two_machines(rank: int) -> tuple[str, tuple[str, ...]]:
    original, group.host = group.host, lambda: f"machine {dist.get_rank()}"
    try:
        found, passed_over = group.choose("auto", (Fake("near"), Fake("far")), attempt)
    finally:
        group.host = original
    return found.name, passed_over


def test_transports_of_one_machine_are_passed_over_where_ranks_are_on_two() -> None:
    reason = "near: reaches the GPUs of one machine, and the ranks are on 2"
    assert on_ranks(2, on_two_machines) == [("far", (reason,))] * 2


def no_choice(rank: int) -> str:
    with pytest.raises(CapabilityError) as error:
        group.choose("first", (Fake("first", missing_on=1), Fake("second")), attempt)
    return str(error.value)


def test_no_transport_that_all_have() -> None:
    for told in on_ranks(2, no_choice):
        assert "E606" in told
        assert "first: rank 1: it is broken here; second: the schedule wants first" in told


def disagree(rank: int) -> str:
    layers = str(2 + rank)
    with pytest.raises(group.GroupError) as error:
        group.check_group([small_plan("quickstart", mesh__ulysses="2", model__layers=layers)])
    return str(error.value)


def test_ranks_with_other_plans_are_told_both_sides() -> None:
    """CASES 18."""
    first, second = on_ranks(2, disagree)
    assert first == second
    assert "as on rank 0" in first
    assert "on rank 1" in first


def other_settings(rank: int) -> str:
    """What a session compares before it makes anything, for stages that are compiled on one rank only."""
    names = ("a",) if rank == 1 else ()
    text = "version: 1\nname: one\nmodel: {layers: 1, hidden: 8, heads: 2, head_dim: 4, ffn: 8, dtype: float32}\n"
    text += "mesh: {ulysses: 2}\nshape: {batch: 1, seq: 4}\ninputs: {x: {shape: [batch, seq, 8]}}\noutputs: [y]\n"
    text += "step:\n  - call: {name: a, in: x, out: y, like: x}\n"
    plan = compile_schedule(read_schedule(text, "one.yaml"))
    sizes = {"model.heads": 2, "model.head_dim": 4}
    binding = stepgraph.Binding("mine", {}, {"step.a": lambda model, x: model(x)}, lambda model: sizes)
    bound = stepgraph.bind(torch.nn.Linear(8, 8), plan, binding, [f"step.{name}" for name in names])
    with pytest.raises(group.GroupError) as error:
        group.agree("versions and mode", bound.description())
    return str(error.value)


def test_ranks_that_compile_other_stages_are_told() -> None:
    """CASES 33."""
    for told in on_ranks(2, other_settings):
        assert "E607: ranks disagree on versions and mode" in told
        assert "compiled: nothing" in told
        assert "compiled: step.a" in told


def too_few(rank: int) -> str:
    with pytest.raises(group.GroupError) as error:
        group.check_group([small_plan("quickstart")])
    return str(error.value)


def test_a_group_of_another_size() -> None:
    for told in on_ranks(2, too_few):
        assert "4 ranks" in told
        assert "2 processes" in told


def one_fails(rank: int) -> str:
    def work() -> int:
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return 7

    assert group.together("counting", lambda: 7) == 7
    with pytest.raises(StepgraphError) as error:
        group.together("allocating the arena", work)
    return str(error.value)


def test_what_fails_on_one_rank_fails_on_all() -> None:
    """CASES 19, its first half: nobody is left waiting for a rank that ran out of memory."""
    first, second = on_ranks(2, one_fails)
    assert "E607: rank 1 failed at allocating the arena" in first
    assert "no memory" in first
    assert "E606: no memory for allocating the arena" in second


def one_breaks(rank: int) -> tuple[str, str, str]:
    """What a rank sees where an error that is not ours comes up on rank 1."""
    told = []
    for run, error in (
        (group.together, RuntimeError("CUDA: an illegal address")),
        (group.together, KeyError("weight")),
        (group.attempt, RuntimeError("no handle")),
    ):

        def work(error: Exception = error) -> None:
            if rank == 1:
                raise error

        with pytest.raises((StepgraphError, KeyError)) as found:
            run("mapping", work)
        told.append(f"{type(found.value).__name__}: {found.value}")
    return told[0], told[1], told[2]


def test_any_error_of_one_rank_is_told_to_all() -> None:
    first, second = on_ranks(2, one_breaks)
    assert "E607: rank 1 failed at mapping" in first[0]
    assert "CapabilityError" in second[0]
    assert "an illegal address" in second[0]
    assert "E607: rank 1 failed at mapping" in first[1]
    assert second[1] == "KeyError: 'weight'"
    for told in (first[2], second[2]):
        assert "SelfTestError" in told
        assert "rank 1: E606 mapping failed: RuntimeError: no handle" in told


def exchange(dtype: torch.dtype, rank: int) -> bool:
    """Uneven strided parts, several to a member, some empty."""
    world = dist.get_world_size()

    def part(sender: int, receiver: int, nth: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * sender + 10 * receiver + nth)
        return torch.randn((1, (sender + receiver * 2 + nth) % 4, 3), generator=generator).to(dtype)

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*tensor.shape[:2], 7), float("nan"), dtype=dtype)
        wide[..., 2:5] = tensor
        return wide[..., 2:5]

    outgoing = [[strided(part(rank, peer, nth)) for nth in range(2)] for peer in range(world)]
    incoming = [
        [strided(torch.full_like(part(peer, rank, nth), float("nan"))) for nth in range(2)] for peer in range(world)
    ]
    all_to_all(dist.group.WORLD, outgoing, incoming)
    return all(torch.equal(incoming[peer][nth], part(peer, rank, nth)) for peer in range(world) for nth in range(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_all_to_all_of_uneven_parts(dtype: torch.dtype) -> None:
    assert on_ranks(3, partial(exchange, dtype)) == [True] * 3


def tensors(rank: int) -> list[torch.Tensor]:
    return [torch.full((3, 2), float(rank)) for _ in range(50)]


def test_tensors_outlive_the_processes_that_made_them() -> None:
    for rank, found in enumerate(on_ranks(2, tensors)):
        assert all(torch.equal(tensor, torch.full((3, 2), float(rank))) for tensor in found)


def refuses(rank: int) -> None:
    if rank == 1:
        raise CapabilityError([Diagnostic("E606", "no", None, "this", "that", "do")])


def dies(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def test_errors_of_ranks_reach_who_started_them() -> None:
    with pytest.raises(CapabilityError) as error:
        on_ranks(2, refuses)
    assert error.value.diagnostics == (Diagnostic("E606", "no", None, "this", "that", "do"),)
    with pytest.raises(LaunchError, match="E612: the process of rank 1 ended early"):
        on_ranks(2, dies)


def test_torchrun_starts_ranks() -> None:
    """Each process that torchrun starts is a rank: one joins the group that the environment describes."""
    code = (
        "import torch.distributed as dist; from stepgraph.runtime.launch import run_ranks;"
        "found = run_ranks(2, lambda rank: rank * 10 + dist.get_world_size());"
        "print('FOUND', found) if found is not None else None"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    result = subprocess.run(
        [*torchrun, sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.count("FOUND") == 1, result.stderr
    assert "FOUND [2, 12]" in result.stdout


def test_parameters_are_watched_by_address() -> None:
    """CASES 37: changed in place is fine; swapped, resized or dropped is named."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    watch = ParameterWatch(module)
    with torch.no_grad():
        module[0].weight.mul_(2)
    watch.check()
    module[0].bias.data = torch.zeros(4)
    with pytest.raises(StepgraphError, match=r"E609: the parameter '0.bias' is not what"):
        watch.check()
    watch = ParameterWatch(module)
    module[1] = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))  # what LoRA does
    with pytest.raises(StepgraphError, match=r"E609: the parameter '1.weight' and 1 more (.|\n)*it is gone"):
        watch.check()
    ParameterWatch(object()).check()


def test_buffers_are_watched_like_parameters() -> None:
    module = torch.nn.BatchNorm1d(4)
    watch = ParameterWatch(module)
    watch.check()
    module.running_mean = torch.zeros(4)
    with pytest.raises(StepgraphError, match=r"E609.*running_mean"):
        watch.check()


def test_what_is_issued_together() -> None:
    """A signal, wait and reset that follow each other are one; two handshakes are two."""
    plan = small_plan("minimax_h3_tp2_u2", defaults__all_reduce__via="copy", defaults__gather__via="copy")
    items = plan.ranks[0].instructions
    pieces = issued_together(items)
    assert [number for piece in pieces for number in piece] == list(range(len(items)))
    long = [[items[number].do for number in piece] for piece in pieces if len(piece) > 1]
    assert long == [["signal", "wait", "reset"]] * sum(item.do == "signal" for item in items)
    assert long


def ends_early(rank: int) -> None:
    if rank == 1:
        os._exit(0)


def test_a_rank_that_ends_well_without_a_result() -> None:
    with pytest.raises(LaunchError, match="E612: the process of rank 1 ended early"):
        on_ranks(2, ends_early)


def maps(fails: bool, rank: int) -> tuple[list[tuple[object, ...]], list[str]] | str:
    """The peers' blocks as the real transport opens them, by way of stand-ins for CUDA's handles: (who gave the handle,
    which of its handles, the GPU that it was opened for). With ``fails`` rank 1 can't give any."""
    from torch.multiprocessing import reductions

    from stepgraph.runtime.transport.ipc import DEVICE, IpcTransport

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[DEVICE] == "storage_device"
    opened.clear()
    given = []

    def reduce_tensor(block: torch.Tensor) -> tuple[object, tuple[object, ...]]:
        if fails and rank == 1:
            raise RuntimeError("CUDA: invalid argument")
        given.append(block)
        return opens, (rank, len(given), *names[2:DEVICE], "its own number", *names[DEVICE + 1 :])

    reductions.reduce_tensor = reduce_tensor  # in a process of this test alone
    transport, block = IpcTransport(torch.device("cuda", 5)), torch.zeros(8)
    try:
        memory = group.attempt("mapping peers' memory", lambda: transport.connect(block))
    except group.SelfTestError as error:
        return f"{error} {group.everyone(str(rank))}"  # the group's exchanges are as they were
    assert memory.pointers[rank] == block.data_ptr()
    return list(opened), group.everyone(str(rank))


opened: list[tuple[object, ...]] = []


def opens(*arguments: object) -> torch.Tensor:
    opened.append((*arguments[:2], arguments[6]))
    return torch.zeros(8)


def test_every_peer_has_a_handle_of_its_own_and_opens_it_for_its_own_gpu() -> None:
    """torch counts one importer a handle; peers may number GPUs in other ways."""
    found = on_ranks(3, partial(maps, False))
    assert [blocks for blocks, _ in found] == [
        [(1, 1, 5), (2, 1, 5)],
        [(0, 1, 5), (2, 2, 5)],
        [(0, 2, 5), (1, 2, 5)],
    ]


def test_a_rank_that_has_no_handle_for_its_memory_is_told_to_all() -> None:
    for told in on_ranks(3, partial(maps, True)):
        assert "E611: mapping peers' memory failed" in told
        assert "the block of rank 1 has no handle: CUDA: invalid argument" in told
        assert "['0', '1', '2']" in told

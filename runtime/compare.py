"""Compares one sharded step with the unsharded model, op by op: the first op whose result differs is where to look."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.stages import MadeUpStages, Stage, StageMaker
from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner.compile import check_schedule
from stepgraph.planner.memory import MemoryPlan
from stepgraph.planner.opgraph import BRANCHES, Action, Node
from stepgraph.planner.plan import Plan, Run
from stepgraph.planner.shares import Shares
from stepgraph.planner.values import DimKind, Placement, Value
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import DeviceName, Session, cuda_lacks, need_cuda
from stepgraph.runtime.simulate import SLACK, held_against_schedule, schedule_of

MakeStages = Callable[[int, torch.device], StageMaker]
"""From a seed and a device."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one op read and made on a rank."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass
class Tap:
    """A stage maker that keeps what the stages of another one read and make. Under capture the copies are captured."""

    maker: StageMaker
    seen: dict[tuple[int, int], Seen] = field(default_factory=dict)
    """(rank, op) -> of its last run."""

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        stage, program = self.maker(plan, rank, run), plan.ranks[rank]
        outputs = [program.views[view] for view in run.outputs]
        made = program.made_by(run)

        def tapped(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            before = tuple(tensor.clone() for tensor in tensors)
            results = stage(tensors)
            after: list[Tensor] = []
            for number, view in zip(run.outputs, outputs, strict=True):
                if number in run.inputs:
                    after.append(tensors[run.inputs.index(number)].clone())
                    continue
                box, at = program.buffers[view.buffer], view.region
                whole = results[made.index(view.buffer)].reshape(box.batch, box.rows, box.cols)
                region = whole[:, at.row : at.row + at.rows, at.col : at.col + at.cols]
                after.append(region.clone(memory_format=torch.contiguous_format).view(view.shape))
            self.seen[rank, run.op] = Seen(before, tuple(after))
            return results

        return tapped

    def named_parameters(self) -> Sequence[tuple[str, Tensor]]:
        """Those of the other maker, where it tells them."""
        told = getattr(self.maker, "named_parameters", None)
        return list(told()) if told is not None else []


@dataclass(frozen=True, slots=True)
class Compared:
    """One value of the step: what an op made, or what an exchange brought."""

    op: str
    kind: str
    layer: int | None
    line: int
    value: str
    max_abs_error: float
    tolerance: float
    rank: int
    """Where the error is largest."""
    part: str
    """The branch of guidance, the chunk of heads, where there are several."""

    @property
    def differs(self) -> bool:
        return not self.max_abs_error <= self.tolerance  # true for NaN

    @property
    def where(self) -> str:
        layer = "" if self.layer is None else f"[{self.layer}]"
        return f"{self.op}{layer} {self.part}".rstrip()


def compare(
    plan: Plan, seed: int, device: DeviceName = "cpu", stages: MakeStages = MadeUpStages
) -> tuple[Compared, ...] | None:
    """Run one step on every rank, and hold every op's result against the unsharded model in float64, in the order of
    the schedule. Tolerances are those of ``simulate``, value by value. None in processes that are ranks other than 0.

    Raises:
        StepgraphError: as ``Session`` does.
    """
    if device == "cuda":
        need_cuda()
    if device == "cpu" or cuda_lacks():
        every = [_on_cpu(plan, seed, stages)]
    else:
        from stepgraph.runtime.launch import run_ranks

        found = run_ranks(plan.world_size, partial(_on_gpu, plan, seed, stages))
        if found is None:
            return None
        every = found
    seen = {key: value for part in every for key, value in part.items()}
    with held_against_schedule([plan]):
        return tuple(_Comparison(plan, seed, seen).rows())


def _on_cpu(plan: Plan, seed: int, stages: MakeStages) -> dict[tuple[int, int], Seen]:
    tap = Tap(stages(seed, torch.device("cpu")))
    with torch.no_grad(), Session(plan, device="cpu", seed=seed, stages=tap) as session:
        session.capture()(**random_inputs(plan, seed))
    return tap.seen


def _on_gpu(plan: Plan, seed: int, stages: MakeStages, rank: int) -> dict[tuple[int, int], Seen]:
    device = torch.device("cuda", torch.cuda.current_device())
    tap = Tap(stages(seed, device))
    with torch.no_grad(), Session(plan, device="cuda", seed=seed, stages=tap) as session:
        session.capture()(**{name: tensor.to(device) for name, tensor in random_inputs(plan, seed).items()})
        torch.cuda.synchronize()
        return {key: Seen(_host(found.inputs), _host(found.outputs)) for key, found in tap.seen.items()}


def _host(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.cpu() for tensor in tensors)


def share_of(whole: Tensor, value: Value, shares: Shares, rank: int, by_place: bool) -> Tensor:
    """What ``rank`` holds of a whole value. With ``by_place`` its rows lie as exchanges lay them down: those of the
    first place of every segment, then those of the second."""
    place, part = shares.coordinate(rank, "ulysses"), shares.coordinate(rank, "tensor")
    parts = shares.schedule.axis("tensor")
    for axis, dim in enumerate(value.form):
        if dim.kind is DimKind.SEQUENCE:
            cut = value.placement is Placement.SEQUENCE
            places = [place] if cut else range(shares.schedule.axis("ulysses"))
            if cut or by_place:
                rows = [_rows(whole, axis, dim.segments, shares, number) for number in places]
                whole = torch.cat(rows, dim=axis)
            continue
        if dim.split:
            whole = whole.narrow(axis, part * (dim.size // parts), dim.size // parts)
        if dim.kind is DimKind.HEADS and (value.placement is Placement.HEAD or dim.chunk):
            cut = value.placement is Placement.HEAD
            held = [place] if cut else range(shares.schedule.axis("ulysses"))
            ranges = [shares.head_range(dim.heads, number, dim.chunk) for number in held]
            whole = torch.cat([whole.narrow(axis, *found) for found in ranges], dim=axis)
    return whole


def _rows(whole: Tensor, axis: int, segments: Sequence[str], shares: Shares, place: int) -> Tensor:
    """The rows of a place, of all segments."""
    found, start = [], 0
    for name in segments:
        first, count = shares.rows[name][place]
        found.append(whole.narrow(axis, start + first, count))
        start += dict(shares.schedule.segments)[name]
    return torch.cat(found, dim=axis)


def base_of(node: Node) -> str:
    """The op of the schedule that a node belongs to: of a stage that ends an exchange, that of the exchange."""
    return node.name.removesuffix(".sum").removesuffix(".join")


_Key = tuple[str, int | None, int, str]
"""Op, layer, branch of guidance, value."""


class _Comparison:
    def __init__(self, plan: Plan, seed: int, seen: Mapping[tuple[int, int], Seen]) -> None:
        self.plan, self.seen = plan, seen
        schedule = schedule_of(plan)
        level: MemoryPlan = check_schedule(schedule)
        self.shares, self.graph = level.shares, level.streams.graph
        self.makers: dict[int, int] = {}
        """Value -> the node that makes it; of a send, the send, and not the handshake that closes it."""
        for number, node in enumerate(self.graph.nodes):
            for value in node.outputs:
                self.makers.setdefault(value, number)
        self.by_place: set[int] = set()
        """Values whose rows lie as an exchange has laid them down, and what is made of them."""
        inputs = random_inputs(plan, seed)
        self.exact = self._observe(Unsharded(schedule, seed), inputs)
        self.rounded = self._observe(Unsharded(schedule, seed, torch_dtype(plan.dtype)), inputs)

    def _observe(self, model: Unsharded, inputs: Mapping[str, Tensor]) -> dict[_Key, Tensor]:
        wanted: dict[tuple[str, int | None], set[str]] = {}
        for node in self.graph.nodes:
            names = {self.graph.values[value].name for value in node.outputs}
            wanted.setdefault((base_of(node), node.layer), set()).update(names)
        found: dict[_Key, Tensor] = {}

        def observe(op: str, layer: int | None, branch: int, tensors: Mapping[str, Tensor]) -> None:
            for name in wanted.get((op, layer), ()):
                if name in tensors:
                    found[op, layer, branch, name] = tensors[name]

        with torch.no_grad():
            model(inputs, observe)
        return found

    def rows(self) -> list[Compared]:
        found: list[Compared] = []
        brought: set[int] = set()
        for number, node in enumerate(self.graph.nodes):
            if node.kind in ("send", "all_gather"):
                self.by_place |= set(node.outputs)
            if node.action is not Action.RUN or node.kind == "repeat":
                continue
            if self.by_place & {value for _, value in node.inputs}:
                self.by_place |= set(node.outputs)
            for index, (_, value) in enumerate(node.inputs):
                maker = self.makers.get(value)
                if maker is None or value in brought:
                    continue  # another view of what is compared already
                if self.graph.nodes[maker].action in (Action.SEND, Action.COLLECTIVE):
                    brought.add(value)
                    found += self._row(maker, value, {r: s.inputs[index] for r, s in self._ranks(number).items()})
            for index, value in enumerate(node.outputs):
                found += self._row(number, value, {r: s.outputs[index] for r, s in self._ranks(number).items()})
        return found

    def _ranks(self, op: int) -> dict[int, Seen]:
        return {rank: self.seen[rank, op] for rank in range(self.plan.world_size)}

    def _whole(self, seen: Mapping[_Key, Tensor], node: Node, value: Value, rank: int) -> Tensor:
        """A value as the unsharded model has it, in the branch that the rank or the node is of, or of both."""
        schedule = self.graph.schedule
        branch = BRANCHES.index(node.branch) if node.branch else self.shares.coordinate(rank, "cfg")
        op, layer, name = base_of(node), node.layer, value.name
        if value.form and value.form[0].kind is DimKind.BATCH and value.form[0].size > schedule.batch:
            return torch.cat([seen[op, layer, number, name] for number in range(len(BRANCHES))])
        return seen[op, layer, branch, name]

    def _row(self, number: int, value_id: int, by_rank: Mapping[int, Tensor]) -> list[Compared]:
        """One row, or none for what has no counterpart in the unsharded model: blocks that are yet to be added."""
        node, value = self.graph.nodes[number], self.graph.values[value_id]
        if self.graph.memories[value.memory].copies > 1:
            return []
        worst, tolerance, where = 0.0, 0.0, 0
        for rank in by_rank:
            exact, rounded = (self._whole(seen, node, value, rank) for seen in (self.exact, self.rounded))
            got = by_rank[rank].double()
            if value.partial:
                got = torch.stack([by_rank[member].double() for member in self.shares.group(rank, "tensor")]).sum(0)
            want = share_of(exact, value, self.shares, rank, value_id in self.by_place)
            assert want.shape == got.shape, (node.name, value.name, want.shape, got.shape)
            if not want.numel():
                continue
            error = float((got - want).abs().max())
            off = (rounded.double() - exact).abs().max()
            eps = torch.finfo(torch_dtype(self.plan.dtype)).eps
            tolerance = max(tolerance, SLACK * float(off), 8 * eps * float(exact.abs().max()))
            if not math.isnan(worst) and not error <= worst:
                worst, where = error, rank
        line = self.plan.ops[number].line
        return [Compared(node.name, node.kind, node.layer, line, value.name, worst, tolerance, where, node.part)]

"""All that ``stepgraph bench peers`` does, and what it tells."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from stepgraph.runtime.launch import on_ranks
from stepgraph.tools.output import progress
from stepgraph.tools.peers.check import Checked, check
from stepgraph.tools.peers.exchange import HANDSHAKES, LAYERS, SHAPES, TRACED, Measured, measure
from stepgraph.tools.peers.loss import Loss, lose_one

if TYPE_CHECKING:
    from rich.console import Console

BASELINE = ("all-to-all, host-issued", "memop, host-issued")
"""What others are related to: the first that was measured."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of one shape: milliseconds an exchange, the median over rounds of the slowest rank."""

    shape: str
    way: str
    ms: float
    least: float
    most: float
    """Over rounds."""
    gigabytes_a_second: float
    """That a rank sends to others."""
    ratio: float
    """Of the baseline's time to its own; above 1 is faster."""


@dataclass(frozen=True, slots=True)
class Beside:
    """An exchange and a matrix product on parallel branches of a graph, in milliseconds."""

    shape: str
    handshake: str
    exchange: float
    gemm: float
    both: float

    @property
    def hidden(self) -> float:
        """The part of the shorter one that took no time of its own."""
        return (self.exchange + self.gemm - self.both) / min(self.exchange, self.gemm)


@dataclass(frozen=True, slots=True)
class PeerReport:
    ranks: int
    gpus: int
    gpu: str
    checks: Mapping[str, Mapping[str, Sequence[Checked]]]
    """Shape -> handshake -> what each rank saw."""
    rows: Sequence[Row]
    beside: Sequence[Beside]
    traces: Mapping[str, Mapping[str, Mapping[str, tuple[int, float]]]]
    """Of rank 0: see ``Measured``."""
    left_out: Mapping[str, str]
    loss: Loss

    @property
    def ok(self) -> bool:
        every = [one for found in self.checks.values() for ranks in found.values() for one in ranks]
        return all(one.wrong == 0 and one.noticed for one in every) and self.loss.goes_on

    def data(self) -> dict[str, object]:
        beside = [{**asdict(one), "hidden": one.hidden} for one in self.beside]
        return {**asdict(self), "ok": self.ok, "beside": beside}


def run_all(ranks: int, rounds: int, steps: int, replays: int) -> PeerReport:
    """Run every part on ``ranks`` ranks, in processes of their own.

    Raises:
        StepgraphError: as ``Session`` does.
    """
    progress(f"{replays} replays of each shape and handshake")
    saw = on_ranks(ranks, partial(_check_all, replays))
    checks = {
        shape.name: {handshake: [one[shape.name, handshake] for one in saw] for handshake in HANDSHAKES}
        for shape in SHAPES
    }
    progress(f"{rounds} x {steps} steps of each shape and way")
    measured = _slowest(on_ranks(ranks, partial(measure, SHAPES, rounds, steps)))
    progress("a rank that is killed")
    loss = lose_one(ranks)
    rows = _rows(measured)
    times = {(row.shape, row.way): row.ms for row in rows}
    beside = [
        Beside(
            shape.name,
            handshake,
            times[shape.name, f"{handshake}, captured"],
            times[shape.name, "gemm alone, captured"],
            times[shape.name, f"{handshake}, captured, beside a gemm"],
        )
        for shape in SHAPES
        for handshake in HANDSHAKES
    ]
    return PeerReport(
        ranks=ranks,
        gpus=torch.cuda.device_count(),
        gpu=torch.cuda.get_device_name(0),
        checks=checks,
        rows=[row for row in rows if "gemm" not in row.way],
        beside=beside,
        traces=measured.traces,
        left_out=measured.left_out,
        loss=loss,
    )


def _check_all(replays: int, rank: int) -> dict[tuple[str, str], Checked]:
    """(shape, handshake) -> what this rank saw. Collective."""
    return {
        (shape.name, handshake): check(shape, handshake, replays, rank) for shape in SHAPES for handshake in HANDSHAKES
    }


def _slowest(ranks: Sequence[Measured]) -> Measured:
    """What rank 0 saw, with the times of the slowest rank in each round."""
    rounds = {
        key: [max(together) for together in zip(*(one.rounds[key] for one in ranks), strict=True)]
        for key in ranks[0].rounds
    }
    return Measured(rounds, ranks[0].sent, ranks[0].traces, ranks[0].left_out)


def _rows(measured: Measured) -> list[Row]:
    found = []
    for (shape, way), rounds in measured.rounds.items():
        baseline = next(name for name in BASELINE if (shape, name) in measured.rounds)
        ms = statistics.median(rounds)
        rate = measured.sent[shape] / ms / 1e6
        ratio = statistics.median(measured.rounds[shape, baseline]) / ms
        found.append(Row(shape, way, ms, min(rounds), max(rounds), rate, ratio))
    return found


def show(report: PeerReport, console: Console) -> None:
    from rich.table import Table

    shared = "" if report.gpus >= report.ranks else f", {report.ranks} ranks share them: times mean little"
    console.print(f"{report.ranks} ranks on {report.gpus} x {report.gpu}{shared}")
    table = Table("shape", "handshake", "over", "replays", "exchanges", "wrong", title="new data in every replay")
    for shape, by_handshake in report.checks.items():
        for handshake, ranks in by_handshake.items():
            one, wrong = ranks[0], sum(rank.wrong for rank in ranks)
            noticed = "" if all(rank.noticed for rank in ranks) else ", and a planted fault was not noticed"
            counts = (f"{one.replays}", f"{one.exchanges}", f"{wrong}{noticed}")
            table.add_row(shape, handshake, one.transport, *counts)
    console.print(table)
    table = Table("shape", "way", "ms", "least", "most", "GB/s sent", "x as fast", title=f"one of {LAYERS} exchanges")
    for row in report.rows:
        times = (f"{row.ms:.4f}", f"{row.least:.4f}", f"{row.most:.4f}")
        table.add_row(row.shape, row.way, *times, f"{row.gigabytes_a_second:.1f}", f"{row.ratio:.2f}")
    console.print(table)
    table = Table("shape", "handshake", "exchange", "gemm", "both", "hidden", title="beside a matrix product, ms")
    for both in report.beside:
        cells = (f"{both.exchange:.4f}", f"{both.gemm:.4f}", f"{both.both:.4f}", f"{both.hidden:.0%}")
        table.add_row(both.shape, both.handshake, *cells)
    console.print(table)
    table = Table("shape", "handshake", "ran on the GPU", "times a step", "us each", title="a captured step")
    for shape, traced in report.traces.items():
        for handshake, trace in traced.items():
            for name, (count, micros) in trace.items():
                table.add_row(shape, handshake, name, f"{count / TRACED:g}", f"{micros / count:.1f}")
    console.print(table)
    for way, why in report.left_out.items():
        console.print(f"not measured: {way} ({why})")
    waited = ", ".join(str(rank) for rank in report.loss.waited) or "none"
    after = "ran the plan right away" if report.loss.goes_on else "could not run the plan"
    console.print(
        f"a rank killed between two steps: {report.loss.told}, {report.loss.seconds:.1f} s later; "
        f"ranks left waiting on the GPU: {waited}; a new group {after}"
    )

"""Whether exchanges bring the right bytes over the GPUs of a machine, replay after replay, at shapes of real models."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.stages import Stage
from stepgraph.planner.plan import Plan, Run
from stepgraph.planner.shares import balanced
from stepgraph.runtime.session import Session
from stepgraph.tools.peers.exchange import HEAD_DIM, FixedStages, Shape, exchanging, step_of

LAYERS = 3
LATE = 0.1
"""How often a rank's host sleeps before a step."""
LONGEST = 0.005
"""Seconds of such a sleep."""

APART = 64
"""Between the numbers of two layers: more than replays count through, and small enough for bfloat16."""


class CheckedStages(FixedStages):
    """q, k and v of every rank are drawn from its number; a number of the replay and one of the layer come to them.
    Each attention makes what its peers must have sent, and counts the exchanges that brought anything else."""

    def __init__(self, plan: Plan, shape: Shape, rank: int, device: torch.device) -> None:
        super().__init__(False, device)
        members = exchanging(plan, rank)
        self.first, self.heads = balanced(shape.heads, len(members))[members.index(rank)]
        self.sources = {member: _drawn(shape, member, device) for member in members}
        self.replay = torch.zeros((), dtype=torch.bfloat16, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def _made(self, member: int, layer: int) -> Tensor:
        """What a member sends in this replay: (rows, 3, heads, head_dim)."""
        return self.sources[member] + (self.replay + layer * APART)

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        fixed, op = super().__call__(plan, rank, run), plan.ops[run.op]
        layer = op.layer or 0

        def sends(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [self._made(rank, layer)]

        def checks(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            wanted = torch.cat([self._made(member, layer) for member in self.sources])
            for part, found in enumerate(tensors):
                own = wanted[:, part, self.first : self.first + self.heads]
                self.wrong += (found[0].view(torch.int16) != own.contiguous().view(torch.int16)).any()
            return fixed(tensors)

        if op.layer is None:
            return fixed
        return {"linear": sends, "attention": checks}.get(op.kind, fixed)


def _drawn(shape: Shape, rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    found = torch.randn(shape.rows, 3, shape.heads, HEAD_DIM, generator=generator, device=device)
    return found.to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Checked:
    """What one rank saw."""

    replays: int
    exchanges: int
    """Of q, k and v, in all replays."""
    wrong: int
    """Of q, of k and of v, those that are not what the peers sent, bit for bit."""
    noticed: bool
    """Whether a replay in which another number was expected was found to be wrong."""
    transport: str
    eager_because: str


def check(shape: Shape, handshake: str, replays: int, rank: int) -> Checked:
    """Replay a captured step with new data each time, while hosts sleep at random. Collective."""
    device = torch.device("cuda", torch.cuda.current_device())
    plan = shape.plan(dist.get_world_size(), handshake, LAYERS)
    delays = random.Random(rank)
    with torch.inference_mode(False), torch.no_grad():
        stages = CheckedStages(plan, shape, rank, device)
        with Session(plan, device="cuda", stages=stages) as session:
            step, facts = step_of(session), session.facts
            torch.cuda.synchronize()
            dist.barrier()
            stages.wrong.zero_()
            for number in range(replays):
                if delays.random() < LATE:
                    time.sleep(delays.random() * LONGEST)
                stages.replay.fill_(number % APART)
                step()
            wrong = int(stages.wrong)
            dist.barrier()
            stages.replay.fill_(8 * rank)
            step()
            noticed = int(stages.wrong) - wrong == 3 * LAYERS or len(stages.sources) == 1
    return Checked(replays, replays * LAYERS, wrong, noticed, facts.transport, facts.eager_because)

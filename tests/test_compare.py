"""Comparison with the unsharded model, op by op: what it says of every shipped schedule, and of a stage gone wrong."""

import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from stepgraph.kernels.stages import MadeUpStages, Stage
from stepgraph.planner.plan import Plan, Run
from stepgraph.runtime.compare import MakeStages, compare
from stepgraph.tools import cli

from support.sizes import SHIPPED, small_plan


@pytest.mark.parametrize("via", ["copy", "nccl"])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_schedules_agree_in_every_op(name: str, via: str) -> None:
    plan = small_plan(name, **{f"defaults__{kind}__via": via for kind in ("gather", "all_gather", "all_reduce")})
    rows = compare(plan, 1)
    assert rows is not None
    assert [row for row in rows if row.differs] == []
    assert {row.layer for row in rows} == {op.layer for op in plan.ops if op.kind not in ("load", "store")}
    assert {"send", "gather"} & {row.kind for row in rows}


def wrong_in(name: str, layer: int, on_rank: int) -> MakeStages:
    """Made-up stages of which one adds a hundredth to the last element of its result on one rank."""

    class Wrong(MadeUpStages):
        def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
            stage, op = super().__call__(plan, rank, run), plan.ops[run.op]
            if op.name != name or op.layer != layer or rank != on_rank:
                return stage

            def changed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
                results = list(stage(tensors))
                target = results[0] if results else tensors[0]
                target[(-1,) * target.dim()] += 0.01
                return results

            return changed

    return Wrong


@pytest.mark.parametrize(
    ("schedule", "op", "layer"),
    [
        ("quickstart", "self_attention.mlp", 1),
        ("quickstart", "self_attention.norm_rope", 0),
        ("uneven_u4", "self_attention.attention", 1),
        ("flux_1024_u4", "dual.to_k.txt", 1),
        ("minimax_h3_tp2_u2", "self_attention.out_proj", 1),
    ],
)
def test_the_first_op_that_differs_is_named(schedule: str, op: str, layer: int) -> None:
    settings = {"defaults__all_reduce__via": "copy"} if "tp2" in schedule else {}
    rows = compare(small_plan(schedule, model__dtype="float32", **settings), 0, stages=wrong_in(op, layer, on_rank=1))
    assert rows is not None
    first = next(row for row in rows if row.differs)
    assert (first.op, first.layer) == (op, layer)
    assert first.rank in (0, 1, 3)  # of a partial sum, every member holds it


def test_not_a_number_differs() -> None:
    class Nan(MadeUpStages):
        def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
            stage, op = super().__call__(plan, rank, run), plan.ops[run.op]
            wrong = op.name == "self_attention.mlp" and rank == 2
            return (lambda tensors: [stage(tensors)[0] * torch.nan]) if wrong else stage

    rows = compare(small_plan("quickstart"), 0, stages=Nan)
    assert rows is not None
    assert next(row.where for row in rows if row.differs) == "self_attention.mlp[0]"


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = "--set=model.layers=1,shape.seq=9,model.hidden=16,model.head_dim=2,model.ffn=8"
    assert cli.run(["compare", "quickstart", "--by-layer", small, "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "agrees with the unsharded model" in told
    assert "outside" in told
    assert cli.run(["compare", "quickstart", small, "--device", "cpu", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"]
    assert data["first_difference"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["compare", "quickstart", small, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"  # where it ran, not auto
    assert {row["layer"] for row in data["compared"]} == {None, 0}

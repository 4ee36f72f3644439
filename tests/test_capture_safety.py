"""Stages of diffusers' models under capture, without a GPU: they run on the meta device, which holds no numbers.

Every operation is looked at. One that waits for the device, copies from or to the host, draws random numbers, or gives
a size that depends on data, can't be captured.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("diffusers")

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.planner.plan import Plan, Run
from stepgraph.planner.plan_set import PlanSet
from stepgraph.runtime.adapters.arithmetic import rotate_pairs
from stepgraph.runtime.wrap import bind

from support.parity import wrapped
from support.tiny import FAMILIES, Tiny, in_dtype, with_dtype

META = torch.device("meta")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "lift_fresh")


class Watched(TorchDispatchMode):
    """Notes every operation that a CUDA graph can't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if name in WAITS or torch.Tag.nondeterministic_seeded in function.tags:
            self.found.append(name)
        if any(tensor.device != META for tensor in tensors):
            self.found.append(f"{name} on the host")
        return result


def plans_of(tiny: Tiny, model: Any, call: dict[str, object]) -> PlanSet:
    sharded = wrapped(tiny, model, 2)
    return sharded.plans_for(sharded.prepare((), call).lengths)


def stages_of(plan: Plan, bound: Any) -> Iterator[tuple[str, Callable[[list[Tensor]], object], list[Tensor]]]:
    """The stages of a rank with inputs for each."""
    program = plan.ranks[0]
    for run in program.instructions:
        if isinstance(run, Run) and plan.ops[run.op].name in bound.binding.stages:
            views = [program.views[number] for number in run.inputs]
            dtypes = [torch_dtype(program.buffers[view.buffer].dtype) for view in views]
            tensors = [
                torch.empty(view.shape, dtype=dtype, device=META) for view, dtype in zip(views, dtypes, strict=True)
            ]
            yield plan.ops[run.op].name, bound(plan, 0, run), tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_stage_waits_for_the_gpu_or_draws(name: str, dtype: torch.dtype) -> None:
    """CASES 12, 15: and none reads a number on the host that a capture would freeze."""
    tiny = FAMILIES[name]
    model: Any = in_dtype(tiny.made(), dtype)
    plans = plans_of(tiny, model, with_dtype(tiny.call(True), dtype))
    model.to(META)
    seen: set[str] = set()
    bound = bind(model, plans)
    for plan in plans.plans:
        for op, stage, tensors in stages_of(plan, bound):
            with torch.no_grad(), Watched() as watched:
                stage(tensors)
            assert watched.count
            assert not watched.found, (op, watched.found)
            seen.add(op)
    assert seen >= set(bound.binding.stages) - bound.binding.optional


def read_back(x: Tensor) -> Tensor:
    return x * float(x.sum())


def from_a_list(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0]).to(x.device)[0]


def to_the_host(x: Tensor) -> Tensor:
    return x.cpu().to(META)


def by_value(x: Tensor) -> Tensor:
    return x[x > 0]


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@pytest.mark.parametrize("stage", [read_back, from_a_list, to_the_host, by_value, noisy])
def test_what_a_capture_cannot_hold_is_seen(stage: Callable[[Tensor], Tensor]) -> None:
    """Else the test above could not fail."""
    watched = Watched()
    try:
        with watched:
            stage(torch.empty(4, 4, device=META))
    except (RuntimeError, NotImplementedError):
        return  # meta itself has refused it
    assert watched.found


def test_what_it_can_hold_is_not() -> None:
    with Watched() as watched:
        rotate_pairs(torch.empty(1, 3, 2, 8, device=META), torch.empty(3, 8, device=META))
    assert watched.count
    assert not watched.found

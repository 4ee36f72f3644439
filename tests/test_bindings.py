"""Bindings of modules of the user's own: the page about them, and what is checked. Needs no diffusers."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.runtime.bindings import Described
from stepgraph.runtime.inputs import random_inputs

PAGE = (Path(__file__).parents[1] / "docs" / "bindings.md").read_text()


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's own code defines, having run it."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(code.splitlines()) < 100
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_the_page_equals_its_model_on_every_count_of_ranks(page: dict[str, Any]) -> None:
    for ranks in (1, 2, 8):
        plan = stepgraph.compile("quickstart", {"mesh.ulysses": ranks, "shape.seq": 13})
        inputs = random_inputs(plan, ranks)
        bound = stepgraph.bind(page["model"], plan, page["BINDING"])
        with torch.no_grad(), stepgraph.Session(plan, device="cpu", stages=bound, seed=ranks) as session:
            noise = session.capture()(**inputs)
            assert session.report.ok
            torch.testing.assert_close(noise, page["model"](**inputs), rtol=1e-4, atol=1e-5)


def test_weights_are_the_modules_own_and_are_named(page: dict[str, Any]) -> None:
    """What is watched (E609) is what the module has, and a step uses what its tensors hold now."""
    plan = stepgraph.compile("quickstart", {"shape.seq": 13})
    model = page["Model"](layers=2)
    bound = stepgraph.bind(model, plan, page["BINDING"])
    assert {name: p.data_ptr() for name, p in bound.named_parameters()} == {
        name: p.data_ptr() for name, p in model.named_parameters()
    }
    inputs = random_inputs(plan, 0)
    with torch.no_grad(), stepgraph.Session(plan, device="cpu", stages=bound) as session:
        step = session.capture()
        before = step(**inputs)
        model.head.weight.mul_(2)
        model.head.bias.mul_(2)
        torch.testing.assert_close(step(**inputs), 2 * before)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model.layers": 3}, "the number of layers of 'self_attention'"),
        ({"model.hidden": 72}, "model.hidden differs between the schedule and the module"),
        ({"model.kv_heads": 2}, "model.kv_heads differs between the schedule and the module"),
        ({"model.dtype": "float64"}, "float64, in the schedule quickstart"),
    ],
)
def test_mismatches_are_told_with_their_place(page: dict[str, Any], settings: dict[str, Any], told: str) -> None:
    plan = stepgraph.compile("quickstart", settings)
    with pytest.raises(StepgraphError, match="E620") as error:
        stepgraph.bind(page["model"], plan, page["BINDING"])
    assert told in str(error.value)
    assert "in the module, a Model" in str(error.value)
    assert "quickstart.yaml" in str(error.value) or "--set" in str(error.value)
    assert len(error.value.diagnostics) == 1


def test_other_heads_of_the_same_total_size_are_told(page: dict[str, Any]) -> None:
    plan = stepgraph.compile("quickstart", {"model.heads": 4, "model.kv_heads": 4, "model.head_dim": 32})
    with pytest.raises(StepgraphError, match="E620") as error:
        stepgraph.bind(page["model"], plan, page["BINDING"])
    for part in ("model.heads differs", "4, in the schedule", "8, in the module", "model.head_dim differs"):
        assert part in str(error.value), str(error.value)


def test_what_a_binding_must_tell_and_may_not(page: dict[str, Any]) -> None:
    """Without its heads nothing would fail and results would be wrong."""
    plan, binding = stepgraph.compile("quickstart"), page["BINDING"]
    changed = replace(binding, sizes=lambda model: {"model.hiden": 64, "heads": 8, "shape.seq": 3, "sizes.any": 1})
    with pytest.raises(StepgraphError, match="E620") as error:
        stepgraph.bind(page["model"], plan, changed)
    for part in ("does not tell model.heads of", "does not tell model.head_dim of", "no schedule has: model.hiden",
                 "no schedule has: heads", "no schedule has: shape.seq"):  # fmt: skip
        assert part in str(error.value), str(error.value)
    assert "sizes.any" not in str(error.value)  # a size that this schedule leaves open
    with pytest.raises(StepgraphError, match=r"E620: stages are bound to a plan"):
        stepgraph.bind(page["model"], "quickstart", binding)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"blocks": {"self_attention": lambda model: model.blocks}},
            "can't tell the layers of 'self_attention' of the module, a Model",
        ),
        (
            {"sizes": lambda model: {"model.heads": model.heads}},
            "AttributeError: 'Model' object has no attribute 'heads'",
        ),
        ({"blocks": {"self_atention": lambda model: model.layers}}, "did you mean 'self_attention'"),
    ],
)
def test_a_binding_that_does_not_find_its_way_in_a_module(
    page: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    """Written for another class, or with a slip of the pen: one error of ours, which names the binding."""
    plan, binding = stepgraph.compile("quickstart"), page["BINDING"]
    with pytest.raises(StepgraphError, match="E620: the binding my model") as error:
        stepgraph.bind(page["model"], plan, replace(binding, **change))
    assert told in str(error.value), str(error.value)


def test_what_is_no_binding_no_module_and_no_function(page: dict[str, Any]) -> None:
    plan, model, binding = stepgraph.compile("quickstart"), page["model"], page["BINDING"]
    for arguments, told in (
        ((model, plan, {}), "a Binding, or None"),
        ((None, plan, binding), "a torch.nn.Module"),
        (
            (model, plan, replace(binding, stages={**binding.stages, "step.head": None})),
            "step.head of the binding my model can't be called",
        ),
    ):
        with pytest.raises(StepgraphError, match=rf"E620[\s\S]*{told}"):
            stepgraph.bind(*arguments)


def test_a_schedule_may_leave_out_optional_stages(page: dict[str, Any]) -> None:
    plan, binding = stepgraph.compile("quickstart"), page["BINDING"]
    more = replace(binding, stages={**binding.stages, "step.cache": lambda model, x: x})
    with pytest.raises(
        StepgraphError, match=r"E620: .* has a stage that the schedule quickstart leaves out: step.cache"
    ):
        stepgraph.bind(page["model"], plan, more)
    stepgraph.bind(page["model"], plan, replace(more, optional=frozenset({"step.cache"})))


def test_tensor_parallel_schedules_are_refused(page: dict[str, Any]) -> None:
    plan = stepgraph.compile("minimax_h3_tp2_u2", {"model.layers": 2})
    with pytest.raises(StepgraphError, match="E620") as error:
        stepgraph.bind(page["model"], plan, page["BINDING"])
    assert "has whole weights, and the schedule cuts them over `tensor`" in str(error.value)


def test_a_stage_that_makes_something_else_is_told(page: dict[str, Any]) -> None:
    plan = stepgraph.compile("quickstart", {"shape.seq": 13})
    binding = page["BINDING"]
    for name, wrong, told in (
        ("self_attention.norm_rope", lambda layer, q, k, rope: q, "argument 2"),
        ("self_attention.qkv", lambda layer, h: layer.qkv(h)[..., :-1], "E610: .* gives what its op does not make"),
        ("self_attention.attention", lambda layer, *qkv: page["attend"](*qkv).transpose(1, 2), "split or joined"),
        (
            "self_attention.norm_rope",
            lambda layer, q, k, rope: (q.transpose(1, 2), k),
            "operand 1: 1 x 4 x 8 x 16, or with",
        ),
        ("self_attention.qkv", lambda layer, h: [h.new_ones(1, 128, h.shape[1])] * 3, "split or joined"),
        ("self_attention.residual", lambda layer, x, a: x.add_(a), "an operand changed in place"),
        ("self_attention.norm", lambda layer, x: layer.norm(x.mul_(2)), "an operand changed in place"),
    ):
        stages = {**binding.stages, name: wrong}
        changed = stepgraph.Binding(binding.name, binding.blocks, stages, binding.sizes)
        bound = stepgraph.bind(page["model"], plan, changed)
        with (
            stepgraph.Session(plan, device="cpu", stages=bound) as session,
            pytest.raises(StepgraphError, match="E610") as error,
        ):
            session.capture()(**random_inputs(plan, 0))
        assert re.search(told, str(error.value)), str(error.value)


# Compiled stages (CASES 33)


@pytest.fixture
def bf16(page: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    plan = stepgraph.compile("quickstart", {"shape.seq": 13, "model.dtype": "bfloat16", "mesh.ulysses": 2})
    return page["Model"](layers=2).bfloat16(), plan


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_a_compiled_stage_gives_its_own_numbers(page: dict[str, Any]) -> None:
    plan = stepgraph.compile("quickstart", {"shape.seq": 13, "mesh.ulysses": 2})
    inputs = random_inputs(plan, 0)
    found = []
    for compiled in ((), ("self_attention.residual",)):
        bound = stepgraph.bind(page["model"], plan, page["BINDING"], compiled)
        with torch.no_grad(), stepgraph.Session(plan, device="cpu", stages=bound) as session:
            found.append(session.capture()(**inputs))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_compiled_stage_with_other_numbers_is_refused(
    page: dict[str, Any], bf16: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the compiler that is wrong in the second layer only."""
    model: Any
    model, plan = bf16
    seen: list[object] = []

    def compiler(function: Any, **options: object) -> Any:
        def wrong(module: Any, *tensors: torch.Tensor) -> torch.Tensor:
            seen.append(module)
            result: torch.Tensor = function(module, *tensors)
            return 1.1 * result if module is model.layers[1] else result

        return wrong

    monkeypatch.setattr(torch, "compile", compiler)
    bound = stepgraph.bind(model, plan, page["BINDING"], ["self_attention.norm2"])
    with pytest.raises(StepgraphError, match=r"E623: the compiled stage of self_attention.norm2\[1\]") as error:
        stepgraph.Session(plan, device="cpu", stages=bound)
    assert model.layers[0] in seen
    assert "from the stage itself" in str(error.value)


def test_ranks_with_other_compiled_stages_are_told_apart(
    page: dict[str, Any], bf16: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a group compares before it makes anything (E607) differs."""
    model, plan = bf16
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    bound = [
        stepgraph.bind(model, plan, page["BINDING"], names)
        for names in ((), ("self_attention.norm2",), ("self_attention.norm",))
    ]
    assert all(isinstance(one, Described) for one in bound)
    assert len({one.description() for one in bound}) == 3
    with pytest.raises(StepgraphError, match=r"E620: no stage to compile is called self_attention.norm3"):
        stepgraph.bind(model, plan, page["BINDING"], ["self_attention.norm3"])
    with pytest.raises(StepgraphError, match=r"E620: no stage to compile is called self_attention.norm3"):
        stepgraph.bind(model, plan, page["BINDING"], "self_attention.norm3")  # one name is a name

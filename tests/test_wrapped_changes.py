"""What is done to a wrapped module: weights and layers that are exchanged, hooks, adapters, modes of torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

import stepgraph

pytest.importorskip("diffusers")

from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.schedule import schedule_path

from support.parity import own, wrapped
from support.tiny import FAMILIES


def model_of(name: str = "wan") -> Any:
    return FAMILIES[name].made()


def near(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() < 1e-5 * want.abs().max())


def doubled(module: Module, inputs: object, result: Any) -> Any:
    return tuple(2 * part for part in result) if isinstance(result, tuple) else 2 * result


# Exchanged after the first call: E609 on every device


def another_block(model: Any) -> None:
    model.blocks[0] = model_of().blocks[0]


def fewer_blocks(model: Any) -> None:
    model.blocks = model.blocks[:1]


def another_layer(model: Any) -> None:
    model.proj_out = copy.deepcopy(model.proj_out)


def an_activation(model: Any) -> None:
    model.blocks[1].ffn.net[0] = torch.nn.Sequential(model.blocks[1].ffn.net[0], torch.nn.Tanh())


def without_weights(model: Any) -> None:
    model.condition_embedder.act_fn = torch.nn.Tanh()


def another_dtype(model: Any) -> None:
    model.proj_out.to(torch.float64)


def a_hook(model: Any) -> None:
    model.blocks[1].ffn.register_forward_hook(doubled)


def another_forward(model: Any) -> None:
    model.blocks[1].ffn.forward = torch.zeros_like


def another_backend(model: Any) -> None:
    model.set_attention_backend("_native_math")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (another_block, "the parameter 'blocks.0.scale_shift_table' and 26 more are not what"),
        (fewer_blocks, "the parameter 'blocks.1.scale_shift_table' and 26 more are not what"),
        (another_layer, "the parameter 'proj_out.weight' and 1 more are not what"),
        (an_activation, "blocks.1.ffn.net.0.proj.weight' and 1 more are not what"),
        (without_weights, "the layer of 'condition_embedder.act_fn' is not what"),
        (another_dtype, "the parameter 'proj_out.weight'"),
        (a_hook, "the hooks of 'blocks.1.ffn' is not what"),
        (another_forward, "the hooks of 'blocks.1.ffn'"),
        (another_backend, "the attention backend of 'blocks.0.attn1' and 3 more are not what"),
    ],
)
def test_what_was_exchanged_is_named_and_a_new_session_takes_it(change: Callable[[Any], None], told: str) -> None:
    """CASES 11, 37: nothing goes on with what a step was made with; closed, the next call is the module's own again."""
    model, call = model_of(), FAMILIES["wan"].call(True)
    sharded = wrapped(FAMILIES["wan"], model, 2)
    sharded(**call)
    change(model)
    with pytest.raises(StepgraphError, match="E609") as error:
        sharded(**call)
    assert told in str(error.value), str(error.value)
    sharded.close()
    if change is fewer_blocks:
        with pytest.raises(StepgraphError, match=r"E620.*the number of layers of 'wan'"):
            sharded(**call)
    elif change is not another_dtype:
        assert near(sharded(**call).sample, own(model, call))


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_are_loaded_in_place_are_used(name: str) -> None:
    """By the wrapped model too, whose state is the model's own."""
    tiny = FAMILIES[name]
    model, call = tiny.made(), tiny.call(True)
    sharded = wrapped(tiny, model, 2)
    before = sharded(**call).sample
    other = tiny.made(seed=7)
    assert sharded.state_dict().keys() == model.state_dict().keys()  # type: ignore[union-attr]
    sharded.load_state_dict(other.state_dict())
    got = sharded(**call).sample
    assert near(got, own(other, call))
    assert not near(got, before)


class Adapter(torch.nn.Module):
    """A layer of peft, in what it tells and does: a switch and a number that are read when it is called."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.merged_adapters, self.active_adapters = layer, [], ["default"]
        self.scaling, self.disable_adapters = {"default": 0.5}, False
        self.lora = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        plain: Tensor = self.base_layer(x)
        return plain if self.disable_adapters else plain + self.scaling["default"] * self.lora(x)


def scaled(layer: Any) -> None:
    layer.scaling["default"] = 0.1


def switched_off(layer: Any) -> None:
    layer.disable_adapters = True


def merged(layer: Any) -> None:
    layer.merged_adapters.append("default")


@pytest.mark.parametrize("change", [scaled, switched_off, merged])
def test_adapters_are_switched_between_sessions_only(change: Callable[[Any], None]) -> None:
    """CASES 12: what peft keeps as plain numbers is frozen in a capture."""
    model, call = model_of(), FAMILIES["wan"].call(True)
    model.blocks[1].attn1.to_q = layer = Adapter(model.blocks[1].attn1.to_q)
    sharded = wrapped(FAMILIES["wan"], model, 2)
    assert near(sharded(**call).sample, own(model, call))
    change(layer)
    with pytest.raises(StepgraphError, match=r"E609: the adapters of 'blocks.1.attn1.to_q' is not what"):
        sharded(**call)
    sharded.close()
    assert near(sharded(**call).sample, own(model, call))


def test_dropout_is_refused_and_one_that_is_switched_on_is_told() -> None:
    """CASES 15: ranks would draw other numbers each. Adapters come in train mode, whatever the model's is."""
    model, call = model_of(), FAMILIES["wan"].call(True)
    layer = model.blocks[1].attn1.to_q
    model.blocks[1].attn1.to_q = torch.nn.Sequential(layer, torch.nn.Dropout(0.5))
    with pytest.raises(StepgraphError, match=r"E620: blocks.1.attn1.to_q.1 drops numbers at random"):
        wrapped(FAMILIES["wan"], model, 2)
    sharded = wrapped(FAMILIES["wan"], model.eval(), 2)
    assert near(sharded(**call).sample, own(model, call))
    model.train()
    with pytest.raises(StepgraphError, match=r"E609: the dropout of 'blocks.1.attn1.to_q.1' is not what"):
        sharded(**call)


# Layers whose own forward a plan does not call


@pytest.mark.parametrize("name", [name for name in FAMILIES if " " not in name])
def test_a_hook_on_any_layer_runs_or_is_refused(name: str) -> None:
    """Of every layer of the first blocks and of the model: no hook is passed over in silence."""
    tiny = FAMILIES[name]
    model, call = tiny.made(), tiny.call(True)
    refused = []
    for layer, part in model.named_modules():
        if ".1." in layer or layer.endswith(".1"):
            continue
        hook = part.register_forward_hook(doubled)
        told = ""
        try:
            (got,) = wrapped(tiny, model, 2)(**call, return_dict=False)
        except StepgraphError as error:
            told = str(error)
            refused.append(layer)
        assert f"{layer or 'the module'} has hooks or another forward" in told if told else near(got, own(model, call))
        hook.remove()
    assert {"", f"{tiny.blocks[0]}.0"} <= set(refused)
    assert not [layer for layer in refused if layer.endswith(("to_q", "proj_out", "norm2", "ff", "ffn"))]


def test_a_forward_that_was_written_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As caches that come as a recipe do it: on one block, or on the class."""
    model = model_of()
    model.blocks[0].forward = lambda x, *more: x
    with pytest.raises(StepgraphError, match=r"E620: blocks.0 has hooks or another forward"):
        wrapped(FAMILIES["wan"], model, 2)
    model = model_of()

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return hidden_states

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(StepgraphError, match="E620: the module has hooks or another forward"):
        wrapped(FAMILIES["wan"], model, 2)


def test_hooks_of_diffusers_are_refused() -> None:
    """Weights that are cast for each call have an address for each call."""
    model = model_of()
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    with pytest.raises(StepgraphError, match=r"E620: .* has a hook of diffusers \(offloading, casting"):
        wrapped(FAMILIES["wan"], model, 2)


# Where and how it is called


def test_weights_elsewhere_are_told() -> None:
    model = model_of().to("meta")
    with pytest.raises(StepgraphError, match=r"E620: 69 weights of the module are not where the session runs") as error:
        wrapped(FAMILIES["wan"], model, 2)(**FAMILIES["wan"].call(True))
    assert "got:      meta" in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_device_that_is_not_there() -> None:
    tiny = FAMILIES["wan"]
    sharded = stepgraph.wrap(model_of(), tiny.schedule, device="cuda", overrides=tiny.settings(model_of()))
    with pytest.raises(StepgraphError, match="E601: the cuda device is not there"):
        sharded(**tiny.call(True))
    with pytest.raises(StepgraphError, match="E601: no device 'tpu'"):
        stepgraph.wrap(model_of(), tiny.schedule, device="tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"ranks": "2"}, {"ranks": 2.0}, {"most": "4"}])
def test_numbers_that_are_none(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(StepgraphError, match=rf"E620: a wrap can't take {name}={value!r}"):
        stepgraph.wrap(model_of(), "wan_14b_u4", device="cpu", **change)


def test_autocast_is_refused() -> None:
    sharded = wrapped(FAMILIES["flux"], model_of("flux"), 2)
    with pytest.raises(StepgraphError, match=r"E621.*autocast"), torch.autocast("cpu", torch.bfloat16):
        sharded(**FAMILIES["flux"].call(True))


@pytest.mark.parametrize("name", FAMILIES)
def test_in_and_out_of_inference_mode(name: str) -> None:
    """What a step makes in inference mode is written to by a later one outside of it."""
    tiny = FAMILIES[name]
    sharded = wrapped(tiny, tiny.made(), 2)
    with torch.inference_mode():
        first = sharded(**tiny.call(True)).sample
    assert torch.equal(sharded(**tiny.call(True)).sample, first)
    with torch.inference_mode():
        assert torch.equal(sharded(**tiny.call(True)).sample, first)


def test_a_copy_runs_its_own_model() -> None:
    tiny = FAMILIES["wan"]
    sharded = wrapped(tiny, model_of(), 2)
    sharded(**tiny.call(True))
    other: Any = copy.deepcopy(sharded)
    with torch.no_grad():
        other.model.proj_out.weight.mul_(2)
    assert not other.sessions
    assert near(other(**tiny.call(True)).sample, own(other.model, tiny.call(True)))
    assert near(sharded(**tiny.call(True)).sample, own(sharded.model, tiny.call(True)))


def test_torch_compile_leaves_a_wrapped_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around it; the module that torch.compile gives, and one that is wrapped already, are named."""
    tiny = FAMILIES["wan"]
    model = tiny.made()
    sharded = wrapped(tiny, model, 2)
    graphs: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph

    around = torch.compile(sharded, backend=backend)
    assert near(around(**tiny.call(True)).sample, own(model, tiny.call(True)))
    assert not graphs
    for other, told in ((torch.compile(model, backend=backend), "`compiled` names stages"), (sharded, "its `model`")):
        with pytest.raises(StepgraphError, match="E622") as error:
            stepgraph.wrap(other, "wan_14b_u4")  # type: ignore[arg-type]
        assert told in str(error.value)


@pytest.mark.parametrize("name", ["wan", "flux", "qwen_image"])
def test_one_text_for_all_samples(name: str) -> None:
    """As a pipeline gives it for several images of one prompt, where it was handed embeddings."""
    tiny = FAMILIES[name]
    model, call = tiny.made(), tiny.call(True)
    for argument in ("encoder_hidden_states", "pooled_projections"):
        if argument in call:
            call[argument] = call[argument][:1]  # type: ignore[index]
    assert near(wrapped(tiny, model, 2)(**call).sample, own(model, call))


# Schedules for other calls


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (
            "minimax_h3_u4",
            (
                "the inputs of the schedule",
                "latents, rope, text, timestep",
                "the named lengths",
                "start from wan_14b_u4",
            ),
        ),
        ("flux_1024_u4", ("guidance", "img, txt")),
    ],
)
def test_a_schedule_of_another_model_is_told(schedule: str, told: tuple[str, ...]) -> None:
    with pytest.raises(StepgraphError, match="E620") as error:
        stepgraph.wrap(model_of(), schedule, device="cpu")
    for part in told:
        assert part in str(error.value), str(error.value)


def test_ranks_are_those_of_all_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 8 over a mesh with another axis of 2 has 4 ulysses ranks."""
    file, lengths = tmp_path / "mine.yaml", {"batch": 1, "seq.vid": 8, "seq.txt": 4}
    file.write_text(schedule_path("wan_14b_u4").read_text().replace("{ulysses: 4}", "{cfg: 2, ulysses: 4}"))
    settings = stepgraph.settings_of(model_of())
    sharded = stepgraph.wrap(model_of(), file, device="cuda", overrides=settings)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    plan = sharded.plans_for(lengths).plan()
    assert (plan.world_size, len(plan.groups[0])) == (8, 4)
    with pytest.raises(StepgraphError, match=r"E620: ranks that fill no mesh"):
        stepgraph.wrap(model_of(), file, ranks=3, device="cpu", overrides=settings).plans_for(lengths)

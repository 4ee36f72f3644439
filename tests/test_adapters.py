"""Models of diffusers as plans: the sharded output is that of the model's own forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stepgraph

pytest.importorskip("diffusers")

from stepgraph.planner.compile import compile_schedule, compile_set
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.schedule import load_schedule, read_schedule, schedule_path
from stepgraph.runtime.compare import Tap
from stepgraph.runtime.session import Session
from stepgraph.runtime.wrap import bind
from stepgraph.tools import cli

from support.parity import ROUNDINGS, measured, own, wrapped
from support.tiny import FAMILIES, Call, Tiny


def outputs_of_every_rank(session: Session, inputs: dict[str, Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}

    def loop(rank: int) -> Iterator[dict[str, Tensor]]:
        (found[rank],) = yield inputs

    session.drive(loop)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_sharded_equals_the_models_own_forward(name: str, ranks: int, uneven: bool) -> None:
    """CASES 24, 25, 26: text is replicated or sharded as its schedule says, its length counts, lengths are any."""
    assert measured(FAMILIES[name], torch.float32, ranks, uneven) <= ROUNDINGS[torch.float32]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_models_round_as_their_own_forward_does(name: str, ranks: int) -> None:
    """With the dtypes that a model has when it is read from a hub: on one rank the same bits."""
    assert measured(FAMILIES[name], torch.bfloat16, ranks, True) <= ROUNDINGS[torch.bfloat16]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_and_every_layer_agree(name: str) -> None:
    """Hidden states after each layer are the module's own, and all ranks give the same bits."""
    tiny = FAMILIES[name]
    model, call = tiny.made(), tiny.call(True)
    seen: list[Tensor] = []

    def note(module: torch.nn.Module, inputs: object, result: object) -> None:
        seen.append(result[-1] if isinstance(result, tuple) else result)  # type: ignore[arg-type]

    layers = [layer for block in tiny.blocks for layer in getattr(model, block)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    own(model, call)
    for hook in hooks:
        hook.remove()
    sharded = wrapped(tiny, model, 4)
    prepared = sharded.prepare((), call)
    plan = sharded.plans_for(prepared.lengths).plan()
    tap = Tap(bind(model, plan))
    with Session(plan, device="cpu", stages=tap) as session:
        outputs = outputs_of_every_rank(session, dict(prepared.inputs))
        assert session.report.ok
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    for layer, want in enumerate(seen):
        ops = [
            number
            for number, op in enumerate(plan.ops)
            if op.layer == layer and (0, number) in tap.seen and not op.name.endswith(".txt")
        ]
        shares = [tap.seen[rank, ops[-1]].outputs[0] for rank in range(4)]
        text = sum(share.shape[1] for share in shares) - want.shape[1]
        image = torch.cat([share[:, _text_rows(text, rank) :] for rank, share in enumerate(shares)], dim=1)
        assert (image - want).abs().max() < 1e-4 * want.abs().max(), f"layer {layer}"


def _text_rows(text: int, rank: int) -> int:
    """How many of a joint share's rows are text, which comes first: shares differ by one, the larger ones first."""
    return text // 4 + (rank < text % 4)


def test_the_pipelines_view_of_a_wrapped_model() -> None:
    tiny = FAMILIES["wan"]
    model = tiny.made()
    sharded = wrapped(tiny, model, 2)
    assert sharded.config is model.config
    assert (sharded.dtype, sharded.device) == (torch.float32, torch.device("cpu"))
    with sharded.cache_context("cond"):
        sharded(**tiny.call(False))
    assert dict(sharded.named_parameters()).keys() == {f"model.{name}" for name, _ in model.named_parameters()}
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = sharded.no_such_thing


def test_variants_of_a_step_are_bound_to_the_layers_that_they_run() -> None:
    """A variant that begins with the second layer is the model without its first one."""
    tiny = FAMILIES["wan"]
    model, call = tiny.made(), tiny.call(True)
    text = two_variants(tiny)
    prepared = wrapped(tiny, model, 2).prepare((), call)
    settings = {**stepgraph.settings_of(model), **{f"shape.{name}": size for name, size in prepared.lengths.items()}}
    settings["mesh.ulysses"] = 2
    plans = compile_set(read_schedule(text, "v.yaml", tuple((path, str(value)) for path, value in settings.items())))
    with torch.no_grad(), Session(plans, device="cpu", stages=bind(model, plans)) as session:
        found = {name: session.capture(variant=name)(**prepared.inputs) for name in ("full", "short")}
        assert session.report.ok
    family = wrapped(tiny, model, 2).family
    for name, layers in (("full", model.blocks), ("short", model.blocks[1:])):  # type: ignore[index]
        model.blocks = layers
        got = family.output(model, prepared.arguments, found[name])
        torch.testing.assert_close(got, own(model, call), rtol=1e-4, atol=1e-5)


def two_variants(tiny: Tiny) -> str:
    """The family's schedule, with a variant that begins with the second of two layers."""
    head, step = stepgraph.compile(tiny.schedule).source.text.split("\nstep:\n")
    step = step.replace("  - ", "      - ")
    short = step.replace("layers: wan", "layers: [{block: wan, first: 1}]")
    return f"{head}\nvariants:\n  full:\n    step:\n{step}  short:\n    step:\n{short}"


def test_a_wrapped_model_takes_variants_and_buckets(tmp_path: Path) -> None:
    """CASES 22, 23: one session serves all lengths that the buckets have; others are a miss."""
    tiny = FAMILIES["wan"]
    model, call = tiny.made(), tiny.call(True)
    shorter: Call = {**call, "encoder_hidden_states": call["encoder_hidden_states"][:, :3]}  # type: ignore[index]
    calls = {"whole": call, "less": shorter}
    lengths = {name: wrapped(tiny, model, 2).prepare((), given).lengths for name, given in calls.items()}
    sizes = []
    for name, found in lengths.items():
        pairs = ", ".join(f"{key.removeprefix('seq.')}: {size}" for key, size in found.items())
        sizes.append(f"  {name}: {{{pairs}}}\n")
    file = tmp_path / "mine.yaml"
    file.write_text(f"{two_variants(tiny)}\nbuckets:\n{''.join(sizes)}")
    settings = stepgraph.settings_of(model)
    sharded = stepgraph.wrap(model, file, ranks=2, device="cpu", overrides=settings, graph_bytes=100_000)
    blocks = model.blocks
    for variant, layers in (("", blocks), ("short", blocks[1:]), ("full", blocks), ("short", blocks[1:])):  # type: ignore[index]
        for given in calls.values():
            sharded.variant = variant
            got = sharded(**given).sample
            model.blocks = layers
            torch.testing.assert_close(got, own(model, given), rtol=1e-4, atol=1e-5)
            model.blocks = blocks
    (session,) = sharded.sessions.values()
    assert session.report.ok
    assert session.stats().budget == 100_000
    assert session.stats().hits + session.stats().misses == 8
    shortest: Call = {**call, "encoder_hidden_states": call["encoder_hidden_states"][:, :2]}  # type: ignore[index]
    with pytest.raises(StepgraphError, match=r"E615[\s\S]*the bucket 'less' takes it"):
        sharded(**shortest)


def test_few_sessions_are_held() -> None:
    """CASES 22."""
    tiny = FAMILIES["wan"]
    model, call = tiny.made(), tiny.call(True)
    sharded = wrapped(tiny, model, 2, most=2)
    texts = [call["encoder_hidden_states"][:, :rows] for rows in (1, 2, 1, 3)]  # type: ignore[index]
    opened = []
    for text in texts:
        sharded(**{**call, "encoder_hidden_states": text})
        opened.append(list(sharded.sessions.values()))
    assert [len(held) for held in opened] == [1, 2, 2, 2]
    assert opened[3][0] is opened[0][0]  # the second was used longest ago
    with pytest.raises(StepgraphError, match="E604"):
        opened[1][1].capture()


def test_lengths_of_a_call_open_sessions_of_their_own() -> None:
    """CASES 12: another timestep is another result of the same session; 25: another text length is another session."""
    tiny = FAMILIES["wan"]
    model, call = tiny.made(), tiny.call(True)
    sharded = wrapped(tiny, model, 2)
    other: Call = {**call, "timestep": torch.tensor([10, 999])}
    shorter: Call = {**call, "encoder_hidden_states": call["encoder_hidden_states"][:, :3]}  # type: ignore[index]
    for given, sessions in ((call, 1), (other, 1), (shorter, 2), (call, 2)):
        got = sharded(**given).sample
        torch.testing.assert_close(got, own(model, given), rtol=1e-4, atol=1e-5)
        assert len(sharded.sessions) == sessions
    assert not torch.equal(sharded(**call).sample, sharded(**other).sample)


class Adapted(torch.nn.Module):
    """A layer with something added to what it gives, as LoRA does it."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * self.layer(x)


def test_layers_that_were_replaced_are_used() -> None:
    tiny = FAMILIES["wan"]
    model: Any = tiny.made()
    before = own(model, tiny.call(True))
    model.patch_embedding = Adapted(model.patch_embedding)
    model.blocks[1].attn1.to_v = Adapted(model.blocks[1].attn1.to_v)
    model.blocks[0].attn2.to_out[0] = Adapted(model.blocks[0].attn2.to_out[0])
    want = own(model, tiny.call(True))
    assert (want - before).abs().max() > 0.01
    torch.testing.assert_close(wrapped(tiny, model, 2)(**tiny.call(True)).sample, want, rtol=1e-4, atol=1e-5)


# What is refused


@contextmanager
def refused(code: str, *told: str) -> Iterator[None]:
    with pytest.raises(StepgraphError) as error:
        yield
    assert {d.code for d in error.value.diagnostics} == {code}, str(error.value)
    for part in told:
        assert part in str(error.value), str(error.value)


def test_sizes_that_differ_are_told_all_at_once() -> None:
    model = FAMILIES["wan"].made()
    settings = {**stepgraph.settings_of(model), "model.layers": 3, "model.ffn": 41, "model.dtype": "bfloat16"}
    plan = stepgraph.compile("wan_14b_u4", {**settings, "shape.seq.vid": 8, "shape.seq.txt": 4})
    with refused("E620", "the number of layers of 'wan'", "3, in the schedule wan-14b-u4", "2, in the module, a Wan"):
        stepgraph.bind(model, plan)
    with refused(
        "E620", "model.ffn differs", "41, in the schedule", "40, in the module", "bfloat16", "float32",
        "overrides={'model.ffn': 40} sets it",
    ):  # fmt: skip
        stepgraph.bind(model, plan)


def test_stages_missing_and_left_over_are_told() -> None:
    model = FAMILIES["wan"].made()
    text = stepgraph.compile("wan_14b_u4").source.text
    text = text.replace("name: to_v, in: h", "name: to_w, in: h")
    settings = {**stepgraph.settings_of(model), "shape.seq.vid": 8, "shape.seq.txt": 4}
    schedule = read_schedule(text, "w.yaml", tuple((path, str(value)) for path, value in settings.items()))
    with refused(
        "E620",
        "does not know: wan.to_w, in line",
        "leaves out: wan.to_v",
        "did you mean 'wan.to_v'",
    ):
        stepgraph.bind(model, compile_schedule(schedule))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_kwargs": {"scale": 0.5}}, "'attention_kwargs'"),
        ({"encoder_hidden_states_image": torch.zeros(2, 3, 20)}, "'encoder_hidden_states_image'"),
        ({"timestep": torch.zeros(2, 32, 1)}, "'timestep'"),
        ({"timestep": 500}, "a tensor of shape [2]"),
        ({"hidden_states": torch.zeros(2, 6, 3, 5, 10)}, "multiples of [1, 2, 2]"),
        ({"hidden_states": torch.zeros(2, 6, 2, 8, 8, requires_grad=True)}, "needs no gradient"),
    ],
)
def test_arguments_that_a_plan_cannot_honour(change: Call, told: str) -> None:
    tiny = FAMILIES["wan"]
    sharded = wrapped(tiny, tiny.made(), 2)
    with refused("E621", told):
        sharded(**{**tiny.call(False), **change})


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("flux", {"controlnet_block_samples": [torch.zeros(2, 21, 48)]}, "'controlnet_block_samples'"),
        ("flux", {"controlnet_single_block_samples": [torch.zeros(2, 21, 48)]}, "'controlnet_single_block_samples'"),
        ("flux", {"joint_attention_kwargs": {"ip_adapter_image_embeds": []}}, "'joint_attention_kwargs'"),
        ("flux", {"guidance": None}, "'guidance'"),
        ("flux schnell", {"guidance": torch.ones(2)}, "made without guidance_embeds"),
        ("ltx_video", {"timestep": torch.zeros(2, 45)}, "'timestep'"),
        ("ltx_video", {"encoder_attention_mask": torch.zeros(2, 1, 7)}, "'encoder_attention_mask'"),
        ("qwen_image", {"guidance": torch.ones(2)}, "'guidance'"),
        ("qwen_image", {"additional_t_cond": torch.zeros(2)}, "'additional_t_cond'"),
    ],
)
def test_arguments_of_other_families(name: str, change: Call, told: str) -> None:
    tiny = FAMILIES[name]
    sharded = wrapped(tiny, tiny.made(), 2)
    with refused("E621", told):
        sharded(**{**tiny.call(True), **change})
    assert not sharded.sessions


def test_configs_that_no_schedule_computes() -> None:
    from diffusers import LTXVideoTransformer3DModel, QwenImageTransformer2DModel

    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
    other = QwenImageTransformer2DModel(**sizes, joint_attention_dim=8, axes_dims_rope=(4, 6, 6), zero_cond_t=True)
    with refused("E620", "made with zero_cond_t"):
        stepgraph.wrap(other, "qwen_image_u4")
    wide = LTXVideoTransformer3DModel(**sizes, cross_attention_dim=48, caption_channels=8)
    with refused("E620", "cross_attention_dim is 48, not the 32 features of a token"):
        stepgraph.wrap(wide, "ltx_video_u4")


def test_a_text_mask_needs_a_schedule_that_reads_it() -> None:
    """CASES 27: a mask is an input with a type of its own; without it in the schedule it is refused, not ignored."""
    model, call = FAMILIES["qwen_image"].made(), FAMILIES["qwen_image masked"].call(True)
    with refused("E621", "'encoder_hidden_states_mask'", "has no input 'text_mask'"):
        wrapped(FAMILIES["qwen_image"], model, 2)(**call)
    sharded = wrapped(FAMILIES["qwen_image masked"], model, 2)
    got, want = sharded(**call).sample, own(model, call)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    call["encoder_hidden_states_mask"] = None
    assert (sharded(**call).sample - want).abs().max() > 0.01
    torch.testing.assert_close(sharded(**call).sample, own(model, call), rtol=1e-4, atol=1e-5)
    assert len(sharded.sessions) == 1


def test_inputs_of_another_dtype_are_not_cast() -> None:
    """CASES 14."""
    tiny = FAMILIES["wan"]
    sharded = wrapped(tiny, tiny.made(), 2)
    with refused("E605", "'latents'", "float64"):
        sharded(**{**tiny.call(False), "hidden_states": torch.zeros(2, 6, 2, 8, 8, dtype=torch.float64)})
    with refused("E605", "'timestep'", "[2], float32", "[2, 32], float32"):
        sharded(**{**tiny.call(False), "timestep": torch.zeros(2, 32)})


def test_modules_that_compute_something_else() -> None:
    class Other:
        _attention_backend = None

    model = FAMILIES["wan"].made()
    sharded = wrapped(FAMILIES["wan"], model, 1)
    model.blocks[1].attn1.processor = Other()  # type: ignore[index, union-attr]
    with refused("E620", "the attention processor of blocks.1.attn1 is a Other"):
        sharded(**FAMILIES["wan"].call(False))
    from diffusers import WanTransformer3DModel

    image = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=8, ffn_dim=8, num_layers=1, image_dim=8,
        added_kv_proj_dim=24,
    )  # fmt: skip
    with refused("E620", "image encoder"):
        stepgraph.settings_of(image)
    with refused("E622", "torch.nn.modules.linear.Linear", "WanTransformer3DModel"):
        stepgraph.wrap(torch.nn.Linear(2, 2), "wan_14b_u4")


def test_offloading_hooks() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = FAMILIES["wan"].made()
    hooks.add_hook_to_module(model.blocks[0], hooks.AlignDevicesHook(execution_device="cpu"))  # type: ignore[index]
    with refused("E620", "blocks.0 has a hook of accelerate"):
        stepgraph.wrap(model, "wan_14b_u4")


def test_a_cache_of_diffusers_that_is_enabled_later() -> None:
    from diffusers import FirstBlockCacheConfig

    model = FAMILIES["wan"].made()
    sharded = wrapped(FAMILIES["wan"], model, 1)
    sharded(**FAMILIES["wan"].call(False))
    sharded.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with refused("E620", "cache of diffusers"):
        sharded(**FAMILIES["wan"].call(False))


# stepgraph init --from

OTHERS = ("qwen_image masked", "wan cached", "wan per token")
"""With a schedule that is not the first of their class."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OTHERS])
def test_a_schedule_is_drafted_from_a_class_and_from_a_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written has the sizes of the default config, or those of a model, which it then runs."""
    monkeypatch.chdir(tmp_path)
    tiny = FAMILIES[name]
    model, kind = tiny.made(), type(tiny.made()).__name__
    assert cli.run(["init", "defaults", "--from", f"diffusers.{kind}"]) == 0
    stated, shipped = load_schedule(Path("defaults.yaml")), load_schedule(schedule_path(tiny.schedule))
    assert stated.model == shipped.model
    assert stated.own_sizes == shipped.own_sizes
    assert cli.run(["init", "same", "--from", kind]) == 0
    assert load_schedule(Path("same.yaml")).model == stated.model
    model.save_config(tmp_path)  # type: ignore[operator]
    assert cli.run(["init", "mine", "--from", "config.json"]) == 0
    assert cli.run(["init", "folder", "--from", "."]) == 0
    assert load_schedule(Path("folder.yaml")).model == load_schedule(Path("mine.yaml")).model
    sharded = stepgraph.wrap(model, "mine.yaml", ranks=2, device="cpu", overrides={"model.dtype": "float32"})
    call = tiny.call(True)
    torch.testing.assert_close(sharded(**call).sample, own(model, call), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "code", "told"),
    [
        ("diffusers.UNet2DModel", 3, "E622: there is no binding for the class diffusers.UNet2DModel"),
        ("diffusers.SD3Transformer2DModel", 3, "docs/bindings.md shows how to write one"),  # no misspelt FLUX
        ("diffusers.WanTransformer3DModl", 3, "did you mean 'WanTransformer3DModel'?"),
        ("os.WanTransformer3DModel", 3, "E622"),
        ("WanTransformer3DModl", 3, "E622: there is no binding for the class diffusers.WanTransformer3DModl"),
        ("missing.json", 2, "E100: missing.json is no config"),
        ("models/wan/transformer", 2, "E100: models/wan/transformer is no config"),
    ],
)
def test_what_no_schedule_can_be_drafted_from(
    source: str, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.run(["init", "--from", source]) == code
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_whole_pipeline_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    assert cli.run(["init", "mine", "--from", str(tmp_path), "-o", str(tmp_path / "mine.yaml")]) == 2
    assert "take the pipeline's folder `transformer`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('{"num_layers": 2}', "a JSON object with _class_name"),
        ("[1]", "a JSON object with _class_name"),
        ("{", "other text"),
        ('{"_class_name": "UNet2DModel"}', "E622: there is no binding for the class diffusers.UNet2DModel"),
        ('{"_class_name": "WanTransformer3DModel", "patch_size": 2}', "is no config of WanTransformer3DModel"),
        (
            '{"_class_name": "FluxTransformer2DModel", "in_channels": null, "out_channels": null}',
            "is no config of Flux",
        ),
        ('{"_class_name": "WanTransformer3DModel", "num_layers": "x"}', "a whole number"),
    ],
)
def test_configs_that_are_none(config: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some.json"
    file.write_text(config)
    output = tmp_path / "mine.yaml"
    assert cli.run(["init", "mine", "--from", str(file), "-o", str(output)]) in (1, 2, 3)
    assert told in capsys.readouterr().err
    assert not output.exists()

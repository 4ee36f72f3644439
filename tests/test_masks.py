"""Masks of keys: typed like every tensor, right for every mesh, in joint and in cross-attention (CASES 25, 27)."""

import pytest
import torch

from stepgraph.kernels import reference
from stepgraph.kernels.stages import MadeUpStages
from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.compare import compare
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import schedule_of, simulate

HEAD = """
version: 1
name: masked
model: {layers: 2, hidden: 16, heads: 4, head_dim: 4, ffn: 8, dtype: float64}
mesh: {ulysses: 4}
shape: {batch: 3, seq: {img: 11, txt: 6}}
inputs:
  latents: {shape: [batch, img, 6]}
  text: {shape: [batch, txt, 5]}
  txt_mask: {shape: [batch, txt], dtype: bool}
  img_mask: {shape: [batch, img]}
outputs: [noise]
"""
JOINT = """
blocks:
  dual:
    - each: [img, txt]
      do:
        - linear: {name: qkv, in: x, out: {q: heads, k: kv_heads, v: kv_heads}}
        - send: [q, k, v]
    - barrier: all
    - attention: {in: [q, k, v], concat: [txt, img], mask: MASK, out: o}
    - each: [img, txt]
      do:
        - gather: o
        - linear: {name: out, in: o, out: x}
step:
  - call: {name: embed_img, in: latents, out: x.img, shape: [batch, img, hidden]}
  - call: {name: embed_txt, in: text, out: x.txt, shape: [batch, txt, hidden]}
  - shard: [x.img, x.txt]
  - layers: dual
  - concat: {in: [x.txt, x.img], out: x}
  - split: {in: x, out: [x.txt, x.img]}
  - call: {name: head, in: [x.img], out: noise, shape: [batch, img, 6]}
  - all_gather: noise
  - all_gather: {name: text_too, in: x.txt, out: told}
  - call: {name: text_head, in: told, out: rest, shape: [batch, txt, 5]}
"""
SINGLE = """
blocks:
  single:
    - linear: {name: qkv, in: x, out: {q: heads, k: kv_heads, v: kv_heads}}
    - send: {in: [q, k, v], barrier: true}
    - attention: {in: [q, k, v], mask: MASK, out: o}
    - gather: o
    - linear: {name: out, in: o, out: x}
step:
  - call: {name: embed_img, in: latents, out: x.img, shape: [batch, img, hidden]}
  - call: {name: embed_txt, in: text, out: x.txt, shape: [batch, txt, hidden]}
  - shard: [x.img, x.txt]
  - concat: {in: [x.txt, x.img], out: x}
  - layers: single
  - split: {in: x, out: [x.txt, x.img]}
  - all_gather: {in: [x.img, x.txt]}
  - call: {name: head, in: x.img, out: noise, shape: [batch, img, 6]}
  - call: {name: text_head, in: x.txt, out: rest, shape: [batch, txt, 5]}
"""
CROSS = """
blocks:
  cross:
    - linear: {name: q, in: x, out: {q: heads}}
    - linear: {name: kv, in: ctx, out: {k: kv_heads, v: kv_heads}}
    - attention: {in: [q, k, v], mask: MASK, out: o}
    - linear: {name: out, in: o, out: x}
step:
  - call: {name: embed_img, in: latents, out: x, shape: [batch, img, hidden]}
  - call: {name: embed_txt, in: text, out: ctx, shape: [batch, txt, hidden]}
  - shard: x
  - layers: cross
  - call: {name: head, in: x, out: noise, shape: [batch, img, 6]}
  - all_gather: noise
"""
BODIES = {"joint": JOINT, "single": SINGLE, "cross": CROSS}


def text_of(body: str, mask: str, **sizes: int) -> str:
    text = (HEAD + BODIES[body]).replace("MASK", mask)
    for name in ("txt_mask", "img_mask"):
        if name not in mask:
            text = "\n".join(line for line in text.splitlines() if not line.startswith(f"  {name}:"))
    if "rest" in text:
        text = text.replace("outputs: [noise]", "outputs: [noise, rest]")
    for name, usual in (("ulysses", 4), ("img", 11), ("txt", 6)):
        text = text.replace(f"{name}: {usual}", f"{name}: {sizes.get(name, usual)}")
    return text


CASES = [
    ("joint", "txt_mask"),
    ("joint", "[img_mask, txt_mask]"),
    ("single", "txt_mask"),
    ("single", "[txt_mask, img_mask]"),
    ("cross", "txt_mask"),
]


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@pytest.mark.parametrize(("body", "mask"), CASES)
def test_agrees_with_the_unsharded_model(body: str, mask: str, ulysses: int) -> None:
    for img, txt in ((11, 6), (3, 1)):  # a rank without text
        plan = compile_schedule(read_schedule(text_of(body, mask, ulysses=ulysses, img=img, txt=txt), "masked.yaml"))
        report = simulate(plan, steps=2, seed=ulysses)
        assert report is not None
        assert report.ok, report
        assert report.max_abs_error < 1e-12
        assert prove(plan).ok


@pytest.mark.parametrize(("body", "mask"), CASES)
def test_every_op_agrees(body: str, mask: str) -> None:
    rows = compare(compile_schedule(read_schedule(text_of(body, mask, ulysses=3), "masked.yaml")), seed=1)
    assert rows
    assert not [row for row in rows if row.differs]


@pytest.mark.parametrize(("body", "mask"), CASES)
def test_masked_tokens_are_not_seen(body: str, mask: str) -> None:
    """Whatever stands where the mask is false, the image comes out the same; without the mask it does not."""
    plan = compile_schedule(read_schedule(text_of(body, mask, ulysses=2), "masked.yaml"))
    inputs = random_inputs(plan, 0)
    inputs["txt_mask"][:] = torch.tensor([True, True, False, True, False, False])
    if "img_mask" in inputs:
        inputs["img_mask"][:] = 1
    other = {name: tensor.clone() for name, tensor in inputs.items()}
    other["text"][:, ~inputs["txt_mask"][0]] += 3
    seen = dict(other, txt_mask=torch.ones_like(inputs["txt_mask"]))
    with torch.no_grad(), Session(plan, device="cpu", stages=MadeUpStages(0)) as session:
        step = session.capture()
        first, second, third = (
            outputs[0] if isinstance(outputs, tuple) else outputs
            for outputs in (step(**given) for given in (inputs, other, seen))
        )
    assert torch.equal(first, second)
    assert not torch.allclose(first, third)


def test_a_query_without_keys_gives_zero() -> None:
    q, k, v = (torch.randn(2, 5, 3, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[False] * 5, [True, False, True, True, False]])
    got = reference.attention(q, k, v, mask)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    torch.testing.assert_close(got[1:], reference.attention(q[1:], k[1:, mask[1]], v[1:, mask[1]]))


@pytest.mark.parametrize("body", sorted(BODIES))
def test_samples_without_any_key(body: str) -> None:
    """Sharded and unsharded agree on them, and nothing is NaN."""
    mask = "txt_mask" if body == "cross" else "[txt_mask, img_mask]"
    plan = compile_schedule(read_schedule(text_of(body, mask), "masked.yaml"))
    inputs = random_inputs(plan, 2)
    for name in mask.strip("[]").split(", "):
        inputs[name][1] = 0
    with torch.no_grad(), Session(plan, device="cpu", stages=MadeUpStages(0)) as session:
        got = session.capture()(**inputs)
        want = Unsharded(schedule_of(plan), 0)(inputs)
    for one, two in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
        assert one.isfinite().all()


def refusal(text: str) -> str:
    with pytest.raises(ScheduleError) as error:
        compile_schedule(read_schedule(text, "masked.yaml"))
    return str(error.value)


@pytest.mark.parametrize("body", sorted(BODIES))
def test_a_mask_that_is_sharded(body: str) -> None:
    text = text_of(body, "txt_mask").replace("  - layers: ", "  - shard: {name: early, in: txt_mask}\n  - layers: ")
    told = refusal(text)
    assert "E203" in told
    assert "needs the whole mask" in told
    assert "leave the mask out of `shard`, or all_gather it" in told
    again = "  - all_gather: {name: whole, in: txt_mask}\n  - layers: "
    plan = compile_schedule(read_schedule(text.replace("  - layers: ", again), "masked.yaml"))
    report = simulate(plan, steps=1, seed=0)
    assert report is not None
    assert report.ok


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("txt_mask: {shape: [batch, txt]", "txt_mask: {shape: [batch, img]"),
        ("txt_mask: {shape: [batch, txt]", "txt_mask: {shape: [batch, 6]"),
        ("txt_mask: {shape: [batch, txt]", "txt_mask: {shape: [txt]"),
        ("txt_mask: {shape: [batch, txt]", "txt_mask: {shape: [batch, heads, txt]"),
    ],
)
def test_a_mask_of_other_keys(line: str, shape: str) -> None:
    text = text_of("cross", "txt_mask")
    assert line in text
    told = refusal(text.replace(line, shape))
    assert "E204" in told
    assert "one mask at most for each of: txt" in told or "can't stand here" in told


def test_two_masks_of_one_sequence() -> None:
    told = refusal(text_of("joint", "[txt_mask, txt_mask]"))
    assert "E204" in told
    assert "is not the mask of one sequence of keys" in told


def test_a_mask_over_keys_of_a_plain_number() -> None:
    text = text_of("cross", "txt_mask").replace("[batch, txt", "[batch, 9")
    plan = compile_schedule(read_schedule(text.replace("txt: 6", "unused: 6"), "masked.yaml"))
    report = simulate(plan, steps=2, seed=0)
    assert report is not None
    assert report.ok


def test_a_mask_is_no_dtype_of_a_model() -> None:
    told = refusal(text_of("cross", "txt_mask").replace("dtype: float64}", "dtype: bool}"))
    assert "E103" in told
    assert "float64" in told


def test_rows_that_a_send_laid_down_do_not_meet_rows_in_order() -> None:
    """After a send a concat's rows lie place by place; a table in the order of the segments would turn wrong rows."""
    text = text_of("single", "txt_mask").replace(
        "inputs:", "inputs:\n  rope_img: {shape: [img, head_dim]}\n  rope_txt: {shape: [txt, head_dim]}"
    )
    text = text.replace(
        "  - layers: single", "  - concat: {name: r, in: [rope_txt, rope_img], out: rope}\n  - layers: single"
    )
    told = refusal(text.replace("    - attention", "    - rope: {in: [q, k], rope: rope}\n    - attention"))
    assert "E204" in told
    assert "txt+img by place" in told


def test_parts_that_are_joined_by_head_are_gathered_first() -> None:
    text = text_of("joint", "txt_mask")
    before, _, after = text.partition("    - each: [img, txt]\n      do:\n        - gather: o\n")
    assert after
    joined = (
        "    - concat: {name: os, in: [o.txt, o.img], out: o}\n    - gather: o\n"
        "    - split: {in: o, out: [o.txt, o.img]}\n    - each: [img, txt]\n      do:\n"
    )
    told = refusal(before + joined + after)
    assert "E203" in told
    assert "gather the parts" in told


@pytest.mark.parametrize("ulysses", [1, 2, 3])
def test_a_mask_of_the_first_rows(ulysses: int) -> None:
    """`keys` and a mask: the mask is that of the rows that are attended to."""
    text = CROSS_FIRST_ROWS.replace("{ulysses: 4}", f"{{ulysses: {ulysses}}}")
    plan = compile_schedule(read_schedule(text, "masked.yaml"))
    report = simulate(plan, steps=2, seed=ulysses)
    assert report is not None
    assert report.ok, report
    assert report.max_abs_error < 1e-12
    told = refusal(text.replace("keys: kept", "keys: 4"))
    assert "is not the mask of one sequence of keys" in told


CROSS_FIRST_ROWS = (
    (HEAD.replace("txt: 6}}", "txt: 6}, kept: 5}").replace("[batch, txt], dtype", "[batch, kept], dtype") + CROSS)
    .replace("mask: MASK", "mask: txt_mask, keys: kept")
    .replace("  img_mask: {shape: [batch, img]}\n", "")
)

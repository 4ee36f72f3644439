"""The op table: what an author may write for each kind of op. Validation, JSON Schema and manual come from here."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""A tensor's name; a suffix after a dot tells streams of tokens apart (x.img, x.txt)."""
Size = Annotated[int, Field(ge=1, le=2**40)]
Dim = Size | Name
"""A number, or the name of a size: batch, seq or a named length, hidden, heads, kv_heads, head_dim, ffn, another one of
`shape`, or one of `sizes`."""


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_NAMES_SCHEMA: dict[str, list[JsonSchemaValue]] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}
Names = Annotated[tuple[Name, ...], Field(min_length=1), BeforeValidator(_names), WithJsonSchema(_NAMES_SCHEMA)]
"""One tensor's name or a list of them."""
Dims = Annotated[tuple[Dim, ...], Field(min_length=1, max_length=4), BeforeValidator(as_tuple)]
BufferCount = Literal["auto"] | Annotated[int, Field(ge=1, le=8)]
Handshake = Literal["memop", "copy", "kernel"]
Via = Literal["copy", "nccl"]
Width = Literal["heads", "kv_heads", "ffn", "hidden"]


class Model(BaseModel):
    """Base of everything read from a schedule: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=False)


class OpFields(Model):
    """What every op may have."""

    summary: ClassVar[str]
    runs_on: ClassVar[str] = "compute"
    in_: Names = Field(alias="in", description="The tensor or tensors that the op takes.")
    name: Name | None = Field(None, description="Names the op within its block; the same kind twice needs it.")
    stream: Name | None = Field(
        None, description="The stream that it runs on; by default the one of its kind (compute or copy)."
    )


class OneOutput(OpFields):
    out: Name = Field(description="The name of the result.")


class SameName(OpFields):
    out: Names | None = Field(None, description="New names for the results; by default the names stay.")


class Exchanging(SameName):
    """Ops that move data between ranks."""

    runs_on: ClassVar[str] = "copy"
    via: Via = Field(
        "copy",
        description="copy: pitched copies into the peers' final layout and a handshake; "
        "nccl: one collective of the process group, on the compute stream unless another is named.",
    )
    buffers: BufferCount = Field(
        "auto",
        description="How many targets alternate over the layers; auto takes the fewest provably safe, or more "
        "where the arena gets smaller.",
    )
    handshake: Handshake | None = Field(
        None, description="How its handshake is made: memop, copy or kernel; by default that of `defaults`."
    )


class Norm(OneOutput):
    summary: ClassVar[str] = "RMS norm with a weight."
    over: Literal["head", "hidden"] = Field(
        "hidden", description="Normalise over each head's dimension, or over all features of a token."
    )


class Modulate(OneOutput):
    summary: ClassVar[str] = "in * (1 + scale) + shift."
    shift: Name = Field(description="Tensor that is added.")
    scale: Name = Field(description="Tensor whose 1 + scale is multiplied.")


class Residual(OneOutput):
    summary: ClassVar[str] = "Sum of two tensors, the second times a gate if there is one."
    gate: Name | None = Field(None, description="Tensor that the second operand is multiplied by.")


class Mlp(OneOutput):
    summary: ClassVar[str] = "hidden -> ffn -> hidden with GELU, whole on every rank."


class NormRope(OpFields):
    summary: ClassVar[str] = "RMS norm and rotation of heads, in place."
    rope: Name | None = Field(None, description="Table of cosines and sines, (rows, head_dim).")
    over: Literal["head", "hidden"] = Field(
        "head", description="Normalise over each head's dimension, or over all heads of a token."
    )


class Rope(OpFields):
    summary: ClassVar[str] = "Rotation of heads by a table, in place."
    rope: Name = Field(description="Table of cosines and sines, (rows, head_dim).")


class Attention(OneOutput):
    summary: ClassVar[str] = "Softmax attention of q over k and v; takes in: [q, k, v]."
    concat: Names | None = Field(
        None, description="Suffixes whose q, k and v are joined along the sequence, in this order."
    )
    mask: Names | None = Field(
        None,
        description="One mask for each sequence of keys that has one, (batch, keys), replicated: true, or not 0, where "
        "a key is attended to. A query that may attend to no key gives 0.",
    )
    keys: Size | Name | None = Field(
        None, description="Attend to so many rows of k and v, the first ones: a number, or the name of a size."
    )


class Linear(OpFields):
    summary: ClassVar[str] = "One matrix product; several operands are concatenated in features."
    out: Name | dict[Name, Width] = Field(
        description="A name (hidden wide), or names with widths: views of one result."
    )
    split: Literal["column", "row"] | None = Field(
        None, description="Cut over the mesh's tensor axis; a row split gives a partial sum."
    )


class Call(OpFields):
    summary: ClassVar[str] = "A stage of the user's model, bound by name at run time."
    out: Names = Field(description="The names of the results.")
    shape: Dims | dict[Name, Dims] | None = Field(None, description="The shape of every output, or one for each.")
    like: Name | dict[Name, Name] | None = Field(
        None, description="The tensor whose shape and placement the outputs have, or one for each."
    )
    placement: Literal["sequence", "replicated"] | None = Field(
        None,
        description="Placement of the outputs; by default that of the operand that has their sequence.",
    )


class Send(Exchanging):
    summary: ClassVar[str] = "Moves a tensor from sequence to head placement, into every peer's final layout."
    barrier: bool = Field(False, description="Closes the group of sends since the last barrier with one handshake.")
    into: Name | None = Field(
        None,
        description="A state placed by head, into which the tensor's rows go.",
    )
    at: Annotated[int, Field(ge=0, le=2**40)] | Name = Field(
        0, description="The row of the state where the tensor's first row goes: a number, or the name of a size."
    )


class Barrier(Model):
    summary: ClassVar[str] = "Closes all sends since the last barrier with one handshake."
    runs_on: ClassVar[str] = "copy"
    closes: Literal["all"] = Field(description="Always `all`: every send since the last barrier.")
    name: Name | None = Field(None, description="Names the op within its block.")
    stream: Name | None = Field(None, description="The stream that the handshake is made on.")
    handshake: Handshake | None = Field(None, description="memop, copy or kernel.")


class Gather(Exchanging):
    summary: ClassVar[str] = "Moves an attention output back from head to sequence placement."


class AllReduce(Exchanging):
    summary: ClassVar[str] = "Adds a partial sum over an axis of the mesh."
    over: Literal["tensor"] = Field("tensor", description="The axis of the mesh.")


class AllGather(Exchanging):
    summary: ClassVar[str] = "Makes a tensor placed by sequence whole on every rank."


class Shard(SameName):
    summary: ClassVar[str] = "Keeps each rank's rows of a replicated tensor; a view, no copy."


class Concat(OneOutput):
    summary: ClassVar[str] = "Joins tensors along the sequence, each rank its own rows."


class Split(OpFields):
    summary: ClassVar[str] = "Undoes a concat; views, no copy."
    out: Names = Field(description="The names of the parts, in the order of the concat.")


class Keep(OpFields):
    summary: ClassVar[str] = "Copies a tensor into a state of its shape and placement."
    into: Name = Field(description="The state; its name then means what was copied.")


class Guide(OneOutput):
    summary: ClassVar[str] = (
        "Classifier-free guidance: uncond + scale * (cond - uncond). Takes in: [cond, uncond], or, where the schedule "
        "has `cfg`, the branch alone."
    )
    scale: Name = Field(description="Tensor of shape (batch); with `cfg`, an input.")
    via: Via = Field("copy", description="How the branches are exchanged over the mesh's cfg axis.")
    buffers: BufferCount = Field("auto", description="How many targets alternate.")
    handshake: Handshake | None = Field(None, description="memop, copy or kernel.")


class Shorthand:
    """Lets a bare operand or list of operands stand for a map with that one field, in files and in the JSON Schema."""

    def __init__(self, field: str, *shapes: JsonSchemaValue) -> None:
        self.field, self.shapes = field, shapes

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._spell_out, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [*self.shapes, handler(schema)]}

    def _spell_out(self, value: object) -> object:
        return {self.field: value} if isinstance(value, str | list) else value


OPERANDS = Shorthand("in", *_NAMES_SCHEMA["anyOf"])
CLOSES = Shorthand("closes", {"const": "all"})


class LayerRun(Model):
    block: Name = Field(description="A name under `blocks`.")
    repeat: Size | Name = Field(1, description="How many layers of it: a number, or a name under `sizes`.")
    first: Annotated[int, Field(ge=0)] | Name | None = Field(
        None,
        description="Which layer of the model the first one is, a number or a name under `sizes`; by default the one "
        "after those before it.",
    )


class ChunkSpec(Model):
    heads: Annotated[int, Field(ge=1, le=64)] = Field(description="Into how many chunks each rank's heads are cut.")


def _layer_runs(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Entry(Model):
    """One item of a block or step: a map of one key, the kind; or `each` or `chunks` with `do`."""

    norm: Annotated[Norm, OPERANDS] | None = None
    modulate: Annotated[Modulate, OPERANDS] | None = None
    residual: Annotated[Residual, OPERANDS] | None = None
    mlp: Annotated[Mlp, OPERANDS] | None = None
    norm_rope: Annotated[NormRope, OPERANDS] | None = None
    rope: Annotated[Rope, OPERANDS] | None = None
    attention: Annotated[Attention, OPERANDS] | None = None
    linear: Annotated[Linear, OPERANDS] | None = None
    call: Annotated[Call, OPERANDS] | None = None
    send: Annotated[Send, OPERANDS] | None = None
    barrier: Annotated[Barrier, CLOSES] | None = None
    gather: Annotated[Gather, OPERANDS] | None = None
    all_reduce: Annotated[AllReduce, OPERANDS] | None = None
    shard: Annotated[Shard, OPERANDS] | None = None
    all_gather: Annotated[AllGather, OPERANDS] | None = None
    concat: Annotated[Concat, OPERANDS] | None = None
    split: Annotated[Split, OPERANDS] | None = None
    keep: Annotated[Keep, OPERANDS] | None = None
    guide: Annotated[Guide, OPERANDS] | None = None
    layers: Name | Annotated[tuple[LayerRun, ...], BeforeValidator(_layer_runs)] | None = Field(
        None, description="A block's name (model.layers of them), or a list of {block, repeat}."
    )
    each: Annotated[tuple[Name, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="Suffixes: `do` is repeated for each; in it `x` means `x.suffix` if there is one."
    )
    chunks: ChunkSpec | None = Field(
        None,
        description="{heads: N}: in `do`, from the sends to the gathers of an attention, each rank's heads are cut "
        "into N chunks: chunk i + 1 is sent while chunk i is attended to and chunk i - 1 is gathered.",
    )
    do: Annotated[tuple[Entry, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="The ops that are repeated for each suffix, or cut into chunks."
    )


OP_KINDS: dict[str, type[OpFields] | type[Barrier]] = {
    "norm": Norm,
    "modulate": Modulate,
    "residual": Residual,
    "mlp": Mlp,
    "norm_rope": NormRope,
    "rope": Rope,
    "attention": Attention,
    "linear": Linear,
    "call": Call,
    "send": Send,
    "barrier": Barrier,
    "gather": Gather,
    "all_reduce": AllReduce,
    "shard": Shard,
    "all_gather": AllGather,
    "concat": Concat,
    "split": Split,
    "keep": Keep,
    "guide": Guide,
}
Op = (
    Norm
    | Modulate
    | Residual
    | Mlp
    | NormRope
    | Rope
    | Attention
    | Linear
    | Call
    | Send
    | Barrier
    | Gather
    | AllReduce
    | Shard
    | AllGather
    | Concat
    | Split
    | Keep
    | Guide
)

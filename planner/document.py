"""What a schedule file may hold: the schema of its sections, from which the JSON Schema and the manual are made."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.json_schema import JsonSchemaValue

from stepgraph.planner.ops import BufferCount, Dims, Entry, Handshake, Model, Name, Names, Size, Via, as_tuple
from stepgraph.planner.plan import DType

Cfg = Literal["batch", "sequential", "parallel"]
AxisName = Literal["ulysses", "tensor", "cfg"]


def _dtype(value: object) -> object:
    return DType(value) if value in [d.value for d in DType] else value


DTypeName = Annotated[DType, BeforeValidator(_dtype)]
FloatName = Annotated[Literal[DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64], BeforeValidator(_dtype)]
Entries = Annotated[tuple[Entry, ...], Field(min_length=1), BeforeValidator(as_tuple)]


class ModelSizes(Model):
    """Global sizes of the model."""

    layers: Size = Field(description="How many layers `layers: NAME` repeats.")
    hidden: Size = Field(description="Features of a token.")
    heads: Size = Field(description="Attention heads of q.")
    kv_heads: Size | None = Field(None, description="Attention heads of k and v; by default as many as heads.")
    head_dim: Size = Field(description="Features of a head.")
    ffn: Size = Field(description="Inner features of the MLP.")
    dtype: FloatName = Field(description="bfloat16, float16, float32 or float64.")


Extra = Annotated[int, Field(ge=0, le=2**40)]


class ShapeSizes(Model):
    """Global sizes of a request: batch, seq, and any others under names of their own, for shapes and for `at`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Extra]

    batch: Size = Field(1, description="Samples.")
    seq: Size | Annotated[dict[Name, Size], Field(min_length=1)] = Field(
        description="Tokens, or a map of named lengths."
    )


class InputSpec(Model):
    """A tensor that the caller hands over."""

    shape: Dims = Field(description="Global sizes, numbers or names.")
    dtype: DTypeName | None = Field(None, description="By default that of the model; bool for a mask.")
    placement: Literal["replicated", "sequence", "cfg"] = Field(
        "replicated",
        description="replicated: every rank loads it whole; sequence: each rank loads its own rows; cfg: both "
        "branches, conditioned first, are stacked in front of the shape.",
    )


class StateSpec(Model):
    """A tensor that outlives a step: zero before a session's first step, then what the last step has left in it."""

    shape: Dims = Field(description="Global sizes, numbers or names.")
    placement: Literal["sequence", "head", "replicated"] = Field(
        "replicated",
        description="replicated: every rank holds it whole; sequence: its own rows; head: all rows of its own heads.",
    )
    dtype: DTypeName | None = Field(None, description="By default that of the model.")
    per: Literal["step", "layer"] = Field(
        "step", description="layer: every layer has one of its own, and the name means that of the layer; step: one."
    )


class StreamSpec(Model):
    """A stream; it has no settings."""


class KindDefaults(Model):
    """Default fields of a kind."""

    stream: Name | None = Field(None, description="The stream that the kind runs on.")


class NormDefaults(KindDefaults):
    over: Literal["head", "hidden"] | None = Field(None, description="Normalise over head or hidden.")


class BarrierDefaults(KindDefaults):
    handshake: Handshake | None = Field(None, description="memop, copy or kernel.")


class ExchangeDefaults(BarrierDefaults):
    via: Via | None = Field(None, description="copy or nccl.")
    buffers: BufferCount | None = Field(None, description="How many targets alternate over the layers.")


class Defaults(Model):
    """Fields that a kind of op has by default, and how peers are reached."""

    handshake: Handshake = Field("memop", description="How handshakes are made: memop, copy or kernel.")
    transport: Literal["auto", "symmetric", "ipc", "nccl"] = Field(
        "auto", description="How peers' memory is reached; auto lets the group choose."
    )
    norm: NormDefaults = NormDefaults()
    modulate: KindDefaults = KindDefaults()
    residual: KindDefaults = KindDefaults()
    mlp: KindDefaults = KindDefaults()
    norm_rope: NormDefaults = NormDefaults()
    rope: KindDefaults = KindDefaults()
    attention: KindDefaults = KindDefaults()
    linear: KindDefaults = KindDefaults()
    call: KindDefaults = KindDefaults()
    send: ExchangeDefaults = ExchangeDefaults()
    barrier: BarrierDefaults = BarrierDefaults()
    gather: ExchangeDefaults = ExchangeDefaults()
    all_reduce: ExchangeDefaults = ExchangeDefaults()
    shard: KindDefaults = KindDefaults()
    all_gather: ExchangeDefaults = ExchangeDefaults()
    concat: KindDefaults = KindDefaults()
    split: KindDefaults = KindDefaults()
    keep: KindDefaults = KindDefaults()
    guide: ExchangeDefaults = ExchangeDefaults()


class VariantSpec(Model):
    """A version of the step."""

    step: Entries = Field(description="The ops of the variant's step.")
    after: Names | None = Field(
        None, description="The variants that it may follow; by default any. The first variant of the file begins."
    )
    outputs: Annotated[tuple[Name, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="What the caller gets, or []; by default the schedule's `outputs`."
    )


class Document(Model):
    """A schedule file."""

    version: Literal[1] = Field(description="The language's version: 1.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = Field(description="The schedule's name.")
    model: ModelSizes = Field(description="Global sizes of the model.")
    sizes: dict[Name, Size] = Field(
        default={}, description="Sizes of your own, by name: for shapes, and for `repeat` under `layers`."
    )
    mesh: Annotated[dict[AxisName, Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)] = Field(
        description="Axes and their sizes, in order; the last varies fastest over ranks."
    )
    shape: ShapeSizes = Field(description="Global sizes of a request.")
    inputs: Annotated[dict[Name, InputSpec], Field(min_length=1)] = Field(
        description="What the caller hands over, in order."
    )
    outputs: Names = Field(description="What the caller gets: names at the end of the step.")
    cfg: Cfg | None = Field(
        None,
        description="Classifier-free guidance. batch: both branches in one batch; sequential: one after the other in "
        "one step; parallel: each on ranks of its own, along the mesh's axis cfg of 2, where it is the default.",
    )
    state: dict[Name, StateSpec] = Field(default={}, description="Tensors that outlive a step.")
    streams: Annotated[dict[Name, StreamSpec], Field(min_length=1)] = Field(
        default={"compute": StreamSpec(), "copy": StreamSpec()},
        description="The streams; a capture starts and ends on the first.",
    )
    defaults: Defaults = Field(default=Defaults(), description="Fields that a kind has by default.")
    blocks: dict[Name, Entries] = Field(default={}, description="Named lists of ops.")
    step: Entries | None = Field(None, description="The ops of one denoising step.")
    variants: Annotated[dict[Name, VariantSpec], Field(min_length=1)] | None = Field(
        None, description="Named versions of the step, instead of `step`: each becomes a plan and a graph of its own."
    )
    buckets: Annotated[dict[Name, Annotated[dict[Name, Extra], Field(min_length=1)]], Field(min_length=1)] | None = (
        Field(None, description="Named values for sizes of `shape`: each becomes a plan and a graph of its own.")
    )


def json_schema() -> JsonSchemaValue:
    """The JSON Schema of a schedule file."""
    schema = Document.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "stepgraph schedule", **schema}

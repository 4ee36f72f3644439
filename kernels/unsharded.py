"""The unsharded model of a schedule: what a sharded run is compared with.

Walks the schedule as it was written, on whole tensors, in the order of the file. It knows no plan, no rank, no stream:
what moves data between ranks is the identity here. Only the arithmetic of an op and the names of weights are shared
with the sharded run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepgraph.kernels import reference
from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.weights import MadeUpWeights
from stepgraph.planner import ops
from stepgraph.planner.naming import base_name
from stepgraph.planner.ops import Dims
from stepgraph.planner.schedule import ChunksItem, EachItem, Item, LayersItem, OpItem, Schedule

Observe = Callable[[str, int | None, int, Mapping[str, Tensor]], None]
"""Is told an op's name, its layer, the branch of guidance, and the tensors that names mean there."""


class Unsharded:
    """A callable model: named inputs to named outputs, all whole, in ``dtype`` and on ``device``. A call is a step, and
    states are those that the call before has left."""

    def __init__(
        self,
        schedule: Schedule,
        seed: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | None = None,
    ) -> None:
        self.schedule, self.dtype = schedule, dtype
        self.weights = MadeUpWeights(seed, device or torch.device("cpu"))
        self.states: list[dict[str, Tensor]] = [{} for _ in range(2 if schedule.cfg else 1)]
        """Of each branch of guidance: what the last step has left in each state, by name and, if it has one, layer.
        Models of several versions of a step may have it in common."""
        self.names: dict[tuple[str | int, ...], str] = {}
        for block, items in (*schedule.blocks.items(), ("step", schedule.step)):
            self._name(block, items, {})

    def _name(self, block: str, items: Iterable[Item], taken: dict[str, int]) -> None:
        """Op names as the language defines them: unnamed repeats of a kind are numbered in the file's order."""
        for item in items:
            if isinstance(item, EachItem | ChunksItem):
                self._name(block, item.items, taken)
            elif isinstance(item, OpItem):
                base = name = base_name(item)
                number = 2
                while name in taken:
                    name, number = f"{base}_{number}", number + 1
                taken[name] = 1
                self.names[item.path] = f"{block}.{name}"

    def __call__(self, inputs: Mapping[str, Tensor], observe: Observe | None = None) -> tuple[Tensor, ...]:
        """Inputs placed ``cfg`` hold both branches; the step is then walked for both side by side. ``observe`` is told
        after each op what all names mean."""
        stacked = {name for name, spec in self.schedule.inputs if spec.placement == "cfg"}
        branches = [
            {name: (tensor[branch] if name in stacked else tensor).to(self.dtype) for name, tensor in inputs.items()}
            for branch in range(2 if self.schedule.cfg else 1)
        ]
        walk = _Walk(self, branches, observe)
        walk.recall("step", "")
        walk.items(self.schedule.step, None, "")
        walk.store("step", "")
        return tuple(branches[0][name] for name in self.schedule.outputs)


@dataclass(frozen=True, slots=True)
class Lead:
    """The dimensions in front of a tensor's features."""

    batch: bool
    """Whether there is a batch; a rope table has none."""
    rows: bool
    """Whether there is a dimension that counts rows; a timestep has none."""
    segments: tuple[str, ...] = ()
    """The sequences that the rows are of."""


class _Walk:
    """One step: the tensors that names mean in each branch of guidance, and how far the layers have come."""

    def __init__(self, model: Unsharded, branches: list[dict[str, Tensor]], observe: Observe | None) -> None:
        self.model, self.branches, self.schedule, self.observe = model, branches, model.schedule, observe
        self.layer = 0
        self.leads = {name: self.lead(spec.shape) for name, spec in self.schedule.inputs}

    def lead(self, dims: Dims) -> Lead:
        batch = dims[0] == "batch"
        rest = dims[1:] if batch else dims
        segments = dict(self.schedule.segments)
        rows = bool(rest) and (rest[0] in segments or (len(rest) > 1 and rest[0] not in ("heads", "kv_heads")))
        return Lead(batch, rows, tuple(str(dim) for dim in rest[:1] if dim in segments))

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as a name holds it: a state may have a dtype of its own, where the model works in the file's."""
        spec, model = self.schedule.state.get(name), self.model
        if spec is None or spec.dtype is None or model.dtype is not torch_dtype(self.schedule.model.dtype):
            return tensor
        return tensor.to(torch_dtype(spec.dtype)).to(model.dtype)

    def recall(self, per: str, key: str) -> None:
        """Let the names of the step's or a layer's states mean what the last step has left in them."""
        sizes = self.schedule.sizes
        for name, spec in self.schedule.state.items():
            if spec.per != per:
                continue
            self.leads[name] = self.lead(spec.shape)
            for tensors, kept in zip(self.branches, self.model.states, strict=True):
                where = name + key + self.schedule.state_suffix(name)
                if where not in kept:
                    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
                    kept[where] = torch.zeros(shape, dtype=self.model.dtype, device=self.model.weights.device)
                tensors[name] = kept[where]

    def store(self, per: str, key: str) -> None:
        """Keep what their names mean now."""
        for name in (name for name, spec in self.schedule.state.items() if spec.per == per):
            for tensors, kept in zip(self.branches, self.model.states, strict=True):
                kept[name + key + self.schedule.state_suffix(name)] = tensors[name]

    def items(self, items: Iterable[Item], layer: int | None, suffix: str) -> None:
        for item in items:
            if isinstance(item, EachItem):
                for each in item.suffixes:
                    self.items(item.items, layer, each)
            elif isinstance(item, ChunksItem):
                self.items(item.items, layer, suffix)
            elif isinstance(item, LayersItem):
                for block, repeat, first in item.runs:
                    self.layer = self.layer if first is None else first
                    for _ in range(repeat):
                        self.recall("layer", f"[{self.layer}]")
                        self.items(self.schedule.blocks[block], self.layer, "")
                        self.store("layer", f"[{self.layer}]")
                        self.layer += 1
            else:
                for branch in range(len(self.branches)):
                    op = _Op(self, item, layer, suffix, branch)
                    _STEPS[item.kind](op)
                    if self.observe is not None:
                        self.observe(op.name, layer, branch, op.tensors)


class _Op:
    """One op of a walk: its operands, its weights, where its results go."""

    def __init__(self, walk: _Walk, item: OpItem, layer: int | None, suffix: str, branch: int) -> None:
        self.walk, self.op, self.layer, self.suffix, self.branch = walk, item.op, layer, suffix, branch
        self.tensors = walk.branches[branch]
        self.name = walk.model.names[item.path] + (f".{suffix}" if suffix else "")
        self.weights, self.dtype = walk.model.weights, walk.model.dtype

    def full(self, name: str) -> str:
        if self.suffix:
            for candidate in (f"{name}.{self.suffix}", f"{name}_{self.suffix}"):
                if candidate in self.tensors:
                    return candidate
        return name

    def read(self, name: str) -> Tensor:
        return self.tensors[self.full(name)]

    def read_all(self) -> list[Tensor]:
        assert not isinstance(self.op, ops.Barrier)
        return [self.read(name) for name in self.op.in_]

    def write(self, name: str, tensor: Tensor, lead: Lead | None = None) -> None:
        """Give a name a tensor. ``lead`` is by default that of the op's first operand."""
        full = f"{name}.{self.suffix}" if self.suffix and "." not in name else name
        assert not isinstance(self.op, ops.Barrier)
        self.walk.leads[full] = lead or self.walk.leads[self.full(self.op.in_[0])]
        self.tensors[full] = self.walk.kept(full, tensor)

    def matrix(self, part: str, rows: int, cols: int) -> Tensor:
        return self.weights.matrix(self.name, self.layer, part, (rows, cols), self.dtype)

    def normalise(self, x: Tensor, part: str, over: str) -> Tensor:
        size = x.shape[-1] * x.shape[-2] if over == "hidden" and x.dim() == 4 else x.shape[-1]
        return reference.rms_norm(x, self.weights.scale(self.name, self.layer, part, size, self.dtype), over)


def _norm(o: _Op) -> None:
    assert isinstance(o.op, ops.Norm)
    o.write(o.op.out, o.normalise(o.read_all()[0], "weight", o.op.over))


def _modulate(o: _Op) -> None:
    assert isinstance(o.op, ops.Modulate)
    o.write(o.op.out, reference.modulate(o.read_all()[0], o.read(o.op.shift), o.read(o.op.scale)))


def _residual(o: _Op) -> None:
    assert isinstance(o.op, ops.Residual)
    x, added = o.read_all()
    o.write(o.op.out, reference.residual(x, added, o.read(o.op.gate) if o.op.gate else None))


def _mlp(o: _Op) -> None:
    assert isinstance(o.op, ops.Mlp)
    (x,), ffn = o.read_all(), o.walk.schedule.model.ffn
    o.write(o.op.out, reference.mlp(x, o.matrix("up", x.shape[-1], ffn), o.matrix("down", ffn, x.shape[-1])))


def _rotate(o: _Op) -> None:
    assert isinstance(o.op, ops.NormRope | ops.Rope)
    for index, name in enumerate(o.op.in_):
        x = o.read(name)
        if isinstance(o.op, ops.NormRope):
            x = o.normalise(x, f"weight{index}", o.op.over)
        if o.op.rope:
            x = reference.rotate(x, o.read(o.op.rope))
        o.tensors[o.full(name)] = o.walk.kept(o.full(name), x)


def _attention(o: _Op) -> None:
    assert isinstance(o.op, ops.Attention)
    names = [[f"{name}.{suffix}" for suffix in o.op.concat] if o.op.concat else [name] for name in o.op.in_]
    parts = [[o.read(name) for name in part] for part in names]
    keys = o.walk.schedule.sizes[o.op.keys] if isinstance(o.op.keys, str) else o.op.keys
    q, k, v = (torch.cat(part, dim=1) for part in parts)
    k, v = k[:, :keys], v[:, :keys]
    result = reference.attention(q, k, v, _key_mask(o, names[1], keys))
    if not o.op.concat:
        o.write(o.op.out, result)
        return
    for name, suffix, out in zip(
        names[0], o.op.concat, result.split([part.shape[1] for part in parts[0]], dim=1), strict=True
    ):
        o.write(f"{o.op.out}.{suffix}", out, o.walk.leads[o.full(name)])


def _key_mask(o: _Op, names: list[str], keys: int | None) -> Tensor | None:
    """The mask of an attention's keys: that of each of their sequences, true where a sequence has none; of the first
    ``keys`` rows, where those alone are attended to, their own."""
    assert isinstance(o.op, ops.Attention)
    if not o.op.mask:
        return None
    if keys is not None:
        return o.read(o.op.mask[0]) != 0
    masks: dict[str, Tensor] = {}
    for name in o.op.mask:
        lead, mask = o.walk.leads[o.full(name)], o.read(name) != 0
        lengths = [o.walk.schedule.sizes[segment] for segment in lead.segments] or [mask.shape[1]]
        masks |= dict(zip(lead.segments or ("",), mask.split(lengths, dim=1), strict=True))
    parts = []
    for name in names:
        for segment in o.walk.leads[o.full(name)].segments or ("",):
            length = o.walk.schedule.sizes[segment] if segment else o.read(name).shape[1]
            parts.append(masks.get(segment, o.read(name).new_ones((o.read(name).shape[0], length)) != 0))
    return torch.cat(parts, dim=1)


def _linear(o: _Op) -> None:
    assert isinstance(o.op, ops.Linear)
    sizes = o.walk.schedule.sizes
    inputs = [x.flatten(2) if x.dim() == 4 else x for x in o.read_all()]
    x = torch.cat(inputs, dim=-1)
    widths = {o.op.out: "hidden"} if isinstance(o.op.out, str) else o.op.out
    for index, (name, width) in enumerate(widths.items()):
        heads = width in ("heads", "kv_heads")
        cols = sizes[width] * (sizes["head_dim"] if heads else 1)
        result = x @ o.matrix(f"weight{index}", x.shape[-1], cols)
        o.write(name, result.unflatten(-1, (sizes[width], sizes["head_dim"])) if heads else result)


def _box(x: Tensor, lead: Lead) -> Tensor:
    """A tensor as (batch, rows, features)."""
    if not lead.batch:
        x = x.unsqueeze(0)
    if not lead.rows:
        x = x.unsqueeze(1)
    return x.unsqueeze(2) if x.dim() == 2 else x.flatten(2)


def _call(o: _Op) -> None:
    assert isinstance(o.op, ops.Call)
    sizes = o.walk.schedule.sizes
    inputs = [_box(o.read(name), o.walk.leads[o.full(name)]) for name in o.op.in_]
    for number, out in enumerate(o.op.out):
        if o.op.like is not None:
            like = o.op.like if isinstance(o.op.like, str) else o.op.like[out]
            shape, lead = tuple(o.read(like).shape), o.walk.leads[o.full(like)]
        else:
            dims = o.op.shape[out] if isinstance(o.op.shape, dict) else o.op.shape
            assert dims is not None
            shape, lead = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims), o.walk.lead(dims)
        batch, rows, cols = _box(torch.empty(shape, device="meta"), lead).shape
        weights = [
            o.weights.number(o.name, o.layer, f"weight{number}.{index}", o.dtype)
            if x.shape[-1] == cols
            else o.matrix(f"weight{number}.{index}", x.shape[-1], cols)
            for index, x in enumerate(inputs)
        ]
        o.write(out, reference.mix(inputs, weights, batch, rows).reshape(shape), lead)


def _identity(o: _Op) -> None:
    """Ops that move data between ranks, or cut it: whole tensors stay as they are."""
    assert isinstance(o.op, ops.SameName)
    for name, out in zip(o.op.in_, o.op.out or (), strict=False):
        o.write(out, o.read(name))


def _send(o: _Op) -> None:
    assert isinstance(o.op, ops.Send)
    if o.op.into is None:
        _identity(o)
        return
    (x,), state = o.read_all(), o.read(o.op.into).clone()
    first = o.walk.schedule.sizes[o.op.at] if isinstance(o.op.at, str) else o.op.at
    state[:, first : first + x.shape[1]] = x
    o.tensors[o.full(o.op.into)] = state


def _keep(o: _Op) -> None:
    assert isinstance(o.op, ops.Keep)
    (x,) = o.read_all()
    o.tensors[o.full(o.op.into)] = o.walk.kept(o.full(o.op.into), x)


def _concat(o: _Op) -> None:
    assert isinstance(o.op, ops.Concat)
    parts = o.read_all()
    leads = [o.walk.leads[o.full(name)] for name in o.op.in_]
    rows = 1 if leads[0].batch else 0
    joined = replace(leads[0], segments=tuple(segment for lead in leads for segment in lead.segments))
    o.write(o.op.out, torch.cat(parts, dim=rows), joined)


def _split(o: _Op) -> None:
    assert isinstance(o.op, ops.Split)
    (x,) = o.read_all()
    lead = o.walk.leads[o.full(o.op.in_[0])]
    parts = x.split([o.walk.schedule.sizes[segment] for segment in lead.segments], dim=1 if lead.batch else 0)
    for out, part, segment in zip(o.op.out, parts, lead.segments, strict=True):
        o.write(out, part, replace(lead, segments=(segment,)))


def _guide(o: _Op) -> None:
    assert isinstance(o.op, ops.Guide)
    if o.branch > 0:
        return  # the first branch has made it for both
    if len(o.walk.branches) > 1:
        cond, uncond = (tensors[o.full(o.op.in_[0])] for tensors in o.walk.branches)
    else:
        cond, uncond = o.read_all()
    guided = reference.guide(cond, uncond, o.read(o.op.scale))
    o.walk.leads[o.op.out] = o.walk.leads[o.full(o.op.in_[0])]
    for tensors in o.walk.branches:
        tensors[o.op.out] = guided


def _nothing(o: _Op) -> None:
    """A barrier orders, it computes nothing."""


_STEPS: dict[str, Callable[[_Op], None]] = {
    "norm": _norm, "modulate": _modulate, "residual": _residual, "mlp": _mlp, "norm_rope": _rotate, "rope": _rotate,
    "attention": _attention, "linear": _linear, "call": _call, "send": _send, "keep": _keep, "barrier": _nothing,
    "gather": _identity, "all_reduce": _identity, "shard": _identity, "all_gather": _identity, "concat": _concat,
    "split": _split, "guide": _guide,
}  # fmt: skip

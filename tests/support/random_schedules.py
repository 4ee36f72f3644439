"""Random small schedules, in the words of the language: what a compiler of plans may be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.plan import Plan
from stepgraph.planner.schedule import read_schedule

HEAD = """version: 1
name: random
model: {{layers: {layers}, hidden: 4, heads: {heads}, kv_heads: {kv_heads}, head_dim: 2, ffn: 4, dtype: float32}}
mesh: {{{mesh}}}
shape: {{seq: {seq}{rows}}}
inputs:
  latents: {{shape: [batch, seq, 2]}}{rope}
outputs: [noise]{state}
streams: {{{streams}}}
defaults: {{handshake: {handshake}}}
blocks:
  layer:
{block}
step:
  - call: {{name: embed, in: latents, out: x, shape: [batch, seq, hidden]}}
  - shard: {sharded}
  - layers: layer
  - call: {{name: head, in: x, out: noise, shape: [batch, seq, 2]}}
  - all_gather: {{in: noise, via: {last}}}
"""


@dataclass(frozen=True, slots=True)
class Axes:
    tensor: int
    ulysses: int

    @property
    def split(self) -> str:
        """A field of a projection whose result is cut over ``tensor``."""
        return ", split: column" if self.tensor > 1 else ""


class _Block:
    """Draws the ops of a block, line by line."""

    def __init__(self, draw: st.DrawFn, axes: Axes) -> None:
        self.draw, self.axes, self.lines = draw, axes, list[str]()
        self.chunked = False
        self.states: list[str] = []
        self.stateful = False

    def one_of(self, *choices: str) -> str:
        return self.draw(st.sampled_from(choices))

    def yes(self) -> bool:
        return self.draw(st.booleans())

    def add(self, line: str) -> None:
        self.lines.append(f"    - {line}")

    def exchange(self) -> str:
        """The fields of an exchange that closes itself."""
        fields = [f", via: {self.one_of('copy', 'nccl')}"]
        fields += [f", buffers: {self.one_of('1', '2', '3')}"] if self.yes() else []
        fields += [f", handshake: {self.one_of('memop', 'copy', 'kernel')}"] if "copy" in fields[0] else []
        return "".join(fields[: 1 + self.draw(st.integers(0, 2))])

    def projections(self) -> list[str]:
        """q, k and v, at once or one by one; gives the order in which they are ready."""
        order = list(self.draw(st.permutations("qkv")))
        if self.yes():
            heads = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
            out = ", ".join(f"{name}: {heads[name]}" for name in order)
            self.add(f"linear: {{name: qkv, in: h, out: {{{out}}}{self.axes.split}}}")
        else:
            for name in order:
                width = "heads" if name == "q" else "kv_heads"
                self.add(f"linear: {{name: to_{name}, in: h, out: {{{name}: {width}}}{self.axes.split}}}")
        return order

    def sends(self, order: Sequence[str]) -> None:
        """Each tensor to the peers, in groups that a barrier closes; q and k may be rotated before."""
        rotated = self.yes()
        for name, following in pairwise([*order, ""]):
            if rotated and name != "v":
                self.add(f"norm_rope: {{name: rope_{name}, in: {name}, rope: rope}}")
            closes = not following or (not self.chunked and self.yes())
            fields = f", buffers: {self.one_of('1', '2')}" if self.draw(st.integers(0, 3)) == 0 else ""
            if self.stateful and name != "q":
                fields = f", into: {name}cache, at: past"
                per = self.one_of("step", "layer")
                shape = "[batch, rows, kv_heads, head_dim]"
                self.states.append(f"  {name}cache: {{shape: {shape}, placement: head, per: {per}}}")
            self.add(f"send: {{in: {name}{', barrier: true' if closes else ''}{fields}}}")

    def attention(self) -> None:
        self.add("norm: {in: x, out: h}")
        order = self.projections()
        self.chunked = not self.stateful and self.draw(st.integers(0, 4)) == 0
        if self.stateful or self.chunked or self.yes():
            before = len(self.lines)
            self.sends(order)
            caches = "kcache, vcache" if self.stateful else "k, v"
            self.add(f"attention: {{in: [q, {caches}], out: o}}")
            self.add(f"gather: {{in: o{self.exchange()}}}")
            if self.chunked:
                inner = [f"    {line}" for line in self.lines[before:]]
                self.lines[before:] = ["    - chunks: {heads: 2}", "      do:", *inner]
        else:
            together = self.yes()
            for number, name in enumerate(["[k, v]"] if together else ["k", "v"]):
                self.add(f"all_gather: {{name: whole_{number}, in: {name}{self.exchange()}}}")
            self.add("attention: {in: [q, k, v], out: o}")
        row = ", split: row" if self.axes.tensor > 1 else ""
        self.add(f"linear: {{name: out_proj, in: o, out: a{row}}}")
        if self.axes.tensor > 1:
            self.add(f"all_reduce: {{name: reduce_a, in: a{self.exchange()}}}")
        self.add("residual: {in: [x, a], out: x}")
        if self.stateful and self.yes():
            self.states.append(
                f"  last: {{shape: [batch, seq, hidden], placement: sequence, per: {self.one_of('step', 'layer')}}}"
            )
            self.add("residual: {name: add_last, in: [x, last], out: last}")
            self.add("keep: {in: last, into: last}" if self.yes() else "norm: {name: norm_last, in: last, out: x}")

    def mlp(self) -> None:
        self.add("norm: {name: norm2, in: x, out: g}")
        if self.axes.tensor > 1:
            self.add("linear: {name: up, in: g, out: {m: ffn}, split: column}")
            self.add("linear: {name: down, in: m, out: b, split: row}")
            self.add(f"all_reduce: {{name: reduce_b, in: b{self.exchange()}}}")
        else:
            self.add("mlp: {in: g, out: b}")
        self.add("residual: {name: residual2, in: [x, b], out: x}")


SMALL = (Axes(1, 2), Axes(1, 2), Axes(1, 2), Axes(1, 3), Axes(2, 2))
ANY = (*SMALL, Axes(2, 1), Axes(1, 4))


@st.composite
def schedules(draw: st.DrawFn, axes_of: Sequence[Axes] = ANY, stateful: bool = False) -> str:
    """The text of a schedule of two to four ranks and one to three layers; with caches of keys and values, and a tensor
    that every layer or step adds to, where it is ``stateful``."""
    axes = draw(st.sampled_from(axes_of))
    names = [f"ulysses: {axes.ulysses}"] + ([f"tensor: {axes.tensor}"] if axes.tensor > 1 else [])
    block = _Block(draw, axes)
    block.stateful = stateful
    block.attention()
    if draw(st.booleans()):
        block.mlp()
    text = "\n".join(block.lines)
    rotated = "rope: rope" in text
    heads = axes.tensor * (axes.ulysses * (2 if block.chunked else 1) + draw(st.integers(0, 1)))
    seq = draw(st.integers(axes.ulysses - 1, axes.ulysses + 2)) or 1
    past, behind = draw(st.integers(0, 2)), draw(st.integers(0, 1))
    return HEAD.format(
        rows=f", rows: {past + seq + behind}, past: {past}" if stateful else "",
        state="\n".join(["\nstate:", *block.states]) if block.states else "",
        layers=draw(st.integers(1, 3 if axes.ulysses * axes.tensor == 2 else 2)),
        heads=heads,
        kv_heads=axes.tensor if draw(st.integers(0, 3)) == 0 else heads,
        mesh=", ".join(draw(st.permutations(names))),
        seq=seq,
        streams=draw(st.sampled_from(["compute: {}, copy: {}", "compute: {}, copy: {}", "compute: {}"])),
        handshake=draw(st.sampled_from(["memop", "copy", "kernel"])),
        block=text,
        rope="\n  rope: {shape: [seq, head_dim]}" if rotated else "",
        sharded="[x, rope]" if rotated else "x",
        last=draw(st.sampled_from(["copy", "copy", "nccl"])),
    )


def compiled(text: str) -> Plan | None:
    """The plan of a schedule; None where its numbers of buffers are refused."""
    try:
        return compile_schedule(read_schedule(text, "random.yaml"))
    except ScheduleError as error:
        if {finding.code for finding in error.diagnostics} != {"E305"}:
            raise
        return None

"""Pitched copies between device addresses: what a send becomes. One call is one node of a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from stepgraph.kernels.cuda_call import checked

MAX_BYTES = 256 << 20
"""Larger copies are cut, by rows: above it one copy over NVLink slows down."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Where rows of bytes lie: of each matrix of a batch the address of its first row; bytes from row to row."""

    addresses: tuple[int, ...]
    pitch: int

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        """Of a tensor (batch, rows, cols) with dense rows."""
        item, (batch, rows, cols) = tensor.element_size(), tensor.shape
        pitch = tensor.stride(1) if rows > 1 else cols  # torch leaves the stride of a single row open
        first, step = tensor.data_ptr(), tensor.stride(0) * item
        return cls(tuple(first + number * step for number in range(batch)), pitch * item)


@dataclass(frozen=True, slots=True)
class Copy2D:
    """``height`` rows of ``width`` bytes; pitches are bytes from row to row."""

    destination: int
    destination_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


def between(source: Strided, into: Strided, width: int, rows: int) -> list[Copy2D]:
    """The copies of a batch of ``rows`` rows of ``width`` bytes."""
    pairs = zip(source.addresses, into.addresses, strict=True)
    return [piece for first, to in pairs for piece in pieces(Copy2D(to, into.pitch, first, source.pitch, width, rows))]


def pieces(copy: Copy2D, limit: int = MAX_BYTES) -> Iterator[Copy2D]:
    """The copy in parts of at most ``limit`` bytes, and at least one row."""
    rows = max(1, limit // copy.width)
    for first in range(0, copy.height, rows):
        yield replace(
            copy,
            destination=copy.destination + first * copy.destination_pitch,
            source=copy.source + first * copy.source_pitch,
            height=min(rows, copy.height - first),
        )


def enqueue(copy: Copy2D, stream: int) -> None:
    """Put the copy on a CUDA stream, given by its handle. Raises RuntimeError."""
    from cuda.bindings import runtime

    checked(
        runtime.cudaMemcpy2DAsync(
            copy.destination,
            copy.destination_pitch,
            copy.source,
            copy.source_pitch,
            copy.width,
            copy.height,
            runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
            stream,
        )
    )

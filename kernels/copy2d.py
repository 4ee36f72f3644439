"""Pitched copies between device addresses: what a send becomes. One call is one node of a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepgraph.kernels.cuda_call import checked

MAX_BYTES = 256 << 20
"""Larger copies are cut, by rows: above it one copy over NVLink slows down."""


@dataclass(frozen=True, slots=True)
class Copy2D:
    """``height`` rows of ``width`` bytes; pitches are bytes from row to row."""

    destination: int
    destination_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


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

"""Pitched copies: what is large is cut by rows, and nothing is lost or copied twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.kernels.copy2d import MAX_BYTES, Copy2D, pieces

small = st.integers(1, 40)


def moved(copy: Copy2D, source: np.ndarray, target: np.ndarray) -> None:
    for row in range(copy.height):
        first, start = copy.destination + row * copy.destination_pitch, copy.source + row * copy.source_pitch
        target[first : first + copy.width] += source[start : start + copy.width]


@given(width=small, height=small, extra=st.integers(0, 9), limit=st.integers(1, 400))
def test_pieces_cover_the_copy_once(width: int, height: int, extra: int, limit: int) -> None:
    copy = Copy2D(5, width + extra, 3, width + 2 * extra, width, height)
    source = np.arange(1, 10 + height * copy.source_pitch)
    whole, cut = (np.zeros(10 + height * copy.destination_pitch, int) for _ in range(2))
    moved(copy, source, whole)
    parts = list(pieces(copy, limit))
    for part in parts:
        assert part.width * part.height <= max(limit, width)
        moved(part, source, cut)
    assert (whole == cut).all()


def test_copies_above_256_mib_are_cut() -> None:
    parts = list(pieces(Copy2D(0, 1 << 16, 0, 1 << 16, 1 << 15, 20_000)))
    assert [part.height for part in parts] == [8192, 8192, 3616]
    assert all(part.width * part.height <= MAX_BYTES for part in parts)
    assert len(list(pieces(Copy2D(0, 512, 0, 512, 512, 1000)))) == 1

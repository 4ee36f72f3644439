"""The race detector's shadow memory against the definition, element by element."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.runtime.shadow import Shadow

CHAINS, ROWS, COLS = 3, 4, 5


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_conflicts_are_those_of_the_definition(data: st.DataObject) -> None:
    """Random accesses of chains that now and then learn of each other: a conflict is an earlier access to a shared
    element, one of the two a write, at a time that the later chain does not know."""
    shadow = Shadow.of((1, ROWS, COLS), CHAINS)
    clocks = [np.zeros(CHAINS, np.int32) for _ in range(CHAINS)]
    past: list[tuple[int, int, bool, set[tuple[int, int]]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        chain = data.draw(st.integers(0, CHAINS - 1))
        if data.draw(st.booleans()):
            np.maximum(clocks[chain], clocks[data.draw(st.integers(0, CHAINS - 1))], out=clocks[chain])
        clocks[chain][chain] += 1
        row, col = data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(0, COLS - 1))
        rows, cols = data.draw(st.integers(1, ROWS - row)), data.draw(st.integers(1, COLS - col))
        cells = {(r, c) for r in range(row, row + rows) for c in range(col, col + cols)}
        writes = data.draw(st.booleans())
        part = shadow.region(slice(row, row + rows), slice(col, col + cols))
        time, clock = int(clocks[chain][chain]), clocks[chain]
        if writes:
            conflict = part.write(chain, time, clock)
        else:
            conflict, unwritten = part.read(chain, time, clock)
            written = set().union(*(seen for _, _, wrote, seen in past if wrote))
            assert unwritten == bool(cells - written)
        # Only the last write of an element counts, and only the last read of each chain.
        latest_write = {cell: (c, t) for c, t, wrote, seen in past if wrote for cell in seen}
        latest_read = {(cell, c): t for c, t, wrote, seen in past if not wrote for cell in seen}
        unordered = {at for cell, at in latest_write.items() if cell in cells and at[1] > clock[at[0]]}
        if writes:
            unordered |= {(c, t) for (cell, c), t in latest_read.items() if cell in cells and t > clock[c]}
        assert (conflict is not None) == bool(unordered)
        if conflict is not None:
            assert (conflict.earlier.chain, conflict.earlier.time) in unordered
        past.append((chain, time, writes, cells))

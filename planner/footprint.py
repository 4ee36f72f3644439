"""What a captured step takes of a GPU's memory beside the arena and states, as far as the plan tells."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.planner.plan import Collective, Drop, Load, Plan, RankProgram, Run, Store


def footprint(plan: Plan) -> int:
    """Bytes on the rank that needs most: static inputs, outputs that are copied out of targets, and the most that local
    tensors take at once in the order of issue. What stages use inside, and the graph's own nodes, come on top."""
    return max(_of_rank(plan, program) for program in plan.ranks)


def _of_rank(plan: Plan, program: RankProgram) -> int:
    fixed = now = most = 0
    states = plan.state_buffers  # which outlive the captured step
    there: set[int] = set()
    for item in program.instructions:
        if isinstance(item, Load):
            fixed += program.buffers[program.views[item.view].buffer].nbytes
        elif isinstance(item, Store):
            view = program.views[item.view]
            buffer = program.buffers[view.buffer]
            if view.buffer < len(plan.targets):
                fixed += buffer.batch * view.region.rows * view.region.cols * buffer.dtype.itemsize
        elif isinstance(item, Drop) and item.buffer in there:
            there.discard(item.buffer)
            now -= program.buffers[item.buffer].nbytes
        elif isinstance(item, Run | Collective):
            for made in _makes(program, item):
                if made >= len(plan.targets) and made not in there and made not in states:
                    there.add(made)
                    now += program.buffers[made].nbytes
            most = max(most, now)
    return fixed + most


def _makes(program: RankProgram, item: Run | Collective) -> Iterator[int]:
    if isinstance(item, Run):
        yield from program.made_by(item)
    else:
        yield from dict.fromkeys(program.views[part.view].buffer for part in item.incoming)

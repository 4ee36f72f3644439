"""The figures of a plan that people compare."""

from __future__ import annotations

from stepgraph.planner.plan import Collective, ExchangeKind, Plan, Record, Send, Signal


def summary(plan: Plan) -> dict[str, int | str]:
    """Counts are of rank 0, where ranks may differ; bytes are those it sends to other ranks."""
    program = plan.ranks[0]
    sends = [item for item in program.instructions if isinstance(item, Send)]
    remote = [send for send in sends if send.peer != 0]
    copied = 0
    for send in remote:
        buffer = program.buffers[send.target]
        copied += buffer.batch * send.region.rows * send.region.cols * buffer.dtype.itemsize
    protocols = {e.protocol.value for e in plan.exchanges if e.kind is ExchangeKind.HANDSHAKE and e.protocol}
    return {
        "name": plan.name,
        "ranks": plan.world_size,
        "mesh": " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh),
        "ops": len(plan.ops),
        "streams": len(plan.streams),
        "instructions": len(program.instructions),
        "events": sum(isinstance(item, Record) for item in program.instructions),
        "dependencies": plan.dependencies,
        "handshakes": sum(isinstance(item, Signal) for item in program.instructions),
        "protocols": ", ".join(sorted(protocols)) or "none",
        "collectives": sum(isinstance(item, Collective) for item in program.instructions),
        "copies": len(sends),
        "copied_bytes": copied,
        "targets": len(plan.targets),
        "states": len(plan.states),
        "state_bytes": sum(program.buffers[state.buffer].nbytes for state in plan.states),
        "arena_bytes": plan.arena_bytes,
        "arena_lower_bound": plan.arena_lower_bound,
        "flag_slots": plan.flag_slots,
    }

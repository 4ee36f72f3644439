"""One rank of the cpu device: what is issued once waits on the queues of its streams, and is replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from stepgraph.kernels.stages import Stage
from stepgraph.planner.plan import (
    Collective,
    Drop,
    Load,
    Protocol,
    Record,
    Region,
    Reset,
    Run,
    Send,
    Signal,
    Store,
    Wait,
    WaitEvent,
)
from stepgraph.planner.plan_set import version
from stepgraph.runtime.cpu_collective import Rendezvous
from stepgraph.runtime.movement import collective_views
from stepgraph.runtime.shadow import Ints
from stepgraph.runtime.stage_call import call_stage

if TYPE_CHECKING:
    from stepgraph.runtime.cpu import World

Inputs = Sequence[Tensor]
Outputs = tuple[Tensor, ...]


@dataclass(slots=True)
class _Work:
    """An instruction on its queue."""

    number: int
    what: str
    run: Callable[[], None]
    ready: Callable[[], bool]
    arrive: Callable[[], None] | None = None
    """Of a collective: its start, which happens before it can finish."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a rank's host hands over for a step."""

    version: int
    """Which of the plans runs."""
    tensors: Inputs


class RankQueues:
    """One rank's streams under one plan: the device that the executor issues to. What is issued once is replayed."""

    def __init__(self, world: World, version: int, rank: int) -> None:
        self.world, self.version, self.rank = world, version, rank
        self.plan = world.plans[version]
        self.program = self.plan.ranks[rank]
        self.memories = world.memories[version]
        self.memory, self.movements = self.memories[rank], world.movements[version]
        self.work: list[list[_Work]] = [[] for _ in range(world.width)]
        self.next = [0] * world.width
        self.replay = -1
        """Of this plan."""
        self.inputs: Inputs = ()
        self.outputs: dict[int, Tensor] | None = None
        self.events: dict[int, tuple[Ints, Ints]] = {}
        """The clock at each event's record, and the rank's own."""
        self.own: list[Ints] = []
        """What each stream knows to be done of each, in this replay, by streams and events of the rank alone."""
        self.recorded: set[int] = set()
        """Events whose record has been issued."""
        self.made_on: dict[int, int] = {}
        """The stream on which each local tensor was allocated last."""
        self.exchange_order: list[int] = []
        self.exchange_parts: dict[int, int] = {}
        """How many instructions each exchange has here."""
        self.signal_parts: Counter[int] = Counter()
        """How many of those are signals."""
        self.exchange_done: dict[int, list[tuple[int, int]]] = {}
        """(stream, own time) of those that are done in this replay."""
        self.signals_done: dict[int, list[tuple[int, int]]] = {}
        """Likewise, of its signals."""
        self.counted: Counter[int] = Counter()
        """By exchange: the epoch of a KERNEL handshake, which its waits count."""
        self.epochs: set[int] = set()
        """Slots of KERNEL handshakes, which are never reset."""
        self.arrived = False

    # Scheduling

    @property
    def idle(self) -> bool:
        return self.replay < 0 or all(at == len(queue) for at, queue in zip(self.next, self.work, strict=True))

    def can_run(self, stream: int) -> bool:
        at, queue = self.next[stream], self.work[stream]
        return at < len(queue) and queue[at].ready()

    def meets(self, stream: int) -> bool:
        """Whether the head of a queue is a collective that has started here, and is not over."""
        return self.in_rendezvous(self.work[stream][self.next[stream]])

    def start(self, inputs: Inputs) -> None:
        """Begin a replay: everything of the last one is done before it."""
        self.inputs, self.outputs = inputs, {}
        self.replay += 1
        self.memory.forget_local()
        self.next = [0] * self.world.width
        self.events.clear()
        self.own = [np.zeros(self.world.width, np.int32) for _ in range(self.world.width)]
        self.exchange_done.clear()
        self.signals_done.clear()
        known = np.maximum.reduce([self.world.clocks[self.chain(stream)] for stream in range(self.world.width)])
        for stream in range(self.world.width):
            self.world.clocks[self.chain(stream)] = known.copy()

    def step(self, stream: int) -> None:
        """Run the head of a queue."""
        item = self.work[stream][self.next[stream]]
        if item.arrive is not None and not self.in_rendezvous(item):
            self.tick(stream, item)
            item.arrive()
            return
        if item.arrive is None:
            self.tick(stream, item)
        item.run()
        self.next[stream] += 1
        if self.idle:
            self.check_joined()

    def tick(self, stream: int, item: _Work) -> None:
        chain = self.chain(stream)
        self.world.clocks[chain][chain] += 1
        self.own[stream][stream] += 1
        self.world.history[chain].append((item.number, item.what))

    def in_rendezvous(self, item: _Work) -> bool:
        collective = self.program.instructions[item.number]
        if not isinstance(collective, Collective):
            return False
        meeting = self.world.rendezvous.get((self.version, collective.exchange, self.replay))
        return meeting is not None and self.rank in meeting.starts

    def check_joined(self) -> None:
        """The replay is over: every stream must have been joined by the origin."""
        for stream in range(1, self.world.width):
            if self.work[stream] and self.own[0][stream] < self.own[stream][stream]:
                name = self.plan.streams[stream]
                self.world.report.fault("not joined", f"stream {name} of rank {self.rank} is not joined at the end")
        self.world.over(self.rank)

    def taken(self) -> Outputs:
        assert self.outputs is not None
        return tuple(self.outputs[number] for number in sorted(self.outputs))

    def stuck(self) -> str:
        heads = [
            f"{self.plan.streams[stream]} before instruction {queue[at].number}, {queue[at].what}"
            for stream, (at, queue) in enumerate(zip(self.next, self.work, strict=True))
            if at < len(queue)
        ]
        name = f" of {version(self.plan)}" if len(self.world.plans) > 1 else ""
        return f"rank {self.rank} in replay {self.replay}{name}: {', '.join(heads)}"

    def chain(self, stream: int) -> int:
        return self.rank * self.world.width + stream

    def finish(self) -> None:
        """A stream enters a capture by waiting for an event of a stream that is in it."""
        recorded = {i.event: i.stream for i in self.program.instructions if isinstance(i, Record)}
        entered = {0}
        for instruction in self.program.instructions:
            if instruction.stream in entered:
                continue
            if isinstance(instruction, WaitEvent) and recorded.get(instruction.event) in entered:
                entered.add(instruction.stream)
            else:
                name = self.plan.streams[instruction.stream]
                self.world.report.fault("not in capture", f"stream {name} of rank {self.rank} works before it waits")
                entered.add(instruction.stream)

    # Accesses

    def read(self, stream: int, buffer: int, region: Region) -> None:
        if buffer in self.memory.dropped:
            name = self.program.buffers[buffer].name
            self.world.report.fault("dropped", f"rank {self.rank} reads {name} after it was dropped")
        self.movements.read(self.rank, buffer)
        chain = self.chain(stream)
        clock, shadow = self.world.clocks[chain], self.memory.shadow(buffer, region)
        conflict, unwritten = shadow.read(chain, int(clock[chain]), clock)
        if conflict is not None:
            self.world.conflict(self.program.buffers[buffer], self.rank, conflict)
        if unwritten and region.rows and region.cols and buffer not in self.memory.states:
            name = self.program.buffers[buffer].name
            self.world.report.fault("unwritten", f"rank {self.rank} reads {name}, which nobody has written")
        if shadow.lost(self.memory.label(buffer)):
            name = self.program.buffers[buffer].name
            self.world.report.fault("overwritten", f"rank {self.rank} reads {name}, over which another was written")

    def write(self, stream: int, buffer: int, region: Region, owner: int | None = None) -> None:
        owner = self.rank if owner is None else owner
        chain = self.chain(stream)
        clock, shadow = self.world.clocks[chain], self.memories[owner].shadow(buffer, region)
        conflict = shadow.write(chain, int(clock[chain]), clock)
        shadow.holds[...] = self.memory.label(buffer)
        if conflict is not None:
            self.world.conflict(self.plan.ranks[owner].buffers[buffer], owner, conflict)

    def apart(self, stream: int, op: int, buffer: int, region: Region) -> None:
        """What an instruction is about to change is nothing that it has read elsewhere."""
        chain = self.chain(stream)
        if self.memory.shadow(buffer, region).read_at(chain, int(self.world.clocks[chain][chain])):
            self.world.report.fault("over itself", f"rank {self.rank} writes over what it reads in {self.op_name(op)}")

    def allocate(self, stream: int, buffer: int, result: Tensor | None = None) -> None:
        self.memory.allocate(buffer, result)
        self.made_on[buffer] = stream

    def _add(
        self, stream: int, number: int, what: str, run: Callable[[], None], ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.work[stream].append(_Work(number, what, run, ready))

    def op_name(self, op: int) -> str:
        return self.plan.ops[op].label

    # Device

    def load(self, number: int, load: Load) -> None:
        view, spec = self.program.views[load.view], self.plan.inputs[load.input]
        batch = self.program.buffers[view.buffer].batch
        at = load.region

        def run() -> None:
            whole = self.inputs[load.input].reshape(spec.box)[load.batch : load.batch + batch]
            share = whole[:, at.row : at.row + at.rows, at.col : at.col + at.cols]
            self.allocate(load.stream, view.buffer, share.clone())
            self.write(load.stream, view.buffer, view.region)

        self._add(load.stream, number, f"load {spec.name}", run)

    def store(self, number: int, store: Store) -> None:
        view = self.program.views[store.view]

        def run() -> None:
            assert self.outputs is not None
            self.outputs[store.output] = self.memory.view(view).clone()
            self.read(store.stream, view.buffer, view.region)

        self._add(store.stream, number, f"store {self.plan.outputs[store.output].name}", run)

    def run(self, number: int, run: Run, stage: Stage) -> None:
        inputs = [self.program.views[view] for view in run.inputs]
        outputs = [self.program.views[view] for view in run.outputs]

        def action() -> None:
            for read in sorted(dict.fromkeys(run.inputs), key=run.outputs.__contains__):
                view = self.program.views[read]
                if read in run.outputs:
                    self.apart(run.stream, run.op, view.buffer, view.region)
                self.read(run.stream, view.buffer, view.region)
            results = call_stage(self.plan, self.rank, run, stage, [self.memory.view(view) for view in inputs])
            for buffer, result in results:
                self.allocate(run.stream, buffer, result)
                if buffer in self.memory.states:
                    self.movements.made_anew(self.rank, buffer)
            for view in outputs:
                self.write(run.stream, view.buffer, view.region)

        self._add(run.stream, number, f"run {self.op_name(run.op)}", action)

    def send(self, number: int, send: Send) -> None:
        view = self.program.views[send.source]
        peer = self.memories[send.peer]
        moved = (send.op, 0)

        def run() -> None:
            whole = self.memory.region(view.buffer, view.region)
            self.movements.note(moved, self.rank, self.replay, whole)
            self.read(send.stream, view.buffer, send.source_region)
            if send.peer == self.rank:
                self.apart(send.stream, send.op, send.target, send.region)
            self.write(send.stream, send.target, send.region, send.peer)
            source = self.memory.region(view.buffer, send.source_region).clone()
            peer.region(send.target, send.region).copy_(source)

        self._add(send.stream, number, f"send {self.op_name(send.op)} to {send.peer}", run)

    def signal(self, number: int, signal: Signal) -> None:
        kernel = self.plan.exchanges[signal.exchange].protocol is Protocol.KERNEL

        def run() -> None:
            self.enter(signal.exchange, signal.stream)
            clock = self.world.clocks[self.chain(signal.stream)]
            for flag in signal.flags:
                word, flags = (flag.peer, flag.slot), self.memories[flag.peer].flags
                chain, time = self.world.resets.get(word, (0, 0))
                if flags[flag.slot] and not kernel:
                    self.world.report.fault("lost signal", f"rank {self.rank} signals {word}, which is still set")
                elif time > clock[chain]:
                    self.world.report.fault("flag reused", f"rank {self.rank} signals {word} and can't know its reset")
                flags[flag.slot] = self.counted[signal.exchange] + 1 if kernel else 1
                self.world.signals[word] = clock.copy()
                self.world.consumed[word] = False
            self.leave(signal.exchange, signal.stream)
            done = (signal.stream, int(self.own[signal.stream][signal.stream]))
            self.signals_done.setdefault(signal.exchange, []).append(done)

        self.exchange(signal.exchange)
        self.signal_parts[signal.exchange] += 1
        self._add(signal.stream, number, f"signal {self.exchange_name(signal.exchange)}", run)

    def wait(self, number: int, wait: Wait) -> None:
        kernel = self.plan.exchanges[wait.exchange].protocol is Protocol.KERNEL
        if kernel:
            self.epochs.update(flag.slot for flag in wait.flags)

        def ready() -> bool:
            flags, epoch = self.memory.flags, self.counted[wait.exchange] + 1
            return all(flags[f.slot] >= epoch if kernel else flags[f.slot] == 1 for f in wait.flags)

        def run() -> None:
            self.enter(wait.exchange, wait.stream)
            self.signalled(wait)
            for flag in wait.flags:
                self.join(wait.stream, self.world.signals[self.rank, flag.slot])
                self.world.consumed[self.rank, flag.slot] = True
            self.counted[wait.exchange] += 1
            self.leave(wait.exchange, wait.stream)
            self.movements.over(wait.exchange, self.rank, self.replay)

        self.exchange(wait.exchange)
        self._add(wait.stream, number, f"wait {self.exchange_name(wait.exchange)}", run, ready)

    def reset(self, number: int, reset: Reset) -> None:
        def run() -> None:
            self.enter(reset.exchange, reset.stream)
            chain = self.chain(reset.stream)
            for flag in reset.flags:
                word = (self.rank, flag.slot)
                if self.memory.flags[flag.slot] and not self.world.consumed[word]:
                    self.world.report.fault(
                        "lost signal", f"rank {self.rank} resets {word} before it has waited for it"
                    )
                self.memory.flags[flag.slot] = 0
                self.world.resets[word] = (chain, int(self.world.clocks[chain][chain]))
            self.leave(reset.exchange, reset.stream)

        self.exchange(reset.exchange)
        self._add(reset.stream, number, f"reset {self.exchange_name(reset.exchange)}", run)

    def collective(self, number: int, collective: Collective) -> None:
        group = self.plan.groups[self.plan.exchanges[collective.exchange].group]
        chain = self.chain(collective.stream)

        def meeting() -> Rendezvous:
            key = (self.version, collective.exchange, self.replay)
            return self.world.rendezvous.setdefault(key, Rendezvous(self.plan, self.memories))

        def arrive() -> None:
            self.enter(collective.exchange, collective.stream)
            for part in collective.outgoing:
                self.read(collective.stream, self.program.views[part.view].buffer, part.region)
            for moved, view in collective_views(self.program, collective):
                source = self.memory.region(view.buffer, view.region)
                self.movements.note(moved, self.rank, self.replay, source)
            for buffer in dict.fromkeys(self.program.views[part.view].buffer for part in collective.incoming):
                if buffer >= len(self.plan.targets):
                    self.allocate(collective.stream, buffer)
            for part in collective.incoming:
                self.write(collective.stream, self.program.views[part.view].buffer, part.region)
            # Members learn that this rank has started, not that it is done with its parts.
            start = self.world.clocks[chain].copy()
            start[chain] -= 1
            meeting().starts[self.rank] = start
            meeting().calls[self.rank] = collective

        def ready() -> bool:
            found = meeting().starts
            return self.rank not in found or len(found) == len(group)

        def run() -> None:
            meeting().move()
            for start in meeting().starts.values():
                self.join(collective.stream, start)
            self.leave(collective.exchange, collective.stream)
            self.movements.over(collective.exchange, self.rank, self.replay)

        self.exchange(collective.exchange)
        what = f"collective {self.exchange_name(collective.exchange)}"
        self.work[collective.stream].append(_Work(number, what, run, ready, arrive))

    def record(self, number: int, record: Record) -> None:
        self.recorded.add(record.event)

        def run() -> None:
            clock = self.world.clocks[self.chain(record.stream)]
            self.events[record.event] = (clock.copy(), self.own[record.stream].copy())

        self._add(record.stream, number, f"record {record.event}", run)

    def wait_event(self, number: int, wait: WaitEvent) -> None:
        if wait.event not in self.recorded:
            what = f"rank {self.rank} waits for event {wait.event} before it is recorded"
            self.world.report.fault("event unrecorded", what)

        def run() -> None:
            clock, own = self.events[wait.event]
            self.join(wait.stream, clock)
            np.maximum(self.own[wait.stream], own, out=self.own[wait.stream])

        self._add(wait.stream, number, f"wait for event {wait.event}", run, lambda: wait.event in self.events)

    def drop(self, number: int, drop: Drop) -> None:
        found = self.program.buffers[drop.buffer]

        def run() -> None:
            if drop.buffer not in self.memory.tensors or drop.buffer in self.memory.dropped:
                self.world.report.fault("dropped", f"rank {self.rank} drops {found.name}, which is not there")
            elif self.made_on.get(drop.buffer, drop.stream) != drop.stream:
                self.world.report.fault(
                    "dropped", f"rank {self.rank} drops {found.name} on another stream than its own"
                )
            self.write(drop.stream, drop.buffer, Region(0, found.rows, 0, found.cols))
            self.memory.drop(drop.buffer)

        self._add(drop.stream, number, f"drop {found.name}", run)

    # Order

    def join(self, stream: int, clock: Ints) -> None:
        mine = self.world.clocks[self.chain(stream)]
        np.maximum(mine, clock, out=mine)

    def exchange(self, exchange: int) -> None:
        """Note the order of issue of exchanges."""
        if exchange not in self.exchange_parts:
            self.exchange_order.append(exchange)
        self.exchange_parts[exchange] = self.exchange_parts.get(exchange, 0) + 1

    def enter(self, exchange: int, stream: int) -> None:
        """The exchange before this one, in the order of issue, must be known to be over."""
        place = self.exchange_order.index(exchange)
        if place == 0:
            return
        previous = self.exchange_order[place - 1]
        done, own = self.exchange_done.get(previous, []), self.own[stream]
        if len(done) < self.exchange_parts[previous] or any(time > own[other] for other, time in done):
            names = f"{self.exchange_name(previous)} and {self.exchange_name(exchange)}"
            self.world.report.fault("exchanges unordered", f"rank {self.rank} does not order {names}")

    def signalled(self, wait: Wait) -> None:
        """By its own order a rank has signalled before it waits; two that have not may wait for each other."""
        done, own = self.signals_done.get(wait.exchange, []), self.own[wait.stream]
        if len(done) == self.signal_parts[wait.exchange] and all(time <= own[stream] for stream, time in done):
            return
        waiting = self.world.early[self.version, wait.exchange]
        waiting.add(self.rank)
        if len(waiting) > 1:
            names = ", ".join(map(str, sorted(waiting)))
            self.world.report.fault(
                "waits before signals", f"ranks {names} may wait for each other in {self.exchange_name(wait.exchange)}"
            )

    def leave(self, exchange: int, stream: int) -> None:
        self.exchange_done.setdefault(exchange, []).append((stream, int(self.own[stream][stream])))

    def exchange_name(self, exchange: int) -> str:
        return self.plan.exchanges[exchange].name

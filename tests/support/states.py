"""Every interleaving of a tiny plan, by search over states. Knows the machine and nothing of our rules.

An instruction happens at once. A plan is unsafe where some order of things ends in a deadlock, loses a signal, or lets
an instruction read something else than another order does. Instructions that touch what no other stream touches are run
as soon as they can be: they commute with everything. A collective happens twice, at its start and at its finish, which
comes when every member has started: it reads and writes at both.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from stepgraph.planner.plan import Collective, Instruction, Plan, Protocol, Record, Reset, Signal, Wait, WaitEvent

from support.all_pairs import touched

State = tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]]
"""(positions of the chains, flag words, what each shared piece of memory holds)."""
Entry = tuple[int, bool]
"""The number of an instruction, and whether this is the finish of a collective."""


@dataclass
class Search:
    """The outcome: what was found wrong, how many states were seen, and whether those were all."""

    wrong: set[str] = field(default_factory=set)
    states: int = 0
    exhausted: bool = True


class _Machine:
    def __init__(self, plan: Plan, replays: int) -> None:
        self.plan, self.replays, self.width = plan, replays, len(plan.streams)
        self.programs: list[list[Entry]] = [[] for _ in range(plan.world_size * self.width)]
        for rank, program in enumerate(plan.ranks):
            for number, item in enumerate(program.instructions):
                entries = [(number, False), (number, True)] if isinstance(item, Collective) else [(number, False)]
                self.programs[rank * self.width + item.stream] += entries
        self.records: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank, event) -> (chain, place in its program)."""
        self.starts: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank, exchange) -> likewise, of a collective."""
        words: dict[tuple[int, int], int] = {}
        self.resets: dict[tuple[int, int], set[int]] = defaultdict(set)
        for chain, numbers in enumerate(self.programs):
            for place, (number, finish) in enumerate(numbers):
                item = self.item(chain, number)
                rank = chain // self.width
                if isinstance(item, Record):
                    self.records[rank, item.event] = (chain, place)
                elif isinstance(item, Collective) and not finish:
                    self.starts[rank, item.exchange] = (chain, place)
                elif isinstance(item, Signal | Wait | Reset):
                    for flag in item.flags:
                        words.setdefault((flag.peer if isinstance(item, Signal) else rank, flag.slot), len(words))
                        if isinstance(item, Reset):
                            self.resets[rank, flag.slot].add(chain)
        self.words = words
        self.reads, self.writes, self.pieces = self._pieces()
        self.seen: dict[object, object] = {}
        """What an instruction of a replay has read, in the first order in which it ran."""

    def item(self, chain: int, number: int) -> Instruction:
        return self.plan.ranks[chain // self.width].instructions[number]

    def _pieces(self):
        """The coarsest pieces of memory that accesses touch whole, of those that two chains touch and one writes."""
        accesses: dict[object, list[tuple[int, int, int, bool]]] = defaultdict(list)
        for chain, numbers in enumerate(self.programs):
            for number in dict.fromkeys(number for number, _ in numbers):
                for where, bits, writes in touched(self.plan, chain // self.width, number):
                    if bits:
                        accesses[where].append((chain, number, bits, writes))
        reads: dict[tuple[int, int], list[int]] = defaultdict(list)
        writes_of: dict[tuple[int, int], list[int]] = defaultdict(list)
        count = 0
        for found in accesses.values():
            atoms: list[int] = []
            for _, _, bits, _ in found:
                rest, cut = bits, []
                for atom in atoms:
                    cut += [part for part in (atom & bits, atom & ~bits) if part]
                    rest &= ~atom
                atoms = cut + ([rest] if rest else [])
            for atom in atoms:
                users = [(chain, number, writes) for chain, number, bits, writes in found if bits & atom]
                if len({chain for chain, _, _ in users}) > 1 and any(writes for _, _, writes in users):
                    for chain, number, writes in users:
                        (writes_of if writes else reads)[chain, number].append(count)
                    count += 1
        return reads, writes_of, count

    def head(self, state: State, chain: int) -> Entry | None:
        """What a chain is at; None where it must wait for its rank, or has ended."""
        length, at = len(self.programs[chain]), state[0][chain]
        if not length or at == self.replays * length:
            return None
        rank, replay = chain // self.width, at // length
        for other in range(rank * self.width, (rank + 1) * self.width):
            if state[0][other] < replay * len(self.programs[other]):
                return None
        return self.programs[chain][at % length]

    def reached(self, state: State, replay: int, at: tuple[int, int] | None) -> bool:
        """Whether a place of a chain is behind it in a replay; never, where there is no such place."""
        return at is not None and state[0][at[0]] > replay * len(self.programs[at[0]]) + at[1]

    def enabled(self, state: State, chain: int, entry: Entry) -> bool:
        item, rank = self.item(chain, entry[0]), chain // self.width
        replay = state[0][chain] // len(self.programs[chain])
        if isinstance(item, WaitEvent):
            return self.reached(state, replay, self.records.get((rank, item.event)))
        if isinstance(item, Wait):
            kernel = self.plan.exchanges[item.exchange].protocol is Protocol.KERNEL
            found = [state[1][self.words[rank, flag.slot]] for flag in item.flags]
            return all(word > replay if kernel else word == 1 for word in found)
        if isinstance(item, Collective) and entry[1]:
            group = self.plan.groups[self.plan.exchanges[item.exchange].group]
            return all(self.reached(state, replay, self.starts.get((member, item.exchange))) for member in group)
        return True

    def private(self, chain: int, entry: Entry) -> bool:
        number = entry[0]
        item = self.item(chain, number)
        if isinstance(item, Signal | Reset):
            return False
        if isinstance(item, Wait):
            rank = chain // self.width
            return all(self.resets[rank, flag.slot] <= {chain} for flag in item.flags)
        return not self.reads[chain, number] and not self.writes[chain, number]

    def step(self, state: State, chain: int, entry: Entry, search: Search) -> State:
        number = entry[0]
        positions, words, memory = list(state[0]), list(state[1]), list(state[2])
        item, rank = self.item(chain, number), chain // self.width
        replay = positions[chain] // len(self.programs[chain])
        if isinstance(item, Signal):
            kernel = self.plan.exchanges[item.exchange].protocol is Protocol.KERNEL
            for flag in item.flags:
                word = self.words[flag.peer, flag.slot]
                if words[word] == 1 and not kernel:
                    search.wrong.add("lost signal")
                words[word] = replay + 1 if kernel else 1
        elif isinstance(item, Reset):
            for flag in item.flags:
                words[self.words[rank, flag.slot]] = 0
        key = (chain, *entry, replay)
        found = tuple(memory[piece] for piece in self.reads[chain, number])
        if self.seen.setdefault(key, found) != found:
            search.wrong.add("reads differ")
        for piece in self.writes[chain, number]:
            memory[piece] = (chain, number, replay)
        positions[chain] += 1
        return tuple(positions), tuple(words), tuple(memory)

    def settle(self, state: State, search: Search) -> State:
        """Run what is private as far as it goes."""
        moved = True
        while moved:
            moved = False
            for chain in range(len(self.programs)):
                entry = self.head(state, chain)
                while entry is not None and self.private(chain, entry) and self.enabled(state, chain, entry):
                    state, moved = self.step(state, chain, entry, search), True
                    entry = self.head(state, chain)
        return state


def search(plan: Plan, replays: int = 2, limit: int = 20_000) -> Search:
    """Look at every state that a plan can be in, up to a limit; stops at the first thing wrong."""
    machine, found = _Machine(plan, replays), Search()
    start: State = (
        tuple(0 for _ in machine.programs),
        tuple(0 for _ in machine.words),
        tuple(None for _ in range(machine.pieces)),
    )
    todo, visited = [machine.settle(start, found)], set()
    while todo and not found.wrong:
        state = todo.pop()
        if state in visited:
            continue
        visited.add(state)
        if len(visited) == limit:
            found.exhausted = False
            break
        heads = [(chain, machine.head(state, chain)) for chain in range(len(machine.programs))]
        ready = [(c, n) for c, n in heads if n is not None and machine.enabled(state, c, n)]
        ended = all(at == replays * len(p) for at, p in zip(state[0], machine.programs, strict=True))
        if not ready and not ended:
            found.wrong.add("deadlock")
        todo += [machine.settle(machine.step(state, chain, number, found), found) for chain, number in ready]
    found.states = len(visited)
    return found

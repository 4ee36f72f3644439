"""Every interleaving of a tiny plan, by search over states. Knows the machine and nothing of our rules.

An instruction happens at once. A plan is unsafe where some order of things ends in a deadlock, loses a signal, or lets
an instruction read something else than another order does. Instructions that touch what no other stream touches are run
as soon as they can be: they commute with everything. A collective happens twice, at its start and at its finish, which
comes when every member has started: it reads and writes at both.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepgraph.planner.plan import Collective, Instruction, Plan, Protocol, Record, Reset, Signal, Wait, WaitEvent

from support.all_pairs import home, touched

State = tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]]
"""(positions of the chains, flag words, what each shared piece of memory holds)."""
Entry = tuple[int, int, bool]
"""The replay, the number of an instruction, and whether this is the finish of a collective."""


@dataclass
class Search:
    """The outcome: what was found wrong, how many states were seen, and whether those were all."""

    wrong: set[str] = field(default_factory=set)
    states: int = 0
    exhausted: bool = True


class _Machine:
    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans, self.width = plans, max(len(plan.streams) for plan in plans)
        self.programs: list[list[Entry]] = [[] for _ in range(plans[0].world_size * self.width)]
        self.ends: list[list[int]] = []
        """By replay: where each chain's program of it ends."""
        self.epochs = [sum(one is plan for one in plans[: replay + 1]) for replay, plan in enumerate(plans)]
        """By replay: how often its plan has run then."""
        for replay, plan in enumerate(plans):
            for rank, program in enumerate(plan.ranks):
                for number, item in enumerate(program.instructions):
                    twice = isinstance(item, Collective)
                    entries = [(replay, number, False), *([(replay, number, True)] if twice else [])]
                    self.programs[rank * self.width + item.stream] += entries
            self.ends.append([len(program) for program in self.programs])
        self.records: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(replay, rank, event) -> (chain, place in its program)."""
        self.starts: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(replay, rank, exchange) -> likewise, of a collective."""
        words: dict[tuple[int, int], int] = {}
        self.resets: dict[tuple[int, int], set[int]] = defaultdict(set)
        for chain, entries in enumerate(self.programs):
            for place, entry in enumerate(entries):
                item, rank = self.item(chain, entry), chain // self.width
                if isinstance(item, Record):
                    self.records[entry[0], rank, item.event] = (chain, place)
                elif isinstance(item, Collective) and not entry[2]:
                    self.starts[entry[0], rank, item.exchange] = (chain, place)
                elif isinstance(item, Signal | Wait | Reset):
                    for flag in item.flags:
                        words.setdefault((flag.peer if isinstance(item, Signal) else rank, flag.slot), len(words))
                        if isinstance(item, Reset):
                            self.resets[rank, flag.slot].add(chain)
        self.words = words
        self.reads, self.writes, self.pieces = self._pieces()
        self.seen: dict[object, object] = {}
        """What an instruction of a replay has read, in the first order in which it ran."""

    def item(self, chain: int, entry: Entry) -> Instruction:
        return self.plans[entry[0]].ranks[chain // self.width].instructions[entry[1]]

    def _pieces(self):
        """The coarsest pieces of memory that accesses touch whole, of those that two chains touch and one writes."""
        accesses: dict[object, list[tuple[int, Plan, int, int, bool]]] = defaultdict(list)
        for plan in {id(plan): plan for plan in self.plans}.values():
            for rank, program in enumerate(plan.ranks):
                for number, item in enumerate(program.instructions):
                    for where, bits, writes in touched(plan, rank, number):
                        if bits:
                            chain = rank * self.width + item.stream
                            accesses[home(plan, where)].append((chain, plan, number, bits, writes))
        reads: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        writes_of: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        count = 0
        for found in accesses.values():
            atoms: list[int] = []
            for *_, bits, _ in found:
                rest, cut = bits, []
                for atom in atoms:
                    cut += [part for part in (atom & bits, atom & ~bits) if part]
                    rest &= ~atom
                atoms = cut + ([rest] if rest else [])
            for atom in atoms:
                users = [(chain, plan, number, writes) for chain, plan, number, bits, writes in found if bits & atom]
                if len({chain for chain, *_ in users}) > 1 and any(writes for *_, writes in users):
                    for chain, plan, number, writes in users:
                        (writes_of if writes else reads)[chain, id(plan), number].append(count)
                    count += 1
        return reads, writes_of, count

    def key(self, chain: int, entry: Entry) -> tuple[int, int, int]:
        return chain, id(self.plans[entry[0]]), entry[1]

    def head(self, state: State, chain: int) -> Entry | None:
        """What a chain is at; None where it must wait for its rank, or has ended."""
        at = state[0][chain]
        if at == len(self.programs[chain]):
            return None
        entry, rank = self.programs[chain][at], chain // self.width
        for other in range(rank * self.width, (rank + 1) * self.width):
            if entry[0] and state[0][other] < self.ends[entry[0] - 1][other]:
                return None
        return entry

    def reached(self, state: State, at: tuple[int, int] | None) -> bool:
        """Whether a place of a chain is behind it; never, where there is no such place."""
        return at is not None and state[0][at[0]] > at[1]

    def enabled(self, state: State, chain: int, entry: Entry) -> bool:
        item, rank, replay = self.item(chain, entry), chain // self.width, entry[0]
        plan = self.plans[replay]
        if isinstance(item, WaitEvent):
            return self.reached(state, self.records.get((replay, rank, item.event)))
        if isinstance(item, Wait):
            kernel = plan.exchanges[item.exchange].protocol is Protocol.KERNEL
            found = [state[1][self.words[rank, flag.slot]] for flag in item.flags]
            return all(word >= self.epochs[replay] if kernel else word == 1 for word in found)
        if isinstance(item, Collective) and entry[2]:
            group = plan.groups[plan.exchanges[item.exchange].group]
            return all(self.reached(state, self.starts.get((replay, member, item.exchange))) for member in group)
        return True

    def private(self, chain: int, entry: Entry) -> bool:
        item, key = self.item(chain, entry), self.key(chain, entry)
        if isinstance(item, Signal | Reset):
            return False
        if isinstance(item, Wait):
            rank = chain // self.width
            return all(self.resets[rank, flag.slot] <= {chain} for flag in item.flags)
        return not self.reads[key] and not self.writes[key]

    def step(self, state: State, chain: int, entry: Entry, search: Search) -> State:
        positions, words, memory = list(state[0]), list(state[1]), list(state[2])
        item, rank, key = self.item(chain, entry), chain // self.width, self.key(chain, entry)
        if isinstance(item, Signal):
            kernel = self.plans[entry[0]].exchanges[item.exchange].protocol is Protocol.KERNEL
            for flag in item.flags:
                word = self.words[flag.peer, flag.slot]
                if words[word] == 1 and not kernel:
                    search.wrong.add("lost signal")
                words[word] = self.epochs[entry[0]] if kernel else 1
        elif isinstance(item, Reset):
            for flag in item.flags:
                words[self.words[rank, flag.slot]] = 0
        found = tuple(memory[piece] for piece in self.reads[key])
        if self.seen.setdefault((chain, entry), found) != found:
            search.wrong.add("reads differ")
        for piece in self.writes[key]:
            memory[piece] = (chain, entry[0], entry[1])
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
    return search_word([plan] * replays, limit)


def search_word(plans: Sequence[Plan], limit: int = 20_000) -> Search:
    """The same for plans that follow one another."""
    machine, found = _Machine(plans), Search()
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
        ended = all(at == len(p) for at, p in zip(state[0], machine.programs, strict=True))
        if not ready and not ended:
            found.wrong.add("deadlock")
        todo += [machine.settle(machine.step(state, chain, number, found), found) for chain, number in ready]
    found.states = len(visited)
    return found

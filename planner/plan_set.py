"""A plan set: the versions of one step, variants and buckets, that ranks run one after another in one arena.

Every plan of a set has the set's arena and page of flags; its targets lie where the plan alone would have them, behind
the states of all plans, and its flags have slots that no other plan uses. States of one name are one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from stepgraph.planner.diagnostics import Diagnostic, PlanError, nearest
from stepgraph.planner.plan import (
    ALIGNMENT,
    Flag,
    Instruction,
    Plan,
    Reset,
    Signal,
    Wait,
    version_name,
)
from stepgraph.planner.plan import loads as load_one
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.plan_file import digest, read_text, refuse, sealed, unsealed

FORMAT = "stepgraph-plan-set"
HEAD = 64
"""The format stands in the first so many characters of a file."""


@dataclass(frozen=True, slots=True)
class VariantRule:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    after: tuple[str, ...]
    """The variants that it may follow in a request; the first variant of a set begins one."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    sizes: tuple[tuple[str, int], ...]
    """All sizes of its `shape`."""


@dataclass(frozen=True, slots=True)
class PlanSet:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    variants: tuple[VariantRule, ...]
    """None where the schedule has one version of the step."""
    buckets: tuple[BucketSizes, ...]
    """None where it has one shape."""
    plans: tuple[Plan, ...]
    """Of every variant and bucket, variant by variant."""

    @property
    def world_size(self) -> int:
        return self.plans[0].world_size

    @property
    def arena_bytes(self) -> int:
        return self.plans[0].arena_bytes

    def index(self, variant: str = "", bucket: str = "") -> int:
        """Which of ``plans`` a version is; by default the first variant, and the first bucket.

        Raises:
            PlanError: E155 for one that is not there.
        """
        return choose(self.name, [v.name for v in self.variants], [b.name for b in self.buckets], variant, bucket)

    def plan(self, variant: str = "", bucket: str = "") -> Plan:
        """The plan of a version, as ``index`` finds it."""
        return self.plans[self.index(variant, bucket)]

    def versions(self) -> Mapping[str, Plan]:
        """Every plan by its version's name: variant/bucket, or the one of the two that there is."""
        return {version(plan): plan for plan in self.plans}

    def may_follow(self, before: str, variant: str) -> bool:
        """Whether ``variant`` may come directly after ``before`` in a request; "" is its beginning."""
        if not self.variants:
            return True
        if not before:
            return variant == self.variants[0].name
        return before in next(rule.after for rule in self.variants if rule.name == variant)

    def follows(self) -> Mapping[str, tuple[str, ...]]:
        """The versions that each version may directly follow on the ranks: in a request what its variant may, and a
        request of another bucket may be taken up or left at any step."""

        def allowed(earlier: Plan, later: Plan) -> bool:
            if earlier.source.bucket != later.source.bucket:
                return True
            variants = (earlier.source.variant, later.source.variant)
            return self.may_follow(*variants) or self.may_follow("", variants[1])

        return {version(later): tuple(version(p) for p in self.plans if allowed(p, later)) for later in self.plans}

    def walk_to(self, word: Sequence[str]) -> tuple[str, ...] | None:
        """The versions that a session has to run before those of ``word``, by the rules of every bucket's request;
        None where no session may run these one after another."""
        versions, last, begun = self.versions(), dict[str, str](), list[str]()
        for name in word:
            source = versions[name].source
            before = last.get(source.bucket)
            last[source.bucket] = source.variant
            if self.may_follow("", source.variant) or (before and self.may_follow(before, source.variant)):
                continue
            if before is not None:
                return None
            way = self._beginning(source.variant)
            if way is None:
                return None
            begun += [version_name(variant, source.bucket) for variant in way]
        return tuple(begun)

    def _beginning(self, variant: str) -> tuple[str, ...] | None:
        """The fewest variants, from the one that begins a request on, behind which ``variant`` may come."""
        ways: list[tuple[str, ...]] = [(self.variants[0].name,)]
        for way in ways:  # which grows
            if self.may_follow(way[-1], variant):
                return way
            seen = {found[-1] for found in ways}
            ways += [(*way, r.name) for r in self.variants if r.name not in seen and way[-1] in r.after]
        return None


def choose(name: str, variants: Sequence[str], buckets: Sequence[str], variant: str, bucket: str) -> int:
    """Which version is meant, of all variants and buckets, variant by variant; by default the first of each.

    Raises:
        PlanError: E155 for one that is not there.
    """
    found = []
    for what, wanted, known in (("variant", variant, variants), ("bucket", bucket, buckets)):
        if wanted and wanted not in known:
            expected = f"one of {', '.join(known)}" if known else f"no {what}: there is one"
            problem = f"{name} has no {what} '{wanted}'"
            raise PlanError([Diagnostic("E155", problem, None, expected, f"'{wanted}'", nearest(wanted, known))])
        found.append(known.index(wanted) if wanted else 0)
    return found[0] * max(1, len(buckets)) + found[1]


def alone(plan: Plan) -> PlanSet:
    """A plan without other versions, as a set."""
    variant, bucket = plan.source.variant, plan.source.bucket
    variants = (VariantRule(variant, (variant,)),) if variant else ()
    return PlanSet(plan.name, variants, (BucketSizes(bucket, ()),) if bucket else (), (plan,))


def version(plan: Plan) -> str:
    """The name of a plan's version in its set; that of the plan where it has one version."""
    return plan.source.version or plan.name


def share_memory(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The plans with one arena, as large as the largest, and one page of flags in which each has slots of its own."""
    plans = states_in_place(plans)
    arena = max(plan.arena_bytes for plan in plans)
    bound = max(plan.arena_lower_bound for plan in plans)
    slots = sum(plan.flag_slots for plan in plans)
    found: list[Plan] = []
    base = 0
    for plan in plans:
        ranks = tuple(
            replace(program, instructions=tuple(_shifted(item, base) for item in program.instructions))
            for program in plan.ranks
        )
        found.append(replace(plan, ranks=ranks, arena_bytes=arena, arena_lower_bound=bound, flag_slots=slots))
        base += plan.flag_slots
    return tuple(found)


def states_in_place(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The plans with the states that peers write to in front of everything else, each at one place: what one plan
    leaves in a state, another finds. States are known by their names, and every plan has its own in front already."""
    offsets: dict[str, int] = {}
    end = 0
    for plan in plans:
        for state in plan.states:
            if state.buffer < len(plan.targets) and state.name not in offsets:
                offsets[state.name] = end
                end += _aligned(plan.targets[state.buffer].nbytes)
    found = []
    for plan in plans:
        names = {state.buffer: state.name for state in plan.states if state.buffer < len(plan.targets)}
        shift = end - sum(_aligned(plan.targets[number].nbytes) for number in names)
        targets = tuple(
            replace(target, offset=offsets[names[number]] if number in names else target.offset + shift)
            for number, target in enumerate(plan.targets)
        )
        arena, bound = plan.arena_bytes + shift, plan.arena_lower_bound + shift
        found.append(replace(plan, targets=targets, arena_bytes=arena, arena_lower_bound=bound))
    return tuple(found)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _shifted(item: Instruction, base: int) -> Instruction:
    if base and isinstance(item, Signal | Wait | Reset):
        return replace(item, flags=tuple(Flag(flag.peer, flag.slot + base) for flag in item.flags))
    return item


@cache
def _adapter() -> TypeAdapter[PlanSet]:
    return TypeAdapter(PlanSet)


def dumps(plans: PlanSet) -> str:
    """The canonical text of a plan set, as that of a plan: ``format``, ``version``, ``sha256``, ``set``."""
    return sealed(FORMAT, "set", _adapter().dump_json(plans))


def set_hash(plans: PlanSet) -> str:
    """SHA-256, in hex, over everything that the plan set says."""
    return digest(_adapter().dump_json(plans))


def loads(text: str, edited: bool = False) -> PlanSet:
    """Read a plan set by the rules by which plans are read.

    Raises:
        PlanError: E150 to E154.
    """
    found = unsealed(text, FORMAT, "set", _adapter(), edited)
    problem = next(
        (f"{version(p)} refers to what is not there: {why}" for p in found.plans if (why := check_plan(p))), ""
    )
    problem = problem or _check(found)
    if problem:
        raise refuse("E154", f"the plans do not make a set: {problem}", "valid references", "this")
    return found


def _check(plans: PlanSet) -> str:
    """What keeps plans from being a set; empty where nothing does."""
    names = [rule.name for rule in plans.variants]
    versions = plans.versions()
    if len(versions) < len(plans.plans) or "" in (*names, *(entry.name for entry in plans.buckets)):
        return "two versions have one name, or one has none"
    expected = [(v, b) for v in names or [""] for b in [entry.name for entry in plans.buckets] or [""]]
    if [(plan.source.variant, plan.source.bucket) for plan in plans.plans] != expected:
        return "there is not one plan for each variant and bucket, in order"
    first = plans.plans[0]
    for plan in plans.plans:
        shared = ("mesh", "arena_bytes", "flag_slots", "streams", "transport", "dtype")
        for what in shared:
            if getattr(plan, what) != getattr(first, what):
                return f"{version(plan)} and {version(first)} differ in {what}"
    states: dict[str, object] = {}
    for plan in plans.plans:
        for state in plan.states:
            boxes = [program.buffers[state.buffer] for program in plan.ranks]
            offset = plan.targets[state.buffer].offset if state.buffer < len(plan.targets) else None
            found = (offset, [(box.dtype, box.batch, box.rows, box.cols) for box in boxes])
            if states.setdefault(state.name, found) != found:
                return f"state {state.name} has two shapes or places"
    if any(name not in names for rule in plans.variants for name in rule.after):
        return "a variant follows one that is not there"
    return ""


def load_plan_set(path: Path, edited: bool = False) -> PlanSet:
    """``loads`` of a file; a plan alone is a set of one. Raises PlanError, also E150 where the file can't be read."""
    text = read_text(path)
    return loads(text, edited) if FORMAT in text[:HEAD] else alone(load_one(text, edited))

"""From the sizes of a request to a bucket of a plan set, or the reason why there is none and what it would cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError, nearest
from stepgraph.planner.plan_set import BucketSizes, PlanSet
from stepgraph.planner.timeline import estimate


@dataclass(frozen=True, slots=True)
class Match:
    """A bucket that takes a request."""

    bucket: str
    padding: Mapping[str, int]
    """By how much each size that may be padded falls short of the bucket's; empty where all are alike."""


class BucketMissError(StepgraphError):
    """No bucket takes a request (E615)."""


def match(plans: PlanSet, sizes: Mapping[str, int], pad: Collection[str] = ()) -> Match:
    """The bucket of these sizes. The caller may fill up the sizes in ``pad`` (with a mask, or by cutting the output),
    so that a bucket may be larger in them; of several the one with the fewest tokens is taken. Sizes that are not given
    may be any.

    Raises:
        BucketMissError: E615, with the reason, and what the nearest bucket or another one would cost.
    """
    if not isinstance(plans, PlanSet):
        problem, hint = "a request is matched to the buckets of a plan set", "stepgraph.compile_set makes one"
        raise BucketMissError([Diagnostic("E615", problem, None, "a PlanSet", f"a {type(plans).__name__}", hint)])
    pad = (pad,) if isinstance(pad, str) else pad
    known = dict(plans.buckets[0].sizes) if plans.buckets else {}
    unknown = [name for name in (*sizes, *pad) if name not in known]
    if unknown:
        problem, expected = f"no size of the buckets of {plans.name} is called '{unknown[0]}'", ", ".join(known)
        hint = nearest(unknown[0], known)
        raise BucketMissError([Diagnostic("E615", problem, None, expected or "no bucket", unknown[0], hint)])
    for name, size in sizes.items():
        if type(size) is not int or size < 0:
            problem = f"the size '{name}' of a request is none"
            raise BucketMissError([Diagnostic("E615", problem, None, "a whole number, 0 or more", repr(size))])
    for bucket in sorted(plans.buckets, key=_tokens):
        have = dict(bucket.sizes)
        if all(have[name] == size or (name in pad and have[name] > size) for name, size in sizes.items()):
            return Match(bucket.name, {name: have[name] - size for name, size in sizes.items() if have[name] != size})
    raise BucketMissError([_miss(plans, sizes, pad)])


def _tokens(bucket: BucketSizes) -> int:
    return prod(size for _, size in bucket.sizes if size)


def _miss(plans: PlanSet, sizes: Mapping[str, int], pad: Collection[str]) -> Diagnostic:
    got = ", ".join(f"{name} {size}" for name, size in sizes.items())
    expected = "; ".join(f"{b.name}: {', '.join(f'{n} {dict(b.sizes)[n]}' for n in sizes)}" for b in plans.buckets)
    holding = [b for b in plans.buckets if all(dict(b.sizes)[name] >= size for name, size in sizes.items())]
    if not holding:
        largest = {name: max(dict(bucket.sizes)[name] for bucket in plans.buckets) for name in sizes}
        over = [f"{name} {size} is more than {largest[name]}" for name, size in sizes.items() if size > largest[name]]
        reason = over[0] if over else "no bucket is as large in all sizes at once"
        hint = "add a bucket to the schedule, compile it and open a new session: the arena can't grow in this one"
        return Diagnostic("E615", f"no bucket holds the request: {reason}", None, expected, got, hint)
    nearest = min(holding, key=_tokens)
    short = [name for name, size in sizes.items() if dict(nearest.sizes)[name] != size and name not in pad]
    milliseconds = 1e3 * estimate(plans.plan(bucket=nearest.name)).step_seconds
    more = _tokens(nearest) / max(1, prod(size for size in ({**dict(nearest.sizes), **sizes}).values() if size))
    cost = f"with {more:.2f} x the tokens and {milliseconds:.2f} ms a step by the estimate"
    hint = f"the bucket '{nearest.name}' takes it {cost}, if {' and '.join(short)} may be padded; else add a bucket"
    return Diagnostic("E615", f"no bucket is as large as the request in {', '.join(short)}", None, expected, got, hint)

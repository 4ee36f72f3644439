"""Plan sets: variants and buckets of a schedule in one arena, compiled, proven, and run in any allowed order."""

import json
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner import plan_set as sets
from stepgraph.planner.buckets import BucketMissError, Match, match
from stepgraph.planner.compile import compile_schedule, compile_set
from stepgraph.planner.diagnostics import PlanError, ScheduleError, StepgraphError
from stepgraph.planner.footprint import footprint
from stepgraph.planner.plan import Signal
from stepgraph.planner.plan_set import PlanSet
from stepgraph.planner.schedule import Schedule, load_schedule, read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.planner.verify.succession import prove_set
from stepgraph.runtime.cache import ReplayCache
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Outputs, Session, StepOf
from stepgraph.runtime.simulate import schedule_of
from stepgraph.runtime.walk import walk, walk_order
from stepgraph.tools.cli import run

from support.sizes import PLANS, SETS, small_set

TEXT = (Path(__file__).parent / "data" / "variants.yaml").read_text()


SPLIT = "in: o, out: a, split: row}\n    - all_reduce: {in: a, via: copy}"


def schedule(*settings: tuple[str, str]) -> Schedule:
    return read_schedule(TEXT, "variants.yaml", settings)


def a_set(*settings: tuple[str, str]) -> PlanSet:
    return compile_set(schedule(*settings))


@pytest.fixture(scope="module")
def plans() -> PlanSet:
    return a_set()


def test_every_version_is_a_plan_of_its_own(plans: PlanSet) -> None:
    names = list(plans.versions())
    assert names == [f"{v}/{b}" for v in ("full", "cached", "update") for b in ("tiny", "small", "wide", "twice")]
    layers = {v: {op.layer for op in plans.plan(v).ops if op.layer is not None} for v in ("full", "cached", "update")}
    assert layers == {"full": {0, 1, 2}, "cached": {2}, "update": {0}}
    assert [entry.name for entry in plans.plan("update").inputs] == ["latents", "rope"]
    assert plans.plan("full", "twice").inputs[0].shape == (2, 10, 16)


def test_plans_share_an_arena_and_no_flag(plans: PlanSet) -> None:
    assert {plan.arena_bytes for plan in plans.plans} == {max(compile_schedule(v).arena_bytes for v in versions())}
    used = [
        {f.slot for p in plan.ranks for i in p.instructions if isinstance(i, Signal) for f in i.flags}
        for plan in plans.plans
    ]
    assert sum(map(len, used)) == len(set().union(*used)) == plans.plans[0].flag_slots


def versions() -> tuple[Schedule, ...]:
    return schedule().versions()


@pytest.mark.parametrize("mesh", ["ulysses: 2", "ulysses: 2, tensor: 2", "cfg: 2, ulysses: 2"])
def test_every_plan_of_a_set_is_proven_and_closed_by_all_ranks(mesh: str) -> None:
    text = TEXT.replace("mesh: {ulysses: 2}", f"mesh: {{{mesh}}}")
    if "tensor" in mesh:
        text = text.replace("v: kv_heads}}", "v: kv_heads}, split: column}").replace("in: o, out: a}", SPLIT)
    for plan in compile_set(read_schedule(text, "variants.yaml")).plans:
        assert prove(plan).ok
        members = {rank for e in plan.exchanges if "closing" in e.name for rank in plan.groups[e.group]}
        assert members == set(range(plan.world_size))


@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_any_order_of_versions_gives_what_the_unsharded_model_gives(handshake: str) -> None:
    plans = a_set(("defaults.handshake", handshake))
    order = walk_order(plans, 60, 7)
    inputs = [random_inputs(plans.plan(*version), number) for number, version in enumerate(order)]
    seen: dict[int, list[Outputs]] = {0: [], 1: []}

    def loop(rank: int) -> Generator[StepOf, Outputs, None]:
        for (variant, bucket), given in zip(order, inputs, strict=True):
            outputs = yield StepOf(given, variant, bucket)
            seen[rank].append(outputs)

    with torch.no_grad(), Session(plans, device="cpu", seed=3) as session:
        session.drive(loop)
        assert session.report.ok, (session.report.races[:3], session.report.faults[:3])
        assert session.report.replays == len(order)
    models = {version: Unsharded(schedule_of(plans.plan(*version)), 3) for version in set(order)}
    states = models[order[0]].states
    for model in models.values():
        model.states = states
    for version, given, *outputs in zip(order, inputs, *seen.values(), strict=True):
        (want,) = models[version](given)
        for (got,) in outputs:
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_an_open_version_is_a_race_that_the_cpu_device_sees(plans: PlanSet) -> None:
    """Without its closing handshakes the small version's output is overwritten by the next one's first sends."""
    opened = []
    for plan in plans.plans:
        closing = {n for n, exchange in enumerate(plan.exchanges) if "closing" in exchange.name}
        ranks = [
            replace(p, instructions=tuple(i for i in p.instructions if getattr(i, "exchange", None) not in closing))
            for p in plan.ranks
        ]
        opened.append(replace(plan, ranks=tuple(ranks)))
    found = replace(plans, plans=tuple(opened))
    order = walk_order(plans, 30, 1)

    def loop(rank: int) -> Generator[StepOf, Outputs, None]:
        for number, (variant, bucket) in enumerate(order):
            _ = yield StepOf(random_inputs(found.plan(variant, bucket), number), variant, bucket)

    with torch.no_grad(), Session(found, device="cpu", seed=3) as session:
        session.drive(loop)
        assert session.report.races


def test_steps_are_called_by_version(plans: PlanSet) -> None:
    with torch.no_grad(), Session(plans, device="cpu") as session:
        full, cached = session.capture(bucket="wide"), session.capture(variant="cached", bucket="wide")
        given = random_inputs(plans.plan("full", "wide"), 0)
        full(**given)
        assert cached(**given).shape == (1, 14, 16)
        with pytest.raises(StepgraphError, match="E605"):
            session.capture(bucket="small")(**given)
        with pytest.raises(PlanError, match="E155"):
            session.capture(variant="fulll")
        with pytest.raises(PlanError, match="E155"):
            session.capture(bucket="huge")


def test_a_variant_comes_in_its_turn(plans: PlanSet) -> None:
    given = random_inputs(plans.plan("full", "small"), 0)
    part = {name: given[name] for name in ("latents", "rope")}
    with torch.no_grad(), Session(plans, device="cpu") as session:
        with pytest.raises(StepgraphError, match=r"E614[\s\S]*the beginning of a request"):
            session.capture(variant="cached", bucket="small")(**given)
        session.capture(bucket="small")(**given)
        session.capture(variant="update", bucket="small")(**part)
        with pytest.raises(StepgraphError, match=r"E614[\s\S]*full, cached before it[\s\S]*update"):
            session.capture(variant="cached", bucket="small")(**given)
        session.capture(bucket="small")(**given)
        session.reset_state()
        with pytest.raises(StepgraphError, match=r"E614[\s\S]*the beginning of a request"):
            session.capture(variant="cached", bucket="small")(**given)


def test_ranks_that_take_different_versions_are_told(plans: PlanSet) -> None:
    def loop(rank: int) -> Generator[StepOf, Outputs, None]:
        bucket = ("small", "wide")[rank]
        _ = yield StepOf(random_inputs(plans.plan("full", bucket), 0), "full", bucket)

    with (
        torch.no_grad(),
        Session(plans, device="cpu") as session,
        pytest.raises(StepgraphError, match=r"E607[\s\S]*(full/small|full/wide)"),
    ):
        session.drive(loop)


# The file


def test_file_of_a_set(plans: PlanSet, tmp_path: Path) -> None:
    text = sets.dumps(plans)
    assert sets.loads(text) == plans
    assert sets.dumps(a_set()) == text
    document = json.loads(text)
    document["set"]["plans"] = document["set"]["plans"][1:]
    with pytest.raises(PlanError, match="E152"):
        sets.loads(json.dumps(document))
    with pytest.raises(PlanError, match=r"E154[\s\S]*one plan for each variant and bucket"):
        sets.loads(json.dumps(document), edited=True)
    document = json.loads(text)
    document["set"]["plans"][3]["flag_slots"] += 1
    with pytest.raises(PlanError, match=r"E154[\s\S]*full/twice and full/tiny differ in flag_slots"):
        sets.loads(json.dumps(document), edited=True)
    with pytest.raises(PlanError, match="E150"):
        sets.load_plan_set(tmp_path / "none")


@pytest.mark.parametrize(("first", "second"), [("full", "full"), ("", "full"), ("full/a", "full")])
def test_every_version_has_a_name_of_its_own(plans: PlanSet, first: str, second: str) -> None:
    """Two of one name would be proven as one, and the other one run."""
    names, bucket = (first, second), plans.plans[0].source.bucket
    pairs = {("full/a", bucket): f"{bucket}", ("full", bucket): f"a/{bucket}"} if "/" in first else {}
    buckets = tuple(dict.fromkeys(pairs.values())) or (bucket,)
    versions = tuple(
        replace(plans.plans[0], source=replace(plans.plans[0].source, variant=name, bucket=one))
        for name in names
        for one in buckets
    )
    rules = tuple(sets.VariantRule(name, ()) for name in names)
    found = sets.PlanSet("twice", rules, tuple(sets.BucketSizes(one, ()) for one in buckets), versions)
    with pytest.raises(PlanError, match=r"E154[\s\S]*two versions have one name, or one has none"):
        sets.loads(sets.dumps(found))


# What an author can get wrong


@pytest.mark.parametrize(
    ("find", "write", "code", "message"),
    [
        ("after: [full, cached]", "after: [full, cachd]", "E214", "no variant is called 'cachd'"),
        ("{seq: 3}", "{sek: 3}", "E214", "no size of `shape` is called 'sek'"),
        ("variants:", "step:\n  - layers: block\nvariants:", "E104", "a step, or variants"),
        ("first: 2", "first: -1", "E103", "first"),
        ("  timestep: {shape: [batch]}", "  timestep: {shape: [batch]}\n  odd: {shape: [batch]}", "E202", "'odd'"),
        ("    after: [full]\n", "    aftr: [full]\n", "E102", "aftr"),
        ("    outputs: [x0]", "    outputs: [y0]", "E212", "y0"),
    ],
)
def test_mistakes(find: str, write: str, code: str, message: str) -> None:
    assert TEXT.count(find) == 1
    with pytest.raises(ScheduleError) as error:
        compile_set(read_schedule(TEXT.replace(find, write), "variants.yaml"))
    assert [found.code for found in error.value.diagnostics] == [code]
    assert message in error.value.diagnostics[0].message
    assert error.value.diagnostics[0].place is not None


def test_heads_that_the_tensor_axis_does_not_split_are_not_sent() -> None:
    with pytest.raises(ScheduleError) as error:
        compile_set(read_schedule(TEXT.replace("ulysses: 2", "ulysses: 2, tensor: 2"), "variants.yaml"))
    assert {found.code for found in error.value.diagnostics} == {"E210"}


def test_a_mistake_in_a_block_is_told_once() -> None:
    with pytest.raises(ScheduleError) as error:
        compile_set(read_schedule(TEXT.replace("norm: {in: x,", "norm: {in: xx,"), "variants.yaml"))
    assert [found.code for found in error.value.diagnostics] == ["E201"]


def test_one_version_is_wanted() -> None:
    with pytest.raises(ScheduleError, match="E215"):
        compile_schedule(schedule())


# The replay cache


def test_cache_lets_the_least_recently_used_go() -> None:
    """CASES 22."""
    cache = ReplayCache("abcd", [40, 30, 20, 200], 100)
    assert [cache.use(number) for number in (0, 1, 2, 0)] == [(True, ()), (True, ()), (True, ()), (False, ())]
    assert cache.use(3) == (True, (1, 2, 0))  # larger than the budget: alone
    assert cache.use(1) == (True, (3,))
    found = cache.stats()
    assert (found.hits, found.misses, found.evictions, found.planned_bytes) == (1, 5, 4, 30)
    assert dict(found.captured) == {"b": 30}


def test_cache_without_a_limit_keeps_all() -> None:
    cache = ReplayCache("ab", [1, 1], None)
    assert [cache.use(number)[1] for number in (0, 1, 0, 1)] == [(), (), (), ()]
    assert (cache.stats().hits, cache.stats().misses) == (2, 2)


@pytest.mark.parametrize(("budget", "ahead"), [(None, 12), (0, 0), ("two", 2)])
def test_the_cpu_device_keeps_account_as_cuda_would(plans: PlanSet, budget: int | str | None, ahead: int) -> None:
    """CASES 22: what the budget has room for is captured when a session opens, and is a hit in its first step."""
    sizes = [footprint(plan) for plan in plans.plans]
    limit = sum(sizes[:2]) if budget == "two" else budget
    assert isinstance(limit, int | None)
    with torch.no_grad(), Session(plans, device="cpu", graph_bytes=limit) as session:
        opened = session.stats()
        assert (list(opened.captured), opened.misses) == (list(plans.versions())[:ahead], 0)
        session.capture(bucket="tiny")(**random_inputs(plans.plan("full", "tiny"), 0))
        assert (session.stats().hits, session.stats().misses) == ((1, 0) if ahead else (0, 1))


# The commands


def command(*arguments: str) -> tuple[int, dict[str, object]]:
    from click.testing import CliRunner

    from stepgraph.tools.cli import cli

    result = CliRunner().invoke(cli, [*arguments, "--format", "json"], standalone_mode=False)
    assert result.exception is None, result.exception
    return result.return_value, json.loads(result.output)


def test_commands_take_a_set(tmp_path: Path) -> None:
    source, plan = str(Path(__file__).parent / "data" / "variants.yaml"), str(tmp_path / "set.plan")
    code, found = command("compile", source, "-o", plan)
    assert (code, found["proven"], found["output"], len(found["versions"])) == (0, True, plan, 12)
    code, found = command("verify", plan)
    assert (code, found["successions_by_closing"], found["successions_looked_at"]) == (0, 132, 0)
    assert set(found["versions"].values()) == {True}
    assert command("verify", plan, "--variant", "cached", "--mutate", "5")[1]["mutants"]["total"] == 5
    for name in ("show", "memory", "diff"):
        files = (plan, plan) if name == "diff" else (plan,)
        assert command(name, *files, "--variant", "update", "--bucket", "tiny")[0] == 0
    assert command("compare", source, "--bucket", "tiny", "--device", "cpu")[1]["ok"]
    assert [row["version"] for row in command("check", source)[1]["versions"]][:2] == ["full/tiny", "full/small"]


def test_options_that_would_be_ignored_are_refused() -> None:
    source = str(Path(__file__).parent / "data" / "variants.yaml")
    for arguments in (
        ["run", source, "--bucket", "tiny", "--graph-bytes", "1"],
        ["run", source, "--solo", "--device", "cpu"],
        ["verify", source, "--mutate", "1"],
    ):
        assert run(arguments) == 2, arguments
    for arguments in (["verify", source, "--variant", "no"], ["show", source, "--bucket", "no"]):
        assert run(arguments) == 1, arguments


def test_run_walks_through_a_set(tmp_path: Path) -> None:
    source = str(Path(__file__).parent / "data" / "variants.yaml")
    limits = ("--device", "cpu", "--steps", "12", "--graph-bytes", "9000")
    code, found = command("run", source, *limits)
    assert (code, found["ok"], found["ranks_agree"], found["findings"]) == (0, True, True, [])
    stats = found["stats"]
    assert stats["hits"] + stats["misses"] == sum(found["taken"].values()) == 12
    assert sum(stats["captured"].values()) == stats["planned_bytes"] <= 9000
    assert command("run", source, "--device", "cpu", "--steps", "2", "--bucket", "tiny")[1]["movement_exact"]


# From a request to a bucket


def test_requests_take_the_bucket_of_their_sizes(plans: PlanSet) -> None:
    assert match(plans, {"seq": 14, "batch": 1}) == Match("wide", {})
    assert match(plans, {"seq": 10}) == Match("small", {})
    assert match(plans, {"seq": 10, "batch": 2}) == Match("twice", {})
    assert match(plans, {"seq": 11, "batch": 1}, pad=["seq"]) == Match("wide", {"seq": 3})
    assert match(plans, {"seq": 2, "batch": 2}, pad=["seq"]) == Match("twice", {"seq": 8})
    assert match(plans, {"seq": 2, "batch": 2}, pad="seq") == Match("twice", {"seq": 8})  # one name is a name
    with pytest.raises(BucketMissError, match=r"a PlanSet[\s\S]*got: +a Plan\s"):
        match(plans.plans[0], {"seq": 14})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "pad", "reason"),
    [
        ({"seq": 11, "batch": 1}, [], r"as large as the request in seq[\s\S]*the bucket 'wide' takes it with 1.27 x"),
        ({"seq": 99, "batch": 1}, ["seq"], r"seq 99 is more than 14[\s\S]*open a new session"),
        ({"seq": 14, "batch": 2}, ["seq"], r"no bucket is as large in all sizes at once"),
        (
            {"sek": 14},
            [],
            r"no size of the buckets of variants is called 'sek'[\s\S]*got: +sek[\s\S]*did you mean 'seq'",
        ),
        ({"seq": -1}, ["seq"], r"the size 'seq' of a request is none[\s\S]*got: +-1"),
        ({"seq": "14"}, [], r"the size 'seq' of a request is none[\s\S]*got: +'14'"),
    ],
)
def test_a_miss_tells_its_reason_and_its_cost(
    plans: PlanSet, sizes: dict[str, int], pad: list[str], reason: str
) -> None:
    """CASES 23."""
    with pytest.raises(BucketMissError, match=reason):
        match(plans, sizes, pad)


# The shipped sets


@pytest.mark.parametrize("name", SETS)
def test_shipped_sets_are_proven_at_their_true_size(name: str) -> None:
    plans = sets_of(PLANS / f"{name}.yaml")
    proof = prove_set(plans.versions(), plans.follows())
    assert proof.ok
    assert plans.arena_bytes == plans.plans[0].arena_lower_bound


def sets_of(path: Path) -> PlanSet:
    return compile_set(load_schedule(path))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SETS)
def test_shipped_sets_give_what_the_unsharded_models_give(name: str, ranks: int) -> None:
    report = walk(small_set(name, mesh__ulysses=str(ranks), model__dtype="float32"), 24, 2, "cpu")
    assert report is not None
    assert report.ok, report

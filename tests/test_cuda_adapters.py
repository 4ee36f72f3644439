"""Models of diffusers on the cuda device: captured equals eager bit for bit, and a loop equals that of the model's own
forward."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.runtime.cache import CacheStats
from stepgraph.runtime.facts import CaptureFacts

from support.cached import VARIANTS, Cached, cached_calls
from support.ranks import on_ranks
from support.tiny import FAMILIES, denoised, in_dtype, moved_to, with_dtype

pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 20
SLACK = 2.0
"""How many times as far from float64 as the model's own loop in bfloat16 a sharded one may be."""


def made(name: str, dtype: torch.dtype, uneven: bool) -> tuple[Any, dict[str, object]]:
    tiny, device = FAMILIES[name], torch.device("cuda", torch.cuda.current_device())
    model = in_dtype(tiny.made(), dtype).to(device)
    return model, moved_to(with_dtype(tiny.call(uneven), dtype), device)


def loops(name: str, uneven: bool, rank: int) -> tuple[bool, float, float, float, list[str], CaptureFacts]:
    """Whether captured and eager steps have the same bits; how far this rank's last latents, and those of the model's
    own loop, are from float64, over the largest latent; this rank's last latents as text; what was captured."""
    model, call = made(name, torch.bfloat16, uneven)
    settings, schedule = FAMILIES[name].settings(model), FAMILIES[name].schedule
    eager = stepgraph.wrap(model, schedule, device="cuda", overrides=settings, eager=True)
    wanted, _ = denoised(eager, call, STEPS)
    eager.close()
    captured = stepgraph.wrap(model, schedule, device="cuda", overrides=settings)
    seen, latents = denoised(captured, call, STEPS)
    (session,) = captured.sessions.values()
    facts = session.facts
    same = all(torch.equal(one, two) for one, two in zip(seen, wanted, strict=True))
    captured.close()
    _, mine = denoised(model, call, STEPS)
    exact_model, exact_call = model.double(), with_dtype(call, torch.float64)
    _, exact = denoised(exact_model, exact_call, STEPS)
    largest = exact.abs().max()
    errors = [float((found.double() - exact).abs().max() / largest) for found in (latents, mine)]
    return same, *errors, float(largest), [str(latents.float().sum().item())], facts


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps_of_a_scheduler(name: str, ranks: int, uneven: bool) -> None:
    found: list[Any] = on_ranks(ranks, partial(loops, name, uneven), seconds=300)
    for same, sharded, own, largest, _, facts in found:
        assert same
        assert facts.eager_because == ""
        assert largest > 0
        assert own > 0
        assert sharded <= SLACK * own
    assert len({tuple(latents) for _, _, _, _, latents, _ in found}) == 1
    print(f"\n{name}, {ranks} ranks: {found[0][1]:.1e} from float64; the model's own loop {found[0][2]:.1e}")


def float32_steps(name: str, rank: int) -> float:
    """As far as one float32 step is from the model's own forward."""
    model, call = made(name, torch.float32, True)
    tiny = FAMILIES[name]
    sharded = stepgraph.wrap(model, tiny.schedule, device="cuda", overrides=tiny.settings(model))
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False  # of the model's own convolution
    with torch.no_grad():
        (want,) = model(**call, return_dict=False)
        (got,) = sharded(**call, return_dict=False)
    torch.backends.cudnn.allow_tf32 = before
    sharded.close()
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_float32_step(name: str) -> None:
    assert max(on_ranks(4, partial(float32_steps, name), seconds=200)) < 1e-4  # type: ignore[type-var, operator]


def cached(eager: bool, graph_bytes: int | None, rank: int) -> tuple[list[float], list[float], list[CacheStats]]:
    """How far each call of a loop with a residual cache is from one written anew, the sums of what they give, and the
    statistics of the session of each branch."""
    model, call = made("wan cached", torch.bfloat16, True)
    settings = FAMILIES["wan cached"].settings(model)
    sharded = stepgraph.wrap(
        model, "wan_14b_cached_u4", device="cuda", overrides=settings, eager=eager, graph_bytes=graph_bytes
    )
    reference, errors, sums = Cached(model), [], []
    for variant, branch, given in cached_calls(call):
        sharded.variant = variant
        with sharded.cache_context(branch):
            (got,) = sharded(**given, return_dict=False)
        want = reference(branch, variant, given)
        errors.append(float((got - want).abs().max() / want.abs().max()))
        sums.append(float(got.double().sum()))
    stats = [session.stats() for session in sharded.sessions.values()]
    sharded.close()
    return errors, sums, stats


def test_a_residual_cache_in_two_branches() -> None:
    """Captured and eager give the same; with room for one version a session, every change of variant captures again."""
    found: dict[str, Any] = {
        name: on_ranks(2, partial(cached, name == "eager", 1 if name == "tight" else None), seconds=300)
        for name in ("eager", "captured", "tight")
    }
    for ranks in found.values():
        for errors, sums, stats in ranks:
            assert max(errors) <= 2**-5
            assert sums == found["eager"][0][1]
            assert len(stats) == 2
    for _, _, stats in found["captured"]:
        assert all((one.hits, one.misses, one.evictions) == (len(VARIANTS), 0, 0) for one in stats)
    changes = 1 + sum(one != two for one, two in pairwise(VARIANTS))
    for _, _, stats in found["tight"]:
        assert all((one.misses, one.evictions) == (changes, changes - 1) for one in stats)


def requests(rank: int) -> tuple[list[float], list[float], str]:
    """The sums of what the calls of two requests give, a pipeline's end behind each, and what is told of a third one
    that would begin with what the second one kept."""
    model, call = made("wan cached", torch.bfloat16, True)
    settings = FAMILIES["wan cached"].settings(model)
    sharded = stepgraph.wrap(model, "wan_14b_cached_u4", device="cuda", overrides=settings)
    calls, sums = list(cached_calls(call)), []
    for variant, branch, given in (*calls, *calls):
        if len(sums) == len(calls):
            sharded._reset_stateful_cache()
        sharded.variant = variant
        with sharded.cache_context(branch):
            (got,) = sharded(**given, return_dict=False)
        sums.append(float(got.double().sum()))
    sharded._reset_stateful_cache()
    sharded.variant = "cached"
    try:
        with sharded.cache_context("cond"):
            sharded(**call, return_dict=False)
    except StepgraphError as error:
        told = str(error)
    else:
        told = "accepted"
    sharded.close()
    return sums[: len(calls)], sums[len(calls) :], told


def test_a_request_begins_anew_on_every_rank() -> None:
    for found in on_ranks(2, requests):
        assert isinstance(found, tuple)
        first, second, told = found
        assert first == second
        assert told.startswith("E614"), told


def swapped(rank: int) -> str:
    """What is told when a weight of a captured model is replaced, and when it is changed in place."""
    model, call = made("wan", torch.bfloat16, False)
    sharded = stepgraph.wrap(model, "wan_14b_u4", device="cuda", overrides=stepgraph.settings_of(model))
    with torch.no_grad():
        sharded(**call)
        model.proj_out.weight.mul_(2)
        model.proj_out.bias.mul_(2)
        (want,) = model(**call, return_dict=False)
        (got,) = sharded(**call, return_dict=False)
        in_place = float((got - want).abs().max() / want.abs().max())
        model.proj_out.weight.data = model.proj_out.weight.data.clone()
        try:
            sharded(**call)
        except StepgraphError as error:
            told = str(error)
        else:
            told = "accepted"
    sharded.close()
    return f"{in_place < 2**-5} {told}"


def test_a_weight_that_was_swapped_is_named() -> None:
    """CASES 37, for a wrapped model."""
    for told in on_ranks(2, swapped):
        assert isinstance(told, str)
        assert told.startswith("True E609"), told
        assert "proj_out.weight" in told


def on_a_side_stream(rank: int) -> bool:
    """Whether calls on a stream of the caller's own, with fresh timesteps, give what calls on the default one do."""
    model, call = made("flux", torch.bfloat16, True)
    sharded = stepgraph.wrap(model, "flux_1024_u4", device="cuda", overrides=stepgraph.settings_of(model))
    times = [torch.full((2,), 0.1 * number, device="cuda") for number in range(1, 9)]
    wanted = [sharded(**{**call, "timestep": time}).sample for time in times]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = [sharded(**{**call, "timestep": time}).sample for time in times]
        torch.cuda.current_stream().synchronize()
    same = all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    differ = all(not torch.equal(one, two) for one, two in pairwise(wanted))
    sharded.close()
    return same and differ


def test_timesteps_are_read_by_every_replay() -> None:
    """CASES 12, 13."""
    assert on_ranks(2, on_a_side_stream) == [True, True]

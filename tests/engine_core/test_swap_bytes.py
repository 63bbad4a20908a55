"""Swapping real bytes: tokens and images are equal whatever is swapped when, and no stale image is ever attached."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from engine_core.model_runner import ModelRunner
from engine_core.plan import Landed
from engine_core.request import Request, State
from engine_core.swap import SwapPolicy
from kernels.kv_format import kv_codecs

from .swap_rig import Rig, load_tiny, random_request, undisturbed

FORMATS = ["auto", *(codec.name for codec in kv_codecs(torch.float32)[1:])]
SWAPS = 1000 // len(FORMATS)
PATIENT = SwapPolicy("swap", max_pause=1e9, min_interval=0.0)


@pytest.fixture(scope="module", params=FORMATS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_tiny(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def plain_runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_tiny(tmp_path_factory.mktemp("tiny"), "auto")


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*arguments: object, **options: object) -> Rig:
        rigs.append(Rig(*arguments, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def swap_somebody(rig: Rig, draw: random.Random) -> bool:
    running = [r for r in rig.scheduler.running if r.state in (State.PREFILL, State.DECODE) and r.computed]
    return bool(running) and rig.scheduler.residency.swap_out(draw.choice(running))


def test_a_thousand_random_swaps_change_no_token_and_no_byte(runner: ModelRunner, make_rig: Callable[..., Rig]) -> None:
    """Random victims, arrivals, aborts, landings, failed copies; a fifth of the thousand for each KV format."""
    draw = random.Random(runner.kv_cache_dtype)
    ended: list[Request] = []
    swaps = trips = 0
    for storm in range(4):
        rig = make_rig(runner, num_blocks=16, host_blocks=(40, 12)[storm % 2], policy=PATIENT, overlap=storm >= 2)
        done = 0
        while done < SWAPS / 4:
            if len(rig.scheduler.requests) < 8 and draw.random() < 0.5:
                random_request(rig, draw)
            if draw.random() < 0.03:
                rig.scheduler.abort(draw.choice(list(rig.scheduler.requests) or [0]))
            done += swap_somebody(rig, draw)
            ended += [outcome.request for outcome in rig.step() if outcome.finish]
            for out, copies in rig.in_flight.items():
                rig.failing |= {copy.tag for copy in copies if draw.random() < 0.01}
                rig.land(out, draw.randint(0, len(copies)))
        left = list(rig.scheduler.requests.values())
        rig.finish()
        ended += left
        rig.assert_nothing_is_left()
        assert rig.scheduler.counts.swapped >= done
        swaps, trips = swaps + done, trips + rig.round_trips
    assert swaps >= SWAPS
    assert trips > SWAPS, "blocks came back with the bytes that they left with"
    assert sum(request.swaps > 1 for request in ended) > 10
    for request in ended:
        assert request.output == undisturbed(runner, request), f"after {request.swaps} swaps"


@pytest.mark.parametrize("how", ["retagged", "lost", "exchanged"])
def test_a_stale_image_is_never_attached(plain_runner: ModelRunner, make_rig: Callable[..., Rig], how: str) -> None:
    """An image that isn't the block's own is refused by its tag; what it held is computed again."""
    rig = make_rig(plain_runner, num_blocks=16, host_blocks=40, policy=PATIENT)
    victim, other = rig.add(list(range(14)), 10), rig.add(list(range(50, 70)), 10)
    rig.step_until(victim, State.DECODE)
    rig.step_until(other, State.DECODE)
    rig.swap_out(victim)
    rig.land_all()
    assert victim.state is State.SWAPPED
    rig.evict()
    rig.tamper(victim, how)
    rig.finish()
    assert rig.scheduler.counts.failed >= 1 + (how == "exchanged")
    assert (victim.recomputes, other.recomputes) == (1, 0)
    for request in (victim, other):
        assert request.output == undisturbed(plain_runner, request)
    rig.assert_nothing_is_left()


STATES = [State.WAITING, State.PREFILL, State.DECODE, State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN]


@pytest.mark.parametrize("before", [State.PREFILL, State.DECODE])
@pytest.mark.parametrize("state", STATES)
def test_an_abort_in_any_state_leaves_nothing(
    plain_runner: ModelRunner, make_rig: Callable[..., Rig], state: State, before: State
) -> None:
    """Failure report D3. A disconnect, a stop string and a lost frontend are aborts, too."""
    rig = make_rig(plain_runner, num_blocks=12, host_blocks=40, policy=PATIENT)
    bystander = rig.add([1, 2, 3], 12)
    rig.step_until(bystander, State.DECODE)
    request = rig.add(list(range(30)), 8)  # four chunks
    if state is not State.WAITING:
        rig.step_until(request, before)
        rig.step()
    if state in (State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN):
        rig.swap_out(request)
        assert request.state is State.SWAPPING_OUT
        assert request.state_before_swap is before
    if state in (State.SWAPPED, State.SWAPPING_IN):
        rig.land_all()
    if state is State.SWAPPING_IN:
        rig.evict()
        rig.step()
    assert request.state is (before if state in (State.PREFILL, State.DECODE) else state)
    late = [*rig.in_flight[True], *rig.in_flight[False]]
    assert bool(late) == (state in (State.SWAPPING_OUT, State.SWAPPING_IN))

    assert rig.scheduler.abort(request.id) is request
    assert rig.scheduler.abort(request.id) is None
    assert rig.scheduler.abort(1 << 40) is None
    rig.scheduler.check()
    rig.step()  # its places may not be given away while copies are in flight
    newcomer = rig.add(list(range(60, 90)), 4)
    rig.step()
    rig.land_all()
    strays = rig.scheduler.pool.strays
    for copy in late:
        rig.tell(Landed([copy], True, 0.0))  # and once more, though it has ended
    assert rig.scheduler.pool.strays == strays + len(late)
    rig.finish()
    rig.assert_nothing_is_left()
    for other in (bystander, newcomer):
        assert other.output == undisturbed(plain_runner, other)


@pytest.mark.parametrize("state", STATES[1:])
def test_an_end_token_in_any_state_leaves_nothing(
    plain_runner: ModelRunner, make_rig: Callable[..., Rig], state: State
) -> None:
    """The token of a step that was in flight when its request was swapped out, or came in, may be its last."""
    rig = make_rig(plain_runner, num_blocks=12, host_blocks=40, policy=PATIENT, overlap=True)
    calm = undisturbed(plain_runner, rig.add([3, 1, 4, 1, 5], 12))
    rig.finish()
    last = 0 if state is State.PREFILL else next(n for n in range(2, 12) if calm[n] not in calm[:n])
    request = rig.add([3, 1, 4, 1, 5], 12, stop=calm[last])
    while len(request.output) + request.pending <= last:
        rig.step()
    if state >= State.SWAPPING_OUT:
        rig.swap_out(request)
    if state >= State.SWAPPED:
        rig.land_all()
    if state is State.SWAPPING_IN:
        rig.evict()
    elif state is State.SWAPPED:
        rig.add(list(range(40, 84)), 2, priority=-1)  # takes all places, so that it stays out
    rig.step()
    assert rig.ended_in[request.id] is state
    assert request.output == calm[: last + 1]
    rig.finish()
    rig.assert_nothing_is_left()

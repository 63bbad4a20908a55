"""Random loads, pools, policies, copy times and failures: invariants at each event, an end for all, right tokens."""

import random

import pytest

from engine_core.request import Request
from engine_core.scheduler import Outcome
from engine_core.swap import SwapPolicy
from protocol.messages import Finish

from . import fake_engine
from .fake_engine import FakeEngine, expected_output, make_scheduler

RUNS = 160  # in four tests


def random_engine(draw: random.Random) -> FakeEngine:
    policy = SwapPolicy(
        draw.choice(("auto", "swap", "recompute")),
        max_pause=draw.choice((1e-6, 0.01, 0.05, 0.5, 1e9)),
        min_tokens=draw.choice((1, 4, 16)),
        min_interval=draw.choice((0.0, 0.05, 0.25)),
        overcommit=draw.choice((1.0, 2.0, 100.0)),
        in_transit=draw.choice((0.0, 0.25, 1.0)),
        lookahead=draw.choice((0, 4, 12)),
        swap_every=draw.choice((0, 0, 0, 1, 3)),
        yielding=draw.choice((0.0, 8.0, 1e3)),
        most_yielding=draw.choice((0.1, 10.0)),
    )
    sizes = {"max_running": draw.choice((1, 2, 8, 40)), "prefill_chunk_tokens": draw.choice((1, 5, 16, 100))}
    prefix_cache = draw.random() < 0.5
    scheduler = make_scheduler(
        draw.choice((2, 3, 4, 5, 8, 12, 16, 33, 64)),
        draw.choice((1, 2, 4, 4)),
        0,  # it grows later
        policy,
        **sizes,
        prefix_cache=prefix_cache,
    )
    scheduler.rates.copy_out = scheduler.rates.copy_in = draw.choice((0.0, 0.1, 1e6))
    failing, slowest = draw.choice((0, 0, 0.05, 0.5, 1.0)), draw.choice((0, 1, 3, 10))
    spoilt = draw.choice((0, 0, 0.03))
    return FakeEngine(
        scheduler,
        delay=lambda: draw.randint(0, slowest),
        fails=lambda: draw.random() < failing,
        overlap=draw.random() < 0.5,
        spoils=lambda: draw.random() < spoilt,
    )


def random_request(engine: FakeEngine, draw: random.Random) -> Request:
    context = engine.scheduler.capacity.num_blocks * engine.size
    length = draw.randint(1, min(context - 1, draw.choice((5, 20, 60))))
    family = draw.randrange(4)
    prompt = [(family * 5 + n) % 97 for n in range(length)] if family else draw.choices(range(97), k=length)
    tokens = draw.randint(1, min(30, context - length))
    return engine.add(prompt, tokens, priority=draw.choice((0, 0, 1, 2)), cache_salt=draw.choice(("", "", "x")))


def run(draw: random.Random) -> None:
    engine = random_engine(draw)
    scheduler = engine.scheduler
    requests: list[Request] = []
    ended: list[int] = []
    cut_short: set[int] = set()
    most = draw.choice((40, 10))
    host_blocks, grows_at = draw.choice((0, 1, 2, 3, 7, 20, 200)), draw.choice((0, 0, 15))

    def take(outcomes: list[Outcome]) -> None:
        ended.extend(outcome.request.id for outcome in outcomes if outcome.finish)
        cut_short.update(outcome.request.id for outcome in outcomes if outcome.finish is Finish.ERROR)

    for number in range(draw.choice((20, 100, 200))):
        if number == grows_at:
            scheduler.grow_host(host_blocks)
        while len(requests) < most and draw.random() < 0.4:
            requests.append(random_request(engine, draw))
        take(engine.step())
        if requests and draw.random() < 0.05 and (request := scheduler.abort(draw.choice(requests).id)):
            scheduler.check()
            ended.append(request.id)
            cut_short.add(request.id)
    for outcomes in engine.run_to_end():
        take(outcomes)
    for _ in range(12):  # copies that nobody waits for
        engine.step()
    assert sorted(ended) == [request.id for request in requests], "each ends exactly once"
    for request in requests:
        expected = expected_output(request.prompt, request.max_tokens)
        assert request.output == (expected[: len(request.output)] if request.id in cut_short else expected)
    pool = scheduler.pool
    assert (pool.free + pool.cached, pool.moving, pool.coming) == (pool.num_blocks, 0, 0)
    assert pool.host_room == pool.host_blocks


@pytest.mark.parametrize("step", [0.001, 0.01, 0.1, 0.5])
def test_any_load_under_any_policy(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "STEP", step)
    for seed in range(RUNS // 4):
        try:
            run(random.Random(f"{step} {seed}"))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error

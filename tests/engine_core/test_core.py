"""The core with its threads and sockets, and a runner that computes nothing. Tokenizer and detokenizer are played."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from engine_core import core
from engine_core.capacity import Capacity
from engine_core.core import EngineCore, EngineStuck
from engine_core.load import Engine
from engine_core.plan import Copy, Landed, StepPlan, StepResult
from engine_core.request import Request
from engine_core.waker import Waker
from protocol import limits
from protocol.channels import Link, new_identity
from protocol.codec import Decoder
from protocol.errors import ErrorCode
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Finish,
    Hello,
    Limits,
    ModelInfo,
    Rejected,
    Role,
    SamplingParams,
    Started,
    StepOutput,
    Submit,
    TextParams,
    pack_i32,
    pack_i64,
    unpack_i32,
    unpack_i64,
)
from protocol.runtime_dir import core_endpoint, output_endpoint, status_endpoint
from protocol.status import CoreStatus

VOCAB = 100
CAPACITY = Capacity(num_blocks=32, block_size=4, max_context=64, max_running=8, prefill_chunk_tokens=64)


class ScriptedRunner:
    """Each row's next token is its last one plus one. `gate` lets a test hold a step, `error` makes steps raise, and
    `pace` is the seconds that a step takes."""

    pace = 0.0

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.is_finite = True

    def launch(self, plan: StepPlan) -> "ScriptedRunner":
        self.plan = plan
        return self

    def tokens(self) -> StepResult:
        assert self.gate.wait(20)
        time.sleep(self.pace)
        if self.error:
            raise self.error
        rows = [*self.plan.decodes, *self.plan.prefills]
        return StepResult([(row.tokens[-1] + 1) % VOCAB if self.is_finite else -1 for row in rows if row.samples])


class Rig:
    def __init__(self, directory: Path) -> None:
        self.runner = ScriptedRunner()
        self.core = EngineCore(directory)
        model = ModelInfo("m", "p", VOCAB, 64, 0, [99])
        engine = Engine(self.runner, None, 0, Waker(), CAPACITY, VOCAB, [99], {}, "", "")
        self.core.open(engine, model, Limits(4, 100))
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.tokenizer = self._connect(Role.TOKENIZER, core_endpoint(directory), Accepted | Rejected)
        self.frontend = self._connect(Role.FRONTEND, core_endpoint(directory), Rejected)
        self.detokenizer = self._connect(Role.DETOKENIZER, output_endpoint(directory), Started | StepOutput | Abort)
        self.status_socket = self.context.socket(zmq.SUB)
        self.status_socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.status_socket.connect(status_endpoint(directory))

    def _run(self) -> None:
        try:
            self.core.run()
        except BaseException as error:
            self.error = error

    def _connect(self, role: Role, endpoint: str, accepted: object) -> Link:
        link = Link(self.context, endpoint, Hello(PROTOCOL_VERSION, role, new_identity(role), os.getpid()), accepted)
        link.wait_welcome(5)
        return link

    def submit(self, request_id: int, prompt: list[int], max_tokens: int | None = 3, **changes: object) -> None:
        sampling = changes.pop("sampling", SamplingParams(max_tokens=max_tokens))
        fields = {"frontend": identity(self.frontend), "detokenizer": identity(self.detokenizer), "text": TextParams()}
        self.tokenizer.send(Submit(request_id, pack_i32(prompt), sampling, **(fields | changes)))

    def status(self, condition: Callable[[CoreStatus], bool]) -> CoreStatus:
        decoder = Decoder(CoreStatus, "test")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self.status_socket.poll(1000):
                status = decoder.decode(self.status_socket.recv())
                if condition(status):
                    return status
        raise AssertionError("the status never came")

    def close(self) -> None:
        self.runner.gate.set()
        self.core.stop()
        self.thread.join(10)
        if not self.core.context.closed:
            self.core.close()
        for link in (self.tokenizer, self.frontend, self.detokenizer):
            if not link.sockets[0].closed:
                link.close()
        self.context.destroy(linger=0)


def identity(link: Link) -> str:
    return link._socket.getsockopt(zmq.IDENTITY).decode()


def take(link: Link, count: int) -> list[object]:
    """The next `count` messages."""
    messages: list[object] = []
    deadline = time.monotonic() + 10
    while len(messages) < count:
        assert time.monotonic() < deadline, f"only {messages} came"
        link.sockets[0].poll(100)
        messages += link.receive()
    return messages


def rows(messages: list[object]) -> list[tuple[int, int, int]]:
    outputs = [m for m in messages if isinstance(m, StepOutput)]
    return [row for m in outputs for row in zip(unpack_i64(m.ids), unpack_i32(m.tokens), m.finish, strict=True)]


@pytest.fixture
def rig(short_path: Path) -> Iterator[Rig]:
    rig = Rig(short_path)
    yield rig
    rig.close()


def test_a_request_is_accepted_announced_and_answered(rig: Rig) -> None:
    rig.submit(1, [10, 11])
    assert take(rig.tokenizer, 1) == [Accepted(1, 2, identity(rig.frontend))]
    messages = take(rig.detokenizer, 4)
    assert messages[0] == Started(1, identity(rig.frontend), pack_i32([10, 11]), TextParams(), 0, -1)
    assert rows(messages) == [(1, 12, 0), (1, 13, 0), (1, 14, Finish.LENGTH)]
    status = rig.status(lambda s: s.counters["requests_finished_total"] == 1)
    assert status.gauges["kv_blocks_free"] + status.gauges["kv_blocks_cached"] == 32
    assert {peer.role for peer in status.peers} == {Role.TOKENIZER, Role.FRONTEND, Role.DETOKENIZER}


@pytest.mark.parametrize(
    ("prompt", "changes", "code", "param"),
    [
        ([], {}, ErrorCode.INVALID_VALUE, "prompt"),
        ([-1], {}, ErrorCode.INVALID_VALUE, "prompt"),
        ([VOCAB], {}, ErrorCode.INVALID_VALUE, "prompt"),
        ([1] * 64, {}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt"),
        ([1], {"sampling": SamplingParams(temperature=-1.0)}, ErrorCode.INVALID_VALUE, "temperature"),
        ([1], {"sampling": SamplingParams(logit_bias={99999999: 5.0})}, ErrorCode.INVALID_VALUE, "logit_bias"),
        ([1], {"text": TextParams(stop=[""])}, ErrorCode.INVALID_VALUE, "stop"),
        ([1], {"detokenizer": "nobody"}, ErrorCode.ENGINE_UNAVAILABLE, None),
        ([1], {"frontend": "nobody"}, ErrorCode.ENGINE_UNAVAILABLE, None),
        ([1], {"generated": pack_i32([1] * 3)}, ErrorCode.INVALID_VALUE, "generated"),
        ([1], {"generated": pack_i32([VOCAB])}, ErrorCode.INVALID_VALUE, "generated"),
    ],
)
def test_what_can_not_run_is_rejected_and_the_next_request_runs(
    rig: Rig, prompt: list[int], changes: dict[str, object], code: ErrorCode, param: str | None
) -> None:
    rig.submit(1, prompt, **changes)
    rig.submit(2, [1])
    rejected, accepted = take(rig.tokenizer, 2)
    assert (rejected.request_id, rejected.code, rejected.param) == (1, code, param)
    assert rejected.message
    assert accepted.request_id == 2
    assert len(rows(take(rig.detokenizer, 4))) == 3


def test_prompt_logprobs_that_no_message_holds_are_rejected(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 12)
    for request_id, prompt in ((1, [1] * 4), (2, [1] * 3)):
        rig.submit(request_id, prompt, sampling=SamplingParams(max_tokens=1, prompt_logprobs=2))
    rejected, accepted = take(rig.tokenizer, 2)
    assert (rejected.request_id, rejected.param) == (1, "prompt_logprobs")
    assert accepted.request_id == 2


def test_ill_formed_ids_do_not_stop_the_intake(rig: Rig) -> None:
    rig.tokenizer.send(Submit(1, b"abc", SamplingParams(), TextParams(), "f", "d"))
    rig.tokenizer.send(Abort(b"abc"))
    rig.submit(2, [1])
    answers = take(rig.tokenizer, 2)
    assert [(type(a), a.request_id) for a in answers] == [(Rejected, 1), (Accepted, 2)]


def test_ids_that_no_column_holds_are_rejected(rig: Rig) -> None:
    rig.submit(1 << 63, [1])
    rig.submit(2, [1])
    answers = take(rig.tokenizer, 2)
    assert [(type(a), a.request_id) for a in answers] == [(Rejected, 1 << 63), (Accepted, 2)]
    assert len(rows(take(rig.detokenizer, 4))) == 3


def test_tokens_that_wait_are_bounded_while_a_step_hangs(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.submit(1, [1])
    take(rig.tokenizer, 1)
    rig.status(lambda s: s.running == 1)
    for request_id in (2, 3, 4):
        rig.submit(request_id, [1] * 45)
    answers = take(rig.tokenizer, 3)
    assert [type(a) for a in answers] == [Accepted, Accepted, Rejected], "100 tokens may wait"
    rig.runner.gate.set()
    rig.status(lambda s: s.counters["requests_finished_total"] == 3)
    rig.submit(5, [1] * 45)
    assert isinstance(take(rig.tokenizer, 1)[0], Accepted)


def test_intake_answers_while_a_step_hangs_and_its_queue_is_bounded(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.submit(1, [1])
    take(rig.tokenizer, 1)
    rig.status(lambda s: s.running == 1)
    for request_id in range(2, 8):
        rig.submit(request_id, [1])
    answers = take(rig.tokenizer, 6)
    assert [type(a) for a in answers] == [Accepted] * 4 + [Rejected] * 2
    assert {a.code for a in answers[4:]} == {ErrorCode.QUEUE_FULL}
    assert rig.status(lambda s: s.step_age > 0.3).running == 1
    rig.runner.gate.set()
    rig.status(lambda s: s.counters["requests_finished_total"] == 5)


def test_copies_that_land_make_no_step_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap they land while a step runs: its time must not count from there, or rates would be too good."""
    now = [1.0]
    monkeypatch.setattr(core, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ended = [Landed([Copy(0, 0, 1, True)], True, 0.1)]
    transfer = SimpleNamespace(host_blocks=0, landed=lambda: ended, close=lambda: None)
    engine_core = EngineCore(tmp_path)
    try:
        engine = Engine(ScriptedRunner(), transfer, 0, Waker(), CAPACITY, VOCAB, [99], {}, "", "", overlap=True)
        engine_core.open(engine, ModelInfo("m", "p", VOCAB, 64, 0, [99]), Limits(4, 100))
        engine_core.scheduler.add(Request(1, [5], SamplingParams(), 3, 1.0))
        engine_core._in_flight = engine_core._launch(engine_core.scheduler.schedule(1.0))
        now[0] = 2.0
        engine_core._land_copies()
        now[0] = 2.5
        engine_core._collect()
        assert engine_core.step_seconds == engine_core.scheduler.rates.longest_step == 1.5
    finally:
        engine_core.close()


def test_the_longest_step_is_told_and_slowly_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.runner.pace = 0.2
    rig.submit(1, [1], max_tokens=1)
    longest = rig.status(lambda s: s.counters["requests_finished_total"] == 1).gauges["longest_step_seconds"]
    assert 0.2 <= longest < 5
    rig.runner.pace = 0.0
    rig.submit(2, [1])
    rig.status(lambda s: s.counters["requests_finished_total"] == 2)
    assert rig.core.longest_step >= 0.19, "a few short steps change little"
    monkeypatch.setattr(core, "STEP_MEMORY", 1e-6)
    rig.submit(3, [1])
    rig.status(lambda s: s.counters["requests_finished_total"] == 3)
    assert rig.core.longest_step < 0.1


def test_aborts_in_every_order(rig: Rig) -> None:
    rig.submit(1, [1], max_tokens=50)
    rig.tokenizer.send(Abort(pack_i64([1, 1, 999])))
    rig.submit(2, [1], max_tokens=40)
    take(rig.detokenizer, 3)
    rig.detokenizer.send(Abort(pack_i64([2])))
    status = rig.status(lambda s: s.counters["requests_aborted_total"] + s.counters["requests_finished_total"] == 2)
    assert status.gauges["kv_blocks_free"] + status.gauges["kv_blocks_cached"] == 32
    assert status.running == status.waiting == 0


def test_what_a_stop_string_ended_has_finished(rig: Rig) -> None:
    rig.runner.pace = 0.05
    for request_id in (1, 2):
        rig.submit(request_id, [1], max_tokens=60)
    take(rig.detokenizer, 4)
    rig.detokenizer.send(Abort(pack_i64([1]), is_finish=True))
    rig.detokenizer.send(Abort(pack_i64([2])))
    counters = rig.status(lambda s: s.running == s.waiting == 0).counters
    assert (counters["requests_finished_total"], counters["requests_aborted_total"]) == (1, 1)


@pytest.mark.parametrize("victim", ["frontend", "detokenizer"])
def test_a_lost_peer_takes_its_requests_along(rig: Rig, victim: str) -> None:
    rig.runner.gate.clear()
    rig.runner.pace = 0.05
    rig.submit(1, [1], max_tokens=60)
    rig.status(lambda s: s.running == 1)
    getattr(rig, victim).close()
    if victim == "frontend":  # the intake thread notices by itself; the step loop, when its step has ended
        rig.status(lambda s: Role.FRONTEND not in {peer.role for peer in s.peers})
    rig.runner.gate.set()
    status = rig.status(lambda s: s.running == 0)
    assert status.counters["requests_aborted_total"] == 1
    assert Role[victim.upper()] not in {peer.role for peer in rig.status(lambda s: True).peers}


def test_a_step_that_raises_ends_its_requests_with_an_error_and_the_engine_goes_on(rig: Rig) -> None:
    rig.runner.error = RuntimeError("no luck")
    rig.submit(1, [1])
    messages = take(rig.detokenizer, 2)
    (extra,) = messages[1].extras
    assert (extra.error_code, messages[1].finish) == (ErrorCode.INTERNAL_ERROR, bytes([Finish.ERROR]))
    rig.runner.error = None
    rig.submit(2, [1])
    assert len(rows(take(rig.detokenizer, 4))) == 3


def test_logits_that_are_not_finite_fail_their_request(rig: Rig) -> None:
    rig.runner.is_finite = False
    rig.submit(1, [1])
    messages = take(rig.detokenizer, 2)
    assert messages[1].extras[0].error_code is ErrorCode.NON_FINITE_LOGITS
    counters = rig.status(lambda s: s.counters["requests_failed_total"] == 1).counters
    assert counters["requests_finished_total"] == counters["generated_tokens_total"] == 0


def test_steps_that_go_on_raising_end_the_core(rig: Rig) -> None:
    rig.runner.error = RuntimeError("no luck")
    for request_id in range(3):
        rig.submit(request_id, [1])
        take(rig.detokenizer, 2)
    rig.thread.join(10)
    assert isinstance(rig.error, EngineStuck)
    assert "no luck" in str(rig.error)


def test_work_that_does_not_progress_ends_the_core(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "WATCHDOG_SECONDS", 0.2)
    monkeypatch.setattr(rig.core.scheduler, "schedule", lambda now: None)
    rig.submit(1, [1])
    rig.thread.join(10)
    assert isinstance(rig.error, EngineStuck)
    assert "1 requests wait, 0 run, 0 are swapped out, 0 blocks are being copied" in str(rig.error)


def test_copies_alone_are_no_progress(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that do nothing but go out and come in: a livelock must not hide behind copies that land."""
    monkeypatch.setattr(core, "COPYING_SECONDS", 0.2)
    monkeypatch.setattr(rig.core.scheduler, "schedule", lambda now: None)
    landed = [Landed([Copy(0, 0, 1, True)], True, 0.1)]
    rig.core.transfer = SimpleNamespace(host_blocks=0, poll_interval=0.001, landed=lambda: landed, close=lambda: None)
    rig.submit(1, [1])
    rig.thread.join(10)
    assert isinstance(rig.error, EngineStuck)


def test_closing_ends_running_requests_with_an_error(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.submit(1, [1], max_tokens=60)
    rig.status(lambda s: s.running == 1)
    rig.core.stop()
    rig.runner.gate.set()
    rig.thread.join(10)
    rig.core.close()
    seen = take(rig.detokenizer, 3)
    assert seen[-1].extras[0].error_code is ErrorCode.SHUTTING_DOWN

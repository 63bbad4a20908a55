"""The engine core: the step loop and what it is made of."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from engine_core.heartbeat import Heartbeat
from engine_core.intake import FrontendGone, Intake, aborted_ids
from engine_core.load import Engine, load
from engine_core.output import OutputChannel
from engine_core.plan import StepPlan, has_penalties
from engine_core.recorder import Recorder, RecordingScheduler
from engine_core.request import Request
from engine_core.runner import StepHandle, Transfer
from engine_core.scheduler import Scheduler
from engine_core.stats import core_status
from engine_core.swap import SwapPolicy
from protocol.channels import PING_INTERVAL, new_identity
from protocol.config import EngineConfig
from protocol.errors import ErrorCode
from protocol.messages import PROTOCOL_VERSION, Abort, Finish, ModelInfo, Role, Welcome
from protocol.messages import Limits as WireLimits
from protocol.runtime_dir import core_endpoint, output_endpoint, status_endpoint
from protocol.status import CoreStatus

MAX_FAILED_STEPS = 3  # in a row; then the fault isn't a request's but ours
WATCHDOG_SECONDS = 10.0  # with work waiting and nothing planned
COPYING_SECONDS = 60.0  # the same, though copies land: nobody gets on by being moved
STEP_MEMORY = 300.0  # seconds of steps after which the longest one's time counts half

_log = logging.getLogger("pagetide.core")


class EngineStuck(RuntimeError):
    """Work is waiting and nothing progresses: a bug that must not be hidden."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight."""

    plan: StepPlan
    handle: StepHandle
    started: float  # seconds, monotonic

    @property
    def may_plan_ahead(self) -> bool:
        """Whether the next step can be planned without the tokens that this one samples: penalties need them."""
        return not any(has_penalties(row.sampling) for row in (*self.plan.decodes, *self.plan.prefills))


class EngineCore:
    """One per GPU. `bind` before the model is loaded, `open` after it, then `run` until `stop`."""

    def __init__(self, directory: Path) -> None:
        """Bind all sockets in the runtime directory, so that others can connect while the model loads."""
        self.identity = new_identity(Role.CORE)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake = self.context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        wake = self.context.socket(zmq.PAIR)
        wake.setsockopt(zmq.SNDHWM, 1)
        wake.connect("inproc://wake")
        self.intake = Intake(self.context, core_endpoint(directory), wake)
        self.output = OutputChannel(self.context, output_endpoint(directory))
        self.intake.detokenizers = self.output.server.peers
        self.heartbeat = Heartbeat(self.context, status_endpoint(directory), self.status)
        self.stopping = False
        self.last_progress = self._step_ended = self.started = time.monotonic()
        self._next_ping = 0.0
        self._failed_steps = 0
        self._taken = self._taken_tokens = 0  # from the intake, since the start
        self.transfer: Transfer | None = None
        self._in_flight: LaunchedStep | None = None
        self._requests: dict[int, Request] = {}  # the scheduler's, once there is one
        self.finished = self.aborted = self.failed = self.generated_tokens = self.prompt_tokens = 0
        self.step_seconds = self.longest_step = 0.0

    def open(
        self,
        engine: Engine,
        model: ModelInfo,
        limits: WireLimits,
        policy: SwapPolicy | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Take everybody in: the model is there."""
        self.engine = engine
        self.runner, self.transfer = engine.runner, engine.transfer
        arguments = engine.capacity, model.eos_token_ids, policy
        self.scheduler = RecordingScheduler(recorder, *arguments) if recorder else Scheduler(*arguments)
        self._requests = self.scheduler.requests
        self.model, self.limits = model, limits
        welcome = Welcome(PROTOCOL_VERSION, self.identity, model, limits)
        self.intake.open_doors(welcome, engine.capacity)
        self.output.open_doors(welcome)
        self.intake.start()
        self.heartbeat.start()

    # -- the step loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """The step loop. If it overlaps, a step is planned and launched before the one before it is collected."""
        while not self.stopping:
            if not self.scheduler.has_work and self._in_flight is None:
                self._sleep()
            self._take_in()
            self._land_copies()
            if self._in_flight is not None and not self._in_flight.may_plan_ahead:
                self._collect()
            plan = self.scheduler.schedule(time.monotonic())
            self.intake.left = self._taken - len(self.scheduler.waiting)
            self.intake.left_tokens = self._taken_tokens - self.scheduler.waiting_tokens
            launched = None if plan is None else self._launch(plan)
            is_idle = plan is None and self._in_flight is None
            self._collect()
            self._tell_of_pauses()  # after the tokens of the step before, before those of the next
            self._in_flight = launched
            if not self.engine.overlap:
                self._collect()
            if is_idle:
                self._check_progress()
        self._collect()

    def _land_copies(self) -> None:
        """Tell the scheduler which copies have ended, and how large the host pool is by now."""
        if self.transfer is None:
            return
        self.engine.waker.clear()
        for landed in self.transfer.landed():
            self.last_progress = time.monotonic()
            self.scheduler.land(landed, self.last_progress)
        if self.transfer.host_blocks > self.scheduler.pool.host_blocks:
            self.scheduler.grow_host(self.transfer.host_blocks)

    def _tell_of_pauses(self) -> None:
        if self.scheduler.pauses:
            self.output.notify(self.scheduler.pauses)
            self.scheduler.pauses.clear()

    def _launch(self, plan: StepPlan) -> "LaunchedStep | None":
        """Start a plan's copies, and its step if it has one."""
        if self.transfer is not None and plan.copies:
            self.transfer.start(plan.copies)
        if not plan.num_tokens:
            return None
        started = time.monotonic()
        try:
            return LaunchedStep(plan, self.runner.launch(plan), started)
        except Exception as error:
            self._fail_step(plan, error)
            return None

    def _collect(self) -> None:
        """Wait for the step in flight, if there is one, and give out what it gave."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        try:
            result = step.handle.tokens()
        except Exception as error:
            self._fail_step(step.plan, error)
            return
        started = max(step.started, self._step_ended)  # it was launched while the one before it ran
        self._step_ended = self.last_progress = time.monotonic()
        seconds = self.last_progress - started
        outcomes = self.scheduler.commit(step.plan, result, self.last_progress, seconds)
        self.output.publish(step.plan.step, outcomes, result)
        self._failed_steps = 0
        self.step_seconds += seconds
        self.longest_step = max(seconds, self.longest_step * 0.5 ** (seconds / STEP_MEMORY))
        failed = sum(outcome.finish is Finish.ERROR for outcome in outcomes)
        self.failed += failed
        self.generated_tokens += len(outcomes) - failed
        self.prompt_tokens += sum(len(row.tokens) for row in step.plan.prefills)
        self.finished += sum(bool(outcome.finish) for outcome in outcomes) - failed

    def _take_in(self) -> None:
        """Let in what has come since the last step: requests, aborts, news of the dead."""
        events = self.intake.events
        while events:
            event = events.popleft()
            if isinstance(event, Request):
                self._add(event)
            elif isinstance(event, Abort):
                self._abort(aborted_ids(event))
            else:
                self._abort_all_of(event)
        if time.monotonic() >= self._next_ping:
            self.output.server.ping()
            self._next_ping = time.monotonic() + PING_INTERVAL
        aborts, gone = self.output.receive()
        for abort in aborts:
            self._abort(aborted_ids(abort), abort.is_finish)
        for identity in gone:
            self._abort([r.id for r in self.scheduler.requests.values() if r.detokenizer == identity])

    def _add(self, request: Request) -> None:
        self._taken += 1
        self._taken_tokens += request.known
        if request.id in self.scheduler.requests:
            _log.warning("request id %d came twice", request.id)
        elif request.detokenizer in self.output.server.peers:  # else the frontend has noticed, too
            self.scheduler.add(request)

    def _abort(self, ids: list[int], is_finish: bool = False) -> None:
        for request_id in ids:
            request = self.scheduler.abort(request_id)
            if request is not None:
                self.finished += is_finish
                self.aborted += not is_finish
                self.output.forget(request)

    def _abort_all_of(self, event: FrontendGone) -> None:
        self._abort([r.id for r in self.scheduler.requests.values() if r.frontend == event.identity])

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """A step that raised: its requests end with an error, the others go on; three in a row end the process."""
        _log.exception("step %d failed", plan.step)
        self._failed_steps += 1
        ids = [row.request_id for row in (*plan.decodes, *plan.prefills)]
        requests = [request for request in map(self.scheduler.discard, ids) if request is not None]
        self.failed += len(requests)
        self.output.fail(plan.step, requests, ErrorCode.INTERNAL_ERROR, f"the step failed: {error}")
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineStuck(f"{MAX_FAILED_STEPS} steps failed in a row, the last one with: {error}") from error

    def _check_progress(self) -> None:
        now, scheduler = time.monotonic(), self.scheduler
        if not scheduler.has_work:
            self.last_progress = self._step_ended = now
            return
        if now - self.last_progress > WATCHDOG_SECONDS or now - self._step_ended > COPYING_SECONDS:
            raise EngineStuck(
                f"{len(scheduler.waiting)} requests wait, {len(scheduler.running)} run, {len(scheduler.paused)} are "
                f"swapped out, {scheduler.pool.moving} blocks are being copied, and no step has ended for "
                f"{now - self._step_ended:.0f} s"
            )
        self._sleep()

    def _sleep(self) -> None:
        """Wait, without the GIL, for a message, a copy's end or the next ping."""
        sources = (self._wake, self.output.server.socket, self.engine.waker.fileno())
        polls = self.transfer is not None and self.transfer.poll_interval > 0
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], 1 if polls else int(PING_INTERVAL * 1000))
        try:
            while True:
                self._wake.recv(zmq.NOBLOCK)
        except zmq.Again:
            pass

    # -- from other threads ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the loop to end. Safe from a signal handler."""
        self.stopping = True

    def status(self) -> CoreStatus:
        """The heartbeat. Reads counters only; numbers of one message may be a step apart."""
        return core_status(self)

    def close(self) -> None:
        """Stop the threads, end what still runs with an error, and close all sockets."""
        self.output.fail(0, self._requests.values(), ErrorCode.SHUTTING_DOWN, "the engine is shutting down")
        for thread in (self.intake, self.heartbeat):
            thread.stopping.set()
            if thread.is_alive():
                thread.join(1.0)
        if self.transfer is not None:
            self.transfer.close()
        self.output.server.close()
        self.context.destroy(linger=200)


@contextmanager
def open_core(config: EngineConfig, directory: Path, progress: Callable[[int, int], None]) -> Iterator[EngineCore]:
    """A core with its model loaded, to be `run`; without what belongs to a process. Raises StartupError."""
    started = time.monotonic()
    core = EngineCore(directory)
    recorder: Recorder | None = None
    try:
        if config.record:
            recorder = Recorder(Path(config.record))
        engine = load(config, progress)
        model = ModelInfo(
            name=config.name_for_clients(Path(config.model).stem),
            path=config.model,
            vocab_size=engine.vocab_size,
            max_context=engine.capacity.max_context,
            created=int(time.time()),
            eos_token_ids=list(engine.eos_token_ids),
            kv_cache_dtype=engine.kv_cache_dtype,
            is_dummy=config.load_format == "dummy",
        )
        limits = WireLimits(config.max_waiting_requests, config.max_waiting_tokens)
        policy = SwapPolicy(config.preemption, config.max_pause, swap_every=config.swap_every)
        core.open(engine, model, limits, policy, recorder)
        _log.info("ready after %.1f s in %s: %s", time.monotonic() - started, directory, engine.summary)
        yield core
    finally:
        core.close()
        if recorder is not None:
            recorder.close()

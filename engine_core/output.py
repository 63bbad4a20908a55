"""Sends what steps gave to the detokenizers, one StepOutput per step and detokenizer."""

import time
from collections.abc import Iterable

import zmq

from engine_core.plan import StepResult
from engine_core.request import Request, State
from engine_core.scheduler import Outcome
from protocol.channels import Peer, Server
from protocol.errors import ErrorCode
from protocol.messages import (
    Abort,
    Finish,
    Pause,
    Paused,
    Role,
    RowExtra,
    Started,
    StepOutput,
    Timing,
    TopLogprobs,
    Welcome,
    pack_i32,
    pack_i64,
)

PROMPT_TAIL = 8  # prompt tokens that a detokenizer needs to join the first generated one to


class OutputChannel:
    """Owns the socket that detokenizers connect to. Belongs to the step loop's thread."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.server = Server(context, endpoint, Abort, (Role.DETOKENIZER,), self._peer_gone)
        self._gone: list[str] = []

    def open_doors(self, welcome: Welcome) -> None:
        """Take detokenizers in."""
        self.server.open_doors(welcome)

    def receive(self) -> tuple[list[Abort], list[str]]:
        """What has come since the last call, and identities of detokenizers that are gone."""
        aborts = [message for _, message in self.server.receive()]
        gone, self._gone = self._gone, []
        return aborts, gone

    def publish(self, step: int, outcomes: Iterable[Outcome], result: StepResult) -> None:
        """Send a step's outcomes, each detokenizer its own."""
        by_detokenizer: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            by_detokenizer.setdefault(outcome.request.detokenizer, []).append(outcome)
        for identity, mine in by_detokenizer.items():
            peer = self.server.peers.get(identity)
            if peer is not None:
                self._announce(peer, [outcome.request for outcome in mine])
                for part in _parts(mine):
                    self.server.send(peer, encode_step(step, part, result))

    def fail(self, step: int, requests: Iterable[Request], code: ErrorCode, message: str) -> None:
        """End requests with an error."""
        for request in requests:
            peer = self.server.peers.get(request.detokenizer)
            if peer is not None:
                self._announce(peer, [request])
                extra = RowExtra(0, error_code=code, error=message, timing=timing_of(request))
                ids, tokens, finish = pack_i64([request.id]), pack_i32([-1]), bytes([Finish.ERROR])
                self.server.send(peer, StepOutput(step, ids, tokens, finish, [extra]))

    def forget(self, request: Request) -> None:
        """Tell the detokenizer of a started request that it was aborted."""
        peer = self.server.peers.get(request.detokenizer)
        if peer is not None and request.announced:
            self.server.send(peer, Abort(pack_i64([request.id])))

    def notify(self, pauses: Iterable[tuple[Request, bool]]) -> None:
        """Tell of requests that were paused (True) or run again, in order; only those hear of it that asked."""
        told: dict[str, list[tuple[int, Pause]]] = {}
        for request, is_paused in pauses:
            peer = self.server.peers.get(request.detokenizer)
            if request.text.notices and peer is not None and request.state is not State.FINISHED:
                self._announce(peer, [request])
                kind = Pause.RECOMPUTED if request.state is State.WAITING else Pause.SWAPPED
                told.setdefault(peer.identity, []).append((request.id, kind if is_paused else Pause.RESUMED))
        for identity, entries in told.items():
            ids, kinds = zip(*entries, strict=True)
            self.server.send(self.server.peers[identity], Paused(pack_i64(ids), bytes(kinds)))

    def _announce(self, peer: Peer, requests: Iterable[Request]) -> None:
        for request in requests:
            if not request.announced:
                request.announced = True
                top = request.sampling.prompt_logprobs
                prompt = request.prompt if request.text.echo or top >= 0 else request.prompt[-PROMPT_TAIL:]
                cached = max(0, request.cached_tokens)
                self.server.send(
                    peer, Started(request.id, request.frontend, pack_i32(prompt), request.text, cached, top)
                )

    def _peer_gone(self, peer: Peer) -> None:
        self._gone.append(peer.identity)


def _parts(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """Split what goes into messages of their own: the log-probabilities of one prompt may fill a frame."""
    large = [outcome for outcome in outcomes if outcome.request.prompt_logprobs and len(outcome.request.output) == 1]
    if not large:
        return [outcomes]
    rest = [outcome for outcome in outcomes if outcome not in large]
    return [*([outcome] for outcome in large), *([rest] if rest else [])]


def encode_step(step: int, outcomes: list[Outcome], result: StepResult) -> StepOutput:
    """Columns of one detokenizer's share of a step."""
    extras = []
    # Log-probabilities of a prompt may all come from earlier chunks, so the result doesn't tell who has some.
    if result.logprobs or any(
        o.finish or o.request.sampling.prompt_logprobs >= 0 or o.request.text.timing for o in outcomes
    ):
        for row, outcome in enumerate(outcomes):
            extra = _extra(row, outcome, result)
            if extra is not None:
                extras.append(extra)
    return StepOutput(
        step,
        pack_i64([outcome.request.id for outcome in outcomes]),
        pack_i32([outcome.token for outcome in outcomes]),
        bytes([outcome.finish for outcome in outcomes]),
        extras,
    )


def _extra(row: int, outcome: Outcome, result: StepResult) -> RowExtra | None:
    request = outcome.request
    # A stop string ends an answer before the core hears of it.
    timing = timing_of(request) if outcome.finish or (request.text.timing and request.text.stop) else None
    if outcome.finish is Finish.ERROR:
        return RowExtra(
            row,
            error_code=ErrorCode.NON_FINITE_LOGITS,
            error="the model's logits for this request are not finite",
            timing=timing,
        )
    logprobs = result.logprobs.get(request.id)
    prompt_logprobs: list[TopLogprobs | None] | None = None
    if request.sampling.prompt_logprobs >= 0 and len(request.output) == 1:
        prompt_logprobs = [None, *request.prompt_logprobs]
    if logprobs is None and prompt_logprobs is None and timing is None:
        return None
    return RowExtra(row, logprobs, prompt_logprobs, timing=timing)


def timing_of(request: Request) -> Timing:
    """Where its time went, up to its end; of one that still runs, up to now."""
    spent, ended = list(request.spent), request.ended
    if request.state is not State.FINISHED:
        ended = max(time.monotonic(), request.since)
        spent[request.state] += ended - request.since
    queued, prefill, decode, swapping_out, swapped, swapping_in = spent
    phases = queued, prefill, decode, swapping_out, swapped, swapping_in
    return Timing(request.arrival, ended, *phases, request.swaps, request.recomputes)

"""The detokenizer process's logic: the columns of a step become each frontend's new text."""

import logging
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from frontend.incremental import TextStream, text_offsets
from frontend.text_model import TextModel
from protocol.errors import ErrorCode
from protocol.messages import (
    Abort,
    Finish,
    Pause,
    Paused,
    RowExtra,
    Started,
    StepOutput,
    TextDelta,
    TextParams,
    TokenLogprobs,
    TokenText,
    TopLogprobs,
    unpack_i32,
    unpack_i64,
)

_log = logging.getLogger("pagetide.detokenizer")
_FINISHES = list(Finish)


class Outgoing(NamedTuple):
    """What a message from the core makes the detokenizer send."""

    deltas: dict[str, list[TextDelta]]  # by frontend identity
    aborts: list[int]  # requests that the core should drop, as they failed here
    finished: list[int]  # the same, as a stop string ended them


class _Answer:
    """A running request."""

    __slots__ = ("cached_tokens", "frontend", "params", "prompt", "text", "tokens")

    def __init__(self, model: TextModel, started: Started) -> None:
        prompt = unpack_i32(started.prompt)
        self.frontend = started.frontend
        self.params = started.text
        self.text = TextStream(model, started.text, prompt)
        self.tokens = 0  # generated, but not yet in a delta
        self.cached_tokens = started.cached_tokens
        self.prompt: array[int] | None = prompt  # until the first delta


class DetokenizerService:
    """Turns the core's messages into text, per request; knows nothing of sockets.

    A request is known from its Started to its finish, to a stop string, or until its frontend is gone. What arrives
    for others is late, and only counted.
    """

    def __init__(self, model: TextModel, eos_token_ids: Iterable[int]) -> None:
        """`eos_token_ids`: what ends an answer without being named as its stop_reason."""
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._answers: dict[int, _Answer] = {}
        self.unknown_rows = 0

    def __len__(self) -> int:
        """Number of running requests."""
        return len(self._answers)

    def handle(self, message: Started | StepOutput | Abort | Paused) -> Outgoing:
        """Return what to send. A request that can't be decoded ends with an error; the others are untouched."""
        outgoing = Outgoing({}, [], [])
        if isinstance(message, Started):
            try:
                self._answers[message.request_id] = _Answer(self._model, message)
            except Exception:  # a fault of ours: still this request's alone
                self._fail(message.request_id, message.frontend, 0, outgoing)
        elif isinstance(message, Abort):
            for request_id in unpack_i64(message.request_ids):
                self._answers.pop(request_id, None)
        elif isinstance(message, Paused):
            for request_id, kind in zip(unpack_i64(message.request_ids), message.kinds, strict=True):
                if answer := self._answers.get(request_id):
                    delta = TextDelta(request_id, "", 0, pause=Pause(kind))
                    outgoing.deltas.setdefault(answer.frontend, []).append(delta)
        else:
            self._step(message, outgoing)
        return outgoing

    def frontend_gone(self, identity: str) -> list[int]:
        """Forget a frontend's requests; return their ids, for the core to drop."""
        gone = [request_id for request_id, answer in self._answers.items() if answer.frontend == identity]
        for request_id in gone:
            del self._answers[request_id]
        return gone

    def _step(self, message: StepOutput, outgoing: Outgoing) -> None:
        extras = {extra.row: extra for extra in message.extras} if message.extras else {}
        answers, deltas = self._answers, outgoing.deltas
        rows = zip(unpack_i64(message.ids), unpack_i32(message.tokens), message.finish, strict=True)
        for row, (request_id, token, finish) in enumerate(rows):
            answer = answers.get(request_id)
            if answer is None:
                self.unknown_rows += 1
                continue
            try:
                delta = self._row(request_id, answer, token, finish, extras.get(row))
            except Exception:  # a fault of ours: still this request's alone
                del answers[request_id]
                self._fail(request_id, answer.frontend, answer.tokens, outgoing)
                continue
            if delta is None:
                continue
            deltas.setdefault(answer.frontend, []).append(delta)
            if delta.finish:
                del answers[request_id]
                if not finish:
                    outgoing.finished.append(request_id)

    def _row(self, request_id: int, answer: _Answer, token: int, code: int, extra: RowExtra | None) -> TextDelta | None:
        """Return the row's delta, or None while there is nothing to tell but a count, which the next one takes."""
        stream = answer.text
        text, offset = "", stream.length
        finish = _FINISHES[code]
        stop_reason: int | str | None = None
        if token >= 0:
            answer.tokens += 1
            if finish is not Finish.STOP:
                text = stream.push(token)
            elif token not in self._eos:
                stop_reason = token
        if finish:
            text += stream.close()
        if (stop_string := stream.stopped_by) is not None and finish is not Finish.ERROR:
            finish, stop_reason = Finish.STOP, stop_string
        prompt = answer.prompt
        if extra is None and prompt is None:
            if not text and not finish:
                return None
            tokens, answer.tokens = answer.tokens, 0
            return TextDelta(request_id, text, tokens, finish, stop_reason)
        return self._full_delta(request_id, answer, offset, text, finish, stop_reason, extra)

    def _full_delta(
        self,
        request_id: int,
        answer: _Answer,
        offset: int,
        text: str,
        finish: Finish,
        stop_reason: int | str | None,
        extra: RowExtra | None,
    ) -> TextDelta:
        """Return a first delta, or one with logprobs or an error; `offset` is where the row's token starts."""
        prompt, answer.prompt = answer.prompt, None
        tokens, answer.tokens = answer.tokens, 0
        extra = extra or RowExtra(row=0)
        return TextDelta(
            request_id=request_id,
            text=text if prompt is None else answer.text.echo + text,
            tokens=tokens,
            finish=finish,
            stop_reason=stop_reason,
            logprobs=[self._logprobs(extra.logprobs, offset)] if extra.logprobs else [],
            prompt_logprobs=self._prompt_logprobs(extra.prompt_logprobs or [], prompt or array("i"), answer.params),
            cached_tokens=0 if prompt is None else answer.cached_tokens,
            error_code=extra.error_code,
            error=extra.error,
            timing=extra.timing if finish else None,
        )

    def _prompt_logprobs(
        self, entries: list[TopLogprobs | None], prompt: "array[int]", params: TextParams
    ) -> list[TokenLogprobs]:
        """Convert; an entry of None (the first token's) is named by the prompt, where all of it is known."""
        known = prompt if len(prompt) == len(entries) else [-1] * len(entries)
        offsets = text_offsets(self._model, known, params) if params.echo else [0] * len(entries)
        return [
            self._logprobs(entry, offset) if entry else TokenLogprobs(self._token_text(token, float("nan"), offset), [])
            for entry, token, offset in zip(entries, known, offsets, strict=True)
        ]

    def _logprobs(self, entry: TopLogprobs, offset: int) -> TokenLogprobs:
        chosen = self._token_text(entry.token, entry.logprob, offset)
        top = zip(unpack_i32(entry.top_ids), entry.top_logprobs, strict=True)
        return TokenLogprobs(chosen, [self._token_text(*pair) for pair in top])

    def _token_text(self, token: int, logprob: float, offset: int = 0) -> TokenText:
        is_known = 0 <= token < self._model.vocab_size
        return TokenText(token, self._model.token_bytes[token] if is_known else b"", logprob, offset)

    def _fail(self, request_id: int, frontend: str, tokens: int, outgoing: Outgoing) -> None:
        _log.exception("request %d can't be decoded", request_id)
        outgoing.deltas.setdefault(frontend, []).append(
            TextDelta(
                request_id=request_id,
                text="",
                tokens=tokens,
                finish=Finish.ERROR,
                error_code=ErrorCode.INTERNAL_ERROR,
                error="the detokenizer failed",
            )
        )
        outgoing.aborts.append(request_id)

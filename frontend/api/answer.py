"""The JSON of answers, streamed and whole, in the two shapes that OpenAI's API has: chat and completions.

A stream's events differ in little but the text, so all else is encoded once per stream.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import msgspec

from frontend.timing import Times
from protocol.limits import LOGPROB_FLOOR
from protocol.messages import Finish, Pause, TextDelta, TokenLogprobs, TokenText

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}
PAUSES = {
    Pause.RESUMED: b": resumed\n\n",
    Pause.SWAPPED: b": paused (swapped out)\n\n",
    Pause.RECOMPUTED: b": paused (to be computed again)\n\n",
}
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


def finite(logprob: float) -> float:
    """Return the log-probability, or the floor for what is not a number that JSON has."""
    return logprob if LOGPROB_FLOOR < logprob < inf else LOGPROB_FLOOR


class Choice:
    """One of a request's answers: what it has counted and, if it isn't streamed, gathered so far."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens = 0
        self.cached_tokens = 0
        self.finish = Finish.NONE
        self.stop_reason: int | str | None = None
        self.times: Times | None = None  # when it has ended, unless the core didn't tell
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.is_begun = False

    def count(self, delta: TextDelta) -> None:
        """Take in what usage needs."""
        self.tokens += delta.tokens
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.finish:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason

    def gather(self, delta: TextDelta) -> None:
        """Take in what the whole answer needs."""
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs


def usage(prompt_tokens: int, choices: Sequence[Choice], n: int) -> Json:
    """Count a request's tokens; each prompt counts once, however many answers it has."""
    answers = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answers,
        "total_tokens": prompt_tokens + answers,
        # Later answers to a prompt find what the first one has computed, so that one tells what was there before.
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in choices[::n])},
    }


class Shape:
    """How one endpoint's answers look. `head` is what every object of a response begins with."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    text_key, text_end = b',"text":', b""
    end_key = b',"text":""'

    def __init__(
        self,
        name: str,
        created: int,
        model: str,
        top: int,
        is_echo: bool,
        prompt_top: int | None,
        has_timing: bool = False,
    ) -> None:
        """`top` is how many alternatives a token's logprobs list, -1 for no logprobs; `prompt_top` likewise, apart."""
        self._head = {"id": self.id_prefix + name, "created": created, "model": model}
        self._top = top
        self._is_echo = is_echo
        self._prompt_top = prompt_top
        self._has_timing = has_timing

    # -- streams -----------------------------------------------------------------------------------------------

    def begin_stream(self, choices: Iterable[Choice], include_usage: bool) -> None:
        """Encode what the events of the stream have in common."""
        self._start = b"data: " + encode(self._head | {"object": self.chunk_object})[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._texts = [self._start + b'{"index":%d' % choice.index + self.text_key for choice in choices]
        self._plain = self.text_end + b',"logprobs":null,"finish_reason":null}' + self._end

    def first_event(self, choice: Choice) -> bytes:
        """Encode what comes before a choice's first text."""
        return b""

    def events(self, choice: Choice, delta: TextDelta) -> bytes:
        """Encode the events of one delta, zero or more."""
        if delta.pause is not None:
            return PAUSES[delta.pause]
        body = b""
        if not choice.is_begun:
            choice.is_begun = True
            body = self.first_event(choice)
        if delta.logprobs or (delta.prompt_logprobs and self._is_echo):
            logprobs = encode(self._logprobs(delta.prompt_logprobs, delta.logprobs))
            middle = self.text_end + b',"logprobs":' + logprobs + b',"finish_reason":null}'
            body += self._texts[choice.index] + encode(delta.text) + middle + self._end
        elif delta.text:
            body += self._texts[choice.index] + encode(delta.text) + self._plain
        if delta.finish in FINISH_REASONS:
            reason: Json = {
                "logprobs": None,
                "finish_reason": FINISH_REASONS[delta.finish],
                "stop_reason": delta.stop_reason,
            }
            if self._has_timing:
                reason["timing"] = choice.times
            last = b'{"index":%d' % choice.index + self.end_key + b"," + encode(reason)[1:]
            body += self._start + last + self._end
        return body

    def usage_event(self, used: Json) -> bytes:
        """Encode the one event that has no choices."""
        return self._start + b'],"usage":' + encode(used) + b"}\n\n"

    # -- whole answers -----------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice], used: Json) -> bytes:
        """Encode a finished answer."""
        return encode(
            self._head
            | {"object": self.whole_object, "choices": [self._choice(choice) for choice in choices], "usage": used}
        )

    def _choice(self, choice: Choice) -> Json:
        has_logprobs = self._top >= 0
        answer = {
            "index": choice.index,
            **self._text("".join(choice.texts)),
            "logprobs": self._logprobs(choice.prompt_logprobs, choice.logprobs) if has_logprobs else None,
            "finish_reason": FINISH_REASONS[choice.finish],
            "stop_reason": choice.stop_reason,
        }
        if self._prompt_top is not None:
            answer["prompt_logprobs"] = _prompt_logprobs(choice.prompt_logprobs, self._prompt_top)
        if self._has_timing:
            answer["timing"] = choice.times
        return answer

    def _text(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, prompt: Sequence[TokenLogprobs], answer: Sequence[TokenLogprobs]) -> Json:
        prompt = prompt if self._is_echo else []
        entries = [*prompt, *answer]
        names = [_name(entry.chosen) for entry in entries]
        logprobs: list[float | None] = [finite(entry.chosen.logprob) for entry in entries]
        tops: list[dict[str, float] | None] = [
            {_name(token): finite(token.logprob) for token in [*entry.top[: self._top], entry.chosen]}
            for entry in entries
        ]
        if prompt:  # nothing comes before the first token
            logprobs[0] = tops[0] = None
        offsets = [entry.chosen.offset for entry in entries]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


class ChatShape(Shape):
    """How /v1/chat/completions answers."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_key, text_end = b',"delta":{"content":', b"}"
    end_key = b',"delta":{}'

    def first_event(self, choice: Choice) -> bytes:
        """Encode the event that says who speaks."""
        role = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._start + role % choice.index + self._end

    def _text(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, prompt: Sequence[TokenLogprobs], answer: Sequence[TokenLogprobs]) -> Json:
        entries = [
            _token(entry.chosen) | {"top_logprobs": [_token(token) for token in entry.top[: self._top]]}
            for entry in answer
        ]
        return {"content": entries}


def _token(token: TokenText) -> Json:
    text = token.bytes.decode("utf-8", "replace")
    return {"token": text, "logprob": finite(token.logprob), "bytes": list(token.bytes)}


def _name(token: TokenText) -> str:
    """Return the token's text; one that isn't whole characters is spelt out, as OpenAI's completions do."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _prompt_logprobs(entries: Sequence[TokenLogprobs], top: int) -> list[dict[int, Json] | None]:
    """Return vLLM's shape: for each token of the prompt, the alternatives by id; null for the first token."""
    return [
        {
            token.token: {"logprob": finite(token.logprob), "decoded_token": token.bytes.decode("utf-8", "replace")}
            for token in [entry.chosen, *entry.top[:top]]
        }
        if i
        else None
        for i, entry in enumerate(entries)
    ]

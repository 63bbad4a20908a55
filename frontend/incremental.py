"""Tokens to text, one at a time: incremental UTF-8, special tokens, stop strings.

Streamed and unstreamed answers use this one path, so they are equal by construction. No call depends on how long the
answer already is, and no token sequence raises: bytes that are not UTF-8 become U+FFFD.
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from frontend.text_model import TextModel
from protocol.messages import TextParams

_CONTEXT_BYTES = 4  # an incomplete character is three bytes at most
_NO_STOP = TextParams()


class StopScanner:
    """Finds the first stop string in a text that arrives in pieces.

    First is the one that is complete first; of several that end at the same character, the longest. So the answer
    doesn't depend on the pieces. What may become a stop string is held back, and nothing else: the longest tail that
    is a proper prefix of some stop string. Method: Knuth, Morris and Pratt, one state per stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: the text that comes out ends with the stop string rather than before it."""
        self._patterns = [(stop, _borders(stop)) for stop in stops if stop]
        self._states = [0] * len(self._patterns)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what is certain to be wanted of the text so far; nothing after a match."""
        if self.matched is not None or not text:
            return ""
        end = len(text)
        for i, (stop, borders) in enumerate(self._patterns):
            state = self._states[i]
            start = 0 if state else text.find(stop[0], 0, end)
            for position in range(start, end) if start >= 0 else ():
                character = text[position]
                while state and stop[state] != character:
                    state = borders[state - 1]
                state += stop[state] == character
                if state == len(stop):
                    if position + 1 < end or self.matched is None or len(stop) > len(self.matched):
                        self.matched = stop
                    end = position + 1
                    break
            self._states[i] = state
        text = self._held + text
        if self.matched is not None:
            end += len(self._held)
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        ready = len(text) - max(self._states, default=0)
        self._held = text[ready:]
        return text[:ready]

    def close(self) -> str:
        """Return what is still held back, as no stop string will come of it."""
        held, self._held = self._held, ""
        return held


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[length] != pattern[i]:
            length = borders[length - 1]
        length += pattern[length] == pattern[i]
        borders[i] = length
    return borders


class TextStream:
    """The text of one answer, token by token."""

    __slots__ = (
        "_bytes",
        "_pending",
        "_primed",
        "_skip_special",
        "_special",
        "_starts_text",
        "_stops",
        "echo",
        "length",
    )

    def __init__(self, model: TextModel, params: TextParams = _NO_STOP, prompt: Sequence[int] = ()) -> None:
        """`prompt`: all its tokens for an echo, else at least the last four.

        A character that the prompt has begun and the answer completes is part of the answer; no other text of the
        prompt is. `echo` is the prompt's text if the parameters ask for it.
        """
        self._bytes = model.token_bytes
        self._special = model.special_ids
        self._skip_special = params.skip_special_tokens
        self._stops = StopScanner(params.stop, params.include_stop_str) if params.stop else None
        self._pending = b""  # the bytes of a character that is not complete
        self._primed = False  # the pending bytes are all the prompt's
        self._starts_text = model.strips_leading_space
        self.length = 0  # characters of the tokens so far, with those that are held back
        self.echo = ""
        if params.echo:
            self.echo = "".join(map(self._decode, prompt))
            self.length = len(self.echo)
        elif prompt:
            self._starts_text &= prompt[-1] in self._special
            self._pending = self._incomplete_tail(prompt)
            self._primed = bool(self._pending)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched if self._stops else None

    def push(self, token: int) -> str:
        """Return the text that this token makes certain; an id without text gives none."""
        text = self._decode(token)
        self.length += len(text)
        return self._stops.push(text) if self._stops else text

    def close(self) -> str:
        """Return the rest, at the end of the answer: an incomplete character as U+FFFD, and held back text."""
        text = self._flush()
        return self._stops.push(text) + self._stops.close() if self._stops else text

    def _decode(self, token: int) -> str:
        if token in self._special:
            text = self._flush()
            return text if self._skip_special else text + self._bytes[token].decode("utf-8", "replace")
        data = self._bytes[token] if 0 <= token < len(self._bytes) else b""
        if self._starts_text and data:
            self._starts_text = False
            data = data.removeprefix(b" ")
        if self._pending and data:
            # Bytes that the prompt left and the answer doesn't continue are the prompt's own.
            data = data if self._primed and data[0] & 0xC0 != 0x80 else self._pending + data
            self._pending, self._primed = b"", False
        text, used = utf_8_decode(data, "replace", False)
        if used < len(data):
            self._pending = data[used:]
        return text

    def _flush(self) -> str:
        text = "" if self._primed else self._pending.decode("utf-8", "replace")
        self._pending, self._primed = b"", False
        return text

    def _incomplete_tail(self, prompt: Sequence[int]) -> bytes:
        tail = b""
        for token in reversed(prompt):
            if token in self._special or len(tail) >= _CONTEXT_BYTES:
                break
            tail = (self._bytes[token] if 0 <= token < len(self._bytes) else b"") + tail
        return tail[utf_8_decode(tail, "replace", False)[1] :]


def decode(model: TextModel, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
    """Return the text of a whole token sequence."""
    stream = TextStream(model, TextParams(skip_special_tokens=skip_special_tokens))
    return "".join(map(stream.push, ids)) + stream.close()


def text_offsets(model: TextModel, ids: Iterable[int], params: TextParams) -> list[int]:
    """Return where each token's text starts in the text of them all, in characters; see `TextStream.length`."""
    stream = TextStream(model, TextParams(skip_special_tokens=params.skip_special_tokens))
    offsets = []
    for token in ids:
        offsets.append(stream.length)
        stream.push(token)
    return offsets

"""`pagetide generate` and `pagetide chat`: frontends without HTTP, that print text as it comes."""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from frontend.engine_client import EngineClient
from frontend.timing import PHASES, Times
from protocol.errors import ErrorCode, PagetideError
from protocol.limits import check_sampling, check_text
from protocol.messages import ChatPrompt, Finish, Prompt, SamplingParams, TextParams

_ENDS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Answer(msgspec.Struct, omit_defaults=True):
    """A finished answer, as `pagetide generate --json` prints it. Times are in seconds."""

    model: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    ttft: float  # from submission to the first text
    duration: float
    timing: Times | None = None


async def answer(
    client: EngineClient, prompt: Prompt, sampling: SamplingParams, text: TextParams, show: Callable[[str], None]
) -> Answer:
    """Run one request and `show` each piece of its text. Raises PagetideError."""
    check_sampling(sampling, client.model.vocab_size)
    check_text(text)
    result = Answer(client.model.name, "", "", 0, 0, 0, sampling.seed, 0.0, 0.0)
    started = time.monotonic()
    async with client.generate(prompt, sampling, text) as generation:
        result.prompt_tokens = generation.prompt_tokens
        async for _, delta in generation:
            if delta.pause is not None:
                continue
            if delta.finish is Finish.ERROR:
                raise PagetideError(delta.error_code or ErrorCode.INTERNAL_ERROR, delta.error)
            result.ttft = result.ttft or time.monotonic() - started
            result.text += delta.text
            result.completion_tokens += delta.tokens
            result.cached_tokens = max(result.cached_tokens, delta.cached_tokens)
            result.finish_reason = _ENDS.get(delta.finish, "")
            show(delta.text)
        result.timing = generation.times.get(0) if text.timing else None
    result.duration = time.monotonic() - started
    return result


def show_on_stdout(piece: str) -> None:
    """Print a piece of text at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def times_table(times: Times) -> str:
    """Where a request's time went: a line for each phase that took any, with seconds and share."""
    spent = {phase: getattr(times, phase) for phase in PHASES}
    rows = [(phase, seconds) for phase, seconds in spent.items() if seconds >= 5e-5] + [("total", times.total)]
    lines = [f"{name.replace('_', ' '):<14}{seconds:>10.4f} s{seconds / times.total:>7.1%}" for name, seconds in rows]
    pauses = f"swapped out {times.swaps}x, computed again {times.recomputes}x"
    return "\n".join([*lines, f"longest gap   {times.longest_gap:>10.4f} s; {pauses}"])


async def generate(directory: Path, prompt: Prompt, sampling: SamplingParams, text: TextParams, as_json: bool) -> None:
    """One request against the engine in `directory`. Raises StartupError, PagetideError."""
    client = await EngineClient.connect(directory)
    try:
        show: Callable[[str], None] = (lambda piece: None) if as_json else show_on_stdout
        result = await answer(client, prompt, sampling, text, show)
        print(msgspec.json.encode(result).decode() if as_json else "")
        if result.timing is not None and not as_json:
            print(times_table(result.timing), file=sys.stderr)
    finally:
        await client.close()


class Chat:
    """A conversation on the terminal. Ctrl-C stops an answer; at the prompt it leaves, like Ctrl-D and /exit."""

    def __init__(self, client: EngineClient, sampling: SamplingParams, system: str) -> None:
        self._client, self._sampling = client, sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._answering: asyncio.Task[Answer] | None = None
        self.messages: list[dict[str, Any]] = list(self._opening)

    async def run(self) -> None:
        """Talk until the user leaves or the engine is gone. Raises PagetideError in the latter case."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        if sys.stdin.isatty():
            print(f"{self._client.model.name}: /reset forgets the conversation, /exit or Ctrl-D leaves")
        with _kept_terminal():
            lost = asyncio.create_task(self._client.lost.wait())
            while True:
                threading.Thread(target=self._read_line, args=(loop,), daemon=True).start()
                line = asyncio.create_task(self._lines.get())
                await asyncio.wait({line, lost}, return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    raise PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the engine core is gone")
                text = line.result()
                if text is None or text.strip() == "/exit":
                    break
                await self.take(text)
            lost.cancel()

    async def take(self, line: str) -> None:
        """One line from the user: a command, or something to answer."""
        if line.strip() == "/reset":
            self.messages = list(self._opening)
            print("(forgotten)")
        elif line.strip().startswith("/"):
            print("(there are /reset and /exit)")
        elif line.strip():
            await self._respond(line)

    async def _respond(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            show_on_stdout(piece)

        self._answering = asyncio.create_task(
            answer(self._client, ChatPrompt(asked), self._sampling, TextParams(), show)
        )
        try:
            await self._answering
            print()
        except asyncio.CancelledError:
            print(" (stopped)")
        except PagetideError as error:
            print(f"error: {error.message}", file=sys.stderr)
            if self._client.lost.is_set():
                raise
            return  # an unanswered question would only fail again
        finally:
            self._answering = None
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _interrupt(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        else:
            self._lines.put_nowait(None)

    def _read_line(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own, so that the connection is served while the user thinks."""
        try:
            line: str | None = input("> " if sys.stdin.isatty() else "")
        except (EOFError, OSError, ValueError):
            line = None
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._lines.put_nowait, line)


@contextlib.contextmanager
def _kept_terminal() -> Any:
    """Give the terminal back as it was: a thread may still be reading a line when the process ends."""
    if not sys.stdin.isatty():
        yield
        return
    import readline  # line editing and history for input()
    import termios

    del readline
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


async def chat(directory: Path, sampling: SamplingParams, system: str) -> None:
    """A conversation with the engine in `directory`. Raises StartupError, PagetideError."""
    client = await EngineClient.connect(directory)
    try:
        await Chat(client, sampling, system).run()
    finally:
        await client.close()

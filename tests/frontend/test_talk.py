"""What `pagetide generate` makes of a generation."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec

from frontend.talk import Answer, answer, times_table
from frontend.timing import Times
from protocol.messages import Finish, Pause, SamplingParams, TextDelta, TextParams, TextPrompt

TIMES = Times(0.1, 0.0, 0.2, 0.3, 0.0, 4.3, 0.0, 0.1, 0.0, 5.0, 4.4, 1, 0)


class Played:
    """A generation that is swapped out in mid-answer."""

    prompt_tokens = 3
    times = {0: TIMES}

    async def __aenter__(self) -> "Played":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextDelta]]:
        yield 0, TextDelta(1, "", 0, pause=Pause.SWAPPED)
        yield 0, TextDelta(1, "a", 1)
        yield 0, TextDelta(1, "", 0, pause=Pause.RESUMED)
        yield 0, TextDelta(1, "b", 1, Finish.LENGTH)


def ask(timing: bool) -> tuple[Answer, list[str]]:
    client: Any = SimpleNamespace(
        model=SimpleNamespace(name="m", vocab_size=10), generate=lambda prompt, sampling, text: Played()
    )
    shown: list[str] = []
    text = TextParams(timing=timing)
    return asyncio.run(answer(client, TextPrompt("x"), SamplingParams(), text, shown.append)), shown


def test_pauses_are_no_text_and_the_timing_comes_if_asked() -> None:
    result, shown = ask(timing=True)
    assert shown == ["a", "b"]
    assert (result.text, result.completion_tokens, result.timing) == ("ab", 2, TIMES)
    assert msgspec.json.decode(msgspec.json.encode(result))["timing"]["swapped"] == 4.3
    assert "timing" not in msgspec.json.decode(msgspec.json.encode(ask(timing=False)[0]))


def test_the_table_has_the_phases_that_took_time() -> None:
    assert times_table(TIMES).splitlines() == [
        "before core       0.1000 s   2.0%",
        "prefill           0.2000 s   4.0%",
        "decode            0.3000 s   6.0%",
        "swapped           4.3000 s  86.0%",
        "send              0.1000 s   2.0%",
        "total             5.0000 s 100.0%",
        "longest gap       4.4000 s; swapped out 1x, computed again 0x",
    ]

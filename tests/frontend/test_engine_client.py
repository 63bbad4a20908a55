"""The client against a played engine: real sockets, one thread that is core, tokenizer and detokenizer at once."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from frontend import engine_client, generation
from frontend.engine_client import EngineClient
from frontend.generation import Generation, merge, merge_text
from protocol.channels import Server
from protocol.codec import encode
from protocol.errors import ErrorCode, PagetideError, StartupError
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Detokenize,
    Detokenized,
    Finish,
    Hello,
    Limits,
    ModelInfo,
    Pause,
    Rejected,
    Role,
    SamplingParams,
    SubmitText,
    TextDelta,
    TextDeltas,
    TextParams,
    TextPrompt,
    Timing,
    Tokenize,
    Tokenized,
    Welcome,
    pack_i32,
    unpack_i64,
)
from protocol.runtime_dir import core_endpoint, status_endpoint
from protocol.status import CoreStatus, PeerInfo

MODEL, LIMITS = ModelInfo("m", "p", 10, 100, 0, [2]), Limits(4, 1000)


class PlayedEngine(threading.Thread):
    """Accepts what is submitted (or answers with `refusal`) and sends the deltas that tests put into `outbox`."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        frontends = (Role.FRONTEND,)
        self.core = Server(self.context, core_endpoint(directory), Abort, frontends)
        self.tokenizer = Server(
            self.context, f"ipc://{directory}/t", SubmitText | Abort | Tokenize | Detokenize, frontends
        )
        self.detokenizer = Server(self.context, f"ipc://{directory}/d", Hello, frontends)
        self.servers = {"core": self.core, "tokenizer": self.tokenizer, "detokenizer": self.detokenizer}
        for name, server in self.servers.items():
            server.open_doors(Welcome(PROTOCOL_VERSION, name, MODEL, LIMITS))
        self.status = self.context.socket(zmq.PUB)
        self.status.bind(status_endpoint(directory))
        self.directory = directory
        self.refusal: ErrorCode | None = None
        self.silent = False
        self.ghosts: list[PeerInfo] = []  # more peers that the status tells of
        self.step_age = 0.0
        self.longest_step = 0.0
        self.waiting = 0
        self.submitted: list[SubmitText] = []
        self.aborted: list[int] = []
        self.outbox: list[TextDelta] = []
        self.killed: set[str] = set()
        self.drops_readers = False
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            for name in self.killed - {n for n, s in self.servers.items() if s.socket.closed}:
                self.servers[name].close()
            self.status.send(encode(self._status()))
            if not self.core.socket.closed:
                for _, message in self.core.receive():
                    self.aborted += unpack_i64(message.request_ids)
            if not self.tokenizer.socket.closed:
                for peer, message in self.tokenizer.receive():
                    self._answer(peer, message)
            if not self.detokenizer.socket.closed:
                list(self.detokenizer.receive())
                for peer in list(self.detokenizer.peers.values()) if self.drops_readers else []:
                    self.detokenizer.drop(peer)  # in this thread: the server is its own
                    self.detokenizer._late.append(peer)
                self.detokenizer.ping()
                deltas, self.outbox = self.outbox, []
                for peer in list(self.detokenizer.peers.values()) if deltas else []:
                    for delta in deltas:
                        self.detokenizer.send(peer, TextDeltas([delta]))
            time.sleep(0.005)
        self.context.destroy(linger=0)

    def _status(self) -> CoreStatus:
        names = {"tokenizer": "t", "detokenizer": "d"}
        peers = [
            PeerInfo(Role[name.upper()], name, 1, f"ipc://{self.directory}/{short}")
            for name, short in names.items()
            if name not in self.killed
        ] + self.ghosts
        gauges = {"longest_step_seconds": self.longest_step}
        return CoreStatus("core", 1, 0.0, 0.0, 1, self.step_age, MODEL, LIMITS, self.waiting, 0, 0, peers, gauges)

    def _answer(self, peer: object, message: object) -> None:
        if isinstance(message, Abort):
            self.aborted += unpack_i64(message.request_ids)
        elif isinstance(message, SubmitText):
            self.submitted.append(message)
            for choice in range(message.choices):
                request_id = message.request_id + choice
                if self.refusal:
                    self.tokenizer.send(peer, Rejected(request_id, self.refusal, "no", "prompt"))
                elif not self.silent:
                    self.tokenizer.send(peer, Accepted(request_id, 3))
        elif not self.silent:
            answer = Tokenized(message.request_id, pack_i32([1, 2]), ["a", "b"])
            if isinstance(message, Detokenize):
                answer = Detokenized(message.request_id, "ab")
            self.tokenizer.send(peer, answer)


Scenario = Callable[[EngineClient, PlayedEngine], Awaitable[None]]


@pytest.fixture
def play(short_path: Path) -> Callable[[Scenario], None]:
    """Run a coroutine with a connected client and a played engine."""

    def run(scenario: Scenario) -> None:
        engine = PlayedEngine(short_path)
        engine.start()

        async def main() -> None:
            client = await EngineClient.connect(short_path, 5)
            try:
                async with asyncio.timeout(20):
                    await scenario(client, engine)
                assert not client._generations
                assert not client._answers
            finally:
                if not client._context.closed:
                    await client.close()

        try:
            asyncio.run(main())
        finally:
            engine.stopping = True
            engine.join()

    return run


def request(client: EngineClient, **options: int) -> Generation:
    return client.generate(TextPrompt("hello"), SamplingParams(), TextParams(), **options)


def delta(generation: Generation, text: str, finish: Finish = Finish.NONE, choice: int = 0) -> TextDelta:
    return TextDelta(generation.first_id + choice, text, 1, finish)


async def collect(items: AsyncIterator[tuple[int, TextDelta]]) -> list[tuple[int, str, Finish]]:
    return [(choice, delta.text, delta.finish) async for choice, delta in items]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_choices_stream_to_their_end(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client, choices=2) as generation:
            assert generation.prompt_tokens == 3
            engine.outbox = [
                delta(generation, "a"),
                delta(generation, "b", Finish.STOP, 1),
                delta(generation, "c", Finish.LENGTH),
            ]
            seen = await collect(generation)
        text = {choice: "".join(t for c, t, _ in seen if c == choice) for choice in (0, 1)}
        assert text == {0: "ac", 1: "b"}
        assert engine.submitted[0].detokenizer == "detokenizer"
        assert engine.aborted == []

    play(scenario)


def test_leaving_early_aborts_what_runs(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client, choices=2) as generation:
            engine.outbox = [delta(generation, "b", Finish.STOP, 1)]
            await until(lambda: len(generation.unfinished) == 1)
        await until(lambda: engine.aborted)
        assert engine.aborted == [generation.first_id]

    play(scenario)


def test_a_waiting_submit_that_is_cancelled_is_aborted(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        engine.silent = True

        async def enter() -> None:
            async with request(client):
                pass

        task = asyncio.create_task(enter())
        await until(lambda: engine.submitted)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.aborted)

    play(scenario)


def test_refusals_and_a_full_queue_are_errors_before_the_stream(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        engine.refusal = ErrorCode.CONTEXT_LENGTH_EXCEEDED
        with pytest.raises(PagetideError) as caught:
            async with request(client, choices=3):
                pass
        assert (caught.value.code, caught.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt")
        count = len(engine.submitted)
        with pytest.raises(PagetideError) as caught:
            async with request(client, choices=LIMITS.max_waiting_requests + 1):
                pass
        assert caught.value.code is ErrorCode.QUEUE_FULL
        engine.waiting = LIMITS.max_waiting_requests
        await until(lambda: client.status.waiting)
        with pytest.raises(PagetideError) as caught:
            async with request(client):
                pass
        assert caught.value.code is ErrorCode.QUEUE_FULL
        assert len(engine.submitted) == count, "the slot is taken before anything is sent"

    play(scenario)


@pytest.mark.parametrize("victim", ["core", "detokenizer"])
def test_a_lost_process_is_an_error_in_the_stream(play: Callable[[Scenario], None], victim: str) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client) as generation:
            engine.outbox = [delta(generation, "a")]
            items = aiter(generation)
            assert (await anext(items))[1].text == "a"
            engine.killed = {victim}
            with pytest.raises(PagetideError) as caught:
                await anext(items)
            assert caught.value.code is ErrorCode.ENGINE_UNAVAILABLE
        assert client.lost.is_set() == (victim == "core")
        assert client.health()

    play(scenario)


def test_a_client_that_a_service_has_dropped_is_lost_as_a_whole(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client) as generation:
            engine.drops_readers = True
            with pytest.raises(PagetideError, match="did not read"):
                await collect(generation)
        assert client.lost.is_set()

    play(scenario)


def test_an_accepted_request_outlives_its_tokenizer_and_an_unanswered_question_does_not(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client) as generation:
            engine.silent = True
            question = asyncio.create_task(client.tokenize(TextPrompt("x")))
            await asyncio.sleep(0)
            engine.killed = {"tokenizer"}
            with pytest.raises(PagetideError) as caught:
                await question
            assert caught.value.code is ErrorCode.ENGINE_UNAVAILABLE
            engine.outbox = [delta(generation, "a", Finish.STOP)]
            assert await collect(generation) == [(0, "a", Finish.STOP)]

    play(scenario)


@pytest.mark.parametrize("limit", ["bytes", "seconds"])
def test_a_consumer_that_does_not_read_is_cut_off(
    play: Callable[[Scenario], None], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "UNREAD_BYTES", 1000 if limit == "bytes" else 1 << 30)
    monkeypatch.setattr(engine_client, "UNREAD_SECONDS", 0.1 if limit == "seconds" else 1e9)

    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client) as slow:
            engine.outbox = [delta(slow, "x" * 100) for _ in range(20)]
            await until(lambda: engine.aborted)
            assert engine.aborted == [slow.first_id]
            with pytest.raises(PagetideError) as caught:
                await collect(slow)
            assert caught.value.code is ErrorCode.CLIENT_TOO_SLOW
            assert not slow._unread

    play(scenario)


def test_questions_to_the_tokenizer(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        assert (await client.tokenize(TextPrompt("ab"))).pieces == ["a", "b"]
        assert await client.detokenize([1, 2]) == "ab"
        with pytest.raises(PagetideError):
            await client.detokenize([1 << 40])

    play(scenario)


def test_health_names_what_is_wrong(play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        assert client.health() is None
        engine.step_age = 60.0
        await until(lambda: client.health())
        assert "no step has ended" in client.health()
        engine.longest_step = 20.0
        await until(lambda: client.health() is None)
        engine.step_age = 90.0
        await until(lambda: client.health())
        monkeypatch.setattr(engine_client, "STATUS_AGE", -1.0)
        assert "no sign of life" in client.health()

    play(scenario)


def test_connect_without_an_engine_is_a_startup_error(short_path: Path) -> None:
    with pytest.raises(StartupError, match="did not answer"):
        asyncio.run(EngineClient.connect(short_path, 0.05))
    with pytest.raises(StartupError, match="no engine runs"):
        asyncio.run(EngineClient.connect(short_path / "nothing", 0.05))


def test_merge_keeps_order_and_counts() -> None:
    merged = merge([TextDelta(1, "a", 2, cached_tokens=5), TextDelta(1, "b", 1, Finish.STOP, "x")])
    assert merged == TextDelta(1, "ab", 3, Finish.STOP, "x", cached_tokens=5)


def test_a_steady_reader_of_many_choices_is_not_cut_off(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never catches up, but all that waits is one merged delta per choice, and each choice gets its turn."""
    monkeypatch.setattr(generation, "UNREAD_BYTES", 1000)

    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client, choices=3) as busy:
            items = aiter(busy)
            seen: list[int] = []
            for _ in range(30):
                for choice in range(3):
                    busy.take_delta(delta(busy, "x" * 20, choice=choice))
                before = busy.unread_since
                seen.append((await anext(items))[0])
                assert busy.unread_since > before, "reading counts, however much is left"
            assert {seen.count(choice) for choice in range(3)} == {10}

    play(scenario)


def test_an_abort_finds_its_way_without_a_tokenizer(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        async with request(client) as generation:
            engine.killed = {"tokenizer"}
            await until(lambda: client.health())
        await until(lambda: engine.aborted == [generation.first_id])

    play(scenario)


def test_each_of_two_tokenizers_and_detokenizers_gets_its_share(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        groups = [{n: SimpleNamespace(endpoint=n, welcome=True, lost=False) for n in names} for names in ("ab", "cd")]
        picked = [client._pick(links).endpoint for _ in range(2) for links in groups]
        assert sorted(picked) == ["a", "b", "c", "d"]

    play(scenario)


@pytest.mark.parametrize("role", [Role.TOKENIZER, Role.DETOKENIZER])
def test_a_link_to_a_service_that_ended_before_it_answered_is_closed(
    play: Callable[[Scenario], None], role: Role
) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        endpoint = f"ipc://{engine.directory}/ghost"
        links = client._tokenizers if role is Role.TOKENIZER else client._detokenizers
        engine.ghosts = [PeerInfo(role, "ghost", 1, endpoint)]
        await until(lambda: endpoint in links)
        ghost = links[endpoint]
        engine.ghosts = []
        await until(lambda: endpoint not in links)
        assert all(socket.closed for socket in ghost.sockets)
        assert client.health() is None

    play(scenario)


def test_a_request_that_goes_on_unknown_is_aborted_once(play: Callable[[Scenario], None]) -> None:
    """Its Abort came before its Submit, so the core knows nothing of it."""

    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        engine.outbox = [TextDelta(7, "a", 1), TextDelta(7, "b", 1), TextDelta(8, "c", 1, Finish.STOP)]
        await until(lambda: client.stray_deltas == 3)
        engine.outbox = [TextDelta(7, "d", 1), TextDelta(9, "e", 1)]
        await until(lambda: len(engine.aborted) == 2)
        assert engine.aborted == [7, 9]

    play(scenario)


def test_closing_answers_who_still_asks(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        engine.silent = True
        question = asyncio.create_task(client.tokenize(TextPrompt("x")))
        await asyncio.sleep(0)
        assert client._answers
        await client.close()
        with pytest.raises(PagetideError) as caught:
            await question
        assert caught.value.code is ErrorCode.SHUTTING_DOWN

    play(scenario)


def test_pauses_stay_where_they_are_among_merged_text() -> None:
    def text(value: str) -> TextDelta:
        return TextDelta(1, value, 1)

    out, back = (TextDelta(1, "", 0, pause=pause) for pause in (Pause.SWAPPED, Pause.RESUMED))
    deltas = [text("a"), text("b"), out, back, text("c"), out, back]
    assert list(merge_text(deltas)) == [TextDelta(1, "ab", 2), out, back, text("c"), out, back]
    assert list(merge_text([text("a")])) == [text("a")]


def test_times_and_gaps_are_those_of_the_arrival_not_of_the_reading(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, engine: PlayedEngine) -> None:
        before = time.monotonic()
        async with request(client, choices=2) as generation:
            engine.outbox = [delta(generation, "a"), TextDelta(generation.first_id, "", 0, pause=Pause.SWAPPED)]
            await until(lambda: generation._unread)
            assert not engine.outbox
            arrival = time.monotonic()
            timing = Timing(arrival, arrival + 0.001, 0.001, 0, 0, 0, 0, 0, 3)
            last = TextDelta(generation.first_id, "b", 1, Finish.STOP, timing=timing)
            engine.outbox = [last, delta(generation, "c", Finish.STOP, 1)]
            await until(lambda: not generation.unfinished)
            after = time.monotonic()
            await collect(generation)
        assert list(generation.times) == [0], "nothing was told of the other choice"
        times = generation.times[0]
        assert (times.swaps, times.queued) == (3, 0.001)
        assert 0 < times.before_core < arrival - before
        assert times.total < after - before
        assert abs(times.residual) < 1e-6
        assert set(generation.gaps) == {0, 1}
        assert 0 < generation.gaps[0] == times.longest_gap < times.total
        assert generation.gaps[1] == 0

    play(scenario)

import logging
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import Decoder, encode
from protocol.messages import (
    Abort,
    ChatPrompt,
    Hello,
    Ping,
    Role,
    RowExtra,
    SamplingParams,
    StepOutput,
    Submit,
    SubmitText,
    TextDelta,
    TextDeltas,
    TextParams,
    TopLogprobs,
    pack_i32,
    pack_i64,
    unpack_i32,
    unpack_i64,
)

ACCEPTED = Submit | SubmitText | Abort | StepOutput | TextDeltas
SUBMIT = Submit(7, pack_i32(range(9)), SamplingParams(logit_bias={3: 1.5}, stop_token_ids=[2]), TextParams(), "f", "d")
CHAT = SubmitText(
    8, 2, ChatPrompt([{"role": "user", "content": "X"}]), SamplingParams(), TextParams(stop=["\n"]), "detokenizer"
)
EXTRA = RowExtra(0, TopLogprobs(5, -0.25, pack_i32([5, 6]), [-0.25, -1.5], 1))
STEP = StepOutput(3, pack_i64([7, 8]), pack_i32([5, -1]), bytes([0, 2]), [EXTRA])
DELTAS = TextDeltas([TextDelta(7, "Grüße 🌶", 2, stop_reason="\n")])
SAMPLES = [SUBMIT, CHAT, Abort(pack_i64([1])), STEP, DELTAS]


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(ACCEPTED, "test socket")


def packed(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def in_chat(payload: bytes) -> bytes:
    """A SubmitText that is right but for `payload` deep inside, where any JSON-like value may stand."""
    return encode(CHAT).replace(b"\xa7content\xa1X", b"\xa7content" + payload)


FOREIGN = {
    "nothing": b"",
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    "a megabyte of zeros": bytes(1 << 20),
    "a megabyte of ones": b"\xff" * (1 << 20),
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtin\x94.",
    "JSON": msgspec.json.encode(SUBMIT),
    "an object, not an array": msgspec.msgpack.encode({"type": "Submit"}),
    "no tag": packed(),
    "an unknown tag": packed("Submission", 1),
    "a tag that is a number": packed(7, 1),
    "a message that another socket takes": encode(Hello(1, Role.CORE, "x", 1)),
    "a message without fields": encode(Ping()),
    "too few fields": packed("Submit", 7),
    "a number for bytes": packed("Abort", 7),
    "text for bytes": packed("Abort", "12345678"),
    "text for a number": packed("StepOutput", "3", b"", b"", b""),
    "a bool for a number": packed("StepOutput", True, b"", b"", b""),
    "null for a number": packed("StepOutput", None, b"", b"", b""),
    "a fraction for a number": packed("StepOutput", 1.5, b"", b"", b""),
    "an unknown finish": packed("TextDeltas", [[7, "", 1, 99]]),
    "trailing bytes": encode(STEP) + b"\0",
    "twice the same": encode(STEP) * 2,
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a byte string of four billion": b"\x92\xa5Abort\xc6\xff\xff\xff\xff",
    "deep nesting": b"\x91" * 100_000 + b"\xc0",
    "deep nesting inside": in_chat(b"\x91" * 100_000 + b"\xc0"),
    "deep nesting in a key": in_chat(b"\x81" * 100_000 + b"\xc0"),
    "a map as a key": in_chat(b"\x81\x80\x01"),
    "a list inside of four billion": in_chat(b"\xdd\xff\xff\xff\xff"),
    "text that is not UTF-8": in_chat(b"\xa2\xff\xfe"),
    "a surrogate": in_chat(b"\xa3\xed\xa0\x80"),
    "a date that does not exist": in_chat(b"\xd7\xff" + b"\xff" * 8),
    "a reserved byte": b"\xc1",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_bytes_are_counted_and_dropped(decoder: Decoder, data: bytes) -> None:
    assert decoder.decode(data) is None
    assert decoder.decode(memoryview(data)) is None
    assert decoder.dropped == 2
    assert decoder.decode(encode(SUBMIT)) == SUBMIT, "a bad message must not harm the next one"


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_cut_short_is_dropped(decoder: Decoder, message: msgspec.Struct) -> None:
    data = encode(message)  # type: ignore[arg-type]
    assert decoder.decode(data) == message
    for length in range(len(data)):
        assert decoder.decode(data[:length]) is None
    assert decoder.dropped == len(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise(data: bytes) -> None:
    decoder = Decoder(ACCEPTED, "test socket")
    assert (decoder.decode(data) is None) == (decoder.dropped == 1)


@given(
    st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5)
)
def test_changed_bytes_never_raise(message: msgspec.Struct, changes: list[tuple[int, int]]) -> None:
    data = bytearray(encode(message))  # type: ignore[arg-type]
    for place, value in changes:
        data[place % len(data)] = value
    decoder = Decoder(ACCEPTED, "test socket")
    assert (decoder.decode(bytes(data)) is None) == (decoder.dropped == 1)


def test_the_log_is_bounded(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(codec.time, "monotonic", lambda: now)
    with caplog.at_level(logging.WARNING, "pagetide.wire"):
        for _ in range(100):
            decoder.decode(b"nonsense")
        now += decoder.LOG_INTERVAL
        decoder.drop("x" * 10_000)
    assert len(caplog.records) == 2
    assert "test socket" in caplog.text
    assert "(101 so far)" in caplog.text
    assert len(caplog.text) < 1000


def test_a_step_of_256_rows_is_cheap() -> None:
    """Columns keep it at microseconds; a struct per row would take hundreds. The bound is for a busy machine."""
    ids, tokens, finish = list(range(10**6, 10**6 + 256)), list(range(0, 256 * 190, 190)), [0] * 256
    decoder = Decoder(StepOutput, "test socket")
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        data = encode(StepOutput(1, pack_i64(ids), pack_i32(tokens), bytes(finish)))
        step = decoder.decode(data)
        columns = unpack_i64(step.ids), unpack_i32(step.tokens), step.finish
        best = min(best, time.perf_counter() - start)
    assert [list(column) for column in columns] == [ids, tokens, finish]
    print(f"\nStepOutput, 256 rows: {best * 1e6:.1f} us to pack, encode, decode and unpack; {len(data)} bytes")
    assert len(data) < 256 * 13 + 50
    assert best < 200e-6

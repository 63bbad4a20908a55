import math
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from frontend.detokenizer import DetokenizerService, Outgoing
from frontend.incremental import TextStream
from frontend.text_model import TextModel
from protocol.codec import Decoder, encode
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
    TextDeltas,
    TextParams,
    Timing,
    TokenLogprobs,
    TokenText,
    TopLogprobs,
    pack_i32,
    pack_i64,
)

EOS, EOT = 256, 257
EMOJI = "🌶".encode()


@pytest.fixture(scope="module")
def model() -> TextModel:
    """Ids 0 to 255 are the bytes, then two special tokens that end an answer."""
    return TextModel(
        tokenizer=Tokenizer(models.BPE()),
        token_bytes=[bytes([byte]) for byte in range(256)] + [b"</s>", b"<eot>"],
        special_ids=frozenset({EOS, EOT}),
    )


@pytest.fixture
def service(model: TextModel) -> DetokenizerService:
    return DetokenizerService(model, [EOS, EOT])


def start(
    service: DetokenizerService,
    request_id: int,
    frontend: str = "f",
    prompt: bytes = b"p",
    text: TextParams | None = None,
    **more: Any,
) -> None:
    message = Started(request_id, frontend, pack_i32([*prompt]), text or TextParams(), **more)
    assert service.handle(message) == Outgoing({}, [], [])


def step(*rows: tuple[int, int, Finish], extras: list[RowExtra] | None = None) -> StepOutput:
    ids, tokens, finish = zip(*rows, strict=True)
    return StepOutput(0, pack_i64(ids), pack_i32(tokens), bytes(finish), extras or [])


def run(service: DetokenizerService, request_id: int, tokens: bytes, last: Finish = Finish.LENGTH) -> list[TextDelta]:
    """Feed the tokens one step at a time; the last one with a finish."""
    deltas: list[TextDelta] = []
    for i, token in enumerate(tokens):
        outgoing = service.handle(step((request_id, token, last if i + 1 == len(tokens) else Finish.NONE)))
        deltas += [delta for of_frontend in outgoing.deltas.values() for delta in of_frontend]
    return deltas


def test_a_step_is_split_by_frontend(service: DetokenizerService) -> None:
    for request_id, frontend in ((1, "a"), (2, "b"), (3, "a")):
        start(service, request_id, frontend)
    outgoing = service.handle(step((1, 65, Finish.NONE), (2, 66, Finish.NONE), (3, 67, Finish.LENGTH)))
    assert outgoing == Outgoing(
        {"a": [TextDelta(1, "A", 1), TextDelta(3, "C", 1, Finish.LENGTH)], "b": [TextDelta(2, "B", 1)]}, [], []
    )
    for deltas in outgoing.deltas.values():
        assert Decoder(TextDeltas, "test").decode(encode(TextDeltas(deltas))) == TextDeltas(deltas)


def test_tokens_without_text_are_counted_in_the_next_delta(service: DetokenizerService) -> None:
    start(service, 1)
    assert run(service, 1, b"a" + EMOJI + b"b") == [
        TextDelta(1, "a", 1),
        TextDelta(1, "🌶", 4),
        TextDelta(1, "b", 1, Finish.LENGTH),
    ]


def test_the_first_token_is_told_at_once_even_without_text(service: DetokenizerService) -> None:
    start(service, 1, cached_tokens=32)
    assert run(service, 1, EMOJI) == [
        TextDelta(1, "", 1, cached_tokens=32),
        TextDelta(1, "🌶", 3, Finish.LENGTH),
    ]


@pytest.mark.parametrize(("token", "reason"), [(EOS, None), (EOT, None), (65, 65)])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_stop_token_is_counted_but_has_no_text(
    service: DetokenizerService, token: int, reason: int | None, skip_special_tokens: bool
) -> None:
    start(service, 1, text=TextParams(skip_special_tokens=skip_special_tokens))
    service.handle(step((1, 66, Finish.NONE)))
    outgoing = service.handle(step((1, token, Finish.STOP)))
    assert outgoing == Outgoing({"f": [TextDelta(1, "", 1, Finish.STOP, reason)]}, [], [])
    assert len(service) == 0


def test_a_stop_string_ends_the_request_and_aborts_it(service: DetokenizerService) -> None:
    start(service, 1, text=TextParams(stop=["xy"]))
    service.handle(step((1, ord("a"), Finish.NONE)))
    assert service.handle(step((1, ord("x"), Finish.NONE))) == Outgoing({}, [], [])
    outgoing = service.handle(step((1, ord("y"), Finish.NONE)))
    assert outgoing == Outgoing({"f": [TextDelta(1, "", 2, Finish.STOP, "xy")]}, [], [1])
    assert len(service) == 0
    late = step((1, ord("z"), Finish.NONE))  # before the core saw the abort
    assert service.handle(late) == Outgoing({}, [], [])
    assert service.unknown_rows == 1


def test_a_stop_string_with_the_last_token_needs_no_abort(service: DetokenizerService) -> None:
    start(service, 1, text=TextParams(stop=["b"]))
    assert run(service, 1, b"ab") == [TextDelta(1, "a", 1), TextDelta(1, "", 1, Finish.STOP, "b")]
    start(service, 2, text=TextParams(stop=["b"]))
    assert service.handle(step((2, ord("b"), Finish.LENGTH))).finished == []


@pytest.mark.parametrize("last", [Finish.LENGTH, Finish.ERROR])
def test_held_back_text_comes_out_at_the_end(service: DetokenizerService, last: Finish) -> None:
    start(service, 1, text=TextParams(stop=["bcd"]))
    assert "".join(delta.text for delta in run(service, 1, b"abc", last)) == "abc"
    start(service, 2, text=TextParams(stop=["bcd"]))
    service.handle(step((2, ord("b"), Finish.NONE)))
    [delta] = service.handle(step((2, EOS, Finish.STOP))).deltas["f"]
    assert delta.text == "b"


def test_echo_and_no_token(service: DetokenizerService) -> None:
    start(service, 1, prompt=b"prompt", text=TextParams(echo=True))
    assert run(service, 1, b"ab") == [TextDelta(1, "prompta", 1), TextDelta(1, "b", 1, Finish.LENGTH)]
    start(service, 2, prompt=b"prompt", text=TextParams(echo=True))
    outgoing = service.handle(step((2, -1, Finish.LENGTH)))
    assert outgoing.deltas == {"f": [TextDelta(2, "prompt", 0, Finish.LENGTH)]}


def test_errors_are_passed_on_with_the_text_so_far(service: DetokenizerService) -> None:
    start(service, 1, text=TextParams(stop=["ab"]))
    service.handle(step((1, ord("a"), Finish.NONE)))
    extra = RowExtra(0, error_code=ErrorCode.NON_FINITE_LOGITS, error="NaN")
    [delta] = service.handle(step((1, -1, Finish.ERROR), extras=[extra])).deltas["f"]
    assert delta == TextDelta(1, "a", 0, Finish.ERROR, error_code=ErrorCode.NON_FINITE_LOGITS, error="NaN")
    assert len(service) == 0


def logprobs(token: int, *top: int) -> TopLogprobs:
    return TopLogprobs(token, -0.5, pack_i32(top), [-1.0 - i for i in range(len(top))])


def test_logprobs_carry_true_bytes_and_one_entry_per_token(service: DetokenizerService) -> None:
    start(service, 1)
    entries: list[TokenLogprobs] = []
    for i, token in enumerate([*EMOJI, EOS]):
        finish = Finish.STOP if token == EOS else Finish.NONE
        outgoing = service.handle(step((1, token, finish), extras=[RowExtra(0, logprobs=logprobs(token, 65, EOS))]))
        [delta] = outgoing.deltas["f"]
        assert delta.tokens == len(delta.logprobs) == 1, i
        entries += delta.logprobs
    assert [entry.chosen.bytes for entry in entries] == [*(bytes([byte]) for byte in EMOJI), b"</s>"]
    assert entries[0] == TokenLogprobs(
        TokenText(EMOJI[0], EMOJI[:1], -0.5), [TokenText(65, b"A", -1.0), TokenText(EOS, b"</s>", -2.0)]
    )


def test_prompt_logprobs(service: DetokenizerService) -> None:
    start(service, 1, prompt=b"AB", text=TextParams(echo=True), prompt_logprobs=1)
    extra = RowExtra(0, prompt_logprobs=[None, logprobs(66, 67)])
    [delta] = service.handle(step((1, 67, Finish.NONE), extras=[extra])).deltas["f"]
    first, second = delta.prompt_logprobs
    assert (first.chosen.token, first.chosen.bytes, first.top) == (65, b"A", [])
    assert math.isnan(first.chosen.logprob)
    assert second == TokenLogprobs(TokenText(66, b"B", -0.5, 1), [TokenText(67, b"C", -1.0)])


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_offsets_are_those_of_the_text(service: DetokenizerService, skip_special_tokens: bool) -> None:
    """Special tokens that the text leaves out count for nothing, bytes of one character start where it does."""
    shown = 0 if skip_special_tokens else len("</s>")
    params = TextParams(echo=True, stop=["never"], skip_special_tokens=skip_special_tokens)
    prompt = [EOS, *EMOJI, 65]
    message = Started(1, "f", pack_i32(prompt), params, prompt_logprobs=0)
    assert service.handle(message) == Outgoing({}, [], [])
    extra = RowExtra(0, logprobs(EOT), [None, *map(logprobs, prompt[1:])])
    text, chosen = "", []
    for token in (EOT, 66, EMOJI[0], ord("n"), EOS):
        extra = extra if token == EOT else RowExtra(0, logprobs(token))
        finish = Finish.STOP if token == EOS else Finish.NONE
        [delta] = service.handle(step((1, token, finish), extras=[extra])).deltas["f"]
        text += delta.text
        chosen += [entry.chosen for entry in (*delta.prompt_logprobs, *delta.logprobs)]
    assert text == ("🌶AB\ufffdn" if skip_special_tokens else "</s>🌶A<eot>B\ufffdn")
    after = shown + 2 + (0 if skip_special_tokens else len("<eot>"))
    expected = [0, *[shown] * 4, shown + 1, shown + 2, after, after + 1, after + 1, after + 3]
    assert [token.offset for token in chosen] == expected
    for token in chosen:
        if token.token < 128:
            assert text[token.offset :].lstrip("\ufffd").startswith(chr(token.token))


def test_prompt_logprobs_without_the_whole_prompt(service: DetokenizerService) -> None:
    start(service, 1, prompt=b"C", prompt_logprobs=0)
    extra = RowExtra(0, prompt_logprobs=[None, logprobs(66), logprobs(67)])
    [delta] = service.handle(step((1, 67, Finish.NONE), extras=[extra])).deltas["f"]
    assert [entry.chosen.token for entry in delta.prompt_logprobs] == [-1, 66, 67]


def test_a_frontend_that_is_gone_leaves_nothing(service: DetokenizerService) -> None:
    for request_id, frontend in ((1, "a"), (2, "b"), (3, "a")):
        start(service, request_id, frontend)
    assert service.frontend_gone("a") == [1, 3]
    assert service.frontend_gone("a") == []
    assert len(service) == 1
    assert service.handle(step((1, 65, Finish.NONE), (2, 65, Finish.NONE))).deltas.keys() == {"b"}
    assert service.unknown_rows == 1


def test_what_the_core_drops_leaves_nothing(service: DetokenizerService) -> None:
    start(service, 1)
    start(service, 2)
    assert service.handle(Abort(pack_i64([1, 99]))) == Outgoing({}, [], [])
    assert len(service) == 1


def test_one_bad_request_ends_alone(service: DetokenizerService, monkeypatch: pytest.MonkeyPatch) -> None:
    start(service, 1, "a")
    start(service, 2, "b")
    real = TextStream.push

    def fail_at_zero(stream: TextStream, token: int) -> str:
        if token == 0:
            raise ZeroDivisionError
        return real(stream, token)

    monkeypatch.setattr(TextStream, "push", fail_at_zero)
    outgoing = service.handle(step((1, 0, Finish.NONE), (2, 66, Finish.NONE)))
    [failed] = outgoing.deltas["a"]
    assert (failed.finish, failed.error_code) == (Finish.ERROR, ErrorCode.INTERNAL_ERROR)
    assert outgoing.aborts == [1]
    assert outgoing.deltas["b"] == [TextDelta(2, "B", 1)]
    assert len(service) == 1


def test_a_request_that_can_t_start_ends_alone(service: DetokenizerService) -> None:
    outgoing = service.handle(Started(1, "a", b"\0\0\0", TextParams()))
    assert outgoing.aborts == [1]
    assert outgoing.deltas["a"][0].finish is Finish.ERROR
    assert len(service) == 0


def test_ids_past_the_vocabulary_have_no_text(service: DetokenizerService) -> None:
    """A model's output layer may be padded beyond its tokenizer."""
    start(service, 1)
    extra = RowExtra(0, logprobs=logprobs(1 << 20))
    [delta] = service.handle(step((1, 1 << 20, Finish.NONE), extras=[extra])).deltas["f"]
    assert (delta.text, delta.tokens, delta.logprobs[0].chosen.bytes) == ("", 1, b"")


TIMING = Timing(1.0, 4.0, 0.5, 1.0, 1.0, 0.0, 0.5, 0.0, 1)


def test_pauses_are_told_in_order_to_those_who_read_them(service: DetokenizerService) -> None:
    start(service, 1, "a")
    start(service, 2, "b")
    service.handle(step((1, ord("x"), Finish.NONE)))
    kinds = [Pause.SWAPPED, Pause.RECOMPUTED, Pause.RESUMED, Pause.SWAPPED]
    outgoing = service.handle(Paused(pack_i64([1, 2, 1, 99]), bytes(kinds)))
    assert outgoing == Outgoing(
        {
            "a": [TextDelta(1, "", 0, pause=Pause.SWAPPED), TextDelta(1, "", 0, pause=Pause.RESUMED)],
            "b": [TextDelta(2, "", 0, pause=Pause.RECOMPUTED)],
        },
        [],
        [],
    )
    (delta,) = service.handle(step((2, ord("y"), Finish.NONE))).deltas["b"]
    assert delta.tokens == 1


def test_the_timing_comes_with_the_last_delta(service: DetokenizerService) -> None:
    start(service, 1)
    first = service.handle(step((1, ord("x"), Finish.NONE), extras=[RowExtra(0, timing=TIMING)]))
    assert first.deltas["f"][0].timing is None
    last = service.handle(step((1, ord("y"), Finish.LENGTH), extras=[RowExtra(0, timing=TIMING)]))
    assert last.deltas["f"][0].timing == TIMING
    assert last.deltas["f"][0].text == "y"


def test_a_stop_string_ends_with_the_timing_so_far(service: DetokenizerService) -> None:
    start(service, 1, text=TextParams(stop=["xy"], timing=True))
    service.handle(step((1, ord("x"), Finish.NONE), extras=[RowExtra(0, timing=TIMING)]))
    last = service.handle(step((1, ord("y"), Finish.NONE), extras=[RowExtra(0, timing=TIMING)]))
    assert last.finished == [1]
    assert last.deltas["f"][0].timing == TIMING

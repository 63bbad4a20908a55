from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from frontend.incremental import StopScanner, TextStream, decode
from frontend.text_model import TextModel
from protocol.messages import TextParams

BOS, EOS = 256, 257
HELLO, WORLD, OK, QUESTION, USER, COLON, US, UAL, HI = range(258, 267)
WORDS = [" Hello", " world", " ok", "?\n", "\nUser", ":", "\nUs", "ual", "Hi"]


def vocabulary(strips_leading_space: bool) -> TextModel:
    """Ids 0 to 255 are the bytes, then <s> and </s> (special), then WORDS."""
    token_bytes = [bytes([byte]) for byte in range(256)] + [b"<s>", b"</s>"] + [word.encode() for word in WORDS]
    return TextModel(
        tokenizer=Tokenizer(models.BPE()),
        token_bytes=token_bytes,
        special_ids=frozenset({BOS, EOS}),
        bos_token_id=BOS,
        strips_leading_space=strips_leading_space,
    )


BYTES = vocabulary(False)
PIECES = vocabulary(True)


def deltas(
    tokens: Sequence[int], params: TextParams | None = None, prompt: Sequence[int] = (), model: TextModel = BYTES
) -> list[str]:
    stream = TextStream(model, params or TextParams(), prompt)
    return [*map(stream.push, tokens), stream.close()]


def text_of(tokens: Sequence[int], params: TextParams | None = None, prompt: Sequence[int] = ()) -> str:
    return "".join(deltas(tokens, params, prompt))


# -- characters --------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=40))
def test_any_bytes_stream_as_they_decode_at_once(data: bytes) -> None:
    assert text_of([*data]) == decode(BYTES, data) == data.decode("utf-8", "replace")


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 4)))
def test_valid_text_never_shows_a_replacement_before_its_time(text: str, cuts: list[int]) -> None:
    so_far = ""
    for delta in deltas([*text.encode()]):
        so_far += delta
        assert text.startswith(so_far)
    assert so_far == text


def test_bytes_that_become_ill_formed_do_not_stop_the_stream() -> None:
    pushed = deltas([HELLO, 0xF0, 0x9F, 0x8C, 0xB6, 0xFF, WORLD])
    assert pushed == [" Hello", "", "", "", "🌶", "\ufffd", " world", ""]


def test_a_character_in_four_tokens_appears_once_whole() -> None:
    assert deltas([*"🌶".encode()]) == ["", "", "", "🌶", ""]
    assert deltas([*"🌶".encode()[:3]]) == ["", "", "", "\ufffd"]


def test_ids_without_text_give_none() -> None:
    assert deltas([len(BYTES.token_bytes), -1, HELLO, 1 << 30]) == ["", "", " Hello", "", ""]


# -- the prompt --------------------------------------------------------------------------------------------------


def test_the_prompt_s_text_never_leaks_and_its_begun_character_is_completed() -> None:
    emoji = "🌶".encode()
    prompt = [*b"Hello world ", *emoji[:2]]
    expected = ["", "🌶", " ok", ""]
    assert deltas([*emoji[2:], OK], prompt=prompt) == expected
    assert deltas([*emoji[2:], OK], prompt=prompt[-4:]) == expected  # the last four tokens are enough


@given(prompt=st.binary(max_size=12), answer=st.text(max_size=8))
def test_valid_answers_come_out_alone(prompt: bytes, answer: str) -> None:
    """Whatever the prompt ends with, a well-formed answer is the whole text."""
    assert text_of([*answer.encode()], prompt=[*prompt]) == answer
    assert text_of([EOS, *answer.encode()], prompt=[*prompt]) == answer


@given(text=st.text(min_size=1, max_size=8), cut=st.integers(0, 32))
def test_a_text_cut_anywhere_is_continued(text: str, cut: int) -> None:
    """Prompt and answer together are the text; the character at the cut belongs to the answer."""
    data = text.encode()
    prompt, answer = data[:cut], data[cut:]
    whole = prompt.decode("utf-8", "ignore")
    assert whole + text_of([*answer], prompt=[*prompt]) == (text if answer else whole)


@pytest.mark.parametrize("prompt", [[HELLO], [*b"ab\xf0\x9f"], []])
def test_echo_starts_with_the_prompt(prompt: list[int]) -> None:
    stream = TextStream(BYTES, TextParams(echo=True, stop=["Hello"]), prompt)
    answer = stream.push(0x8C) + stream.push(0xB6) + stream.push(OK) + stream.close()
    whole = b"".join(BYTES.token_bytes[token] for token in [*prompt, 0x8C, 0xB6, OK])
    assert stream.echo + answer == whole.decode("utf-8", "replace")
    assert stream.stopped_by is None  # the prompt's text is not searched


# -- words and special tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "Hello world"), ([BOS], "Hello world"), ([HELLO, EOS], "Hello world"), ([HELLO], " Hello world")],
)
def test_sentencepiece_words_keep_their_spaces(prompt: list[int], text: str) -> None:
    assert "".join(deltas([HELLO, WORLD], prompt=prompt, model=PIECES)) == text


def test_sentencepiece_strips_one_space_only() -> None:
    assert "".join(deltas([0x20, HELLO, HELLO], model=PIECES)) == " Hello Hello"
    assert "".join(deltas([HI, HELLO], model=PIECES)) == "Hi Hello"
    assert "".join(deltas([BOS, HELLO], model=PIECES)) == "Hello"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (TextParams(), " Hello world"),
        (TextParams(skip_special_tokens=True), " Hello world"),
        (TextParams(skip_special_tokens=False), " Hello<s></s> world"),
    ],
)
def test_special_tokens(params: TextParams, text: str) -> None:
    assert text_of([HELLO, BOS, EOS, WORLD], params) == text
    assert decode(BYTES, [HELLO, BOS, EOS, WORLD], params.skip_special_tokens) == text


def test_a_special_token_ends_an_incomplete_character() -> None:
    assert deltas([0xF0, 0x9F, EOS, 0x8C]) == ["", "", "\ufffd", "\ufffd", ""]


# -- stop strings ----------------------------------------------------------------------------------------------------


def test_text_before_the_stop_string_in_the_same_token_is_delivered() -> None:
    assert deltas([QUESTION, HELLO], TextParams(stop=["\n"])) == ["?", "", ""]


def test_nothing_of_a_stop_string_is_shown_and_nothing_else_is_held() -> None:
    params = TextParams(stop=["\nUser:"])
    assert deltas([HI, USER, COLON], params) == ["Hi", "", "", ""]
    assert deltas([HI, US, UAL], params) == ["Hi", "", "\nUsual", ""]
    assert deltas([HI, USER], params) == ["Hi", "", "\nUser"]


def test_included_stop_string() -> None:
    params = TextParams(stop=["\nUser"], include_stop_str=True)
    stream = TextStream(BYTES, params)
    assert [stream.push(HI), stream.push(USER), stream.push(COLON), stream.close()] == ["Hi", "\nUser", "", ""]
    assert stream.stopped_by == "\nUser"


def test_a_stop_string_may_come_from_the_last_incomplete_character() -> None:
    assert deltas([HI, 0xF0], TextParams(stop=["\ufffd"])) == ["Hi", "", ""]


def stop_oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: at the first place where some stop string ends, the longest of them."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_against_the_oracle(pieces: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(stops, include)
    text = ""
    shown = ""
    for piece in pieces:
        text += piece
        shown += scanner.push(piece)
        expected, matched = stop_oracle(text, stops, include)
        assert scanner.matched == matched
        if matched is None:
            held = max(
                (k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0
            )  # the longest tail that is a proper prefix of some stop string
            assert shown == text[: len(text) - held]
        else:
            assert shown == expected
    assert shown + scanner.close() == stop_oracle(text, stops, include)[0]


def test_cost_per_token_does_not_grow_with_the_answer() -> None:
    """Counted, not timed: what the scanner keeps is shorter than its longest stop string."""
    scanner = StopScanner(["ab" * 50 + "c"], include=False)
    for _ in range(2000):
        scanner.push("ab")
        assert len(scanner._held) <= 100

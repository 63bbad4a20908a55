from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from frontend.vocab_bytes import byte_level_bytes, sentencepiece_bytes


def test_byte_level_alphabet_is_the_library_s() -> None:
    """The library's ByteLevel maps each byte of the text to one character of its alphabet."""
    assert sorted(byte_level_bytes(character)[0] for character in pre_tokenizers.ByteLevel.alphabet()) == [*range(256)]


@given(text=st.text(min_size=1))
def test_byte_level_inverts_the_library(text: str) -> None:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert b"".join(byte_level_bytes(word) for word, _ in words) == text.encode()


def test_characters_outside_the_alphabet_stand_for_themselves() -> None:
    assert byte_level_bytes("Ġ世") == b" \xe4\xb8\x96"


def test_sentencepiece_bytes() -> None:
    assert sentencepiece_bytes("▁▁Füße", is_byte=False) == "  Füße".encode()
    assert sentencepiece_bytes("<0xE4>", is_byte=True) == b"\xe4"
    assert sentencepiece_bytes("<0xE4>", is_byte=False) == b"<0xE4>"
    assert sentencepiece_bytes("<0xE4>x", is_byte=True) == b"<0xE4>x"

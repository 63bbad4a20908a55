"""The bytes that a vocabulary entry stands for: byte-level BPE and SentencePiece."""

import re

SPACE = "\u2581"  # SentencePiece writes a space as this
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[int, int]:
    """Map the code points that byte-level BPE writes to bytes, as GPT-2's encoder.py defines them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return a byte-level token's bytes; a character that the alphabet doesn't have stands for itself."""
    try:
        return token.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        return b"".join(
            bytes([_BYTE_LEVEL[code]]) if (code := ord(character)) in _BYTE_LEVEL else character.encode()
            for character in token
        )


def sentencepiece_bytes(piece: str, is_byte: bool) -> bytes:
    """Return a piece's bytes. `is_byte`: a piece that looks like <0x0A> is that byte."""
    if is_byte and (match := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE, " ").encode()

"""A TextModel from the tokenizer that a GGUF file carries."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from frontend.gguf_metadata import read_gguf_metadata
from frontend.text_model import TextModel
from frontend.vocab_bytes import SPACE, byte_level_bytes, sentencepiece_bytes
from protocol.errors import StartupError

# Token types of GGUF, as llama.cpp numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_LITERAL = (UNKNOWN, CONTROL, USER_DEFINED)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    # Digits come first: ByteLevel alone keeps " 2" together, which the model never saw.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _qwen2() -> Any:
    return _words(r"\p{N}")


def _llama3() -> Any:
    return _words(r"\p{N}{1,3}")


# tokenizer.ggml.pre, with llama.cpp's synonyms (src/llama-vocab.cpp). "default" is llama.cpp's guess for files without
# the key: wrong for most models, so it is refused.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}


def load_gguf(path: Path) -> TextModel:
    """Build the TextModel of a GGUF file.

    Raises StartupError for a tokenizer model or pre-tokenizer that we don't know, and for a broken file.
    """
    metadata = read_gguf_metadata(path)
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens: list[str] = keys.get("tokens", [])
    types: list[int] = keys.get("token_type") or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise StartupError(f"{path}: holds {len(tokens)} tokens and {len(types)} token types")
    try:
        build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(keys.get("model", ""))
        if build is None:
            raise ValueError(f"tokenizer model {keys.get('model')!r} is not gpt2 or llama")
        tokenizer, token_bytes, adds_bos = build(keys, tokens, types)
        special = [AddedToken(text, normalized=False, special=True) for text in _of(tokens, types, (UNKNOWN, CONTROL))]
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _of(tokens, types, (USER_DEFINED,))])
    except Exception as error:  # tokenizers raises bare Exception for a vocabulary that contradicts itself
        raise StartupError(f"{path}: can't load the tokenizer: {error}") from error
    ids = {name: _token_id(path, keys, name, len(tokens)) for name in ("bos", "eos", "unknown", "padding")}
    bos, eos = ids["bos"], ids["eos"]
    template_names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    templates = {
        key.partition("chat_template")[2].lstrip(".") or "default": source
        for key, source in metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(source, str)
    }
    return TextModel(
        tokenizer=tokenizer,
        token_bytes=token_bytes,
        special_ids=frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)),
        bos_token_id=bos,
        prefix_ids=[bos] if bos is not None and keys.get("add_bos_token", adds_bos) else [],
        suffix_ids=[eos] if eos is not None and keys.get("add_eos_token", False) else [],
        strips_leading_space=keys["model"] == "llama" and keys.get("add_space_prefix", True),
        chat_templates=templates,
        template_tokens={
            f"{name}_token": tokens[token] for key, name in template_names.items() if (token := ids[key]) is not None
        },
    )


def _token_id(path: Path, keys: dict[str, Any], name: str, vocab_size: int) -> int | None:
    token = keys.get(f"{name}_token_id")
    if token is not None and not 0 <= token < vocab_size:
        raise StartupError(f"{path}: {name}_token_id {token} is not below the vocabulary's size {vocab_size}")
    return token


def _of(tokens: Sequence[str], types: Sequence[int], kinds: tuple[int, ...]) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind in kinds and token]


def _byte_level(keys: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, list[bytes], bool]:
    """Byte-level BPE. The last value says whether BOS is added when the file doesn't say."""
    pre, merges = keys.get("pre"), keys.get("merges", [])
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {pre!r} is not one of {', '.join(_PRE_TOKENIZERS)}")
    if not merges:
        raise ValueError("a gpt2 tokenizer without merges")
    is_llama3 = _PRE_TOKENIZERS[pre] is _llama3
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3's reference takes a word that is a token as it is, without merging.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=is_llama3))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    token_bytes = [
        token.encode() if kind in _LITERAL else byte_level_bytes(token)
        for token, kind in zip(tokens, types, strict=True)
    ]
    return tokenizer, token_bytes, is_llama3


def _sentencepiece(keys: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, list[bytes], bool]:
    """SentencePiece's BPE, which has scores for merges: of all neighbours, join the pair whose whole scores best."""
    scores = keys.get("scores", [])
    if len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens and {len(scores)} scores")
    score_of = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind in (NORMAL, UNUSED)
    }
    unknown = tokens[keys.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_by_score(score_of),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Replace(" ", SPACE)]
    if keys.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))  # type: ignore[arg-type]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    token_bytes = [
        token.encode() if kind in _LITERAL else sentencepiece_bytes(token, kind == BYTE)
        for token, kind in zip(tokens, types, strict=True)
    ]
    return tokenizer, token_bytes, True


def _merges_by_score(score_of: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that form a piece, best first; of one piece's pairs, the longest left part first."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(score_of, key=score_of.__getitem__, reverse=True):
        for i in range(len(piece) - 1, 0, -1):
            left, right = piece[:i], piece[i:]
            if left in score_of and right in score_of:
                merges.append((left, right))
    return merges

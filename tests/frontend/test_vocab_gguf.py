import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.text_model import TextModel
from protocol.errors import StartupError

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2-greedy.json"
TEXTS = [
    "Hello world, the theory  of   things that they    thought",
    " leading space and trailing ",
    "你好、世界。今天公園",
    "emoji 🌶🌍 and 👩‍👩‍👧, Füße déjà vu, Привет",
    "1234567890 12 345, 6.78\n\n\ttabs\r\n",
    "",
    "▁ literal",
]


def sentencepiece_reference(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's bpe_model.cc in its plainest form: join the best-scored neighbours until nothing joins."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    normal = {token: i for i, token in enumerate(tokens) if kinds[i] == 1}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-scores[normal[left + right]], i)
            for i, (left, right) in enumerate(pairwise(symbols))
            if left + right in normal
        ]
        if not joins:
            break
        i = min(joins)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    byte_ids = {token: i for i, token in enumerate(tokens) if kinds[i] == 6}
    ids = []
    for symbol in symbols:
        ids += [normal[symbol]] if symbol in normal else [byte_ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_ids_equal_the_reference(
    sentencepiece: TextModel, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    assert sentencepiece.encode(text) == [1, *sentencepiece_reference(text, sentencepiece_metadata)]


@given(text=st.text("the oranywhg 🌍你好1.", max_size=40))
def test_sentencepiece_ids_equal_the_reference_on_any_text(
    sentencepiece: TextModel, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    assert sentencepiece.encode(text, False) == sentencepiece_reference(text, sentencepiece_metadata)


def test_sentencepiece_takes_its_defaults_from_llama(sentencepiece: TextModel) -> None:
    assert sentencepiece.prefix_ids == [1]
    assert sentencepiece.strips_leading_space
    assert sentencepiece.special_ids == {0, 1, 2}
    assert sentencepiece.token_bytes[3 + 0x0A] == b"\n"
    assert sentencepiece.token_bytes[1] == b"<s>"


def test_sentencepiece_space_after_a_special_token_as_in_llama_cpp(
    sentencepiece: TextModel, sentencepiece_metadata: dict[str, Any]
) -> None:
    hello = sentencepiece_reference("hello", sentencepiece_metadata)
    assert sentencepiece.encode("hello</s>hello") == [1, *hello, 2, *hello]


def test_sentencepiece_without_space_prefix(load_gguf: Any, sentencepiece_metadata: dict[str, Any]) -> None:
    model = load_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert b"".join(model.token_bytes[i] for i in model.encode("hello there", False)) == b"hello there"
    assert not model.strips_leading_space


@given(text=st.text())
def test_token_bytes_spell_the_text(byte_level: TextModel, sentencepiece: TextModel, text: str) -> None:
    assert b"".join(byte_level.token_bytes[i] for i in byte_level.encode(text, False)) == text.encode()
    spelt = b"".join(sentencepiece.token_bytes[i] for i in sentencepiece.encode(text, False))
    assert spelt == (" " + text.replace("▁", " ") if text else "").encode()


def test_token_kinds(byte_level: TextModel) -> None:
    """Control tokens are special, user-defined ones are single ids but ordinary text."""
    user_defined = byte_level.vocab_size - 2
    assert byte_level.special_ids == {0, 1, 2}
    assert byte_level.encode("a<tool_call>    b")[1:3] == [user_defined, user_defined + 1]
    assert byte_level.token_bytes[user_defined + 1] == b"    "
    assert (byte_level.bos_token_id, byte_level.prefix_ids) == (1, [])


SAMPLE = "It's 1234 in  Füße,你好!\n\n x"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 1234", " in", " ", " Füße", ",", "你好", "!", "\n\n", " x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " in", " ", " Füße", ",", "你好", "!", "\n\n", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " in", " ", " Füße", ",你好", "!\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " in", " ", " Füße", ",你好", "!\n\n", " x"]),
        ("llama3", ["It", "'s", " ", "123", "4", " in", " ", " Füße", ",你好", "!\n\n", " x"]),
    ],
)
def test_pre_tokenizers_cut_words(
    load_gguf: Any, byte_level_metadata: dict[str, Any], pre: str, words: list[str]
) -> None:
    model = load_gguf(byte_level_metadata | {"tokenizer.ggml.pre": pre})
    pieces = model.tokenizer.pre_tokenizer.pre_tokenize_str(SAMPLE)
    assert [SAMPLE[start:end] for _, (start, end) in pieces] == words


def test_llama3_adds_bos_unless_the_file_says_no(load_gguf: Any, byte_level_metadata: dict[str, Any]) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.pre": "llama-bpe"}
    assert load_gguf(metadata).encode("a")[0] != 1
    del metadata["tokenizer.ggml.add_bos_token"]
    assert load_gguf(metadata).encode("a")[0] == 1


def test_qwen2_normalises_as_its_tokenizer_did(load_gguf: Any, byte_level_metadata: dict[str, Any]) -> None:
    model = load_gguf(byte_level_metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert model.encode("de\u0301ja\u0300") == model.encode("déjà")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": None}, "without merges"),
        ({"pre": "default"}, "pre-tokenizer 'default' is not one of"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"pre": "gpt-99"}, "gpt-99"),
        ({"model": "bert"}, "'bert' is not gpt2 or llama"),
        ({"model": None}, "tokenizer model None"),
        ({"model": "llama"}, "and 0 scores"),
        ({"tokens": ["a", "b"]}, "holds 2 tokens"),
        ({"tokens": None}, "holds 0 tokens"),
        ({"merges": ["x nowhere"]}, "can't load the tokenizer"),
        ({"eos_token_id": 100_000}, "eos_token_id 100000"),
    ],
)
def test_bad_vocabularies_are_load_errors(
    load_gguf: Any, byte_level_metadata: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    metadata = byte_level_metadata | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(StartupError, match=message):
        load_gguf({key: value for key, value in metadata.items() if value is not None})


@pytest.mark.model
def test_smollm2_ids_equal_the_recorded_ones(smollm2: TextModel) -> None:
    for case in json.loads(REFERENCE.read_text())["cases"]:
        assert smollm2.encode(case["prompt_text"]) == case["prompt_ids"]
        assert smollm2.encode_chat(case["prompt_text"]) == case["prompt_ids"]

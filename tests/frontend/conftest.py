"""Tiny models' text sides, made on the spot: byte-level BPE and SentencePiece, as GGUF files and as folders."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from frontend.text_model import TextModel
from frontend.vocab import load_text_model

CORPUS = [
    "Hello world, hello there. The quick brown fox jumps over the lazy dog 1234567890 times; it's done.",
    "the theory of the thing that they thought, therefore there is nothing to say about this or those others",
    "你好、世界。今天天气很好。我们去公园吧。世界你好",
    "one  two   three    four\n\n  indented\n\tcode = code + 1\nUser: hi\nAssistant: hello",
    "Привет мир, как дела? Füße größer über Öl. déjà vu café",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Metadata = dict[str, Any]


def write_gguf(path: Path, metadata: Metadata) -> Path:
    """Write a GGUF file without tensors. Integers become uint32, lists of ints int32 arrays."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def train(pre_tokenizer: Any, alphabet: list[str], special: list[str], normalizer: Any = None) -> Metadata:
    """Return vocab (by id) and merges (as pairs) of a BPE trained on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    return {"vocab": sorted(state["vocab"], key=state["vocab"].__getitem__), "merges": state["merges"]}


@pytest.fixture(scope="session")
def byte_level_metadata() -> Metadata:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = train(byte_level, pre_tokenizers.ByteLevel.alphabet(), CONTROL)
    tokens = [*trained["vocab"], "<tool_call>", "    "]
    kinds = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL) - 2) + [4, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in trained["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> Metadata:
    """The shape of Llama 2's vocabulary: <unk> <s> </s>, 256 bytes, merged pieces by rank, then characters."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Words are cut as the real trainer does, runs of spaces are kept together.
    trained = train(pre_tokenizers.Metaspace(prepend_scheme="never"), [], [], spaces)
    merged = [*("".join(pair) for pair in trained["merges"]), "▁▁", "▁▁▁▁", "▁▁▁"]
    characters = [piece for piece in trained["vocab"] if len(piece) == 1 and piece not in "福吧公園"]
    pieces = [*dict.fromkeys(merged), *characters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
    }


LoadGguf = Callable[[Metadata], TextModel]


@pytest.fixture
def load_gguf(tmp_path: Path) -> LoadGguf:
    """Write metadata as a GGUF file and load it."""
    return lambda metadata: load_text_model(write_gguf(tmp_path / "model.gguf", metadata))


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: Metadata, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_gguf(tmp_path_factory.mktemp("bpe") / "model.gguf", byte_level_metadata))


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: Metadata, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_gguf(tmp_path_factory.mktemp("spm") / "model.gguf", sentencepiece_metadata))


@pytest.fixture
def model_folder(tmp_path: Path, byte_level_metadata: Metadata) -> Path:
    """A folder in the manner of Llama 3: byte-level, BOS from the post-processor."""
    merges = [tuple(merge.split(" ")) for merge in byte_level_metadata["tokenizer.ggml.merges"]]
    tokens = byte_level_metadata["tokenizer.ggml.tokens"][:-2]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> TextModel:
    """The real default model's text side."""
    path = os.environ.get("PAGETIDE_TEST_MODEL") or request.getfixturevalue("default_model")
    return load_text_model(path)

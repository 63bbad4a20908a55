import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from frontend.chat import ChatRenderer
from frontend.incremental import decode
from frontend.vocab import dummy_text_model, load_text_model
from protocol.errors import InvalidRequest, StartupError
from protocol.messages import ChatPrompt


def test_folder_equals_the_gguf_of_the_same_vocabulary(
    model_folder: Path, byte_level_metadata: dict[str, Any], load_gguf: Any
) -> None:
    folder = load_text_model(model_folder)
    file = load_gguf(byte_level_metadata | {"tokenizer.ggml.pre": "gpt-2"})
    text = "Hello 123 世界 🌍<|im_end|>"
    assert folder.encode(text, add_special_tokens=False) == file.encode(text)
    assert [*folder.token_bytes] == file.token_bytes[: folder.vocab_size]
    assert folder.special_ids == file.special_ids
    assert folder.chat_templates == file.chat_templates


def test_specials_of_a_folder(model_folder: Path) -> None:
    model = load_text_model(model_folder)
    assert (model.bos_token_id, model.prefix_ids, model.suffix_ids) == (0, [0], [])
    assert model.template_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_add_bos_token_goes_before_the_post_processor(model_folder: Path) -> None:
    change_config(model_folder, add_bos_token=False)
    assert load_text_model(model_folder).prefix_ids == []


def test_truncation_and_padding_of_the_file_are_ignored(model_folder: Path) -> None:
    file = model_folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(file))
    model = load_text_model(model_folder)
    assert len(model.encode("one two three four five six seven")) > 4
    assert len(model.encode("a")) == 2


def test_chat_template_sources(model_folder: Path) -> None:
    change_config(
        model_folder, chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    )
    assert load_text_model(model_folder).chat_templates == {"default": "A", "tool_use": "B"}
    (model_folder / "chat_template.jinja").write_text("C", encoding="utf-8")
    assert load_text_model(model_folder).chat_templates["default"] == "C"


def sentencepiece_folder(folder: Path, decoder: Any) -> Path:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0xE4>": 3, "▁": 4, "a": 5, "▁a": 6}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


SPM_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.mark.parametrize(
    ("decoder", "strips", "byte"),
    [
        (decoders.Sequence([*SPM_DECODER, decoders.Strip(" ", 1, 0)]), True, b"\xe4"),
        (decoders.Sequence(SPM_DECODER), False, b"\xe4"),
        (decoders.Metaspace(prepend_scheme="first"), True, b"<0xE4>"),
        (decoders.Metaspace(prepend_scheme="never"), False, b"<0xE4>"),
    ],
)
def test_sentencepiece_folder(tmp_path: Path, decoder: Any, strips: bool, byte: bytes) -> None:
    model = load_text_model(sentencepiece_folder(tmp_path, decoder))
    assert model.token_bytes == [b"<unk>", b"<s>", b"</s>", byte, b" ", b"a", b" a"]
    assert model.strips_leading_space == strips
    assert model.encode("a a") == [6, 6]


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.BPEDecoder(), decoders.Metaspace(replacement="_"), decoders.Strip(" ", 1, 0)],
)
def test_other_decoders_are_load_errors(tmp_path: Path, decoder: Any) -> None:
    with pytest.raises(StartupError, match="decoder"):
        load_text_model(sentencepiece_folder(tmp_path, decoder))


def test_unreadable_folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (model_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
        load_text_model(model_folder)
    (model_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load_text_model(model_folder)
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        load_text_model(tmp_path_factory.mktemp("empty"))
    with pytest.raises(StartupError, match="no such file"):
        load_text_model(model_folder / "none")


def test_missing_decoder_is_a_load_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match="decoder"):
        load_text_model(tmp_path)


def test_a_model_without_text() -> None:
    model = dummy_text_model(300)
    assert model.vocab_size == 300
    assert decode(model, [7, 299, 0]) == " w7 w299 w0"
    with pytest.raises(InvalidRequest, match="dummy weights: token ids only"):
        model.encode("hello")
    with pytest.raises(InvalidRequest, match="dummy weights: token ids only"):
        ChatRenderer(model.chat_templates, model.template_tokens).render(
            ChatPrompt([{"role": "user", "content": "hello"}]), model.hide_special_tokens
        )

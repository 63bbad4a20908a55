"""Loading a TextModel: from a GGUF file, or from a folder with tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from frontend.text_model import NO_TEXT, NoText, TextModel
from frontend.vocab_bytes import SPACE, byte_level_bytes, sentencepiece_bytes
from frontend.vocab_gguf import load_gguf
from protocol.errors import StartupError


def load_text_model(path: str | Path) -> TextModel:
    """Load the tokenizer of a model: `path` is a GGUF file or a folder with tokenizer.json.

    Raises StartupError if there is none, or none that we can load exactly.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise StartupError(f"{path}: no such file or folder")
    return load_gguf(path)


def dummy_text_model(vocab_size: int) -> TextModel:
    """The text side of a model without text: token 7 is ` w7`. Text and chats are refused."""
    refusal = "{{ raise_exception('" + NO_TEXT + "') }}"
    return NoText(
        tokenizer=Tokenizer(WordLevel({}, unk_token="")),
        token_bytes=[b" w%d" % token for token in range(vocab_size)],
        special_ids=frozenset(),
        chat_templates={"default": refusal},
    )


def _load_folder(folder: Path) -> TextModel:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"{folder}: has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise StartupError(f"{file}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    token_bytes, strips_leading_space = _token_bytes(file, tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    template_tokens = _template_tokens(_read_json(folder / "special_tokens_map.json") | config)
    bos = tokenizer.token_to_id(template_tokens["bos_token"]) if "bos_token" in template_tokens else None
    prefix, suffix = _added_around(file, tokenizer)
    if bos is not None and isinstance(adds_bos := config.get("add_bos_token"), bool):
        prefix = [bos] if adds_bos else []
    return TextModel(
        tokenizer=tokenizer,
        token_bytes=token_bytes,
        special_ids=frozenset(i for i, token in added.items() if token.special),
        bos_token_id=bos,
        prefix_ids=prefix,
        suffix_ids=suffix,
        strips_leading_space=strips_leading_space,
        chat_templates=_chat_templates(folder, config),
        template_tokens=template_tokens,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: holds no JSON object")
    return value


def _token_bytes(file: Path, tokenizer: Tokenizer) -> tuple[list[bytes], bool]:
    """Return each id's bytes, and whether a text's first space is stripped. The decoder says how tokens are spelt."""
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = {step["type"]: step for step in state.get("decoders", [state]) if "type" in step}
    known = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    is_byte_level = "ByteLevel" in steps
    replaces = steps.get("Replace", {})
    is_sentencepiece = "Metaspace" in steps or (replaces.get("pattern"), replaces.get("content")) == (
        {"String": SPACE},
        " ",
    )
    if not steps.keys() <= known or is_byte_level == is_sentencepiece:
        raise StartupError(f"{file}: decoder {state} is neither byte-level nor SentencePiece's")
    strip, metaspace = steps.get("Strip"), steps.get("Metaspace")
    if (strip and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0)) or (
        metaspace and metaspace["replacement"] != SPACE
    ):
        raise StartupError(f"{file}: decoder {state} is not one that we can follow exactly")
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    token_bytes = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        if i in added:
            token_bytes[i] = token.encode()
        elif is_byte_level:
            token_bytes[i] = byte_level_bytes(token)
        else:
            token_bytes[i] = sentencepiece_bytes(token, is_byte="ByteFallback" in steps)
    return token_bytes, strip is not None or (metaspace is not None and metaspace["prepend_scheme"] != "never")


def _added_around(file: Path, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer's own post-processor puts before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise StartupError(f"{file}: the post-processor changes the text's own tokens")


def _template_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like: each is a string, or an object with its content."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; chat_template.jinja goes before tokenizer_config.json."""
    source = config.get("chat_template")
    templates = {"default": source} if isinstance(source, str) else {}
    if isinstance(source, list):  # [{"name": "default", "template": "..."}, ...]
        templates = {entry["name"]: entry["template"] for entry in source if {"name", "template"} <= entry.keys()}
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates

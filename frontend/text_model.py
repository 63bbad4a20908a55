"""What text is to a model: text to token ids, token ids to bytes, and the special tokens between them."""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer

from protocol.errors import ErrorCode, InvalidRequest, PagetideError
from protocol.limits import MAX_PROMPT


@dataclass(frozen=True, eq=False)
class TextModel:
    """The text side of a model file. Not thread-safe: one process, one TextModel, one thread.

    Which text is parsed for special tokens (the control tokens of a vocabulary):
    - `encode`, for raw completion prompts: yes, because people write chat templates by hand there.
    - `encode_chat`: in what the chat template wrote, yes; in what a user wrote, no. The caller passes every string
      of the conversation through `hide_special_tokens` before it renders the template.
    """

    tokenizer: Tokenizer
    token_bytes: Sequence[bytes]  # by id: what the token adds to a text, exactly; a special token's literal text
    special_ids: frozenset[int]
    bos_token_id: int | None = None
    prefix_ids: Sequence[int] = ()  # what add_special_tokens puts in front, mostly BOS or nothing
    suffix_ids: Sequence[int] = ()
    strips_leading_space: bool = False  # SentencePiece: the space before a text's first word is not part of it
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # jinja source by name: "default", "tool_use"
    template_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token", "eos_token", ... for templates

    _special_pattern: re.Pattern[str] | None = field(init=False, default=None)
    _hidden_pattern: re.Pattern[str] = field(init=False)
    _hidden: tuple[str, str] = field(init=False)  # what stands around a hidden token's hex digits
    _aliases: dict[str, str] = field(init=False, default_factory=dict)  # special token's text -> alias
    _alias_ids: dict[int, int] = field(init=False, default_factory=dict)  # alias's id -> special token's id

    def __post_init__(self) -> None:
        # Nobody can type these marks by chance or on purpose: they are drawn at start and never leave the process.
        mark = secrets.token_hex(8)
        opening, closing = f"\ue000{mark}\ue001", "\ue002"
        object.__setattr__(self, "_hidden", (opening, closing))
        object.__setattr__(self, "_hidden_pattern", re.compile(f"{opening}([0-9a-f]*){closing}"))
        self._add_aliases(mark)
        if self._aliases:
            longest_first = sorted(self._aliases, key=len, reverse=True)
            object.__setattr__(self, "_special_pattern", re.compile("|".join(map(re.escape, longest_first))))

    def _add_aliases(self, mark: str) -> None:
        """Give each special token a second, non-special name that only this process knows; see `encode_chat`."""
        names, tokens = {}, []
        for token_id, token in self.tokenizer.get_added_tokens_decoder().items():
            if token_id in self.special_ids and token.content:
                alias = f"\ue003{mark}:{token_id}\ue004"
                names[alias] = token_id
                self._aliases[token.content] = alias
                tokens.append(AddedToken(alias, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False))
        self.tokenizer.add_tokens(tokens)
        for alias, token_id in names.items():
            alias_id = self.tokenizer.token_to_id(alias)
            assert alias_id is not None
            self._alias_ids[alias_id] = token_id

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the largest id plus one."""
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a raw prompt; text that spells a special token becomes that token.

        `add_special_tokens` adds BOS and EOS as the model file says, but never a second one: a prompt that starts
        with BOS keeps the one it has. Raises PagetideError for text that is not valid Unicode or too long.
        """
        ids = self._tokenize(text)
        if add_special_tokens:
            prefix, suffix = list(self.prefix_ids), list(self.suffix_ids)
            if ids[: len(prefix)] != prefix:
                ids = prefix + ids
            if suffix and ids[-len(suffix) :] != suffix:
                ids += suffix
        return ids

    def hide_special_tokens(self, text: str) -> str:
        """Replace each special token's text, so that `encode_chat` takes it for ordinary characters."""
        if self._special_pattern is None:
            return text
        opening, closing = self._hidden
        return self._special_pattern.sub(lambda match: f"{opening}{match[0].encode().hex()}{closing}", text)

    def encode_chat(self, rendered: str) -> list[int]:
        """Tokenise a rendered chat template; nothing is added, since BOS is the template's business.

        Without hidden tokens this is the plain encoding. With them, the template's own markers become aliases, which
        the tokenizer still recognises while it takes the special tokens' real names as text. So the pre-tokenizer
        sees exactly the characters of the conversation, across the borders between template and user text.
        Raises PagetideError for text that is not valid Unicode or too long.
        """
        if self._hidden[0] not in rendered or self._special_pattern is None:
            return self._tokenize(rendered, "messages")
        aliased = self._special_pattern.sub(lambda match: self._aliases[match[0]], rendered)
        revealed = self._hidden_pattern.sub(lambda match: bytes.fromhex(match[1]).decode(), aliased)
        self.tokenizer.encode_special_tokens = True
        try:
            ids = self._tokenize(revealed, "messages")
        finally:
            self.tokenizer.encode_special_tokens = False
        return [self._alias_ids.get(token, token) for token in ids]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return each token's text by itself, with U+FFFD where it is not whole characters."""
        return [self.token_bytes[token].decode("utf-8", "replace") for token in ids]

    def _tokenize(self, text: str, param: str = "prompt") -> list[int]:
        check_length(len(text), "characters", param)
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError) as error:  # what the library raises for a lone surrogate
            raise InvalidRequest("the text is not valid Unicode: it holds a lone surrogate", param) from error


NO_TEXT = "dummy weights: token ids only"


class NoText(TextModel):
    """Of a model with random weights: there is no text to make tokens from."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raise InvalidRequest."""
        raise InvalidRequest(NO_TEXT, "prompt")


def check_length(count: int, what: str, param: str) -> None:
    """Raise PagetideError for more than any context holds, which would take long and fit into no message."""
    if count > MAX_PROMPT:
        message = f"{param} has {count} {what}; at most {MAX_PROMPT} are taken"
        raise PagetideError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param)

"""The tokenizer process's logic: requests with text or chat messages become requests with token ids."""

import logging

import msgspec

from frontend.chat import ChatRenderer
from frontend.incremental import decode
from frontend.text_model import TextModel, check_length
from protocol.errors import ErrorCode, InvalidRequest, PagetideError
from protocol.limits import MAX_CHOICES
from protocol.messages import (
    ChatPrompt,
    Detokenize,
    Detokenized,
    Prompt,
    Rejected,
    Submit,
    SubmitText,
    TextPrompt,
    Tokenize,
    Tokenized,
    pack_i32,
    unpack_i32,
)

_log = logging.getLogger("pagetide.tokenizer")

TokenizerRequest = SubmitText | Tokenize | Detokenize
TokenizerReply = Tokenized | Detokenized | Rejected


class TokenizerService:
    """Answers one message at a time; knows nothing of sockets and keeps nothing between messages."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._chat = ChatRenderer(model.chat_templates, model.template_tokens)

    def handle(self, message: TokenizerRequest, frontend: str) -> list[Submit | TokenizerReply]:
        """Return a Submit for each choice, to be sent to the core, or replies to the frontend that asked.

        A bad request becomes a Rejected (one per choice): nothing that a message holds makes this raise.
        """
        try:
            match message:
                case SubmitText():
                    return [*self._submits(message, frontend)]
                case Tokenize():
                    ids = self._encode(message.prompt)
                    return [Tokenized(message.request_id, pack_i32(ids), self._model.pieces(ids))]
                case Detokenize():
                    ids = self._check_ids(message.ids, "tokens")
                    check_length(sum(len(self._model.token_bytes[token]) for token in ids), "bytes of text", "tokens")
                    return [Detokenized(message.request_id, decode(self._model, ids))]
        except PagetideError as error:
            return _reject(message, error.code, error.message, error.param)
        except Exception as error:  # a fault of ours: still this request's alone
            _log.exception("request %d: %s", message.request_id, type(message).__name__)
            return _reject(message, ErrorCode.INTERNAL_ERROR, f"the tokenizer failed: {type(error).__name__}", None)

    def _submits(self, message: SubmitText, frontend: str) -> list[Submit]:
        if not 1 <= message.choices <= MAX_CHOICES:
            raise InvalidRequest(f"n must be 1 to {MAX_CHOICES}", "n")
        prompt = pack_i32(self._encode(message.prompt))
        return [
            Submit(
                request_id=message.request_id + choice,
                prompt=prompt,
                sampling=msgspec.structs.replace(message.sampling, choice=choice),
                text=message.text,
                frontend=frontend,
                detokenizer=message.detokenizer,
                priority=message.priority,
                cache_salt=message.cache_salt,
            )
            for choice in range(message.choices)
        ]

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's ids: an empty prompt is BOS alone where the model has BOS. Raises PagetideError."""
        match prompt:
            case TextPrompt():
                ids = self._model.encode(prompt.text, prompt.add_special_tokens)
            case ChatPrompt():
                ids = self._model.encode_chat(self._chat.render(prompt, self._model.hide_special_tokens))
            case _:
                ids = self._check_ids(prompt.ids, "prompt")
        if ids:
            return ids
        if self._model.bos_token_id is None:
            raise InvalidRequest("the prompt is empty, and this model has no BOS token to start from", "prompt")
        return [self._model.bos_token_id]

    def _check_ids(self, data: bytes, param: str) -> list[int]:
        if len(data) % 4:
            raise InvalidRequest("token ids are not whole 32-bit integers", param)
        check_length(len(data) // 4, "token ids", param)
        ids = unpack_i32(data).tolist()
        size = self._model.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            wrong = next(token for token in ids if not 0 <= token < size)
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary: 0 to {size - 1}", param)
        return ids


def _reject(message: TokenizerRequest, code: ErrorCode, text: str, param: str | None) -> list[Submit | TokenizerReply]:
    choices = min(max(message.choices, 1), MAX_CHOICES) if isinstance(message, SubmitText) else 1
    return [Rejected(message.request_id + choice, code, text, param) for choice in range(choices)]

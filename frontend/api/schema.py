"""The request bodies: every field is honoured (a field of a struct here), refused or ignored; no other is taken.

The extensions beyond OpenAI's fields have the names and meanings that vLLM gave them. docs/API.md lists all fields, and
a test compares it with this file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from protocol.errors import InvalidRequest
from protocol.limits import MAX_LOGPROBS, MAX_PROMPT, check_sampling, check_text
from protocol.messages import ChatPrompt, Prompt, SamplingParams, TextParams, TextPrompt, TokenPrompt, pack_i32

MAX_N = 64
MAX_ANSWERS = 256  # prompts times n
MAX_COMPLETION_LOGPROBS = 5
MAX_DEPTH = 64  # nesting of JSON that goes to the chat template
MAX_VALUES = 200_000  # and how many values it has
MAX_CACHE_SALT = 256  # characters

# Fields that change nothing about the answer's tokens.
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
}


class Refusal(NamedTuple):
    """Why a field is refused, and the values that ask for nothing and are let through."""

    reason: str
    harmless: Sequence[Any] = ()


REFUSED = {
    "audio": Refusal("audio output is not supported"),
    "function_call": Refusal("deprecated; use tool_choice", ("none", "auto")),
    "functions": Refusal("deprecated; use tools", ([],)),
    "modalities": Refusal("only text is supported", (["text"],)),
    "moderation": Refusal("there is no moderation"),
    "reasoning_effort": Refusal("not supported; a model's own switch may be in chat_template_kwargs", ("none",)),
    "response_format": Refusal("structured output can't be enforced: only the type text", ({"type": "text"},)),
    "suffix": Refusal("insertion is not supported", ("",)),
    "verbosity": Refusal("not supported", ("medium",)),
    "web_search_options": Refusal("there is no web search"),
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream brings besides the answer."""

    include_usage: bool = False
    include_pauses: bool = False  # comments that tell when the request is paused and when it runs again
    include_obfuscation: bool = False  # padding against traffic analysis: accepted, none is sent


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both generation endpoints take."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[int, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timing: bool = False

    @property
    def is_echo(self) -> bool:
        """Whether the answer starts with the prompt."""
        return False

    @property
    def logprobs_count(self) -> int:
        """How many alternatives each generated token is listed with; -1: no logprobs."""
        return -1

    @property
    def answer_limit(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        return "max_tokens", self.max_tokens

    def check(self) -> None:
        """Check what the engine doesn't know of. Raises InvalidRequest."""
        _check("n", self.n, 1, MAX_N)
        _check("priority", self.priority, -(2**31), 2**31 - 1)
        _check("seed", self.seed or 0, -(2**63), 2**63 - 1)
        _check("length of cache_salt", len(self.cache_salt), 0, MAX_CACHE_SALT, "cache_salt")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None:
            _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
            if self.stream:
                raise InvalidRequest("prompt_logprobs is for answers that are not streamed", "prompt_logprobs")
        name, max_tokens = self.answer_limit
        _check(name, 1 if max_tokens is None else max_tokens, 1, 2**31 - 1)

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return what to generate from, each `n` times. Raises InvalidRequest."""
        raise NotImplementedError

    def text_params(self) -> TextParams:
        """What the detokenizer is to do. Raises InvalidRequest."""
        params = TextParams(
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            include_stop_str=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            echo=self.is_echo,
            notices=self.stream_options is not None and self.stream_options.include_pauses,
            timing=self.timing,
        )
        check_text(params)
        return params

    def sampling_params(self, vocab_size: int, random_seed: int) -> SamplingParams:
        """What the core is to do, with `random_seed` where the request has none. Raises InvalidRequest."""
        self.check()
        params = SamplingParams(
            max_tokens=self.answer_limit[1],
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=random_seed if self.seed is None else self.seed % 2**63,
            logit_bias=self.logit_bias,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs_count,
            prompt_logprobs=max(
                -1 if self.prompt_logprobs is None else self.prompt_logprobs,
                self.logprobs_count if self.is_echo else -1,
            ),
        )
        check_sampling(params, vocab_size)
        return params


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of /v1/completions. A prompt is a text or token ids; several make a batch."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def is_echo(self) -> bool:
        """Whether the answer starts with the prompt."""
        return self.echo

    @property
    def logprobs_count(self) -> int:
        """How many alternatives each generated token is listed with; -1: no logprobs."""
        return -1 if self.logprobs is None else self.logprobs

    def check(self) -> None:
        """Check what the engine doesn't know of. Raises InvalidRequest."""
        super().check()
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of is only supported where it equals n", "best_of")
        _check("logprobs", self.logprobs or 0, 0, MAX_COMPLETION_LOGPROBS)

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return what to generate from, each `n` times. Raises InvalidRequest."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [TextPrompt(prompt, self.add_special_tokens)]
        _check("length of prompt", len(prompt), 0, MAX_PROMPT, "prompt")
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes texts, token ids and lists of token ids", "prompt")
        if kinds <= {int}:
            return [_token_prompt(prompt, vocab_size)]
        _check("number of answers, prompts times n,", len(prompt) * self.n, 1, MAX_ANSWERS, "prompt")
        if kinds == {str}:
            return [TextPrompt(str(item), self.add_special_tokens) for item in prompt]
        return [_token_prompt(item, vocab_size) for item in prompt]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def logprobs_count(self) -> int:
        """How many alternatives each generated token is listed with; -1: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def answer_limit(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    def check(self) -> None:
        """Check what the engine doesn't know of. Raises InvalidRequest."""
        super().check()
        if self.max_tokens not in (None, self.answer_limit[1]):
            raise InvalidRequest("max_tokens contradicts max_completion_tokens, which means the same", "max_tokens")
        if self.top_logprobs is not None:
            _check("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
            if not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.tool_choice not in ("none", "auto"):
            raise InvalidRequest("a tool call can't be enforced: tool_choice is none or auto", "tool_choice")

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return the conversation. Raises InvalidRequest."""
        tools = self.tools if self.tool_choice == "auto" else []
        return [_chat_prompt(self, self.messages, tools)]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize: either a prompt or messages, as they would be for generation."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    def prompts(self) -> Prompt:
        """Return what to tokenise. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens)
        return _chat_prompt(self, self.messages or [], self.tools)


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /detokenize."""

    model: str = ""
    tokens: list[int]


T = TypeVar("T", bound=msgspec.Struct)
_NULL = msgspec.Raw(b"null")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decoders: dict[type[msgspec.Struct], dict[str, msgspec.json.Decoder[Any]]] = {
    shape: {field.name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(shape)}
    for shape in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
}


def decode(body: bytes, shape: type[T]) -> T:
    """Decode a body field by field, so that each error names its field. null is as good as absent.

    Raises InvalidRequest.
    """
    try:
        fields = _fields.decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}") from error
    decoders = _decoders[shape]
    is_generation = issubclass(shape, GenerationRequest)
    values: dict[str, Any] = {}
    for name, raw in fields.items():
        if raw == _NULL or (is_generation and name in IGNORED):
            continue
        try:
            if name in decoders:
                values[name] = decoders[name].decode(raw)
            elif not is_generation or name not in REFUSED:
                raise InvalidRequest(f"there is no field {name[:64]!r}", name[:64])
            elif msgspec.json.decode(raw) not in REFUSED[name].harmless:
                raise InvalidRequest(f"{name}: {REFUSED[name].reason}", name)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name}: {error}", name) from error
    for field in msgspec.structs.fields(shape):
        if field.required and field.name not in values:
            raise InvalidRequest(f"the field {field.name} is missing", field.name)
    return shape(**values)


def _check(name: str, value: int, low: int, high: int, param: str | None = None) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"the {name} must be from {low} to {high}, not {value}", param or name)


def _check_json(name: str, value: Any) -> None:
    """Raise InvalidRequest for what can't travel on: numbers beyond 64 bits, nesting that exhausts a stack, masses."""
    level = [value]
    count = 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise InvalidRequest(f"{name} holds a number that doesn't fit into 64 bits", name)
        if not inner:
            return
        count += len(inner)
        _check(f"number of values in {name}", count, 0, MAX_VALUES, name)
        level = inner
    raise InvalidRequest(f"{name} is nested more than {MAX_DEPTH} levels deep", name)


def _chat_prompt(
    request: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> ChatPrompt:
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str):
            raise InvalidRequest(f"tools[{i}] is not a function with a name", "tools")
    arguments = request.chat_template_kwargs
    for name, value in (("messages", messages), ("tools", tools), ("chat_template_kwargs", arguments)):
        _check_json(name, value)
    return ChatPrompt(messages, tools or None, request.add_generation_prompt, request.continue_final_message, arguments)


def _token_prompt(ids: Any, vocab_size: int) -> TokenPrompt:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {vocab_size} tokens", "prompt")
    return TokenPrompt(pack_i32(ids))

"""Every message that crosses a process boundary.

Structs are arrays on the wire (`array_like`), tagged with their class name. Evolve them by adding fields with a
default at the end; anything else is a new `PROTOCOL_VERSION`. Bulk integers travel as little-endian bytes:
token ids as int32, request ids as int64 (`pack_i32`, `pack_i64`).

The life of a request, message by message:

    frontend  -> tokenizer    SubmitText            one message for all n choices of one prompt
    tokenizer -> core         Submit                one per choice
    core      -> tokenizer    Accepted | Rejected   sent by the intake thread, passed on to the frontend
    core      -> detokenizer  Started, StepOutput*  Started always precedes the first StepOutput of a request;
                              Abort                 of started requests that the frontend has dropped
                              Paused                of requests that asked for notices
    detokenizer -> frontend   TextDeltas*           exactly one TextDelta of a request has a `finish`
    frontend  -> tokenizer -> core   Abort          same path as the submit, so it can't overtake it
    detokenizer -> core       Abort                 after a stop string; the request was running, so it can't overtake
"""

from enum import IntEnum
from typing import Any

import msgspec

from protocol.columns import pack_i32 as pack_i32
from protocol.columns import pack_i64 as pack_i64
from protocol.columns import unpack_i32 as unpack_i32
from protocol.columns import unpack_i64 as unpack_i64
from protocol.errors import ErrorCode

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of everything that is sent by itself."""


class Part(msgspec.Struct, array_like=True, frozen=True):
    """Base of what only travels inside a message."""


# -- connection ------------------------------------------------------------------------------------------------


class Role(IntEnum):
    """What a process is to the engine."""

    CORE = 0
    TOKENIZER = 1
    DETOKENIZER = 2
    FRONTEND = 3


class Hello(Message, frozen=True):
    """First message on every connection. `endpoint` is where the sender serves others, if it does."""

    protocol_version: int
    role: Role
    identity: str
    pid: int
    endpoint: str = ""


class ModelInfo(Part, frozen=True):
    """What a frontend may know of the model. `path` is the file or folder to read the tokenizer from."""

    name: str
    path: str
    vocab_size: int
    max_context: int  # tokens, prompt and answer together
    created: int  # unix seconds
    eos_token_ids: list[int]
    kv_cache_dtype: str = ""  # the format that KV is stored in
    is_dummy: bool = False  # random weights: there is no text, only token ids


class Limits(Part, frozen=True):
    """Bounds that frontends check before they send anything, and the core checks again."""

    max_waiting_requests: int
    max_waiting_tokens: int


class Welcome(Message, frozen=True):
    """The answer to a Hello from a process that takes the sender in."""

    protocol_version: int
    identity: str
    model: ModelInfo
    limits: Limits


class Refused(Message, frozen=True):
    """The answer to a Hello that can't be taken. The sender ends with `reason` as its last line."""

    reason: str


class Ping(Message, frozen=True):
    """Sent to each peer of a server twice a second, so that a dead peer is noticed while nothing else is sent."""


# -- requests --------------------------------------------------------------------------------------------------


class SamplingParams(Part, frozen=True):
    """How tokens are chosen. Ranges are checked by the frontend and again by the core (`engine_core/intake.py`)."""

    max_tokens: int | None = None  # None: whatever the context leaves
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63; the frontend draws one if the user gave none
    choice: int = 0  # index among the n choices; draws depend on (seed, choice, position) only
    logit_bias: dict[int, float] = {}
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int = -1  # -1: off; k: log-probability of the token and of the k best
    prompt_logprobs: int = -1  # the same for the prompt's tokens; such a request doesn't read the prefix cache


class TextParams(Part, frozen=True):
    """What the detokenizer does with a request's tokens."""

    stop: list[str] = []
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    echo: bool = False  # the first delta starts with the prompt's text
    notices: bool = False  # tell when it is paused, and when it runs again
    timing: bool = False  # the last delta has a Timing even if a stop string ends the answer


class TextPrompt(Part, tag="text", frozen=True):
    """A raw completion prompt; specials are added as the model file says."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(Part, tag="ids", frozen=True):
    """Token ids, int32 bytes: passed through as they are."""

    ids: bytes


class ChatPrompt(Part, tag="chat", frozen=True):
    """A conversation, rendered with the model's chat template. Message and tool objects are OpenAI's."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class SubmitText(Message, frozen=True):
    """A frontend's request. Its choices get the ids `request_id`, `request_id + 1`, ... `request_id + choices - 1`."""

    request_id: int
    choices: int
    prompt: Prompt
    sampling: SamplingParams
    text: TextParams
    detokenizer: str  # identity of the detokenizer that the frontend listens to
    priority: int = 0  # lower runs first
    cache_salt: str = ""


class Submit(Message, frozen=True):
    """A tokenised request, one per choice. `generated` are tokens that an earlier life of it has already produced."""

    request_id: int
    prompt: bytes  # int32
    sampling: SamplingParams
    text: TextParams
    frontend: str  # identity
    detokenizer: str  # identity
    generated: bytes = b""  # int32
    priority: int = 0
    cache_salt: str = ""


class Abort(Message, frozen=True):
    """Drop these requests, in whatever state; unknown ids are ignored."""

    request_ids: bytes  # int64
    is_finish: bool = False  # their answers are complete: a stop string has ended them


class Accepted(Message, frozen=True):
    """The core has queued the request; exactly one TextDelta with a `finish` will follow."""

    request_id: int
    prompt_tokens: int
    frontend: str = ""


class Rejected(Message, frozen=True):
    """The request (or Tokenize, Detokenize) was refused before it ran; nothing else follows."""

    request_id: int
    code: ErrorCode
    message: str
    param: str | None = None
    frontend: str = ""


class Tokenize(Message, frozen=True):
    """Ask a tokenizer for token ids."""

    request_id: int
    prompt: Prompt


class Tokenized(Message, frozen=True):
    """Answer to Tokenize. `pieces` is each token's text, with U+FFFD where it is not whole characters."""

    request_id: int
    ids: bytes  # int32
    pieces: list[str]


class Detokenize(Message, frozen=True):
    """Ask a tokenizer for the text of token ids."""

    request_id: int
    ids: bytes  # int32


class Detokenized(Message, frozen=True):
    """Answer to Detokenize."""

    request_id: int
    text: str


# -- output ----------------------------------------------------------------------------------------------------


class Finish(IntEnum):
    """Why a request ended; NONE while it runs."""

    NONE = 0
    STOP = 1  # EOS, a stop token or a stop string
    LENGTH = 2  # max_tokens, or the context is full
    ERROR = 3


class TopLogprobs(Part, frozen=True):
    """Log-probabilities at one position: of the token itself and of the best others, best first."""

    token: int
    logprob: float
    top_ids: bytes  # int32
    top_logprobs: list[float]
    rank: int = 0


class Timing(Part, frozen=True):
    """Where a request's time in the core went, by state. All in seconds; their sum is `ended - arrival`."""

    arrival: float  # CLOCK_MONOTONIC, one clock for all processes of a machine
    ended: float
    queued: float  # before it ran, and after its KV was dropped
    prefill: float
    decode: float
    swapping_out: float  # its KV is being copied
    swapped: float
    swapping_in: float
    swaps: int = 0  # how often it was swapped out
    recomputes: int = 0  # how often its KV was dropped


class Pause(IntEnum):
    """What has become of a running request: it goes on, or it waits with its KV swapped out or dropped."""

    RESUMED = 0
    SWAPPED = 1
    RECOMPUTED = 2


class Paused(Message, frozen=True):
    """What has become of requests that asked to be told, in order of `kinds`, which are values of Pause."""

    request_ids: bytes  # int64
    kinds: bytes  # uint8


class Started(Message, frozen=True):
    """A request runs for the first time. `prompt` holds all ids if the text is echoed, else the last few."""

    request_id: int
    frontend: str
    prompt: bytes  # int32
    text: TextParams
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: int = -1


class RowExtra(Part, frozen=True):
    """What only few rows of a StepOutput carry. `row` indexes its columns."""

    row: int
    logprobs: TopLogprobs | None = None
    prompt_logprobs: list[TopLogprobs | None] | None = None  # once, with the first token
    error_code: ErrorCode | None = None
    error: str = ""
    timing: Timing | None = None  # when it ends


class StepOutput(Message, frozen=True):
    """What one step produced, by columns: row i is token `tokens[i]` of request `ids[i]`, ended if `finish[i]`.
    A token of -1 stands for none (the request ended without a further token).
    """

    step: int
    ids: bytes  # int64
    tokens: bytes  # int32
    finish: bytes  # uint8, values of Finish
    extras: list[RowExtra] = []


class TokenText(Part, frozen=True):
    """A token for the logprobs of an answer: its id, its true bytes, its log-probability."""

    token: int
    bytes: bytes
    logprob: float
    offset: int = 0  # of a chosen token: how many characters its prompt's (if echoed) and answer's text has before it


class TokenLogprobs(Part, frozen=True):
    """The logprobs entry of one token of an answer or prompt. `chosen.logprob` of a prompt's first token is NaN."""

    chosen: TokenText
    top: list[TokenText]


class TextDelta(Part, frozen=True):
    """New text of one request. Several steps may be merged into one delta."""

    request_id: int
    text: str
    tokens: int  # how many generated tokens this delta stands for
    finish: Finish = Finish.NONE
    stop_reason: int | str | None = None  # the stop token or string that ended it
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0
    error_code: ErrorCode | None = None
    error: str = ""
    timing: Timing | None = None  # in the last delta, unless a stop string has ended what asked for none
    pause: Pause | None = None  # then it tells this alone: there is no text


class TextDeltas(Message, frozen=True):
    """All that a step gave one frontend."""

    deltas: list[TextDelta]

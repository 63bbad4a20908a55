"""What a request may ask for. Frontends check it before they send, the core checks again before it queues.

Sizes are checked before anything is done per item, so a refusal costs the same however large the request is. Errors
name fields as OpenAI's API and its common extensions do.
"""

from protocol.errors import InvalidRequest
from protocol.messages import SamplingParams, TextParams

MAX_TOKENS = 2**31 - 1
MAX_PROMPT = 1 << 20  # token ids, or characters of a text: bounds the time to tokenise and the size of messages
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 18  # of all tokens of a prompt: with 256 bytes for each they fill a message
LOGPROB_FLOOR = -9999.0  # stands for minus infinity, which JSON doesn't have
MAX_LOGIT_BIAS = 4096
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("min_tokens", 0, MAX_TOKENS),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", -1, MAX_TOKENS),  # -1 and 0: off, as is anything from the vocabulary's size on
    ("min_p", 0, 1),
    ("repetition_penalty", 0.01, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", 0, MAX_SEED),
    ("logprobs", -1, MAX_LOGPROBS),
    ("prompt_logprobs", -1, MAX_LOGPROBS),
)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest, with `param` naming the field, unless `params` can be run on `vocab_size` tokens."""
    for name, low, high in _RANGES:
        _check_range(name, getattr(params, name), low, high)
    _check_range("n", params.choice + 1, 1, MAX_CHOICES)
    if params.max_tokens is not None:
        _check_range("max_tokens", params.max_tokens, 1, MAX_TOKENS)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, above max_tokens, {params.max_tokens}", "min_tokens"
            )
    _check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS)
    for token, bias in params.logit_bias.items():
        _check_token("logit_bias", token, vocab_size)
        _check_range("logit_bias", bias, -100, 100)
    _check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for token in params.stop_token_ids:
        _check_token("stop_token_ids", token, vocab_size)


def check_prompt_logprobs(params: SamplingParams, prompt_tokens: int) -> None:
    """Raise InvalidRequest unless the log-probabilities of `prompt_tokens` tokens fit into one message."""
    # A token has its own, those of the alternatives, and its text in an echo.
    most = MAX_PROMPT_LOGPROBS // (params.prompt_logprobs + 2)
    if params.prompt_logprobs >= 0 and prompt_tokens > most:
        raise InvalidRequest(
            f"prompt_logprobs of {params.prompt_logprobs} is for prompts of at most {most} tokens, not {prompt_tokens}",
            "prompt_logprobs",
        )


def check_text(params: TextParams) -> None:
    """Raise InvalidRequest, with `param` "stop", unless the stop strings are few, short and not empty."""
    _check_count("stop", len(params.stop), MAX_STOP_STRINGS)
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, not {len(stop)}", "stop")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # so that NaN is refused as well
        raise InvalidRequest(f"{name} must be from {low} to {high}, not {value}", name)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} has {count} entries; at most {most} are allowed", name)


def _check_token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name}: token id {token} is not in the vocabulary of {vocab_size} tokens", name)

"""The errors that both sides of the wire know, by code.

A code travels in `Rejected` and `Failed` messages and becomes an HTTP status in one place,
`frontend/api/errors.py`. Add codes at the end of the class; never reuse a value.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """What went wrong, as a stable string. The first group is the caller's fault, the second ours."""

    INVALID_VALUE = "invalid_value"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    QUEUE_FULL = "queue_full"
    CLIENT_TOO_SLOW = "client_too_slow"

    NON_FINITE_LOGITS = "non_finite_logits"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL_ERROR = "internal_error"


class PagetideError(Exception):
    """An error that a user of Pagetide may see. `param` names the request field or option at fault."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class InvalidRequest(PagetideError):
    """A field of a request is out of range, of the wrong type, or not supported."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(ErrorCode.INVALID_VALUE, message, param)


class StartupError(Exception):
    """The process can't start; the message is the one line that the user needs."""

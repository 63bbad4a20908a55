"""Errors become HTTP here and nowhere else: OpenAI's shape, 4xx for the caller's fault, 5xx for ours."""

import msgspec
from starlette.exceptions import HTTPException

from protocol.errors import ErrorCode, PagetideError

_STATUSES = {
    ErrorCode.INVALID_VALUE: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.CLIENT_TOO_SLOW: 408,
    ErrorCode.NON_FINITE_LOGITS: 500,
    ErrorCode.ENGINE_UNAVAILABLE: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.INTERNAL_ERROR: 500,
}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# What HTTP itself finds wrong has no ErrorCode, as it never crosses a process boundary.
_HTTP_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
RETRY_AFTER = "1"  # seconds; slots come free with every request that ends
INTERNAL_MESSAGE = "an internal error; the server's log tells more"


class ClientGone(Exception):
    """The client closed the connection: nobody is there to be told."""


class HttpError(msgspec.Struct, frozen=True):
    """An error as it is answered. `body` is JSON, the value of "error" included."""

    status: int
    body: bytes
    headers: dict[str, str]


def describe(error: Exception) -> HttpError:
    """Turn any exception into its answer. What isn't meant for users gets a 500 that says nothing of the inside."""
    headers: dict[str, str] = {}
    param = None
    if isinstance(error, PagetideError):
        status, message, code, param = _STATUSES[error.code], error.message, str(error.code), error.param
    elif isinstance(error, HTTPException):
        status, message, code = error.status_code, error.detail, _HTTP_CODES.get(error.status_code, "http_error")
        headers.update(error.headers or {})
    else:
        status, message, code = 500, INTERNAL_MESSAGE, str(ErrorCode.INTERNAL_ERROR)
    if status in (429, 503):
        headers["retry-after"] = RETRY_AFTER
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message or code, "type": kind, "param": param, "code": code}}
    return HttpError(status, msgspec.json.encode(body), headers)

"""The HTTP routes, and what they share: keys, CORS, request ids, errors, counting."""

import hmac
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api import schema
from frontend.api.answer import ChatShape, Shape
from frontend.api.errors import ClientGone, describe
from frontend.api.generate import Answer, Attended, Job
from frontend.engine_client import EngineClient
from frontend.metrics import CONTENT_TYPE, Metrics
from protocol.codec import as_objects
from protocol.errors import ErrorCode, PagetideError
from protocol.messages import unpack_i32

_log = logging.getLogger("pagetide.api")
MAX_REQUEST_ID = 128


class ApiConfig(msgspec.Struct, frozen=True):
    """How an API server listens, and to whom it answers."""

    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False  # other API servers listen there as well
    api_key: str = ""  # empty: none is asked for
    cors_origins: tuple[str, ...] = ()  # "*": any
    aliases: tuple[str, ...] = ()  # further names of the model
    max_body: int = 16 << 20  # bytes
    grace: float = 3.0  # seconds that running requests have to end after a SIGTERM


class Api:
    """The endpoints of one API server."""

    def __init__(self, config: ApiConfig, client: EngineClient) -> None:
        self._config, self._client = config, client
        self._names = (client.model.name, *config.aliases)
        self._metrics = Metrics(lambda: client.status, client.health)
        self._attended: set[Attended] = set()
        router = Router(
            [
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/status", self.status),
            ],
            redirect_slashes=False,
        )
        self.app: ASGIApp = _Gate(router, config.api_key, self._metrics)
        if config.cors_origins:
            self.app = CORSMiddleware(
                self.app,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )

    def interrupt(self, error: PagetideError) -> None:
        """End all running generations with an error: an event in a stream, else the response."""
        for attended in list(self._attended):
            attended.interrupt(error)

    # -- generation --------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Answer:
        """POST /v1/chat/completions."""
        return self._answer(request, await self._decode(request, schema.ChatRequest), ChatShape)

    async def complete(self, request: Request) -> Answer:
        """POST /v1/completions."""
        return self._answer(request, await self._decode(request, schema.CompletionRequest), Shape)

    def _answer(self, request: Request, body: schema.GenerationRequest, shape: type[Shape]) -> Answer:
        model = self._client.model
        # In this order: `prompts` relies on n, and both say what is wrong before anything is sent to the engine.
        sampling = body.sampling_params(model.vocab_size, secrets.randbits(63))
        job = Job(
            prompts=body.prompts(model.vocab_size),
            sampling=sampling,
            text=body.text_params(),
            n=body.n,
            priority=body.priority,
            cache_salt=body.cache_salt,
            shape=shape(
                secrets.token_hex(12),
                int(time.time()),
                model.name,
                sampling.logprobs,
                body.is_echo,
                body.prompt_logprobs,
                body.timing,
            ),
            is_stream=body.stream,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            arrival=request.scope["arrival"],
        )
        return Answer(self._client, self._metrics, self._attended, job)

    async def _decode(self, request: Request, shape: type[schema.T]) -> schema.T:
        """Read and check the body. Raises PagetideError, HTTPException, ClientGone."""
        body = schema.decode(await _read(request, self._config.max_body), shape)
        self._check_model(getattr(body, "model", ""))
        return body

    def _check_model(self, name: str) -> None:
        if name and name not in self._names:
            served = ", ".join(self._names)
            message = f"the model {name[:200]!r} is not served here; this server has: {served}"
            raise PagetideError(ErrorCode.MODEL_NOT_FOUND, message, "model")

    # -- text --------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize, in vLLM's shape."""
        body = await self._decode(request, schema.TokenizeRequest)
        answer = await self._client.tokenize(body.prompts())
        ids = unpack_i32(answer.ids).tolist()
        pieces = answer.pieces if body.return_token_strs else None
        max_context = self._client.model.max_context
        return _json({"count": len(ids), "max_model_len": max_context, "tokens": ids, "token_strs": pieces})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize, in vLLM's shape."""
        body = await self._decode(request, schema.DetokenizeRequest)
        return _json({"prompt": await self._client.detokenize(body.tokens)})

    # -- about the server --------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._describe_model(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        self._check_model(name)
        return _json(self._describe_model(name or self._names[0]))

    def _describe_model(self, name: str) -> dict[str, Any]:
        model = self._client.model
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "pagetide",
            "root": model.name,
            "max_model_len": model.max_context,
        }

    async def health(self, request: Request) -> Response:
        """GET /health: 200 if requests can be served. Raises PagetideError, a 503, if not."""
        reason = self._client.health()
        if reason is not None:
            raise PagetideError(ErrorCode.ENGINE_UNAVAILABLE, reason)
        return _json({"status": "ok"} | ({"weights": "dummy"} if self._client.model.is_dummy else {}))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: Prometheus's text format."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        """GET /status: the core's newest heartbeat, and what `health` says of it."""
        status = self._client.status
        if status is None:
            raise PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the engine core has not reported yet")
        return _json({"health": self._client.health() or "ok", **as_objects(status)})


class _Gate:
    """What every request passes: its id, the key, the errors, the count."""

    def __init__(self, router: Router, api_key: str, metrics: Metrics) -> None:
        self._router, self._metrics = router, metrics
        self._key = f"Bearer {api_key}".encode() if api_key else b""
        self._paths = {route.path for route in router.routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        is_fit = len(given) <= MAX_REQUEST_ID and given.isascii() and given.decode().isprintable()
        request_id = given if given and is_fit else secrets.token_hex(12).encode()
        scope["arrival"] = time.monotonic()
        scope["app"] = self  # makes the router raise what it would otherwise answer as plain text
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            if scope["method"] == "OPTIONS":  # a preflight has no key; without CORS it gets no leave either
                await Response(status_code=204)(scope, receive, send_with_id)
                return
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            await self._router(scope, receive, send_with_id)
        except (ClientGone, ClientDisconnect):
            status = 499  # as nginx counts them
        except Exception as error:
            answer = describe(error)
            if answer.status == 500:
                _log.exception("request %s failed", request_id.decode())
            if status:
                raise  # the head is out; the connection breaks, which the client can't take for success
            response = Response(answer.body, answer.status, answer.headers, "application/json")
            await response(scope, receive, send_with_id)
        finally:
            self._metrics.requests.labels(self._route(scope["path"]), status).inc()

    def _route(self, path: str) -> str:
        """Return the path as a label: one of a few."""
        if path.startswith("/v1/models/"):
            return "/v1/models"
        return path if path in self._paths else "other"

    def _check_key(self, path: str, given: bytes) -> None:
        if self._key and path != "/health" and not hmac.compare_digest(given, self._key):
            message = "a key is needed: Authorization: Bearer KEY" if not given else "this key is not valid"
            raise HTTPException(401, message, {"www-authenticate": "Bearer"})


async def _read(request: Request, limit: int) -> bytes:
    """Read the body. Raises HTTPException if it is longer than `limit` bytes, as soon as that shows."""
    too_large = HTTPException(413, f"the body has more than {limit} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

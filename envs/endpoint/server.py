"""The recording endpoint: an HTTP server in which every session is one conversation with the policy. It also answers
plain questions, with a separate key of the run.

    POST /v1/chat/completions, /v1/completions      GET /v1/models, /v1/models/policy
    Authorization: Bearer KEY, of a session or of the run

Runs in the event loop of the run. Consumes: requests. Waits for: a body, at most `BODY_TIMEOUT_S`; the session's
policy. Unblocked by: the client; the end of the turn or of the session. If a client disconnects, only its handler ends:
the turn is sampled to its end, because the client may repeat the request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import hdrs, web

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EndpointConfig
from penstock.envs.endpoint.answers import Json, Writer
from penstock.envs.endpoint.requests import (
    MODEL,
    ApiError,
    ChatRequest,
    bad_request,
    check_model,
    parse_chat,
    parse_completion,
)
from penstock.envs.endpoint.session import Exchange, Questions, Session

BODY_TIMEOUT_S = 30.0
MAX_REQUEST_BYTES = 4 << 20
_SHUTDOWN_S = 1.0
# A server that listens on all addresses is reached at the loopback address.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Serves sessions. It starts with the first session; the owner closes it.

    Args:
        config: Its address.
        timeout_s: Longest wait for the next request of a session, seconds.
    """

    def __init__(self, config: EndpointConfig, timeout_s: float) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._serial = itertools.count(1)
        self._sessions: dict[str, Session] = {}
        self._questions: Questions | None = None
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._base_url = ""

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[Session]:
        """Open a session; its key is invalid afterwards.

        Raises:
            ConfigError: If it cannot listen on the address.
        """
        await self._serve()
        serial = next(self._serial)
        session = self._sessions[str(serial)] = Session(name, serial, self._base_url, self._timeout_s)
        try:
            yield session
        finally:
            del self._sessions[str(serial)]
            session.close()

    async def answer(self, questions: Questions) -> None:
        """Answer plain questions from now on.

        Raises:
            ConfigError: If it cannot listen on the address.
        """
        await self._serve()
        self._questions = questions

    async def close(self) -> None:
        """Stop serving."""
        if self._questions is not None:
            await self._questions.close()
        for session in self._sessions.values():
            session.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _serve(self) -> None:
        async with self._starting:
            if self._runner is None:
                await self._start()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_in_api_form])
        app.add_routes(
            [
                web.post("/v1/chat/completions", partial(self._complete, parse=parse_chat)),
                web.post("/v1/completions", partial(self._complete, parse=parse_completion)),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._model),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, access_log=None)
        await runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"env.endpoint: cannot listen on {host} port {port}: {error.strerror}.") from error
        self._runner = runner
        self._base_url = f"http://{_LOOPBACK.get(host, host)}:{runner.addresses[0][1]}/v1"

    def _session(self, request: web.Request) -> Session | Questions:
        scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if self._questions is not None and scheme.lower() == "bearer" and self._questions.has_key(key.strip()):
            return self._questions
        serial, _, secret = key.strip().removeprefix("pk-").partition("-")
        session = self._sessions.get(serial)
        if scheme.lower() != "bearer" or session is None or not session.has_secret(secret):
            raise ApiError(401, "Incorrect API key provided, or its session has ended.", code="invalid_api_key")
        return session

    async def _complete(self, request: web.Request, parse: Callable[[object], ChatRequest]) -> web.StreamResponse:
        session = self._session(request)
        try:
            chat_request = parse(await _read_json(request))
            exchange = session.submit(chat_request)
        except (ApiError, web.HTTPException):
            session.refused()
            raise
        headers = {"x-penstock-ignored": ", ".join(chat_request.ignored)} if chat_request.ignored else {}
        with exchange.reading():
            return await self._deliver(request, exchange, headers)

    async def _deliver(self, request: web.Request, exchange: Exchange, headers: dict[str, str]) -> web.StreamResponse:
        chat_request = exchange.request
        if chat_request.is_stream:
            return await _stream(request, exchange, headers)
        try:
            answer = await exchange.result()
        except ApiError:
            exchange.was_delivered = True
            raise
        response = web.json_response(Writer(chat_request).whole(answer), headers=headers)
        await response.prepare(request)
        await response.write_eof()
        exchange.was_delivered = True
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [_model_card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._session(request)
        check_model(request.match_info["name"])
        return web.json_response(_model_card())


async def _stream(request: web.Request, exchange: Exchange, headers: dict[str, str]) -> web.StreamResponse:
    """Stream server-sent events; a refusal before the first event is a plain error."""
    pieces, writer = exchange.pieces(), Writer(exchange.request)
    first = await anext(pieces, None)
    if first is None and exchange.error is not None:
        exchange.was_delivered = True
        raise exchange.error
    response = web.StreamResponse(headers={hdrs.CACHE_CONTROL: "no-cache", **headers})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    piece = first
    while piece is not None:
        for chunk in writer.chunks(piece):
            await response.write(_event(chunk))
        piece = await anext(pieces, None)
    try:
        for chunk in writer.last_chunks(await exchange.result()):
            await response.write(_event(chunk))
        await response.write(b"data: [DONE]\n\n")
    except ApiError as error:
        await response.write(_event(error.body))
    await response.write_eof()
    exchange.was_delivered = True
    return response


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def _read_json(request: web.Request) -> object:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        message = f"The body did not arrive within {BODY_TIMEOUT_S:g} s."
        raise ApiError(408, message, code="timeout") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}.") from None


def _model_card() -> Json:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}


@web.middleware
async def _in_api_form(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Convert every refusal, including aiohttp's own, to the API's format, and tell clients not to retry."""
    try:
        return await handler(request)
    except ApiError as refused:
        error = refused
    except web.HTTPRequestEntityTooLarge as refused:
        error = ApiError(413, f"The body is too large: {refused.text}", code="too_large")
    except web.HTTPException as refused:
        message = f"{refused.reason}: {request.method} {request.path[:200]}"
        error = ApiError(refused.status, message, code="unknown_url")
    return web.json_response(error.body, status=error.status, headers={"x-should-retry": "false"})

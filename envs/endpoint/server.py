"""The recording endpoint: an HTTP server in which every session is one run of a program. It also answers plain
questions, with a separate key of the run.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages      GET /v1/models, /v1/models/policy
    Authorization: Bearer KEY, or x-api-key: KEY, of a session or of the run

A protocol is one row of `_APIS`: how its bodies are parsed, and how its errors are written; what is parsed comes with
the writer of its answer (answers.py). All else is the same for all.

Runs in the event loop of the run. Consumes: requests. Waits for: a body, at most `BODY_TIMEOUT_S`; the session's
policy. Unblocked by: the client; the end of the turn or of the session. If a client disconnects, only its handler ends:
the turn is sampled to its end, because the client may repeat the request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from aiohttp import hdrs, web

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EndpointConfig
from penstock.envs.endpoint.answers import AnswerWriter
from penstock.envs.endpoint.chat_api import openai_error, parse_chat, parse_completion
from penstock.envs.endpoint.messages_api import anthropic_error, parse_messages
from penstock.envs.endpoint.requests import MODEL, ApiError, Caller, Json, bad_request, check_model
from penstock.envs.endpoint.responses_api import parse_response
from penstock.envs.endpoint.session import Exchange, Questions, Session

BODY_TIMEOUT_S = 30.0
MAX_REQUEST_BYTES = 4 << 20
MAX_DEPTH = 100
"""Of lists and objects in each other in a body; every later step may then recurse."""
_SHUTDOWN_S = 1.0
# A server that listens on all addresses is reached at the loopback address.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Api(NamedTuple):
    """One protocol."""

    parse: Callable[[Json, Caller], AnswerWriter]
    error: Callable[[ApiError], Json]


_APIS = {
    "/v1/chat/completions": _Api(parse_chat, openai_error),
    "/v1/completions": _Api(parse_completion, openai_error),
    "/v1/responses": _Api(parse_response, openai_error),
    "/v1/messages": _Api(parse_messages, anthropic_error),
}


class Endpoint:
    """Serves sessions. It starts with the first session; the owner closes it.

    Args:
        config: Its address, and what it ignores in requests.
        timeout_s: Longest wait for the next request of a session, seconds.
    """

    def __init__(self, config: EndpointConfig, timeout_s: float) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._serial = itertools.count(1)
        self._sessions: dict[str, tuple[Session, Caller]] = {}
        self._questions: tuple[Questions, Caller] | None = None
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
        session = Session(name, serial, self._base_url, self._timeout_s)
        self._sessions[str(serial)] = (session, Caller(self._config.ignore))
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
        self._questions = (questions, Caller(self._config.ignore))

    async def close(self) -> None:
        """Stop serving."""
        if self._questions is not None:
            await self._questions[0].close()
        for session, _ in self._sessions.values():
            session.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _serve(self) -> None:
        async with self._starting:
            if self._runner is None:
                await self._start()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_in_form_of_the_protocol])
        app.add_routes([web.post(path, partial(self._answer, api=api)) for path, api in _APIS.items()])
        app.add_routes([web.get("/v1/models", self._models), web.get("/v1/models/{name}", self._model)])
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

    def _client(self, request: web.Request) -> tuple[Session | Questions, Caller]:
        """Whose key the request has.

        Raises:
            ApiError: 401, if no session has this key.
        """
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        key = key.strip().encode(errors="replace").decode()  # bytes that are no UTF-8 are in no key
        if self._questions is not None and self._questions[0].has_key(key):
            return self._questions
        serial, _, secret = key.removeprefix("pk-").partition("-")
        opened = self._sessions.get(serial)
        if opened is None or not opened[0].has_secret(secret):
            raise ApiError(401, "Incorrect API key provided, or its session has ended.", code="invalid_api_key")
        return opened

    async def _answer(self, request: web.Request, api: _Api) -> web.StreamResponse:
        """Answer one request, whatever its protocol."""
        session, caller = self._client(request)
        try:
            writer = api.parse(await _read_json(request), caller)
            exchange = session.submit(writer.request)
        except (ApiError, web.HTTPException) as error:
            session.refused((request.path, str(error)), error)
            raise
        with exchange.reading():
            return await self._deliver(request, exchange, writer)

    async def _deliver(self, request: web.Request, exchange: Exchange, writer: AnswerWriter) -> web.StreamResponse:
        headers = _ignored_header(writer.request.ignored)
        if writer.request.is_stream:
            return await _stream(request, exchange, writer, headers)
        try:
            answer = await exchange.result()
        except ApiError:
            exchange.was_delivered = True
            raise
        response = web.json_response(writer.whole(answer), headers=headers)
        await response.prepare(request)
        await response.write_eof()
        exchange.was_delivered = True
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._client(request)
        return web.json_response({"object": "list", "data": [_model_card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._client(request)
        check_model(request.match_info["name"])
        return web.json_response(_model_card())


async def _stream(
    request: web.Request, exchange: Exchange, writer: AnswerWriter, headers: dict[str, str]
) -> web.StreamResponse:
    """Stream server-sent events; a refusal before the first event is a plain error."""
    pieces = exchange.pieces()
    piece = await anext(pieces, None)
    if piece is None and exchange.error is not None:
        exchange.was_delivered = True
        raise exchange.error
    response = web.StreamResponse(headers={hdrs.CACHE_CONTROL: "no-cache", **headers})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    for event in writer.begin():
        await response.write(event)
    while piece is not None:
        for event in writer.piece(piece):
            await response.write(event)
        piece = await anext(pieces, None)
    ending = writer.fail(exchange.error) if exchange.error is not None else writer.end(await exchange.result())
    for event in ending:
        await response.write(event)
    await response.write_eof()
    exchange.was_delivered = True
    return response


async def _read_json(request: web.Request) -> Json:
    """The body.

    Raises:
        ApiError: 400, if it is not an object in JSON; 408, if it does not arrive.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
        value = json.loads(body)
    except TimeoutError:
        message = f"The body did not arrive within {BODY_TIMEOUT_S:g} s."
        raise ApiError(408, message, code="timeout") from None
    except web.RequestPayloadError as error:
        raise bad_request(f"The body is broken: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}.") from None
    if not isinstance(value, dict):
        raise bad_request(f"expected a JSON object, got {type(value).__name__}")
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one) if isinstance(child, (dict, list))]
    if level:
        raise bad_request(f"The JSON body of your request is nested deeper than {MAX_DEPTH} levels.")
    return value


def _children(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _ignored_header(names: Iterable[str]) -> dict[str, str]:
    """What has no effect. The names may be those of a program, and a header takes only plain characters."""
    plain = re.sub(r"[^\w.,\- ]", "?", ", ".join(dict.fromkeys(names)), flags=re.ASCII)
    return {"x-penstock-ignored": plain[:1000]} if plain else {}


def _model_card() -> Json:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}


@web.middleware
async def _in_form_of_the_protocol(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Write every refusal, including aiohttp's own, as the path's protocol does, and tell clients not to retry."""
    try:
        return await handler(request)
    except ApiError as refused:
        error = refused
    except web.HTTPRequestEntityTooLarge as refused:
        error = ApiError(413, f"The body is too large: {refused.text}", code="too_large")
    except web.HTTPException as refused:
        message = f"{refused.reason}: {request.method} {request.path[:200]}"
        error = ApiError(refused.status, message, code="unknown_url")
    write = next((api.error for path, api in _APIS.items() if request.path.startswith(path)), openai_error)
    return web.json_response(write(error), status=error.status, headers={"x-should-retry": "false"})

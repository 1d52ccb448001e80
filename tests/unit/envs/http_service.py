"""A real HTTP server that answers as planned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.Response]]


def answer(body: object, status: int = 200, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handler


def raw(text: str, status: int = 200) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return handler


async def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


class Service:
    """Answers the n-th request as the n-th of its plan says, the last one forever."""

    def __init__(self) -> None:
        self.plan: list[Handler] = []
        self.url = ""
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0

    @property
    def num_requests(self) -> int:
        return len(self.bodies)

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        handler = self.plan.pop(0) if len(self.plan) > 1 else self.plan[0]
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await handler(request)
        finally:
            self.now -= 1


@asynccontextmanager
async def serving(path: str) -> AsyncIterator[Service]:
    made = Service()
    app = web.Application()
    app.router.add_post(path, made.handle)
    async with TestServer(app) as server:
        made.url = str(server.make_url("/")).rstrip("/")
        yield made

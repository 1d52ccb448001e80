"""JSON over HTTP to a service that may be slow, busy or down: retries, time limits and a size limit of replies."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp

from penstock.envs.retrying import RetryConfig, parse_retry_after

MAX_REPLY_BYTES = 16 << 20
_MAX_ERROR_CHARACTERS = 300
_CHUNK_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a TCP connection. A service that runs accepts within milliseconds, however long its answer takes."""
_RETRYABLE_STATUSES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


class ServiceError(Exception):
    """There is no usable answer; the message says why."""


class NoAnswerError(ServiceError):
    """The service did not answer, or answered with a server error."""


class RefusalError(ServiceError):
    """The service refused the request; a retry would not help."""


class _RetryableError(Exception):
    """One attempt failed with a transient error.

    Attributes:
        retry_after_s: Wait that the service requests, seconds.
    """

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


def bearer(variable: str | None) -> dict[str, str]:
    """The authorization header with the secret of an environment variable; empty if `variable` is None.

    Raises:
        LookupError: If the variable is not set.
    """
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise LookupError(f"{variable}: this environment variable is not set here")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


class JsonClient:
    """Posts JSON and reads JSON. Use it from one event loop.

    It retries after 408, 429, 5xx, broken connections and time-outs. The wait grows, and is at least `Retry-After`.

    Args:
        retry: Number of attempts and waits between them.
        max_concurrency: Concurrent requests.
        headers: Headers of every request.
        interval_s: Shortest time between the starts of two attempts, seconds.
    """

    def __init__(
        self, retry: RetryConfig, max_concurrency: int, headers: Mapping[str, str], interval_s: float = 0.0
    ) -> None:
        self._retry = retry
        self._max_concurrency = max_concurrency
        self._headers = dict(headers)
        self._interval_s = interval_s
        self._next_start = 0.0
        self._slots = asyncio.Semaphore(max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: object, timeout_s: float, total_timeout_s: float = math.inf) -> Any:
        """Post `body`, return the decoded reply.

        Args:
            url: Address.
            body: Plain data.
            timeout_s: Longest time for one attempt, seconds.
            total_timeout_s: Longest time for all attempts, seconds.

        Raises:
            NoAnswerError: If no attempt was answered, or none could be made in time.
            RefusalError: If the service refused, or its answer is not JSON.
            TypeError, ValueError: If `body` is not plain data.
        """
        data = json.dumps(body, allow_nan=False).encode()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + total_timeout_s
        for attempt in range(1, self._retry.max_attempts + 1):
            now = loop.time()
            start = max(now, self._next_start)
            self._next_start = start + self._interval_s
            await asyncio.sleep(start - now)
            async with self._slots:
                left_s = give_up_at - loop.time()
                if left_s <= 0:  # which aiohttp would take for no time limit
                    limit = f"{total_timeout_s:.3g} s were over, with {self._max_concurrency} requests at a time"
                    raise NoAnswerError(f"it waited for its turn until its {limit} (try {attempt})")
                try:
                    return await self._post_once(url, data, min(timeout_s, left_s))
                except _RetryableError as error:
                    problem = str(error)
                    wait_s = max(error.retry_after_s, self._retry.wait_s(attempt))
            if attempt == self._retry.max_attempts:
                break
            if loop.time() + wait_s >= give_up_at:
                raise NoAnswerError(f"{problem} (try {attempt}; the next, {wait_s:.3g} s later, would be too late)")
            await asyncio.sleep(wait_s)
        raise NoAnswerError(f"{problem} (try {attempt} of {attempt})")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post_once(self, url: str, data: bytes, timeout_s: float) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_concurrency)
            headers = {"Content-Type": "application/json", **self._headers}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        body = bytearray()
        try:
            # A redirect would turn the POST into a GET, so it is refused below.
            async with self._session.post(url, data=data, timeout=timeout, allow_redirects=False) as response:
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    body += chunk
                    if len(body) > MAX_REPLY_BYTES:
                        raise RefusalError(f"the answer is longer than {MAX_REPLY_BYTES} bytes")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            detail = str(error)[:_MAX_ERROR_CHARACTERS] or f"no answer within {timeout_s:.3g} s"
            raise _RetryableError(f"{type(error).__name__}: {detail}") from error
        status, start = response.status, body[:_MAX_ERROR_CHARACTERS].decode(errors="replace")
        if status in _RETRYABLE_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _RetryableError(f"HTTP {status}: {start}", parse_retry_after(response.headers.get("Retry-After")))
        if status != HTTPStatus.OK:
            raise RefusalError(f"HTTP {status}: {start}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusalError(f"the answer is not JSON ({error}): {start!r}") from error

"""A sandbox on another machine, over HTTP: `POST {url}/run` with a job, answered by a result (see service.py).

Failures of the service are retried with growing waits; when it fails again and again nothing is sent for a while, so
that a service that is down costs each program an instant and not a time-out.
"""

from __future__ import annotations

import asyncio
import os
import random
from http import HTTPStatus
from typing import Any

import aiohttp

from penstock.envs.sandbox.config import RemoteConfig
from penstock.envs.sandbox.contract import (
    Limits,
    Program,
    SandboxResult,
    SandboxUnavailableError,
    decode_result,
    encode_job,
)

_MAX_ERROR_CHARACTERS = 300
_BACKOFF_FACTOR, _MAX_BACKOFF_S = 2.0, 30.0


class CircuitBreaker:
    """Counts failures in a row. Invariant: while it is open nothing passes, but one trial per `open_s`.

    Args:
        failures_to_open: Failures in a row that open it.
        open_s: How long it stays open before a trial, seconds.
    """

    def __init__(self, failures_to_open: int, open_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._failures = 0
        self._next_trial = 0.0

    def admit(self, now: float) -> bool:
        """May something be sent at `now`, seconds? A trial pushes the next one back."""
        if self._failures < self._failures_to_open:
            return True
        if now < self._next_trial:
            return False
        self._next_trial = now + self._open_s
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures >= self._failures_to_open:
            self._next_trial = now + self._open_s


class _RetryableError(Exception):
    """The service failed in a way that may pass."""


class RemoteSandbox:
    """Runs programs on a sandbox service. Use it from one event loop.

    Args:
        config: The section `sandbox.remote`.
        max_concurrency: Programs at a time.
    """

    def __init__(self, config: RemoteConfig, max_concurrency: int) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(max_concurrency)
        self._breaker = CircuitBreaker(config.failures_to_open, config.open_s)
        self._session: aiohttp.ClientSession | None = None

    async def run(self, program: Program, limits: Limits) -> SandboxResult:
        """Run one program. See `Sandbox.run`."""
        url, problem = f"{self._config.url.rstrip('/')}/run", ""
        loop = asyncio.get_running_loop()
        for attempt in range(self._config.max_attempts):
            if attempt:
                await asyncio.sleep(self._backoff_s(attempt))
            async with self._slots:
                if not self._breaker.admit(loop.time()):
                    problem = problem or f"it failed {self._config.failures_to_open} times in a row; it is left alone"
                    break
                try:
                    result = await self._post(url, program, limits)
                except _RetryableError as error:
                    self._breaker.failed(loop.time())
                    problem = str(error)
                    continue
                self._breaker.succeeded()
                return result
        raise SandboxUnavailableError(
            f"sandbox.remote.url={self._config.url}: no result after {self._config.max_attempts} attempts at most: "
            f"{problem}. Is the service up, and large enough for sandbox.max_concurrency?"
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _headers(self) -> dict[str, str]:
        variable = self._config.token_variable
        if variable is None:
            return {}
        if not os.environ.get(variable):
            raise SandboxUnavailableError(
                f"sandbox.remote.token_variable={variable}: this environment variable is not set here. The service "
                "would refuse every program. Set it where the reward workers run."
            )
        return {"Authorization": f"Bearer {os.environ[variable]}"}

    def _backoff_s(self, attempt: int) -> float:
        longest = min(self._config.backoff_s * _BACKOFF_FACTOR ** (attempt - 1), _MAX_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)

    async def _post(self, url: str, program: Program, limits: Limits) -> SandboxResult:
        """One attempt.

        Raises:
            _RetryableError: If there was no answer, or the service says that it is its own fault.
            SandboxUnavailableError: If it refuses the job or does not speak the protocol.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers())
        timeout = aiohttp.ClientTimeout(
            total=limits.wall_s + self._config.grace_s, sock_connect=self._config.connect_timeout_s
        )
        try:
            async with self._session.post(url, json=encode_job(program, limits), timeout=timeout) as response:
                if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR or response.status in (
                    HTTPStatus.TOO_MANY_REQUESTS,
                    HTTPStatus.REQUEST_TIMEOUT,
                ):
                    raise _RetryableError(f"HTTP {response.status}: {await _text(response)}")
                if response.status != HTTPStatus.OK:
                    raise SandboxUnavailableError(
                        f"sandbox.remote.url={self._config.url} refused a job: HTTP {response.status}: "
                        f"{await _text(response)}"
                    )
                return _decode(await response.json(), self._config.url)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise _RetryableError(f"{type(error).__name__}: {str(error)[:_MAX_ERROR_CHARACTERS]}") from error
        except (aiohttp.ContentTypeError, ValueError) as error:
            raise SandboxUnavailableError(
                f"sandbox.remote.url={self._config.url} did not send JSON: {error}"
            ) from error


async def _text(response: aiohttp.ClientResponse) -> str:
    return (await response.content.read(_MAX_ERROR_CHARACTERS)).decode(errors="replace")


def _decode(reply: Any, url: str) -> SandboxResult:
    try:
        return decode_result(reply)
    except TypeError as error:
        raise SandboxUnavailableError(
            f"sandbox.remote.url={url} answered something else than a result: {error}"
        ) from error

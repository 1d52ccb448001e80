"""A sandbox on another machine, over HTTP: `POST {url}/run` with a job returns a result (see service.py)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.envs.http_client import JsonClient, NoAnswerError, RefusalError, bearer
from penstock.envs.sandbox.config import RemoteConfig
from penstock.envs.sandbox.contract import (
    Limits,
    Program,
    SandboxResult,
    SandboxUnavailableError,
    encode_job,
)


class RemoteSandbox:
    """Runs programs on a sandbox service. Use it from one event loop.

    Args:
        config: The section `sandbox.remote`.
        max_concurrency: Programs at a time.
    """

    def __init__(self, config: RemoteConfig, max_concurrency: int) -> None:
        self._config = config
        self._max_concurrency = max_concurrency
        self._client: JsonClient | None = None

    async def run(self, program: Program, limits: Limits) -> SandboxResult:
        """Run one program. See `Sandbox.run`."""
        where = f"sandbox.remote.url={self._config.url}"
        if self._client is None:
            self._client = JsonClient(self._config, self._max_concurrency, self._headers())
        url, timeout_s = f"{self._config.url.rstrip('/')}/run", limits.wall_s + self._config.grace_s
        try:
            return SandboxResult(**await self._client.post(url, encode_job(program, limits), timeout_s))
        except NoAnswerError as error:
            raise SandboxUnavailableError(
                f"{where}: no result: {error}. Is the service up, and large enough for sandbox.max_concurrency?"
            ) from error
        except RefusalError as error:
            raise SandboxUnavailableError(f"{where} refused a job: {error}") from error
        except TypeError as error:
            raise SandboxUnavailableError(f"{where} answered something other than a result: {error}") from error

    async def run_in_turn(self, programs: Sequence[Program], limits: Limits) -> list[SandboxResult]:
        """Run the programs of one answer, each in a sandbox of its own. See `Sandbox.run_in_turn`."""
        results: list[SandboxResult] = []
        for program in programs:
            results.append(await self.run(program, limits))
            if results[-1].hit_a_limit:
                break
        return results

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    def _headers(self) -> dict[str, str]:
        try:
            return bearer(self._config.token_variable)
        except LookupError as error:
            raise SandboxUnavailableError(
                f"sandbox.remote.token_variable={error.args[0]}. The service would refuse every program. Set it where "
                "the reward workers run."
            ) from None

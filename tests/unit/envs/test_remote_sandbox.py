"""A client of a sandbox service against a real HTTP server that fails as planned."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from penstock.envs.sandbox.config import RemoteConfig, SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program, SandboxResult, SandboxUnavailableError, encode_job
from penstock.envs.sandbox.local import LocalSandbox
from penstock.envs.sandbox.remote import RemoteSandbox
from penstock.envs.sandbox.service import cut_limits, make_service
from tests.unit.envs.http_service import Handler, Service, answer, hang, hang_up, serving

FINE = {"outcome": "exited", "exit_code": 0, "stdout": "2\n", "stderr": "", "wall_s": 0.1, "detail": ""}


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    async with serving("/run") as made:
        yield made, f"{made.url}/"


async def ask(url: str, wall_s: float = 1.0, **config: object) -> SandboxResult:
    sandbox = RemoteSandbox(RemoteConfig(url=url, **{"backoff_s": 0.01, "grace_s": 5.0, **config}), 4)
    try:
        return await sandbox.run(Program("print(1 + 1)"), Limits(wall_s=wall_s))
    finally:
        await sandbox.close()


async def test_failures_that_may_pass_are_tried_again(service: tuple[Service, str]) -> None:
    made, url = service
    made.plan = [answer("busy", 503), hang_up, answer("slow down", 429), answer(FINE)]
    assert (await ask(url)).stdout == "2\n"
    assert made.num_requests == 4


async def test_after_the_last_attempt_the_error_says_what_happened(service: tuple[Service, str]) -> None:
    made, url = service
    made.plan = [answer("x" * 10_000, 503)]
    with pytest.raises(SandboxUnavailableError, match=r"no result: HTTP 503: .xxx.*\(try 3 of 3\)") as caught:
        await ask(url, max_attempts=3)
    assert made.num_requests == 3
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (answer("no job", 400), "refused a job: HTTP 400"),
        (answer({"stdout": 1}, 200), "something other than a result"),
        (answer(["?"], 200), "something other than a result"),
    ],
)
async def test_what_no_repetition_can_mend_is_not_tried_again(
    service: tuple[Service, str], handler: Handler, message: str
) -> None:
    made, url = service
    made.plan = [handler]
    with pytest.raises(SandboxUnavailableError, match=message):
        await ask(url)
    assert made.num_requests == 1


async def test_a_service_that_hangs_costs_one_time_out_each_time(service: tuple[Service, str]) -> None:
    made, url = service
    made.plan = [hang]
    started = time.monotonic()
    with pytest.raises(SandboxUnavailableError, match="TimeoutError"):
        await ask(url, wall_s=0.1, grace_s=0.2, max_attempts=2)
    assert 0.6 <= time.monotonic() - started < 20
    assert made.num_requests == 2


async def test_a_service_that_was_down_is_found_again(service: tuple[Service, str]) -> None:
    made, url = service
    made.plan = [answer("down", 500)]
    sandbox = RemoteSandbox(RemoteConfig(url=url, backoff_s=0, max_attempts=1), 4)
    for _ in range(10):
        with pytest.raises(SandboxUnavailableError):
            await sandbox.run(Program(""), Limits())
    made.plan = [answer(FINE)]
    assert (await sandbox.run(Program(""), Limits())).is_ok
    assert (await sandbox.run(Program(""), Limits())).is_ok
    await sandbox.close()


async def test_an_unreachable_service_is_an_error_with_its_address() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"sandbox.remote.url=http://127.0.0.1:9: no result"):
        await ask("http://127.0.0.1:9", max_attempts=2)


async def test_the_service_refuses_nonsense_and_cuts_limits() -> None:
    sandbox = LocalSandbox(SandboxConfig(allow_unisolated=True))
    async with TestServer(make_service(sandbox, Limits(wall_s=0.3))) as server, ClientSession() as session:
        for body in ({}, [], {"code": "", "argv": [], "stdin": "", "files": {"../x": ""}, "limits": {}}):
            async with session.post(server.make_url("/run"), json=body) as response:
                assert response.status == 400, body
                assert "not a job" in await response.text()
        job = encode_job(Program("print(1)"), Limits())
        for name, value in (("wall_s", math.nan), ("wall_s", 0), ("cpu_s", "1"), ("max_processes", -1),
                            ("memory_mib", 16.5), ("max_file_mib", math.inf), ("max_processes", True)):  # fmt: skip
            body = {**job, "limits": {**job["limits"], name: value}}
            async with session.post(server.make_url("/run"), json=body) as response:
                assert response.status == 400, (name, value)
                assert f"limits.{name}=" in await response.text()
        async with session.get(server.make_url("/health")) as response:
            assert await response.json() == {"ok": True}
        client = RemoteSandbox(RemoteConfig(url=str(server.make_url("/"))), 1)
        result = await client.run(Program("while True: pass"), Limits(wall_s=60))
        assert (result.outcome, result.detail) == ("wall_clock", "more than 0.3 s")
        await client.close()
    assert cut_limits(Limits(wall_s=5, max_processes=2), Limits(wall_s=1)) == Limits(wall_s=1, max_processes=2)


async def test_a_service_with_a_token_runs_nothing_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = LocalSandbox(SandboxConfig(allow_unisolated=True))
    async with TestServer(make_service(sandbox, Limits(), token="sésame")) as server:
        url = str(server.make_url("/"))
        with pytest.raises(SandboxUnavailableError, match="refused a job: HTTP 401: the token is missing or wrong"):
            await ask(url)
        with pytest.raises(SandboxUnavailableError, match=r"token_variable=SANDBOX_TOKEN: .* not set here"):
            await ask(url, token_variable="SANDBOX_TOKEN")
        monkeypatch.setenv("SANDBOX_TOKEN", "sésame")
        assert (await ask(url, wall_s=10.0, token_variable="SANDBOX_TOKEN")).stdout == "2\n"

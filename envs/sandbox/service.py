"""A sandbox as an HTTP service: the server of remote.py's client, and the definition of the protocol.

    POST /run      a job, application/json -> 200 and a result; 400 if it is malformed; 503 if the sandbox failed
                   401 without the token, if the service has one: `Authorization: Bearer TOKEN`
    GET  /health   200 and `{"ok": true}`

A job is `{"code": str | null, "argv": [str], "stdin": base64, "files": {path: base64}, "limits": {...}}`, a result
`{"outcome", "exit_code", "stdout", "stderr", "wall_s", "detail"}`; the fields are those of `Program`, `Limits` and
`SandboxResult` in contract.py. Limits above the service's own are reduced to them. Nothing is encrypted, and without a
token any client that reaches the port can run programs on this machine: let only the reward workers reach it.
"""

from __future__ import annotations

import hmac
from dataclasses import asdict

from aiohttp import hdrs, web

from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Sandbox, SandboxUnavailableError, decode_job
from penstock.envs.sandbox.local import LocalSandbox

_SHUTDOWN_S = 2.0
_MAX_JOB_BYTES = 64 << 20


def serve(config: SandboxConfig, host: str, port: int, token: str | None) -> None:
    """Serve this machine's sandbox until SIGINT or SIGTERM. If a client disconnects, its program is ended.

    Raises:
        ConfigError: If the host allows no isolation and `sandbox.allow_unisolated` is off.
        OSError: If the address is in use.
    """
    sandbox = LocalSandbox(config)

    async def start(_: web.Application) -> None:
        await sandbox.start()

    service = make_service(sandbox, config.limits, token=token)
    service.on_startup.append(start)
    web.run_app(service, host=host, port=port, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, access_log=None)


def make_service(sandbox: Sandbox, most: Limits, *, token: str | None = None) -> web.Application:
    """Build the service over `sandbox`, which is closed with it.

    Args:
        sandbox: Runs the programs.
        most: Largest limits of a job.
        token: Token that clients must send; None accepts every client.
    """
    expected = None if token is None else f"Bearer {token}".encode()

    async def run(request: web.Request) -> web.Response:
        given = request.headers.get(hdrs.AUTHORIZATION, "").encode()
        if expected is not None and not hmac.compare_digest(given, expected):
            return web.Response(status=401, text="the token is missing or wrong")
        try:
            program, limits = decode_job(await request.json())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return web.Response(status=400, text=f"not a job: {type(error).__name__}: {error}")
        try:
            result = await sandbox.run(program, cut_limits(limits, most))
        except SandboxUnavailableError as error:
            return web.Response(status=503, text=str(error))
        return web.json_response(asdict(result))

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def close(_: web.Application) -> None:
        await sandbox.close()

    service = web.Application(client_max_size=_MAX_JOB_BYTES)
    service.add_routes([web.post("/run", run), web.get("/health", health)])
    service.on_cleanup.append(close)
    return service


def cut_limits(limits: Limits, most: Limits) -> Limits:
    """Reduce each limit to at most that of `most`."""
    return Limits(**{name: min(value, getattr(most, name)) for name, value in limits})

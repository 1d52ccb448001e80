"""A sandbox as an HTTP service: the other side of remote.py, and the definition of its protocol.

    POST /run      a job, application/json -> 200 and a result; 400 if it is no job; 503 if the sandbox failed
    GET  /health   200 and `{"ok": true}`

A job is `{"code": str | null, "argv": [str], "stdin": base64, "files": {path: base64}, "limits": {...}}`, a result
`{"outcome", "exit_code", "stdout", "stderr", "wall_s", "detail"}`; the fields are those of `Program`, `Limits` and
`SandboxResult` in contract.py. Limits above the service's own are cut to them. There is no authentication: whoever
reaches the port may use the machine's processors, so let only the reward workers reach it.
"""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from penstock.envs.sandbox.contract import (
    Limits,
    Sandbox,
    SandboxUnavailableError,
    decode_job,
    encode_result,
)

_MAX_JOB_BYTES = 64 << 20


def make_service(sandbox: Sandbox, most: Limits) -> web.Application:
    """The service over `sandbox`, which is closed with it.

    Args:
        sandbox: Where programs run.
        most: The largest limits a job may ask for.
    """

    async def run(request: web.Request) -> web.Response:
        try:
            program, limits = decode_job(await request.json())
            limits = cut_limits(limits, most)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return web.Response(status=400, text=f"not a job: {type(error).__name__}: {error}")
        try:
            result = await sandbox.run(program, limits)
        except SandboxUnavailableError as error:
            return web.Response(status=503, text=str(error))
        return web.json_response(encode_result(result))

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def close(_: web.Application) -> None:
        await sandbox.close()

    service = web.Application(client_max_size=_MAX_JOB_BYTES)
    service.add_routes([web.post("/run", run), web.get("/health", health)])
    service.on_cleanup.append(close)
    return service


def cut_limits(limits: Limits, most: Limits) -> Limits:
    """The smaller of each."""
    allowed = asdict(most)
    return Limits(**{name: min(value, allowed[name]) for name, value in asdict(limits).items()})

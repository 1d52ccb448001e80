"""`penstock report RUN --watch`: serves the report of a run that goes on, to this machine only.

The page asks for `/stamp` every few seconds, and is loaded again when the files of the run have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from penstock.dataflow.errors import PenstockError, boundary
from penstock.platform.metrics.report import render
from penstock.platform.metrics.run_files import ERROR_FILE, METRICS_FILE, SUMMARY_FILE
from penstock.platform.metrics.run_record import read_run

MIN_INTERVAL_S = 10.0
"""A page is made at most so often; making it takes seconds in a long run."""
_NOT_CACHED = {"Cache-Control": "no-store"}


class LiveReport:
    """The newest page of a run. One thread at a time makes it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._page = ""
        self._stamp = ""
        self._looked_at = float("-inf")

    def stamp(self) -> str:
        """State of the run's files, looked at every `MIN_INTERVAL_S`: the page of another stamp is old."""
        with self._lock:
            if time.monotonic() - self._looked_at >= MIN_INTERVAL_S:
                self._looked_at = time.monotonic()
                found = []
                for name in (METRICS_FILE, SUMMARY_FILE, ERROR_FILE):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(f"{(self._run_dir / name).stat().st_mtime_ns:x}")
                stamp = "-".join(found) or "none"
                if stamp != self._stamp:
                    self._stamp, self._page = stamp, ""
            return self._stamp

    def page(self) -> str:
        """The page of the newest stamp.

        Raises:
            PenstockError: If the directory is not, or not any more, that of a run.
        """
        stamp = self.stamp()
        with self._lock:
            if not self._page:
                self._page = render(read_run(self._run_dir), stamp)
            return self._page


async def serve_report(run_dir: Path, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the report until it is cancelled.

    Args:
        run_dir: Directory of the run.
        port: Port on the loopback interface; 0: a free one.
        on_ready: Called with the address once it is served.

    Raises:
        PenstockError: If the directory is not that of a run, or the port cannot be used.
    """
    report = LiveReport(run_dir)
    await asyncio.to_thread(report.page)

    async def page(_request: web.Request) -> web.Response:
        try:
            text = await asyncio.to_thread(report.page)
        except PenstockError as error:  # the directory is gone
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        return web.Response(text=text, content_type="text/html", headers=_NOT_CACHED)

    async def stamp(_request: web.Request) -> web.Response:
        return web.Response(text=await asyncio.to_thread(report.stamp), headers=_NOT_CACHED)

    app = web.Application()
    app.add_routes([web.get("/", page), web.get("/stamp", stamp)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        with boundary(PenstockError, f"report: port {port} cannot be used; --port 0 takes a free one"):
            await web.TCPSite(runner, "127.0.0.1", port).start()
        on_ready(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()

"""`penstock report RUN --watch`: serves the report of a run that goes on, to this machine only.

The page asks for `/stamp` every few seconds, and is loaded again when the files of the run have changed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import PenstockError
from penstock.platform.metrics.report import render
from penstock.platform.metrics.run_files import ERROR_FILE, METRICS_FILE, SUMMARY_FILE
from penstock.platform.metrics.run_record import read_run

MIN_INTERVAL_S = 10.0
"""A page is made at most so often; making it takes seconds in a long run."""


class LiveReport:
    """The newest page of a run. One thread at a time makes it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._page = b""
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
                    self._stamp, self._page = stamp, b""
            return self._stamp

    def page(self) -> bytes:
        """The page of the newest stamp, in UTF-8.

        Raises:
            PenstockError: If the directory is not, or not any more, that of a run.
        """
        stamp = self.stamp()
        with self._lock:
            if not self._page:
                self._page = render(read_run(self._run_dir), stamp).encode()
            return self._page


def serve_report(run_dir: Path, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the report until the process is interrupted.

    Args:
        run_dir: Directory of the run.
        port: Port on the loopback interface; 0: a free one.
        on_ready: Called with the address once it is served.

    Raises:
        PenstockError: If the directory is not that of a run, or the port cannot be used.
    """
    report = LiveReport(run_dir)
    report.page()

    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0

        def do_GET(self) -> None:
            if self.path not in ("/", "/stamp"):
                self.send_error(404)
                return
            try:
                is_page = self.path == "/"
                body, kind = (report.page(), "html") if is_page else (report.stamp().encode(), "plain")
            except PenstockError as error:
                self.send_error(503, explain=str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the page was left
                self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Print nothing."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise PenstockError(
            f"report: port {port} cannot be used: {error.strerror}. Take --port 0 for a free one."
        ) from error
    with server:
        on_ready(f"http://127.0.0.1:{server.server_address[1]}/")
        server.serve_forever()

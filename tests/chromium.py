"""Opens a page of this machine in headless Chromium at several widths, and reports what is wrong with it there."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_HOST = """<!DOCTYPE html><meta charset="utf-8"><body><pre id="probe"></pre><script>
const widths = WIDTHS, results = [];
async function probe(width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  const errors = [], began = performance.now();
  const loaded = new Promise(resolve => frame.addEventListener("load", resolve));
  frame.src = "PAGE";
  document.body.append(frame);
  frame.contentWindow.addEventListener("error", event => errors.push(String(event.message)));
  await loaded;
  const opened_s = (performance.now() - began) / 1000;
  const inner = frame.contentWindow, page = inner.document;
  inner.addEventListener("error", event => errors.push(String(event.message)));
  // Charts are resized one after the other, which takes long on a busy machine: after 30 s they never will.
  const drawn = () => [...page.querySelectorAll(".plotly-graph-div")].map(one => {
    const svg = one.querySelector("svg.main-svg");
    return [Math.round(one.getBoundingClientRect().width), svg ? Math.round(svg.getBoundingClientRect().width) : 0];
  });
  const fits = () => drawn().every(([card, chart]) => Math.abs(card - chart) <= 1);
  for (let waited = 0; waited < 1500 || (waited < 30000 && !fits()); waited += 500)
    await new Promise(resolve => setTimeout(resolve, 500));
  const answer = await (ASKED)(page, inner);
  const result = { width, opened_s, errors, title: page.title, answer };
  result.page_width = page.documentElement.scrollWidth;
  result.too_wide = [...page.querySelectorAll("main *")].filter(one => {
    const box = one.getBoundingClientRect(), scrolls = one.closest("pre, .chart-scroll, .preview");
    return box.width && box.right > width + 1 && !scrolls && !one.closest("svg");
  }).map(one => `${one.tagName}.${one.className} ${Math.round(one.getBoundingClientRect().right)}`).slice(0, 10);
  result.charts = drawn();
  result.counts = Object.fromEntries(COUNTED.map(selector => [selector, page.querySelectorAll(selector).length]));
  results.push(result);
  frame.remove();
}
(async () => {
  for (const width of widths) await probe(width);
  document.getElementById("probe").textContent = JSON.stringify(results);
})();
</script>"""


def inspect_page(
    page: Path, widths: list[int], counted: list[str], timeout_s: float = 120.0, asked: str = "() => null"
) -> list[dict[str, Any]]:
    """Open a page in a frame of each width, in Chromium.

    Args:
        page: An HTML file. A file beside it is written and removed again.
        widths: Widths of the frame, CSS pixels.
        counted: CSS selectors whose elements are counted.
        timeout_s: Longest time for all of them, seconds.
        asked: JavaScript function of the document and its window, called before the page is measured.

    Returns:
        For each width: `opened_s` (until the load event), `errors` of scripts, `answer` (of `asked`, as JSON),
        `page_width`, `too_wide` (elements that reach beyond the frame), `charts` (width of each, and of its drawing)
        and `counts`.
    """
    host = page.with_name("probe.html")
    text = _HOST.replace("WIDTHS", json.dumps(widths)).replace("COUNTED", json.dumps(counted)).replace("ASKED", asked)
    host.write_text(text.replace("PAGE", page.name), encoding="utf-8")
    handler = functools.partial(_Quiet, directory=str(page.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert CHROMIUM is not None
    try:
        dumped = subprocess.run(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=2000,1000",
             f"--timeout={int(timeout_s * 1000)}", f"--virtual-time-budget={int(timeout_s * 1000)}", "--dump-dom",
             f"http://127.0.0.1:{server.server_address[1]}/{host.name}"],
            capture_output=True, text=True, timeout=timeout_s, check=True,
        ).stdout  # fmt: skip
    finally:
        server.shutdown()
        host.unlink()
    found = re.search(r'<pre id="probe">(.*?)</pre>', dumped, re.DOTALL)
    assert found is not None
    assert found[1], "the page was not read to its end"
    results: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return results


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: Any) -> None:
        """Print nothing."""

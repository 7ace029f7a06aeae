"""The live view: report or comparison of runs over HTTP on this machine's loopback address, while they go on.

The page asks every few seconds whether the files changed, and takes over the new content in place: what a person has
opened and where they have scrolled to stays. Pages are made again only when a file of a run has changed. Reading only;
loopback only (use an SSH tunnel from elsewhere), and requests that name another host are refused, so that no web page
can read the reports through the browser.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from luspo_megatron.errors import UserError
from luspo_megatron.report.compare import read_runs, render_comparison
from luspo_megatron.report.html import CONFIG_FILE, render
from luspo_megatron.report.metrics import METRICS_FILE, SAMPLES_FILE
from luspo_megatron.report.progress import WARNINGS_FILE
from luspo_megatron.report.summary import SUMMARY_FILE

HOST = "127.0.0.1"
WATCHED = (METRICS_FILE, SAMPLES_FILE, WARNINGS_FILE, SUMMARY_FILE, CONFIG_FILE)

# Opened details and the scrolled position survive, because only the content of <main> is replaced.
SCRIPT = """<script>
let tag = "";
async function look() {
  try {
    const answer = await fetch("/", {headers: tag ? {"If-None-Match": tag} : {}, cache: "no-store"});
    if (answer.status === 200) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details")].map(item => item.open);
      if (tag) document.querySelector("main").replaceWith(fresh.querySelector("main"));
      tag = answer.headers.get("ETag") || "";
      document.querySelectorAll("details").forEach((item, index) => { item.open = !!open[index]; });
    }
    document.body.dataset.live = "yes";
  } catch (error) { document.body.dataset.live = "no"; }
  setTimeout(look, REFRESH);
}
look();
</script>"""


class Pages:
    """The page of some runs and its tag, made anew when a file has changed. Safe to be called from several threads."""

    def __init__(self, runs: Sequence[str], refresh: float) -> None:
        self._runs = runs
        self._script = SCRIPT.replace("REFRESH", str(round(refresh * 1000)))
        self._lock = threading.Lock()
        self._state: tuple[Any, ...] | None = None
        self._page, self._tag = b"", ""

    def get(self) -> tuple[bytes, str]:
        with self._lock:
            state = self._files()
            if state != self._state:
                self._page = self._render().encode("utf-8", errors="replace")
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                self._state = state
            return self._page, self._tag

    def _files(self) -> tuple[Any, ...]:
        found: list[Any] = []
        for run in self._runs:
            for name in WATCHED:
                try:
                    stat = (Path(run) / name).stat()
                    found.append((stat.st_mtime_ns, stat.st_size))
                except OSError:
                    found.append(None)
        return tuple(found)

    def _render(self) -> str:
        if len(self._runs) == 1:
            return render(Path(self._runs[0]), script=self._script)
        return render_comparison(read_runs(self._runs), script=self._script)


def make_server(runs: Sequence[str], port: int, refresh: float) -> ThreadingHTTPServer:
    """A server that is bound, not yet serving. Raises UserError for a port in use and for folders without a run."""
    read_runs(runs)
    pages = Pages(runs, refresh)

    class Handler(BaseHTTPRequestHandler):
        server_version = "luspo"
        sys_version = ""

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if host not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1 or localhost")
            elif self.path.split("?")[0] not in ("/", "/index.html"):
                self.send_error(HTTPStatus.NOT_FOUND, "there is one page, /")
            else:
                self._send_page()

        def _send_page(self) -> None:
            try:
                page, tag = pages.get()
            except UserError as error:  # a run folder was taken away
                self.send_error(HTTPStatus.GONE, str(error).replace("\n", " "))
                return
            same = self.headers.get("If-None-Match") == tag
            self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
            self.send_header("ETag", tag)
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; "
                             "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'")
            if not same:
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            if not same:
                self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: one line per look would bury the address."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(
            f"--port {port} on {HOST} cannot be used ({error.strerror}); give another, or 0 for any") from None
    server.daemon_threads = True
    return server


def serve(runs: Sequence[str], port: int, refresh: float, say: Callable[[str], None] = print) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    with make_server(runs, port, refresh) as server:
        say(f"http://{HOST}:{server.server_address[1]}/ (Ctrl-C ends it)")
        before = signal.signal(signal.SIGTERM, lambda number, frame: threading.Thread(target=server.shutdown).start())
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0

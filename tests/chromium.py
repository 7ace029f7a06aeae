"""A headless Chromium over its DevTools protocol: open a page at a size, ask it something, take its picture."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESKTOP = (390, 844), (1280, 900)

# Elements of the page that are wider than it, and texts of one chart that lie over each other.
OVERFLOWS = """(() => {
  const width = document.documentElement.clientWidth, out = [];
  if (document.documentElement.scrollWidth > width) out.push("page " + document.documentElement.scrollWidth);
  for (const item of document.querySelectorAll("h1, h2, h3, p, figure, .tile, .card, .legend li, summary")) {
    const box = item.getBoundingClientRect();
    if (box.right > width + 1 || box.left < -1) out.push(item.tagName + " " + item.textContent.slice(0, 40));
  }
  return out;
})()"""
OVERLAPS = """(() => {
  const out = [];
  const cross = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  for (const group of document.querySelectorAll("svg.chart, .legend, .tiles")) {
    const items = [...group.querySelectorAll("text, li, .tile")].map(e => [e.textContent, e.getBoundingClientRect()]);
    items.forEach(([name, box], i) => items.slice(i + 1).forEach(([other, second]) => {
      if (cross(box, second)) out.push(name + " over " + other); }));
  }
  for (const item of document.querySelectorAll(".tile b, .tile small, .tile dt")) {
    if (item.scrollWidth > item.clientWidth + 1 && item.clientWidth) out.push("cut " + item.textContent);
  }
  return out;
})()"""


class Browser:
    """`with Browser() as browser`; one page at a time. Ends the process it started, and nothing else."""

    def __enter__(self) -> Browser:
        assert BINARY is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [BINARY, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={self._folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        port = self._port()
        self._loop.run_until_complete(self._connect(port))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._loop.run_until_complete(self._close())
        self._loop.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def open(self, url: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Load a page and wait until it is there. Phones get their own width and two device pixels per pixel."""
        width, height = size
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1,
                  mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < end, f"still not: {script}"
            time.sleep(0.1)

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole,
                         **({"clip": self._whole()} if whole else {}))
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._call(method, parameters))

    def _whole(self) -> dict[str, float]:
        size = self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        return {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}

    def _port(self) -> int:
        file = Path(self._folder.name) / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not file.exists() or len(file.read_text().split()) < 2:
            assert self._process.poll() is None and time.monotonic() < end, "the browser did not start"
            time.sleep(0.1)
        return int(file.read_text().split()[0])

    async def _connect(self, port: int) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            targets = await answer.json()
        page = next(target for target in targets if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self._number = 0

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(60):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == self._number:
                    assert "error" not in message, message
                    return message["result"]

    async def _close(self) -> None:
        await self._socket.close()
        await self._session.close()

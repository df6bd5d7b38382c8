"""A real browser: Chromium, driven by ChromeDriver over HTTP."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
_OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1280,1600"]


class Browser:
    """One window of a browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._ask("url", url=url)

    def run(self, script: str) -> Any:
        """Run JavaScript in the page, and return what it returns."""
        return self._ask("execute/sync", script=script, args=[])

    def press(self, button: str) -> None:
        """Press a button, which a CSS selector finds, by the keyboard."""
        self.run(f"document.querySelector({button!r}).focus()")
        strokes = [{"type": stroke, "value": "\ue007"} for stroke in ("keyDown", "keyUp")]
        self._ask("actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Show pages in a window of this size, and in light or dark."""
        self._tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", features=[theme])

    def picture(self, file: Path, above: str = "body") -> None:
        """Write a small PNG of a window from the upper edge of an element on, which a CSS selector finds."""
        from PIL import Image

        size = "innerWidth, innerHeight"
        y, width, height = self.run(f"return [document.querySelector({above!r}).offsetTop, {size}]")
        clip = {"x": 0, "y": y, "width": width, "height": height, "scale": 1}
        drawn = self._tell("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        Image.open(BytesIO(base64.b64decode(drawn["data"]))).convert("RGB").quantize(96).save(file, optimize=True)

    def is_complete(self) -> bool:
        """Whether a page of this package has counted everything that it shows."""
        return not re.search(r"(?<!support\.)counting|Counting|Reading the tables", self.text())

    def wait_for(self, found: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Return the first true answer; AssertionError with the page's text if there is none in time."""
        until = time.monotonic() + seconds
        while not (answer := found()):
            assert time.monotonic() < until, self.text()
            time.sleep(0.1)
        return answer

    def _tell(self, command: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._ask("goog/cdp/execute", cmd=command, params=parameters)

    def _ask(self, command: str, **body: Any) -> Any:
        answer = httpx.post(f"{self._session}/{command}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    assert DRIVER is not None
    log = folder / "chromedriver.log"
    with log.open("w") as output:
        process = subprocess.Popen([DRIVER, "--port=0"], stdout=output, stderr=subprocess.STDOUT)
    try:
        while "successfully on port" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        port = log.read_text().partition("successfully on port ")[2].partition(".")[0]
        arguments = [*_OPTIONS, f"--user-data-dir={folder / 'profile'}"]
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}}}
        answer = httpx.post(f"http://127.0.0.1:{port}/session", json={"capabilities": wanted}, timeout=120)
        assert answer.status_code == 200, answer.text
        session = f"http://127.0.0.1:{port}/session/{answer.json()['value']['sessionId']}"
        try:
            yield Browser(session)
        finally:
            httpx.delete(session, timeout=60)
    finally:
        process.terminate()
        process.wait()

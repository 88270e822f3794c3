"""Chromium without a window, driven through its own DevTools protocol over a pipe: no package is needed for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LONGEST = 60.0  # seconds

# What the protocol wants to know of a key: code, and the character that it types.
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    " ": (32, " "),
}


def find_browser() -> str | None:
    """The path of a browser that can be driven; ``RECFX_BROWSER`` names one that has another name."""
    return next((path for name in (os.environ.get("RECFX_BROWSER", ""), *NAMES) if (path := shutil.which(name))), None)


# The protocol's pipe is file descriptors 3 and 4.
START = """
import fcntl, os, sys
given = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for number, each in zip((3, 4), given):
    os.dup2(each, number)
    os.close(each)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One page.

    Attributes:
        complaints: what its console has shown as an error or a warning, and exceptions.
        requests: the addresses that it has asked for.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **arguments)

    def open(self, path: Path, ready: str = "document.documentElement?.dataset.ready === 'true'") -> None:
        """Load a file, and wait until its script says that it is ready, or until something else is true."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(f"location.href !== 'about:blank' && {ready}")

    def run(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + LONGEST
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > until:
                raise AssertionError(f"never true: {script}; {self.complaints}")
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        script = f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{ block: 'center', inline: 'center' }});
            const {{ x, y, width, height }} = found.getBoundingClientRect();
            return [x + width / 2, y + height / 2];
        }})()"""
        x, y = self.run(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def show(self, *, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window, and what the system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def heard(self, method: str, given: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])


class Browser:
    """A browser that answers commands; use :func:`browser`."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number, self._buffer = 0, b""
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._pages[session] = Page(self, session)
        return self._pages[session]

    def call(self, method: str, session: str = "", **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            if "method" in answer and answer.get("sessionId") in self._pages:
                self._pages[answer["sessionId"]].heard(answer["method"], answer["params"])

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + LONGEST
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise AssertionError("the browser does not answer")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise AssertionError("the browser has ended")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A browser without a window and with an empty profile; ended afterwards."""
    to_browser, ours_out = os.pipe()
    ours_in, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [program, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(LONGEST)

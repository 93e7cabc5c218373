"""A headless Chromium, driven over two pipes by its DevTools protocol: what a page asks for, says, and looks like.

The browser reads commands from its file descriptor 3 and answers on 4, JSON ended by a zero byte
(`--remote-debugging-pipe`); nothing listens on a port, and nothing is needed beside Debian's package `chromium`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has none; the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
BECOME = """
import os, sys
for place, given in enumerate(sys.argv[1:3], start=3):
    os.dup2(int(given), place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts two pipes where the browser looks for them, and becomes it."""

WAIT_S = 60.0
"""How long a busy machine may take for one answer."""


def program() -> str | None:
    """The browser's path; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def _moved(descriptor: int) -> int:
    """The same pipe under a number that is not in the way of 3 and 4."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(descriptor)


class Browser:
    """One page of a browser that has just been started, and what happened in it."""

    def __init__(self, width: int = 1100, height: int = 1400) -> None:
        """Start it. `width`, `height`: of the window, in CSS pixels.

        Raises:
            RuntimeError: there is no browser, or it does not answer.
        """
        path = program()
        if path is None:
            raise RuntimeError("no Chromium is installed; on Debian: apt-get install chromium")
        self._asked: dict[str, str] = {}
        self.errors: list[str] = []
        """What scripts raised, and what the browser complained of."""
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self._number, self._buffer = 0, b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        theirs_in, theirs_out = (_moved(each) for each in (theirs_in, theirs_out))
        flags = (*FLAGS, f"--user-data-dir={self._folder.name}", "about:blank")
        self._process = subprocess.Popen(
            [sys.executable, "-SE", "-c", BECOME, str(theirs_in), str(theirs_out), path, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._folder.name},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for; not those inside the page (`data:`), nor what its own policy kept it from."""
        return list(self._asked.values())

    def open(self, page: Path) -> None:
        """Load a file and wait until all in it is loaded; what happened before is forgotten."""
        self._asked.clear()
        self.errors.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while self._event() != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page.

        Raises:
            RuntimeError: it raised.
        """
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def picture(self, target: Path, height: int | None = None) -> None:
        """Write what the page looks like as PNG: all of it, or its uppermost `height` CSS pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height or 10**6), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            RuntimeError: the browser refuses it, or does not answer in time.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            self._note(answer)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def _event(self) -> str:
        """Wait for the next event; its name."""
        answer = self._read()
        self._note(answer)
        return str(answer.get("method", ""))

    def _note(self, answer: dict[str, Any]) -> None:
        method, facts = answer.get("method"), answer.get("params", {})
        if method == "Network.requestWillBeSent" and not facts["request"]["url"].startswith("data:"):
            self._asked[facts["requestId"]] = facts["request"]["url"]
        elif method == "Network.loadingFailed" and facts.get("blockedReason") == "csp":
            self._asked.pop(facts["requestId"], None)
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(facts["exceptionDetails"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select([self._in], [], [], left)[0]:
                raise RuntimeError(f"the browser did not answer within {WAIT_S:g} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def close(self) -> None:
        """End it; a second call does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._in)
            os.close(self._out)
            self._folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

"""Drive a real browser: headless Chromium, by its own protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.platform_tools import chromium

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
    *("--window-size=900,640", "--remote-debugging-pipe", "about:blank"),
)


class Browser:
    """One page."""

    def __init__(self, directory: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        tool = chromium()
        words = [str(tool.path), f"--user-data-dir={directory}/profile", *_FLAGS]
        # It reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "browser", *words],
            env={**tool.env, "HOME": str(directory)},
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read = b""
        self._count = 0
        self._session = ""
        targets = self._call("Target.getTargets")["targetInfos"]
        [page] = [one["targetId"] for one in targets if one["type"] == "page"]
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, expression: str, *, timeout_s: float = 20.0) -> Any:
        """Wait until something holds; return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {expression}: {self.text()!r}"
            time.sleep(0.02)
        return value

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "char", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text="\r", windowsVirtualKeyCode=13)

    def click(self, selector: str) -> None:
        box = self.evaluate(
            f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        asked: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        deadline = time.monotonic() + 30.0
        while True:
            while b"\0" not in self._read:
                ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
                part = os.read(self._in, 1 << 20) if ready else b""
                assert part, f"the browser does not answer {method}, exit code {self._process.poll()}"
                self._read += part
            message, _, self._read = self._read.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._count:  # else an event
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait(10)


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    one = Browser(directory)
    try:
        yield one
    finally:
        one.close()

"""A real Chromium for tests, driven over its DevTools pipe: messages of JSON that end in a zero byte."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

WAIT_S = 60.0
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=900,900", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """The program, where one is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A tab of a browser.

    Args:
        writing: Descriptor that commands are written to.
        reading: Descriptor that answers and events are read from.
    """

    def __init__(self, writing: int, reading: int) -> None:
        self._writing, self._reading = writing, reading
        self._held, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        """What the page's console and its exceptions have said."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to an address."""
        self._call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript; promises are waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline_s = time.monotonic() + WAIT_S
        while not self.run(script):
            assert time.monotonic() < deadline_s, f"{script} did not become true; {self.problems}"
            time.sleep(0.05)

    def type(self, element: str, text: str) -> None:
        """Type into the element of this id, as a keyboard does."""
        self.run(f"document.getElementById('{element}').focus()")
        self._call("Input.insertText", text=text)

    def press_enter(self, modifiers: int = 0) -> None:
        """Press the enter key; modifiers: 8 is Shift."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": modifiers}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, element: str) -> None:
        """Click on the element of this id."""
        self.run(f"document.getElementById('{element}').click()")

    def attach(self, element: str, *files: Path) -> None:
        """Choose files in a field for files."""
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=f"#{element}")["nodeId"]
        self._call("DOM.setFileInputFiles", files=[str(file) for file in files], nodeId=node)

    def photograph(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Show the page in a window of this size, in light or dark colours."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._writing, json.dumps(asked).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            self._note(message)
        assert "error" not in message, (method, message["error"])
        result: dict[str, Any] = message["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            block = os.read(self._reading, 2**20)
            assert block, "the browser has ended"
            self._held += block
        first, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        said = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(said["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.problems.append(said["entry"]["text"])


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a browser whose profile lies in a folder of its own; the browser is ended afterwards."""
    program = find_chromium()
    assert program is not None
    from_us, to_us = os.pipe(), os.pipe()
    words = [program, *_OPTIONS, f"--user-data-dir={folder}"]
    placed = f'exec 3<&{from_us[0]} 4>&{to_us[1]} && exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", placed, "browser", *words],
        pass_fds=(from_us[0], to_us[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(from_us[0])
    os.close(to_us[1])
    try:
        yield Page(from_us[1], to_us[0])
    finally:
        os.close(from_us[1])  # it ends when nobody commands it
        os.close(to_us[0])
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(10)

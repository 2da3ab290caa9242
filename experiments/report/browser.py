"""A headless Chromium, driven over a pipe with the DevTools protocol: no driver, no port, no package beside it."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import RunError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
)
SECONDS = 60.0


def find_chromium() -> str | None:
    """The path of a Chromium on this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab of one browser, for a `with` block.

    Attributes:
        errors: what went to the console as an error, and every exception of a script.
        requests: every address that was asked for.
    """

    def __init__(self, chromium: str | None = None) -> None:
        found = chromium or find_chromium()
        if found is None:
            raise RunError(f"no browser on this machine: install chromium (looked for {', '.join(NAMES)})")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._chromium = found
        self._number = 0
        self._buffer = b""
        self._loaded = False

    def __enter__(self) -> "Browser":
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # Chromium takes commands from descriptor 3 and answers on 4; a shell puts them there, from numbers above both.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (command_read, answer_write)]
        flags = [*FLAGS, f"--user-data-dir={self._profile.name}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}', self._chromium, *flags, "about:blank"],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (command_read, answer_write, *ends):
            os.close(end)
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for end in (self._write, self._read):
            os.close(end)
        try:
            self._process.wait(10)  # it ends when its pipe does
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile.name, ignore_errors=True)  # its children may still be writing
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Gives a command and waits for its answer.

        Raises:
            RunError: where the browser refuses it, does not answer in time, or is gone.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise RunError(f"{self._chromium} ended before {method}") from None
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RunError(f"{method}: {answer['error'].get('message')}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path, anchor: str = "") -> None:
        """Loads a page of the disk, or goes to a place of it, and waits until that is done."""
        self._loaded = False
        answer = self.call("Page.navigate", url=page.resolve().as_uri() + (f"#{anchor}" if anchor else ""))
        if answer.get("errorText"):
            raise RunError(f"{page}: {answer['errorText']}")
        if "loaderId" in answer:
            self._wait_until_loaded()
        else:  # only the place has changed, which the page hears of in its next turn
            self.settle()

    def reload(self) -> None:
        """Loads the page again."""
        self._loaded = False
        self.call("Page.reload")
        self._wait_until_loaded()

    def settle(self) -> None:
        """Waits until what the page has been told has happened."""
        self.value("new Promise(resolve => setTimeout(resolve, 30))")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it; a promise is waited for.

        Raises:
            RunError: where it throws.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RunError(f"{expression}: {_words(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def size(self, width: int, height: int, mobile: bool = False, scale: float = 1.0) -> None:
        """Gives the window a size, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=mobile, deviceScaleFactor=scale
        )

    def media(self, media: str = "", scheme: str = "light") -> None:
        """Shows the page as on paper (media "print"), or in a scheme, light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def press(self, key: str) -> None:
        """Presses and releases a key: Tab, Enter, " "."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self) -> bytes:
        """What the window shows, PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def _wait_until_loaded(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not self._loaded:
            self._receive(deadline, "loading")

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise RunError(f"{self._chromium} did not answer within {SECONDS:.0f} s: {what}")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RunError(f"{self._chromium} ended: {what}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: Mapping[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(_words(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.errors.append(json.dumps(parameters["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


def _words(details: Mapping[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))

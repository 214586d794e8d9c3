"""A real headless Chromium, driven over a pair of pipes by its own protocol: no driver, no port, nothing downloaded."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # of root, in containers: it opens nothing but our own page
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Where it is; None where it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One window, in a ``with`` statement; its process and files are gone when that ends.

    Attributes:
        errors: What the page's console called an error, and exceptions that nobody caught, since `open`.
        requested: Addresses that were asked for since then.
    """

    def __init__(self, width: int = 1280, height: int = 1000) -> None:
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._numbers = itertools.count(1)
        self._pending = b""
        self._session = ""
        self._loaded = False

    def __enter__(self) -> Self:
        program = find_chromium()
        assert program is not None, "chromium is not installed"
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (theirs_in, theirs_out)]
        quiet = os.open(os.devnull, os.O_RDWR)
        given = ((quiet, 1), (quiet, 2), (high[0], 3), (high[1], 4))
        actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in given]
        arguments = [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._pid = os.posix_spawn(program, arguments, os.environ, file_actions=actions, setsid=True)
        for descriptor in (theirs_in, theirs_out, *high, quiet):
            os.close(descriptor)
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", **self._size)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._pid, signal.SIGKILL)  # it is a family of processes, and holds nothing that matters
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(self, url: str, *, dark: bool = False) -> None:
        """Go there, and wait until all of the page is loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._loaded = False
        self.errors.clear()
        self.requested.clear()
        self._call("Page.navigate", url=url)
        while not self._loaded:
            self._note(self._read())

    def evaluate(self, script: str) -> Any:
        """The value of an expression, in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """All of the page, as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        self._call("Emulation.setDeviceMetricsOverride", **(self._size | {"height": int(height)}))
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._in, 1 << 20)
            assert part, "chromium ended"
            self._pending += part
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        event, said = message.get("method", ""), message.get("params", {})
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(said["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in {"error", "warning"}:
            self.errors.append(json.dumps(said["args"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in {"error", "warning"}:
            self.errors.append(said["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requested.append(said["request"]["url"])

"""Opens a page in a real headless Chromium, offline, by its DevTools protocol over a pipe, and says what happened."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)
TIMEOUT_S = 90.0


def find() -> str | None:
    """The path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. ``events`` holds every event of the protocol so far, in order: (method, parameters)."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4, each message ended by a zero byte.
        script = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_child, from_child), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )
        os.close(to_child)
        os.close(from_child)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer, self._sent, self._session = b"", 0, ""

    def __enter__(self) -> Self:
        pages = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._to)  # Chromium ends with its pipe
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._from)

    def open(self, page: Path) -> None:
        """Go to a file and wait until it is loaded."""
        before = len(self.events)
        self.ask("Page.navigate", url=page.as_uri())
        self._until(lambda: any(method == "Page.loadEventFired" for method, _ in self.events[before:]))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._sent += 1
        number = self._sent
        message = {"id": number, "method": method, "params": parameters}
        os.write(self._to, json.dumps({**message, **({"sessionId": self._session} if self._session else {})}).encode())
        os.write(self._to, b"\0")
        self._until(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, happened: Any) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not happened():
            left_s = end - time.monotonic()
            assert left_s > 0, "Chromium does not answer"
            if select.select([self._from], [], [], left_s)[0]:
                read = os.read(self._from, 1 << 16)
                assert read, f"Chromium ended with exit code {self._process.wait()}"
                *messages, self._buffer = (self._buffer + read).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append((message["method"], message.get("params", {})))

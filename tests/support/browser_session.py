"""Interactive browser session: open, fill in and click pages with one set of cookies."""

import itertools
import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
from websockets.sync.client import connect

from tests.support.browser_page import FLAGS, chromium

WITHIN = 90.0


class BrowserSession:
    """Control headless Chromium over its debugging protocol."""

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        port = Path(profile) / "DevToolsActivePort"
        self._until(lambda: port.is_file() and port.read_text().count("\n") > 0)
        pages = httpx.get(f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json", trust_env=False).json()
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self._socket = self._stack.enter_context(connect(address, max_size=None, proxy=None))
        self._numbers = itertools.count(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression evaluated in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def shows(self, text: str) -> None:
        """Wait until the page shows a text."""
        self._until(lambda: text in (self.run("document.body ? document.body.innerText : ''") or ""))

    def cookies(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("Network.getCookies")["cookies"]
        return found

    def _ask(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=WITHIN))
            if answer.get("id") == number:
                return answer.get("result", {"result": {}})

    @staticmethod
    def _until(condition: Any) -> None:
        deadline = time.monotonic() + WITHIN
        while not condition():
            assert time.monotonic() < deadline, "the browser does not show it"
            time.sleep(0.05)

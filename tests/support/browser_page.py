"""Pages as rendered by a real browser: headless Chromium, installed if missing."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support.system_packages import found_or_installed

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,900",
)
LOADS = 8
PATIENCE_MS = 30_000
"""Virtual time of the page, which advances as fast as its requests are answered."""


def chromium() -> str:
    """Return the path of the browser."""
    found = found_or_installed(installed, "chromium")
    assert found is not None, "these tests need a browser: install the package chromium"
    return found


def installed() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def page(url: str, *texts: str) -> str:
    """Return the document after its scripts ran; reload while one of `texts` is missing.

    Headless Chromium ends the page's virtual time when it seems idle, which can cut off a chart that is drawn later.
    """
    document = ""
    for _ in range(LOADS):
        document = load(url, "--dump-dom")
        if all(text in document for text in texts):
            return document
    missing = [text for text in texts if text not in document]
    raise AssertionError(f"{url} does not show {missing}: {document[-2000:]}")


def screenshot(url: str, file: Path) -> None:
    load(url, f"--screenshot={file}")


def load(url: str, output: str) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", f"--virtual-time-budget={PATIENCE_MS}", output, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout

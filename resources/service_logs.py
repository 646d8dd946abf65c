"""Configure logs of the stack's services from the settings' section `logging`."""

import json
import logging
from datetime import UTC, datetime
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["json", "text"]
TEXT = "%(asctime)s %(levelname)s %(message)s"
CHATTY = ("httpx", "httpcore", "urllib3", "kubernetes")
"""Loggers that report every request at level info."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(level: Level, format: Format) -> None:
    """Configure the logs of this process, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)

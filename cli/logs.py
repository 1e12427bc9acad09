"""Where log lines of a process go: standard error, one line an event, text in a terminal's form or JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

ENV_LOG_FORMAT = "HEADRACE_LOG_FORMAT"
"""`json` or `text` (the default)."""


def start_logging(level: str) -> None:
    """Send all records at `level` and above to standard error. Called once, before a room is imported."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if os.environ.get(ENV_LOG_FORMAT) == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "httpx", "httpcore", "grpc"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


class TextLines(logging.Formatter):
    """`12:00:00.123 I router.http event field=value`; the package's own name is left out."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("headrace.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {name} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    """One JSON object a line, for collectors."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)

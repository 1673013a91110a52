"""Write structured logs for log collectors: one JSON object per line.

    {"time": "2026-03-01T12:00:00.123Z", "level": "WARNING", "logger": "gateway", "message": "…", "request_id": "…"}

Fields after the first four come from `extra={"fields": {…}}`. They may hold ids of requests, but never ids of users, titles,
tokens or query strings, because logs are kept longer, and read by more people, than the shop's data.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return format_json_line(record.levelname, record.name, record.getMessage(), record.created, **fields)


def format_json_line(level: str, logger: str, message: str, unix_s: float, **fields: Any) -> str:
    """Return one line of a log. unix_s: when it happened; fields: further fields"""
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1_000):03d}Z"
    return json.dumps({"time": moment, "level": level, "logger": logger, "message": message, **fields}, default=str)


def print_json_line(level: str, logger: str, message: str, **fields: Any) -> None:
    """Print one line of a log, for programs that must start fast or tell of themselves. fields: further fields"""
    print(format_json_line(level, logger, message, time.time(), **fields), flush=True)


def configure_logging(level: int) -> None:
    """Send the records of all loggers, including libraries', to standard output as JSON. level: as in `logging`"""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)

"""Reading tritonserver's log: which model failed first, and the lines that say why."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Each pattern finds (model, reason) on one line; the reason is quoted in the log, its newlines written as \n.
FAILURES = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)"),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)"),
    re.compile(r"failed to load model '(?P<model>[^']+)': (?P<reason>.*)"),
    re.compile(r"(?P<reason>.*ensemble '?(?P<model>(?!tensor\b)\w+)'?.*)"),
)
ERROR_LINE = re.compile(r"^[EF]\d{4} ")
PREFIX = re.compile(r'^[EFWI]\d{4} [\d:.]+ \d+ [\w./]+:\d+\] "?')
TAIL_LINES = 20
UNHEALTHY = "is not healthy"  # all that the server says of a process that is gone
LOST = "Its Python process ended while loading: crashed, or killed for memory."


@dataclass(frozen=True)
class Failure:
    model: str | None  # None: the server failed as a whole
    reason: str

    def __str__(self) -> str:
        return (
            f"model {self.model} failed to load:\n{self.reason}" if self.model else f"the last lines of its log:\n{self.reason}"
        )


def first_failure(log: str) -> Failure | None:
    """The first model that failed according to `log`, if one did."""
    for line in log.splitlines():
        if not ERROR_LINE.match(line):
            continue
        message = PREFIX.sub("", line).rstrip('"')
        for pattern in FAILURES:
            if found := pattern.search(message):
                reason = found["reason"].replace("\\n", "\n").strip()
                return Failure(found["model"], f"{LOST} {reason}" if UNHEALTHY in reason else reason)
    return None


def unfinished(log: str, dead: int) -> Failure:
    """When `dead` model processes ended without a word: the models that began to load and did not finish."""
    begun = re.findall(r'"loading: ([^":]+):\d+"', log)
    done = set(re.findall(r"successfully loaded '([^']+)'", log))
    waiting = [name for name in dict.fromkeys(begun) if name not in done]
    last = "\n".join(log.splitlines()[-TAIL_LINES:])
    reason = f"{dead} Python model process(es) ended while loading: crashed, or killed for memory. The last log lines:\n{last}"
    return Failure(", ".join(waiting), reason)


def explain(log: str) -> Failure:
    """Why a server ended: its first failing model, else its error lines, else the last lines it wrote."""
    if failure := first_failure(log):
        return failure
    lines = log.splitlines()
    errors = [line for line in lines if ERROR_LINE.match(line) or line.startswith("error:")]
    return Failure(None, "\n".join((errors or lines)[-TAIL_LINES:]) or "(nothing was written)")

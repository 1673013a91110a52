"""Name the refused rows of a request in one error message, and read them from it again.

    2 of 16 rows are refused • Rows 3, 7: item_id is negative; expected the shop's own id, 0 or larger

An error of tritonserver is one text, of which clients show the first line. With these numbers a caller sends the other rows
again, without a search for the bad ones.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from urllib.parse import quote

MOST_BYTES = 3_000  # of the reasons: gRPC drops an error with more than 8 KiB of headers
MOST_UNEXPLAINED = 200  # rows that are named without their reason
UNEXPLAINED = "refused too, for a reason that does not fit here; send it alone to read it"
MARK = " • "  # before each group; a fault has none
SENT_AS_IT_IS = (string.ascii_letters + string.digits + string.punctuation + " ").replace("%", "")  # not encoded by gRPC
# At the start, behind the client's own words only: later, it could be the text of a caller that some message quotes.
HEADER = re.compile(r"(?P<before>(?:The server at \S+ refuses this request: )?)\d+ of (?P<rows>\d+) rows are refused")
GROUP = re.compile(r"Rows? ((?:\d+, )*\d+): (.*)")


def describe_refused(faults: Mapping[int, str], n_rows: int) -> str:
    """Return one message for the faults of a request, by row. A request of one row needs no number: it gets its fault.

    n_rows: number of rows of the request
    """
    if n_rows == 1:
        return next(iter(faults.values()))
    rows_by_fault: dict[str, list[int]] = {}
    for row in sorted(faults):
        fault = " ".join(faults[row].replace(MARK.strip(), "·").split())
        rows_by_fault.setdefault(fault, []).append(row)
    message = f"{len(faults)} of {n_rows} rows are refused"
    unexplained: list[int] = []
    left_bytes = MOST_BYTES
    for fault, rows in rows_by_fault.items():
        group = _format_group(rows, fault)
        left_bytes -= len(quote(group, safe=SENT_AS_IT_IS))
        if left_bytes < 0:
            unexplained += rows
        else:
            message += group
    if unexplained:
        message += _format_group(sorted(unexplained)[:MOST_UNEXPLAINED], UNEXPLAINED)
    return message


def read_refused(message: str, n_rows: int) -> dict[int, str]:
    """Return the faults by row that a message of `describe_refused` names, each after the words before that message.

    n_rows: number of rows that were sent; empty where the message is of another number of rows, or names none
    """
    header = HEADER.match(message)
    if header is None or int(header["rows"]) != n_rows:
        return {}
    groups = filter(None, map(GROUP.fullmatch, message[header.end() :].split(MARK)[1:]))
    faults = {int(row): header["before"] + group[2] for group in groups for row in group[1].split(", ")}
    return faults if all(row < n_rows for row in faults) else {}


def _format_group(rows: list[int], fault: str) -> str:
    return f"{MARK}Row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}: {fault}"

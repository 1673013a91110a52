"""The errors that this project raises on purpose. Each class names a cause and carries its gRPC status.

    RecommenderError
    ├── ConfigError        a setting or description is wrong            INVALID_ARGUMENT
    ├── DataError          a data set cannot be used                    INVALID_ARGUMENT
    ├── ExportError        an artifact cannot be produced or published  FAILED_PRECONDITION
    ├── ArtifactError      an artifact on disk is broken or mismatched  FAILED_PRECONDITION (the model refuses to load)
    ├── RequestError       one request is malformed                     INVALID_ARGUMENT
    ├── DependencyError    a store or service is down or late           UNAVAILABLE
    └── ServerError        tritonserver did not start, answer or stop   UNAVAILABLE

Messages give the fact, then what was expected, then the remedy.
"""

import errno
import sys
from collections.abc import Callable, Sequence


class RecommenderError(Exception):
    """Base of all errors raised on purpose; `status` is the gRPC status name it maps to."""

    status = "INTERNAL"


class ConfigError(RecommenderError):
    status = "INVALID_ARGUMENT"


class DataError(RecommenderError):
    status = "INVALID_ARGUMENT"


class ExportError(RecommenderError):
    status = "FAILED_PRECONDITION"


class ArtifactError(RecommenderError):
    status = "FAILED_PRECONDITION"


class RequestError(RecommenderError):
    """rows: the malformed ones of a batch that was refused as a whole; empty where they are not known"""

    status = "INVALID_ARGUMENT"

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class DependencyError(RecommenderError):
    status = "UNAVAILABLE"


class ServerError(RecommenderError):
    status = "UNAVAILABLE"


def describe_redis_error(error: Exception) -> str:
    """Return the reason of an error of redis-py: its `repr` has none, and its text may hold the command, with ids of users."""
    return str(error).rpartition(" of pipeline caused error: ")[2] or type(error).__name__


def run_program(program: Callable[[], object]) -> None:
    """Run a command-line program. An error raised on purpose, or a refused file, ends it with exit code 1 and a message."""
    try:
        program()
    except RecommenderError as error:
        sys.exit(f"error: {error}")
    except PermissionError as error:
        if error.filename is None:  # the error is about a socket or a process
            raise
        sys.exit(
            f"error: {error.filename}: permission denied. Run the command as the user who owns it, or give this user access."
        )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        sys.exit(f"error: {error}. Free space, or make the folder writable, and run the command again.")

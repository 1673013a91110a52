"""`make check`: read a repository and report what will fail, and how to fix it, without starting anything."""

from __future__ import annotations

from pathlib import Path

from export.profiles import find_profile_name, load_profile
from repository.checks.check import run_checks
from repository.checks.finding import Finding


def check_repository(repository: Path) -> list[Finding]:
    """Return all findings of the checks of the repository's profile, errors first."""
    return run_checks(repository, *load_profile(find_profile_name(repository)).list_checks())


def list_checked_by_format(repository: Path) -> tuple[str, ...]:
    """Return what the checks could only compare with a documented format, because the software that reads it is not here."""
    return tuple(load_profile(find_profile_name(repository)).list_checked_by_format(repository))

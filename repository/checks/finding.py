"""The findings of checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One fact to act on.

    level: "error" or "warning"; where: a file, or a key in it; fact: what is wrong, without a full stop
    remedy: what was expected, and what to do
    parser: for ps.json, which of NVIDIA's two parsers would fail ("A", "B" or "both"); empty elsewhere
    """

    level: str
    where: str
    fact: str
    remedy: str
    parser: str = ""

    def __str__(self) -> str:
        parser = f" (parser {self.parser})" if self.parser else ""
        return f"{self.level}{parser} {self.where}: {self.fact}. {self.remedy}".rstrip()


def make_finding(level: str, where: str, message: str, parser: str = "") -> Finding:
    """Return a finding from a message of the form "fact. expectation. remedy", or of a fact alone."""
    fact, _, remedy = message.partition(". ")
    return Finding(level, where, fact.removesuffix("."), remedy, parser)


def count_errors(findings: list[Finding]) -> int:
    return sum(finding.level == "error" for finding in findings)

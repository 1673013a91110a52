"""Read ps.json as NVIDIA's two parsers do: databases as A reads them, models as B reads them (parsers.py)."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from hps_config.checks import check_config, check_keys_present
from hps_config.parsers import load_json, read_as_a, read_as_b
from hps_config.ps_config import UNREAD, ModelParams, PsConfig
from repository.checks.finding import Finding
from serving.contract.errors import ConfigError


def read_ps_json(path: Path | str) -> PsConfig:
    """Return the configuration that both parsers would serve. Raises ConfigError with every error of the file."""
    document = load_json(Path(path))
    config, findings = check_document(document)
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        listed = "\n  ".join(errors)
        raise ConfigError(f"{path} would not be served by NVIDIA's parsers. Correct:\n  {listed}")
    return config


def check_ps_json(path: Path | str) -> list[Finding]:
    """Return all errors and warnings of a ps.json, errors first. Raises ConfigError only when it is not JSON."""
    _, findings = check_document(load_json(Path(path)))
    return sorted(findings, key=lambda finding: finding.level != "error")


def check_document(document: dict) -> tuple[PsConfig, list[Finding]]:
    """Check a parsed ps.json. Return the configuration that serving would use, and the findings of parsers and rules."""
    a, b = read_as_a(document), read_as_b(document)
    config = _with_row_formats(_merge(a.config, b.config), document)
    findings = [*a.findings, *b.findings]
    unread = {finding.where for finding in findings if finding.level == "error"}  # the rules below would only report them again
    rule_findings = [*check_keys_present(document), *check_config(config)]
    return config, findings + [finding for finding in rule_findings if finding.where not in unread]


def _with_row_formats(config: PsConfig, document: dict) -> PsConfig:
    """Add row formats, our own key that both parsers ignore; `checks.py` reports values that are not lists of strings."""
    models = []
    for i, params in enumerate(config.models):
        entry = document["models"][i]
        formats = entry.get("row_format_per_table") if isinstance(entry, dict) else None
        if formats is None:
            formats = ["fp32"] * len(params.sparse_files)
        listed = formats if isinstance(formats, list) else [formats]
        models.append(replace(params, row_format_per_table=tuple(str(row_format) for row_format in listed)))
    return replace(config, models=tuple(models))


def _merge(a: PsConfig, b: PsConfig) -> PsConfig:
    """Return the databases of A and the models of B, with A's values for model keys that B does not read."""
    only_a = [schema.name for schema in fields(ModelParams) if schema.metadata["b"] == UNREAD]
    pairs = zip(a.models, b.models, strict=True)
    return replace(a, models=tuple(replace(in_b, **{name: getattr(in_a, name) for name in only_a}) for in_a, in_b in pairs))

"""Settings of a gateway: a TOML file, or the defaults. docs/gateway.md lists them."""

from __future__ import annotations

import tomllib
from ipaddress import ip_address
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.contract.errors import ConfigError

LOOPBACK = "127.0.0.1"


class GatewaySettings(BaseModel):
    """What a gateway may be told. Times in milliseconds or seconds, as their names say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = LOOPBACK
    tokens: Path | None = None  # a file of `python -m gateway token`; None: no token is asked for
    servers: tuple[str, ...] = ()  # further host:port of gRPC, asked when the first fails
    hedge_after_ms: float | None = Field(default=None, gt=0)
    deadline_ms: float = Field(default=250.0, gt=0, le=60_000)
    most_deadline_ms: float = Field(default=5_000.0, gt=0, le=60_000)
    most_in_flight: int = Field(default=256, gt=0)  # recommendations; beyond, the fallback answers
    body_bytes: int = Field(default=1 << 20, gt=0)
    body_timeout_s: float = Field(default=10.0, gt=0)
    header_bytes: int = Field(default=16 << 10, ge=1 << 10)
    header_timeout_s: float = Field(default=10.0, gt=0)
    requests_per_s: float = Field(default=1_000.0, gt=0)  # of one client, on average
    burst: int = Field(default=2_000, gt=0)  # of one client, at once

    @model_validator(mode="after")
    def _refuse_strangers(self) -> GatewaySettings:
        if not ip_address(self.host).is_loopback and self.tokens is None:
            raise ValueError(
                f"host is {self.host}, which strangers reach, and no tokens are asked for. Make some with "
                "`python -m gateway token --file tokens.txt --name shop` and set tokens, or leave host out"
            )
        return self


def read_settings(path: Path | None) -> GatewaySettings:
    """Return the settings in a file, or the defaults. Raises ConfigError."""
    if path is None:
        return GatewaySettings()
    try:
        values = tomllib.loads(path.read_text())
        if "tokens" in values:
            values["tokens"] = path.parent / values["tokens"]
        return GatewaySettings.model_validate(values)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Expected TOML; docs/gateway.md lists the keys.") from error
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "the settings"
        known = ", ".join(GatewaySettings.model_fields)
        raise ConfigError(f"{path}: {key}: {fault['msg']}. The keys are {known}.") from error

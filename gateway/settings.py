"""Settings of a gateway: a TOML file, or the defaults. docs/gateway.md lists them."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from repository.toml_files import open_toml, refuse_unknown_keys
from serving.contract.errors import ConfigError
from triton_recommender.transports import is_address

LOOPBACK = "127.0.0.1"
HOST_NAME = re.compile(r"[\w.-]+")
LEAST_EXPOSURE_BYTES = 16 << 20  # two files of the exposure log: one of 8 MiB (live/exposure_merges.py), and one being written
FILES = {  # settings that name files; paths are relative to the settings file
    "tokens",
    "certificate",
    "key",
    "client_authorities",
    "server_authorities",
    "server_certificate",
    "server_key",
}


class GatewaySettings(BaseModel):
    """Settings of a gateway, with their defaults. Names end in the unit."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    host: str = LOOPBACK
    certificate: Path | None = None  # PEM, with `key`: TLS
    key: Path | None = None
    client_authorities: Path | None = None  # PEM: callers must show a certificate that one of these signed
    tokens: Path | None = None  # a file of `python -m gateway token`; None: no token is required
    hosts: tuple[str, ...] = Field(default=(), strict=False)  # names at which it also answers without tokens
    servers: tuple[str, ...] = Field(default=(), strict=False)  # further host:port of gRPC, asked when the first fails
    server_authorities: Path | None = None  # PEM: who signed the servers' certificates; TLS to the servers
    server_certificate: Path | None = None  # PEM, with `server_key`: shown to servers that require a client certificate
    server_key: Path | None = None
    hedge_after_ms: float | None = Field(default=None, gt=0)  # then a second server is asked
    deadline_ms: float = Field(default=250.0, gt=0, le=60_000)  # of a request that names none
    most_deadline_ms: float = Field(default=5_000.0, gt=0, le=60_000)  # that a request may name
    most_in_flight: int = Field(default=256, gt=0)  # recommendations; beyond, the fallback answers
    calls_in_flight: int = Field(default=2, gt=0)  # further recommendations wait, and go together in the next call
    latency_factor: float = Field(default=4.0, gt=1)  # times the latency without a queue: beyond, fewer are admitted
    latency_floor_ms: float = Field(default=20.0, gt=0)  # below this latency, admission is never reduced
    body_bytes: int = Field(default=1 << 20, gt=0)
    body_timeout_s: float = Field(default=10.0, gt=0)
    header_bytes: int = Field(default=16 << 10, ge=1 << 10)
    header_timeout_s: float = Field(default=10.0, gt=0)
    log_requests: bool = False  # a line of JSON each
    requests_per_s: float = Field(default=5_000.0, gt=0)  # of one client, on average
    burst: int = Field(default=10_000, gt=0)  # of one client, at once
    exposure_share: float = Field(default=0.0, ge=0, le=1)  # of answers that the exposure log keeps
    exposure_days: float = Field(default=90.0, gt=0)
    exposure_bytes: int = 1 << 30

    @property
    def hedge_after_s(self) -> float:
        """The seconds after which a second server is asked, if there is one. By default both have the same time to answer."""
        return (self.hedge_after_ms or self.deadline_ms / 2) / 1_000

    @model_validator(mode="after")
    def _refuse_half_a_certificate(self) -> GatewaySettings:
        for certificate, key in (("certificate", "key"), ("server_certificate", "server_key")):
            if (getattr(self, certificate) is None) != (getattr(self, key) is None):
                raise ValueError(f"one of {certificate} and {key} is set; expected both, or neither")
        if self.client_authorities is not None and self.certificate is None:
            raise ValueError("client_authorities is set without certificate and key; callers can show theirs over TLS only")
        return self

    @field_validator("host")
    @classmethod
    def _require_address(cls, host: str) -> str:
        if host == "localhost":
            return LOOPBACK
        try:
            ip_address(host)
        except ValueError:
            raise ValueError(f"{host!r} is no IP address; expected one of this machine, {LOOPBACK} or 0.0.0.0") from None
        return host

    @field_validator("hosts")
    @classmethod
    def _require_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not HOST_NAME.fullmatch(host):
                raise ValueError(
                    f"{host!r} is no host name; expected one without scheme, port and path, such as 'shop.example'"
                )
        return tuple(map(str.lower, hosts))

    @field_validator("servers")
    @classmethod
    def _require_addresses(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        for server in servers:
            if not is_address(server.rpartition("://")[2]):
                raise ValueError(f"{server!r} is no address; expected host:port of a server's gRPC, such as 'shop-2:8001'")
        return servers

    @field_validator("exposure_bytes")
    @classmethod
    def _require_room(cls, exposure_bytes: int) -> int:
        if exposure_bytes < LEAST_EXPOSURE_BYTES:
            raise ValueError(
                f"{exposure_bytes:,} bytes hold less than two files of the exposure log, so answers would be removed as soon "
                f"as they are written, and every experiment stopped; expected at least {LEAST_EXPOSURE_BYTES:,} (16 MiB). "
                "Raise it, or leave it out for 1 GiB"
            )
        return exposure_bytes

    @model_validator(mode="after")
    def _require_tokens(self) -> GatewaySettings:
        if not ip_address(self.host).is_loopback and self.tokens is None:
            raise ValueError(
                f"host is {self.host}, which other machines can reach, but no tokens are required. Make some with "
                "`python -m gateway token --file tokens.txt --name shop` and set tokens, or leave host out"
            )
        return self


def read_settings(path: Path | None, **server_files: Path | None) -> GatewaySettings:
    """Return the settings in a file, or the defaults. Raises ConfigError.

    server_files: server_authorities, server_certificate and server_key, where the file does not set them
    """
    settings = _read_file(path)
    left_out = {name: file for name, file in server_files.items() if getattr(settings, name) is None}
    return settings.model_copy(update=left_out)


def _read_file(path: Path | None) -> GatewaySettings:
    if path is None:
        return GatewaySettings()
    with open_toml(path, "docs/gateway.md lists the keys") as values:
        refuse_unknown_keys(values, GatewaySettings)
        for name in sorted(FILES & values.keys()):
            if not isinstance(values[name], str):
                raise ConfigError(f"{name} is {values[name]!r}; expected the path of a file, in quotes.")
            values[name] = path.parent / values[name]
            if not values[name].is_file():
                raise ConfigError(f"{name} is {values[name]}, which is no file. Correct the path.")
        return GatewaySettings.model_validate(values)

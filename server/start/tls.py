"""Options for TLS on a server's gRPC, from a folder of PEM files:

    certificate.pem, key.pem    the server's certificate; it must name localhost and 127.0.0.1, which local commands connect to
    authorities.pem             the authorities that signed that certificate and, for mutual TLS, those of all callers
    caller.pem, caller.key      for mutual TLS, the certificate of local commands and the gateway. Without these two files
                                callers need no certificate

Triton's HTTP and metrics have no TLS: close HTTP (`--no-http`), and keep metrics on this machine.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from serving.contract.errors import ConfigError

CERTIFICATE, KEY, AUTHORITIES = "certificate.pem", "key.pem", "authorities.pem"
CALLER, CALLER_KEY = "caller.pem", "caller.key"


@dataclass(frozen=True)
class ServerTls:
    """The TLS files in `folder`. Raises ConfigError when one is missing."""

    folder: Path

    def __post_init__(self) -> None:
        required = [CERTIFICATE, KEY, AUTHORITIES, *((CALLER, CALLER_KEY) if self.is_mutual else ())]
        if missing := [name for name in required if not (self.folder / name).is_file()]:
            raise ConfigError(
                f"{self.folder} has no {', '.join(missing)}; TLS needs {', '.join(required)} as PEM. See docs/operating.md."
            )

    def check_files(self) -> None:
        """Raise ConfigError for a file that TLS cannot use. tritonserver would say that its port is taken, or never answer."""
        pairs = {CERTIFICATE: KEY} | ({CALLER: CALLER_KEY} if self.is_mutual else {})
        context, name = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), AUTHORITIES
        try:
            context.load_verify_locations(self.folder / AUTHORITIES)
            for certificate, key in pairs.items():
                name = f"{certificate} with {key}"
                context.load_cert_chain(self.folder / certificate, self.folder / key, password="")  # none is asked for
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"{name} in {self.folder} cannot be used: {error}. Expected PEM files that this user may read, and the key of "
                "the certificate, without a password. See docs/operating.md."
            ) from error

    @property
    def is_mutual(self) -> bool:
        return (self.folder / CALLER).exists() or (self.folder / CALLER_KEY).exists()

    @property
    def server_options(self) -> list[str]:
        """tritonserver's options for TLS."""
        options = [f"--grpc-server-cert={self.folder / CERTIFICATE}", f"--grpc-server-key={self.folder / KEY}"]
        if self.is_mutual:
            return ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={self.folder / AUTHORITIES}", *options]
        return ["--grpc-use-ssl=true", *options]

    @property
    def client_options(self) -> dict[str, str | bool]:
        """Options of tritonclient's gRPC client for a caller on this machine."""
        options: dict[str, str | bool] = {"ssl": True, "root_certificates": str(self.folder / AUTHORITIES)}
        if self.is_mutual:
            options |= {"private_key": str(self.folder / CALLER_KEY), "certificate_chain": str(self.folder / CALLER)}
        return options

    @property
    def gateway_options(self) -> list[str]:
        """The gateway's options for calling this server."""
        names = {"--server-authorities": AUTHORITIES}
        if self.is_mutual:
            names |= {"--server-certificate": CALLER, "--server-key": CALLER_KEY}
        return [part for option, name in names.items() for part in (option, str(self.folder / name))]

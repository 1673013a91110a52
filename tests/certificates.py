"""Certificates for tests of TLS."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str) -> None:
    """Make <name>.pem, a certificate of this machine that signs itself, and <name>.key."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
    subprocess.run(command, check=True, capture_output=True)

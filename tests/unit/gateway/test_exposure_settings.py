"""The exposure log keeps at least as much as its own files take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings import GatewaySettings, read_settings
from live.exposure_merges import MERGED_BYTES
from serving.contract.errors import ConfigError

LEAST = 2 * MERGED_BYTES


def read_bytes_setting(folder: Path, value: int) -> GatewaySettings:
    path = folder / "gateway.toml"
    path.write_text(f"exposure_bytes = {value}\n")
    return read_settings(path)


def test_room_for_two_files_of_the_log_is_enough(tmp_path):
    assert read_bytes_setting(tmp_path, LEAST).exposure_bytes == LEAST


@pytest.mark.parametrize("value", [1, LEAST - 1, 0, -1])
def test_less_room_is_refused_with_what_to_do(tmp_path, value):
    said = rf"exposure_bytes: {value:,} bytes hold less than .*; expected at least {LEAST:,} \(16 MiB\)\. Raise it, or leave"
    with pytest.raises(ConfigError, match=said):
        read_bytes_setting(tmp_path, value)

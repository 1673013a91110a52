"""Specify an embedding table: its name, its size, and the format of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from serving.contract.errors import ConfigError
from serving.tables.formats.names import check_name

ROW_FORMATS = ("fp32", "fp16", "int8", "int4")  # widest first


@dataclass(frozen=True)
class TableSpec:
    """One embedding table. `row_format` is that of L2 in shared memory; L1 holds decoded rows, L3 fp32 as HPS does."""

    name: str
    rows: int
    width: int  # values per row
    row_format: str = "fp32"
    keys_per_sample: int = 1  # keys that one sample looks up (more than 1 for multi-hot features)
    default_value: float = 0.0  # fills the vector of a key that no level holds

    def __post_init__(self) -> None:
        check_name("table", self.name)
        for field in ("rows", "width", "keys_per_sample"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"table {self.name}: {field} = {value!r}. Expected an integer of at least 1. Correct {field}."
                )
        if self.row_format not in ROW_FORMATS:
            raise ConfigError(
                f"table {self.name}: row_format = {self.row_format!r}. Expected one of {', '.join(ROW_FORMATS)}. "
                "Correct row_format."
            )

    @property
    def fp32_row_bytes(self) -> int:
        """Bytes of one row in L1, in L3, in Redis, in Kafka messages and in sparse files."""
        return 4 * self.width

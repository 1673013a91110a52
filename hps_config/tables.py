"""What an embedding table is: rows, width and row format, and the bytes one row takes in each format."""

from __future__ import annotations

from dataclasses import dataclass

from stages.embeddings.formats.names import check_name
from stages.errors import ConfigError

# bytes per value, and bytes beside the values: int8 and int4 rows carry a float16 scale and a float16 offset
ROW_FORMATS: dict[str, tuple[float, int]] = {"fp32": (4, 0), "fp16": (2, 0), "int8": (1, 4), "int4": (0.5, 4)}


def row_bytes(width: int, row_format: str) -> int:
    """Bytes of one encoded row of `width` values; an odd int4 row rounds its last half byte up."""
    per_value, beside = ROW_FORMATS[row_format]
    return -(-int(width * per_value * 2) // 2) + beside


@dataclass(frozen=True)
class TableSpec:
    """One embedding table. `row_format` is that of L2 in shared memory; L1 holds decoded rows, L3 fp32 as HPS does."""

    name: str
    rows: int
    width: int  # values per row
    row_format: str = "fp32"
    keys_per_sample: int = 1  # keys one sample asks of this table (multi-hot features ask more)
    default_value: float = 0.0  # fills the vector of a key that no level holds
    dense: bool = True  # its keys are 0 … rows - 1; else any int64

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
    def row_bytes(self) -> int:
        """Bytes of one row in `row_format`, without its key."""
        return row_bytes(self.width, self.row_format)

    @property
    def fp32_row_bytes(self) -> int:
        """Bytes of one row in L3, in Redis, in Kafka messages and in sparse files."""
        return row_bytes(self.width, "fp32")

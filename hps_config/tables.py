"""Specify an embedding table: its name, its size, and the format of its rows."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from serving.tables.formats.names import check_name

RowFormat = Literal["fp32", "fp16", "int8", "int4"]  # widest first
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
Positive = Annotated[int, Field(ge=1)]


class TableSpec(BaseModel):
    """One embedding table. `row_format` is that of L2 in shared memory; L1 holds decoded rows, L3 fp32 as HPS does."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    name: Annotated[str, AfterValidator(lambda name: check_name("table", name))]
    rows: Positive
    width: Positive  # values per row
    row_format: RowFormat = "fp32"
    keys_per_sample: Positive = 1  # keys that one sample looks up (more than 1 for multi-hot features)
    default_value: float = 0.0  # fills the vector of a key that no level holds

    @property
    def fp32_row_bytes(self) -> int:
        """Bytes of one row in L1, in L3, in Redis, in Kafka messages and in sparse files."""
        return 4 * self.width

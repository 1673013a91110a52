"""Encode and decode rows in the formats of L1 and L2: fp32, fp16, int8 and int4.

An int8 or int4 row is its codes, then a float16 scale and a float16 offset of its own: value = code · scale + offset.
The offset is rounded down and the scale up, so that the codes cover the row's whole range and errors are at most half a step.
Encoding a decoded row again is lossless only for fp32 and fp16, so a row is encoded once, from the fp32 row of L3 or an update.
"""

from __future__ import annotations

import numpy as np

from serving.contract.errors import ConfigError, DataError

FP16_MAX = float(np.finfo(np.float16).max)
HIGHEST_CODES = {"int8": 255, "int4": 15}
SCALE_BYTES = 4  # float16 scale, float16 offset


class RowCodec:
    """Encodes and decodes rows of one width in one format. An encoded row has `columns` values of `dtype`, `row_bytes` bytes.

    Raises ConfigError for an unknown format.
    """

    def __init__(self, row_format: str, width: int) -> None:
        shapes = {
            "fp32": (np.float32, width),
            "fp16": (np.float16, width),
            "int8": (np.uint8, width + SCALE_BYTES),
            "int4": (np.uint8, (width + 1) // 2 + SCALE_BYTES),
        }
        if row_format not in shapes:
            raise ConfigError(
                f"row_format = {row_format!r}. Expected one of {', '.join(shapes)}. Correct the table's settings."
            )
        self.row_format, self.width = row_format, width
        self.dtype, self.columns = np.dtype(shapes[row_format][0]), shapes[row_format][1]
        self.row_bytes = self.columns * self.dtype.itemsize

    def encode(self, vectors: np.ndarray) -> np.ndarray:
        """Return rows, float32 [N, width], encoded, [N, columns]. Raises DataError for values that the format cannot hold."""
        if self.row_format == "fp32":
            return np.ascontiguousarray(vectors, np.float32)
        self._check_range(vectors)
        if self.row_format == "fp16":
            return vectors.astype(np.float16)
        codes, scale, offset = quantize(vectors, HIGHEST_CODES[self.row_format])
        if self.row_format == "int4":
            codes = pack_nibbles(codes)
        return np.concatenate([codes, scale[:, None].view(np.uint8), offset[:, None].view(np.uint8)], axis=1)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Return encoded rows, [N, columns], decoded, float32 [N, width]. fp32 rows are not copied."""
        if self.row_format == "fp32":
            return stored
        if self.row_format == "fp16":
            return stored.astype(np.float32)
        codes = stored[:, :-SCALE_BYTES]
        if self.row_format == "int4":
            codes = unpack_nibbles(codes, self.width)
        scales = np.ascontiguousarray(stored[:, -SCALE_BYTES:]).view(np.float16).astype(np.float32)
        vectors = codes * scales[:, :1]
        vectors += scales[:, 1:]
        return vectors

    def view_plain(self, stored: np.ndarray) -> np.ndarray:
        """Return a view of encoded rows, [N, columns], in a dtype that compiled loops can read: uint16 instead of float16."""
        return stored.view(np.uint16) if self.row_format == "fp16" else stored

    def round_rows(self, vectors: np.ndarray) -> np.ndarray:
        """Return fp32 rows, [N, width], as a look-up returns them, whichever level holds them."""
        return vectors if self.row_format == "fp32" else self.decode(self.encode(vectors))

    def _check_range(self, vectors: np.ndarray) -> None:
        is_bad = ~(np.abs(vectors) <= FP16_MAX / 2)  # NaN is bad too; half, so that a row's range also fits float16
        if is_bad.any():
            row, column = np.argwhere(is_bad)[0]
            raise DataError(
                f"row {row}, value {column} is {vectors[row, column]}. {self.row_format} rows hold finite values up to "
                f"{FP16_MAX / 2:.0f}. Keep this table in fp32, or fix the training that produced the value."
            )


def quantize(vectors: np.ndarray, highest_code: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, uint8 [N, D] in 0 … highest_code, scales, float16 [N], and offsets, float16 [N], of float32 [N, D]."""
    low, high = vectors.min(axis=1), vectors.max(axis=1)
    offset = low.astype(np.float16)
    offset = np.where(offset > low, np.nextafter(offset, np.float16(-np.inf)), offset)
    exact_scale = (high - offset.astype(np.float32)) / np.float32(highest_code)
    scale = exact_scale.astype(np.float16)
    scale = np.where(scale < exact_scale, np.nextafter(scale, np.float16(np.inf)), scale)
    divisor = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
    codes = np.rint((vectors - offset.astype(np.float32)[:, None]) / divisor[:, None])
    return np.clip(codes, 0, highest_code).astype(np.uint8), scale, offset


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Return codes, uint8 [N, D] in 0 … 15, packed to uint8 [N, ceil(D / 2)]; the first of two codes is the low half."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: np.ndarray, width: int) -> np.ndarray:
    """Return the codes that `pack_nibbles` packed, uint8 [N, width]."""
    codes = np.empty((len(packed), packed.shape[1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, 0::2])
    np.right_shift(packed, 4, out=codes[:, 1::2])
    return codes[:, :width]

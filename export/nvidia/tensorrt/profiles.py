"""Make optimisation profiles: the shapes that an engine accepts, and those that it is tuned for.

Every profile accepts all batches that the server may form, so each can serve any request. They differ in the batch that they
are tuned for. tritonserver holds one execution context per profile and uses the one tuned closest to the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.contract.errors import ConfigError
from serving.contract.tensors import TensorSpec

Shape = tuple[int, ...]
VARIABLE = -1


@dataclass(frozen=True)
class Range:
    """Shapes of one input as the engine sees them, the batch axis included."""

    minimum: Shape
    optimum: Shape  # the one that the profile is tuned for
    maximum: Shape


Profile = dict[str, Range]


def make_shape_profiles(
    inputs: Sequence[TensorSpec],
    max_batch_size: int,
    tuned_for: Sequence[int] = (),
    largest_rows: int = 0,
    per_row: Mapping[str, int] | None = None,
) -> tuple[Profile, ...]:
    """Return one profile per batch size in {1, *tuned_for}, each from 1 row to the most.

    max_batch_size > 0: Triton adds the batch axis, dims are fixed.
    max_batch_size = 0 (behind the `hps` backend, which has no batch axis): an axis of -1 in the dims is the rows, up to
    `largest_rows`. per_row: entries of one row on that axis, where not 1 (a flat OUTPUT0: tables * width).
    Raises ConfigError when an axis varies that must not, or none does.
    """
    max_rows = max_batch_size or largest_rows
    if max_rows < 1:
        raise ConfigError(f"An engine for at most {max_rows} rows. Give max_batch_size or largest_rows, at least 1.")
    for tensor in inputs:
        varying = tensor.dims.count(VARIABLE)
        if varying != (0 if max_batch_size else 1):
            raise ConfigError(
                f"Input {tensor.name!r} has the dims {tensor.dims} with max_batch_size {max_batch_size}. Expected fixed dims "
                "where Triton adds the batch axis, and otherwise exactly one -1, the axis of the rows."
            )
    if outside := [size for size in tuned_for if not 1 <= size <= max_rows]:
        raise ConfigError(
            f"The engine cannot be tuned for {outside} rows: it accepts 1 to {max_rows}. Change the preferred sizes."
        )
    return tuple(
        {
            tensor.name: Range(*(make_shape(tensor, rows, max_batch_size, per_row or {}) for rows in (1, tuned, max_rows)))
            for tensor in inputs
        }
        for tuned in sorted({1, *tuned_for})
    )


def make_shape(tensor: TensorSpec, rows: int, max_batch_size: int, per_row: Mapping[str, int]) -> Shape:
    """Return the shape that the engine gets for a batch of `rows`."""
    if max_batch_size:
        return (rows, *tensor.dims)
    return tuple(rows * per_row.get(tensor.name, 1) if size == VARIABLE else size for size in tensor.dims)


def find_largest_batch(profiles: Sequence[Profile]) -> int:
    """Return the most rows that some profile accepts, as Triton computes it: the least over its inputs."""
    return max(min(span.maximum[0] for span in profile.values()) for profile in profiles)

"""A DLRM network that multiplies candidates by weights in int8, in torch exactly as ONNX Runtime serves it.

    values ─▶ integers 0 … 255, one range per product ─┐
    weight ─▶ integers -63 … 63, one scale per unit ───┴▶ integer sums ─▶ times both scales ─▶ float32

Products of a candidate's rows with the user's rows stay float32, because their weights differ with every request; so does what
is computed once per request. Weights have 7 bits: processors without VNNI add two products in 16 bits, and 8 bits would
overflow there. So every processor computes the same.

Rounding passes gradients through unchanged (straight-through), so the network can be trained as it will be served.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from training.models.rankers.dlrm import Network

VALUE_STEPS, WEIGHT_STEPS = 255, 63
SMALLEST = 1e-30  # range where all values are 0


class QuantisedNetwork(Network):
    """A copy of a network that is not folded. It computes in float32 while `measuring_ranges`, and in int8 afterwards."""

    lowest: torch.Tensor
    highest: torch.Tensor
    pairs: torch.Tensor

    def __init__(self, network: Network) -> None:
        super().__init__(network.shape)
        self.load_state_dict(network.state_dict())
        later = [f"{part}{number}" for part in ("bottom", "top") for number in range(1, len(getattr(self, part)))]
        self.products = ("bottom0", *later, "own")
        self.measuring = False
        self.register_buffer("lowest", torch.zeros(len(self.products)))  # of the values that each product reads; at most 0
        self.register_buffer("highest", torch.zeros(len(self.products)))  # at least 0
        n_own = 1 + len(self.shape.item_tables)
        columns = self.own.reshape(n_own, n_own)
        pairs = [columns[row + apart, row] for apart in range(1, n_own) for row in range(n_own - apart)]
        self.register_buffer("pairs", torch.stack(pairs), persistent=False)

    @contextmanager
    def measuring_ranges(self) -> Iterator[None]:
        """Within the block, widen the range of each product to the values that it reads, and compute in float32."""
        self.measuring = True
        try:
            yield
        finally:
            self.measuring = False

    def fold(self) -> None:
        """Leave the standardisation as it is: inputs of one product share a scale, so they must be of similar magnitude."""

    def multiply(self, name: str, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.measuring:
            place = self.products.index(name)
            self.lowest[place] = torch.minimum(self.lowest[place], values.min())
            self.highest[place] = torch.maximum(self.highest[place], values.max())
            return super().multiply(name, values, weight, bias)
        scale, zero_point = self.find_steps(name)
        steps = _round(values / scale).clamp(-zero_point, VALUE_STEPS - zero_point)
        unit_scales = compute_weight_scales(weight)
        product = functional.linear(steps, _round(weight / unit_scales.unsqueeze(1))) * (scale * unit_scales)
        return product if bias is None else product + bias

    def find_steps(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and the zero point of the values that a product reads, both float32 scalars."""
        place = self.products.index(name)
        scale = (self.highest[place] - self.lowest[place]).clamp(min=SMALLEST) / VALUE_STEPS
        return scale, (-self.lowest[place] / scale).round()

    def interact_own(self, candidate_rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Weigh the products element by element, in the order of dlrm_graph.py."""
        rows, n_own = candidate_rows, candidate_rows.shape[2]
        parts = [(rows[:, :, apart:] * rows[:, :, : n_own - apart]).flatten(2) for apart in range(1, n_own)]
        return self.multiply("own", torch.cat(parts, dim=2), weight[self.pairs].repeat_interleave(self.shape.width, 0).T)


def compute_weight_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of each unit's weights, float32 [out], without gradient. weight: float32 [out, in]."""
    return weight.detach().abs().amax(dim=1).clamp(min=SMALLEST) / WEIGHT_STEPS


def _round(values: torch.Tensor) -> torch.Tensor:
    """Round to whole numbers; the gradient is that of `values`."""
    return values + (values.round() - values).detach()

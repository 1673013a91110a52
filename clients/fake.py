"""The public test double: a server in a function, so that code that calls `recommend` is tested without one.

    shop = Recommender(transport=FakeTransport(lambda query: [3, 1, 2]))
    shop.recommend(17850).item_ids == (3, 1, 2)

The handler gets each Query as the server would understand it (ids, history and exclusions as sent, absent context left out)
and returns item ids, best first, or a whole Recommendations, or raises one of clients.errors.
Queries go through the same encoding and decoding as on the wire, so bad ones are refused here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clients.models import Call, Health, ModelState, Query, Recommendations
from clients.wire import ANONYMOUS, Signature
from serving.contract.tensors import ENSEMBLE, FROM_STORE, MISSING_INT, PAD_ID, Axes, ContextColumn, ensemble_spec, stage_specs

DEFAULT_AXES = Axes()
Handler = Callable[[Query], Sequence[int] | Recommendations]


class FakeTransport:
    """Serves both clients. `calls` holds every Call that arrived, oldest first.

    served_generation: what a cache is told; a handler that returns whole Recommendations names its own
    """

    def __init__(
        self, handler: Handler, *, axes: Axes = DEFAULT_AXES, context: tuple[ContextColumn, ...] = (), max_batch: int = 64
    ) -> None:
        self.handler = handler
        self.calls: list[Call] = []
        self.served_generation = 1
        spec = ensemble_spec(stage_specs(axes, context))
        inputs = {tensor.name: (tensor.dtype, tensor.dims[0]) for tensor in spec.inputs}
        outputs = {tensor.name: (tensor.dtype, tensor.dims[0]) for tensor in spec.outputs}
        self._signature = Signature.of(inputs, outputs, max_batch)

    def signature(self, timeout_s: float) -> Signature:
        return self._signature

    def infer(self, call: Call) -> dict[str, np.ndarray]:
        self.calls.append(call)
        answers = [self._answer(query) for query in _queries(call.inputs)]
        shape = (len(answers), self._signature.items_returned)
        item_ids, scores = np.full(shape, PAD_ID, np.int64), np.zeros(shape, np.float32)
        for row, answer in enumerate(answers):
            n_items = min(len(answer), shape[1])
            item_ids[row, :n_items] = answer.item_ids[:n_items]
            scores[row, :n_items] = answer.scores[:n_items]
        return {
            "item_ids": item_ids,
            "scores": scores,
            "degraded": np.array([[answer.degraded] for answer in answers], np.int32),
            "generation": np.array([[answer.generation] for answer in answers], np.int64),
        }

    def health(self, timeout_s: float) -> Health:
        return Health(True, (ModelState(ENSEMBLE, str(self.served_generation), "READY"),))

    def generation(self, timeout_s: float | None) -> int:
        return self.served_generation

    def close(self) -> None:
        pass

    async def signature_async(self, timeout_s: float) -> Signature:
        return self.signature(timeout_s)

    async def infer_async(self, call: Call) -> dict[str, np.ndarray]:
        return self.infer(call)

    async def health_async(self, timeout_s: float) -> Health:
        return self.health(timeout_s)

    async def generation_async(self, timeout_s: float | None) -> int:
        return self.generation(timeout_s)

    async def close_async(self) -> None:
        pass

    def _answer(self, query: Query) -> Recommendations:
        answer = self.handler(query)
        if isinstance(answer, Recommendations):
            return answer
        falling = tuple(1.0 - rank / max(len(answer), 1) for rank in range(len(answer)))
        return Recommendations(tuple(answer), falling, generation=self.served_generation)


def _queries(inputs: dict[str, np.ndarray]) -> list[Query]:
    """What was sent, as queries again."""
    queries = []
    for row, user_id in enumerate(inputs["user_id"][:, 0].tolist()):
        history = inputs["history"][row].tolist() if "history" in inputs else [FROM_STORE]
        exclude = inputs["exclude"][row].tolist() if "exclude" in inputs else []
        context = {name: array[row, 0] for name, array in inputs.items() if name not in ("user_id", "history", "exclude")}
        queries.append(
            Query(
                None if user_id == ANONYMOUS else user_id,
                None if history[0] == FROM_STORE else [item for item in history if item != PAD_ID],
                [item for item in exclude if item != PAD_ID],
                {name: value for name, value in context.items() if value != MISSING_INT and value == value and value != b""},
            )
        )
    return queries

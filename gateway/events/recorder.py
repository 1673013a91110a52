"""Send a shop's events and changes to the server: each one becomes durable, or gets its own error."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from gateway.edge.errors import describe_error, hide_address, log_error
from gateway.events.shapes import EventBody, explain_refusal, read_event
from gateway.metrics import Metrics
from gateway.shop import Shop
from serving.contract.ids import NAME
from serving.contract.refused_rows import read_refused
from triton_recommender import AsyncRecommender, Event, InvalidRequest, RecommenderError

MOST_EVENTS = 1_000
CHUNK = 32  # events sent in one request
UNKNOWN_ITEM = (
    "Item {item!r} is not in the catalogue. Correct the id, or add the item by PUT /v1/items/{{id}}: until then it is not "
    "recommended."
)

Result = dict[str, Any]


class Recorder:
    """Sends events and changes, and counts events by outcome in `metrics`."""

    def __init__(self, shop: Shop, recommender: AsyncRecommender, metrics: Metrics) -> None:
        self._shop, self._recommender, self._metrics = shop, recommender, metrics

    async def record(self, bodies: Sequence[Any]) -> list[Result]:
        """Return one result per event, in their order: its sequence and id, or its error and id.

        An event without an id gets one, so that the client can retry it and it still counts once. An event that cannot be
        read gets no id. An accepted event of an item that nobody has added carries a warning: the id may be mistyped.
        """
        results: list[Result] = [{} for _ in bodies]
        events: dict[int, Event] = {}
        items: dict[int, tuple[int, str | int]] = {}  # id on the wire, and as the shop writes it
        for row, body in enumerate(bodies):
            try:
                event = read_event(body)
            except ValidationError as error:
                results[row] = make_failure("INVALID_ARGUMENT", explain_refusal(error))
                continue
            event_id = event.id or uuid.uuid4().hex
            try:
                item_id = self._shop.parse_item_id(str(event.item))
                events[row], items[row] = self._make_event(event, item_id, event_id), (item_id, event.item)
            except InvalidRequest as error:
                results[row] = make_failure(error.status, str(error), event_id)
        rows = list(events)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            for row, result in zip(chunk, await self._send([events[row] for row in chunk]), strict=True):
                results[row] = result
        accepted = {row: item for row, item in items.items() if "error" not in results[row]}
        unknown = self._shop.find_unknown_items({item_id for item_id, _ in accepted.values()})
        for row, (item_id, written) in accepted.items():
            if item_id in unknown:
                results[row]["warning"] = UNKNOWN_ITEM.format(item=written)
                self._metrics.unknown_items.inc()
        for result in results:
            self._metrics.events.labels(result["error"]["code"] if "error" in result else "accepted").inc()
        return results

    async def change(self, kind: str, shop_id: str, columns: dict[str, Any]) -> int:
        """Make a change of an item or user durable. Return the change's sequence. Raises the client's RecommenderError.

        kind: "item" or "user"; shop_id: the id as the shop writes it; columns: new values of the changed columns, by name
        """
        record_id = self._shop.parse_item_id(shop_id) if kind == "item" else self._shop.parse_user_id(shop_id)
        if kind == "item" and self._shop.published.lacks_name(record_id):
            columns = {NAME: shop_id.strip()} | columns
        return await self._recommender.upsert(kind, record_id, columns)

    def _make_event(self, body: EventBody, item_id: int, event_id: str) -> Event:
        return Event(
            None if body.user is None else self._shop.parse_user_id(str(body.user)),
            item_id,
            body.event,
            timestamp_ms=body.timestamp,
            value=body.value,
            event_id=event_id,
            request_id=body.request_id,
            context=body.context,
            session=body.session,
        )

    async def _send(self, events: list[Event]) -> list[Result]:
        """Send events in one request, and return a result for each. If the server refuses some, send the others again.

        An error from the client or from an older generation does not name the refused events. Then send each half by itself.
        """
        if not events:
            return []
        try:
            sequences = await self._recommender.observe_many(events)
        except InvalidRequest as error:
            if len(events) == 1:
                return [make_failure(error.status, describe_error(error), events[0].event_id)]
            if faults := read_refused(str(error), len(events)):
                others = iter(await self._send([event for row, event in enumerate(events) if row not in faults]))
                return [
                    make_failure(error.status, hide_address(faults[row]), event.event_id) if row in faults else next(others)
                    for row, event in enumerate(events)
                ]
            middle = len(events) // 2
            return [*await self._send(events[:middle]), *await self._send(events[middle:])]
        except RecommenderError as error:
            log_error(error)
            return [make_failure(error.status, describe_error(error), event.event_id) for event in events]
        return [{"sequence": sequence, "id": event.event_id} for sequence, event in zip(sequences, events, strict=True)]


def make_failure(code: str, message: str, event_id: str | None = None) -> Result:
    """Return the result of an event that is not known to be durable.

    code: a gRPC status name; event_id: to send the event again with; None if the event could not be read
    """
    return {"error": {"code": code, "message": message}} | ({} if event_id is None else {"id": event_id})

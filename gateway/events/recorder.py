"""Send a shop's events and changes to the server: each one becomes durable, or gets its own error."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import Counter
from pydantic import ValidationError

from gateway.edge.errors import describe_error, hide_address, log_error
from gateway.events.shapes import ChangeBody, EventBody, explain_refusal, read_event
from gateway.metrics import Metrics
from gateway.shop import Shop
from serving.contract.ids import NAME
from serving.contract.refused_rows import read_refused
from serving.live.admission import tidy
from triton_recommender import AsyncRecommender, Event, InvalidRequest, RecommenderError

MOST_ROWS = 1_000  # events or changes of one list
CHUNK = 32  # of them sent in one request
UNKNOWN_ITEM = (
    "Item {item!r} is not in the catalogue. Correct the id, or add the item by PUT /v1/items/{{id}}: until then it is not "
    "recommended."
)
NO_ROW = (
    "Generation {generation} has no row left for a new item ([live] new_items), so it cannot recommend {item!r}. The change is "
    "stored: the next export adds the item."
)
NOT_SENT = "This change was not sent, because an earlier one of the list was not confirmed. Send both again, in their order."

Result = dict[str, Any]
Row = TypeVar("Row")
Change = tuple[int, dict[str, Any]]  # id on the wire, and columns


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
        outcomes = await send_rows(list(events.values()), self._recommender.observe_many)
        for (row, sent_event), outcome in zip(events.items(), outcomes, strict=True):
            results[row] = outcome | {"id": sent_event.event_id}
        accepted = {row: item for row, item in items.items() if "error" not in results[row]}
        unknown = self._shop.find_unknown_items({item_id for item_id, _ in accepted.values()})
        for row, (item_id, shop_id) in accepted.items():
            if item_id in unknown:
                results[row]["warning"] = UNKNOWN_ITEM.format(item=shop_id)
                self._metrics.unknown_items.inc()
        count_outcomes(self._metrics.events, results)
        return results

    async def change(self, kind: str, shop_id: str, columns: dict[str, Any]) -> Result:
        """Make a change of an item or user durable. Return its sequence. Raises the client's RecommenderError.

        kind: "item" or "user"; shop_id: the id as the shop writes it; columns: new values of the changed columns, by name
        The result has a warning if no row is left for a new item.
        """
        try:
            change = self._make_change(kind, shop_id, columns)
            result: Result = {"sequence": await self._recommender.upsert(kind, *change)}
        except RecommenderError as error:
            count_outcomes(self._metrics.changes, [make_failure(error.status, str(error))])
            raise
        count_outcomes(self._metrics.changes, [result])
        if kind == "item":
            self._warn_of_missing_rows([(result, change[0], shop_id)])
        return result

    async def change_many(self, kind: str, bodies: Sequence[Any]) -> list[Result]:
        """Return one result per change, in their order, as `change` does, or its error. kind: "item" or "user"

        After changes that nobody confirmed, no further one is sent: it might be overtaken by one of them that arrives late.
        """
        results: list[Result] = [{} for _ in bodies]
        changes: dict[int, Change] = {}
        for row, body in enumerate(bodies):
            try:
                change = ChangeBody.model_validate(body)
                changes[row] = self._make_change(kind, str(change.id), change.columns)
            except ValidationError as error:
                results[row] = make_failure("INVALID_ARGUMENT", explain_refusal(error))
            except InvalidRequest as error:
                results[row] = make_failure(error.status, str(error))
        send = partial(self._recommender.upsert_many, kind)
        outcomes = iter(await send_rows(list(changes.values()), send, in_order=True))
        results = [result or next(outcomes) for result in results]
        count_outcomes(self._metrics.changes, results)
        if kind == "item":
            accepted = (row for row in changes if "error" not in results[row])
            self._warn_of_missing_rows([(results[row], changes[row][0], bodies[row]["id"]) for row in accepted])
        return results

    def _warn_of_missing_rows(self, accepted: Sequence[tuple[Result, int, str | int]]) -> None:
        """Add a warning to the result of each change of a new item that has no row.

        accepted: of each change, its result, and the item's id on the wire and as the shop writes it
        """
        without_row = self._shop.find_items_without_row({item_id for _, item_id, _ in accepted})
        for result, item_id, shop_id in accepted:
            if item_id in without_row:
                result["warning"] = NO_ROW.format(generation=self._shop.published.generation, item=shop_id)

    def _make_change(self, kind: str, shop_id: str, columns: dict[str, Any]) -> Change:
        """Return the id on the wire and the columns, with the text of a new item's id. Raises InvalidRequest."""
        record_id = self._shop.parse_item_id(shop_id) if kind == "item" else self._shop.parse_user_id(shop_id)
        if kind != "item" or not self._shop.published.lacks_name(record_id):
            return record_id, columns
        # Null would take its text from the item. The server refuses the text of another id.
        name_column = {NAME: shop_id.strip()} if tidy(columns).get(NAME) is None else {}
        return record_id, columns | name_column

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


async def send_rows(rows: list[Row], send: Callable[[list[Row]], Awaitable[list[int]]], in_order: bool = False) -> list[Result]:
    """Send events or changes in requests of CHUNK, in their order. Return the sequence or the error of each.

    in_order: send nothing after a request that nobody confirmed
    """
    results: list[Result] = []
    for start in range(0, len(rows), CHUNK):
        codes = {result["error"]["code"] for result in results[-CHUNK:] if "error" in result} - {InvalidRequest.status}
        if in_order and codes:
            return results + [make_failure(codes.pop(), NOT_SENT)] * (len(rows) - start)
        results += await send_chunk(rows[start : start + CHUNK], send)
    return results


async def send_chunk(rows: list[Row], send: Callable[[list[Row]], Awaitable[list[int]]]) -> list[Result]:
    """Send rows in one request, and return a result for each. If the server refuses some, send the others again.

    An error from the client or from an older generation does not name the refused rows. Then send each half by itself.
    """
    if not rows:
        return []
    try:
        return [{"sequence": sequence} for sequence in await send(rows)]
    except InvalidRequest as error:
        if len(rows) == 1:
            return [make_failure(error.status, describe_error(error))]
        if faults := read_refused(str(error), len(rows)):
            others = iter(await send_chunk([row for number, row in enumerate(rows) if number not in faults], send))
            return [
                make_failure(error.status, hide_address(faults[number])) if number in faults else next(others)
                for number in range(len(rows))
            ]
        middle = len(rows) // 2
        return [*await send_chunk(rows[:middle], send), *await send_chunk(rows[middle:], send)]
    except RecommenderError as error:
        log_error(error)
        return [make_failure(error.status, describe_error(error)) for _ in rows]


def count_outcomes(counter: Counter, results: Sequence[Result]) -> None:
    """Count the results of events or changes by outcome: "accepted", or the code of the error."""
    for result in results:
        counter.labels(result["error"]["code"] if "error" in result else "accepted").inc()


def make_failure(code: str, message: str, event_id: str | None = None) -> Result:
    """Return the result of an event or change that is not known to be durable.

    code: a gRPC status name; event_id: to send the event again with; None if the event could not be read
    """
    return {"error": {"code": code, "message": message}} | ({} if event_id is None else {"id": event_id})

"""Check that new items are served within a second, and that no answer after the acknowledgement has an unavailable item."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np

from perf.figures import Figure
from perf.live.exchange import Exchange, connect, require_message
from perf.live.shop import Answer, Shop
from perf.load.unary import Answer as UnaryAnswer
from perf.observe import Latency
from serving.contract.errors import ServerError

NEW_WITHIN_S = 1.0
SEARCHED_USERS = 400  # asked to find those who are shown new items: a tenth, by default
ASKED_USERS = 8  # of those, asked for each new item
ASKED_PER_ITEM = 16  # users who were shown an item, asked again once it is unavailable


def measure(shop: Shop, new_items: int, answers: int, rng: np.random.Generator, progress) -> list[Figure]:
    """Return the figures of `new_items` new items, and of `answers` answers after items became unavailable."""
    with connect(shop.site.grpc_url) as exchange:
        progress(f"{new_items} new items")
        waited_s = serve_new_items(shop, exchange, new_items, rng)
        progress(f"{answers:,} answers without unavailable items")
        checked, stale, missing = withdraw_items(shop, exchange, answers, rng)
    in_time = [waited for waited in waited_s if waited <= NEW_WITHIN_S]
    latency = Latency.of(np.array(waited_s) * 1e9)
    return [
        Figure(name="new items served within 1 s of their upsert", values=[float(len(in_time))], at_least=new_items),
        Figure(name="new item served after: p50", values=[latency.p50_ms] if latency else [], unit="ms"),
        Figure(name="new item served after: p99", values=[latency.p99_ms] if latency else [], unit="ms"),
        Figure(name="answers that had an item which is now unavailable", values=[float(checked)], at_least=answers),
        Figure(name="of these that still have it", values=[float(stale)], at_most=0),
        Figure(name="items not shown again once they are available", values=[float(missing)], at_most=0),
    ]


def serve_new_items(shop: Shop, exchange: Exchange, count: int, rng: np.random.Generator) -> list[float]:
    """Return the seconds from each item's `upsert` until some answer has it. One is available at a time.

    Only a share of users is shown new items (`[live] new_item_share`); the first item finds them.
    """
    first_id = int(shop.item_ids.max()) + 1
    users: list[int] = []
    waited_s = []
    for item_id in range(first_id, first_id + count + 1):
        started_s = time.perf_counter()
        exchange.ask(shop.encode_upsert(item_id, title=f"new item {item_id}", available=True))
        if not users:
            shown = [
                user for user in shop.draw_users(SEARCHED_USERS, rng).tolist() if item_id in ask(shop, exchange, user).item_ids
            ]
            users = shown[:ASKED_USERS]
            if not users:
                raise ServerError(
                    f"None of {SEARCHED_USERS} users is shown a new item, so nothing can be timed. Is [live] new_item_share 0?"
                )
        else:
            while not any(item_id in ask(shop, exchange, user).item_ids for user in users):
                if time.perf_counter() > started_s + 10 * NEW_WITHIN_S:
                    break
            waited_s.append(time.perf_counter() - started_s)
        exchange.ask(shop.encode_upsert(item_id, available=False))
    return waited_s


def withdraw_items(shop: Shop, exchange: Exchange, answers: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """Make items unavailable, and ask the users who were shown them again.

    Returns the number of answers, of those that still have the item, and of items that were not shown again afterwards.
    """
    users_by_item: dict[int, list[int]] = defaultdict(list)
    for user in shop.draw_users(SEARCHED_USERS, rng).tolist():
        for item_id in ask(shop, exchange, user).item_ids:
            users_by_item[item_id].append(user)
    if not users_by_item:
        raise ServerError(
            f"None of {SEARCHED_USERS} users is shown any item, so none can be withdrawn. Look at the server's log."
        )
    items = [item_id for item_id, users in users_by_item.items() if len(users) >= min(ASKED_PER_ITEM, len(users_by_item))]
    checked = stale = missing = 0
    while checked < answers:
        for item_id in items or list(users_by_item):
            users = users_by_item[item_id][: min(ASKED_PER_ITEM, answers - checked)]
            exchange.ask(shop.encode_upsert(item_id, available=False))
            new_answers = ask_all(shop, exchange, users)
            checked += len(new_answers)
            stale += sum(item_id in answer.item_ids for answer in new_answers)
            exchange.ask(shop.encode_upsert(item_id, available=True))
            missing += item_id not in ask(shop, exchange, users[0]).item_ids
            if checked >= answers:
                break
    return checked, stale, missing


def ask(shop: Shop, exchange: Exchange, user_id: int) -> Answer:
    return shop.read_answer(exchange.ask(shop.encode_recommend(user_id)))


def ask_all(shop: Shop, exchange: Exchange, user_ids: list[int]) -> list[Answer]:
    """Return the answers to all users, asked at once. Raises ServerError if one fails."""
    answers: list[UnaryAnswer] = []
    for user_id in user_ids:
        exchange.send(shop.encode_recommend(user_id), answers.append)
    exchange.finish()
    return [shop.read_answer(require_message(answer)) for answer in answers]

"""The first answer after a change is as complete as the next one."""

from __future__ import annotations

from tests.unit.live.test_live_answers import answer, event_inputs, last_event_ms, upserted


def test_a_session_with_a_new_item_gets_the_same_candidates_at_once_and_later(pipeline, upsert):
    upserted(upsert, 1_000, title="game number 7", kind="game", category="game", price=3.0)
    session = {"history": [[1_000, *[-1] * 63]]}
    first, second = (answer(pipeline, [-5], **session) for _ in range(2))
    assert 1_000 not in first["item_ids"]
    for name in ("item_ids", "scores", "sources"):
        assert first[name].tolist() == second[name].tolist()


def test_a_user_who_bought_a_new_item_gets_the_same_candidates_at_once_and_later(pipeline, upsert, observe, repository):
    upserted(upsert, 1_000, title="game number 7", kind="game", category="game", price=3.0)
    observe(event_inputs(user_id=[-5], item_id=[1_000], timestamp_ms=[last_event_ms(repository)]))
    first, second = (answer(pipeline, [-5]) for _ in range(2))
    for name in ("item_ids", "scores", "sources"):
        assert first[name].tolist() == second[name].tolist()

"""The question by which a server is examined is nobody's, so that it does not count among the shop's requests."""

from __future__ import annotations

from server.condition import ask
from tests.unit.clients.grpc_double import GrpcDouble


def test_the_question_is_of_no_user_of_the_shop():
    user_ids: list[object] = []

    def answer(query):
        user_ids.append(query.user_id)
        return [3]

    double = GrpcDouble(answer)
    try:
        ask(double.url)
    finally:
        double.stop()
    assert user_ids == [None]

"""The question by which a server is examined is nobody's, so that it does not count among the shop's requests."""

from __future__ import annotations

from server.condition import ask
from serving.contract.tensors import PROBE_USER_ID
from tests.unit.clients.grpc_double import GrpcDouble


def test_the_question_is_of_no_user_of_the_shop():
    double = GrpcDouble(lambda query: [3])
    try:
        ask(double.url)
    finally:
        double.stop()
    [call] = double.fake.calls
    assert call.inputs["user_id"].tolist() == [[PROBE_USER_ID]]

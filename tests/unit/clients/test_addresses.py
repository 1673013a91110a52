"""Addresses of servers: which are of this machine, and which are no addresses."""

import pytest

from triton_recommender import InvalidRequest, Recommender
from triton_recommender.transports import is_loopback


@pytest.mark.parametrize(
    ("url", "here"), [("localhost:1", True), ("127.0.0.2:1", True), ("[::1]:1", True), ("shop:1", False), ("10.0.0.1:1", False)]
)
def test_whose_machine_an_address_is(url, here):
    assert is_loopback(url) is here


def test_brackets_without_an_ipv6_address_are_refused():
    with pytest.raises(InvalidRequest, match=r"url is '\[shop:80'; expected host:port"):
        Recommender("[shop:80")

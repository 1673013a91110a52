"""Addresses of servers, and the headers that are sent there: which are of this machine, and which are refused."""

import pytest

from triton_recommender import AsyncRecommender, InvalidRequest, Recommender
from triton_recommender.transports import is_loopback


@pytest.mark.parametrize(
    ("url", "here"), [("localhost:1", True), ("127.0.0.2:1", True), ("[::1]:1", True), ("shop:1", False), ("10.0.0.1:1", False)]
)
def test_whose_machine_an_address_is(url, here):
    assert is_loopback(url) is here


def test_brackets_without_an_ipv6_address_are_refused():
    with pytest.raises(InvalidRequest, match=r"url is '\[shop:80'; expected host:port"):
        Recommender("[shop:80")


@pytest.mark.parametrize("url", ["localhost:8001", "http://localhost:8000"])
def test_headers_that_cannot_be_sent_are_refused(url):
    with pytest.raises(InvalidRequest, match="header 'Authorization: Bearer a' has no valid name"):
        Recommender(url, headers={"Authorization: Bearer a": "="})
    for name in ("\u212aey", "key\n"):  # the sign for kelvin, which is a K in capitals
        with pytest.raises(InvalidRequest, match="has no valid name"):
            Recommender(url, headers={name: "a"})
    with pytest.raises(InvalidRequest, match=r"header 'Trace-Bin' has no valid name; expected .* no -bin at its end"):
        Recommender(url, headers={"Trace-Bin": "a"})
    with pytest.raises(InvalidRequest, match="header 'authorization' has no valid value; expected one line"):
        AsyncRecommender(url, headers={"authorization": "Bearer a\n"})

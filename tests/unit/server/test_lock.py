"""One command at a time starts or moves a server on a port, and no other user can keep it waiting."""

import threading
from pathlib import Path

import pytest

from server.start.lock import hold_start_lock
from server.start.ports import Ports
from server.state import ServerState


def test_a_second_start_waits_for_the_first_and_says_so(tmp_path, capsys):
    order = []

    def second():
        with hold_start_lock(tmp_path, 8001):
            order.append("second")

    waiting = threading.Thread(target=second)
    with hold_start_lock(tmp_path, 8001), hold_start_lock(tmp_path, 9001):  # another port is not waited for
        waiting.start()
        waiting.join(0.3)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]
    assert capsys.readouterr().err == "waiting for another command that starts or moves a server on gRPC port 8001\n"


@pytest.mark.parametrize("is_older", [False, True])
def test_no_other_user_can_hold_a_lock_of_a_server(tmp_path, is_older):
    """Who can open a file can lock it, so that supervisor, start and stop of the server would wait."""
    if is_older:
        (tmp_path / "locks").mkdir(mode=0o755)
    ServerState(1, "tag", tmp_path, tmp_path / "log", Ports(8001, 8000, 8002)).save(tmp_path)
    with hold_start_lock(tmp_path, 8001):
        locks: list[Path] = list(tmp_path.rglob("*.lock"))
    assert len(locks) == 2
    assert all(lock.parent.stat().st_mode & 0o077 == 0 for lock in locks)

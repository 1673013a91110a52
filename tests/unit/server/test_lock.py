"""One command at a time starts a server on a port."""

import threading

from server.start.lock import hold_start_lock


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
    assert capsys.readouterr().err == "waiting for another command that starts a server on gRPC port 8001\n"

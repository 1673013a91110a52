"""The cache experiment reads the replayed lines of a log, and the users of the lines before them."""

from __future__ import annotations

from pathlib import Path

from experiments.cache import read_stretch

TOML = """
name = "shop"
[interactions]
path = "events.csv"
user_id = "user"
item_id = "item"
timestamp = "time"
"""


def test_a_cache_is_warmed_with_the_users_who_were_active_before_the_replayed_lines(tmp_path: Path):
    users = [2, 1, 1, 3, 3, 3, 2, 2, 2, 2]
    rows = [f"{user},{item},{1_600_000_000 + 60 * item}" for item, user in enumerate(users, start=1)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,time", *rows, ""]))
    (tmp_path / "dataset.toml").write_text(TOML)
    stretch, active_ids = read_stretch(str(tmp_path), 5)
    assert stretch.user_id.tolist() == [3, 2, 2, 2, 2]
    assert active_ids.tolist() == [1, 3, 2]

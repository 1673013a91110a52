"""Tags of processes that tests start."""

from uuid import uuid4


def draw_tag() -> str:
    """Return a tag that no other test has, in this run or in another beside it: whoever ends a tag's processes ends all."""
    return f"triton_test_{uuid4().hex}_"

"""Check that the users of an A/B test's arms come in the share that they should (sample-ratio mismatch).

Answers of one arm that are missing in the log make what is left say nothing of which generation is better.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from serving.live.experiment import CHALLENGER_ARM, CHAMPION_ARM, INTERLEAVED_ARM
from trials.sequential import has_wrong_split

ROUNDING = 1e-9  # between a share and 1 - (1 - share)


@dataclass(frozen=True)
class Split:
    """The number of users who met each arm while the challenger's share was `share`."""

    champions: int
    challengers: int
    share: float

    @property
    def is_wrong(self) -> bool:
        """Whether the share does not explain the users: by chance in 0.1 % of the experiments, however often one looks."""
        return has_wrong_split((self.champions, self.challengers), (1 - self.share, self.share))

    @property
    def text(self) -> str:
        """The split in words, with what to look for where it is wrong."""
        users = f"{self.champions:,} users met the champion and {self.challengers:,} the challenger, which a share of"
        if not self.is_wrong:
            return f"{users} {self.share:g} explains"
        return (
            f"the split is wrong: {users} {self.share:g} does not explain. Look for requests of one arm that no log has: "
            "fallback=none where it failed, or callers that gave up waiting"
        )


def measure_split(exposures: pa.Table, share: float | None = None) -> Split | None:
    """Return the split of an A/B test's users; None of another experiment, or where no answer was logged with its share.

    Users who came under another share are left out, and so are erased ones, because it is unknown which answers belong to the
    same user. exposures: the experiment's; share: of the challenger, None for that of the latest answer
    """
    arms = exposures["arm"]
    if pc.any(pc.equal(arms, INTERLEAVED_ARM)).as_py():
        return None
    is_challenger = pc.equal(arms, CHALLENGER_ARM)
    shares = pc.if_else(is_challenger, exposures["assignment"], pc.subtract(1.0, exposures["assignment"]))
    compared = pc.and_(pc.or_(is_challenger, pc.equal(arms, CHAMPION_ARM)), pc.is_valid(shares))
    exposures, shares = exposures.filter(compared), shares.filter(compared)
    if share is None:
        if not len(exposures):
            return None
        share = shares[pc.index(exposures["time_ms"], pc.max(exposures["time_ms"])).as_py()].as_py()
        if share <= ROUNDING:  # of a shadow's champion
            return None
    exposures = exposures.filter(pc.less(pc.abs(pc.subtract(shares, share)), ROUNDING))
    champions, challengers = (
        pc.count_distinct(exposures["user_id"].filter(pc.equal(exposures["arm"], arm))).as_py()  # without null
        for arm in (CHAMPION_ARM, CHALLENGER_ARM)
    )
    return Split(champions, challengers, share) if champions + challengers else None

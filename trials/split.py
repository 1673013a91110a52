"""Take the answers of an experiment that can be compared, and check that its arms have the users that they should.

Users click more on some days than on others. If the share of the challenger changed between such days, its answers come from
other days than the champion's, and equal generations look different (Simpson's paradox). So only answers under one share are
compared. Answers of one arm that are missing in the log (sample-ratio mismatch) likewise leave nothing to compare.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serving.live.experiment import CHALLENGER_ARM, CHAMPION_ARM, INTERLEAVED_ARM
from trials.sequential import has_wrong_split

ROUNDING = 1e-9  # between a share and 1 - (1 - share)


@dataclass(frozen=True)
class Split:
    """The number of users who met each arm while the challenger's share was `share`.

    erased: numbers of the two arms' answers to erased users; the log does not say how many users those were
    """

    champions: int
    challengers: int
    share: float
    erased: tuple[int, int] = (0, 0)

    @property
    def is_wrong(self) -> bool:
        """Whether the share does not explain the users: by chance in 0.1 % of the experiments, however often one looks.

        An arm that lacks users gets as many erased ones as the share expects, at most one for each of their answers.
        """
        counts, shares = [float(self.champions), float(self.challengers)], (1 - self.share, self.share)
        for arm, other in ((0, 1), (1, 0)):
            if shares[other]:
                lacking = counts[other] * shares[arm] / shares[other] - counts[arm]
                counts[arm] += min(max(lacking, 0.0), self.erased[arm])
        return has_wrong_split((counts[0], counts[1]), shares)

    @property
    def text(self) -> str:
        """The split in words, with what to look for where it is wrong."""
        erased = f", beside {sum(self.erased):,} answers of erased users" if any(self.erased) else ""
        users = f"{self.champions:,} users met the champion and {self.challengers:,} the challenger{erased}, which a share of"
        if not self.is_wrong:
            return f"{users} {self.share:g} explains"
        return (
            f"the split is wrong: {users} {self.share:g} does not explain. Look for requests of one arm that no log has: "
            "fallback=none where it failed, or callers that gave up waiting"
        )


def measure_split(exposures: pa.Table, share: float | None = None) -> Split | None:
    """Return the split of an A/B test's users; None of another experiment, or where no answer was logged with its share.

    Users who came under another share are left out.
    exposures: the experiment's; share: of the challenger, None for that of the latest answer
    """
    if pc.any(pc.equal(exposures["arm"], INTERLEAVED_ARM)).as_py():
        return None
    exposures = exposures.filter(pc.is_in(exposures["arm"], pa.array([CHAMPION_ARM, CHALLENGER_ARM])))
    if share is None:
        share = find_latest_share(exposures)
        if share is None or share <= ROUNDING:  # of a shadow's champion
            return None
    exposures = take_share(exposures, share)
    users = [exposures["user_id"].filter(pc.equal(exposures["arm"], arm)) for arm in (CHAMPION_ARM, CHALLENGER_ARM)]
    champions, challengers = (pc.count_distinct(user_ids).as_py() for user_ids in users)  # without null
    return Split(champions, challengers, share, (users[0].null_count, users[1].null_count)) if champions + challengers else None


def find_kept(exposures: pa.Table) -> np.ndarray:
    """Return which answers still have their feedback, bool [answers]: those of experiments whose users were not erased since.

    An erasure takes the clicks as well: the answers that it leaves would look ignored, each by a user of its own. Outside of
    experiments all are kept, because a missing user id may be that of an anonymous user.
    """
    is_kept: np.ndarray = pc.or_(pc.is_valid(exposures["user_id"]), pc.equal(exposures["experiment"], "")).to_numpy()
    return is_kept


def take_latest_share(exposures: pa.Table) -> pa.Table:
    """Return the answers under the share that the latest answer has.

    exposures: those that one experiment showed, without shadows
    """
    share = find_latest_share(exposures)
    return exposures if share is None else take_share(exposures, share)


def find_latest_share(exposures: pa.Table) -> float | None:
    """Return the challenger's share when the latest answer was given; None without any answer."""
    if not len(exposures):
        return None
    latest = pc.index(exposures["time_ms"], pc.max(exposures["time_ms"])).as_py()
    share: float = compute_shares(exposures)[latest].as_py()
    return share


def take_share(exposures: pa.Table, share: float) -> pa.Table:
    """Return the answers that were given while the challenger's share was `share`."""
    return exposures.filter(pc.less(pc.abs(pc.subtract(compute_shares(exposures), share)), ROUNDING))


def compute_shares(exposures: pa.Table) -> pa.ChunkedArray:
    """Return the share of the challenger when each answer was given, float64 [answers]."""
    is_champion, assignments = pc.equal(exposures["arm"], CHAMPION_ARM), exposures["assignment"]
    return pc.if_else(is_champion, pc.subtract(1.0, assignments), assignments)

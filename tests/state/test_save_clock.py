"""When is the next checkpoint taken, and does somebody say why?"""

from __future__ import annotations

import time

from allranks.model.membership import Membership
from allranks.state.resumed.save_clock import SaveClock
from allranks.state.saved.checkpoint import Stall


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def on_nodes(num: int, *, epoch: int = 0) -> Membership:
    return Membership(epoch=epoch, members=Membership.spread(0, num).members)


def test_the_first_comes_after_a_minute_and_the_next_by_the_cadence_which_is_said_once():
    clock, said = Clock(), list[str]()
    pace = SaveClock(on_nodes(100, epoch=10), {}, say=said.append, clock=clock)
    assert not pace.is_due()
    clock.now_s += 60
    assert pace.is_due()
    pace.save_done(Stall(copy_s=0.2, waited_s=0.0), 9.0)
    assert not pace.is_due()
    (line,) = said
    assert line.startswith(
        "checkpoints: every 3 min, which loses the least time: a save stalls 0.2 s, and a fault comes every 22 h on "
    )
    clock.now_s += 150
    assert not pace.is_due()
    clock.now_s += 60
    assert pace.is_due()
    pace.save_done(Stall(copy_s=0.1, waited_s=0.0), 9.0)
    assert len(said) == 1


def test_nodes_and_faults_are_the_membership_s_and_the_time_limit_is_slurm_s():
    said: list[str] = []
    ends_at = str(int(time.time()) + 3000)
    limited = SaveClock(on_nodes(6, epoch=2), {"SLURM_JOB_END_TIME": ends_at}, say=said.append)
    limited.save_done(Stall(copy_s=1.0, waited_s=0.0), None)
    SaveClock(on_nodes(1), {}, say=said.append).save_done(Stall(copy_s=1.0, waited_s=0.0), None)
    assert "on 6 nodes (2 seen)" in said[0]
    assert "a tenth of the 50 min that are left" in said[0]
    assert "on 1 node (none seen)" in said[1]
    assert "left" not in said[1]

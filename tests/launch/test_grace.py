"""Which signal does a rank get that is to end, and how long may it take? A table, in time that is told."""

from __future__ import annotations

import signal

import pytest

from allranks.launch.events import EndingFacts, Forward, Say, Signal
from allranks.launch.grace import Grace

KILL, TERM, INT, HUP, QUIT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
NOW_S = 1000.0
PLAIN, SAVING = EndingFacts(), EndingFacts(is_saving=True)


def handling(*signums: int, begun_s: float | None = None) -> EndingFacts:
    begun = {} if begun_s is None else dict.fromkeys(signums, NOW_S + begun_s)
    return EndingFacts(handles=frozenset(signums), begun_s=begun)


def lives(
    signum: int, hold: EndingFacts, *, is_fault: bool = False, saved_s: float = 99.0, at_once: bool = False
) -> list[str]:
    """What rank 3 gets, and when: it never ends by itself. It has saved at `saved_s`."""
    grace = Grace(
        signum=signum, grace_s=3.0, saving_s=26.0, is_fault=is_fault, since_s=NOW_S, looked_s=NOW_S,
        at_once=frozenset({3} if at_once else ()),
    )  # fmt: skip
    got = []
    for tenths in range(400):
        is_saving = hold.is_saving and tenths / 10 < saved_s
        now = EndingFacts(handles=hold.handles, begun_s=hold.begun_s, is_saving=is_saving)
        for effect in grace.look(NOW_S + tenths / 10, [3], {3: now}):
            if isinstance(effect, Signal | Forward):
                assert effect.ranks == (3,)
                word = signal.Signals(effect.signum).name if effect.signum else "it has it"
                got.append(f"{'to its handler ' if isinstance(effect, Forward) else ''}{word} {tenths / 10:.1f}")
        if grace.is_over([3]):
            return got
    raise AssertionError(f"it is waited for without end: {got}")


@pytest.mark.parametrize(
    ("signum", "hold", "expected"),
    [
        pytest.param(TERM, PLAIN, ["SIGTERM 0.0", "SIGKILL 3.0"], id="no handler"),
        pytest.param(INT, PLAIN, ["SIGINT 0.0", "SIGKILL 3.0"], id="Ctrl-C, no handler"),
        pytest.param(TERM, handling(TERM), ["to its handler SIGTERM 0.5", "SIGKILL 26.0"], id="handler"),
        pytest.param(INT, handling(INT, TERM), ["to its handler SIGINT 0.5", "SIGKILL 26.0"], id="Ctrl-C, handler"),
        pytest.param(INT, handling(TERM), ["to its handler SIGTERM 0.5", "SIGKILL 26.0"], id="Ctrl-C as SIGTERM"),
        pytest.param(HUP, handling(TERM), ["to its handler SIGTERM 0.5", "SIGKILL 26.0"], id="SIGHUP as SIGTERM"),
        pytest.param(QUIT, handling(TERM), ["SIGQUIT 0.0", "SIGKILL 3.0"], id="SIGQUIT is for who wants a core"),
        pytest.param(TERM, handling(INT), ["SIGTERM 0.0", "SIGKILL 3.0"], id="handler of another signal"),
        pytest.param(TERM, handling(TERM, begun_s=0.1), ["it has it 0.0", "SIGKILL 26.0"], id="SLURM has sent it"),
        pytest.param(TERM, handling(TERM, begun_s=-0.2), ["it has it 0.0", "SIGKILL 26.0"], id="a moment before us"),
        pytest.param(INT, handling(TERM, begun_s=0.1), ["it has it 0.0", "SIGKILL 26.0"], id="SLURM's Ctrl-C"),
        pytest.param(
            TERM,
            handling(TERM, begun_s=-60.0),
            ["to its handler SIGTERM 0.5", "SIGKILL 26.0"],
            id="another one, before",
        ),
        pytest.param(TERM, SAVING, ["SIGTERM 26.0", "SIGKILL 29.0"], id="saves without end"),
    ],
)
def test_after_a_signal_to_the_job(signum: int, hold: EndingFacts, expected: list[str]):
    assert lives(signum, hold) == expected


@pytest.mark.parametrize(
    ("hold", "expected"),
    [
        pytest.param(PLAIN, ["SIGTERM 0.0", "SIGKILL 3.0"], id="no handler"),
        pytest.param(handling(TERM), ["to its handler SIGTERM 0.0", "SIGKILL 3.0"], id="handler"),
        pytest.param(SAVING, ["SIGTERM 7.0", "SIGKILL 10.0"], id="saves"),
    ],
)
def test_after_a_fault_only_who_saves_has_time(hold: EndingFacts, expected: list[str]):
    assert lives(TERM, hold, is_fault=True, saved_s=7.0) == expected


def test_a_handler_that_saves_after_a_fault_may_finish():
    hold = EndingFacts(handles=frozenset({TERM}), begun_s={TERM: NOW_S}, is_saving=True)
    assert lives(TERM, hold, is_fault=True, saved_s=7.0) == ["it has it 0.0", "SIGKILL 9.9"]


def test_a_rank_that_takes_its_handler_back_when_it_has_saved_keeps_its_time():
    grace = Grace(signum=TERM, grace_s=3.0, saving_s=26.0, is_fault=False, since_s=NOW_S, looked_s=NOW_S)
    told = []
    for tenths in range(250):
        told += grace.look(NOW_S + tenths / 10, [3], {3: handling(TERM) if tenths < 90 else PLAIN})
    assert [type(each) for each in told] == [Forward, Say]


def test_a_blocked_rank_is_killed_at_once_whatever_it_says():
    assert lives(TERM, EndingFacts(handles=frozenset({TERM}), is_saving=True), is_fault=True, at_once=True) == [
        "SIGKILL 0.0"
    ]


def test_a_rank_that_was_killed_at_once_has_the_grace_to_be_gone():
    grace = Grace(
        signum=TERM, grace_s=3.0, saving_s=26.0, is_fault=True, since_s=NOW_S, looked_s=NOW_S, at_once=frozenset({3})
    )
    over_s = []
    for tenths in range(60):
        grace.look(NOW_S + tenths / 10, [3], {})
        over_s += [tenths / 10] if grace.is_over([3]) else []
    assert over_s[0] == pytest.approx(4.0, abs=0.15)  # the kernel frees much memory in seconds


def test_ranks_are_told_apart_and_waited_for_in_words():
    grace = Grace(signum=INT, grace_s=3.0, saving_s=30.0, is_fault=False, since_s=NOW_S, looked_s=NOW_S)
    holds = {1: handling(TERM), 2: handling(TERM), 3: SAVING}
    said = []
    for tenths in range(310):
        effects = grace.look(NOW_S + tenths / 10, [0, 1, 2, 3], holds)
        said += [effect.text for effect in effects if isinstance(effect, Say)]
    more = ", or at once with another Ctrl-C"
    assert said == [
        f"rank 3 saves, and will be ended then; SIGKILL in 32 s{more}",
        f"ranks 1, 2 handle SIGTERM and have not ended yet; SIGKILL in 29 s{more}",
        f"rank 0 has not ended after SIGINT yet; SIGKILL in 2 s{more}",
        "ranks 1, 2 have not ended 30 s after SIGTERM: SIGKILL",
    ]


def test_slurm_may_leave_less_time_than_was_thought():
    grace = Grace(signum=TERM, grace_s=3.0, saving_s=30.0, is_fault=False, since_s=NOW_S, looked_s=NOW_S)
    killed_s = []
    for tenths in range(100):
        if tenths == 20:
            grace.hasten(4.0)
            grace.hasten(9.0)
        effects = grace.look(NOW_S + tenths / 10, [0], {0: handling(TERM)})
        killed_s += [tenths / 10 for effect in effects if isinstance(effect, Signal) and effect.signum == KILL]
    assert killed_s == [pytest.approx(6.0, abs=0.15)]

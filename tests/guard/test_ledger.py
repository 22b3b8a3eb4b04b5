"""Do the books say of each second of each rank what it was spent on, and of waits, for whom?"""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.guard.goodput.blocked import Blocked, Booked
from allranks.guard.goodput.ledger import Books
from allranks.guard.goodput.rank_account import Account
from allranks.guard.goodput.waited import WaitSample
from allranks.model.beat import GroupSeen, NodeBeat, RankBeat
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.ledger import Category, Ledger, LostTime
from allranks.model.pace import Pace
from allranks.wire.protocol import WorkerEnd

from .ledger_world import Told, live, pace_at, plan

CASES: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("ledger_cases.toml").read_text())["case"]


def run(case: dict[str, Any]) -> tuple[Books, Ledger]:
    """Live one case; returns the books and what they say at its end."""
    books, workers = Books(), case.get("workers", 1)
    end_s = 0.0
    for number, generation in enumerate(case["generations"]):
        programs = [program for many, program in generation["ranks"] for _ in range(many)]
        begun_s, judged_s = generation.get("begins_s", 0.0), generation.get("judged_s")
        books.begin(plan(len(programs) // workers, workers, number), begun_s)
        ranks = live(programs, begun_s=begun_s, until_s=generation.get("end_s", judged_s or 1e6))
        told = Told(books, ranks, workers=workers, session=generation.get("session"), is_async="is_async" in case)
        silent, silent_s = generation.get("silent", (0, None))
        dead, dies_s = generation.get("dies", (0, None))
        end_s = judged_s or max(rank.now_s for rank in ranks)
        told.until(begun_s, min(filter(None, (silent_s, dies_s, end_s))))
        if silent_s is not None:
            told.silent.add(silent)
            told.until(silent_s, end_s)
            books.lost(silent)
        if dies_s is not None:
            told.end(dead, dies_s, exit_code=-9)
        if judged_s is None:
            for at, rank in enumerate(ranks):
                told.end(at, rank.now_s)
        else:
            books.fault(
                judged_s,
                [
                    Finding(
                        cause="AR407 dead-rank",
                        severity=Severity.FAIL,
                        confidence=Confidence.CERTAIN,
                        message="it died",
                        node="node02",
                    )
                ],
            )
            end_s = generation.get("end_s", judged_s)
    books.end(end_s)
    return books, books.snapshot(end_s + 100)


def tell(loss: LostTime) -> str:
    """`wait for 3 on node04`, `start for 2 (16 s) on node03`."""
    ranks, nodes = ",".join(map(str, loss.ranks)), ",".join(loss.nodes)
    whose = f" {'for' if loss.category is Category.WAIT or loss.waited_s else 'of'} {ranks}" if ranks else ""
    whose += f" ({loss.waited_s:.0f} s)" if loss.waited_s else ""
    return f"{loss.category}{whose}{f' on {nodes}' if nodes else ''}"


@pytest.mark.parametrize("case", CASES, ids=[case["what"] for case in CASES])
def test_the_books_say_where_the_time_went(case: dict[str, Any]) -> None:
    books, ledger = run(case)
    num_ranks = sum(many for many, _ in case["generations"][0]["ranks"])
    tolerance_s = case.get("tolerance", 0.05 * num_ranks)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.rank_s, rel=1e-3)
    for category in Category:
        expected_s = case["seconds"].get(category, 0.0)
        assert ledger.seconds.get(category, 0.0) == pytest.approx(expected_s, rel=0.05, abs=tolerance_s), category
    waited_for = {str(row.rank): row.waited_for_s for row in ledger.waited_for}
    for rank in map(str, range(num_ranks)):
        expected_s = case.get("waited_for", {}).get(rank, 0.0)
        assert waited_for.get(rank, 0.0) == pytest.approx(expected_s, rel=0.05, abs=tolerance_s)
    if "losses" in case:
        assert [tell(loss) for loss in ledger.losses if loss.rank_s > tolerance_s] == case["losses"]
    named = books.named()
    assert [straggler.rank for straggler in named] == [case["chronic"]["rank"] for _ in range("chronic" in case)]
    for straggler in named:
        assert straggler.share == pytest.approx(case["chronic"]["share"], abs=0.01)
        assert 1e3 * straggler.lag_s == pytest.approx(case["chronic"]["late_ms"], rel=0.1)
    for cost, want in zip(ledger.restarts, case.get("restarts", ()), strict=True):
        assert (cost.cause, cost.node) == ("AR407 dead-rank", "node02")
        assert cost.restart_s == pytest.approx(want["restart_s"], abs=0.1)
        assert cost.redo_s == (pytest.approx(want["redo_s"], abs=0.3) if "redo_s" in want else None)
        assert cost.redo_steps == want.get("redo_steps")
        assert cost.is_redo_guessed is want.get("is_redo_guessed", False)
    assert ledger.is_estimated is case.get("is_estimated", False)
    assert {loss.category for loss in ledger.losses if loss.is_estimated} <= {Category.WAIT}
    assert any(loss.is_estimated for loss in ledger.losses) is ledger.is_estimated
    assert ledger.is_steps_seen is case.get("is_steps_seen", True)
    assert ledger.num_checkpoints == case.get("num_checkpoints", 0)
    assert ledger.steps == case.get("steps", ledger.steps)


# Whatever comes, in whatever order

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("beat", "beat", "beat", "beat", "call", "end", "die", "lose", "fault", "begin", "clock")),
        st.floats(0.0, 4.0),  # seconds since the last event
        st.integers(0, 5),  # which rank or node
        st.lists(st.integers(0, 3_000_000), min_size=7, max_size=7),  # what each state grows by
        st.integers(-1, 400),  # step, or share of backward
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.booleans(), st.booleans())
def test_every_second_of_every_rank_is_booked_once_whatever_comes(
    events: list[tuple[str, float, int, list[int], int]], is_session: bool, is_honest: bool
) -> None:
    books, now_s, generation, num_ranks, whole_s, gen_s = Books(epoch_s=1e9), 100.0, 0, 6, 0.0, 100.0
    books.begin(plan(3, 2), now_s)
    totals: dict[int, list[int]] = {}
    for what, passed_s, at, grown, number in events:
        now_s += passed_s
        if what == "beat":
            ranks = []
            for rank in (2 * (at % 3), 2 * (at % 3) + 1):
                own, room_us = totals.setdefault(rank, [0] * 7), round(1e6 * (now_s - gen_s))
                for state, more_us in enumerate(grown):
                    if is_honest:
                        own[state] += max(0, min(more_us, room_us - sum(own)))
                    else:
                        own[state] = own[state] // 2 if number % 7 == 0 else own[state] + more_us
                pace = Pace(
                    state=number % 7, state_us=grown[0], steps=max(0, number), totals_us=tuple(own),
                    back_blocked_permille=number, is_async=number == 77,
                )  # fmt: skip
                group = GroupSeen(name="0", enqueued=at, completed=at - 1, waiting_s=grown[1] / 1e6)
                step = number if is_session else None
                ranks.append(RankBeat(rank=rank, pace=pace, step=step, checkpoint=step and step // 2, groups=(group,)))
            books.hear(NodeBeat(node_index=at % 3, generation=generation, ranks=tuple(ranks)), now_s - grown[2] / 1e7)
        elif what == "call":
            for rank in range(num_ranks):
                books.called("0", range(num_ranks), rank, [(number, now_s - grown[rank] / 1e7)], 0.001)
        elif what in ("end", "die"):
            end = WorkerEnd(rank=at, node="", exit_code=-9 * (what == "die"), time_s=0.0)
            books.ended(end, now_s - grown[0] / 1e6)
        elif what == "lose":
            books.lost(at % 3)
        elif what == "fault":
            books.fault(now_s)
        elif what == "clock":
            books.forget_clocks()
        else:
            whole_s += num_ranks * (now_s - gen_s)
            generation, gen_s, num_ranks = generation + 1, now_s, 6 - 2 * (at % 2)
            totals.clear()
            books.begin(plan(num_ranks // 2, 2, generation), now_s)
        ledger = books.snapshot(now_s)
        expected_s = whole_s + num_ranks * (now_s - gen_s)
        assert ledger.rank_s == pytest.approx(expected_s, rel=1e-9, abs=1e-3)
        assert sum(ledger.seconds.values()) == pytest.approx(expected_s, rel=1e-3, abs=0.01)
        assert all(seconds >= 0 for row in ledger.ranks for seconds in row.seconds.values())
        assert sum(sum(row.seconds.values()) for row in ledger.ranks) == pytest.approx(expected_s, rel=1e-3, abs=0.05)
        waited_s = sum(row.waited_for_s for row in ledger.waited_for)
        waits_s = ledger.seconds.get(Category.WAIT, 0.0) + ledger.seconds.get(Category.REDO, 0.0)
        assert waited_s <= waits_s + 0.05
    msgspec.json.decode(msgspec.json.encode(ledger) if events else b"{}", type=Ledger if events else dict)


# Before and between


def test_the_queue_and_earlier_attempts_are_part_of_the_whole() -> None:
    first = Books(epoch_s=1000.0, started_s=1010.0)
    first.begin(plan(2, 1), 15.0)
    first.queued(1000.0)
    first.end(25.0)
    ledger = first.snapshot(25.0)
    assert (ledger.begun_s, ledger.until_s, ledger.rank_s) == (1000.0, 1025.0, 50.0)
    assert ledger.seconds == {"queue": 20.0, "unknown": 30.0}
    second = Books(epoch_s=1000.0, started_s=1040.0, earlier=ledger, attempt=1)
    second.begin(plan(2, 1), 42.0)
    ledger = second.snapshot(50.0)
    assert (ledger.begun_s, ledger.rank_s, ledger.attempts) == (1000.0, 100.0, 2)
    assert ledger.seconds == {"queue": 50.0, "unknown": 50.0}
    assert [sum(row.seconds.values()) for row in ledger.ranks] == [50.0, 50.0]


def test_the_end_of_an_interpreter_is_told_apart() -> None:
    """The script ends at 6.0 s, its process at 9.0 s: torch has much to unload, and the cores are busy."""
    books, totals = Books(), (1_000_000, 5_000_000, 0, 0, 0, 0, 0)
    books.begin(plan(1, 1), 0.0)
    pace = Pace(state=1, state_us=10, steps=60, totals_us=totals)
    for now_s in (6.0, 7.0, 8.0):
        told = RankBeat(rank=0, pace=msgspec.structs.replace(pace, has_left=now_s > 6.0))
        books.hear(NodeBeat(node_index=0, generation=0, ranks=(told,)), now_s)
    assert books.snapshot(8.5).seconds == {"start": 1.0, "step": 5.0, "end": 2.5}
    books.ended(WorkerEnd(rank=0, node="", exit_code=0, time_s=0.0), 9.0)
    books.hear(NodeBeat(node_index=0, generation=0, ranks=(told,)), 9.1)
    assert books.snapshot(9.5).seconds == {"start": 1.0, "step": 5.0, "end": 3.5}


STEPS = "( step 0.08 data 0.01 all 0.02 opt )"


def test_the_account_of_a_large_job_whose_words_are_not_all_weighed_is_the_same() -> None:
    """Steps, a save, a wait of 9 s for a rank that is late, and steps, of which a fault loses what follows the save."""
    programs = [f"start 2.5 25 * {STEPS} save 0.7 {late} 25 * {STEPS} hang" for late in ("step 0.1", "step 9.1")]
    rank, _ = live(programs)
    each, some = (Account(0, node=0, begun_s=0.0, weigh_s=weigh_s) for weigh_s in (0.0, 4.0))
    kept_s = 6.1
    for half in range(1, 36):
        now_s = half / 2
        word = RankBeat(rank=0, pace=pace_at(rank, now_s))
        for account in (each, some):
            account.hear(word, now_s)
        assert some.first_s == each.first_s
    expected, _ = each.close(17.5)
    found, _ = some.close(17.5)
    assert expected[Category.SAVE] == found[Category.SAVE] == pytest.approx(0.7)
    assert {name: found[name] for name in Category} == pytest.approx(expected, abs=0.01)
    for account in (each, some):
        account.stop(17.4)
    assert some.lose_since(kept_s) == pytest.approx(each.lose_since(kept_s), abs=0.15)
    assert some.close(17.5)[0][Category.SAVE] == each.close(17.5)[0][Category.SAVE] == pytest.approx(0.7)


def test_the_last_word_of_a_large_job_is_weighed_before_its_account_is_closed() -> None:
    account, pace = Account(0, node=0, begun_s=0.0, weigh_s=4.0), Pace(6, 10, 60, (0, 0, 0, 0, 0, 0, 1_000_000))
    account.hear(RankBeat(rank=0, pace=pace), 1.0)
    account.hear(RankBeat(rank=0, pace=msgspec.structs.replace(pace, totals_us=(0, 0, 0, 0, 0, 0, 2_000_000))), 2.0)
    assert account.blocked.recent() is None
    found, _ = account.close(2.0)
    assert found[Category.WAIT] == pytest.approx(2.0)


@pytest.mark.parametrize(("num_ranks", "steps"), [(256, [1, 2, 3, 4]), (300, [1, 1, 1, 4])])
def test_how_a_large_job_was_lately_is_looked_at_less_often(num_ranks: int, steps: list[int]) -> None:
    books, found = Books(), list[int | None]()
    books.begin(plan(1, num_ranks), 0.0)
    for number in range(1, 5):
        pace = Pace(state=1, state_us=10, steps=number, totals_us=(0, 400_000 * number, 0, 0, 0, 0, 0))
        ranks = tuple(RankBeat(rank=rank, pace=pace) for rank in range(num_ranks))
        books.hear(NodeBeat(node_index=0, generation=0, ranks=ranks), 0.4 * number)
        found.append(books.lately().steps)
    assert found == steps


def test_calls_that_a_rank_tells_after_it_has_destroyed_its_groups_count() -> None:
    ranks = live(["start 1 opt 9 * ( step 0.1 all 0.01 opt )", "start 1 opt 9 * ( step 0.2 all 0.01 opt )"])
    books = Books()
    books.begin(plan(2, 1), 0.0)
    told = Told(books, ranks)
    told.until(0.0, 1.0)
    told.has_destroyed = True
    told.until(1.0, 3.0)
    ledger = books.snapshot(3.0)
    assert {row.rank: row.waited_for_s for row in ledger.waited_for} == {1: pytest.approx(0.9, abs=0.06)}


def test_a_new_leader_goes_on_from_the_last_ones_books() -> None:
    programs = ["start 1 opt 300 * ( step 0.09 all 0.01 opt )", "start 1 opt 300 * ( step 0.08 all 0.01 opt )"]
    ranks = live(programs)
    first = Books()
    first.begin(plan(2, 1), 0.0)
    told = Told(first, ranks, session=0)
    told.until(0.0, 10.0)
    second = Books(earlier=first.snapshot(10.0), takes_over=True)
    second.begin(plan(2, 1), 13.0)
    told.books = second
    told.until(13.0, 30.0)
    ledger = second.snapshot(30.0)
    assert ledger.rank_s == 60.0
    assert sum(ledger.seconds.values()) == pytest.approx(60.0, abs=0.01)
    assert ledger.seconds == pytest.approx(
        {"start": 2.0, "step": 44.1, "wait": 2.6, "transfer": 5.2, "unknown": 6.1}, abs=0.4
    )
    assert (ledger.attempts, ledger.is_steps_seen) == (1, True)
    assert ledger.steps == pytest.approx(260, abs=5)
    second.fault(30.0)
    second.begin(plan(2, 1, 1), 35.0)
    (cost,) = second.snapshot(36.0).restarts
    assert (cost.redo_s, cost.redo_steps) == (None, pytest.approx(290, abs=2))


def vary(spread: float, *, late_s: float = 0.0, steps: int, seed: int) -> str:
    """A program of steps of about 100 ms."""
    rng = random.Random(seed)
    lasts = (max(0.01, rng.gauss(0.09 + late_s, 0.09 * spread)) for _ in range(steps))
    return "start 1 opt " + " ".join(f"step {last_s:.4f} all 0.01 opt" for last_s in lasts)


@pytest.mark.parametrize(
    ("late_s", "spread", "noise_s", "named"),
    [(0.0, 0.02, 0.002, []), (0.0, 0.1, 0.0005, []), (0.003, 0.02, 0.002, []), (0.01, 0.05, 0.002, [2])],
)
def test_in_a_healthy_job_nobody_is_chronic_whatever_clocks_and_chance_do(
    late_s: float, spread: float, noise_s: float, named: list[int]
) -> None:
    """Half a minute of six ranks, of which rank 2 is late, for steps that take longer by chance."""
    ranks = live([vary(spread, late_s=late_s * (rank == 2), steps=300, seed=rank) for rank in range(6)])
    books = Books()
    books.begin(plan(6, 1), 0.0)
    Told(books, ranks, beat_s=0.5, noise_s=noise_s).until(0.0, ranks[0].now_s)
    assert [straggler.rank for straggler in books.named()] == named


def test_ranks_of_a_generation_that_grew_have_the_time_between_as_restart() -> None:
    books = Books()
    books.begin(plan(2, 1), 0.0)
    Told(books, live(["start 1 opt 50 * ( step 0.1 all 0.0 opt )"] * 2)).until(0.0, 6.0)
    for rank in range(2):
        books.ended(WorkerEnd(rank=rank, node="", exit_code=0, time_s=6.0), 6.0)
    books.begin(plan(3, 1, 1), 10.0)
    ledger = books.snapshot(10.0)
    assert ledger.seconds == pytest.approx({"start": 2.0, "step": 10.0, "restart": 8.0}, abs=0.01)
    assert ledger.restarts == ()
    assert ledger.goodput == pytest.approx(0.5, abs=0.001)


def beat(*ranks: RankBeat) -> NodeBeat:
    return NodeBeat(node_index=0, generation=0, ranks=ranks)


def test_a_standby_is_older_than_its_generation() -> None:
    books = Books()
    books.begin(plan(1, 1), 100.0)
    totals = (62_000_000, 6_000_000, 0, 0, 0, 0, 0)
    books.hear(beat(RankBeat(rank=0, pace=Pace(state=1, state_us=10, steps=60, totals_us=totals))), 108.0)
    assert books.snapshot(108.0).seconds == pytest.approx({"start": 2.0, "step": 6.0})


def test_a_pipeline_of_sends_has_waited_for_nobody_in_particular() -> None:
    books = Books()
    books.begin(plan(1, 1), 0.0)
    totals = (1_000_000, 6_000_000, 0, 0, 0, 0, 3_000_000)
    books.hear(beat(RankBeat(rank=0, pace=Pace(state=1, state_us=10, steps=60, totals_us=totals))), 10.0)
    ledger = books.snapshot(10.0)
    assert ledger.seconds == pytest.approx({"start": 1.0, "step": 6.0, "wait": 3.0})
    assert ledger.waited_for == ()
    assert (ledger.losses[0].category, ledger.losses[0].ranks) == (Category.WAIT, ())


def waited(wait_s: float, covered_s: float, *, seq: int = 7) -> tuple[WaitSample, float, float]:
    return WaitSample("0", seq, 3, 0.0, wait_s, 0.0, ()), wait_s, covered_s


def test_a_rank_waited_no_longer_than_it_was_blocked() -> None:
    blocked = Blocked()
    blocked.tell(Booked(passed_s=9.0, blocked_s=1.0), permille=-1)
    blocked.wait_in(*waited(5.0, 10.0))
    assert blocked.waits_s() == pytest.approx({3: 1.0})


def test_what_was_not_known_to_be_blocked_does_not_count_as_work_lately() -> None:
    """Backward passes of 3 s, of which 2.7 s are blocked; that is measured from the third one on."""
    blocked = Blocked()
    for step, permille in ((1, -1), (2, -1), (3, 900), (4, 900)):
        blocked.tell(Booked(passed_s=3.0 * step, backward_s=3.0 * step, steps=step), permille=permille)
    recent = blocked.recent()
    assert recent is not None
    assert recent.wait_share == pytest.approx(0.9)


def test_a_long_wait_is_booked_while_it_lasts_and_only_once() -> None:
    """Blocked for 6 of 9 s, of which 4 s in a call that rank 3 has not made; it makes it a second later."""
    blocked = Blocked()
    blocked.tell(Booked(passed_s=9.0, blocked_s=6.0), permille=-1)
    for until_s in (12.0, 14.0, 13.0, 14.0):
        blocked.wait_long(("0", 7), 3, 10.0, until_s, is_backward=False)
    assert blocked.waits_s() == {3: 4.0, None: 2.0}
    blocked.wait_in(*waited(5.0, 9.0))
    assert blocked.waits_s() == pytest.approx({3: 5.0})


def test_a_checkpoint_that_was_loaded_is_not_counted() -> None:
    books = Books()
    books.begin(plan(1, 1), 0.0)
    for second, (step, checkpoint) in enumerate([(40, 40), (50, 40), (60, 60), (70, 60), (80, 80)], start=2):
        totals = (1_000_000, 1_000_000 * (second - 1), 0, 0, 0, 0, 0)
        pace = Pace(state=1, state_us=10, steps=step - 39, totals_us=totals)
        books.hear(beat(RankBeat(rank=0, pace=pace, step=step, checkpoint=checkpoint)), float(second))
    assert books.snapshot(7.0).num_checkpoints == 2


def test_who_came_last_at_the_start_of_a_large_job_is_known_to_its_next_attempt() -> None:
    programs = [[71, "start 1.0 form 0.02 opt data 1.0 opt"], [1, "start 5.0 form 0.02 opt step 1.0 opt"]]
    _, ledger = run({"workers": 8, "generations": [{"ranks": programs}]})
    assert 71 not in {row.rank for row in ledger.ranks}
    [late] = ledger.waited_for
    assert (late.rank, late.waited_for_s, late.waited_for_at_start_s) == (71, 0.0, 284.0)
    later = Books(earlier=ledger, attempt=1)
    later.begin(plan(9, 8), 10.0)
    assert [(row.rank, row.waited_for_at_start_s) for row in later.snapshot(11.0).waited_for] == [(71, 284.0)]

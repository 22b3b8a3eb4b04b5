"""Does each moment of a training thread belong to one state, and are its steps counted once each?"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.guard.inside.cell import Cell
from allranks.guard.inside.pace_words import (
    BACK,
    BEGAN,
    DATA_MOVED,
    LEFT,
    PACE_WORDS,
    STATE,
    STEP_MOVED,
    STEPS,
    TOTALS,
    read_book,
)
from allranks.guard.inside.thread_marks import (
    BACKWARD,
    BLOCKED,
    DATA,
    EVAL,
    NOT_OURS,
    SAVE,
    START,
    STEP,
    ThreadBook,
    blocked_permille,
)
from allranks.guard.node.worker import to_pace
from allranks.model.pace import PACE_STATES, PaceState

MS = 1_000_000


class Run:
    """A book with a clock that is set by hand, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 1000
        self.words = [0] * PACE_WORDS
        self.book = ThreadBook(lambda: self.now_ms * MS)
        self.book.begin(SimpleNamespace(pace=self.words))  # type: ignore[arg-type]

    def work(self, ms: int) -> None:
        self.now_ms += ms

    def inside(self, state: int, ms: int) -> None:
        before = self.book.enter(state)
        self.work(ms)
        self.book.leave(before)

    def batch(self, ms: int = 0) -> None:
        before = self.book.enter(DATA)
        self.work(ms)
        self.book.leave_batch(before)

    def backward(self, ms: int = 1) -> None:
        before = self.book.enter_backward(BACKWARD)
        self.work(ms)
        self.book.leave_backward(before)

    def step(self, optimizer: object = "one") -> None:
        self.book.step_ended(optimizer, (), {})

    def train(self, steps: int, *, data_ms: int = 2, forward_ms: int = 3, backward_ms: int = 4) -> None:
        for _ in range(steps):
            self.batch(data_ms)
            self.work(forward_ms)
            self.backward(backward_ms)
            self.step()

    @property
    def ms(self) -> dict[str, int]:
        """Milliseconds by state, as the agent reads them now; those that are 0 are left out."""
        pace = to_pace(tuple(self.words), started_ns=self.words[BEGAN], now_ns=self.now_ms * MS)
        assert pace is not None
        assert 1000 * pace.total_us == (self.words[LEFT] or self.now_ms * MS) - self.words[BEGAN]
        return {str(state): us // 1000 for state, us in zip(PACE_STATES, pace.totals_us, strict=True) if us}


@pytest.fixture
def run() -> Run:
    return Run()


def test_states_have_the_same_numbers_on_both_sides() -> None:
    numbers = {"start": START, "step": STEP, "backward": BACKWARD, "data": DATA, "eval": EVAL, "save": SAVE}
    assert {state: number for number, state in enumerate(PACE_STATES)} == numbers | {"blocked": BLOCKED}


def test_all_is_start_until_the_first_step_ends_and_then_each_moment_has_its_state(run: Run) -> None:
    run.train(1)
    assert run.ms == {"start": 9}
    run.train(10)
    run.inside(SAVE, 7)
    run.inside(BLOCKED, 5)
    run.work(1)
    assert run.ms == {"start": 9, "data": 20, "backward": 40, "step": 31, "save": 7, "blocked": 5}
    assert run.words[STEPS] == 11


def test_the_innermost_state_counts_and_all_of_a_save_is_save(run: Run) -> None:
    run.train(1)
    backward = run.book.enter_backward(BACKWARD)
    run.work(1)
    run.inside(BLOCKED, 2)
    run.work(3)
    run.backward(4)  # of a checkpointed block
    run.book.leave_backward(backward)
    save = run.book.enter(SAVE)
    run.inside(BLOCKED, 5)
    run.batch(6)
    run.backward(7)
    run.book.leave(save)
    assert run.ms == {"start": 9, "backward": 8, "blocked": 2, "save": 18}
    assert run.book.passes == [(1009 * MS, 1019 * MS, 8 * MS)]


def test_a_step_that_ends_inside_of_a_backward_pass_ends_the_start_there(run: Run) -> None:
    before = run.book.enter_backward(BACKWARD)
    run.work(5)
    run.step()
    run.work(2)
    run.book.leave_backward(before)
    run.work(1)
    assert run.ms == {"start": 5, "backward": 2, "step": 1}


def test_an_evaluation_is_what_was_step_and_data_in_a_long_gap_that_ends_with_a_batch(run: Run) -> None:
    run.train(10)
    for _ in range(20):  # 5 x 9 ms and more
        run.batch(1)
        run.work(2)
    run.inside(SAVE, 5)
    run.inside(BLOCKED, 6)
    run.train(1)
    assert run.ms == {"start": 9, "step": 9 * 3 + 3, "data": 9 * 2, "backward": 40, "eval": 62, "save": 5, "blocked": 6}


def test_a_gap_of_five_steps_is_none_and_only_that_before_the_first_backward_pass_counts(run: Run) -> None:
    run.train(10)
    run.work(43)  # with the next batch, five steps of 9 ms
    run.train(1)
    assert "eval" not in run.ms
    for _ in range(30):  # gradient accumulation
        run.batch(2)
        run.backward(3)
    run.step()
    assert "eval" not in run.ms


def test_the_median_of_the_last_steps_decides_and_not_the_shortest(run: Run) -> None:
    run.train(3, data_ms=0, forward_ms=0, backward_ms=1)
    run.train(40)
    run.work(30)
    run.train(1)
    assert "eval" not in run.ms


def test_without_a_batch_after_it_a_long_gap_is_step_and_at_the_end_the_last_batch_counts(run: Run) -> None:
    run.train(10)
    run.work(100)
    run.backward(4)
    run.step()
    assert "eval" not in run.ms
    for _ in range(50):
        run.batch(1)
        run.work(2)
    run.book.end()
    assert run.ms["eval"] == 50 + 49 * 2
    over = run.ms
    run.work(500)  # the interpreter's end
    run.book.end()
    run.train(1)
    assert run.ms == over


ALTERNATING = [
    ("one", ["a"] * 7, 7),
    ("two that step together", ["a", "b"] * 7, 7),
    ("two of which one comes later", ["a"] * 5 + ["a", "b"] * 7, 12),
    ("five of one to one of the other", [*"aaaaab"] * 4, 20),
    ("five of one to two of the other", [*"aaaaabb"] * 4, 20),
    ("one to five", [*"abbbbb"] * 4, 20),
    ("one after the other", ["a"] * 30 + ["b"] * 30, 60),
    ("one after the other and the first one again", ["a"] * 30 + ["b"] * 30 + ["a"] * 20 + ["b"] * 30, 110),
    ("both and then one alone", ["a", "b"] * 30 + ["a"] * 30 + ["a", "b"] * 30, 90),
    ("one for each parameter", [*"abcdefgh"] * 6, 6),
]


@pytest.mark.parametrize(("order", "steps"), [case[1:] for case in ALTERNATING], ids=[case[0] for case in ALTERNATING])
def test_of_several_optimizers_the_one_that_steps_most_often_counts(run: Run, order: list[str], steps: int) -> None:
    optimizers = {name: object() for name in "abcdefgh"}
    for name in order:
        run.backward(1)
        run.step(optimizers[name])
    assert run.words[STEPS] == steps


def test_an_optimizer_that_steps_as_often_moves_the_end_of_the_step(run: Run) -> None:
    def train(steps: int) -> None:
        for _ in range(steps):
            run.batch(2)
            for optimizer in ("discriminator", "generator"):
                run.backward(4)
                run.step(optimizer)

    train(10)
    run.batch(46)  # with the next one 48 ms since the generator's step and 52 since the other one: 5 steps are 50
    train(1)
    assert "eval" not in run.ms
    run.batch(49)
    train(1)
    assert run.ms["eval"] == 51


def test_a_step_that_torch_compile_has_in_its_graph_is_counted_at_the_next_mark(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        run.batch(2)
        run.backward(4)
        run.book.has_compiled_step = True  # what is left of `step_ended` in a graph
    run.book.end()
    assert run.words[STEPS] == 3
    monkeypatch.setattr("allranks.guard.inside.thread_marks._is_compiling", lambda: True)
    run.step()
    assert (run.words[STEPS], run.book.has_compiled_step) == (3, True)


def in_thread(do: Any) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def test_marks_of_other_threads_count_for_nothing(run: Run) -> None:
    run.train(2)
    in_thread(lambda: (run.inside(SAVE, 5), run.train(3)))
    assert run.ms == {"start": 9, "data": 2, "step": 3 + 5 + 3 * 9, "backward": 4}
    assert (run.words[STEPS], run.book.enter(STEP)) == (2, STEP)
    before = run.book.enter_backward(BACKWARD)
    in_thread(run.step)  # autograd's own thread, for which the training thread waits
    run.book.leave_backward(before)
    assert run.words[STEPS] == 3


def test_the_thread_that_makes_the_first_step_is_the_training_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "claim", lambda cell: True)
    run.book._cell.claim = lambda: True  # type: ignore[union-attr]
    in_thread(lambda: (run.train(2), run.inside(SAVE, 5)))
    assert (run.words[STEPS], run.ms["save"]) == (2, 5)
    assert run.book.enter(DATA) == NOT_OURS


def test_a_process_without_a_cell_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(Cell, "inherited", lambda: asked.append(None))
    book = ThreadBook()
    for _ in range(3):
        book.step_ended("one", (), {})
    assert (len(asked), book.enter(DATA)) == (1, NOT_OURS)


def test_a_process_that_follows_another_one_goes_on_with_its_book(run: Run) -> None:
    run.train(3)
    run.inside(SAVE, 5)
    run.work(100)  # the first one's end, and the second one's imports
    first, run.book = run.ms, ThreadBook(lambda: run.now_ms * MS)
    run.book.begin(SimpleNamespace(pace=run.words))  # type: ignore[arg-type]
    run.train(2)
    assert run.ms == {**first, "start": 9 + 100 + 9, "data": 6, "step": 9, "backward": 12}
    assert run.words[STEPS] == 5
    run.words[TOTALS] = 2**62  # nonsense: it begins anew
    run.book = ThreadBook(lambda: run.now_ms * MS)
    run.book.begin(SimpleNamespace(pace=run.words))  # type: ignore[arg-type]
    run.work(4)
    assert run.ms == {"start": 4}


STATES = st.sampled_from([STEP, BACKWARD, DATA, SAVE, BLOCKED])


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "step", "other", "end"]), STATES, st.integers(0, 50)),
        max_size=40,
    )
)
def test_totals_sum_to_the_time_whatever_comes_in_which_order(moves: list[tuple[str, int, int]]) -> None:
    run, open_states = Run(), list[tuple[int, int]]()
    for move, state, ms in moves:
        run.work(ms)
        if move == "enter":
            enter = run.book.enter_backward if state == BACKWARD else run.book.enter
            open_states.append((state, enter(state)))
        elif move == "leave":
            left, before = open_states.pop() if open_states else (STEP, NOT_OURS)
            {DATA: run.book.leave_batch, BACKWARD: run.book.leave_backward}.get(left, run.book.leave)(before)
        elif move == "other":
            in_thread(lambda state=state: run.inside(state, 0))
        elif move == "step":
            run.step(str(state))
        else:
            run.book.end()
        assert sum(run.ms.values()) == (run.words[LEFT] // MS or run.now_ms) - 1000
    assert run.ms.keys() <= {"start"} or "step" in [move for move, _, _ in moves]


# What the agent believes

WORDS = dict.fromkeys(range(PACE_WORDS), 0) | {
    STATE: 1 + STEP, BEGAN: 100 * MS, STEPS: 7, TOTALS + START: 50 * MS, TOTALS + STEP: 20 * MS, TOTALS + DATA: 5 * MS,
}  # fmt: skip


def told(**changed: int) -> Any:
    words = WORDS | {int(word[1:]): value for word, value in changed.items()}
    return to_pace(tuple(words.values()), started_ns=90 * MS, now_ns=200 * MS)


def test_the_agent_adds_the_time_before_the_book_and_that_in_the_present_state() -> None:
    pace = told(**{f"_{STEP_MOVED}": 3 * MS, f"_{DATA_MOVED}": 1 * MS, f"_{BACK}": 501})
    assert (PACE_STATES[pace.state], pace.state_us, pace.steps) == (PaceState.STEP, 25_000, 7)
    assert pace.totals_us == (60_000, 17_000 + 25_000, 0, 4_000, 4_000, 0, 0)
    assert (pace.total_us, pace.back_blocked_permille, pace.is_async) == (110_000, 500, False)
    begun = told(**{f"_{STATE}": 1 + START, f"_{TOTALS + STEP}": 0, f"_{TOTALS + DATA}": 0})
    assert (begun.state_us, begun.totals_us[0]) == (110_000, 110_000)


@pytest.mark.parametrize(
    "changed",
    [
        {STATE: 0}, {STATE: 1 + EVAL}, {STATE: 8}, {STATE: 2**64 - 1}, {STEPS: 2**63}, {TOTALS + STEP: 2**64 - 1},
        {TOTALS + STEP: 1100 * MS}, {TOTALS + EVAL: 1}, {STEP_MOVED: 21 * MS}, {DATA_MOVED: 6 * MS},
        {BEGAN: 2**64 - 1}, {BEGAN: 2000 * MS}, {BACK: 1002},
    ],
    ids=str,
)  # fmt: skip
def test_the_agent_believes_no_number_that_cannot_be(changed: dict[int, int]) -> None:
    assert told() is not None
    changes = {f"_{word}": value for word, value in changed.items()}
    assert told(**changes) is None or changed == {STATE: 0}


@pytest.mark.parametrize(("marks", "seen"), [(0, 5), (3, 8), (10**6, None)])
def test_a_book_is_read_as_it_was_at_one_moment(marks: int, seen: int | None) -> None:
    words, looks = memoryview(bytearray(8 * PACE_WORDS)).cast("Q"), iter(range(marks))
    words[STATE], words[STEPS] = 1, 5

    def look() -> None:  # what the worker does between two looks
        words[STEPS] += next(looks, None) is not None

    book = read_book(look, words)
    assert (book and book[STEPS]) == seen
    words[STATE] = 0
    assert read_book(lambda: None, words) is None


def test_a_book_from_before_its_process_is_none() -> None:
    words = tuple((WORDS | {BEGAN: 0}).values())
    assert to_pace(words, started_ns=10**12, now_ns=10**13) is None
    assert to_pace(None, started_ns=0, now_ns=1) is None


# Backward passes

PASSES = [(100, 200, 100), (300, 400, 80), (500, 600, 100)]


@pytest.mark.parametrize(
    ("created", "permille"),
    [
        ([], -1),
        ([650], -1),  # nothing is known of the time before
        ([50, 150, 170, 350, 560], 1000 * (30 + 30 + 40) // 280),  # of the second, 20 were booked as blocked
        ([50, 150, 170], 1000 * 30 // 280),  # without a collective, it waits for none
        ([250, 350, 560], 1000 * (30 + 40) // 180),  # the dump does not reach back to the first
        ([560, 50, 350, 170], 1000 * (30 + 30 + 40) // 280),
    ],
)
def test_the_share_is_what_comes_after_the_last_collective(created: list[int], permille: int) -> None:
    assert blocked_permille(PASSES, created) == permille
    assert blocked_permille([], created) == -1


# Processes


def test_a_fork_books_nothing_and_a_killed_process_has_booked_all() -> None:
    script = """
        import importlib, os, sys, time, types
        package = sys.modules["inside"] = types.ModuleType("inside")
        package.__path__ = [sys.argv[1]]
        marks, module = importlib.import_module("inside.thread_marks"), importlib.import_module("inside.cell")
        marks.book.step_ended("one", (), {})  # no group: the first step claims the cell
        before = marks.book.enter(marks.DATA)
        if os.fork() == 0:
            marks.book.leave(before)
            marks.book.step_ended("one", (), {})
            marks.book.enter(marks.SAVE)
            os._exit(0)
        os.wait()
        time.sleep(0.05)
        marks.book.leave(before)
        marks.book.enter(marks.SAVE)
        os.kill(os.getpid(), 9)
    """
    cell = Cell.create()
    inside = Path(sys.modules[ThreadBook.__module__].__file__ or "").parent
    command = [sys.executable, "-S", "-c", textwrap.dedent(script), str(inside)]
    env = {**os.environ, "ALLRANKS_CELL_FD": str(cell.fd)}
    assert subprocess.run(command, env=env, pass_fds=(cell.fd,), timeout=60, check=False).returncode == -9
    words = cell.read().pace
    cell.close()
    assert words is not None
    assert (words[STATE], words[STEPS], words[TOTALS + SAVE]) == (1 + SAVE, 1, 0)
    assert words[TOTALS + DATA] > 50 * MS

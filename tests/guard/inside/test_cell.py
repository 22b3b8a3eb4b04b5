"""Does a reader of a cell always see whole records, whoever writes, dies or forks meanwhile?"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.guard.inside import cell as cell_module
from allranks.guard.inside.cell import Cell, CellOrder
from allranks.guard.node.worker import to_pace

PREAMBLE = f"""
import importlib, os, sys, time, types
package = sys.modules["inside"] = types.ModuleType("inside")
package.__path__ = [{str(Path(cell_module.__file__).parent)!r}]
module = importlib.import_module("inside.cell")
cell = module.Cell.inherited()
"""


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell.create()
    yield made
    made.close()


def start(cell: Cell, text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", PREAMBLE + textwrap.dedent(text)],
        env={**os.environ, "ALLRANKS_CELL_FD": str(cell.fd)},
        pass_fds=(cell.fd,),
        stdout=subprocess.PIPE,
        text=True,
    )


def run(cell: Cell, text: str) -> str:
    with start(cell, text) as child:
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return out


def test_what_a_worker_wrote_is_there_after_its_death(cell: Cell):
    child = start(
        cell,
        """
        cell.claim()
        cell.tell(b"a beat")
        cell.last_words(b"words")
        cell.phase("training")
        cell.step(12)
        cell.saved(10)
        cell.enter_call(b"a call")
        os.kill(os.getpid(), 9)
        """,
    )
    child.communicate(timeout=60)
    seen = cell.read()
    assert seen.pid == child.pid
    assert seen.told is not None
    assert seen.told.data == b"a beat"
    assert seen.words is not None
    assert seen.words.data == b"words"
    assert (seen.step, seen.saved, seen.phase) == (12, 10, "training")
    assert seen.call is not None
    assert (seen.call.data, seen.is_call_done) == (b"a call", False)


def test_a_step_comes_with_the_total_and_a_checkpoint_with_the_time_of_its_writing(cell: Cell):
    run(cell, "assert cell.claim(); cell.step(12, 90); cell.saved(10, 3250)")
    seen = cell.read()
    assert (seen.step, seen.total, seen.saved, seen.write_ms) == (12, 90, 10, 3250)
    run(cell, "assert cell.claim(); cell.step(13); cell.saved(10)")
    seen = cell.read()
    assert (seen.step, seen.total, seen.saved, seen.write_ms) == (13, None, 10, None)


def test_a_fresh_cell_says_nothing(cell: Cell):
    assert cell.read() == (0, None, None, None, None, None, False, None, None, None, "", None, None)
    assert cell.lost_lines() == (0, 0)
    assert cell.order() is None


def test_a_call_that_came_back_is_done_and_the_next_one_is_not(cell: Cell):
    cell.claim()
    cell.leave_call(cell.enter_call(b"one"))
    first = cell.read()
    cell.enter_call(b"two")
    second = cell.read()
    assert (first.is_call_done, second.is_call_done) == (True, False)


def test_a_reader_never_sees_a_torn_record_while_one_is_written_all_the_time(cell: Cell):
    with start(
        cell,
        """
        cell.claim()
        for n in range(10**9):
            cell.tell(bytes([n % 251]) * (1 + n % 60000))
        """,
    ) as child:
        numbers = set()
        deadline_s = time.monotonic() + 30
        while len(numbers) < 30 and time.monotonic() < deadline_s:
            told = cell.read().told
            if told is not None:
                assert told.data == told.data[:1] * len(told.data)
                assert (told.number - 1) % 251 == told.data[0]
                numbers.add(told.number)
        child.kill()
    assert len(numbers) >= 30


def test_a_writer_that_dies_in_the_middle_leaves_the_record_before(cell: Cell):
    cell.claim()
    cell.tell(b"whole")
    record = cell._records["told"]
    slot = record._slots[(record.number + 1) % 2]
    slot[24:28] = b"torn"  # the bytes are there, the number is not
    told = cell.read().told
    assert told is not None
    assert told.data == b"whole"


def test_a_forked_child_does_not_write(cell: Cell):
    out = run(
        cell,
        """
        cell.claim()
        cell.step(1)
        if os.fork() == 0:
            cell.step(99); cell.tell(b"child"); print(cell.enter_call(b"x"), cell.claim(), flush=True)
            os._exit(0)
        os.wait()
        """,
    )
    assert out == "0 False\n"
    assert cell.read().step == 1
    assert cell.read().told is None


def test_the_next_process_may_claim_it_when_the_first_is_gone(cell: Cell):
    run(cell, "assert cell.claim(); cell.step(1)")
    run(cell, "assert cell.claim(); cell.step(2)")
    assert cell.read().step == 2


def test_a_descriptor_that_is_something_else_is_no_cell(tmp_path: Path):
    with (tmp_path / "file").open("wb") as file:
        assert Cell.inherited({"ALLRANKS_CELL_FD": str(file.fileno())}) is None
    assert Cell.inherited({"ALLRANKS_CELL_FD": "987"}) is None
    assert Cell.inherited({"ALLRANKS_CELL_FD": "x"}) is None
    assert Cell.inherited({}) is None


def test_a_cell_of_another_version_is_none(cell: Cell):
    cell._numbers[0] += 1 << 48
    assert Cell.inherited({"ALLRANKS_CELL_FD": str(cell.fd)}) is None


def test_an_order_reaches_the_worker_and_a_later_one_takes_its_place(cell: Cell):
    with start(
        cell,
        """
        cell.claim()
        seen = []
        while len(seen) < 2:
            order = cell.order()
            if order and order not in seen:
                seen.append(order)
                cell.step(len(seen))
        print([tuple(order) for order in seen])
        """,
    ) as child:
        cell.give_order(17, "SIGUSR1: the time limit is near", leaves=True)
        deadline_s = time.monotonic() + 10
        while cell.read().step != 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        cell.give_order(20, "the node is back", leaves=False)
        out, _ = child.communicate(timeout=60)
    assert out == "[(17, 'SIGUSR1: the time limit is near', True), (20, 'the node is back', False)]\n"
    assert cell.order() == CellOrder(20, "the node is back", False)


def test_a_stopped_worker_can_be_read(cell: Cell):
    with start(cell, "cell.claim(); cell.step(3); print('x', flush=True); time.sleep(60)") as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        assert cell.read().step == 3
        child.kill()


def test_what_does_not_fit_is_refused_and_what_was_there_stays(cell: Cell):
    cell.claim()
    assert cell.tell(b"x" * 65536)
    assert not cell.tell(b"x" * 65537)
    told = cell.read().told
    assert told is not None
    assert len(told.data) == 65536


def test_a_worker_cannot_make_the_cell_shorter(cell: Cell):
    """The agent would die of SIGBUS at the next look."""
    out = run(
        cell,
        """
        cell.claim(); cell.step(3)
        for size in (0, 8, 10**9):
            try: os.ftruncate(cell.fd, size); print("cut")
            except PermissionError: print("sealed")
        """,
    )
    assert (out, cell.read().step, cell.has_raised) == (3 * "sealed\n", 3, False)


def test_without_seals_the_agent_reads_a_copy_and_outlives_a_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fcntl, "F_ADD_SEALS", -1)  # EINVAL, as where a kernel has none
    cell = Cell.create()
    cell.give_order(17, "why", leaves=True)
    cell.end()
    out = run(cell, "cell.claim(); cell.step(3); cell.save(is_begun=True); print(cell.order(), cell.is_ending)")
    assert out == "CellOrder(at_step=17, why='why', leaves=True) True\n"
    assert (cell.read().step, cell.is_saving) == (3, True)
    os.ftruncate(cell.fd, 16)
    assert (cell.read().step, cell.read().pid, cell.read().told, cell.lost_lines()) == (None, 0, None, (0, 0))
    assert (cell.is_saving, cell.has_raised, cell.is_finished, cell.handlers().begun_s) == (False, False, False, {})
    cell.give_order(18, "why", leaves=True)
    cell.close()


def junk() -> Iterator[tuple[str, bytes]]:
    """What a worker may write into the memory instead of its records."""
    size = cell_module._TOTAL
    yield "ones", b"\xff" * size
    yield "a count that wraps", b"\xff" * 8 * 4 + b"\0" * (size - 32)
    for seed in range(20):
        yield f"seed {seed}", random.Random(seed).randbytes(size)


@pytest.mark.parametrize(("name", "data"), [*junk()], ids=lambda value: value if isinstance(value, str) else "")
def test_junk_in_a_cell_reads_as_not_written(cell: Cell, name: str, data: bytes):
    os.pwrite(cell.fd, data, 0)
    read = cell.read()
    told = read.told, read.words, read.raised, read.call, read.step, read.saved, read.phase
    assert told == (*6 * [None], "")
    assert to_pace(read.pace, started_ns=0, now_ns=time.monotonic_ns()) is None
    assert all(0 < began_s < 1e10 for began_s in cell.handlers().begun_s.values())
    assert all(0 <= number <= most for number, most in zip(cell.lost_lines(), (10**15, 4095), strict=True))
    cell.give_order(17, "why", leaves=True)
    assert cell.order() == CellOrder(17, "why", True)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\0" * 9, b"\0" * 256, struct.pack("q", 2**63 - 1)])
def test_a_step_of_another_size_or_without_sense_is_none(cell: Cell, data: bytes):
    assert cell._records["step"].write(data)
    assert cell._records["phase"].write(256 * b"\xff")
    assert (cell.read().step, len(cell.read().phase)) == (None, 64)


def test_entering_a_call_costs_microseconds(cell: Cell):
    cell.claim()
    times = []
    for _ in range(2000):
        began_ns = time.perf_counter_ns()
        cell.leave_call(cell.enter_call(b"x" * 160))
        times.append(time.perf_counter_ns() - began_ns)
    assert sorted(times)[1000] < 30_000


def test_at_the_end_of_a_script_the_threads_are_named_that_it_waits_for():
    text = """if True:
        import threading, time
        from allranks.guard.inside.user_frames import place_of_main

        def tell():
            while threading.main_thread().is_alive():
                time.sleep(0.001)
            print(place_of_main())

        print(place_of_main())
        threading.Thread(target=tell, name="upload").start()
        """
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60).stdout
    assert told == "\nthe end of the script, which waits for thread upload\n"  # `-c` has no file

"""What a worker can write: its files and its cell, through to what the guard makes of them."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from .door import Door


def worker_file(name: str) -> Door:
    def begin(folder: Path) -> Callable[[bytes], object]:
        from allranks.files.folder import Folder
        from allranks.guard.failure import describe, find_evidence
        from allranks.guard.inside.cell import Cell
        from allranks.guard.node.activity import Output
        from allranks.launch.last_words import read_crash, read_left, read_tail
        from allranks.launch.worker_end import explain_end, will_end_with
        from allranks.wire.connection import encode_frame
        from allranks.wire.protocol import Ended, WorkerEnd

        cell, held = Cell.create(), Folder.at(folder)
        cell.claim()
        path, stderr = folder / name, Output(held, "err")

        def read(data: bytes) -> object:
            if name == "raised":
                cell.raised(data[:65536])
            elif name == "words":
                cell.last_words(data[:65536])
            else:
                path.write_bytes(data)
            left = read_left(held, "error.json", "exit.json", cell)
            will_end_with(left, now_s=1.8e9)
            fields = {"time_s": 1.8e9, "exit_code": -6} | explain_end(
                -6, left, told_s={15: 1.8e9}, handles_end=True, now_s=1.8e9
            )
            end = WorkerEnd(rank=0, node="n1", stderr_tail=read_tail(stderr), **fields)
            end = msgspec.structs.replace(end, **read_crash(stderr, -6))
            encode_frame(Ended(end=end, age_s=0.0))
            find_evidence(end)
            return describe(end)

        return read

    return begin


def cell_memories() -> list[bytes]:
    from allranks.guard.inside.cell import Cell
    from allranks.guard.inside.pace_words import BACK, BEGAN, STATE, STEPS, TOTALS

    cell = Cell.create()
    cell.claim()
    cell.tell(msgspec.json.encode(TOLD))
    cell.last_words(msgspec.json.encode({"calls": TOLD["calls"], "failed": "RuntimeError: x"}))
    cell.raised(b'{"message": "ValueError: x", "py_callstack": "T", "time_s": 1.8e9, "threads": ["a"], "before": []}')
    cell.enter_call(msgspec.json.encode(CALL))
    for word, value in {STATE: 1 + 3, BEGAN: time.monotonic_ns(), STEPS: 12, TOTALS + 1: 10**9, BACK: 501}.items():
        cell.pace[word] = value
    cell.step(12)
    cell.saved(10)
    cell.phase("training")
    data = os.pread(cell.fd, 1 << 20, 0)
    cell.close()
    return [data]


CALL = {
    "group": "0", "seq": 5, "op": "all_reduce", "sizes": [[8, 8]], "dtypes": ["Float"], "is_done": False,
    "created_ns": 1_800_000_000_000_000_000, "place": "train.py:12 in step",
}  # fmt: skip
TOLD: dict[str, Any] = {
    "at": "train.py:12 in step", "groups": [["0", [0, 1], 5, 4, 1_000_000_000], ["1", [], 3, 3, 0]],
    "calls": [CALL, {**CALL, "seq": 4, "is_done": True}, {**CALL, "op": "send", "peer": 1}], "lags": [["0", 64, 5]],
    "blind": ["no flight recorder in torch 2.8"],
}  # fmt: skip


def cell_memory(folder: Path) -> Callable[[bytes], object]:
    """Any bytes in the memory; what a record holds is tried with a right checksum by cell_record."""
    from allranks.guard.inside.cell import Cell

    cell, feed = Cell.create(), beat_feed()
    watched = watch(cell)

    def read(data: bytes) -> object:
        os.pwrite(cell.fd, data.ljust(1 << 10, b"\0")[: os.fstat(cell.fd).st_size], 0)
        cell.handlers()
        cell.give_order(3, "why", leaves=True)
        _ = cell.is_saving, cell.is_finished, cell.has_raised
        return feed(watched.look())

    return read


def cell_record(room: str) -> Door:
    def begin(folder: Path) -> Callable[[bytes], object]:
        from allranks.guard.inside.cell import Cell

        cell, feed = Cell.create(), beat_feed()
        cell.claim()
        watched = watch(cell)

        def read(data: bytes) -> object:
            record = cell._records[room]
            record.write(data[: record.room])
            beat = watched.look()
            watched._told = (0, watched._told[1])
            return feed(beat)

        return read

    return begin


def cell_book(folder: Path) -> Callable[[bytes], object]:
    """Any bytes in the words of the training thread's book."""
    from allranks.guard.inside.cell import Cell
    from allranks.guard.inside.pace_words import PACE, PACE_WORDS

    cell, feed = Cell.create(), beat_feed()
    watched = watch(cell)

    def read(data: bytes) -> object:
        os.pwrite(cell.fd, data.ljust(8 * PACE_WORDS, b"\0")[: 8 * PACE_WORDS], 8 * PACE)
        return feed(watched.look())

    return read


def cell_books() -> list[bytes]:
    now_ns = time.monotonic_ns()
    return [
        struct.pack("14Q", 2, now_ns - 10**9, 7, 10**8, 2 * 10**8, 0, 10**8, 0, 0, 0, 10**7, 10**6, 501, 0),
        struct.pack("14Q", 1, now_ns, *12 * [0]),
    ]


def watch(cell: Any) -> Any:
    from allranks.guard.node.worker import WatchedWorker
    from allranks.host.glance import Glance

    watched = WatchedWorker(rank=0, pid=os.getpid(), cell=cell)
    spy = Glance.__new__(Glance)  # py-spy is not asked
    spy.pids, spy.began_s, spy.found, spy._thread = (os.getpid(),), float("inf"), [], None
    watched._spy = spy
    return watched


def beat_feed() -> Callable[[Any], object]:
    """Return what takes a RankBeat to the leader, has the guard judge, and writes it as `keep` does."""
    from allranks.guard.node.heartbeat import _as_recorder
    from allranks.guard.verdict import Guard
    from allranks.model.beat import NodeBeat
    from allranks.model.cluster import GuardTable
    from allranks.model.membership import Member
    from allranks.wire.connection import decode_frames, encode_frame
    from allranks.wire.protocol import Beat, Plan

    members = tuple(Member(name=f"n{i}", first_rank=i, num_workers=1, host=f"n{i}") for i in range(2))
    plan = Plan(
        members=members, node_index=0, attempt=0, store_address="n0", store_port=1, backend="gloo", backend_reason="",
        nodes=(0, 1),
    )  # fmt: skip
    guard, now = Guard(GuardTable()), [1000.0]

    def feed(rank: Any) -> object:
        if int(now[0]) % 200 == 0:
            guard.begin(plan, now[0])
        now[0] += 1
        if now[0] > 5000:
            now[0] = 1000.0
        msgspec.json.encode(_as_recorder(rank, range(2)))
        beat = Beat(node=NodeBeat(node_index=0, generation=0, ranks=(rank,)))
        (heard,) = decode_frames(bytearray(encode_frame(beat)))
        assert isinstance(heard, Beat)
        guard.hear(heard, now[0])
        return guard.judge(now[0]), guard.lines(now[0]), guard.traffic

    return feed

"""Dumps with batches of calls, and with groups that were destroyed and formed again under their name."""

from __future__ import annotations

import json
from typing import Any

from allranks.recorder.calls import Dump
from allranks.recorder.wait_graph import Standstill, find_stops
from allranks.why.dumps import parse_dump


def dump_of(rank: int, *entries: dict[str, Any], keep: int = 100, first: int = 0, members: str = "[0, 1, 2]") -> Dump:
    """A dump of a rank, as torch 2.13 writes it in JSON; `first`: how many entries it has lost."""
    told = [{"record_id": first + number} | entry for number, entry in enumerate(entries)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": members}}
    status = {"0": {"last_enqueued_collective": 9}}  # torch counts sends and receives in it, too
    file = {"pg_config": config, "pg_status": status, "entries": told}
    return parse_dump(json.dumps(file).encode(), rank=rank, keep=keep)


def entry(seq: int, op: str = "all_reduce", *, size: int = 4, state: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        "input_sizes": [[size]] if size else [],
        "input_dtypes": ["Float"] if size else [],
        "output_sizes": [[size]] if size else [],
        "output_dtypes": ["Float"] if size else [],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
    } | more


def show(stops: list[Standstill]) -> list[str]:
    return [f"{stop.kind} {stop.ranks} {stop.confidence}" for stop in stops]


def batch(seq: int, num: int, *, state: str = "completed") -> list[dict[str, Any]]:
    """Coalesced calls: only the closing one is ever completed, by torch 2.13."""
    members = [entry(seq, size=1 + number, state="scheduled") for number in range(num)]
    return [*members, entry(seq, "ALLREDUCE_coalesced", size=0, state=state)]


def test_calls_of_a_batch_end_with_the_entry_that_closes_it() -> None:
    done, waits = batch(1, 2), entry(2, size=9, state="scheduled")
    assert all(call.is_done for call in dump_of(0, *done).calls)
    assert find_stops([dump_of(rank, *done) for rank in range(3)], 3) == []
    stops = find_stops([dump_of(0, *done, waits), dump_of(1, *done, waits), dump_of(2, *done)], 3)
    assert show(stops) == ["missing (2,) certain"]
    assert stops[0].seq == 2
    open_ones = dump_of(0, *batch(1, 2, state="scheduled")).calls
    assert [call.is_done for call in open_ones] == [False] * 3


def test_sends_and_receives_of_a_batch_end_with_the_entry_that_closes_it() -> None:
    def pairs(rank: int) -> list[dict[str, Any]]:
        told = []
        for peer in {rank - 1, rank + 1} & {0, 1, 2}:
            about = {"state": "scheduled", "is_p2p": True, "p2p_seq_id": 1}
            told += [entry(0, f"send {rank}->{peer}", **about), entry(0, f"recv {rank}<-{peer}", **about)]
        return [*told, entry(0, "coalesced", size=0, is_p2p=True, p2p_seq_id=1)]

    waits = entry(1, size=9, state="scheduled")
    dumps = [dump_of(0, *pairs(0)), dump_of(1, *pairs(1), waits), dump_of(2, *pairs(2), waits)]
    assert show(find_stops(dumps, 3)) == ["missing (0,) certain"]


def test_a_batch_is_kept_whole() -> None:
    """Cut within, its first calls would be different ones on ranks that have called more since."""
    more = [entry(number, process_group=["7", ""], pg_id=1) for number in range(1, 4)]
    dumps = [dump_of(rank, *batch(1, 20), *more[:rank], keep=16) for rank in range(3)]
    assert [sum(call.group == "0" for call in dump.calls) for dump in dumps] == [21] * 3
    assert "mismatch" not in str(show(find_stops(dumps, 3)))


def test_calls_of_an_earlier_group_of_that_name_do_not_count() -> None:
    """The second trial of one process. The last rank has called nothing in its group yet, or is in an earlier one."""
    first = [entry(seq) for seq in (1, 2, 3)]
    waits = entry(1, "broadcast", pg_id=2, state="scheduled")
    dumps = [dump_of(rank, *first, *[waits] * (rank < 2), members="") for rank in range(3)]  # Gloo does not know them
    assert [[(call.group, call.seq) for call in dump.calls] for dump in dumps[1:]] == [
        [("0", 1)],
        [("0", 1), ("0", 2), ("0", 3)],
    ]
    stops = find_stops(dumps, 3)
    assert show(stops) == ["all there () undecided"]
    unnumbered = [entry | {"pg_id": None} for entry in (*first, waits)]  # numbers that fall tell it, too
    assert [call.op for call in dump_of(0, *unnumbered).calls] == ["broadcast"]
    cut = [dump_of(rank, *first, entry(1, pg_id=2), entry(2, pg_id=2), keep=2) for rank in range(3)]
    assert [call.seq for call in cut[0].calls] == [1, 2]


def test_where_nobody_knows_which_group_of_a_name_it_is_no_calls_differ() -> None:
    waits, other = (entry(1, op, pg_id=2, state="scheduled") for op in ("broadcast", "all_reduce"))
    lost = [dump_of(0, entry(9), waits, first=5000), dump_of(1, other, first=5000), dump_of(2, entry(1))]
    assert [dump.formed_again for dump in lost] == [{"0"}, {"0"}, frozenset()]
    assert not any("mismatch" in stop for stop in show(find_stops(lost, 3)))
    known = [dump_of(rank, entry(1, op, state="scheduled")) for rank, op in enumerate(("broadcast", "x", "x"))]
    assert show(find_stops(known, 3)) == ["mismatch (0,) certain"]

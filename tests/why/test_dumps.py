"""Flight recorder dumps: real ones of torch, tables of who waits for whom, and files that are no dumps."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.model.finding import Confidence
from allranks.recorder.calls import Call, Dump
from allranks.recorder.unpickle import PickleError, load_plain
from allranks.recorder.wait_graph import StandstillKind, find_stops
from allranks.why.blame import conclude
from allranks.why.dumps import DumpError, find_dumps, is_dump, parse_dump, read_dumps
from allranks.why.logs.log_events import Logs
from allranks.why.stops import read_stops
from conftest import clean_env
from forked import ForkedScript

# --- Tables -----------------------------------------------------------------------------------------------------------


def entry(seq: int, op: str = "all_reduce", *, done: bool = False, group: str = "0", **more: Any) -> dict[str, Any]:
    """One call as torch 2.13 with NCCL writes it."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/venv/lib/python3.11/site-packages/torch/distributed/d.py", "line": 1},
            {"name": "step", "filename": "/home/u/train.py", "line": 7},
        ],
        "record_id": 0,
        "pg_id": int(group),
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8]],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
    } | more


def file_of(entries: list[dict[str, Any]], ranks: str = "[0, 1, 2]", **more: Any) -> dict[str, Any]:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "entries": entries, "pg_config": groups, "pg_status": {}} | more


def dump(rank: int, *calls: Call, **more: Any) -> Dump:
    return Dump(rank, calls, **{"is_whole": True} | more)


def raw(group: str, seq: int, op: str, sizes=(), output_sizes=(), dtypes=(), output_dtypes=(), **more: Any) -> Call:
    about = {"sizes": sizes, "output_sizes": output_sizes, "dtypes": dtypes, "output_dtypes": output_dtypes}
    return Call(group=group, seq=seq, op=op, **about, **more)


def call(seq: int, op: str = "all_reduce", *, done: bool = False, group: str = "0", **more: Any) -> Call:
    return raw(group, seq, op, ((8,),), ((8,),), ("Float",), ("Float",), is_done=done, **more)


WORLD = {"0": (0, 1, 2)}
TWO_GROUPS = {"1": (0, 1), "2": (0, 1)}
FLOAT, HALF = (("Float",), ("Float",)), (("Half",), ("Half",))
# name, dumps, kind, culprits, victims, is decided
STOPS: list[tuple[str, list[Dump], StandstillKind | None, tuple[int, ...], tuple[int, ...], bool]] = [
    ("all equal", [dump(0, call(1, done=True)), dump(1, call(1, done=True))], None, (), (), True),
    (
        "one is missing",
        [dump(0, call(1, done=True), call(2)), dump(1, call(1, done=True)), dump(2, call(1, done=True), call(2))],
        StandstillKind.MISSING, (1,), (0, 2), True,
    ),
    (
        "several calls are under way",
        [dump(0, call(2), call(3), call(4)), dump(1, call(1, done=True)), dump(2, call(2), call(3))],
        StandstillKind.MISSING, (1,), (0, 2), True,
    ),
    (
        "two are missing in one collective",
        [dump(0, call(2)), dump(1, call(1, done=True)), dump(2, call(1, done=True))],
        StandstillKind.MISSING, (1, 2), (0,), True,
    ),
    (
        "another operation",
        [dump(0, call(2)), dump(1, call(2, "broadcast")), dump(2, call(2))],
        StandstillKind.MISMATCH, (1,), (0, 2), True,
    ),
    (
        "a skipped call shows at the first number that differs",
        [
            dump(0, call(1, done=True), call(2, "all_gather"), call(3)),
            dump(1, call(1, done=True), call(2)),
            dump(2, call(1, done=True), call(2, "all_gather"), call(3)),
        ],
        StandstillKind.MISMATCH, (1,), (0, 2), True,
    ),
    (
        "two against each other",
        [dump(0, call(2)), dump(1, call(2, "barrier"))], StandstillKind.MISMATCH, (0, 1), (), False,
    ),
    (
        "another size",
        [dump(0, call(2)), dump(1, raw("0", 2, "all_reduce", ((9,),), ((9,),), *FLOAT)), dump(2, call(2))],
        StandstillKind.MISMATCH, (1,), (0, 2), True,
    ),
    (
        "another dtype",
        [dump(0, call(2)), dump(1, raw("0", 2, "all_reduce", ((8,),), ((8,),), *HALF)), dump(2, call(2))],
        StandstillKind.MISMATCH, (1,), (0, 2), True,
    ),
    (
        "a gather has outputs on its root alone",
        [dump(0, raw("0", 2, "gather", ((8,),), ((2, 8),))), dump(1, raw("0", 2, "gather", ((8,),)))],
        StandstillKind.ALL_THERE, (), (0, 1), False,
    ),
    ("all are there", [dump(rank, call(2)) for rank in range(3)], StandstillKind.ALL_THERE, (), (0, 1, 2), False),
    (
        "no dump of one",
        [dump(0, call(2), members=WORLD), dump(1, call(2), members=WORLD)],
        StandstillKind.MISSING, (2,), (0, 1), True,
    ),
    (
        "who waits in another group is no culprit",
        [
            dump(0, call(5), members=WORLD),
            dump(1, call(4, done=True), call(3, group="1"), members=WORLD | {"1": (1, 2)}),
            dump(2, call(4, done=True), call(2, group="1", done=True), members=WORLD | {"1": (1, 2)}),
        ],
        StandstillKind.MISSING, (2,), (0, 1), True,
    ),
    (
        "two sinks of two waits are undecided",
        [
            dump(0, call(1, group="1"), members={"1": (0, 1)}),
            dump(1, members={"1": (0, 1)}),
            dump(2, call(1, group="2"), members={"2": (2, 3)}),
            dump(3, members={"2": (2, 3)}),
        ],
        StandstillKind.MISSING, (1, 3), (0, 2), False,
    ),
    (
        "groups in another order",
        [dump(0, call(1, group="1"), members=TWO_GROUPS), dump(1, call(1, group="2"), members=TWO_GROUPS)],
        StandstillKind.CIRCLE, (0, 1), (), False,
    ),
    (
        "a receive waits for its sender",
        [
            dump(0, raw("0", 1, "recv 0<-1", is_p2p=True, peer=1), members=WORLD),
            dump(1, raw("0", 1, "recv 1<-2", is_p2p=True, peer=2), members=WORLD),
            dump(2, members=WORLD),
        ],
        StandstillKind.MISSING, (2,), (0, 1), True,
    ),
    (
        "sub groups that share a name",
        [
            dump(0, call(2, group="1"), members={"1": (0, 1)}),
            dump(1, call(2, group="1"), members={"1": (0, 1)}),
            dump(2, call(7, "broadcast", group="1"), members={"1": (2, 3)}),
            dump(3, call(6, "broadcast", group="1", done=True), members={"1": (2, 3)}),
        ],
        StandstillKind.MISSING, (3,), (0, 1, 2), True,
    ),
    (
        "only a beat: numbers without calls",
        [dump(0, call(4)), dump(1, enqueued={"0": 3}), dump(2, call(4))],
        StandstillKind.MISSING, (1,), (0, 2), True,
    ),
    (
        "Gloo after a timeout",
        [dump(0, call(2, done=True)), dump(1, call(1, done=True)), dump(2, call(2, done=True))],
        StandstillKind.BEHIND, (1,), (0, 2), False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dumps", "kind", "culprits", "victims", "is_decided"), [row[1:] for row in STOPS], ids=[row[0] for row in STOPS])  # fmt: skip # noqa: E501
def test_the_walk_ends_at_the_culprit(
    dumps: list[Dump],
    kind: StandstillKind | None,
    culprits: tuple[int, ...],
    victims: tuple[int, ...],
    is_decided: bool,
) -> None:
    stops = find_stops(dumps)
    if kind is None:
        assert stops == []
        return
    assert (stops[0].kind, stops[0].ranks, stops[0].victims, stops[0].is_decided) == (
        kind,
        culprits,
        victims,
        is_decided,
    )
    assert stops[0].calls


def test_the_work_grows_with_the_number_of_ranks_and_not_with_its_square() -> None:
    took_s = []
    for size in (512, 4096):
        ranks = tuple(range(size))
        calls = (call(1, done=True), call(2))
        dumps = [dump(rank, *(calls if rank != 17 else calls[:1]), members={"0": ranks}) for rank in ranks]
        start_s = time.process_time()
        assert find_stops(dumps)[0].ranks == (17,)
        took_s.append(time.process_time() - start_s)
    assert took_s[1] < 32 * max(took_s[0], 0.05)  # 8 times the ranks; the square would be 64


# --- Formats ----------------------------------------------------------------------------------------------------------


def test_the_users_frame_and_the_group_stand_in_the_message(tmp_path: Path) -> None:
    for rank in range(3):
        calls = [entry(1, done=True), entry(2)] if rank != 1 else [entry(1, done=True)]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(file_of(calls), protocol=2))
    (tmp_path / "rank_0.err").write_text("Watchdog caught collective operation timeout\n")
    problems: list[Any] = []
    conclusion, *_ = conclude(Logs((), ()), read_dumps(find_dumps([str(tmp_path)]), problems))
    assert not problems
    assert conclusion.cause.name == "straggler-rank"
    assert conclusion.confidence is Confidence.CERTAIN
    assert conclusion.culprit.ranks == (1,)
    assert conclusion.message == (
        "rank 1 did not enter collective 2 (all_reduce) of group 0 (default_pg); ranks 0,2 waited in it at "
        "/home/u/train.py:7 in step; the last call of rank 1 was all_reduce [8] Float at /home/u/train.py:7 in step"
    )
    assert [(place.source, place.line) for place in conclusion.evidence] == [
        ("nccl_trace_rank_1", 1),
        ("nccl_trace_rank_0", 2),
    ]


def test_a_json_dump_says_the_same() -> None:
    plain = file_of([entry(1, done=True), entry(2)])
    from_pickle = parse_dump(pickle.dumps(plain, protocol=2), rank=0)
    assert parse_dump(json.dumps(plain).encode(), rank=0) == from_pickle
    assert (from_pickle.started, from_pickle.members) == ({"0": 2}, {"0": (0, 1, 2)})
    counted = file_of([], pg_status={"0": {"last_enqueued_collective": "2"}})
    assert parse_dump(json.dumps(counted).encode(), rank=0).enqueued == {"0": 2}


def test_a_time_that_is_none_is_not_known() -> None:
    entries = [entry(1, time_created_ns=10**400), entry(2, time_created_ns=-1)]
    read = parse_dump(json.dumps(file_of(entries)).encode(), rank=1)
    assert [call.created_s for call in read.calls] == [None, None]


def test_formats_before_2_are_read() -> None:
    old = [
        {
            "record_id": 0,
            "pg_id": 0,
            "seq_id": 3,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": ((8,),),
            "state": "scheduled",
        }
    ]
    for plain in (old, {"version": "1.0", "entries": old}):
        found = parse_dump(pickle.dumps(plain, protocol=2), rank=0)
        assert [(each.group, each.seq, each.op, each.is_done) for each in found.calls] == [
            ("0", 3, "all_reduce", False)
        ]


def test_only_the_newest_calls_are_kept_and_the_first_that_waits() -> None:
    plain = file_of([entry(1), *(entry(seq, done=True) for seq in range(2, 50))])
    assert [each.seq for each in parse_dump(pickle.dumps(plain), rank=0, keep=3).calls] == [1, 47, 48, 49]


def test_a_snapshot_of_a_running_job_is_undecided() -> None:
    started = 1_700_000_000.0
    data = [pickle.dumps(file_of([entry(2)])), pickle.dumps(file_of([entry(1, done=True)]))]
    dumps = [parse_dump(each, rank=rank, taken_s=started + 1) for rank, each in enumerate(data)]
    assert next(read_stops(dumps)).confidence is Confidence.UNDECIDED


def test_the_answer_of_why_has_what_the_dumps_come_to() -> None:
    dumps = [dump(0, call(2)), dump(1, call(1, done=True)), dump(2, call(2))]
    first = conclude(Logs((), ()), dumps)[0]
    assert (first.cause.name, first.culprit.ranks, first.victims) == ("straggler-rank", (1,), {0, 2})


def test_dumps_are_of_the_start_in_which_ranks_timed_out(read: Callable[[str], Logs]) -> None:
    log = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"
    log += "".join(
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
        for rank in (0, 1, 2)
    )
    dumps = [dump(rank, call(2)) for rank in (0, 1, 2)]
    first = conclude(read(log), [*dumps, dump(3, call(1, done=True))])[0]
    assert (first.cause.name, first.culprit.ranks, first.confidence) == ("straggler-rank", (3,), Confidence.CERTAIN)


def test_of_nccl_a_circle_is_proven_by_what_the_gpus_have_started() -> None:
    """Rank 1 has group 2 on its GPU and group 1 queued behind it, the others the other way round."""
    groups = {name: {"name": name, "desc": "undefined", "ranks": "[0, 1, 2]"} for name in ("1", "2")}
    confidences = []
    for states in ("started", "scheduled"), ("scheduled", "scheduled"):
        dumps = []
        for rank in range(3):
            own = ("2", "1") if rank == 1 else ("1", "2")
            calls = [entry(3, group=group, state=state) for group, state in zip(own, states, strict=True)]
            data = pickle.dumps(file_of(calls, pg_config=groups))
            dumps.append(parse_dump(data, rank=rank, taken_s=1_700_000_600.0))
        conclusion, *_ = conclude(Logs((), ()), dumps)
        confidences.append((conclusion.cause.name, conclusion.confidence, conclusion.culprit.ranks))
    assert confidences == [
        ("collective-mismatch", Confidence.CERTAIN, (1,)),
        ("collective-timeout", Confidence.UNDECIDED, ()),
    ]


def test_no_dumps_come_to_nothing() -> None:
    assert list(read_stops([])) == []
    assert find_dumps(["-", "4711", "/nowhere"]) == ()


# --- Files that are no dumps ------------------------------------------------------------------------------------------


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/allranks-was-here",)


BAD = {
    "executes": pickle.dumps({"pg_config": _Evil()}),
    "truncated": pickle.dumps(file_of([entry(1)]))[:-20],
    "memo": b"\x80\x02}r\xff\xff\xff\x7f(X\x09\x00\x00\x00pg_status",
    "huge string": b"\x80\x02X\xff\xff\xff\xffpg_status",
    "tuples as keys": b"\x80\x02}" + b")q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"Ns.pg_status",
    "lists in lists": b"\x80\x02]q\x00" + b"(h\x00h\x00eq\x00" * 60 + b".pg_status",
    "no dump": pickle.dumps(["pg_status"]),
    "json": b'{"pg_status": ',
    "deep json": b'{"pg_status": ' + b"[" * 100_000,
    "wrong types": b'{"entries": [{"profiling_name": 7}]}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_or_broken_file_is_one_problem_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(BAD[name])
    problems: list[Any] = []
    assert is_dump(tmp_path / "nccl_trace_rank_0") or name == "wrong types"
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(file_of([entry(1)])))
    sources = [*find_dumps([str(tmp_path)])]
    assert [each.rank for each in read_dumps(sources, problems)] == [1]
    assert [each.message.count("\n") for each in problems] == ([0] if len(sources) == 2 else [])
    assert not Path("/tmp/allranks-was-here").exists()


def test_a_dump_without_a_rank_in_its_name_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "trace.pkl"
    path.write_bytes(pickle.dumps(file_of([entry(1)])))
    problems: list[Any] = []
    assert read_dumps(find_dumps([str(path)]), problems) == []
    assert len(problems) == 1


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_data_comes_back(value: Any, protocol: int) -> None:
    data = io.BytesIO()
    pickler = pickle.Pickler(data, protocol)
    pickler.fast = True  # without memo
    pickler.dump(value)
    assert load_plain(data.getvalue()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_plain(data: bytes) -> None:
    try:
        value = load_plain(b"\x80\x02" + data)
    except PickleError:
        return
    assert type(value) in (dict, list, tuple, str, bytes, int, float, bool, type(None))


WHOLE = pickle.dumps(file_of([entry(1), entry(2)]), protocol=2)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.integers(1, len(WHOLE)))
def test_a_damaged_dump_is_read_or_refused(at: int, byte: int, end: int) -> None:
    try:
        found = parse_dump((WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :])[:end], rank=0)
    except DumpError:
        return
    list(read_stops([found]))


def test_a_large_file_is_not_read() -> None:
    with pytest.raises(DumpError, match="32 MiB"):
        parse_dump(b"\x80" * ((32 << 20) + 1), rank=0)


def test_numbers_of_all_sizes_come_back() -> None:
    assert load_plain(b"\x80\x02\x8a\x08" + struct.pack("<q", -5) + b".") == -5


# --- Real ones --------------------------------------------------------------------------------------------------------

JOB = """
import datetime, os, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
fault, out, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + out + "/store", rank=rank, world_size=3,
                        timeout=datetime.timedelta(seconds=60))
pair = dist.new_group([0, 1], group_desc="pair")
one, two = dist.new_group([0, 1, 2], group_desc="one"), dist.new_group([0, 1, 2], group_desc="two")
ones = torch.ones(8)
dist.all_reduce(ones)
if rank < 2:
    dist.all_reduce(ones, group=pair)
for group in one, two:
    dist.all_reduce(ones, group=group)
dist.barrier()
def dump():
    time.sleep(1.5)
    text = fault == "json"
    data = _dump_fr_trace_json() if text else _dump_fr_trace()
    with open(out + "/comm_lib_trace_rank_%d" % rank, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
    while not all(os.path.exists(out + "/comm_lib_trace_rank_%d" % r) for r in range(3)):
        time.sleep(0.05)
    time.sleep(0.3)
    os._exit(0)
threading.Thread(target=dump).start()
if fault == "cross":
    for group in (two, one) if rank == 1 else (one, two):
        dist.all_reduce(ones, group=group)
if fault == "json" and rank == 1:
    time.sleep(60)
if fault == "op" and rank == 1:
    dist.all_gather([torch.ones(8) for _ in range(3)], ones)
if fault == "chain" and rank == 0:
    dist.all_reduce(ones, group=pair)   # rank 1 does not come, rank 2 waits for rank 0
if fault == "chain" and rank == 1:
    time.sleep(60)
dist.all_reduce(ones)
time.sleep(60)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [
        ("cross", "collective-mismatch", "rank 1 called the groups in another order than ranks 0,2: "),
        ("json", "straggler-rank", "rank 1 did not enter collective 3 (all_reduce) of group 0 (default_pg)"),
        ("op", "collective-mismatch", "at collective 3 of group 0 (default_pg) rank 1 called all_gather [8] Float"),
        ("chain", "straggler-rank", "rank 1 did not enter"),
    ],
)
def test_dumps_of_real_ranks_name_the_one_that_is_late_or_elsewhere(
    fault: str, cause: str, says: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    environment = clean_env(os.environ, TORCH_FR_BUFFER_SIZE="100", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    ranks = [
        ForkedScript(tmp_path, script, fault, str(tmp_path), env=environment | {"RANK": str(rank)}) for rank in range(3)
    ]
    for process in ranks:
        try:
            process.wait(100)
        finally:
            process.kill()
    problems: list[Any] = []
    dumps = read_dumps(find_dumps([str(tmp_path)]), problems)
    assert [each.rank for each in dumps] == [0, 1, 2]
    assert not problems
    conclusion = conclude(Logs((), ()), dumps)[0]
    assert conclusion.cause.name == cause
    assert conclusion.culprit.ranks == (1,)
    assert conclusion.message.startswith(says)
    assert (f"{script}:" in conclusion.message) == (fault != "json")  # JSON has no stacks

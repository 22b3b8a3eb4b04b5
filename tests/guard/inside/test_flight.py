"""Is torch's flight recorder read right, entry by entry, whatever stands in its names?"""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from allranks.guard.inside.flight import Flight, chosen  # noqa: E402


def entry(seq: int, *, group: str = "0", pg_id: int = 0, op: str = "gloo:all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": seq, "input_dtypes": ["Float"], "input_sizes": [[4, 4]], "is_p2p": False, "op_id": seq,
        "p2p_seq_id": 0, "pg_id": pg_id, "process_group": [group, "default_pg"], "profiling_name": op,
        "retired": True, "state": "scheduled", "time_created_ns": 1000 + seq,
    } | more  # fmt: skip


def flight(
    monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]], status: dict[str, tuple[int, int]]
) -> Flight:
    """Of a process whose recorder holds these entries; torch's own functions are the edge that is replaced."""

    def dump(includeCollectives: bool = True) -> bytes:
        held = {"entries": entries, "nccl_comm_state": {}} if includeCollectives else {}
        told = {
            number: {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}
            for number, (enqueued, completed) in status.items()
        }
        return json.dumps({**held, "pg_status": told}, separators=(",", ":")).encode()

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", dump)
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", raising=False)
    groups = {"first": "0", "second": "7"}
    world = SimpleNamespace(
        pg_names=groups,
        pg_map=dict.fromkeys(groups, ("gloo", None)),
        pg_group_ranks={"first": {0: 0, 1: 1, 2: 2}, "second": {2: 0, 0: 1}},
    )
    return Flight(SimpleNamespace(_world=world))


def test_the_recorders_own_numbers_of_groups_become_their_names(monkeypatch: pytest.MonkeyPatch):
    seen = flight(monkeypatch, [], {"0": (5, 4), "1": (2, 2)})
    assert seen.states() == {"0": (5, 4), "7": (2, 2)}
    assert seen.groups()["7"].ranks == (2, 0)
    assert seen.blind == []


def test_sends_and_receives_are_taken_out_of_the_row(monkeypatch: pytest.MonkeyPatch):
    seen = flight(monkeypatch, [], {"0": (9, 8)})
    for number in (3, 4, 10):
        seen.count_p2p("0", number)
    assert seen.states()["0"] == (7, 6)


def test_the_last_calls_of_each_group_come_in_their_order(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(n) for n in range(1, 40)] + [entry(1, group="7", pg_id=1, op="gloo:barrier", retired=False)]
    calls = flight(monkeypatch, entries, {"0": (39, 39), "1": (1, 0)}).last_calls()
    assert [(call["group"], call["seq"]) for call in calls] == [("7", 1), *[("0", n) for n in range(24, 40)]]
    assert (calls[0]["op"], calls[0]["is_done"]) == ("barrier", False)
    assert calls[-1] == {
        "group": "0", "seq": 39, "op": "all_reduce", "peer": None, "sizes": [[4, 4]], "dtypes": ["Float"],
        "is_done": True, "created_ns": 1039,
    }  # fmt: skip


def test_an_open_call_far_behind_is_found(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(1, group="7", pg_id=1, retired=False), *[entry(n) for n in range(1, 500)]]
    calls = flight(monkeypatch, entries, {"0": (499, 499), "1": (1, 0)}).last_calls()
    assert ("7", 1) in [(call["group"], call["seq"]) for call in calls]


def test_braces_in_names_do_no_harm(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(n, process_group=["0", "my {group}"], thread_name="}{") for n in range(1, 4)]
    assert [call["seq"] for call in flight(monkeypatch, entries, {"0": (3, 3)}).last_calls()] == [1, 2, 3]


def test_a_send_of_nccl_is_told_with_its_peer(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(4, op="nccl:recv 0<-2", is_p2p=True, p2p_seq_id=6)]
    (call,) = flight(monkeypatch, entries, {"0": (4, 4)}).last_calls()
    assert (call["op"], call["peer"], call["seq"]) == ("recv", 2, 6)


def test_lags_are_runs_of_neighbors_and_one_more_and_at_most_eighteen(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(n) for n in range(1, 301)]
    seen = flight(monkeypatch, entries, {"0": (300, 300)})
    told: dict[str, int] = {}
    lags = seen.lags(told)
    assert [seq for _, seq, _ in lags] == [*range(1, 9), *range(272, 281)]
    assert lags[0] == ("0", 1, 1001)
    assert told == {"0": 300}
    assert not seen.untold(told)
    assert seen.lags(told) == []


@pytest.mark.parametrize(("first", "last", "at_most"), [(1, 300, 18), (41, 95, 18), (1000, 1019, 9), (1, 9, 1)])
def test_of_two_choices_of_calls_the_larger_has_all_of_the_smaller(first: int, last: int, at_most: int):
    fewer, more = chosen(first, last, at_most), chosen(first, last, 2 * at_most)
    assert fewer <= more <= set(range(first, last + 1))
    assert len(fewer) <= at_most


def test_a_recorder_that_fails_is_said_and_not_asked_again(monkeypatch: pytest.MonkeyPatch):
    seen = flight(monkeypatch, [], {})

    def fail(**_: Any) -> bytes:
        raise RuntimeError("no such thing")

    seen._dumps["gloo"] = fail
    assert seen.states() == {}
    assert seen.blind == ["the flight recorder of gloo does not answer: RuntimeError('no such thing')"]
    assert seen.last_calls() == []
    assert len(seen.blind) == 1


def world_of(backend: str) -> SimpleNamespace:
    return SimpleNamespace(
        pg_names={"first": "0"}, pg_map={"first": (backend, None)}, pg_group_ranks={"first": {0: 0, 1: 1}}
    )


def test_a_backend_without_a_recorder_is_said_by_name(monkeypatch: pytest.MonkeyPatch):
    """As torch 2.5 with CUDA has it: a recorder of NCCL, and none of Gloo."""
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda **_: b"{}", raising=False)
    seen = Flight(SimpleNamespace(_world=world_of("gloo")))
    assert seen.states() == {}
    told = f"torch {torch.__version__} has no flight recorder of gloo: collectives of DDP are not seen"
    assert seen.blind == [told]
    assert seen.last_calls() == []


def dump_of_2_15(includeCollectives: bool = True, onlyActive: Any = None, backend: str = "gloo") -> bytes:
    """_dump_fr_trace_json(includeCollectives=None, onlyActive=None, backend='gloo')"""
    # As torch 2.15 wrote it for its fake backend, which a hook records as it does nccl2: entries are numbered from 1,
    # the status from 0. nccl2 itself was not tried, for want of a GPU.
    status = {"last_completed_collective": "0", "last_enqueued_collective": "1", "last_started_collective": "-1"}
    entries = [
        {
            "collective_seq_id": seq, "input_dtypes": ["Float"], "input_sizes": [[8]], "is_p2p": False,
            "op_id": seq - 1, "output_dtypes": ["Float"], "output_sizes": [[8]], "p2p_seq_id": 0, "pg_id": 0,
            "process_group": ["0", "default_pg"], "profiling_name": f"{backend}:all_reduce", "record_id": seq - 1,
            "retired": seq == 1, "state": "completed" if seq == 1 else "scheduled", "thread_name": "python",
            "time_created_ns": 1795457286579817816 + seq, "time_discovered_completed_ns": 0, "timeout_ms": 1800000,
        }
        for seq in (1, 2)
    ]  # fmt: skip
    is_used = backend == "nccl2"
    held = {"comm_lib_version": "", **({"entries": entries} if includeCollectives and is_used else {})}
    told = {**held, "nccl_comm_state": {}, "pg_status": {"0": status} if is_used else {}, "version": "2.10"}
    return json.dumps(told, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("backend", "recording", "calls", "state"),
    [
        ("nccl", {"gloo", "nccl-legacy"}, [(1, "all_reduce", True), (2, "all_reduce", False)], (2, 1)),
        ("nccl2", {"gloo", "nccl"}, [(1, "all_reduce", True), (2, "all_reduce", False)], (2, 1)),
        ("nccl", {"gloo", "nccl"}, [(1, "broadcast", False)], (1, 0)),  # TORCH_DIST_USE_NCCL2=0
        ("nccl-legacy", {"gloo"}, [(1, "broadcast", False)], (1, 0)),
    ],
)
def test_the_recorder_is_that_of_the_engine_behind_the_backends_name(
    monkeypatch: pytest.MonkeyPatch, backend: str, recording: set[str], calls: list[Any], state: tuple[int, int]
):
    inside = torch._C._distributed_c10d
    legacy = {
        "entries": [entry(1, op="nccl:broadcast")],
        "pg_status": {"0": {"last_enqueued_collective": "1", "last_completed_collective": "0"}},
    }
    is_nccl2 = state == (2, 1)

    def dump_legacy(**_: Any) -> bytes:
        return json.dumps({} if is_nccl2 else legacy, separators=(",", ":")).encode()

    @functools.wraps(dump_of_2_15)
    def dump_hooked(**asked: Any) -> bytes:
        return dump_of_2_15(**asked) if is_nccl2 else b"{}"

    monkeypatch.setattr(inside, "_dump_fr_trace_json", dump_hooked)
    monkeypatch.setattr(inside, "_dump_nccl_trace_json", dump_legacy, raising=False)
    seen = Flight(SimpleNamespace(_world=world_of(backend), _FR_SELF_RECORDING_BACKENDS=recording))
    seen.groups()
    assert seen.states()["0"] == state
    assert [(call["seq"], call["op"], call["is_done"]) for call in seen.last_calls()] == calls
    assert seen.blind == []


def test_a_group_that_is_formed_again_is_another_one(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(n, retired=False) for n in (1, 2)] + [entry(1, pg_id=2, op="gloo:broadcast")]
    seen = flight(monkeypatch, entries, {"0": (2, 1), "1": (0, 0), "2": (1, 1)})
    names = seen._world.pg_names
    assert list(seen.groups()) == ["0", "7"]
    group = names.pop("first")
    assert list(seen.groups()) == ["7"]
    names["first"] = group  # at the same address as the one before
    assert list(seen.groups()) == ["7", "0#2"]
    assert seen.states() == {"7": (0, 0), "0#2": (1, 1)}
    assert [(call["group"], call["seq"], call["op"]) for call in seen.last_calls()] == [("0#2", 1, "broadcast")]

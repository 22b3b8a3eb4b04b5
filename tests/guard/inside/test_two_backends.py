"""A group with Gloo and NCCL, as session() forms it: each backend numbers its own collectives, and so does the guard.

Nothing here needs a GPU: torch.distributed and its two recorders are the edge that is replaced, and what they hold goes
through the beat, the cell, the agent's half and the guard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from allranks.guard.guard_verdict import GuardVerdict  # noqa: E402
from allranks.guard.inside.beat_thread import BeatThread  # noqa: E402
from allranks.guard.inside.cell import Cell  # noqa: E402
from allranks.guard.inside.flight import Flight  # noqa: E402
from allranks.guard.inside.wrapped_calls import Teller, wrap  # noqa: E402
from allranks.guard.node.worker import WatchedWorker  # noqa: E402
from allranks.guard.verdict import Guard  # noqa: E402
from allranks.model.beat import NodeBeat, RankBeat  # noqa: E402
from allranks.model.cluster import GuardTable  # noqa: E402
from allranks.model.membership import Member  # noqa: E402
from allranks.wire.protocol import Beat as Told  # noqa: E402
from allranks.wire.protocol import Plan  # noqa: E402
from conftest import wait_until  # noqa: E402

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
NUM = 3
MEMBERS = tuple(Member(name=f"node{i}", first_rank=i, num_workers=1, host=f"node{i}") for i in range(NUM))


def tensor(device: str, size: int) -> Any:
    return SimpleNamespace(shape=(size,), dtype=torch.float32, device=torch.device(device))


class Process:
    """One rank's torch.distributed: a group of both backends, whose collectives end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: dict[str, list[dict[str, Any]]] = {"gloo": [], "nccl": []}
        inside = torch._C._distributed_c10d
        monkeypatch.setattr(inside, "_dump_fr_trace_json", self._dump("gloo"))
        monkeypatch.setattr(inside, "_dump_nccl_trace_json", self._dump("nccl"), raising=False)
        counters = {
            backend: SimpleNamespace(_get_sequence_number_for_group=lambda own=own: len(own))
            for backend, own in self.entries.items()
        }
        group = type("ProcessGroup", (), {"_get_backend": lambda _, device: counters[BACKENDS[device.type]]})()
        group._get_sequence_number_for_group = counters["nccl"]._get_sequence_number_for_group  # as torch 2.13
        config = ",".join(f"{device}:{backend}" for device, backend in BACKENDS.items())
        world = SimpleNamespace(
            default_pg=group,
            pg_names={group: "0"},
            pg_map={group: (config, None)},
            pg_backend_config={group: config},
            pg_group_ranks={group: {rank: rank for rank in range(NUM)}},
        )

        def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
            self._record("all_reduce", tensor)

        def broadcast(tensor: Any, src: int = 0, group: Any = None, async_op: bool = False) -> None:
            self._record("broadcast", tensor)

        self.dist = SimpleNamespace(_world=world, all_reduce=all_reduce, broadcast=broadcast)
        teller = Teller(self.dist)
        wrap(self.dist, teller)
        self.cell = Cell.create()
        self.cell.claim()
        teller.cell, teller.flight = self.cell, Flight(self.dist)
        self.beat = BeatThread(self.cell, teller.flight)

    def _record(self, op: str, tensor: Any) -> None:
        backend = BACKENDS[tensor.device.type]
        own = self.entries[backend]
        number = len(own) + 1
        own.append(
            {
                "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [list(tensor.shape)],
                "p2p_seq_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "profiling_name": f"{backend}:{op}",
                "retired": False, "state": "scheduled", "time_created_ns": 1000 + number,
            }
        )  # fmt: skip

    def finish(self) -> None:
        """All that was called ends."""
        for entry in (entry for own in self.entries.values() for entry in own):
            entry.update(retired=True, state="completed")

    def _dump(self, backend: str) -> Callable[..., bytes]:
        def dump(includeCollectives: bool = True) -> bytes:
            own = self.entries[backend]
            done = next((n for n, entry in enumerate(own) if entry["state"] != "completed"), len(own))
            status = {"last_enqueued_collective": str(len(own)), "last_completed_collective": str(done)}
            held = {"entries": own, "nccl_comm_state": {}} if includeCollectives else {}
            return json.dumps({**held, "pg_status": {"0": status}}, separators=(",", ":")).encode()

        return dump


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    """Three ranks that have done two steps: one collective of Gloo and two of NCCL each, so that numbers differ."""
    monkeypatch.setenv("ALLRANKS_BEAT_S", "0.05")
    made = [Process(monkeypatch) for _ in range(NUM)]
    for process in made:
        for _ in range(2):
            process.dist.all_reduce(tensor("cuda", 1000))
            process.dist.all_reduce(tensor("cuda", 50))
            process.dist.broadcast(tensor("cpu", 1))
        process.finish()
        process.beat.start()
    yield made
    for process in made:
        process.beat.end()
        process.cell.close()


def look(processes: list[Process], waiting: tuple[int, ...]) -> list[RankBeat]:
    """What the agents see when these ranks have waited for so long that they tell their calls."""
    views = [WatchedWorker(rank=rank, pid=1, cell=process.cell) for rank, process in enumerate(processes)]

    def seen() -> list[RankBeat] | None:
        beats = [view.look() for view in views]
        are_told = all(beat.groups for beat in beats) and all(len(beats[rank].calls) > 1 for rank in waiting)
        return beats if are_told else None

    return wait_until(seen, "those that wait to tell their calls")


def judge(beats: list[RankBeat]) -> tuple[GuardVerdict | None, list[str]]:
    """What the guard comes to when nothing changes for 20 s."""
    guard = Guard(GuardTable(slow_s=1000))
    guard.begin(
        Plan(members=MEMBERS, node_index=0, attempt=0, store_address="", store_port=1, backend="", backend_reason=""),
        100.0,
    )
    lines: list[str] = []
    for tick in range(100):
        now_s = 100.2 + 0.2 * tick
        for index, rank in enumerate(beats):
            older = tuple(
                replace(group, waiting_s=group.waiting_s and group.waiting_s + 0.2 * tick) for group in rank.groups
            )
            rank = replace(rank, groups=older)
            guard.hear(Told(node=NodeBeat(node_index=index, generation=0, ranks=(rank,))), now_s)
        lines += guard.lines(now_s)
        if (judged := guard.judge(now_s)) is not None:
            return judged, lines
    return None, lines


def test_a_rank_that_comes_late_to_a_collective_of_nccl_is_no_mismatch(processes: list[Process]):
    for rank in (0, 2):
        processes[rank].dist.all_reduce(tensor("cuda", 1000))
    processes[1].dist.broadcast(tensor("cpu", 1))
    processes[1].finish()
    beats = look(processes, waiting=(0, 2))
    assert judge(beats) == (None, [])
    assert [(group.name, group.enqueued, group.completed) for group in beats[0].groups] == [
        ("0/gloo", 2, 2),
        ("0/nccl", 5, 4),
    ]
    assert [(group.name, group.enqueued, group.completed) for group in beats[1].groups] == [
        ("0/gloo", 3, 3),
        ("0/nccl", 4, 4),
    ]
    assert (beats[1].calls[-1].group, beats[1].calls[-1].seq, beats[1].calls[-1].op) == ("0/gloo", 3, "broadcast")


def test_ranks_that_wait_in_different_backends_are_no_mismatch(processes: list[Process]):
    # Rank 1 is in collective 3 of Gloo, the others in 3 of NCCL's row long ago and in its 5th now.
    processes[1].dist.broadcast(tensor("cpu", 1))
    for rank in (0, 2):
        processes[rank].dist.all_reduce(tensor("cuda", 1000))
    assert judge(look(processes, waiting=(0, 1, 2)))[0] is None


def test_a_mismatch_within_one_backend_is_still_found(processes: list[Process]):
    for rank in (0, 2):
        processes[rank].dist.all_reduce(tensor("cuda", 1000))
    processes[1].dist.broadcast(tensor("cuda", 1000))
    judged, _ = judge(look(processes, waiting=(0, 1, 2)))
    assert judged is not None
    assert (judged.findings[0].cause, judged.ranks) == ("AR410 collective-mismatch", (1,))
    assert judged.findings[0].message.startswith("at collective 5 of group 0/nccl rank 1 called broadcast [1000] Float")


def test_calls_of_nccl_are_not_timed(processes: list[Process]):
    """They come back when they are enqueued, so when they were called says nothing of who is late."""
    views = [WatchedWorker(rank=rank, pid=1, cell=process.cell) for rank, process in enumerate(processes)]
    lags: list[tuple[str, int, int]] = []

    def timed() -> bool:
        lags.extend(lag for view in views for lag in view.look().lags)
        return len(lags) >= 2 * NUM

    wait_until(timed, "the calls of Gloo to be told with their times")
    assert {group for group, _, _ in lags} == {"0/gloo"}

"""What does torch's flight recorder say of this rank's process groups? Private torch APIs, each looked for.

    flight = Flight(c10d)
    flight.states()      # {"0": (12, 11)}: enqueued, completed; microseconds
    flight.last_calls()  # the last ones of each group; milliseconds, with the GIL held

A group is told by its key, see Group.key: each of its backends numbers its collectives, and a group that is destroyed
and formed again begins at 1.

Numbers are those of collectives: in Gloo sends and receives count in the same row but are not recorded, so they are
taken out again by what `wrapped_calls.py` counted. Measured, torch 2.13: the state of all groups takes 3 us, a dump
7 us an entry, and four times that to parse it as a whole, which is why entries are picked out of the text.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

KEPT_CALLS = 16
"""Of each group, in a beat."""
LAG_RUN = 8
"""Calls in a row, of those that are told with their times, and one more: only neighbors show who waited
(guard/goodput/waited.py). Without that one, the last call of a run would never show it, which may be the same one of
each step.
"""
MAX_LAGS = 2 * (LAG_RUN + 1)
MAX_NOTES = 8
_SCANNED = 128
"""Entries that are looked at from the end of a dump."""
_CREATED, _TIMED_BYTES = re.compile(rb'"time_created_ns":(\d+)'), 1 << 17
"""A time in a dump, and where they are looked at, from its end: some 200 entries, a tenth of a millisecond."""
_SOURCES = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json", "nccl-legacy": "_dump_nccl_trace_json"}
"""Each backend's recorder counts its own groups from 0; nccl2's is asked by name."""
_ENDS = ("last_enqueued_collective", "last_completed_collective")
_P2P = re.compile(r"(send|recv)\w* \d+(?:->|<-)(\d+)")
"""`nccl:send 0->1`, `nccl:recv 1<-0`. Source: torch 2.13, ProcessGroupNCCL::pointToPoint."""


class Group(NamedTuple):
    """A process group of which this rank is a member."""

    name: str
    ranks: tuple[int, ...]
    backends: Mapping[str, str]
    """By type of device: `{"cpu": "gloo", "cuda": "nccl"}`."""
    incarnation: int
    """1 is the first group of this name and these ranks."""

    def key(self, backend: str) -> str:
        """Return what tells its collectives on one backend from all others, the same on all its ranks.

        The name: `0`. Of several backends: `0/nccl`. Where a group was destroyed and formed again: `0#2`.
        """
        backend = f"/{backend}" if len(set(self.backends.values())) > 1 else ""
        return f"{self.name}{backend}{f'#{self.incarnation}' if self.incarnation > 1 else ''}"


class Flight:
    """The recorders of this process."""

    def __init__(self, c10d: Any) -> None:
        import torch

        self.blind: list[str] = []
        self._is_cuda_used: Callable[[], bool] = torch.cuda.is_initialized
        self._world = c10d._world
        self._dump_of = functools.partial(_dump_of, c10d, torch._C._distributed_c10d)
        self._torch = str(torch.__version__)
        self._dumps: dict[str, Any] = {
            backend: dump for backend in ("gloo", "nccl") if (dump := self._dump_of(backend))
        }
        self._raw: dict[str, bytes] = {}
        self._states: dict[str, dict[str, tuple[int, int]]] = {}
        """By backend."""
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str], Group] = {}
        """By identity and name: a reference would keep a group alive that the script destroyed."""
        self._newest: dict[str, Group] = {}
        """By name: calls of an earlier group of that name are of the past."""
        self._formed: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._numbered: defaultdict[str, dict[int, Group]] = defaultdict(dict)
        """By backend, as its recorder numbers them."""
        self.p2p: dict[str, deque[int]] = {}
        """By key of the group: the numbers that sends and receives took in its row, the last ones."""
        self.num_p2p: dict[str, int] = {}
        self.created_ns: list[int] = []
        """When the last collectives of Gloo were called, as the last dump for `lags` had it: by CLOCK_MONOTONIC."""

    def note(self, text: str) -> None:
        """Keep what cannot be seen, and why: the first few of such texts."""
        if (text := text[:200]) not in self.blind and len(self.blind) < MAX_NOTES:
            self.blind.append(text)

    def groups(self) -> Mapping[str, Group]:
        """Return the groups by key, one for each backend. New ones, and those that are gone, are noticed here."""
        # Not for ever: a signal handler may interrupt whoever holds it, and in a fork nobody lets it go.
        if self._lock.acquire(timeout=0.2):
            try:
                now = {(id(pg), str(name)): pg for pg, name in list(self._world.pg_names.items())}
                self._known = {key: self._known.get(key) or self._learn(key[1], pg) for key, pg in now.items()}
            finally:
                self._lock.release()
        return {group.key(backend): group for group in self._known.values() for backend in group.backends.values()}

    def group(self, pg: Any) -> Group:
        """Return what is known of one of torch's process groups."""
        key = id(pg), str(self._world.pg_names[pg])
        if key not in self._known:
            self.groups()
        return self._known[key]

    def _learn(self, name: str, pg: Any) -> Group:
        by_rank = sorted(self._world.pg_group_ranks.get(pg, {}).items(), key=lambda item: item[1])
        ranks = tuple(rank for rank, _ in by_rank)
        config = getattr(self._world, "pg_backend_config", {}).get(pg) or self._world.pg_map.get(pg, ("",))[0]
        backends = {device: backend for device, _, backend in (part.rpartition(":") for part in str(config).split(","))}
        self._formed[name, ranks] += 1
        group = self._newest[name] = Group(name, ranks, backends, self._formed[name, ranks])
        for source in dict.fromkeys(backends.values()):
            if source not in self._dumps and (dump := self._dump_of(source)) is not None:
                self._dumps[source] = dump
            elif source not in self._dumps:
                self.note(f"torch {self._torch} has no flight recorder of {source}: collectives of DDP are not seen")
            numbered = self._numbered[source]
            numbered[max(numbered, default=-1) + 1] = group
        return group

    @property
    def is_async(self) -> bool:
        """Tell whether collectives come back before they are done: the host runs ahead of its GPU."""
        backends = {backend for group in self._known.values() for backend in group.backends.values()}
        return any(backend.startswith("nccl") for backend in backends) and self._is_cuda_used()

    def states(self) -> dict[str, tuple[int, int]]:
        """Return by key of the group the numbers of the last collective called and of the last one done."""
        raw = {source: self._dump(source, includeCollectives=False) for source in tuple(self._dumps)}
        if raw != self._raw:
            self.groups()
            self._states = {source: dict(self._parse_states(source, text)) for source, text in raw.items()}
            self._raw = raw
        return {key: state for states in self._states.values() for key, state in states.items()}

    def _parse_states(self, source: str, raw: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
        first = int(isinstance(self._dumps[source], functools.partial))  # what torch records by a hook counts from 0
        for number, state in json.loads(raw or b"{}").get("pg_status", {}).items():
            group = self._numbered[source].get(int(number))
            if group is None or self._newest[group.name] is group:
                key = group.key(source) if group else str(number)
                enqueued, completed = (self._without_p2p(key, int(state[end]) + first) for end in _ENDS)
                yield key, (enqueued, completed)

    def _without_p2p(self, name: str, number: int) -> int:
        later = sum(1 for taken in self.p2p.get(name, ()) if taken > number)
        return number - max(0, self.num_p2p.get(name, 0) - later)

    def count_p2p(self, name: str, number: int) -> None:
        """Note that a send or a receive took this number in its group's row."""
        self.p2p.setdefault(name, deque(maxlen=1024)).append(number)
        self.num_p2p[name] = self.num_p2p.get(name, 0) + 1

    def last_calls(self) -> list[dict[str, Any]]:
        """Return the last calls of each group, oldest first, with the fields of model.beat.CallSeen."""
        kept: dict[str, list[dict[str, Any]]] = {}
        first_open = {name: done + 1 for name, (enqueued, done) in self.states().items() if enqueued > done}
        for source in tuple(self._dumps):
            raw = self._dump(source)
            for entry in itertools.islice(_from_the_end(raw), _SCANNED):
                call = self._as_call(source, entry)
                if call and len(own := kept.setdefault(call["group"], [])) < KEPT_CALLS:
                    own.append(call)
            # An open call may lie far behind, where another group goes on.
            for name, seq in first_open.items():
                if seq not in [call["seq"] for call in kept.get(name, ())]:
                    found = (self._as_call(source, entry) for entry in _of_number(raw, seq))
                    kept.setdefault(name, []).extend(call for call in found if call and call["group"] == name)
        return sorted((call for own in kept.values() for call in own), key=lambda call: call["created_ns"])

    def untold(self, told: Mapping[str, int]) -> dict[str, int]:
        """Return by key the last number called where `told` has a lower one.

        In Gloo, since calls of NCCL come back at once, however late the GPU is.
        """
        self.states()
        return {key: last for key, (last, _) in self._states.get("gloo", {}).items() if last > told.get(key, 0)}

    def lags(self, told: dict[str, int]) -> list[tuple[str, int, int]]:
        """Return (group, seq, created_ns) of calls that were not told yet, the same ones on every rank.

        They are runs of LAG_RUN calls. `told`, the last number by group, is brought up to date.
        """
        untold = self.untold(told)
        wanted: dict[str, set[int]] = {}
        for name, enqueued in untold.items():
            wanted[name] = chosen(told.get(name, 0) + 1, enqueued, MAX_LAGS // len(untold))
            told[name] = enqueued
        found: list[tuple[str, int, int]] = []
        raw = self._dump("gloo") if any(wanted.values()) and "gloo" in self._dumps else b""
        ahead_ns = time.time_ns() - time.monotonic_ns()
        self.created_ns = [int(found) - ahead_ns for found in _CREATED.findall(raw, max(0, len(raw) - _TIMED_BYTES))]
        for seq in sorted(set().union(*wanted.values())):
            for entry in _of_number(raw, seq):
                call = self._as_call("gloo", entry)
                if call and seq in wanted.get(call["group"], ()):
                    found.append((call["group"], seq, call["created_ns"]))
        return found[:MAX_LAGS]

    def _dump(self, source: str, **options: Any) -> bytes:
        try:
            return bytes(self._dumps[source](**options))
        except Exception as exc:
            self._dumps[source] = lambda **_: b""
            self.note(f"the flight recorder of {source} does not answer: {exc!r}")
            return b""

    def _as_call(self, source: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
        """None: a group called it that another one of the same name has replaced."""
        name, number = str(entry["process_group"][0]), int(entry["pg_id"])
        group = self._numbered[source].get(number)
        if (group is None or group.name != name) and (newest := self._newest.get(name)):
            group = self._numbered[source][number] = newest  # the recorder counts otherwise than we do
        if group is not None and group.name == name and self._newest[name] is not group:
            return None
        op = str(entry["profiling_name"]).rpartition(":")[2]
        p2p = _P2P.match(op)  # NCCL's; Gloo records none
        return {
            "group": group.key(source) if group else name,
            "seq": int(entry["p2p_seq_id" if p2p else "collective_seq_id"]),
            "op": p2p[1] if p2p else op,
            "peer": int(p2p[2]) if p2p else None,
            "sizes": entry["input_sizes"],
            "dtypes": entry["input_dtypes"],
            # Gloo's entries stay "scheduled"; NCCL's are also retired by a timeout.
            "is_done": entry.get("state") == "completed" or (source == "gloo" and bool(entry.get("retired"))),
            "created_ns": int(entry["time_created_ns"]),
        }


def chosen(first: int, last: int, at_most: int) -> set[int]:
    """Choose at most so many numbers from `first` to `last`: runs of LAG_RUN and one, as far as they are in there.

    Every second run, every fourth, and so on: another rank may choose more of them or fewer, and all of the smaller
    choice are in the larger one. The golden ratio spreads them, so that they are not always the same part of a step.
    """
    numbers, limit = set(range(first, last + 1)), 1 << 32
    while len(numbers) > at_most:
        limit >>= 1
        numbers = {number for number in numbers if _is_in(number, limit) or _is_in(number - 1, limit)}
    return numbers


def _is_in(number: int, limit: int) -> bool:
    """Whether the run of this number is one of the chosen ones."""
    return number // LAG_RUN * 0x9E3779B1 % (1 << 32) < limit


def _dump_of(c10d: Any, inside: Any, backend: str) -> Callable[..., bytes] | None:
    """Return what reads the recorder of a backend; None: this torch has none."""
    if backend == "nccl" and backend not in getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", (backend,)):
        backend = "nccl2"  # what torch 2.15 takes for the name, unless TORCH_DIST_USE_NCCL2=0
    if backend not in ("nccl2", "nccl-lazy"):
        return getattr(inside, _SOURCES.get(backend, ""), None)
    dump = getattr(inside, "_dump_fr_trace_json", None)
    return functools.partial(dump, backend=backend) if dump and "backend" in (dump.__doc__ or "") else None


def _from_the_end(raw: bytes) -> Iterator[dict[str, Any]]:
    """Yield a dump's entries, the last one first, without parsing the others."""
    start = raw.find(b'"entries":[')
    stop = raw.rfind(b"}]", start) + 1
    while start >= 0 and stop > 0:
        opened = raw.rfind(b"{", start, stop)
        if opened < 0:
            return
        try:
            yield json.loads(raw[opened:stop])
        except ValueError:  # a brace inside a name: then as a whole
            yield from reversed(json.loads(raw)["entries"])
            return
        stop = raw.rfind(b"}", start, opened) + 1


def _of_number(raw: bytes, seq: int) -> Iterator[dict[str, Any]]:
    """Yield the entries with this collective number, of whatever group."""
    key = b'"collective_seq_id":%d,' % seq
    at = raw.find(key)
    while at >= 0:
        with contextlib.suppress(ValueError):  # a brace inside a name; this one is left out
            yield json.loads(raw[raw.rfind(b"{", 0, at) : raw.find(b"}", at) + 1])
        at = raw.find(key, at + 1)

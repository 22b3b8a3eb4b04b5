"""Which parsers read what others wrote: where real samples come from, how each is called, and what it may refuse with.

A parser is called through the door that the product uses, with what the product does with the value: a beat also goes
through the guard, a run directory is also listed. It returns, or raises one of its `refusals` with a text of one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from allranks.model.errors import AllranksError

HERE = Path(__file__).parent
RECORDED = HERE.parent / "host/recorded"
SEEDS = HERE / "seeds"


@dataclass(frozen=True, slots=True)
class Parser:
    """One row of the table."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    """Inputs that are right."""
    begin: Callable[[Path], Callable[[bytes], object]]
    """Return what reads one input; the directory is its own, in memory."""
    refusals: tuple[type[Exception], ...] = ()
    """What it may raise."""
    kind: str = "text"
    """How its inputs are changed (mutate.mutate)."""


def plain(read: Callable[[str], object]) -> Callable[[Path], Callable[[bytes], object]]:
    """Return how a function of a text is called."""
    return lambda _: lambda data: read(data.decode(errors="replace"))


def of_bytes(read: Callable[[bytes], object]) -> Callable[[Path], Callable[[bytes], object]]:
    """Return how a function of bytes is called."""
    return lambda _: read


def recorded(*names: str) -> Callable[[], list[bytes]]:
    """Return how recorded answers are read."""
    return lambda: [(RECORDED / name).read_bytes() for name in names]


def seeds(*names: str) -> Callable[[], list[bytes]]:
    """Return how samples of this directory are read."""
    return lambda: [(SEEDS / name).read_bytes() for name in names]


# What users write


def _cluster(folder: Path) -> Callable[[bytes], object]:
    from allranks.config.file import read_cluster

    path = folder / "cluster.toml"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return read_cluster(path)

    return read


def _hostlists(text: str) -> object:
    from allranks.model.hostlist import expand_hosts, fold_hosts

    hosts = expand_hosts(text)
    assert expand_hosts(fold_hosts(hosts)) == hosts or not hosts
    return hosts


def _identity(data: bytes) -> object:
    from allranks.model.identity import world_from_env

    env = dict(
        line.split("=", 1) for line in data.decode(errors="replace").replace("\0", "").splitlines() if "=" in line
    )
    return world_from_env(env)


# Run directories


def _run_file(name: str) -> Callable[[Path], Callable[[bytes], object]]:
    """Return how a file of a run directory is read: as `list`, `status`, `logs`, `clean` and the agents do."""

    def begin(folder: Path) -> Callable[[bytes], object]:
        from allranks.launch.batch.clean import _checkpoint_places
        from allranks.launch.queue.scheduler import read_culprits
        from allranks.model.membership import read_members
        from allranks.report.growth import read_growth
        from allranks.report.history import describe_restarts
        from allranks.report.remains import last_words
        from allranks.report.rundir import RunDir, read_shared_members
        from allranks.report.runs import find_run, list_runs
        from allranks.report.text import Style, render_findings
        from allranks.wire.leader import read_announcement
        from allranks.wire.secret import read_secret_file

        run = folder / "runs/7"
        shutil.copytree(SEEDS / "run", run)
        run_dir = RunDir(folder / "runs", "7")
        run_dir.create()
        run_dir.create_attempt(0)
        path = run / name

        def read(data: bytes) -> object:
            path.write_bytes(data)
            found = find_run("7", folder / "runs")
            assert found is not None
            assert [each.name for each in list_runs(folder / "runs")] == ["7"]
            describe_restarts(found.restarts, allowed=found.max_restarts)
            if found.verdict is not None:
                assert_harmless(render_findings(found.verdict.findings, Style(True, False, 100)))
                found.verdict.to_json()
            run_dir.read_events()
            read_announcement(run)
            read_culprits(run_dir)
            growth = read_growth(run / "attempt_0/n1")
            [(each.time_of(5), each.size_at(2e9)) for each in growth.values()]
            _checkpoint_places(run)
            last_words(run / "attempt_0")
            with contextlib.suppress(AllranksError):
                read_members(read_shared_members(f"@{run}/attempt_0/n1/members"))
            if name == "secret":
                return read_secret_file(path)
            return found

        return read

    return begin


CONTROLS = frozenset(map(chr, [*range(10), *range(11, 32), *range(0x7F, 0xA0)]))


def assert_harmless(text: str) -> None:
    """What is printed has no control characters but line ends."""
    assert not CONTROLS & set(text)
    text.encode()


# Workers


def _worker_files(name: str) -> Callable[[Path], Callable[[bytes], object]]:
    def begin(folder: Path) -> Callable[[bytes], object]:
        from allranks.guard.activity import Output
        from allranks.guard.failure import describe, find_evidence
        from allranks.guard.inside.cell import Cell
        from allranks.launch.last_words import read_crash, read_left, read_tail
        from allranks.launch.worker_end import explain_end, will_end_with
        from allranks.report.folder import Folder
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


def _cells() -> list[bytes]:
    from allranks.guard.inside.cell import Cell

    cell = Cell.create()
    cell.claim()
    cell.tell(msgspec.json.encode(TOLD))
    cell.last_words(msgspec.json.encode({"calls": TOLD["calls"], "failed": "RuntimeError: x"}))
    cell.raised(b'{"message": "ValueError: x", "py_callstack": "T", "time_s": 1.8e9, "threads": ["a"], "before": []}')
    cell.enter_call(msgspec.json.encode(CALL))
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


def _cell(folder: Path) -> Callable[[bytes], object]:
    """Any bytes in the memory: half of them over whole records with a right checksum, so that what is inside is read."""
    from allranks.guard.inside.cell import Cell

    cell, feed = Cell.create(), _beat_feed()
    watched = _watched(cell)

    def read(data: bytes) -> object:
        os.pwrite(cell.fd, data.ljust(1 << 10, b"\0")[: os.fstat(cell.fd).st_size], 0)
        cell.handlers()
        cell.give_order(3, "why", leaves=True)
        _ = cell.is_saving, cell.is_finished, cell.has_raised
        return feed(watched.look())

    return read


def _cell_record(room: str) -> Callable[[Path], Callable[[bytes], object]]:
    def begin(folder: Path) -> Callable[[bytes], object]:
        from allranks.guard.inside.cell import Cell

        cell, feed = Cell.create(), _beat_feed()
        cell.claim()
        watched = _watched(cell)

        def read(data: bytes) -> object:
            record = cell._records[room]
            record.write(data[: record.room])
            beat = watched.look()
            watched._told = (0, watched._told[1])
            return feed(beat)

        return read

    return begin


def _watched(cell: Any) -> Any:
    from allranks.guard.worker import WatchedWorker
    from allranks.host.glance import Glance

    watched = WatchedWorker(rank=0, pid=os.getpid(), cell=cell)
    spy = Glance.__new__(Glance)  # py-spy is not asked
    spy.pids, spy.began_s, spy.found, spy._thread = (os.getpid(),), float("inf"), [], None
    watched._spy = spy
    return watched


def _beat_feed() -> Callable[[Any], object]:
    """Return what takes a RankBeat to the leader, has the guard judge, and writes it as `keep` does."""
    from allranks.guard.verdict import Guard
    from allranks.guard.watch import _as_recorder
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
        return guard.judge(now[0])

    return feed


# The wire


def _messages(*kinds: str) -> Callable[[], list[bytes]]:
    def make() -> list[bytes]:
        from allranks.model import beat as b
        from allranks.model.card import Card, TestPorts
        from allranks.model.finding import Verdict
        from allranks.model.membership import Member
        from allranks.model.pair import Effort, Target
        from allranks.wire import protocol as p

        call = msgspec.convert(CALL, b.CallSeen)
        group = b.GroupSeen(name="0", ranks=(0, 1), enqueued=5, completed=4, waiting_s=2.0)
        rank = b.RankBeat(rank=0, pid=7, silent_s=0.1, groups=(group,), calls=(call,), lags=(("0", 64, 5),), step=3)
        link = b.LinkSeen(
            own_address="10.0.0.1", peer_address="10.0.0.2", unacked_bytes=5, stalled_s=2.0, retransmits=3
        )
        tried = b.TrySeen(target=1, network="data", connects=True, carries=False, age_s=1.0)
        node = b.NodeBeat(
            node_index=0, generation=0, ranks=(rank,), links=(link,), tries=(tried,), addresses=("10.0.0.1",)
        )
        members = tuple(Member(name=f"n{i}", first_rank=i, num_workers=1, host=f"n{i}") for i in range(2))
        end = p.WorkerEnd(
            rank=0, node="n0", exit_code=1, time_s=1.8e9, message="ValueError: x", before=("KeyError: 3",)
        )
        verdict = Verdict.from_json((SEEDS / "run/attempt_0/verdict.json").read_bytes())
        contact = p.Contact(node=0, name="n0", control_address="10.0.0.1", data_address="10.0.1.1", port=29500)
        card = Card(host="n1", pid=1, node_index=1, num_workers=1, num_gpus=0)
        plan = p.Plan(
            members=members, node_index=0, attempt=0, store_address="n0", store_port=1, backend="gloo", backend_reason="x",
            nodes=(0, 1), successors=(contact,), srun=p.Srun(node=0, address="10.0.0.1", port=3), electors=((0, 1),),
        )  # fmt: skip
        ports = TestPorts(tcp=(5,), udp=6)
        made: list[p.Message] = [
            p.Hello(job="7", nonce=b"n" * 16),
            p.Welcome(proof=b"p" * 32),
            p.Refused(reason="no", is_final=True),
            p.Probe(),
            p.Test(
                token=b"t",
                targets=(Target(node_index=1, address="10.0.0.2", ports=ports),),
                effort=Effort(),
                within_s=3.0,
            ),
            p.Ping(sent_ns=5, confirmed=0),
            p.Join(job="7", nonce=b"n" * 16, card=card, proof=b"p" * 32),
            plan,
            p.Beat(node=node, ping_ns=4, held_ns=3),
            p.Ended(end=end, age_s=0.1),
            p.Interrupted(signum=15),
            p.Try(targets=(p.TryTarget(node_index=1, network="data", address="10.0.0.2", port=5),), within_s=2.0),
            p.Order(at_step=5, why="time limit"),
            p.Relay(signum=10),
            p.Stop(signum=15, at_once=(1,), grace_s=2.0),
            p.Stopped(generation=1),
            p.Goodbye(exit_code=1, summary="x", verdict=verdict),
        ]
        chosen = [each for each in made if not kinds or type(each).__name__ in kinds]
        return [_encoder().encode(each) for each in chosen if not isinstance(each, p.Plan)]

    return make


@cache
def _encoder() -> Any:
    return msgspec.msgpack.Encoder()


def _wire(folder: Path) -> Callable[[bytes], object]:
    """Read a message, and do with it what the one who gets it does."""
    from allranks.guard.verdict import Guard
    from allranks.model.cluster import GuardTable
    from allranks.model.membership import Member
    from allranks.preflight.vet import vet_card
    from allranks.wire import protocol as p
    from allranks.wire.connection import decode_frames, encode_frame

    members = tuple(Member(name=f"n{i}", first_rank=i, num_workers=1, host=f"n{i}") for i in range(2))
    plan = p.Plan(
        members=members, node_index=0, attempt=0, store_address="n0", store_port=1, backend="gloo", backend_reason="",
        nodes=(0, 1),
    )  # fmt: skip
    guard, now = Guard(GuardTable()), [1000.0]

    def read(data: bytes) -> object:
        if int(now[0]) % 200 == 0:
            guard.begin(plan, now[0])
        now[0] = now[0] + 1 if now[0] < 5000 else 1000.0
        buffer = bytearray(struct.pack(">I", len(data)) + data)
        for message in decode_frames(buffer):
            encode_frame(message)
            if isinstance(message, p.Join):
                vet_card(message.card)
            elif isinstance(message, p.Beat):
                guard.hear(message, now[0])
                guard.judge(now[0])
            elif isinstance(message, p.Ended):
                guard.ended(message.end, now[0])
                guard.judge(now[0])
        return buffer

    return read


def _plan_inside(folder: Path) -> Callable[[bytes], object]:
    """A Plan is packed: what is inside is changed, and packed again."""
    from allranks.wire.connection import decode_frames

    def read(data: bytes) -> object:
        payload = msgspec.msgpack.encode({"type": "plan", "node_index": 0, "common": zlib.compress(data, 1)})
        return decode_frames(bytearray(struct.pack(">I", len(payload)) + payload))

    return read


def _plan_seeds() -> list[bytes]:
    from allranks.model.membership import Member
    from allranks.wire import protocol as p

    plan = p.Plan(
        members=(), node_index=0, attempt=0, store_address="n0", store_port=1, backend="gloo", backend_reason="x",
        nodes=(0, 1), successors=(p.Contact(node=0, name="n0", control_address="a", data_address="b", port=29500),),
    )  # fmt: skip
    _ = Member
    return [msgspec.msgpack.encode((plan, [("n0", 1, None), ("n1", 2, "h1")]))]


# Flight recorders


def _dumps() -> list[bytes]:
    import pickle

    file: dict[str, Any] = json.loads((SEEDS / "dump.json").read_bytes())
    return [json.dumps(file).encode(), *(pickle.dumps(file, protocol) for protocol in (2, 3, 4, 5))]


def _dump(folder: Path) -> Callable[[bytes], object]:
    from allranks.why.dumps import conclude_dumps, parse_dump

    sound = parse_dump(_dumps()[0], rank=1)

    def read(data: bytes) -> object:
        return [*conclude_dumps([parse_dump(data, rank=0, taken_s=1.8e9), sound])]

    return read


# Checkpoints


def _manifest_line() -> list[bytes]:
    from allranks.state.saved.manifest import Manifest, Part

    made = Manifest(
        step=300, world_size=1, attempt="5eed-2", torch="2.13.0", saved_s=1.8e9,
        parts=(Part("rank_00000.safetensors", 40, (0x0BADF00D,), 5),),
    )  # fmt: skip
    return [made.to_bytes().partition(b"\n")[0]]


def _manifest(folder: Path) -> Callable[[bytes], object]:
    """The checksum is right: a file system that loses bytes is found by it, a program that writes nonsense is not."""
    from allranks.state.saved.manifest import MANIFEST
    from allranks.state.saved.parts import list_checkpoints, read_manifest

    place = folder / "checkpoints/step_300"
    place.mkdir(parents=True)

    def read(data: bytes) -> object:
        line = data.replace(b"\n", b" ") + b"\n"
        (place / MANIFEST).write_bytes(line + b"%08x\n" % zlib.crc32(line))
        assert list_checkpoints(place.parent) == [place]
        return read_manifest(place)

    return read


def _state_headers() -> list[bytes]:
    tree = {"own": {"model": {"w": ["tensor", "model.w", "float32", [2, 2]], "b": ["float", "0.5"], "n": 3,
                              "t": ["tuple", [1, 2]], "c": ["complex", "1", "2"], "y": ["bytes", "YWJj"]}},
            "shards": {}}  # fmt: skip
    header = {
        "__metadata__": {"allranks": json.dumps(tree)},
        "model.w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    }
    return [json.dumps(header).encode()]


def _state(folder: Path) -> Callable[[bytes], object]:
    """The header of a part, and the tree in it; the checksums of its blocks are right."""
    from allranks.state.saved import pack
    from allranks.state.saved.manifest import BLOCK_BYTES, Part
    from allranks.state.saved.parts import PartReader

    name = "rank_00000.safetensors"

    def read(data: bytes) -> object:
        content = struct.pack("<Q", len(data)) + data + bytes(16)
        (folder / name).write_bytes(content)
        blocks = tuple(zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES))
        reader = PartReader(folder, Part(name, len(content), blocks, 0))
        with contextlib.ExitStack() as stack:
            if hasattr(reader, "close"):
                stack.callback(reader.close)
            file = pack.StateFile(reader, lambda path: (_ for _ in ()).throw(KeyError(path)))
            return file.unpack(file.tree["own"])

    return read


def _writer_report(folder: Path) -> Callable[[bytes], object]:
    """What lies in a directory that was being written: a look whether its writers live, and tidying."""
    from allranks.state.saved.commit import identify_process, read_report
    from allranks.state.saved.manifest import report_name
    from allranks.state.saved.tidy import look_at_writers, sweep

    place = folder / "checkpoints/step_5.tmp.5eed-2"
    owner = json.dumps(identify_process()).encode()

    def read(data: bytes) -> object:
        place.mkdir(parents=True, exist_ok=True)
        (place / report_name(0)).write_bytes(data.replace(b'"OWNER"', owner))
        read_report(place / report_name(0))
        seen = look_at_writers(place)
        sweep(place.parent, run="other", below=9)
        return seen

    return read


# Programs that are asked


def _nvidia_smi(text: str) -> object:
    from allranks.host import gpu

    answer = gpu.parse_gpus(text, gpu.QUERY_FIELDS)
    gpu.find_unknown_fields(text)
    gpu.parse_remapped_rows(text)
    gpu.parse_gpu_processes(text, is_own=lambda pid: pid == 1)
    gpu.parse_nvlinks(text)
    msgspec.msgpack.encode(answer.gpus)
    return answer


def _slurm(text: str) -> object:
    from allranks.host import slurm, slurm_job, slurm_site

    told = (
        slurm.parse_show_job(text), slurm.parse_squeue(text), slurm.parse_sacct(text), slurm.parse_sinfo(text),
        slurm.parse_trial(text), slurm_site.parse_site(text), slurm_site.parse_partition(text), slurm_job.parse_end_s(text),
    )  # fmt: skip
    with contextlib.suppress(AllranksError):
        slurm.parse_job_id(text)
    return told


def _srun_output(text: str) -> object:
    from allranks.launch import srun

    parts: dict[tuple[str, str], dict[int, str]] = {}
    for line in text.splitlines():
        if done := srun.unpack(line, parts):
            with contextlib.suppress(ValueError):
                srun.decode(done[2], dict[str, int])
    return srun.words_of(text.splitlines())


def _srun_seeds() -> list[bytes]:
    from allranks.launch import srun

    text = srun.pack("n1", "card", {"a": 1}) + srun.pack("n2", "card", {"b": [1] * 3000})
    return [f"srun: error: x\n{text}slurmstepd-n1: error: *** STEP\n".encode()]


def _py_spy(data: bytes) -> object:
    from allranks.host import stacks
    from allranks.host.glance import render as render_stack

    try:
        threads = [stacks._thread(each, 7) for each in stacks.decode_json(data, list[stacks._Told])]
    except stacks.Unreadable:
        return None
    process = stacks.Process(
        pid=7, role=stacks.Role.WORKER, rank=0, local_rank=0, world_size=1, state="S", threads=tuple(threads)
    )
    assert_harmless(render_stack(process))
    return process


def _devices(data: bytes) -> object:
    from allranks.host import fabric, rdma, sockets, software, tcpinfo
    from allranks.host.run import Ran

    text = data.decode(errors="replace")
    found: list[Any] = []
    with contextlib.suppress(OSError):
        sockets.parse_answer(data, found)
    for line in text.splitlines():
        sockets.parse_proc_line(line)
    with contextlib.suppress(ValueError):
        tcpinfo.parse_tcp_info(data)
    software.parse_loader_cache(data)
    software.parse_torch_cuda(text)
    rdma.parse_devinfo(text)
    fabric.parse_unit(Ran(0, text))
    fabric.parse_cuda(Ran(0, text))
    return found, fabric.select_xids(text, now=datetime.now().astimezone())


# Logs


def _log(folder: Path) -> Callable[[bytes], object]:
    from allranks.causes.catalogue import all_causes
    from allranks.cli.why import make_answer, render_answer
    from allranks.report.text import Style
    from allranks.why.logs.collect import collect
    from allranks.why.logs.events import list_patterns
    from allranks.why.logs.match import Matcher
    from allranks.why.logs.sources import find_sources

    patterns = list_patterns(all_causes())
    matcher = Matcher([pattern.scan for pattern in patterns])
    path = folder / "job.log"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        logs = collect(find_sources([str(path)]), patterns, matcher=matcher)
        answer = make_answer(logs, [], [], is_all=True, with_timeline=True)
        assert_harmless(render_answer(answer, Style(True, False, 100), command=["allranks", "why"]))
        return answer

    return read


def _log_seeds() -> list[bytes]:
    cases = [json.loads(line) for line in (HERE.parent / "why/reports.jsonl").read_text().splitlines()]
    return [case["log"][:6000].encode() for case in cases[::7] if isinstance(case.get("log"), str)]


def _raised(text: str) -> object:
    from allranks.model import raised

    raised.last_printed(text)
    raised.split_fatal(text)
    raised.find_fatal_place(text)
    return raised.find_origin(text), raised.find_origin(text, is_one=False)


def _raised_seeds() -> list[bytes]:
    return [each for each in _log_seeds() if b"Traceback" in each or b"Fatal Python" in each][:40]


# The table


def _lines(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _run_seed(name: str) -> Callable[[], list[bytes]]:
    return seeds(f"run/{name}")


_HOSTS = _lines("n[01-06,08],gpu-b17", "node1,node2", "a[1-2]b[3-4]", "n[001-100]", "[2001:db8::1]", "cn-[1-3]-ib0")
_ENV = _lines(
    "SLURM_JOB_ID=7\nSLURM_STEP_ID=0\nSLURM_PROCID=1\nSLURM_NTASKS=2\nSLURM_NODEID=1\nSLURM_JOB_NUM_NODES=2\n"
    "SLURM_STEP_NODELIST=n[1-2]\nSLURM_STEP_TASKS_PER_NODE=1(x2)\nSLURM_LOCALID=0\nSLURMD_NODENAME=n2\n",
    "RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=n1\nMASTER_PORT=29500\nGROUP_RANK=0\n",
    "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2\n",
    'SM_HOSTS=["algo-1", "algo-2"]\nSM_CURRENT_HOST=algo-2\n',
    'TF_CONFIG={"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}\n',
    "JOB_COMPLETION_INDEX=1\nKUBERNETES_SERVICE_HOST=x\nHOSTNAME=job-1\nWORLD_SIZE=2\nNNODES=2\nNODE_RANK=1\nMASTER_ADDR=a\n",
    "VC_WORKER_HOSTS=a,b\nVC_TASK_INDEX=1\n",
)

OURS = (AllranksError,)


def _parsers() -> Iterator[Parser]:
    from allranks.state.saved.manifest import Damaged

    yield Parser("cluster.toml", seeds("cluster.toml", "cluster_data.toml"), _cluster, OURS)
    yield Parser("host lists", _HOSTS, plain(_hostlists), OURS)
    yield Parser("environment", _ENV, of_bytes(_identity), OURS)
    for name, kind in (
        ("attempt_0/events.jsonl", "lines of json"), ("attempt_0/verdict.json", "json"), ("attempt_0/roll_call.json", "json"),
        ("attempt_0/n1/env.json", "json"), ("attempt_0/n1/growth", "text"), ("attempt_0/n1/members", "text"),
        ("attempt_0/n1/rank_0.err", "text"), ("leader.json", "json"), ("culprits.json", "json"),
        ("attempt_0/exit_code", "text"), ("submission.sh", "text"), ("secret", "text"),
    ):  # fmt: skip
        yield Parser(f"run: {name.rpartition('/')[2]}", _run_seed(name), _run_file(name), OURS, kind)
    yield Parser("error.json", seeds("error.json", "error_torch.json"), _worker_files("error.json"), kind="json")
    yield Parser("exit.json", seeds("exit.json"), _worker_files("exit.json"), kind="json")
    yield Parser("stderr's tail", _raised_seeds, _worker_files("err"))
    yield Parser("cell: raised", seeds("raised.json"), _cell_record("raised"), kind="json")
    yield Parser("cell: raised, at the end", seeds("raised.json"), _worker_files("raised"), kind="json")
    yield Parser("cell: words, at the end", seeds("raised.json"), _worker_files("words"), kind="json")
    for room in ("told", "words"):
        yield Parser(f"cell: {room}", lambda: [json.dumps(TOLD).encode()], _cell_record(room), kind="json")
    yield Parser("cell: call", lambda: [json.dumps(CALL).encode()], _cell_record("call"), kind="json")
    for room in ("step", "saved", "phase"):
        yield Parser(f"cell: {room}", lambda: [struct.pack("q", 12), b"training"], _cell_record(room), kind="bytes")
    yield Parser("cell: memory", _cells, _cell, kind="bytes")
    yield Parser("beats", _messages("Beat"), _wire, OURS, "msgpack")
    yield Parser("joins", _messages("Join", "Hello"), _wire, OURS, "msgpack")
    yield Parser("messages", _messages(), _wire, OURS, "msgpack")
    yield Parser("plans", _plan_seeds, _plan_inside, OURS, "msgpack")
    from allranks.why.dumps import DumpError

    yield Parser("dumps as JSON", lambda: _dumps()[:1], _dump, (DumpError,), "json")
    yield Parser("dumps as pickles", lambda: _dumps()[1:], _dump, (DumpError,), "bytes")
    yield Parser("manifests", _manifest_line, _manifest, (Damaged,), "json")
    yield Parser("state headers", _state_headers, _state, (Damaged,), "json")
    yield Parser("writers' reports", seeds("report.json"), _writer_report, kind="json")
    gpus = ("550-h100.csv", "550-h100.apps.txt", "550-h100.nvlink.txt", "550-h100.remapped.txt", "470-a100.csv")
    yield Parser("nvidia-smi", recorded(*gpus, "error-9-no-driver.txt"), plain(_nvidia_smi))
    sites = [f"slurm/config-{version}.txt" for version in ("22.05", "25.11")]
    yield Parser("SLURM", lambda: [*recorded(*sites)(), *seeds("slurm_job.txt", "slurm_rows.txt")()], plain(_slurm))
    yield Parser("srun's output", _srun_seeds, plain(_srun_output))
    yield Parser("py-spy", seeds("py_spy.json"), of_bytes(_py_spy), kind="json")
    yield Parser(
        "kernel and drivers",
        lambda: [*recorded("inet_diag_stuck.bin")(), *seeds("devices.txt")()],
        of_bytes(_devices),
        kind="bytes",
    )
    yield Parser("logs", _log_seeds, _log)
    yield Parser("tracebacks", _raised_seeds, plain(_raised))


def all_parsers() -> dict[str, Parser]:
    """Return the table, by name."""
    return {parser.name: parser for parser in _parsers()}

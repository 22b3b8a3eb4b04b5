"""What other nodes and earlier runs send and leave: messages, flight recorder dumps, checkpoints."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from .door import SEEDS, assert_harmless
from .of_workers import CALL


def messages(*kinds: str) -> Callable[[], list[bytes]]:
    def make() -> list[bytes]:
        from allranks.model import beat as b
        from allranks.model.card import Card, TestPorts
        from allranks.model.finding import Verdict
        from allranks.model.pace import Pace
        from allranks.model.pair import Effort, PairTarget
        from allranks.wire import protocol as p

        call = msgspec.convert(CALL, b.CallSeen)
        group = b.GroupSeen(name="0", ranks=(0, 1), enqueued=5, completed=4, waiting_s=2.0)
        rank = b.RankBeat(rank=0, pid=7, silent_s=0.1, groups=(group,), calls=(call,), lags=(("0", 64, 5),), step=3)
        pace = Pace(state=1, state_us=5, steps=7, totals_us=(9, 8, 7, 6, 5, 4, 3), back_blocked_permille=500)
        rank = msgspec.structs.replace(rank, pace=pace, segments=900, retransmits=3)
        nic = b.InterfaceSeen(name="e", sent_mbit_s=8.0, received_mbit_s=9.0, limit_mbit_s=10.0, busy_share=0.5)
        link = b.LinkSeen(
            own_address="10.0.0.1", peer_address="10.0.0.2", unacked_bytes=5, stalled_s=2.0, retransmits=3
        )
        tried = b.TrySeen(target=1, network="data", connects=True, carries=False, age_s=1.0)
        node = b.NodeBeat(
            node_index=0,
            generation=0,
            ranks=(rank,),
            links=(link,),
            tries=(tried,),
            addresses=("10.0.0.1",),
            interfaces=(nic,),
        )
        end = p.WorkerEnd(
            rank=0, node="n0", exit_code=1, time_s=1.8e9, message="ValueError: x", before=("KeyError: 3",)
        )
        verdict = Verdict.from_json((SEEDS / "run/attempt_0/verdict.json").read_bytes())
        card = Card(host="n1", pid=1, node_index=1, num_workers=1, num_gpus=0)
        ports = TestPorts(tcp=(5,), udp=6)
        made: list[p.Message] = [
            p.Hello(job="7", nonce=b"n" * 16),
            p.Welcome(proof=b"p" * 32),
            p.Refused(reason="no", is_final=True),
            p.Probe(),
            p.Test(
                token=b"t",
                targets=(PairTarget(node_index=1, address="10.0.0.2", ports=ports),),
                effort=Effort(),
                within_s=3.0,
            ),
            p.Ping(sent_ns=5, confirmed=0),
            p.Join(job="7", nonce=b"n" * 16, card=card, proof=b"p" * 32),
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
        return [encoder().encode(each) for each in chosen]

    return make


@cache
def encoder() -> Any:
    return msgspec.msgpack.Encoder()


def wire(folder: Path) -> Callable[[bytes], object]:
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


def plan_inside(folder: Path) -> Callable[[bytes], object]:
    """A Plan is packed: what is inside is changed, and packed again."""
    from allranks.wire.connection import decode_frames

    def read(data: bytes) -> object:
        payload = msgspec.msgpack.encode({"type": "plan", "node_index": 0, "common": zlib.compress(data, 1)})
        return decode_frames(bytearray(struct.pack(">I", len(payload)) + payload))

    return read


def book_seeds() -> list[bytes]:
    """Books before they are packed."""
    from allranks.model.time_book import BookRow, RankBook, TimeBook, pack_rows

    rows = [BookRow((9, 0, 0, 0, 0, 0, 0), 0), BookRow((9, 2_000_000, 5, 6, 0, 8, 9), 7)]
    ranks = (RankBook(0, 0, -3, bytes(range(11)), pack_rows(rows)), RankBook(8, 1, 5, b"\1\1", b"", 50, is_async=True))
    return [msgspec.msgpack.encode(TimeBook(1.8e9, 5_000_000, 1, ranks))]


def packed_books() -> list[bytes]:
    return [_as_frame(data) for data in book_seeds()]


def _as_frame(data: bytes) -> bytes:
    packed = zlib.compress(data, 1)
    return b"ARBK\x01" + struct.pack(">I", len(packed)) + packed


def books(folder: Path) -> Callable[[bytes], object]:
    """Read a file of books, and lay it beside a sound one, as the report does."""
    from allranks.model.time_book import FILE
    from allranks.report.books import lanes, read_books, sums

    for node, (sound,) in (("n1", packed_books()), ("n2", packed_books())):
        (folder / node).mkdir()
        (folder / node / FILE).write_bytes(sound)

    def read(data: bytes) -> object:
        (folder / "n1" / FILE).write_bytes(data)
        found = read_books(folder)
        assert_harmless(" ".join(found.damaged))
        assert found.books[-1].node == "n2"
        merged = lanes(found.books)
        assert {len(lane.columns) for lane in merged.lanes} == {merged.num_columns}
        return [account.rows for book in found.books for account in book.ranks], sums(found.books)

    return read


def books_inside(folder: Path) -> Callable[[bytes], object]:
    """Books are packed: what is inside is changed, and packed again."""
    read = books(folder)
    return lambda data: read(_as_frame(data))


def plan_seeds() -> list[bytes]:
    from allranks.wire import protocol as p

    plan = p.Plan(
        members=(), node_index=0, attempt=0, store_address="n0", store_port=1, backend="gloo", backend_reason="x",
        nodes=(0, 1), successors=(p.Contact(node=0, name="n0", control_address="a", data_address="b", port=29500),),
    )  # fmt: skip
    return [msgspec.msgpack.encode((plan, [("n0", 1, None), ("n1", 2, "h1")]))]


def dumps() -> list[bytes]:
    import pickle

    file: dict[str, Any] = json.loads((SEEDS / "dump.json").read_bytes())
    return [json.dumps(file).encode(), *(pickle.dumps(file, protocol) for protocol in (2, 3, 4, 5))]


def dump(folder: Path) -> Callable[[bytes], object]:
    from allranks.why.dumps import parse_dump
    from allranks.why.stops import read_stops

    sound = parse_dump(dumps()[0], rank=1)

    def read(data: bytes) -> object:
        return [*read_stops([parse_dump(data, rank=0, taken_s=1.8e9), sound])]

    return read


def manifest_line() -> list[bytes]:
    from allranks.state.saved.manifest import Manifest, Part

    made = Manifest(
        step=300, world_size=1, attempt="5eed-2", torch="2.13.0", saved_s=1.8e9,
        parts=(Part("rank_00000.safetensors", 40, (0x0BADF00D,), 5),),
    )  # fmt: skip
    return [made.to_bytes().partition(b"\n")[0]]


def manifest(folder: Path) -> Callable[[bytes], object]:
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


def state_headers() -> list[bytes]:
    tree = {"own": {"model": {"w": ["tensor", "model.w", "float32", [2, 2]], "b": ["float", "0.5"], "n": 3,
                              "t": ["tuple", [1, 2]], "c": ["complex", "1", "2"], "y": ["bytes", "YWJj"]}},
            "shards": {}}  # fmt: skip
    header = {
        "__metadata__": {"allranks": json.dumps(tree)},
        "model.w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    }
    return [json.dumps(header).encode()]


def state(folder: Path) -> Callable[[bytes], object]:
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
        with contextlib.closing(reader._file):
            file = pack.StateFile(reader, lambda path: (_ for _ in ()).throw(KeyError(path)))
            return file.unpack(file.tree["own"])

    return read


def writer_report(folder: Path) -> Callable[[bytes], object]:
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


def owner_seeds() -> list[bytes]:
    from allranks.state.saved import owner as owners

    env = {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "main", "ALLRANKS_AGENT_PID": "7", "TORCHELASTIC_RUN_ID": "r"}
    return [owners.to_bytes(owners.identify(env)), owners.to_bytes(owners.identify(env, job="17", attempt_path="/a/b"))]


def owner(folder: Path) -> Callable[[bytes], object]:
    """An owner file: whose the directory is, and what a second run says of it."""
    from allranks.report.text import one_line
    from allranks.state.saved import owner as owners

    me = owners.identify({}, job="18", attempt_path="/a/c")

    def read(data: bytes) -> object:
        found = owners.parse(data)
        if found is None:
            return None
        for unrenewed_s in (None, 5.0, 500.0):
            lives = owners.sees(found, me)
            owners.judge(found, me, lives=lives, is_running=lambda: None, unrenewed_s=unrenewed_s)
        assert_harmless(" ".join(map(one_line, owners.refuse(folder, found))))
        return found

    return read

"""Which lines a job says about run directories that fill up, and how often."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from allranks.guard.rooms import RoomSpeech
from allranks.model.room import GIB, MIB, Room


def room(free_bytes: int = 50 * GIB, **values: Any) -> Room:
    return Room(**{"free_bytes": free_bytes, "size_bytes": 100 * GIB, "free_inodes": 10**6} | values)


SHORT, FINE = room(312 * MIB), room()
FREED = room(60 * MIB, freed_bytes=64 * MIB)
FULL = room(0)
GONE = room(problem="ENOENT: No such file or directory")
OVER_QUOTA = room(problem="EDQUOT: Disk quota exceeded")


def shared(one: Room, *nodes: str) -> dict[str, Room]:
    return dict.fromkeys(nodes, msgspec.structs.replace(one, is_shared=True))


def live(*seconds: dict[str, Room]) -> list[tuple[int, str]]:
    """Tell what the nodes told in each second; return the lines, and in which second each was said."""
    speech = RoomSpeech()
    return [(at, line) for at, told in enumerate(seconds) for line in speech.say(float(at), told.items())]


SIX = [f"node0{number}" for number in range(1, 7)]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        # Nodes that share it are one line, which all of them may bring about.
        ([shared(FINE, *SIX), *4 * [shared(SHORT, *SIX)]], ["312 MiB free (of 100 GiB) on node[01-06]; delete"]),
        ([shared(FINE, "a") | shared(SHORT, "b")] * 5, ["312 MiB free (of 100 GiB) on a,b"]),
        # Local disks that become short together are one line; one that is later is another one.
        ([{"a": SHORT, "b": FINE}, *4 * [{"a": SHORT, "b": SHORT}]], ["free (of 100 GiB) on a,b"]),
        ([*5 * [{"a": SHORT, "b": FINE}], *5 * [{"a": SHORT, "b": SHORT}]], ["on a;", "on b;"]),
        # A removed directory is not shared any more.
        (
            [shared(FINE, "a", "b"), {"a": GONE} | shared(FINE, "b"), *4 * [{"a": GONE, "b": GONE}]],
            ["is gone on a,b (No such file"],
        ),
        # What one node has seen, and others not yet.
        ([shared(room(free_inodes=0), "a") | shared(room(40 * GIB), "b")], ["(no inode is left)"]),
        # The least that is free is told.
        ([{"a": SHORT, "b": room(12 * MIB)}] * 5, ["12 MiB free (of 100 GiB) on a,b"]),
        # Once, whatever happens between short and short; again when there was room.
        ([{"a": each} for each in 5 * [SHORT, room(1200 * MIB)]], ["312 MiB free"]),
        ([{"a": each} for each in (*5 * [SHORT], *3 * [FINE], *5 * [SHORT])], ["312 MiB", "312 MiB"]),
        # Each worse level is a line, at once; no better one is.
        ([{"a": each} for each in (FREED, FREED, FULL, FULL, FREED, SHORT)], ["gave back 64 MiB", "is full on a"]),
        ([{"a": FULL}], ["the run directory is full on a (100 GiB): ranks that print or save there fail"]),
        ([{"a": OVER_QUOTA}], ["the run directory is full on a (Disk quota exceeded)"]),
        # Inodes.
        ([{"a": room(free_inodes=200, size_inodes=65536)}] * 5, ["200 more files can be made (free inodes) on a"]),
        ([{"a": room(free_inodes=0)}], ["the run directory is full on a (no inode is left)"]),
        ([{"a": room(free_inodes=None)}] * 5, []),
        # Gone: only who finds it so.
        ([shared(FINE, "a") | shared(GONE, "b")] * 5, ["gone on b (No such file or directory): somebody removed"]),
        ([{"a": room(problem="EROFS: Read-only file system")}], ["cannot be used on a (Read-only file system)"]),
        ([{"a": FINE}] * 5, []),
        ([{}], []),
        ([{"a": Room()}] * 5, []),  # nothing known is nothing to say
    ],
)  # fmt: skip
def test_each_matter_is_said_once_and_again_after_there_was_room(
    seconds: list[dict[str, Room]], said: list[str]
) -> None:
    lines = [line for _, line in live(*seconds)]
    assert len(lines) == len(said), lines
    assert all(part in line for part, line in zip(said, lines, strict=True)), lines


def test_what_is_urgent_does_not_wait_for_others() -> None:
    assert [at for at, _ in live(*5 * [{"a": FULL}])] == [0]
    assert [at for at, _ in live(*5 * [{"a": FULL, "b": FINE}])] == [0]
    assert [at for at, _ in live(*5 * [{"a": SHORT, "b": FINE}])] == [3]
    assert [at for at, _ in live(*5 * [{"a": SHORT}])] == [0]


def test_a_thousand_nodes_are_one_line() -> None:
    names = [f"n{number:04}" for number in range(1000)]
    [(_, line)] = live(*5 * [shared(SHORT, *names)])
    assert "on n[0000-0999];" in line

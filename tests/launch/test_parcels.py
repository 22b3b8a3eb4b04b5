from __future__ import annotations

import os

import pytest

from allranks.launch.srun import decode, pack, unpack


def read_all(lines: list[str]) -> list[tuple[str, str, object]]:
    parts: dict[tuple[str, str], dict[int, str]] = {}
    found = [parcel for line in lines if (parcel := unpack(line, parts)) is not None]
    return [(sender, kind, decode(text, str)) for sender, kind, text in found]


def test_documents_survive_being_mixed_banners_and_a_torn_line() -> None:
    long = os.urandom(5000).hex()
    lines = [*pack("n1", "held", long).splitlines(), "hello", *pack("2", "card", "x").splitlines()]
    assert all(len(line) < 700 for line in lines)
    mixed = ["%allranks-parcel 1 x%", lines[0][:40], *reversed(lines)]
    assert read_all([f"Welcome to site! n1: {line}" for line in mixed]) == [("2", "card", "x"), ("n1", "held", long)]


def test_documents_of_two_senders_whose_lines_alternate_are_two() -> None:
    first, second = os.urandom(2000).hex(), os.urandom(2000).hex()
    packed = [pack(f"n{i}", "stacks", text).splitlines() for i, text in enumerate((first, second))]
    lines = [line for pair in zip(*packed, strict=False) for line in pair] + packed[0][len(packed[1]) :]
    lines += packed[1][len(packed[0]) :]
    assert sorted(read_all(lines)) == [("n0", "stacks", first), ("n1", "stacks", second)]


@pytest.mark.parametrize("line", ["%allranks-parcel n0 stacks 1/1 AAAA%", pack("n0", "stacks", 7)])
def test_a_document_of_another_kind_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        read_all([line])

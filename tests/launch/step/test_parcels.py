from __future__ import annotations

import os

from allranks.launch.step.parcels import Parcel, Unpacker, pack


def test_documents_survive_being_mixed_banners_and_a_torn_line() -> None:
    long = os.urandom(5000)
    lines = [*pack("n1", "held", long).splitlines(), "hello", *pack("2", "card", b"x").splitlines()]
    assert all(len(line) < 700 for line in lines)
    unpacker = Unpacker()
    mixed = ["%allranks-parcel 1 x%", lines[0][:40], *reversed(lines)]
    found = [parcel for line in mixed if (parcel := unpacker.feed(f"Welcome to site! n1: {line}")) is not None]
    assert found == [Parcel("2", "card", b"x"), Parcel("n1", "held", long)]


def test_documents_of_two_senders_whose_lines_alternate_are_two() -> None:
    first, second = os.urandom(2000), os.urandom(2000)
    unpacker = Unpacker()
    pairs = zip(pack("n0", "stacks", first).splitlines(), pack("n1", "stacks", second).splitlines(), strict=True)
    found = [parcel for pair in pairs for line in pair if (parcel := unpacker.feed(line)) is not None]
    assert found == [Parcel("n0", "stacks", first), Parcel("n1", "stacks", second)]


def test_a_document_that_cannot_be_read_is_no_document() -> None:
    assert Unpacker().feed("%allranks-parcel n0 stacks 1/1 AAAA%") is None

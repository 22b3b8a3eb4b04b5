"""The thread that writes a node's book."""

from __future__ import annotations

from pathlib import Path

from allranks.files.folder import Folder
from allranks.launch.book_writer import BookWriter
from allranks.model.time_book import FILE, TimeBook, pack_book, parse_books

BEGUN_S = 1795847021.0


def test_an_agent_that_is_started_again_keeps_the_book_that_it_finds(tmp_path: Path):
    for begun_s in (BEGUN_S, BEGUN_S + 60):
        writer = BookWriter()
        for until_us in (1, 2):
            writer.write(Folder.at(tmp_path), pack_book(TimeBook(begun_s, until_us)))
        writer.end()
    books, problem = parse_books((tmp_path / FILE).read_bytes())
    assert [(known.begun_s, known.until_us) for known in books] == [(BEGUN_S, 2), (BEGUN_S + 60, 2)]
    assert problem is None
    (tmp_path / FILE).write_bytes(b"damaged")
    writer = BookWriter()
    writer.write(Folder.at(tmp_path), pack_book(TimeBook(BEGUN_S, 3)))
    writer.end()
    assert (tmp_path / FILE).read_bytes() == pack_book(TimeBook(BEGUN_S, 3))


def test_a_book_that_cannot_be_written_costs_only_the_file(tmp_path: Path):
    seen: list[OSError] = []
    (tmp_path / "node").mkdir()
    folder = Folder.at(tmp_path / "node")
    (tmp_path / "node").rmdir()
    writer = BookWriter(seen.append)
    writer.write(folder, pack_book(TimeBook(BEGUN_S, 3)))
    writer.end()
    assert [exc.errno for exc in seen] == [2]

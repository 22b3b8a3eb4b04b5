"""Does reading what a worker left behind end, whatever it has put there?"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.files.folder import Folder
from allranks.files.regular import read_regular
from allranks.guard.node.activity import Output

MAX_BYTES = 1 << 20


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


ODD: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a fifo": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file": lambda path: path.symlink_to("/etc/passwd"),
    "a circle of links": lambda path: path.symlink_to(path.name),
    "a directory": Path.mkdir,
    "a socket": make_socket,
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    ODD[kind](path := Path("left"))
    with pytest.raises(OSError, match=r".+"):
        read_regular(path, at_most=MAX_BYTES)
    folder = Folder.at(tmp_path)
    with pytest.raises(OSError, match=r".+"):
        folder.read(path.name)
    assert Output(folder, path.name).tail() == ""


def test_no_more_is_read_than_asked_for(tmp_path: Path):
    make_large(path := tmp_path / "left")
    with pytest.raises(OSError, match="larger than 1048576 bytes"):
        read_regular(path, at_most=MAX_BYTES)
    folder = Folder.at(tmp_path)
    with pytest.raises(OSError, match="larger than 67108864 bytes"):
        folder.read(path.name)
    assert Output(folder, path.name).tail(3) == "\0\0\0"
    os.truncate(path, MAX_BYTES)
    assert len(read_regular(path, at_most=MAX_BYTES)) == MAX_BYTES


def test_a_tail_begins_no_earlier_than_it_may(tmp_path: Path):
    (path := tmp_path / "left").write_bytes(b"before, own")
    assert Output(folder := Folder.at(tmp_path), path.name, start=8).tail(100) == "own"
    assert Output(folder, path.name, start=8).tail(2) == "wn"
    assert Output(folder, path.name, start=99).tail(2) == ""

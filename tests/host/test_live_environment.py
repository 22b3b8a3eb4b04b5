"""The environment of real processes, and made images of ELF files in place of their memory."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.host.live_environment import find_environ, read_live_environment, read_variables

CHANGES = """\
import os, time
os.environ.update(RANK="7", LATE="x" * 9000)
del os.environ["GONE"]
print(flush=True)
time.sleep(60)
"""
PYTHONS = sorted({path for path in (sys.executable, "/usr/bin/python3") if os.access(path, os.X_OK)})
"""Debian's has a copy of the symbol, and lies at a fixed address; others have libc's."""


@pytest.mark.parametrize("python", PYTHONS)
def test_what_a_script_set_after_it_began_is_seen(python: str) -> None:
    env = {"RANK": "3", "GONE": "1", "SAME": "ü=\n", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    with subprocess.Popen([python, "-c", CHANGES], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        now = read_live_environment(process.pid)
        process.kill()
    assert now is not None
    assert (now["RANK"], now["LATE"], now["SAME"], "GONE" in now) == ("7", "x" * 9000, "ü=\n", False)


def test_of_a_process_that_is_gone_nothing_is_told(tmp_path: Path) -> None:
    assert read_live_environment(2**22 + 1) is None
    assert read_live_environment(1, root=tmp_path) is None


PAGE = 4096


def image(base: int, *, has_addresses: bool, names: tuple[str, ...] = ("puts", "environ"), first: int = 0) -> bytes:
    """A page with an ELF file: header, two program headers, dynamic table, symbols, names."""
    place = base if has_addresses else first  # glibc puts addresses into its tables, musl leaves offsets
    texts = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    starts = [texts.index(b"\0" + name.encode() + b"\0") + 1 for name in names]
    values = [first + 0x800 + 8 * number for number in range(len(names))]
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", start, 1, 0, 5, value, 8) for start, value in zip(starts, values, strict=True)
    )
    dynamic = struct.pack("<6q", 5, place + 0x400, 6, place + 0x300, 10, len(texts)) + bytes(16)
    headers = struct.pack("<IIQQQQQQ", 1, 5, 0, first, first, PAGE, PAGE, PAGE) + struct.pack(
        "<IIQQQQQQ", 2, 6, 0x200, first + 0x200, first + 0x200, 64, 64, 8
    )
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2)
    whole = bytearray(PAGE)
    for at, part in ((0, head), (64, headers), (0x200, dynamic), (0x300, symbols), (0x400, texts)):
        whole[at : at + len(part)] = part
    return bytes(whole)


def memory_of(tmp_path: Path, base: int, data: bytes) -> int:
    file = tmp_path / "mem"
    file.write_bytes(bytes(base) + data)
    return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


BASE = 0x10000


@pytest.mark.parametrize(
    ("data", "address"),
    [
        (image(BASE, has_addresses=True), 0x808),
        (image(BASE, has_addresses=False), 0x808),
        (image(BASE, has_addresses=True, first=BASE), 0x808),  # not position-independent
        (image(BASE, has_addresses=True, names=("puts", "__environ")), 0x808),
        (image(BASE, has_addresses=True, names=("puts", "my_environ")), None),
        (image(BASE, has_addresses=True, names=("puts", "environment")), None),
        (image(BASE, has_addresses=True).replace(b"\x7fELF\x02\x01", b"\x7fELF\x01\x01"), None),  # 32 bits
        (image(BASE, has_addresses=True).replace(b"\x7fELF\x02\x01", b"\x7fELF\x02\x02"), None),  # big-endian
        (image(BASE, has_addresses=True).replace(struct.pack("<2Q", 10, 14), bytes(16)), None),
        (image(BASE, has_addresses=True).replace(b"\x01\x00\x05\x00", b"\x01\x00\x00\x00"), None),  # not defined here
    ],
)
def test_the_symbol_is_found_as_the_dynamic_linker_does(tmp_path: Path, data: bytes, address: int | None) -> None:
    assert find_environ(memory_of(tmp_path, BASE, data), BASE) == address


def test_the_address_of_this_process_is_the_linker_s() -> None:
    maps = Path("/proc/self/maps").read_text()
    base = int(re.findall(r"^(\w+)-.*/libc(?:-[\d.]+)?\.so", maps, re.MULTILINE)[0], 16)
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    address = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL("libc.so.6"), "environ"))
    assert find_environ(memory, base) == address - base


@given(st.lists(st.tuples(st.integers(0, PAGE - 1), st.integers(0, 255)), min_size=1, max_size=12))
def test_a_damaged_file_is_an_error_or_a_number(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(image(BASE, has_addresses=True))
    for at, value in changes:
        data[at] = value
    try:
        address = find_environ(memory_of(tmp_path, BASE, bytes(data)), BASE)
    except OSError:
        return
    assert address is None or isinstance(address, int)


def test_an_array_without_an_end_or_beginning_tells_nothing(tmp_path: Path) -> None:
    texts = b"A=1\0A=2\0B=x=y\0odd\0"
    array = struct.pack("<6Q", 8, 64, 68, 72, 78, 0)
    assert read_variables(memory_of(tmp_path, 0, (array + bytes(16) + texts).ljust(PAGE, b"\0")), 0) == {
        "A": "1",
        "B": "x=y",
    }
    assert read_variables(memory_of(tmp_path, 0, bytes(PAGE)), 0) is None
    endless = struct.pack("<Q", 8) * (PAGE // 8)
    with pytest.raises(OSError, match="not mapped"):
        read_variables(memory_of(tmp_path, 0, endless), 0)

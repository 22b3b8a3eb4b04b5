"""What is the environment of a process now, and not only as it was started with?

    read_live_environment(4711)["RANK"]         # set by the script itself, after it began

The variables stand where libc's `environ` points to. /proc/PID/mem shows that memory, and nothing is stopped. The
symbol is looked up in the tables of the dynamic linker, as they lie in memory: no file is opened, which may be in
another container, or on a file system that hangs. An executable that refers to `environ` itself has a copy of the
symbol (R_X86_64_COPY), which libc then uses, too: it is asked first.

Limits: 64-bit little-endian; a Python with a libc linked into it (static musl) has no such symbol. The kernel asks for
the rights of a debugger (ptrace(2), "Ptrace access mode checking").
Source: System V ABI, "Dynamic Linking".
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from allranks.host.process import MAX_ENVIRONMENT

_PAGE, _POINTER = 4096, 8
_LIBC = re.compile(rb"/(libc(\.musl-\w+)?[.-][\d.]*so[.\d]*|ld-musl-\w+\.so[.\d]*)( \(deleted\))?$")
_MAPPED = re.compile(rb"^([0-9a-f]+)-\S+ \S+ 0+ (\S+ \d+ +(/.*))$", re.MULTILINE)
"""A line of /proc/PID/maps with the beginning of a file: address; device, inode and name; name."""
_SYMBOL = re.compile(rb"(?=(__)?environ\0)")  # one of the two names may be stored as the tail of the other
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SYMTAB, _DT_STRSZ = 5, 6, 10
_KNOWN: dict[bytes, int | None] = {}
"""What `find_environ` said of a file: the processes of a node have the same few."""


def read_live_environment(pid: int, *, root: Path = Path("/")) -> dict[str, str] | None:
    """Return the environment of a process as it is now; None: it cannot be read, or is not there yet."""
    own = root / f"proc/{pid}"
    try:
        exe = os.fsencode((own / "exe").readlink())
        mapped = _MAPPED.findall((own / "maps").read_bytes())
        fd = os.open(own / "mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    files = {name: (int(start, 16), file) for start, file, name in reversed(mapped)}
    try:
        # Order matters: a copy of the symbol in the executable is the one that counts.
        for name in (exe, *filter(_LIBC.search, files)):
            base, file = files.get(name, (0, b""))
            if base and file not in _KNOWN:
                _KNOWN[file] = find_environ(fd, base)
            if base and (offset := _KNOWN[file]) is not None:
                return read_variables(fd, base + offset)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def find_environ(fd: int, base: int) -> int | None:
    """Return how far from its beginning a mapped ELF file defines `environ`; None: it does not.

    Args:
        fd: of the memory.
        base: where the file's beginning is mapped.
    Raises:
        OSError: a table lies where nothing is mapped.
    """
    if _read(fd, base, 6) != b"\x7fELF\x02\x01":
        return None
    (table,), (count,) = _unpack(fd, "<Q", base + 32), _unpack(fd, "<H", base + 56)
    headers = list(struct.iter_unpack("<I12xQ16xQ8x", _read(fd, base + table, 56 * count)))
    bias = base - min((address for kind, address, _ in headers if kind == _PT_LOAD), default=0) // _PAGE * _PAGE
    dynamic = dict[int, int]()
    for _, address, size in (header for header in headers if header[0] == _PT_DYNAMIC):
        dynamic |= dict(struct.iter_unpack("<qQ", _read(fd, bias + address, size // 16 * 16)))
    if not {_DT_STRTAB, _DT_SYMTAB, _DT_STRSZ} <= dynamic.keys():
        return None
    # glibc writes addresses there, musl leaves offsets.
    strings, symbols = (at if at >= base else bias + at for at in (dynamic[_DT_STRTAB], dynamic[_DT_SYMTAB]))
    names = {match.start() for match in _SYMBOL.finditer(_read(fd, strings, dynamic[_DT_STRSZ]))}
    # Nothing says how many symbols there are; linkers put the names behind them.
    size = max(0, strings - symbols) // 24 * 24
    for name, section, value in struct.iter_unpack("<I2xHQ8x", _read(fd, symbols, size)):
        if name in names and section:  # else it only refers to the symbol
            return int(bias + value - base)
    return None


def read_variables(fd: int, address: int) -> dict[str, str] | None:
    """Return the variables that the pointer at an address leads to; None: it leads nowhere yet.

    Of two with one name the first counts, as for getenv(3).

    Raises:
        OSError: it leads to where nothing is mapped.
    """
    (array,), left, found = _unpack(fd, "<Q", address), MAX_ENVIRONMENT, dict[str, str]()
    while array and left > 0:
        (pointer,) = _unpack(fd, "<Q", array)
        if not pointer:
            return found
        text = b""
        while b"\0" not in text and len(text) < left:
            at = pointer + len(text)
            text += _read(fd, at, _PAGE - at % _PAGE)
        text = text.partition(b"\0")[0]
        array, left = array + _POINTER, left - len(text) - _POINTER
        name, is_set, value = text.decode(errors="replace").partition("=")
        if is_set:
            found.setdefault(name, value)
    return None


def _unpack(fd: int, form: str, address: int) -> tuple[int, ...]:
    return struct.unpack(form, _read(fd, address, struct.calcsize(form)))


def _read(fd: int, address: int, size: int) -> bytes:
    is_damaged = size > MAX_ENVIRONMENT or address >= 1 << 63  # which is no offset of a file
    if is_damaged or len(data := os.pread(fd, size, address)) < size:
        raise OSError(f"not mapped: {size} bytes at {address:#x}")
    return data

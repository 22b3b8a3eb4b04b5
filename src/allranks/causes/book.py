"""The book of causes: everything that can be wrong with a job, read once, and found by what people type.

    find_cause("mtu-blackhole").label          # AR204 mtu-blackhole
    select_causes(["AR2"], ["AR213"])          # the network causes except slow-link

A checkout has one text file a cause (`text/AR204-mtu-blackhole.md`), `text/patterns.toml` with parts that patterns
share, and `text/marks.toml` with lines that show no cause. A wheel has one file in their place, `book.json`, which its
build writes with `Book.to_json`: the agents of a job open one file on the network file system instead of a hundred. A
checkout keeps such a file, too, where Python keeps compiled modules, until a text changes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from allranks.causes.cause import Cause, Family, Sign, Trait
from allranks.model.errors import Exit, UsageError
from allranks.model.fact_kind import Said
from allranks.model.foreign import FIRST_USE

TEXT = Path(__file__).parent / "text"
BOOK = Path(__file__).parent / "book.json"
"""What a wheel has in place of TEXT."""

FAMILIES: Mapping[str, str] = {
    Family.NODE: "node",
    Family.GPU: "GPU",
    Family.NETWORK: "network",
    Family.FABRIC: "RDMA and fabric",
    Family.GROUP: "group and collectives",
    Family.JOB: "job, SLURM and script",
    Family.STATE: "state",
}
"""Family of an id -> what it is about, for people."""
LINES = "Lines"
"""Heading of the patterns, below a cause's sections."""


_Table = TypeVar("_Table")


class BookError(UsageError):
    """A text file of the book is wrong: which file and line, what was seen, what was expected."""


class Xid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a number means that the NVIDIA driver reports in the kernel log."""

    what: str
    asks: str
    """What it asks for: program, reset, reset_later, reboot, link, hands or watch, as `text/patterns.toml` explains."""


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of line that shows no cause by itself, but that the readings of whole logs use."""

    name: str
    match: str
    """For the cleaned line."""
    scan: str = ""
    """What to search for in many lines at once; empty: the same."""


class Book(msgspec.Struct, frozen=True):
    """All that the text files say."""

    causes: tuple[Cause, ...]
    """In the order of their ids."""
    xids: Mapping[int, Xid]
    marks: tuple[Mark, ...] = ()

    def to_json(self) -> bytes:
        """Return the whole book in one file, which costs a program on a network file system one open."""
        return msgspec.json.encode(self)


class _Marks(msgspec.Struct, forbid_unknown_fields=True):
    """What `text/marks.toml` holds."""

    mark: tuple[Mark, ...]


class _Shared(msgspec.Struct, forbid_unknown_fields=True):
    """What `text/patterns.toml` holds."""

    parts: dict[str, str]
    xids: dict[int, Xid]


def read_book(folder: Path = TEXT) -> Book:
    """Read all text files.

    Raises:
        BookError: one of them is wrong.
    """
    shared = _read_whole(folder / "patterns.toml", _Shared)
    marks = _read_whole(folder / "marks.toml", _Marks) if (folder / "marks.toml").exists() else _Marks(())
    pages = sorted(folder.glob("AR*.md"))
    return Book(tuple(read_cause(_read(page), page, shared.parts) for page in pages), shared.xids, marks.mark)


def _read_whole(path: Path, kind: type[_Table]) -> _Table:
    text = _read(path)
    try:
        return msgspec.convert(_read_toml(text, path), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise BookError(f"{path}:{_line_of(str(exc), text)}: {exc}") from exc


def read_cause(text: str, path: Path, parts: Mapping[str, str]) -> Cause:
    """Read one text file.

    Args:
        text: what it holds.
        path: its name, AR204-mtu-blackhole.md, is the id and name of the cause.
        parts: of patterns, by name.
    Raises:
        BookError: it is not as a cause must be.
    """
    head, lines = _HEAD.match(text), _LINES.search(text)
    if head is None:
        raise BookError(f"{path}:1: expected `# Title.`, an empty line, and the head: ```toml to ```")
    identity, _, name = path.stem.partition("-")
    _, *pieces = re.split(r"^## (.+)$", text[head.end() : lines.start() if lines else None], flags=re.MULTILINE)
    fields = _read_toml(head["toml"], path, below=text[: head.start("toml")])
    signs = _read_toml(lines["toml"], path, below=text[: lines.start("toml")]) if lines else {}
    own = {
        "name": name,
        "title": head["title"],
        "sections": {heading: body.strip("\n") for heading, body in zip(pieces[::2], pieces[1::2], strict=True)},
        "signs": signs.pop("sign", []),
    }
    if isinstance(fields.get("fix"), str):
        fields["fix"] = {"text": fields["fix"]}
    try:
        if LINES in own["sections"]:
            raise msgspec.ValidationError(
                f"`## {LINES}`: expected an empty line and the signs at the end: ```toml to ```"
            )
        if misplaced := [*(fields.keys() & own), *signs]:
            raise msgspec.ValidationError(f"Object contains unknown field `{misplaced[0]}`")
        _read_member(Exit, fields, "exit", "$")
        for index, sign in enumerate(own["signs"]):
            _read_member(Said, sign, "said", f"$.signs[{index}]")
            if "match" in sign:
                sign["match"] = expand(sign["match"], parts)
        cause = msgspec.convert(fields | own, Cause)
    except (KeyError, RecursionError, TypeError, msgspec.ValidationError) as exc:
        problem = f"no part `{exc.args[0]}` in patterns.toml" if isinstance(exc, KeyError) else str(exc)
        raise BookError(f"{path}:{_line_of(problem, text)}: {problem}") from exc
    if cause.id != identity:
        raise BookError(
            f"{path}:{_line_of('`id`', text)}: id = {cause.id!r}, expected {identity!r} as in the file's name"
        )
    return cause


def expand(pattern: str, parts: Mapping[str, str]) -> str:
    """Return a pattern with the parts that `(?&name)` stands for.

    Raises:
        KeyError: there is no part of this name.
    """
    return _PART.sub(lambda part: expand(parts[part[1]], parts), pattern) if "(?&" in pattern else pattern


@functools.cache
def _book() -> Book:
    with FIRST_USE:
        return _read_kept() if TEXT.is_dir() else _decode(BOOK)


def _read_kept() -> Book:
    """Return the book of a checkout; as of a compiled module, the time of the newest source tells if it is old."""
    kept = BOOK.parent / "__pycache__" / BOOK.name
    sources = [*BOOK.parent.glob("*.py"), TEXT, *TEXT.iterdir()]
    newest_ns = max(path.stat().st_mtime_ns for path in sources)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if kept.stat().st_mtime_ns == newest_ns:
            return _decode(kept)
    book = read_book(TEXT)
    if not sys.dont_write_bytecode:
        with contextlib.suppress(OSError):
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_bytes(book.to_json())
            os.utime(new, ns=(newest_ns, newest_ns))
            new.replace(kept)
    return book


def _decode(path: Path) -> Book:
    return msgspec.json.decode(path.read_bytes(), type=Book, strict=False)


def all_causes() -> tuple[Cause, ...]:
    """Return every cause and outcome, in the order of their ids."""
    return _book().causes


def all_xids() -> Mapping[int, Xid]:
    """Return what is known of the NVIDIA driver's Xids, by number."""
    return _book().xids


def all_marks() -> tuple[Mark, ...]:
    """Return the kinds of lines that only the readings of whole logs use."""
    return _book().marks


def find_cause(text: str) -> Cause:
    """Return the cause of this id, name or alias, in any case; `204` and `AR204 mtu-blackhole` are ids, too.

    Raises:
        UsageError: there is none; it says what comes close.
    """
    cause = known_cause(text)
    if cause is None:
        raise _no_such_cause(text)
    return cause


def known_cause(text: str) -> Cause | None:
    """Return the cause of this id, name or alias; None if there is none: a finding may be of another version."""
    return _by_name().get(text.strip().lower())


def traits_of(text: str) -> frozenset[Trait]:
    """Return what engines may ask of this cause; nothing if there is none."""
    cause = known_cause(text)
    return frozenset() if cause is None else cause.traits


@functools.cache
def _by_name() -> dict[str, Cause]:
    return {
        name.lower(): cause
        for cause in all_causes()
        for name in (cause.id, cause.id.removeprefix("AR"), cause.name, cause.label, *cause.aliases)
    }


def find_loss(text: str) -> Sign | None:
    """Return the sign by which the end of a rank says that it only lost another rank; None: it does not say so.

    Args:
        text: an exception's type and message, without the frames, or the last lines of stderr.
    """
    return next((sign for sign, pattern in _losses() if pattern.search(text)), None)


@functools.cache
def _losses() -> tuple[tuple[Sign, re.Pattern[str]], ...]:
    ends = (sign for cause in all_causes() for sign in cause.signs if "end" in sign.where)
    return tuple((sign, re.compile(sign.pattern, re.MULTILINE)) for sign in ends)


def select_causes(select: Sequence[str], ignore: Sequence[str]) -> tuple[Cause, ...]:
    """Return the causes that are asked for, in the order of their ids.

    Args:
        select: ids, names, aliases or beginnings of ids (`AR2`: all of the network); none at all means every cause.
        ignore: the same, for what is left out of them.
    Raises:
        UsageError: one of them fits no cause.
    """
    chosen = set(_matching(select)) if select else set(all_causes())
    left_out = set(_matching(ignore))
    return tuple(cause for cause in all_causes() if cause in chosen and cause not in left_out)


_HEAD = re.compile(r"# (?P<title>[^\n]+)\n\n```toml\n(?P<toml>.*?)^```\n", re.DOTALL | re.MULTILINE)
_LINES = re.compile(rf"^## {LINES}\n\n```toml\n(?P<toml>.*)^```\n\Z", re.DOTALL | re.MULTILINE)
_PART = re.compile(r"\(\?&([a-z0-9_]+)\)")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except UnicodeDecodeError as exc:
        raise BookError(f"{path}:{exc.object[: exc.start].count(10) + 1}: expected ASCII") from exc


def _read_toml(block: str, path: Path, *, below: str = "") -> dict[str, Any]:
    """Read a block of TOML; `below` is what stands above it in its file, so that errors have the file's lines."""
    import tomllib  # only here: a wheel has no text to read

    try:
        return tomllib.loads(block)
    except tomllib.TOMLDecodeError as exc:
        line = int(number[1]) if (number := re.search(r"at line ([0-9]+)", str(exc))) else 1
        problem = str(exc).partition(" (at ")[0]
        raise BookError(f"{path}:{below.count(chr(10)) + line}: {problem}") from exc


@functools.cache
def _members(kind: type[Enum]) -> dict[str, Enum]:
    return {member.name.lower().replace("_", "-"): member for member in kind}


def _read_member(kind: type[Enum], table: dict[str, Any], key: str, place: str) -> None:
    """Put the member of an enum of numbers where the text has its name."""
    members = _members(kind)
    if key in table and table[key] not in members:
        raise msgspec.ValidationError(f"{table[key]!r}: expected {', '.join(members)} - at `{place}.{key}`")
    if key in table:
        table[key] = members[table[key]]


def _line_of(problem: str, text: str) -> int:
    """The line that a message of msgspec is about: of the key that it quotes, in the sign whose number it has."""
    lines = text.splitlines()
    place = re.search(r"`\$\.(?:signs\[([0-9]+)\]\.?)?(\w*)", problem)
    starts = [number for number, line in enumerate(lines) if line == "[[sign]]"]
    first, end = (*starts, len(lines))[int(place[1]) :][:2] if place and place[1] else (0, len(lines))
    words = [place[2]] if place and place[2] else re.findall(r"`([^`$]+)`", problem)
    keys = [re.compile(rf"(?:\[*{re.escape(word)}(?: =|\]|$))|.*\(\?&{re.escape(word)}\)") for word in words]
    found = (number for number in range(first, end) if any(key.match(lines[number]) for key in keys))
    return next(found, first) + 1


def _matching(texts: Iterable[str]) -> Iterator[Cause]:
    for text in texts:
        prefix = text.strip().upper()
        if re.fullmatch(r"AR[0-9]{1,2}", prefix):
            family = [cause for cause in all_causes() if cause.id.startswith(prefix)]
            if not family:
                raise _no_such_cause(text)
            yield from family
        else:
            yield find_cause(text)


def _no_such_cause(text: str) -> UsageError:
    import difflib  # only here: it costs time

    # A wrong number is a wrong number: the nearest one is another cause.
    is_id = re.fullmatch(r"AR[0-9]*", text.strip(), re.IGNORECASE)
    names = {} if is_id else {name.lower(): name for cause in all_causes() for name in (cause.name, *cause.aliases)}
    close = difflib.get_close_matches(text.strip().lower(), names, n=1)
    within = [name for name in names.values() if len(text.strip()) > 2 and text.strip().lower() in name.lower()]
    hint = f'did you mean "{names[close[0]] if close else within[0]}"? ' if close or within else ""
    return UsageError(f'no cause "{text}": {hint}expected an id, a name or an alias; allranks explain lists them')

"""Inputs that are nearly right: what a program wrote, damaged by chance or by somebody who knows the format. Pure.

    rng = random.Random(7)
    mutate(rng, b'{"rank": 3}', others=[...])      # b'{"rank": 1e999}'

Three kinds: of bytes (bits, truncation, splices), of the words and numbers of a text, and of the values of a JSON or
MessagePack document, whatever its depth.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

MOST_BYTES = 1 << 17
"""Of one input."""
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 255, 256, 65536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e15,
    1e300, -1e300, 0.1, 5e-324, True,
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "\n", "\x1b[2J\x1b]0;x\x07", "\r\nallranks: no", "../../etc/passwd", "%s%n{0}{x}", "a" * 5000,
    "\u202e", "\ufeff", "\U0001f600", "n[1-3]", "n[0-99999999]", "n[", "]", "[]", "-1", "1e999", "NaN", "None", "null",
    "true", "0x10", "\u0663", "\u00b2", "1" * 5000, "=", ":", ",", "/", "|", "\x1f", "'", '"', "\\",
    "2026-13-45T99:99:99",
)  # fmt: skip
TOKENS = (
    *(text.encode() for text in TEXTS),
    b"\xff", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-0",
    b"[" * 2000, b'{"a":' * 2000, b"(" * 2000, b"\x80\x05", b"\xdd\xff\xff\xff\xff", b"\0" * 64,
)  # fmt: skip
_WORD = re.compile(rb"[A-Za-z_]\w*|-?\d+(?:\.\d+)?|\s+|[^\w\s]")


def mutate(rng: random.Random, data: bytes, *, others: Sequence[bytes] = (), kind: str = "text") -> bytes:
    """Return an input, changed in one to four places.

    Args:
        others: inputs of the same parser, parts of which it may get.
        kind: `bytes`, `text`, `json`, `lines of json`, or `msgpack`.
    """
    ways: list[Callable[[random.Random, bytes, Sequence[bytes]], bytes]] = [_change_bytes]
    if kind != "bytes":
        ways += [_change_words, _change_words]
    if kind in ("json", "lines of json", "msgpack"):
        ways += 3 * [_WAYS[kind]]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(ways)(rng, data, others)
    return data[:MOST_BYTES]


# Of bytes and words


def _change_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + int(2 ** rng.uniform(0, 10)))
    head, part, tail = data[:begin], data[begin:end], data[end:]
    match rng.randrange(9):
        case 0 if part:
            return head + bytes([part[0] ^ 1 << rng.randrange(8)]) + part[1:] + tail
        case 1:
            return head
        case 2:
            return tail
        case 3:
            return head + tail
        case 4:
            return head + part * rng.choice((2, 3, 50)) + tail
        case 5:
            return head + rng.randbytes(len(part)) + tail
        case 6:
            return head + rng.choice(TOKENS) + tail
        case 7:
            other = rng.choice(others) if others else data
            cut = rng.randrange(len(other) + 1)
            return head + other[cut : cut + int(2 ** rng.uniform(0, 10))] + tail
        case _:
            return part + head + tail


def _change_words(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    words = [*_WORD.finditer(data[: 1 << 16])]
    if not words:
        return rng.choice(TOKENS)
    word = rng.choice(words)
    number = rng.choice(NUMBERS)
    match rng.randrange(6):
        case 0 | 1:
            new = rng.choice(TOKENS)
        case 2:
            new = str(number).encode()
        case 3:
            new = rng.choice(words)[0]
        case 4:
            new = b""
        case _:
            new = word[0] * rng.choice((2, 100))
    return data[: word.start()] + new + data[word.end() :]


# Of values


def _change_json(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    try:
        value = change_value(rng, json.loads(data))
        text = json.dumps(value, ensure_ascii=rng.random() < 0.8)
    except (ValueError, RecursionError):
        return _change_bytes(rng, data, others)
    if rng.random() < 0.1 and text.startswith("{"):  # a key twice
        text = text[:-1] + (", " if len(text) > 2 else "") + text[1:]
    return text.encode(errors="backslashreplace")


def _change_json_line(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = _change_json(rng, lines[at], others)
    return b"\n".join(lines)


def _change_msgpack(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    try:
        return msgspec.msgpack.encode(change_value(rng, msgspec.msgpack.decode(data)))
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, TypeError):
        return _change_bytes(rng, data, others)


_WAYS = {"json": _change_json, "lines of json": _change_json_line, "msgpack": _change_msgpack}


def change_value(rng: random.Random, value: Any) -> Any:
    """Return a document with another value, key or item somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice([*value])
        match rng.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return value | {rng.choice(TEXTS): value[key]}
            case 2:
                return value | {key: value[rng.choice([*value])]}
            case _:
                return value | {key: change_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value * rng.choice((2, 20)) if len(value) < 500 else value[:at]
            case _:
                return [*value[:at], change_value(rng, value[at]), *value[at + 1 :]]
    return _other_value(rng, value)


def _other_value(rng: random.Random, value: Any) -> Any:
    match rng.randrange(10):
        case 0:
            return None
        case 1 | 2:
            return rng.choice(NUMBERS)
        case 3 | 4:
            return rng.choice(TEXTS)
        case 5:
            return rng.choice(([], {}, [value], {"a": value}, [[]], [None]))
        case 6:
            deep: Any = value
            for _ in range(rng.choice((3, 60, 300))):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            return deep
        case 7 if isinstance(value, str):
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice(TEXTS) + value[at:]
        case 7 if isinstance(value, int | float):
            return -value
        case 8 if isinstance(value, str):
            return value * rng.choice((2, 100))
        case 8 if isinstance(value, int | float):
            return value * 10 ** rng.randrange(1, 20)
        case 9 if isinstance(value, int | float):
            return rng.choice((float("nan"), float("inf"), str(value)))
        case _:
            return [value] * (2 if isinstance(value, dict | list) else rng.choice((2, 300)))

"""Decodes data that other programs wrote into a type, or rejects it with one kind of error. Pure.

    try:
        note = decode_json(data, Note)
    except Unreadable as exc: ...

Whatever the bytes are, nothing else is raised: msgspec alone also raises UnicodeDecodeError and RecursionError.
Threads may decode at once. Where two use a type for the first time, msgspec 0.22 crashes: they do that in turn.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
FIRST_USE = threading.RLock()
"""Held by who decodes into a type for the first time: until then another thread finds it without all of its fields."""
os.register_at_fork(before=FIRST_USE.acquire, after_in_parent=FIRST_USE.release, after_in_child=FIRST_USE.release)
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises where bytes are not what they should be."""
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(?P<half>u[dD][89a-fA-F]\w\w)|.)", re.DOTALL)


class Unreadable(ValueError):
    """Bytes that are not what they are said to be; the text says why, in one line."""


def decode_json(data: bytes | msgspec.Raw, kind: type[_Kind] | Any) -> _Kind | Any:
    r"""Return the value of this type that is written as JSON.

    Halves of characters, which Python writes for a file name that is no UTF-8, become text: `\udcff`.

    Raises:
        Unreadable: it is none.
    """
    decode = _decoder_of(kind).decode
    try:
        try:
            return decode(data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if b"\\u" not in bytes(data):
                raise
            return decode(_ESCAPE.sub(_as_text, bytes(data)))
    except UNREADABLE as exc:
        raise Unreadable(" ".join(str(exc).split())[:200] or type(exc).__name__) from exc


def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    if (known := _decoders.get(kind)) is None:
        with FIRST_USE:
            known = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return known


def decode_fields(data: bytes | msgspec.Raw, kind: type[_Struct]) -> _Struct:
    """Return the value of this struct that is written as a JSON object; a field that is none of its type is left out.

    Raises:
        Unreadable: it is no object.
    """
    told, found = decode_json(data, dict[str, msgspec.Raw]), {}
    for field in msgspec.structs.fields(kind):
        if field.encode_name in told:
            with contextlib.suppress(Unreadable):
                found[field.name] = decode_json(told[field.encode_name], field.type)
    return kind(**found)


def _as_text(escape: re.Match[bytes]) -> bytes:
    return b"\\" + escape[0] if escape["half"] else escape[0]

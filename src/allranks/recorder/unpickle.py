"""Plain data out of a pickle, and nothing else: no import, no call, no object of a class. Pure.

pickle.Unpickler without find_class executes nothing either, and yet ten bytes can make it take all memory (the index of
a memo), or all time (tuples of tuples as keys, lists that hold each other a million times). Here pickletools reads the
opcodes, each costs what it is long, keys are strings and numbers, and what comes out is a tree: what is used twice is
flat, and is copied.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

MAX_OPS = 4_000_000
"""Opcodes of one pickle: 20,000 calls of the flight recorder are some 2 million."""
_MAX_LONG_BITS = 128
_FLAT = frozenset((str, int, float, bool, bytes, type(None)))
_MAKERS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_VALUES = frozenset((
    "BININT1", "BININT2", "BININT", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
))  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickleError(ValueError):
    """It is not plain data, or ends too early."""


def load_plain(data: bytes) -> Any:
    """Return the dicts, lists, tuples, strings, bytes, numbers, True, False and None that a pickle builds.

    Raises:
        PickleError: it is damaged, too long, or asks for anything else.
    """
    try:
        return _run(data)
    except PickleError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as exc:
        raise PickleError("the pickle ends too early, or is damaged") from exc


def _run(data: bytes) -> Any:
    """Be the machine that a pickle is a program of, with the opcodes for plain data."""
    stack: list[Any] = []
    below: list[list[Any]] = []
    """The stacks under the marks that are open."""
    memo: dict[Any, Any] = {}
    num_copied = 0
    for opcode, arg, _ in islice(pickletools.genops(data), MAX_OPS):
        name = opcode.name
        # Order matters: most frequent first.
        if name in ("BINGET", "LONG_BINGET"):
            again = memo[arg]
            num_copied += len(again) if type(again) in (dict, tuple) else 0
            stack.append(_copy(again, num_copied))
        elif name in _VALUES:
            if type(arg) is str and not arg.isascii():
                arg.encode()  # pickletools also lets halves of characters through
            elif type(arg) is int and arg.bit_length() > _MAX_LONG_BITS:
                raise PickleError("the pickle holds a number of more than 16 bytes")
            stack.append(arg)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in _MAKERS:
            stack.append(_MAKERS[name]())
        elif name in ("SETITEMS", "APPENDS", "TUPLE"):
            items, stack = stack, below.pop()
            if name == "TUPLE":
                stack.append(tuple(items))
            else:
                _fill(stack[-1], items, name)
        elif name in ("SETITEM", "APPEND"):
            size = 2 if name == "SETITEM" else 1
            items, stack[-size:] = stack[-size:], []
            _fill(stack[-1], items, name)
        elif name in _TUPLES:
            size = _TUPLES[name]
            if len(stack) < size:
                raise PickleError("the pickle is damaged")
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "STOP":
            (value,) = stack
            if below:
                raise PickleError("the pickle is damaged")
            return value
        elif name not in ("PROTO", "FRAME"):
            raise PickleError(f"the pickle holds more than plain data (opcode {name}): it was not run")
    raise PickleError(f"the pickle is longer than {MAX_OPS} opcodes")


def _copy(value: Any, num_copied: int) -> Any:
    """Return what is used once more: torch does that with strings, and with the frames of stacks."""
    if type(value) in _FLAT:
        return value
    items = value.values() if type(value) is dict else value if type(value) is tuple else (value,)
    if num_copied > MAX_OPS or not all(type(item) in _FLAT for item in items):
        raise PickleError("the pickle uses one list or nested value twice: no flight recorder does")
    return dict(value) if type(value) is dict else value


def _fill(target: Any, items: Sequence[Any], name: str) -> None:
    """Put items into the list or dict that the opcode is for."""
    if name.startswith("APPEND") and type(target) is list:
        target += items
    elif name.startswith("SETITEM") and type(target) is dict:
        if not all(type(key) in _FLAT for key in items[::2]):
            raise PickleError("the pickle has a key that is neither text nor number")
        target.update(zip(items[::2], items[1::2], strict=True))
    else:
        raise PickleError("the pickle is damaged")

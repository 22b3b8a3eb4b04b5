"""Plain data out of a pickle, and nothing else: no import, no call, no object of a class. Pure.

pickle.Unpickler without find_class executes nothing either, and yet ten bytes can make it take all memory (the index of
a memo), or all time (tuples of tuples as keys, lists that hold each other a million times). Here each opcode costs what
it is long, keys are strings and numbers, and what comes out is a tree: what is used twice is flat, and is copied.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_OPS = 4_000_000
"""Opcodes of one pickle: 20,000 calls of the flight recorder are some 2 million."""
_MAX_LONG_BYTES = 16
_MARK = object()
_FLAT = frozenset((str, int, float, bool, bytes, type(None)))
_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_SIZES = {0x58: 4, 0x8C: 1, 0x8D: 8}
_BYTES = {0x42: 4, 0x43: 1, 0x8E: 8}


class PickleError(ValueError):
    """It is not plain data, or ends too early."""


def load_plain(data: bytes) -> Any:
    """Return the dicts, lists, tuples, strings, bytes, numbers, True, False and None that a pickle builds.

    Raises:
        PickleError: it is damaged, too long, or asks for anything else.
    """
    try:
        return _Reader(data).run()
    except (IndexError, struct.error) as exc:
        raise PickleError("the pickle ends too early, or is damaged") from exc
    except (KeyError, TypeError, AttributeError, UnicodeError) as exc:
        raise PickleError("the pickle is damaged") from exc


class _Reader:
    """The machine that a pickle is a program of, with the opcodes for plain data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def run(self) -> Any:
        data, stack, memo = self._data, self._stack, self._memo
        for _ in range(MAX_OPS):
            op = data[self._at]
            self._at += 1
            # Order matters: most frequent first.
            if op == 0x68:  # BINGET
                stack.append(self._again(memo[self._number(1)]))
            elif op == 0x6A:  # LONG_BINGET
                stack.append(self._again(memo[self._number(4)]))
            elif op == 0x4B:  # BININT1
                stack.append(self._number(1))
            elif op == 0x71:  # BINPUT
                memo[self._number(1)] = stack[-1]
            elif op == 0x72:  # LONG_BINPUT
                memo[self._number(4)] = stack[-1]
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x28:  # MARK
                stack.append(_MARK)
            elif op in _SIZES:  # strings
                stack.append(self._take(self._number(_SIZES[op])).decode())
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op])
            elif op == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op in (0x75, 0x65, 0x73, 0x61):  # SETITEMS, APPENDS, SETITEM, APPEND
                self._fill(op)
            elif op in _TUPLES:
                self._join(_TUPLES[op])
            elif op == 0x74:  # TUPLE
                stack.append(tuple(self._to_mark()))
            elif op == 0x4D:  # BININT2
                stack.append(self._number(2))
            elif op == 0x4A:  # BININT
                stack.append(int.from_bytes(self._take(4), "little", signed=True))
            elif op == 0x8A:  # LONG1
                self._long()
            elif op == 0x47:  # BINFLOAT
                stack.append(struct.unpack(">d", self._take(8))[0])
            elif op in _BYTES:
                stack.append(self._take(self._number(_BYTES[op])))
            elif op == 0x80:  # PROTO
                self._take(1)
            elif op == 0x95:  # FRAME
                self._take(8)
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or stack[0] is _MARK:
                    raise PickleError("the pickle is damaged")
                return stack[0]
            else:
                raise PickleError(f"the pickle holds more than plain data (opcode 0x{op:02x}): it was not run")
        raise PickleError(f"the pickle is longer than {MAX_OPS} opcodes")

    def _again(self, value: Any) -> Any:
        """Return what is used once more: torch does that with strings, and with the frames of stacks."""
        if type(value) is str:
            return value
        if type(value) in (dict, tuple):
            self._copied += len(value)
            items = value.values() if type(value) is dict else value
            if self._copied <= MAX_OPS and all(type(item) in _FLAT for item in items):
                return dict(value) if type(value) is dict else value
        elif type(value) in _FLAT:
            return value
        raise PickleError("the pickle uses one list or nested value twice: no flight recorder does")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise PickleError("the pickle ends too early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _long(self) -> None:
        size = self._number(1)
        if size > _MAX_LONG_BYTES:
            raise PickleError("the pickle holds a number of more than 16 bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _to_mark(self) -> list[Any]:
        """Take what stands above the last mark."""
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError("the pickle is damaged")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def _join(self, size: int) -> None:
        items = tuple(self._stack[-size:])
        if len(items) < size or any(item is _MARK for item in items):
            raise PickleError("the pickle is damaged")
        self._stack[-size:] = [items]

    def _fill(self, op: int) -> None:
        if op in (0x75, 0x65):
            items = self._to_mark()
        else:
            size = 2 if op == 0x73 else 1
            items = self._stack[-size:]
            del self._stack[-size:]
        target = self._stack[-1]
        if any(item is _MARK for item in items):
            raise PickleError("the pickle is damaged")
        if op in (0x65, 0x61):
            if type(target) is not list:
                raise PickleError("the pickle is damaged")
            target += items
            return
        if type(target) is not dict or len(items) % 2:
            raise PickleError("the pickle is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _FLAT:
                raise PickleError("the pickle has a key that is neither text nor number")
            target[key] = value

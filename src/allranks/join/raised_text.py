"""What does an exception say, and what was raised before it? Texts of bounded length, whatever the exception is.

Used by `join/hook.py` in every worker, loaded by path. Standard library only.
"""

from __future__ import annotations

import re
import traceback

MOST_BEFORE = 16
EXCEPTION_LIMIT = 2_000
"""Exceptions that are told beside the one that ended the worker, and characters of each."""
FILE_CHARS = 65536
"""Of a message and of a traceback, in the error file: some scripts put a whole batch into an exception."""
MOST_PRINTED = 64
"""Exceptions that are printed as Python does it, with what belongs to them: Python prints any number."""
MOST_FRAMES = 100
"""Of each exception, where there is more than can be printed."""
HEADER = "Traceback (most recent call last):\n"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_UNITS = {"MB": 1e6, "characters": 1}
_CUT = re.compile(r"\n\.\.\. (\d{1,9}(?:\.\d)?) (MB|characters) cut \.\.\.\n")


def before(value: BaseException) -> list[str]:
    """What had been raised before an exception, while it was raised in its handling: the oldest first."""
    return [cut(say(type(earlier), earlier), EXCEPTION_LIMIT) for earlier in reversed(chain(value)[1:])]


def chain(value: BaseException) -> list[BaseException]:
    """Return an exception, and what had been raised before it: the newest first, MOST_BEFORE at most."""
    found: list[BaseException] = [value]
    while len(found) <= MOST_BEFORE:
        earlier = found[-1].__cause__ or found[-1].__context__ or _first_part(found[-1])
        if not isinstance(earlier, BaseException) or any(earlier is known for known in found):
            break
        found.append(earlier)
    return found


def _first_part(value: BaseException) -> BaseException | None:
    """Return the first exception of a group."""
    parts = getattr(value, "exceptions", None)
    return parts[0] if isinstance(parts, tuple) and parts else None


def cut(text: str, most_chars: int) -> str:
    """Return a text, or its beginning and its end, where it is longer; what was cut is said between them.

    >>> cut(10_000 * "x" + "y" + 50_000_000 * "z", 60)
    'xxxxxxxxxx\\n... 50.0 MB cut ...\\nzzzzzzzzzz'
    """
    if len(text) <= most_chars:
        return text
    num_cut, num_kept = 0.0, max(2, most_chars - 40)
    head = num_kept // 2 if num_kept < 100 else num_kept // 4  # of a traceback, the end counts more
    tail = num_kept - head
    if earlier := _CUT.search(text):  # the second cut is at the place of the first one
        num_cut = float(earlier[1]) * _UNITS[earlier[2]]
        before, after = text[: earlier.start()], text[earlier.end() :]
        head, text = min(max(head, num_kept - len(after)), len(before)), before + after
        tail = min(num_kept - head, len(after))
    num_cut += len(text) - head - tail
    unit = "MB" if num_cut >= 100_000 else "characters"
    size = f"{num_cut / _UNITS[unit]:.{1 if unit == 'MB' else 0}f} {unit}"
    return f"{text[:head]}\n... {size} cut ...\n{text[len(text) - tail :]}"


def say(kind: type[BaseException], value: BaseException) -> str:
    """`ValueError: bad batch`, also where the exception cannot say it; cut."""
    return f"{kind.__name__}: {_text_of(value)}".removesuffix(": ")  # a bare assert has no text


def _text_of(value: BaseException) -> str:
    try:
        return cut(str(value), FILE_CHARS)
    except BaseException:  # as in Python's own traceback
        return "<exception str() failed>"


def format_all(value: BaseException) -> str:
    """Return a traceback as Python prints it; where that is very long, the ends of its parts, up to FILE_CHARS."""
    if _is_short(value):
        return cut("".join(traceback.format_exception(type(value), value, value.__traceback__)), FILE_CHARS)
    printed = ""
    for error in reversed(chain(value)):
        if printed:
            printed += _CONTEXT if error.__context__ is not None and error.__cause__ is None else _CAUSE
        frames = "".join(traceback.format_tb(error.__traceback__, -MOST_FRAMES))
        printed += cut(f"{HEADER}{frames}{say(type(error), error)}\n", FILE_CHARS // 8)
    return cut(printed, FILE_CHARS)


def _is_short(value: BaseException) -> bool:
    """Whether an exception has few others before it and in it, short words, and not many frames."""
    seen: set[int] = set()
    left = [value]
    while left:
        error = left.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        parts = getattr(error, "exceptions", None)
        before = [other for other in (error.__cause__, error.__context__) if isinstance(other, BaseException)]
        parts = list(parts[:MOST_PRINTED]) if isinstance(parts, tuple) else []
        left += [other for other in (*before, *parts) if isinstance(other, BaseException)]
        num_frames, frame = 0, error.__traceback__
        while frame is not None and num_frames <= 10 * MOST_FRAMES:
            num_frames, frame = num_frames + 1, frame.tb_next
        notes = getattr(error, "__notes__", ())
        num_chars = len(_text_of(error)) + sum(len(note) for note in notes if isinstance(note, str))
        if len(seen) + len(left) > MOST_PRINTED or num_frames > 10 * MOST_FRAMES or num_chars > FILE_CHARS // 2:
            return False
    return True

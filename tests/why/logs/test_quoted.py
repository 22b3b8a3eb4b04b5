"""Source code in a log is no output: below frames, at prompts, of shells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from allranks.causes.book import all_causes
from allranks.why.logs import quoted
from allranks.why.logs.line import Line, read_line
from allranks.why.logs.log_events import Logs
from allranks.why.logs.quoted import is_code

Read = Callable[[str], Logs]
FRAME = '  File "/home/ml/train.py", line 88, in step\n'
CODE = '    if "CUDA out of memory" in str(err): halve_batch(cfg)\n'
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.12 GiB.\n"


def causes(logs: Logs) -> list[str]:
    return [event.kind for event in logs.events if event.sign is not None]


@pytest.mark.parametrize(
    "text",
    [
        FRAME + CODE,
        f'{FRAME}    retry(\n      "CUDA out of memory",\n    )\n',  # Python 3.13: all lines of a statement
        FRAME + CODE + "    ~~~~~~~~~~^^^^^^^^^^^\n",
        '  File "/home/ml/train.py", line 88\n    if "CUDA out of memory" in str(err)\n       ^\n',  # SyntaxError
        f"  |{FRAME}  |{CODE}",  # an exception group
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank2]: ", "3: ", "node03: ", "2026-03-25T10:34:07.530123456Z stderr F "])
def test_code_below_a_frame_shows_nothing(read: Read, prefix: str, text: str) -> None:
    logs = read("".join(f"{prefix}{line}\n" for line in text.splitlines()) + f"{prefix}TypeError: x\n")
    assert causes(logs) == []
    assert [event.kind for event in logs.events] == ["frame", "exception"]


def test_lines_of_other_ranks_stand_between_a_frame_and_its_code(read: Read) -> None:
    frame, code = f"[rank2]: {FRAME}", f"[rank2]: {CODE}"
    assert causes(read(frame + "[rank1]: step 7\n[rank0]: step 7\n" + code)) == []
    assert causes(read(frame + f"[rank1]: {OUT_OF_MEMORY}" + code)) == ["cuda-oom"]
    assert causes(read(frame + "[rank2]: step 7\n[rank2]:     CUDA out of memory\n")) == ["cuda-oom"]


def test_many_ranks_that_print_tracebacks_at_once_are_read_once(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0]

    def count(*told: Any) -> Line:
        counts[0] += 1
        return read_line(*told)

    monkeypatch.setattr(quoted, "read_line", count)
    lines = [f"{rank}: {line}\n" for line in (FRAME + CODE).splitlines() * 5 for rank in range(200)]
    assert causes(read("".join(lines))) == []
    assert len(lines) // 2 < counts[0] <= len(lines)


@pytest.mark.parametrize(
    "text",
    [
        FRAME + OUT_OF_MEMORY,  # no file, no code
        f"{FRAME}    step(batch)\n{OUT_OF_MEMORY}",
        f"{FRAME}    step(batch)\nValueError: first line\n    CUDA out of memory\n",  # more lines of a message
        '  File "/home/ml/train.py", line 88 in step\n    CUDA out of memory\n',  # faulthandler prints no code
    ],
)
def test_what_an_exception_says_counts(read: Read, text: str) -> None:
    assert causes(read(text)) == ["cuda-oom"]


@pytest.mark.parametrize(
    "text",
    [
        '>>> raise RuntimeError("CUDA out of memory")',
        "+ grep 'CUDA out of memory' train.log",
        '++ echo "CUDA out of memory"',
        '\u2502 \u2771 88 \u2502   if "CUDA out of memory" in str(err): halve(cfg)',
        '---> 12     raise RuntimeError("CUDA out of memory")',
    ],
)
def test_what_is_marked_as_code_shows_no_cause(read: Read, text: str) -> None:
    assert causes(read(f"[rank1]: {text}\n")) == []


def test_a_shell_still_tells_the_address_of_the_rendezvous(read: Read) -> None:
    (event,) = read("+ torchrun --rdzv_endpoint=node01:29500 train.py\n").of("endpoint")
    assert event.values["endpoint"] == "node01:29500"


def test_no_line_that_shows_a_cause_looks_like_code() -> None:
    lines = [line for cause in all_causes() for hit in cause.hits for line in hit.splitlines()]
    assert [line for line in lines if is_code(line)] == []


@pytest.mark.parametrize("prefix", ["", "[rank2]: ", "3: ", "2026-03-25T10:34:07.530123456Z stderr F "])
@pytest.mark.parametrize(
    ("last", "kind", "text"),
    [
        ("ShardMismatch: 5 columns, want 6", "ShardMismatch", "5 columns, want 6"),
        ("mycorp.data.EmptyShard", "mycorp.data.EmptyShard", None),
        ("ValueError: x", "ValueError", "x"),
        ("Extension modules: numpy", None, None),
    ],
)
def test_the_line_that_ends_a_traceback_is_an_exception(
    read: Read, prefix: str, last: str, kind: str | None, text: str | None
) -> None:
    begin = "" if kind is None else "Traceback (most recent call last):\n"  # else a stack that a program prints
    lines = f"{begin}{FRAME}{CODE}    ^^^^^^^\n{last}\nINFO: done\n".splitlines()
    found = list(read("".join(f"{prefix}{line}\n" for line in lines)).of("exception"))
    assert [(event.values["type"], event.values.get("text")) for event in found] == ([(kind, text)] if kind else [])


def test_another_writer_does_not_end_a_traceback(read: Read) -> None:
    lines = ("[rank2]: Traceback (most recent call last):", f"[rank2]: {FRAME[:-1]}", "[rank1]: Stopped: a", "Done: b")
    (event,) = read("\n".join((*lines, "[rank2]: EmptyShard: c"))).of("exception")
    assert (event.line.rank, event.line.number, event.values["text"]) == (2, 5, "c")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: [4, 5].\n",
            "Error(s) in loading state_dict for Net: size mismatch for fc.weight: [4, 5].",
        ),
        (
            "pydantic_core.ValidationError: 1 validation error for Config\nlr\n  Input should be a number\n    See\n",
            "1 validation error for Config lr Input should be a number",
        ),
        ("AssertionError: \n\n sizes differ\nTraceback (most recent call last):\n", "sizes differ"),
        ("ValueError: unknown keys:\nW1130 04:41:11.610000 14185 torch/run.py:1] x\n", "unknown keys:"),
        ("KeyError: 'lr'\n  more\n", "'lr'"),
    ],
)
def test_an_exception_is_told_with_its_reason(read: Read, text: str, told: str) -> None:
    log = "".join(f"[rank1]: {line}\n[rank0]: another\n" for line in text.splitlines())
    assert [event.values["text"] for event in read(log).of("exception")] == [told]

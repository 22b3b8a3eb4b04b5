"""Which exception is at the root of a printed traceback, and where in the user's files was it raised? Pure.

    origin = find_origin(text)
    origin.headline, origin.place      # "KeyError: 17", "train.py:12 in __getitem__"

Frameworks hand an exception on inside one of their own: a DataLoader raises `KeyError: Caught KeyError in DataLoader
worker process 1.` with the traceback of the worker as its text. `WRAPPERS` lists them; the exception inside is the
origin. For an exception that the user's own code raises from another one, the outer one stays: it was written to be
read.

What Python prints is read line by line into exceptions and how each is linked to the one before:

    cause, context    printed below it, after one of Python's two sentences
    again             the same exception, raised in another process before (RemoteTraceback)
    inside            its traceback is part of the message of the one before
    part              a member of the exception group before

Limit: a chain inside a message ends where the text ends, so an exception raised from such a one counts as its part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

WRAPPERS = re.compile(
    # torch 2.13, torch/_utils.py, ExceptionWrapper: DataLoader, pin memory, DataParallel.
    r"^\w+: Caught \w+ in .+\.$"
    # multiprocessing/pool.py, concurrent/futures/process.py, joblib, multiprocess.
    r"|^_?RemoteTraceback\b"
    # torch/multiprocessing/spawn.py; ray/exceptions.py; ray/train.
    r"|^ProcessRaisedException\b|^RayTaskError\b|^(?:TrainingFailedError|WorkerGroupError)\b"
    r"|^(?:Base)?ExceptionGroup\b"
    # torch/distributed/checkpoint/api.py; torch/_dynamo/exc.py.
    r"|^CheckpointException\b|^(?:BackendCompilerFailed|InternalTorchDynamoError|InductorError|LoweringException)\b"
    # accelerate/launchers.py; datasets/builder.py; hydra/_internal/instantiate; tenacity.
    r"|^RuntimeError: An issue was found when launching the training"
    r"|^DatasetGenerationError\b|^InstantiationException\b|^RetryError\b"
)
"""First lines, without the module, of exceptions that only hand another one on. Lightning re-raises the same one."""

_HEADER = re.compile(r"(?:\w+ ){0,2}Traceback \(most recent call last\):")
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_FATAL_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+(?:[(:]|$))")
_REMOTE = re.compile(r"_?RemoteTraceback\b")
_RAISED_FROM = ("cause", "context")
_WITHIN = ("inside", "part")
_LINKS = {
    "The above exception was the direct cause of the following exception:": "cause",
    "During handling of the above exception, another exception occurred:": "context",
}
_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""What torch puts before each line of an uncaught exception."""
_MARGIN = re.compile(r"( *)(?:\| ?|\+ (?=Exception Group))")
_DIVIDER = re.compile(r"(?P<indent> *)(?P<first>\+-)?\+-+(?: (?P<number>\d+|\.\.\.) -+)?$")
_LIBRARY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]|^<frozen "
    r"|[/\\]allranks[/\\](?:(?:join|guard|state)[/\\]|session\.py$)"
)


@dataclass(slots=True)
class Raised:
    """One exception of a printed chain."""

    link: str
    """To the one before; empty: it is the first."""
    number: int
    """Of the line of the text that it begins with, from 0."""
    depth: int = 0
    """Of the margin that groups are printed with."""
    frames: list[re.Match[str]] = field(default_factory=list)
    first_line: str | None = None
    """`KeyError: 17`, without the module; None: the text ends before it."""

    @property
    def is_wrapper(self) -> bool:
        """Whether it only hands another exception on."""
        return is_wrapper(self.first_line or "")

    @property
    def is_remote(self) -> bool:
        """Whether it stands for what another process printed, between quotes below it."""
        return bool(_REMOTE.match(self.first_line or ""))


@dataclass(frozen=True, slots=True)
class RootException:
    """The exception at the root."""

    headline: str
    """Its first line: `KeyError: 17`."""
    place: str | None
    """The last frame in a file of the user's: `train.py:12 in __getitem__`; None: there is none."""


def last_printed(text: str) -> str:
    """Return the last traceback in a log, with what belongs to it, and what was printed after it; empty: none."""
    chain = read_chain(text, is_one=False)
    return "\n".join(text.splitlines()[chain[0].number :]) if chain else ""


def split_fatal(text: str) -> tuple[str, str]:
    """Return what stands before the stacks that faulthandler printed last, and the stack that counts; empty: no stacks.

    That is the one of the thread that crashed; where it runs no Python, as one of autograd's, the main thread's.
    """
    start = text.rfind("Fatal Python error: ")
    if start < 0 or text[:start].rpartition("\n")[2]:
        return text, ""
    head, *blocks = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text[start:])
    stacks = [block.partition("\n\n")[0].rstrip() for block in blocks]
    with_frames = [stack for stack in stacks if _FATAL_FRAME.search(stack)]
    chosen = next((stack for stack in with_frames if stack.startswith("Current")), (with_frames or [""])[-1])
    return text[:start], f"{head.strip()}\n{chosen}".rstrip()


def find_fatal_place(stack: str) -> str | None:
    """Return the innermost frame of such a stack in a file of the user's: `train.py:12 in step`."""
    return _place([*_FATAL_FRAME.finditer(stack)][::-1])


def is_wrapper(first_line: str) -> bool:
    """Tell whether an exception with this first line, without the module, only hands another one on.

    >>> is_wrapper("KeyError: Caught KeyError in DataLoader worker process 1."), is_wrapper("KeyError: 17")
    (True, False)
    """
    return bool(WRAPPERS.match(first_line))


def find_origin(text: str, *, is_one: bool = True) -> RootException | None:
    """Return the exception at the root of a printed one; None: the text has no whole traceback.

    Args:
        text: as Python prints it.
        is_one: it is one exception with all that belongs to it; False: a log, whose last one counts.
    """
    chain = [raised for raised in read_chain(text, is_one=is_one) if raised.first_line is not None]
    outermost = [at for at, raised in enumerate(chain) if not raised.depth and raised.link not in _WITHIN]
    if not outermost:
        return None
    at, seen = outermost[-1], set[int]()
    while at not in seen:
        seen.add(at)
        at = _step(chain, at)
    place = _place(chain[at].frames) or _place([frame for number in sorted(seen) for frame in chain[number].frames])
    return RootException(chain[at].first_line or "", place)


def _step(chain: Sequence[Raised], at: int) -> int:
    """Return the number of the exception that this one hands on; its own where it hands none on."""
    here, below = chain[at], chain[at + 1] if at + 1 < len(chain) else None
    before = max(0, at - 1)  # the text may begin in the middle of a chain
    if here.link == "again":
        return before
    if below is not None and below.link == "inside" and here.is_wrapper:
        return at + 1
    if below is not None and below.link == "part" and below.depth > here.depth:
        at += 1
        while at + 1 < len(chain) and chain[at + 1].link in _RAISED_FROM and chain[at + 1].depth:  # its own chain
            at += 1
        return at
    return before if here.is_wrapper and here.link in _RAISED_FROM else at


def read_chain(text: str, *, is_one: bool = True) -> list[Raised]:
    """Return the exceptions of a printed text in its order, each linked to the one before."""
    chain: list[Raised] = []
    link, num_quotes, has_closed, is_open = "", 0, False, False  # open: the first line of the last one has not come
    has_margins = "Exception Group Traceback" in text
    for number, full_line in enumerate(text.splitlines()):
        line, depth = _PREFIX.sub("", full_line, count=1) if full_line.startswith("[") else full_line, 0
        if has_margins and (divider := _DIVIDER.match(line)):
            if divider["number"]:
                chain.append(Raised("part", number, len(divider["indent"]) - (0 if divider["first"] else 2)))
                is_open = True
            continue
        if has_margins and (margin := _MARGIN.match(line)):
            depth, line = max(0, len(margin[1]) - 2), line[margin.end() :]
        frame = _FRAME.match(line)
        first_line = _MODULE.sub("", line.strip())
        if line in _LINKS:
            link, is_open = "again" if has_closed else _LINKS[line], False
        elif line == '"""' and chain and (num_quotes or chain[-1].is_remote):  # around what another process printed
            has_closed = not chain[-1].is_remote
            num_quotes += -1 if has_closed else 1
        elif not is_open and _REMOTE.match(first_line):
            chain.append(Raised(link or ("inside" if chain else ""), number, depth, first_line=first_line))
            link = ""
        elif _HEADER.match(line) or (frame and not is_open):
            if not (is_open and chain[-1].link == "part" and not chain[-1].frames):  # else its divider has begun it
                if chain and not link:
                    if not (is_one or chain[-1].is_wrapper):
                        chain = []  # another exception, which has nothing to do with it
                    link = "inside" if chain else ""
                chain.append(Raised(link, number, depth))
            link, is_open, has_closed = "", True, False
            chain[-1].frames += [frame] if frame else []
        elif is_open and frame:
            chain[-1].frames.append(frame)
        elif is_open and not line[:1].isspace() and line:
            chain[-1].first_line, is_open = first_line, False
    return chain


def _place(frames: Sequence[re.Match[str]]) -> str | None:
    """The last frame in a file that is no library's."""
    own = [frame for frame in frames if frame["function"] and not _LIBRARY.search(frame["file"])]
    return f"{own[-1]['file'].rpartition('/')[2]}:{own[-1]['line']} in {own[-1]['function']}" if own else None

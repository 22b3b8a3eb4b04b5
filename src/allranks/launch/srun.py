"""How are steps of srun started, listened to and ended, and how does a document come through their mixed output?

    commands = [step_command(2, "--overlap", verb=("stack", "--here", "7"))]
    has_all = run_steps(commands, env, take, kinds={"card": dict}, is_complete=..., first_s=60, next_s=20, ...)

One task per node answers with parcels: short lines that say whose and which part of a document they are, since srun
mixes the output of its tasks in pieces of 1 KiB, and site wrappers print banners around it.

    >>> parts = {}
    >>> [decode(found[2], dict) for line in pack("node03", "card", {}).splitlines() if (found := unpack(line, parts))]
    [{}]
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import selectors
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from allranks.host.programs import OWN_COMMAND
from allranks.model.hostlist import fold_hosts

TICK_S = 0.2
NOTICE_AFTER_S = 2.0
END_S = 5.0
"""For srun after SIGTERM, before it is killed: it waits for the end of its step."""
STEP_MINUTES = 5
"""SLURM ends a step itself after this time, if this process is killed."""
LEASE_S = 60.0
"""What runs in a step for long ends itself after so much silence of the process that started it (`follow_steps`)."""
LINE_BYTES = 600
MARK = "%allranks-parcel"
_LINE = re.compile(rf"{MARK} (\S{{1,300}}) ([a-z]{{1,16}}) (\d{{1,7}})/(\d{{1,7}}) ([A-Za-z0-9+/=]+)%")


def run_steps(
    commands: Iterable[Sequence[str]],
    env: Mapping[str, str],
    take: Callable[[str, Any], object],
    *,
    kinds: Mapping[str, Any],
    words: list[str],
    is_complete: Callable[[], bool],
    on_wait: Callable[[float], None],
    first_s: float,
    next_s: float,
    check_signals: Callable[[], None] = lambda: None,
) -> bool:
    """Start steps, one per command, and hand on documents until they are complete or the steps have ended.

    None of the steps runs any more when this returns or raises.

    Args:
        take: gets sender and document; one that is not of its kind's type (ValueError) does not count.
        kinds: type of the documents of each kind.
        words: gets the lines of standard error: srun's words, and the site's.
        on_wait: called after 2 s, 4 s, 8 s ..., with the seconds.
        first_s: how long to wait for the first document.
        next_s: how long to wait for each further one.
        check_signals: raises StoppedBySignal when somebody told this process to stop.
    Returns:
        False if no document came for too long.
    """
    began_s = time.monotonic()
    end_s, notice_s = began_s + first_s, NOTICE_AFTER_S
    with contextlib.closing(follow_steps(commands, env, kinds=kinds, words=words)) as documents:
        for document in documents:
            check_signals()
            now_s = time.monotonic()
            if document is not None:
                with contextlib.suppress(ValueError):
                    take(*document)
                    end_s = now_s + next_s
            if is_complete():
                return True
            if now_s > end_s:
                return False
            if now_s > began_s + notice_s:
                notice_s *= 2
                on_wait(now_s - began_s)
    return True


def follow_steps(
    commands: Iterable[Sequence[str]],
    env: Mapping[str, str],
    *,
    kinds: Mapping[str, Any],
    words: list[str],
    is_leased: bool = False,
) -> Generator[tuple[str, Any] | None]:
    """Start steps, one per command, and yield sender and document as they come, and None at least each TICK_S.

    It ends when all steps have closed their streams. Once it is closed, none of them runs any more.

    Args:
        kinds: type of the documents of each kind; one of another type, from another version of allranks, is left out.
        words: gets the lines of standard error: srun's words, and the site's.
        is_leased: write a line into the steps' standard input some times per LEASE_S, as long as this is asked for
            more. Tasks read them: SLURM does not end a step whose srun was killed.
    """
    rest, parts, lease_s = dict[int, bytes](), dict[tuple[str, str], dict[int, str]](), 0.0
    with _start(commands, env, is_leased=is_leased) as (selector, inputs):
        while True:
            yield None
            if not selector.get_map():  # without streams, nothing more can come
                return
            if (now_s := time.monotonic()) > lease_s:
                lease_s = now_s + LEASE_S / 6
                for fd in inputs:
                    with contextlib.suppress(OSError):  # srun has ended, or does not read
                        os.write(fd, b".\n")
            for line, is_aside in _read_lines(selector, rest):
                if is_aside:
                    words.append(line)
                elif (parcel := unpack(line, parts)) and parcel[1] in kinds:
                    sender, kind, text = parcel
                    with contextlib.suppress(ValueError):
                        document = decode(text, kinds[kind])
                        yield sender, document


@contextlib.contextmanager
def _start(
    commands: Iterable[Sequence[str]], env: Mapping[str, str], *, is_leased: bool
) -> Iterator[tuple[selectors.BaseSelector, list[int]]]:
    """Start processes, and end those that still run when the block is left.

    The selector has their output, the list descriptors of their input, if they are leased.
    """
    with contextlib.ExitStack() as left, selectors.DefaultSelector() as selector:
        inputs = list[int]()
        for command in commands:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE if is_leased else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches us, and we end it in order
            )
            left.enter_context(process)
            left.callback(end_srun, process, own_s=0.0 if is_leased else 0.5)  # else all is said: it ends by itself
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                inputs.append(process.stdin.fileno())
            for stream, is_aside in ((process.stdout, False), (process.stderr, True)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, is_aside)
        yield selector, inputs


def _read_lines(selector: selectors.BaseSelector, rest: dict[int, bytes]) -> Iterator[tuple[str, bool]]:
    """Yield the lines that are complete, or become so within TICK_S, and whether each is of standard error."""
    for key, _ in selector.select(TICK_S):
        data = os.read(key.fd, 1 << 16)
        if not data:
            selector.unregister(key.fileobj)
        *lines, rest[key.fd] = (rest.get(key.fd, b"") + (data or b"\n")).split(b"\n")
        yield from ((line.decode(errors="replace"), key.data) for line in lines)


def step_command(num_nodes: int, *options: str, verb: Sequence[str], is_leased: bool = False) -> list[str]:
    """Return the command that starts `allranks VERB...` once on each node of a step.

    Args:
        options: of srun, beyond those of every step.
        is_leased: it reads its standard input, and ends itself (`follow_steps`): no time limit but the job's.
    """
    limits = ["--time=0"] if is_leased else ["--input=none", f"--time={STEP_MINUTES}"]
    return [
        *("srun", *options, f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"),
        *("--mpi=none", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0", *limits),
        *OWN_COMMAND,
        *verb,
    ]


def step_env(env: Mapping[str, str], *, kept: Collection[str] = ("SLURM_CONF",)) -> dict[str, str]:
    """Return the environment for srun: variables of an outer job or step would be options for it."""
    return {name: value for name, value in env.items() if not name.startswith("SLURM_") or name in kept}


def describe_missing(late: Sequence[str], num_nodes: int, waited_s: float) -> str:
    """Return the line about nodes that have not answered yet."""
    answered = f"{num_nodes - len(late)} of {num_nodes} nodes have answered"
    return f"still waiting for {fold_hosts(late)} after {waited_s:.0f} s; {answered}"


def words_of(lines: Iterable[str]) -> str:
    """Return what SLURM said, on one line, without who says it and without our own members' lines."""
    said = [re.sub(r"^(srun|squeue|slurmstepd[\w.-]*|slurm_\w+)(:? error)?: (error: )?", "", line) for line in lines]
    kept = [line for raw in said if (line := raw.strip()) and not re.match("allranks: |.*lacks support", line)]
    return "".join(c if c.isprintable() else " " for c in "; ".join(dict.fromkeys(kept))[:300])


def end_srun(process: subprocess.Popen[bytes], *, own_s: float = 0.0) -> None:
    """End srun, which passes SIGTERM on to its step, and gives up a place in the queue.

    Args:
        own_s: how long it may take to end by itself.
    """
    for end, wait_s in ((process.poll, own_s), (process.terminate, END_S), (process.kill, 1.0)):
        if process.poll() is None:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)


def encode(document: Any) -> str:
    """Return a document as a short text without blanks, also for an environment variable."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(document))).decode()


def decode(text: str, kind: Any) -> Any:
    """Read what `encode` wrote.

    Raises:
        ValueError: it is not of this kind, for example from another version of allranks.
    """
    try:
        return msgspec.json.decode(zlib.decompress(base64.b64decode(text)), type=kind)
    except (msgspec.DecodeError, zlib.error) as exc:
        raise ValueError(str(exc)) from exc


def send(sender: str, kind: str, document: Any = None) -> None:
    """Print a document for the process that started the step."""
    print(pack(sender, kind, document), end="", flush=True)


def pack(sender: str, kind: str, document: Any = None) -> str:
    """Return the lines that carry a document.

    Args:
        sender: whose it is, without blanks.
        kind: small letters; a sender's second document of a kind replaces the first.
    """
    text = encode(document)
    parts = [text[start : start + LINE_BYTES] for start in range(0, len(text), LINE_BYTES)]
    return "".join(f"{MARK} {sender} {kind} {n}/{len(parts)} {part}%\n" for n, part in enumerate(parts, start=1))


def unpack(line: str, parts: dict[tuple[str, str], dict[int, str]]) -> tuple[str, str, str] | None:
    """Return sender, kind and encoded text of the document that a line completes; lines come in any order.

    Args:
        parts: of the documents that are not complete, by sender and kind.
    """
    if (found := _LINE.search(line)) is None:
        return None
    sender, kind, number, count, part = found.groups()
    known = parts.setdefault((sender, kind), {})
    known[int(number)] = part
    if len(known) < int(count):
        return None
    return sender, kind, "".join(part for _, part in sorted(parts.pop((sender, kind)).items()))

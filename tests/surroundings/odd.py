"""Odd workers: each function is what rank 1 does while rank 0 writes nothing and ends well, and what must come of it.

@odd(LIVES)             the job must succeed
@odd(fails("TEXT"))     rank 1 must be named, with this pattern in the finding
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from . import rank
from .judge import Expect, Fall, judge
from .stage import Situation, Stage

LIVES = Expect()
EITHER = Expect(may_fail=True)
ODD: dict[str, tuple[Callable[[], object], Expect]] = {}
EXITS = "exit code 1"


def fails(words: str = "", **more: object) -> Expect:
    """Rank 1 is named, and this pattern is in the finding."""
    return Expect(rank=1, words=words, **more)  # type: ignore[arg-type]


def odd(expect: Expect) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Add the function to the table."""

    def add(function: Callable[[], object]) -> Callable[[], object]:
        ODD[function.__name__] = (function, expect)
        return function

    return add


def act() -> None:
    """Be one of the ranks; a function that returns leads to a good end."""
    if rank.RANK == 1:
        ODD[os.environ["SURROUNDINGS_ODD"]][0]()
    else:
        time.sleep(1)


# Files that a worker leaves for its agent.


def _error_file() -> Path:
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    path.unlink(missing_ok=True)
    return path


def _quit() -> None:
    print("last words of rank 1", file=sys.stderr, flush=True)
    os._exit(1)


def _leaves_error_json(name: str, make: Callable[[Path], object]) -> None:
    def leave() -> None:
        make(_error_file())
        _quit()

    ODD[f"error_json_{name}"] = (leave, fails())


_TRACE = {"message": {"message": "m", "extraInfo": {"py_callstack": "t", "timestamp": "1"}}}
for _name, _make in {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "tty": lambda path: path.symlink_to("/dev/tty"),
    "itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: os.mknod(path, 0o20644, os.makedev(1, 5)),
    "directory": Path.mkdir,
    "list": lambda path: path.write_text(json.dumps({"message": {"message": [1], "extraInfo": ["x"]}})),
    "number": lambda path: path.write_text("1.5"),
    "deep": lambda path: path.write_text("[" * 200_000),
    "deep_extra": lambda path: path.write_text('{"message": {"extraInfo": ' + '{"a": ' * 100_000),
    "huge": lambda path: path.write_text(json.dumps({"message": "x" * (100 << 20)})),
    "sparse": lambda path: path.touch() or os.truncate(path, 1 << 40),
    "junk": lambda path: path.write_bytes(random.Random(1).randbytes(100_000)),
    "empty": Path.touch,
    "utf16": lambda path: path.write_text(json.dumps(_TRACE), encoding="utf-16"),
    "escapes": lambda path: path.write_text(json.dumps({"message": {"message": "\x1b]0;title\x07\x1b[2J"}})),
}.items():
    _leaves_error_json(_name, _make)


# The memory that a worker shares with its agent.


def _cell() -> int:
    return int(os.environ["ALLRANKS_CELL_FD"])


@odd(LIVES)
def shrinks_its_cell() -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(_cell(), 0)
    time.sleep(1)
    os._exit(_after_note())


def _after_note() -> int:
    rank.note("done")
    return 0


@odd(LIVES)
def fills_its_cell_with_junk() -> None:
    for seed in range(50):
        os.pwrite(_cell(), random.Random(seed).randbytes(65536), 384 if seed % 2 else 0)
        time.sleep(0.02)


@odd(LIVES)
def closes_its_cell() -> None:
    os.close(_cell())
    time.sleep(0.5)


# Processes and signals.


@odd(LIVES)
def double_forks() -> None:
    if os.fork() == 0:
        if os.fork() == 0:
            print("the daemon begins", flush=True)
            time.sleep(1)
            print("the daemon ends", flush=True)
        os._exit(0)
    time.sleep(0.2)


@odd(LIVES)
def leaves_a_daemon_that_ignores_sigterm() -> None:
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 300"], start_new_session=True)


@odd(LIVES)
def prints_from_a_grandchild_after_its_end() -> None:
    subprocess.Popen(["sh", "-c", "for i in 1 2 3 4 5; do echo late $i; sleep 0.1; done"])


@odd(LIVES)
def stops_itself_for_a_while() -> None:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(2)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


@odd(LIVES)
def has_its_own_session() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(1)
        os._exit(0)
    os.wait()


@odd(fails("exit code 7"))
def fails_beside_one_that_ignores_sigterm() -> None:
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 300"])
    time.sleep(0.3)
    os._exit(7)


@odd(fails("exit code 255"))
def exits_with_255() -> None:
    os._exit(255)


@odd(fails("exit code 3"))
def raises_system_exit() -> None:
    sys.exit(3)


@odd(fails("no such option"))
def raises_system_exit_with_text() -> None:
    sys.exit("no such option")


@odd(fails("KeyboardInterrupt|SIGINT"))
def raises_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def _dies_of(name: str) -> None:
    ODD[f"dies_of_{name.lower()}"] = (lambda: os.kill(os.getpid(), getattr(signal, name)), fails(name))


for _signal in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGTERM", "SIGHUP", "SIGPIPE"):
    _dies_of(_signal)


@odd(LIVES)
def exits_with_a_thread_that_goes_on() -> None:
    threading.Thread(target=lambda: [time.sleep(0.2) or print("in a thread", flush=True) for _ in range(5)]).start()


@odd(fails("exit code 4"))
def exits_from_a_thread() -> None:
    threading.Thread(target=partial(os._exit, 4)).start()
    time.sleep(5)


@odd(LIVES)
def becomes_another_program() -> None:
    rank.note("done")
    os.execv("/bin/true", ["true"])


@odd(fails(EXITS))
def becomes_a_program_that_fails() -> None:
    os.execv("/bin/false", ["false"])


@odd(LIVES)
def has_many_children() -> None:
    children = [subprocess.Popen(["sleep", "0.5"]) for _ in range(150)]
    for child in children:
        child.wait()


@odd(LIVES)
def has_many_threads() -> None:
    threads = [threading.Thread(target=time.sleep, args=(0.5,)) for _ in range(400)]
    for thread in threads:
        thread.start()


# Descriptors, files and directories.


@odd(LIVES)
def closes_all_descriptors() -> None:
    os.closerange(0, 1024)
    time.sleep(0.5)
    os._exit(_after_note())


@odd(fails(EXITS))
def closes_all_descriptors_and_fails() -> None:
    os.closerange(0, 1024)
    os._exit(1)


@odd(LIVES)
def closes_stdout_and_stderr() -> None:
    os.close(1)
    os.close(2)
    time.sleep(0.3)
    os._exit(_after_note())


@odd(LIVES)
def writes_to_stdin() -> None:
    with contextlib.suppress(OSError):
        os.write(0, b"to stdin\n")


@odd(EITHER)
def prints_to_dev_full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    print("x", flush=True)


@odd(LIVES)
def works_in_a_directory_that_is_gone() -> None:
    folder = rank.SCRATCH / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    time.sleep(0.5)


@odd(fails("ValueError: in a directory"))
def fails_in_a_directory_that_is_gone() -> None:
    works_in_a_directory_that_is_gone()
    raise ValueError("in a directory that is gone")


def _own_directory() -> Path:
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent


@odd(Expect(needs_file=False))
def deletes_its_nodes_directory() -> None:
    shutil.rmtree(_own_directory())
    time.sleep(0.5)


@odd(fails("ValueError: after", needs_file=False))
def deletes_its_nodes_directory_and_fails() -> None:
    shutil.rmtree(_own_directory())
    raise ValueError("after it has deleted its directory")


@odd(Expect(needs_file=False))
def deletes_the_run_directory() -> None:
    shutil.rmtree(_own_directory().parents[1])
    time.sleep(0.5)


@odd(fails("ValueError: after", needs_file=False))
def deletes_the_run_directory_and_fails() -> None:
    shutil.rmtree(_own_directory().parents[1])
    raise ValueError("after it has deleted the run directory")


@odd(LIVES)
def renames_the_attempt() -> None:
    attempt = _own_directory().parent
    attempt.rename(attempt.with_name("elsewhere"))
    time.sleep(0.3)
    attempt.with_name("elsewhere").rename(attempt)


@odd(LIVES)
def forbids_its_files() -> None:
    for path in [*_own_directory().iterdir(), _own_directory()]:
        path.chmod(0)
    time.sleep(0.3)


@odd(fails("ValueError: after"))
def gives_its_files_away_and_fails() -> None:
    for path in [*_own_directory().iterdir(), _own_directory()]:
        os.chown(path, 65534, 65534)
    raise ValueError("after it has given its files away")


@odd(Expect(needs_file=False))
def puts_links_for_the_verdict() -> None:
    victim = rank.SCRATCH / "victim"
    for path in (_own_directory() / "verdict.json", _own_directory().parent / "verdict.json"):
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
    time.sleep(0.3)


@odd(Expect(needs_file=False))
def puts_a_fifo_for_the_events() -> None:
    events = _own_directory().parent / "events.jsonl"
    events.unlink()
    os.mkfifo(events)
    time.sleep(0.5)


@odd(LIVES)
def becomes_another_user() -> None:
    notes = rank.SCRATCH / "notes"
    notes.chmod(0o777)
    for path in notes.iterdir():
        path.chmod(0o666)
    os.setuid(65534)
    print("as nobody", flush=True)
    time.sleep(0.3)


@odd(LIVES)
def prints_with_carriage_returns() -> None:
    for number in range(300):
        print(f"\r{number}/300", end="", flush=True)
    print("\r\n\r\r\n", end="", flush=True)


# Exceptions.


@odd(fails("__str__|Strange"))
def raises_what_cannot_be_shown() -> None:
    class Strange(Exception):
        def __str__(self) -> str:
            raise RuntimeError("in __str__")

    raise Strange


@odd(fails("ValueError: x"))
def raises_with_escape_sequences() -> None:
    raise ValueError("x\x1b[2J\x1b]0;title\x07\udc80\x00 end")


@odd(fails("RecursionError"))
def recurses() -> None:
    recurses()


@odd(fails("ExceptionGroup"))
def raises_a_group() -> None:
    raise ExceptionGroup("many", [ValueError("first"), OSError(5, "second")])


@odd(fails("MemoryError"))
def has_no_memory() -> None:
    bytearray(1 << 60)


@odd(fails("Errno 122|Disk quota exceeded", causes=("AR005",)))
def raises_edquot() -> None:
    raise OSError(122, "Disk quota exceeded", "/home/ada/model.pt")


@odd(fails("File too large|SIGXFSZ"))
def has_a_limit_of_file_sizes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    (rank.SCRATCH / "large").write_bytes(bytes(2 << 20))


@odd(fails("Too many open files"))
def has_no_descriptors_left() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = [(rank.SCRATCH / "notes").open() if False else os.open("/dev/null", 0) for _ in range(200)]
    del files


@odd(fails("exit code 9"))
def fails_at_exit() -> None:
    import atexit

    atexit.register(os._exit, 9)


@odd(fails(EXITS))
def has_an_excepthook_that_fails() -> None:
    sys.excepthook = lambda *_: os._exit(1)
    raise ValueError("never shown")


@odd(LIVES)
def clears_its_environment() -> None:
    os.environ.clear()
    time.sleep(0.3)


@odd(LIVES)
def has_another_name() -> None:
    ctypes.CDLL(None).prctl(15, b"a) S 1 \n(b", 0, 0, 0)
    time.sleep(0.5)


@odd(LIVES)
def locks_its_output() -> None:
    fcntl.lockf(1, fcntl.LOCK_EX)
    fcntl.flock(2, fcntl.LOCK_EX)
    time.sleep(0.3)


@odd(LIVES)
def shortens_its_output() -> None:
    for number in range(20):
        print(f"line {number}", flush=True)
        os.ftruncate(1, 0)
        time.sleep(0.02)


def play_odd(stage: Stage, *, name: str) -> tuple[list[Fall], float]:
    """Let rank 1 be odd."""
    victim = stage.scratch / "victim"
    victim.write_text("of somebody else")
    stage.env["SURROUNDINGS_ODD"] = name
    job = stage.start("odd:act")
    facts = stage.end(job)
    if victim.read_text() != "of somebody else":
        stage.signals.append("a file behind a link was written")
    return judge(facts, ODD[name][1]), job.peak_mb


def situations() -> Iterator[Situation]:
    """One for each odd worker."""
    for name, (_, expect) in ODD.items():
        must = "ends well" if expect.may_fail else f"rank 1 is named, {expect.words}" if expect.rank else "job succeeds"
        yield Situation(name=f"odd/{name}", expected=must, play=partial(play_odd, name=name))

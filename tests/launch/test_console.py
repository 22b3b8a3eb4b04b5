"""What the terminal shows of the workers' files, byte for byte."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.launch import console as console_module
from allranks.launch import followed
from allranks.launch.console import Console


class Terminal:
    """Two files in place of the terminal's streams, so that nothing ever blocks."""

    def __init__(self, directory: Path) -> None:
        self._paths = {stream: directory / f"screen.{stream}" for stream in ("out", "err")}
        self._fds = {
            stream: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for stream, path in self._paths.items()
        }
        self.console = Console(out_fd=self._fds["out"], err_fd=self._fds["err"])

    @property
    def out(self) -> bytes:
        return self._shown("out")

    @property
    def err(self) -> bytes:
        return self._shown("err")

    def _shown(self, stream: str) -> bytes:
        assert self.console.screen[stream].drain(patience_s=30)
        return self._paths[stream].read_bytes()

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.close()


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars are never due."""
    monkeypatch.setattr(followed, "REDRAW_S", float("inf"))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars are always due."""
    monkeypatch.setattr(followed, "REDRAW_S", 0.0)


class Log:
    """A worker's output file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "rank 3.out")


PREFIX = "[node02 r3] "


def shown(terminal: Terminal, log: Log, data: bytes, *, prefix: str = PREFIX) -> bytes:
    terminal.console.follow(log.path, start=0, stream="out", prefix=prefix)
    log.write(data)
    terminal.console.pump()
    terminal.console.close()
    return terminal.out


def test_every_line_has_its_prefix(terminal, log):
    assert shown(terminal, log, b"one\n\ntwo\n") == b"[node02 r3] one\n[node02 r3] \n[node02 r3] two\n"


def test_an_unfinished_line_waits_for_its_end(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    log.write(b"loss 0.")
    assert terminal.console.pump()
    assert terminal.out == b""
    log.write(b"25\nstep")
    terminal.console.pump()
    assert terminal.out == b"[node02 r3] loss 0.25\n"
    terminal.console.close()
    assert terminal.out == b"[node02 r3] loss 0.25\n[node02 r3] step\n"


def test_a_pump_says_whether_there_was_anything(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    assert not terminal.console.pump()
    log.write(b"one\n")
    assert terminal.console.pump()
    assert not terminal.console.pump()
    terminal.console.close()


def test_a_worker_alone_is_shown_as_it_is(terminal, log):
    data = b"\rloss 0.5\rloss 0.4\x1b[31m\xff\xfe no newline"
    assert shown(terminal, log, data, prefix="") == data


def test_a_worker_alone_is_shown_before_its_line_ends(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix="")
    log.write(b"Password: ")
    terminal.console.pump()
    assert terminal.out == b"Password: "
    terminal.console.close()


@pytest.mark.parametrize(
    "line",
    [
        b"caf\xe9",
        b"\xff\xfe\x00\x01",
        b"\xe2\x82",
        "\u2713 \u65e5\u672c\u8a9e".encode(),
        b"\x1b[1mbold\x1b[0m",
        b"tab\there",
    ],
)
def test_bytes_of_a_line_are_not_changed(terminal, log, line):
    assert shown(terminal, log, line + b"\n") == b"[node02 r3] " + line + b"\n"


def test_lines_of_windows_end_where_they_end(terminal, log):
    assert shown(terminal, log, b"one\r\ntwo\r\n") == b"[node02 r3] one\n[node02 r3] two\n"


@pytest.mark.usefixtures("calm")
def test_a_finished_progress_bar_is_its_last_state(terminal, log):
    assert shown(terminal, log, b"\r 10%|#  |\r 50%|## |\r100%|###|\ndone\n") == (
        b"[node02 r3] 100%|###|\n[node02 r3] done\n"
    )


@pytest.mark.usefixtures("calm")
def test_a_progress_bar_that_is_not_due_is_not_shown_before_the_end(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    for percent in (10, 20, 30):
        log.write(b"\r%d%%" % percent)
        terminal.console.pump()
    assert terminal.out == b""
    terminal.console.close()
    assert terminal.out == b"[node02 r3] 30%\n"


@pytest.mark.usefixtures("eager")
def test_a_progress_bar_becomes_a_line_when_it_is_due(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    log.write(b"\r10%")
    terminal.console.pump()
    assert terminal.out == b""  # 10% may still grow; what stands before the last carriage return is complete
    log.write(b"\r20%\r30%")
    terminal.console.pump()
    assert terminal.out == b"[node02 r3] 20%\n"
    log.write(b"\r100%\n")
    terminal.console.pump()
    assert terminal.out == b"[node02 r3] 20%\n[node02 r3] 100%\n"
    terminal.console.close()
    assert terminal.out == b"[node02 r3] 20%\n[node02 r3] 100%\n"


def test_a_very_long_line_loses_nothing(terminal, log):
    line = bytes(65 + index % 26 for index in range(1_000_000))
    pieces = shown(terminal, log, line + b"\nnext\n").split(b"\n")
    assert all(piece.startswith(b"[node02 r3] ") for piece in pieces[:-1])
    assert b"".join(piece.removeprefix(b"[node02 r3] ") for piece in pieces) == line + b"next"
    assert pieces[-2:] == [b"[node02 r3] next", b""]


def test_a_very_long_line_is_shown_before_it_ends(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    log.write(b"x" * 65537)
    terminal.console.pump()
    assert terminal.out == b"[node02 r3] " + b"x" * 65536 + b"\n"
    terminal.console.close()
    assert terminal.out == b"[node02 r3] " + b"x" * 65536 + b"\n[node02 r3] x\n"


def test_what_an_earlier_attempt_wrote_is_not_shown(terminal, log):
    log.write(b"attempt 0\n")
    terminal.console.follow(log.path, start=10, stream="out", prefix=PREFIX)
    log.write(b"attempt 1\n")
    terminal.console.close()
    assert terminal.out == b"[node02 r3] attempt 1\n"


def test_streams_go_where_they_belong(terminal, log, tmp_path):
    errors = Log(tmp_path / "rank 3.err")
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    terminal.console.follow(errors.path, start=0, stream="err", prefix=PREFIX)
    log.write(b"loss\n")
    errors.write(b"warning\n")
    terminal.console.close()
    assert (terminal.out, terminal.err) == (b"[node02 r3] loss\n", b"[node02 r3] warning\n")


def test_a_muted_stream_is_silent_and_the_other_goes_on(terminal, log, tmp_path):
    errors = Log(tmp_path / "rank 3.err")
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    terminal.console.follow(errors.path, start=0, stream="err", prefix=PREFIX)
    log.write(b"before\n")
    terminal.console.pump()
    terminal.console.mute("out")
    log.write(b"after\n")
    errors.write(b"warning\n")
    terminal.console.close()
    assert (terminal.out, terminal.err) == (b"[node02 r3] before\n", b"[node02 r3] warning\n")


def test_lines_of_several_workers_stay_whole(terminal, tmp_path):
    logs = [Log(tmp_path / f"rank_{rank}.out") for rank in range(3)]
    for rank, log in enumerate(logs):
        terminal.console.follow(log.path, start=0, stream="out", prefix=f"[n r{rank}] ")
    for half in (b"first half, ", b"second half\n"):
        for log in logs:
            log.write(half)
        terminal.console.pump()
    terminal.console.close()
    assert terminal.out == (
        b"[n r0] first half, second half\n[n r1] first half, second half\n[n r2] first half, second half\n"
    )


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_a_reader_that_has_left_ends_the_display_not_the_job(log, prefix):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        console = Console(out_fd=writer, err_fd=writer)
        console.follow(log.path, start=0, stream="out", prefix=prefix)
        log.write(b"one\n")
        assert console.pump()
        log.write(b"two\n")
        assert console.pump()
        console.close()
    finally:
        os.close(writer)


def test_a_full_pipe_is_waited_for(log):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"." * 4096):
            pass
    drained = bytearray()

    try:
        console = Console(out_fd=writer, err_fd=writer)
        console.follow(log.path, start=0, stream="out", prefix=PREFIX)
        with _reading(reader, drained):
            log.write(b"one\n")
            console.close()
    finally:
        os.close(writer)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(reader, 1 << 16):
            drained += data
    os.close(reader)
    assert drained.lstrip(b".") == b"[node02 r3] one\n"


@contextlib.contextmanager
def _reading(fd: int, into: bytearray) -> Iterator[None]:
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with contextlib.suppress(BlockingIOError):
                into.extend(os.read(fd, 1 << 16))
            time.sleep(0.005)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(30)


def test_torchs_line_about_names_stays_in_the_file(terminal: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "rank_0.err"
    noise = b"[W1121 03:24:25.69 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
    path.write_bytes(b"before\n" + noise + b"after\n")
    terminal.console.follow(path, start=0, stream="err", prefix="[node01 r0] ")
    terminal.console.close()
    assert terminal.err == b"[node01 r0] before\n[node01 r0] after\n"


TRACEBACK = b"[rank3]: Traceback (most recent call last):\n[rank3]: RuntimeError: Connection closed by peer\n"


def test_a_traceback_waits_for_a_verdict_that_makes_it_needless(terminal, log):
    terminal.console.follow(log.path, start=0, stream="err", prefix=PREFIX)
    log.write(b"loading\n" + TRACEBACK)
    terminal.console.pump()
    assert terminal.err == b"[node02 r3] loading\n"
    terminal.console.drop_tracebacks()
    terminal.console.close()
    assert terminal.err == b"[node02 r3] loading\n"


@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_a_traceback_behind_a_bar_waits_too(terminal, log, prefix: str):
    terminal.console.follow(log.path, start=0, stream="err", prefix=prefix)
    for written in (b"\r 10%|#", b"\r 20%|##", TRACEBACK):
        log.write(written)
    terminal.console.pump()
    terminal.console.drop_tracebacks()
    terminal.console.close()
    assert b"Traceback" not in terminal.err
    assert b"10%|#" in terminal.err if not prefix else b"20%|##" in terminal.err


def test_a_traceback_that_ends_nobody_is_shown_whole(terminal, log, monkeypatch):
    monkeypatch.setattr(console_module, "HELD_S", 0.0)
    terminal.console.follow(log.path, start=0, stream="err", prefix=PREFIX)
    log.write(TRACEBACK)
    terminal.console.pump()
    log.write(b"going on\n")
    terminal.console.pump()
    assert terminal.err == b"".join(PREFIX.encode() + line + b"\n" for line in (*TRACEBACK.splitlines(), b"going on"))


@pytest.mark.parametrize("redraws", [(b"\r10%", b"\r20%"), (b"\r", b"\r10%\r20%"), (b"\r10%\r   \r", b"\r20%")])
def test_an_empty_state_of_a_bar_does_not_delay_the_next_one(terminal, log, redraws):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    for written in redraws:
        log.write(written)
        terminal.console.pump()
    assert terminal.out == b"[node02 r3] 10%\n"
    terminal.console.close()


class Screen:
    """A terminal of 80 columns, and the files of three ranks that are shown on it."""

    def __init__(self, directory: Path) -> None:
        self._master, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._master, False)
        self.console = Console(out_fd=terminal, err_fd=terminal)
        self.logs = [Log(directory / f"rank_{rank}.err") for rank in range(3)]
        for rank, log in enumerate(self.logs):
            self.console.follow(log.path, start=0, stream="err", prefix=f"[r{rank}] ")

    def pump(self, *written: bytes) -> Screen:
        """The ranks write this, and it is looked at."""
        for log, data in zip(self.logs, written, strict=False):
            log.write(data)
        self.console.pump()
        return self

    def shows(self, expected: bytes) -> bool:
        """Whether the terminal gets exactly this since the last call, `<` for the empty begin of the line; it passes on
        what is written a moment later."""
        assert self.console.screen["err"].drain(patience_s=30)
        expected = expected.replace(b"<", b"\r\x1b[K")
        got, end_s = b"", time.monotonic() + 30
        while len(got) < len(expected) and time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                got += os.read(self._master, 1 << 16).replace(b"\r\n", b"\n")
        return got == expected


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console_module, "DRAW_S", 0.0)
    return Screen(tmp_path)


def test_bars_of_several_ranks_are_one_that_is_redrawn_in_place(screen: Screen):
    assert screen.pump(b"\r10%", b"\r10%", b"\r10%").shows(b"<[r0] 10% +2 alike")
    assert screen.pump(b"\r30%", b"\r20%", b"\r40%").shows(b"<[r1] 20% +2 ranks: 30-40%")
    assert screen.pump(b"").shows(b"")
    assert screen.pump(b"", b"", b"\r          \rnote\n\r40%").shows(b"<[r2] note\n[r1] 20% +2 ranks: 30-40%")
    screen.console.screen["err"].write(b"allranks: a line\n")
    assert screen.shows(b"<allranks: a line\n[r1] 20% +2 ranks: 30-40%")


def test_bars_that_end_are_one_line_and_what_follows_stays_below_it(screen: Screen, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console_module, "FOLD_S", 60.0)
    assert screen.pump(b"\r99%", b"\r99%", b"\r99%").shows(b"<[r0] 99% +2 alike")
    assert screen.pump(b"\r100%\ndone\n", b"\r100%\n").shows(b"<[r2] 99%")
    assert screen.pump(b"", b"", b"\r100%\n").shows(b"<[r0] 100% +2 alike\n[r0] done\n")
    screen.console.close()
    assert screen.shows(b"")


def test_a_bar_that_others_do_not_end_is_shown_soon(screen: Screen, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console_module, "FOLD_S", 0.0)
    assert screen.pump(b"\r99%", b"\r50%").shows(b"<[r1] 50% +1 rank: 99%")
    assert screen.pump(b"\r100%\n").shows(b"<[r0] 100%\n<[r1] 50%")


@pytest.mark.parametrize("end", ["close", "drop_tracebacks", "mute"])
def test_in_the_end_the_bar_is_a_line_with_its_last_state(screen: Screen, end: str):
    assert screen.pump(b"\r10%", b"\r20%").shows(b"<[r0] 10% +1 rank: 20%")
    getattr(screen.console, end)(*["err"] * (end == "mute"))
    assert screen.shows(b"<[r0] 10% +1 rank: 20%\n")
    if end != "close":
        assert screen.pump(b"\r11%").shows(b"")
        screen.console.close()
        assert screen.shows(b"")


# ---- limits


def test_of_what_follows_a_traceback_only_so_much_is_held(terminal, log, monkeypatch):
    monkeypatch.setattr(console_module, "HELD_BYTES", 1000)
    terminal.console.follow(log.path, start=0, stream="err", prefix=PREFIX)
    log.write(TRACEBACK + b"x" * 99 + b"\n" + b"y\n" * 1000 + b"z\n" * 200_000)
    while terminal.console.pump():
        pass
    assert terminal.err == b""
    num_left = terminal.console.close()
    shown, line, end = terminal.err.rpartition(b"allranks: 401 kB after a traceback are not shown; see ")
    assert shown.count(b"y\n") == (1000 - 100 - len(TRACEBACK)) // 2
    assert line
    assert end == b"rank 3.out\n"
    assert num_left == 402_000 - 2 * shown.count(b"y\n")


def test_a_hole_is_not_shown_and_what_stands_behind_it_is(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    log.write(b"begin\n")
    os.truncate(log.path, 1 << 40)
    log.write(b"behind\n")
    os.truncate(log.path, 1 << 41)
    assert terminal.console.close() == 0
    assert terminal.out.replace(b"\0", b"") == b"[node02 r3] begin\n[node02 r3] behind\n[node02 r3] \n"
    assert len(terminal.out) < 200_000
    hole = b" were never written: this hole, and later ones, are not shown\n"
    assert terminal.err == b"allranks: 1.1 TB of rank 3.out" + hole


def test_what_is_written_into_an_emptied_file_is_shown(terminal, log):
    terminal.console.follow(log.path, start=0, stream="out", prefix=PREFIX)
    log.write(b"before\n")
    terminal.console.pump()
    os.truncate(log.path, 0)
    log.write(b"new\n")
    terminal.console.pump()
    terminal.console.close()
    assert terminal.out == b"[node02 r3] before\n[node02 r3] new\n"


def test_only_so_many_lines_wait_for_the_last_states_of_other_bars(screen: Screen, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console_module, "FOLD_S", 60.0)
    monkeypatch.setattr(console_module, "MAX_WAITING", 2)
    assert screen.pump(b"\r50%", b"\r50%").shows(b"<[r0] 50% +1 alike")
    assert screen.pump(b"\r100%\na\n").shows(b"<[r1] 50%")
    assert screen.pump(b"b\n").shows(b"<[r0] 100%\n[r0] a\n[r0] b\n<[r1] 50%")


def test_files_of_ended_workers_that_nobody_reads_take_only_so_many_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr(console_module, "MAX_BEHIND", 3)
    monkeypatch.setattr(console_module, "FINISH_S", 0.0)
    reader, writer = os.pipe()
    console = Console(out_fd=writer, err_fd=writer)
    fds = Path("/proc/self/fd")
    num_before = len(list(fds.iterdir()))
    for number in range(10):
        log = Log(tmp_path / f"{number}")
        log.write(b"x" * (2 << 20))
        console.follow(log.path, start=0, stream="out", prefix="")
        console.finish()
    assert len(list(fds.iterdir())) == num_before + 3
    os.close(reader)
    os.close(writer)


def test_lines_of_allranks_that_nobody_reads_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(console_module, "FULL_BYTES", 100_000)
    reader, writer = os.pipe()
    stream = console_module.QueuedStream(writer)
    for _ in range(10_000):
        stream.write(b"x" * 100)
    assert 500_000 < stream.num_dropped < 1_000_000
    assert not stream.drain(patience_s=0.0)
    assert stream.num_dropped > 900_000 - 65_536
    os.close(reader)
    os.close(writer)

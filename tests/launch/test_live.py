"""What does a terminal show of a running job beside its output, and what does a log get?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from allranks.launch import console as console_module
from allranks.launch.console import Console
from allranks.launch.inbox import SignalInbox
from allranks.launch.live import Live, state_of
from allranks.model.job_status import JobStatus, Stuck
from allranks.report.text import Style
from conftest import allranks_command, clean_env, wait_until

PLAIN = Style(is_unicode=False, has_colour=False, width=80)
TRAINS = JobStatus(
    job="7",
    written_s=8047.0,
    started_s=0.0,
    phase="running",
    num_ranks=16,
    num_up=16,
    step=1840,
    total_steps=10_000,
    steps_per_s=5.4,
    eta_s=1511.0,
    checkpoint=1800,
    checkpoint_s=7847.0,
    num_restarts=1,
    max_restarts=3,
    wait_share=0.06,
    waits_for=5,
)
STUCK = Stuck(op="all_reduce", for_s=41.0, num_waiting=15, ranks=(3,), place="evaluate.py:88", ends_in_s=559.0)
ROW = {
    80: "> 2:14:07 - step 1,840/10,000 - 5.4 it/s - ETA 25m - waiting 6 %, most for r5",
    200: "> 2:14:07 - 16/16 ranks - step 1,840/10,000 - 5.4 it/s - ETA 25m - waiting 6 %, most for r5 - "
    "ckpt 1,800 3m ago - restarts 1/3",
}
STUCK_ROW = {
    80: "> 2:14:07 - 15/16 wait 41 s in all_reduce for r3 evaluate.py:88",
    200: "> 2:14:07 - 15/16 wait 41 s in all_reduce for r3 evaluate.py:88 - ends in 9:19 - allranks stack latest",
}


class Terminal:
    """A terminal on which a job is shown, and the output of one of its ranks."""

    def __init__(self, directory: Path, columns: int, wanted: str | None = "row") -> None:
        self.master, self.fd = os.openpty()
        self.resize(columns)
        os.set_blocking(self.master, False)
        self.console = Console(out_fd=self.fd, err_fd=self.fd)
        self.live = Live(self.console, wanted, PLAIN)  # type: ignore[arg-type]
        self._log = directory / "rank_0.err"
        self._log.touch()
        self.console.follow(self._log, start=0, stream="err", prefix="[r0] ")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def print(self, text: str) -> Terminal:
        with self._log.open("a") as file:
            file.write(text)
        self.console.pump()
        return self

    def tell(self, status: JobStatus) -> Terminal:
        self.live.tell(status)
        self.console.pump()
        return self

    def shows(self, expected: str) -> bool:
        """Whether the terminal gets exactly this since the last call, `<` for the empty begin of the line."""
        assert self.console.screen["err"].drain(patience_s=30)
        wanted, got, end_s = expected.replace("<", "\r\x1b[K").encode(), b"", time.monotonic() + 30
        while len(got) < len(wanted) and time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                got += os.read(self.master, 1 << 16).replace(b"\r\n", b"\n")
        return got == wanted


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console_module, "DRAW_S", 0.0)


@pytest.mark.parametrize("columns", [80, 200])
def test_the_row_says_what_the_job_does_below_its_output(tmp_path: Path, columns: int):
    terminal = Terminal(tmp_path, columns)
    assert terminal.print("begun\n").shows("[r0] begun\n")
    assert terminal.tell(TRAINS).shows(f"<{ROW[columns]}")
    assert terminal.tell(TRAINS).shows("")
    assert terminal.print("step 1840\nhalf a li").shows(f"<[r0] step 1840\n{ROW[columns]}")
    assert terminal.tell(msgspec.structs.replace(TRAINS, stuck=STUCK)).shows(f"<{STUCK_ROW[columns]}")
    terminal.console.close()
    assert terminal.shows(f"<[r0] half a li\n{STUCK_ROW[columns]}<")


def test_the_bar_of_the_slowest_rank_is_in_the_same_row(tmp_path: Path):
    terminal = Terminal(tmp_path, 80)
    bar = "train:  45%|####      | 45/100 [00:04, 9.9it/s]"
    short = f"> 2:14:07 - waiting 6 %  [r0] {bar}"
    assert terminal.tell(TRAINS).print(f"\r{bar}").shows(f"<{ROW[80]}<{short}")
    assert terminal.tell(msgspec.structs.replace(TRAINS, stuck=STUCK)).shows(f"<{STUCK_ROW[80]}")
    terminal.live.tell(TRAINS)
    terminal.console.close()
    assert terminal.shows(f"<[r0] {bar}\n<{ROW[80]}<")


def test_a_row_fits_a_terminal_that_has_become_narrower(tmp_path: Path):
    terminal = Terminal(tmp_path, 200)
    assert terminal.tell(TRAINS).shows(f"<{ROW[200]}")
    terminal.resize(45)
    terminal.console.pump()
    assert terminal.shows("<> 2:14:07 - step 1,840/10,000 - ETA 25m")
    terminal.resize(1000)
    assert terminal.console.screen["err"].columns == 200


def test_lines_and_the_row_below_them_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    terminal, written, write = Terminal(tmp_path, 80), list[bytes](), os.write

    def note(fd: int, data: bytes) -> int:
        written.append(data)
        return write(fd, data)

    assert terminal.tell(TRAINS).shows(f"<{ROW[80]}")
    monkeypatch.setattr(os, "write", note)
    terminal.print("one\ntwo\n")
    assert terminal.console.screen["err"].drain(patience_s=30)
    assert written == [f"\r\x1b[K[r0] one\n[r0] two\n{ROW[80]}".encode()]


@pytest.mark.parametrize("wanted", ["off", "plain"])
def test_without_a_row_a_terminal_shows_bars_alone(tmp_path: Path, wanted: str):
    terminal = Terminal(tmp_path, 80, wanted)
    assert terminal.tell(TRAINS).print("\r45%").shows("<[r0] 45%")


def test_what_a_shell_prints_after_a_stop_does_not_stand_behind_the_row(tmp_path: Path):
    terminal = Terminal(tmp_path, 80)
    assert terminal.tell(TRAINS).shows(f"<{ROW[80]}")
    terminal.console.leave_line()
    assert terminal.shows("<")
    assert terminal.print("on\n").shows(f"[r0] on\n{ROW[80]}")
    terminal.console.clear_row()
    assert terminal.shows("<")
    assert terminal.print("on\n").shows(f"[r0] on\n<{ROW[80]}")


def test_a_stop_from_the_terminal_is_no_signal_to_the_job():
    handler, wakeup = signal.getsignal(signal.SIGTSTP), signal.set_wakeup_fd(-1)
    before = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    try:
        inbox = SignalInbox()
        signal.signal(signal.SIGTSTP, lambda *_: None)
        os.kill(os.getpid(), signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert inbox.take() == bytes([signal.SIGUSR2])
    finally:
        signal.set_wakeup_fd(wakeup)
        for signum, old in before.items():
            with contextlib.suppress(OSError, TypeError):
                signal.signal(signum, old)
        signal.signal(signal.SIGTSTP, handler)


@pytest.mark.parametrize(
    ("target", "wanted", "shows"),
    [
        ("terminal", None, "row"),
        ("terminal", "plain", "plain"),
        ("terminal", "off", "off"),
        ("dumb", None, "plain"),
        ("dumb", "row", "plain"),
        ("file", None, "plain"),
        ("file", "row", "plain"),
        ("tee", None, "plain"),
        ("tee", "row", "row"),
    ],
)
def test_only_a_terminal_of_its_own_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, wanted: str | None, shows: str
):
    if target == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    fd = os.openpty()[1] if target != "file" else os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    monkeypatch.setattr("allranks.launch.live._is_pipe", lambda _: target == "tee")  # what pytest has is a file
    assert Live(Console(out_fd=fd, err_fd=fd), wanted, PLAIN).shows == shows  # type: ignore[arg-type]


def test_a_log_gets_a_line_when_something_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    live = Live(Console(out_fd=fd, err_fd=fd), None, PLAIN)
    live.tell(JobStatus(job="7", written_s=12.0, started_s=0.0, phase="running", num_ranks=2, num_up=2))
    live.turn(0.0)
    live.begin(0.0)
    for now_s in range(80):
        live.turn(float(now_s))
    live.hear(80.0)
    live.tell(msgspec.structs.replace(TRAINS, stuck=STUCK))
    for now_s in range(80, 240):
        live.turn(float(now_s))
    assert capsys.readouterr().err.splitlines() == [
        *["allranks: 0:00:12 - 2/2 ranks - no output yet"] * 3,
        f"allranks: {STUCK_ROW[200][2:]}",
        f"allranks: {STUCK_ROW[200][2:]} - no output for 1m",
    ][:4]  # fmt: skip


def test_what_only_time_changes_is_no_news():
    later = msgspec.structs.replace(TRAINS, written_s=9000.0, eta_s=1.0, steps_per_s=1.0, wait_share=0.5)
    assert state_of(later) == state_of(TRAINS)
    hangs = msgspec.structs.replace(TRAINS, stuck=STUCK)
    assert state_of(msgspec.structs.replace(hangs, stuck=msgspec.structs.replace(STUCK, for_s=99.0))) == state_of(hangs)
    assert len({state_of(status) for status in (TRAINS, hangs, msgspec.structs.replace(TRAINS, step=1841))}) == 3


TRAIN = """
import os, time
for number in range(4000):  # until it is ended
    time.sleep(0.05)
    if number % 4 == 0:
        print(f"line {number} of rank {os.environ['RANK']}", flush=True)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.tmux("kill-server")


class Shell:
    """A shell in a real terminal of 80 columns."""

    def __init__(self, directory: Path) -> None:
        self._tmux = ["tmux", "-S", str(directory / "tmux"), "-f", "/dev/null"]
        self._env = clean_env(os.environ, LC_ALL="C.UTF-8")
        prompt = "env PS1='$ ' TERM=screen bash --norc --noprofile -i"
        self.tmux("new-session", "-d", "-x", "80", "-y", "30", "-c", str(directory), prompt)
        wait_until(lambda: self.lines[-1:] == ["$"], "prompt")

    def tmux(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], env=self._env, capture_output=True, text=True, timeout=30)
        return done.stdout

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    @property
    def lines(self) -> list[str]:
        """What it shows and has shown."""
        return [line.rstrip() for line in self.tmux("capture-pane", "-p", "-J", "-S", "-").splitlines() if line.strip()]

    @property
    def of_ranks(self) -> list[str]:
        """The lines in which a rank's output is."""
        return [line for line in self.lines if " of rank " in line]


@pytest.mark.program("tmux", "tmux")
def test_no_line_is_torn_by_ctrl_z_fg_and_ctrl_c(shell: Shell, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    command = allranks_command("run", "--ignore", "AR011", "--master-port", "0", "--nproc-per-node", "2", "train.py")
    shell.type(" ".join(command), "Enter")
    wait_until(
        lambda: len(shell.of_ranks) >= 4 and re.fullmatch(r"▸ 0:\d\d:\d\d · (2/)?2 ranks", shell.lines[-1]), "row"
    )
    shell.type("C-z")
    wait_until(lambda: shell.lines[-1] == "$", "stopped")
    assert "Stopped" in shell.lines[-2]
    shell.type("bg", "Enter")
    num_lines = len(shell.of_ranks)
    wait_until(lambda: len(shell.of_ranks) >= num_lines + 4, "lines in the background")
    assert not [line for line in shell.lines if "▸" in line]
    shell.type("fg", "Enter")
    num_lines = len(shell.of_ranks)
    wait_until(lambda: len(shell.of_ranks) >= num_lines + 4 and shell.lines[-1].startswith("▸ 0:0"), "row again")
    shell.type("C-c")
    wait_until(lambda: shell.lines[-1] == "$", "end")
    *shown, end, _ = shell.lines
    assert end.startswith("allranks: SIGINT after ")
    assert not [line for line in shown if "▸" in line or "SIGTSTP" in line]
    of_ranks = r"(\$ .*)?\[\S+ r([01])\] line \d+ of rank \2"  # in the background, also behind the shell's prompt
    assert [line for line in shell.of_ranks if not re.fullmatch(of_ranks, line)] == []

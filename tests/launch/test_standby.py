"""Is a worker that came out of a standby what a fresh start would be, but faster?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import allranks
from allranks.guard.inside.cell import Cell
from allranks.launch.standby import END_S, Standby
from conftest import Allranks, clean_env

pytestmark = pytest.mark.torch
SITE = Path(allranks.__file__).parent / "join" / "site"
LATER = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "1", "WEIRD": "a=b\nc\udcff"}


def base_env(**more: str) -> dict[str, str]:
    ours = {"PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1", "ALLRANKS_AGENT_PID": str(os.getpid())}
    return clean_env(os.environ, **ours) | more


@contextlib.contextmanager
def standby(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Standby]:
    made = Standby.start(command, env)
    try:
        yield made
    finally:
        if made.is_alive:
            made.end()


def wait_ready(made: Standby) -> None:
    deadline_s = time.monotonic() + 60
    while not made.is_ready:
        assert made.is_alive
        assert time.monotonic() < deadline_s, "waited 60 s for the standby's imports"
        time.sleep(0.02)


def become(made: Standby, tmp_path: Path, env: Mapping[str, str], **fds: int) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with (tmp_path / "out").open("ab") as out, (tmp_path / "err").open("ab") as err:
        made.become(env, out=out.fileno(), err=err.fileno(), fds=fds)
    code = made.process.wait(60)
    return code, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def fresh(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str, str]:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


SHOW = """
    import atexit, json, multiprocessing, os, pickle, sys, warnings

    class Point:
        def __init__(self, x): self.x = x

    def square(x):
        return x * x

    if __name__ == "__main__":
        main = sys.modules["__main__"]
        print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
        print(sys.argv, sys.orig_argv[1:], sys.path, sys.flags, main.square is square, os.getcwd())
        print(json.dumps({k: v for k, v in sorted(os.environ.items()) if k != "ALLRANKS_CELL_FD"}))
        print(pickle.loads(pickle.dumps(Point(4))).x, Point.__module__)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(square, [1, 2, 3]))
        print(sys.stdout.encoding, sys.stdout.line_buffering, sys.stdin.fileno())
        print(os.nice(0), sorted(m for m in sys.modules if "allranks" in m and "inside" not in m))
        import threading, torch
        print(torch.get_num_threads(), threading.active_count(), torch.ones(2).sum().item())
        atexit.register(print, "at exit")
        warnings.warn("seen")
        print("to stderr", file=sys.stderr)
        1 / int(sys.argv[1])
    """


@pytest.mark.parametrize("form", ["script", "module"])
@pytest.mark.parametrize("divisor", ["0", "1"])
def test_the_script_sees_what_a_fresh_start_would_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, divisor: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/show.py").write_text(textwrap.dedent(SHOW))
    (tmp_path / "linked.py").symlink_to("code/show.py")
    command = [sys.executable, *(["./linked.py"] if form == "script" else ["-m", "code_.show"]), divisor, "x y"]
    if form == "module":
        (tmp_path / "code").rename(tmp_path / "code_")
    env = base_env()
    with standby(command, env) as made:
        wait_ready(made)
        ours = become(made, tmp_path, env | LATER)
    theirs = fresh(command, env | LATER)
    assert ours[1].splitlines() == theirs[1].splitlines()
    assert ours[2].splitlines() == theirs[2].splitlines()
    assert ours[0] == theirs[0] == int(divisor == "0")
    assert "at exit" in ours[1]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import sys; sys.exit('said')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("x = (", 1),
    ],
)
def test_its_end_is_the_scripts_own(tmp_path: Path, text: str, code: int):
    script = tmp_path / "train.py"
    script.write_text(text + "\n")
    command, env = [sys.executable, str(script)], base_env()
    with standby(command, env) as made:
        ours = become(made, tmp_path, env | LATER)
    assert ours == fresh(command, env | LATER)
    assert ours[0] == code


@pytest.mark.parametrize(
    ("text", "more", "neighbour"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n", {}, ""),
        ("", {"PYTHONHASHSEED": "5"}, ""),
        ("", {}, "sympy.py"),
        ("", {}, "numpy.py"),
    ],
)
def test_where_the_script_could_tell_it_is_started_anew(
    tmp_path: Path, text: str, more: dict[str, str], neighbour: str
):
    script = tmp_path / "home/train.py"
    script.parent.mkdir()
    script.write_text(text + "import os, sys\nprint('torch' in sys.modules, os.environ['RANK'], os.getpid())\n")
    if neighbour:
        (script.parent / neighbour).write_text("")
    command, env = [sys.executable, str(script)], base_env()
    with standby(command, env) as made:
        wait_ready(made)
        code, out, _ = become(made, tmp_path, env | LATER | more)
        pid = made.process.pid
    is_anew = neighbour != "sympy.py" or "False" in out  # torch brings sympy along in some versions only
    assert (code, out) == (0, f"{not is_anew} 3 {pid}\n")


def test_it_has_torch_already_and_tells_which_rank_it_is(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import sys, time\nprint('torch' in sys.modules, flush=True)\ntime.sleep(60)\n")
    command, env = [sys.executable, str(script)], base_env()
    with standby(command, env) as made, (tmp_path / "out").open("wb") as out:
        wait_ready(made)
        made.become(env | LATER, out=out.fileno(), err=out.fileno(), fds={})
        began_s = time.monotonic()
        while not (tmp_path / "out").read_text():
            assert time.monotonic() < began_s + 20
            time.sleep(0.005)
        shown = Path(f"/proc/{made.process.pid}/environ").read_bytes().split(b"\0")
    assert (tmp_path / "out").read_text() == "True\n"
    assert {b"RANK=3", b"LOCAL_RANK=1", b"WORLD_SIZE=4"} <= set(shown)
    assert not [entry for entry in shown if entry.startswith(b"ALLRANKS_STANDBY")]


def test_it_joins_a_group_and_beats_through_the_cell_it_got(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.all_reduce(torch.ones(3))\n"
    )
    command, env = [sys.executable, str(script)], base_env(GLOO_SOCKET_IFNAME="lo")
    cell = Cell.create()
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with standby(command, env) as made:
        code, _, err = become(made, tmp_path, env | group, ALLRANKS_CELL_FD=cell.fd)
        pid = made.process.pid
    read = cell.read()
    cell.close()
    assert (code, read.pid, read.phase) == (0, pid, "leaving")
    assert read.call is not None
    told = json.loads(read.call.data)
    assert (told["op"], told["sizes"]) == ("all_reduce", [[3]])
    assert "all 1 ranks" not in err


def test_one_whose_agent_is_gone_ends_and_does_not_run_the_script(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    made = Standby.start([sys.executable, str(script)], base_env())
    made._control.close()
    assert made.process.wait(60) == 0
    assert not (tmp_path / "ran").exists()


def test_only_python_scripts_and_modules_with_the_hook_can_wait():
    env = base_env()
    assert Standby.can_serve(["/usr/bin/python3", "train.py"], env)
    assert Standby.can_serve(["python3.12", "-m", "train"], env)
    assert not Standby.can_serve(["python3", "-c", "pass"], env)
    assert not Standby.can_serve(["python3"], env)
    assert not Standby.can_serve(["bash", "train.sh"], env)
    assert not Standby.can_serve(["python3", "train.py"], env | {"ALLRANKS_HOOK": "0"})
    assert not Standby.can_serve(["python3", "train.py"], {})


def test_a_restart_under_allranks_run_takes_the_standbys(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time

            print(os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], "torch" in sys.modules, flush=True)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                time.sleep(5)
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            """
        )
    )
    result = allranks("run", "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    assert result.returncode == 0, result.stderr
    shown = sorted(line.partition("] ")[2] for line in result.stdout.splitlines())
    assert shown == ["0 0 False", "0 1 False", "1 0 True", "1 1 True"]


def test_without_standbys_a_restart_starts_anew(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
        "print('torch' in sys.modules, flush=True)\n"
        "again or time.sleep(4) or os.kill(os.getpid(), 9)\n"
    )
    result = allranks("run", "--max-restarts", "1", "--no-standby", "train.py")
    assert (result.returncode, result.stdout.count("False")) == (0, 2), result.stderr


def test_a_standby_that_the_kernel_holds_is_not_waited_for_long() -> None:
    """State D cannot be made at will: a process whose end is never seen."""
    with subprocess.Popen(["sleep", "60"]) as process:
        waits: list[float | None] = []

        def wait(timeout: float | None = None) -> int:
            waits.append(timeout)
            raise subprocess.TimeoutExpired("sleep", timeout or 0.0)

        really, process.wait = process.wait, wait  # type: ignore[method-assign]
        ours, theirs = socket.socketpair()
        with theirs:
            Standby(process, ours).end()
        process.wait = really  # type: ignore[method-assign]
    assert waits == [END_S]

"""What does a worker leave when an exception, or a crash, ends it? The hook in a real Python, with a cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import allranks
from allranks.files.folder import Folder
from allranks.guard.inside.cell import Cell
from allranks.launch.last_words import read_left
from allranks.launch.worker_end import Left
from conftest import clean_env

SITE = Path(allranks.__file__).parent / "join" / "site"


def run(
    tmp_path: Path, text: str, *, cells: list[Left] | None = None, **env: str
) -> tuple[subprocess.CompletedProcess[str], dict | None, dict | None]:
    """What a worker with this script did, and the exception in its cell and in its error file.

    Args:
        cells: gets all that its agent would read of how it ended.
    """
    cell, error = Cell.create(), tmp_path / "error.json"
    own = {
        "PYTHONPATH": str(SITE), "ALLRANKS_AGENT_PID": str(os.getpid()), "ALLRANKS_CELL_FD": str(cell.fd),
        "TORCHELASTIC_ERROR_FILE": str(error),
    }  # fmt: skip
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    result = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, env=clean_env(os.environ, **own) | env, pass_fds=(cell.fd,), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    raised = cell.read().raised
    if cells is not None:
        cells.append(read_left(Folder.at(tmp_path), "rank_0.error.json", "rank_0.exit.json", cell))
    cell.close()
    told = json.loads(raised.data) if raised else None
    return result, told, json.loads(error.read_text())["message"] if error.exists() else None


def test_an_exception_that_nobody_catches_is_told_with_the_threads_that_are_left(tmp_path: Path):
    text = """
        import threading, time
        threading.Thread(target=time.sleep, args=(0.3,), name="upload").start()
        threading.Thread(target=time.sleep, args=(0.3,), name="daemon", daemon=True).start()
        raise ValueError("bad \\ud800 batch")
        """
    result, told, recorded = run(tmp_path, text)
    assert (told["message"], told["threads"]) == ("ValueError: bad \ud800 batch", ["upload"])
    assert told["py_callstack"].endswith('raise ValueError("bad \\ud800 batch")\nValueError: bad \ud800 batch\n')
    assert told["time_s"] == recorded["extraInfo"]["time_s"]
    assert (result.returncode, "ValueError: bad" in result.stderr) == (1, True)


def test_an_exception_that_cannot_say_what_it_is_breaks_nothing(tmp_path: Path):
    text = """
        class Odd(Exception):
            def __str__(self):
                raise TypeError("no words")
        raise Odd()
        """
    result, told, recorded = run(tmp_path, text)
    assert told["message"] == recorded["message"] == "Odd: <exception str() failed>"
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "Odd: <exception str() failed>")
    assert "Error in sys.excepthook" not in result.stderr


def test_a_long_exception_is_told_in_part(tmp_path: Path):
    _, told, recorded = run(tmp_path, "raise ValueError('bad' + 50_000_000 * chr(0x1f600) + 'end')\n")
    for message, most in ((told["message"], 2500), (recorded["message"], 65_600)):
        assert (len(message) <= most, message[:15], message[-4:]) == (True, "ValueError: bad", "\U0001f600end")
    assert "\n... 49.9 MB cut ...\n" in recorded["message"]
    assert "\n... 50.0 MB cut ...\n" in told["message"]
    trace = recorded["extraInfo"]["py_callstack"]
    assert (len(trace) < 65_536, "line 1, in <module>" in trace, trace[-4:]) == (True, True, "end\n")
    assert (tmp_path / "error.json").stat().st_size < 1 << 20


@pytest.mark.parametrize("kind", ["a link", "another user's"])
def test_an_error_file_is_not_written_where_another_user_leads(tmp_path: Path, kind: str):
    there = way = tmp_path / "there"
    there.mkdir()
    if kind == "a link":
        (way := tmp_path / "way").symlink_to(there)
    elif os.geteuid():
        pytest.skip("gives a directory away")
    else:
        os.chown(there, 65534, 65534)
    _, told, _ = run(tmp_path, "raise ValueError('bad')\n", TORCHELASTIC_ERROR_FILE=str(way / "rank_0.error.json"))
    assert (told["message"], list(there.iterdir())) == ("ValueError: bad", [])


PRINT_PLACES = """
    import os
    names = ("TORCHELASTIC_ERROR_FILE", "TORCH_FR_DUMP_TEMP_FILE")
    os.rename("there", "aside")
    os.mkdir("there")
    for name in names:  # as torch does it, by path
        if name in os.environ:
            open(os.environ[name] + "0", "w").close()
    raise ValueError("bad")
    """


@pytest.mark.parametrize("is_agents", [True, False])
def test_torch_writes_into_the_directory_of_the_agent_where_another_user_could_swap_it(tmp_path: Path, is_agents: bool):
    (there := tmp_path / "there").mkdir()
    status = there.stat()
    env = {
        "ALLRANKS_FOLDER": f"{status.st_dev}:{status.st_ino + (not is_agents)}",
        "TORCHELASTIC_ERROR_FILE": f"{there}/rank_0.error.json",
        "TORCH_FR_DUMP_TEMP_FILE": f"{there}/recorder_rank_",
    }
    _, told, _ = run(tmp_path, PRINT_PLACES, **env)
    written = ["rank_0.error.json", "rank_0.error.json0", "recorder_rank_0"] if is_agents else []
    assert (told["message"], sorted(path.name for path in (tmp_path / "aside").iterdir())) == (
        "ValueError: bad",
        written,
    )
    assert list(there.iterdir()) == []


ODD_STR = "class Odd(Exception):\n def __str__(self): {}\nraise Odd()\n"
QUIET = "import sys; sys.stderr = None\n"
"""Python itself prints any number of causes."""
NO_WORDS = "Odd: <exception str() failed>"
ODD = {
    "str returns no text": (ODD_STR.format("return 5"), NO_WORDS),
    "str recurses": (ODD_STR.format("return str(self)"), NO_WORDS),
    "str exits": (ODD_STR.format("raise SystemExit(3)"), NO_WORDS),
    "str ends the process": (ODD_STR.format("import os; os.kill(os.getpid(), 9)"), "Odd"),
    "a circle": ("a, b = ValueError(1), ValueError(2)\na.__cause__, b.__cause__ = b, a\nraise a\n", "ValueError: 1"),
    "100,000 causes": (
        f"{QUIET}e = ValueError(0)\nfor n in range(100_000):\n x = ValueError(n); x.__cause__ = e; e = x\nraise e\n",
        "ValueError: 99999",
    ),
    "a million in a group": (
        f"{QUIET}raise ExceptionGroup('many', [ValueError('x')] + 999_999 * [KeyError(1)])\n",
        "ExceptionGroup: many (1000000 sub-exceptions)",
    ),
    "100,000 frames": (
        f"{QUIET}sys.setrecursionlimit(10**6)\n"
        "def f(n): g(n - 1) if n else 1 / 0\ndef g(n): f(n - 1) if n else 1 / 0\nf(100_000)\n",
        "ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_exception_is_told_in_bounded_words(tmp_path: Path, name: str):
    text, message = ODD[name]
    _, told, recorded = run(tmp_path, text)
    assert told["message"] == message
    assert "Traceback (most recent call last):\n" in told["py_callstack"]
    assert told["py_callstack"].count("ValueError: ") <= 17
    assert recorded is None or (recorded["message"], len(recorded["extraInfo"]["before"]) <= 16) == (message, True)


def test_what_an_exception_is_takes_forever_and_its_kind_is_told(tmp_path: Path):
    text = """
        import os, time
        class Slow(Exception):
            def __str__(self):
                os._exit(7)  # as somebody who has waited long enough for it
        raise Slow()
        """
    result, told, _ = run(tmp_path, text)
    assert (result.returncode, told["message"], "line 6, in <module>" in told["py_callstack"]) == (7, "Slow", True)


def test_where_no_file_can_be_written_the_cell_still_has_it(tmp_path: Path):
    _, told, recorded = run(tmp_path, "raise ValueError('bad')\n", TORCHELASTIC_ERROR_FILE="/proc/no/such")
    assert (told["message"], recorded) == ("ValueError: bad", None)


AS_TORCH_RECORDS = """
def record_exception():
    with open("/dev/full", "w") as file:
        file.write("{}")
try:
    raise ValueError("bad batch")
except ValueError:
    record_exception()
    raise
"""


def test_where_records_own_file_does_not_fit_the_exception_before_is_told(tmp_path: Path):
    result, told, _ = run(tmp_path, AS_TORCH_RECORDS, TORCHELASTIC_ERROR_FILE=str(tmp_path / "none/error.json"))
    assert told["message"] == "ValueError: bad batch"
    assert "No space left" not in told["py_callstack"]
    assert result.stderr.rstrip().endswith("OSError: [Errno 28] No space left on device")


def test_the_cell_has_an_exception_before_its_file_is_touched(tmp_path: Path):
    os.mkfifo(tmp_path / "slow")  # the hook waits there for a reader for ever
    text = """
        import os, signal
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        os.path.exists = lambda path: os.open("slow", os.O_WRONLY)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        raise ValueError("bad")
        """
    result, told, _ = run(tmp_path, text)
    assert (told["message"], result.returncode) == ("ValueError: bad", -9)


def test_a_call_of_exit_is_told_in_the_cell_and_needs_no_disk(tmp_path: Path):
    text = "import sys\ntry:\n    raise OSError(28, 'No space left on device')\nexcept OSError:\n    sys.exit(3)\n"
    cells: list[Left] = []
    result, told, _ = run(tmp_path, text, cells=cells, TORCHELASTIC_ERROR_FILE=str(tmp_path / "none/rank_0.error.json"))
    assert (result.returncode, told) == (3, None)
    assert cells[0].exit is not None
    assert (cells[0].exit.exit_code, cells[0].exit.before) == (3, ("OSError: [Errno 28] No space left on device",))


def test_a_file_that_cannot_be_written_leaves_no_rest(tmp_path: Path):
    text = "import json\ndef dump(*_): raise OSError(28, 'No space left on device')\njson.dump = dump\n1 / 0\n"
    result, told, recorded = run(tmp_path, text)
    assert (told["message"], recorded) == ("ZeroDivisionError: division by zero", None)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert result.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    "text",
    [
        "import sys\ntry: 1 / 0\nexcept Exception: sys.excepthook(*sys.exc_info())\n",  # it goes on
        "import os\nif os.fork() == 0: 1 / 0\nos.wait()\n",  # a child
        "raise KeyboardInterrupt\n",
        "raise SystemExit(3)\n",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n",
    ],
)
def test_what_does_not_end_a_worker_is_not_told_as_its_end(tmp_path: Path, text: str):
    assert run(tmp_path, text)[1] is None


CRASH = "import ctypes\ndef crash(): ctypes.string_at(0)\n{}\ncrash()\n"


@pytest.mark.parametrize(
    ("line", "env", "out", "err"),
    [
        ("", {}, "", 'File "{}", line 2 in crash'),
        ("", {"PYTHONFAULTHANDLER": "1"}, "", 'File "{}", line 2 in crash'),
        ("import faulthandler; faulthandler.enable(open('own', 'w'))", {}, 'File "{}", line 2 in crash', ""),
        ("import faulthandler; faulthandler.disable()", {}, "", ""),
    ],
)
def test_a_crash_leaves_the_stack_where_the_user_wants_it(tmp_path: Path, line: str, env, out: str, err: str):
    result, _, _ = run(tmp_path, CRASH.format(line), **env)
    own = tmp_path / "own"
    stacks = own.read_text() if own.exists() else "", result.stderr
    assert result.returncode == -11
    for stack, expected in zip(stacks, (out, err), strict=True):
        assert expected.format(tmp_path / "train.py") in stack
        assert stack.count("Fatal Python error: Segmentation fault") == bool(expected)

"""The door to external tools: deadlines, process groups, output that does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from fake_nvidia_smi import install_script

from allranks.host.programs import MAX_OUTPUT_BYTES, Ran, run_command
from conftest import is_alive

PYTHON = (sys.executable, "-IS", "-c")


def wait_until_gone(pid: int) -> bool:
    end_s = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    return not is_alive(pid)


def test_a_command_answers_with_status_and_both_streams():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert run_command([*PYTHON, code], deadline_s=20) == Ran(3, "out\n", "err\n")


def test_a_missing_command_is_said_so(tmp_path):
    ran = run_command(["nvidia-smi"], deadline_s=5, env={"PATH": str(tmp_path)})
    assert ran == Ran(None, problem="nvidia-smi: not installed")
    assert ran.words == "nvidia-smi: not installed"


def test_a_file_that_is_no_program_is_said_so(tmp_path):
    env = install_script(tmp_path, "nvidia-smi", "\x7fELF but not really")
    assert run_command(["nvidia-smi"], deadline_s=5, env=env).problem == "nvidia-smi: Exec format error"


def test_words_cannot_become_commands(tmp_path):
    ran = run_command(["echo", f"; touch {tmp_path}/x `id` $(id)"], deadline_s=5)
    assert ran.stdout == f"; touch {tmp_path}/x `id` $(id)\n"
    assert list(tmp_path.iterdir()) == []


def test_a_command_is_ended_at_the_deadline():
    start_s = time.monotonic()
    ran = run_command(["sleep", "600"], deadline_s=0.3)
    assert ran == Ran(None, problem="sleep: no answer within 0.3 s")
    assert time.monotonic() - start_s < 60


def test_what_it_said_before_the_deadline_is_kept():
    ran = run_command(["sh", "-c", "echo so far; exec sleep 600"], deadline_s=4)
    assert (ran.rc, ran.stdout) == (None, "so far\n")


def test_one_that_ignores_signals_is_ended_too():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert run_command([*PYTHON, code], deadline_s=0.5).rc is None


@pytest.mark.parametrize("end", ["time.sleep(600)", "pass"])
def test_its_children_end_with_it(end):
    code = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
{end}
"""
    start_s = time.monotonic()
    ran = run_command([*PYTHON, code], deadline_s=4)
    assert time.monotonic() - start_s < 60
    assert wait_until_gone(int(ran.stdout))


def test_a_closed_output_does_not_hide_that_it_goes_on():
    code = "import os, time; os.close(1); os.close(2); time.sleep(600)"
    start_s = time.monotonic()
    assert run_command([*PYTHON, code], deadline_s=0.5).rc is None
    assert time.monotonic() - start_s < 60


@pytest.mark.parametrize(("keep_end", "kept"), [(False, "b"), (True, "e")])
def test_endless_output_is_bounded(keep_end, kept):
    code = f"import sys; sys.stdout.write('b' * {MAX_OUTPUT_BYTES} + 'e' * {MAX_OUTPUT_BYTES})"
    ran = run_command([*PYTHON, code], deadline_s=20, keep_end=keep_end)
    assert ran.rc == 0
    assert set(ran.stdout) == {kept}
    assert len(ran.stdout) == MAX_OUTPUT_BYTES


def test_a_command_that_prints_forever_is_ended():
    ran = run_command(["yes"], deadline_s=0.5)
    assert ran.rc is None
    assert len(ran.stdout) == MAX_OUTPUT_BYTES


def test_one_that_dies_of_a_signal_says_which():
    assert run_command([*PYTHON, "import os; os.kill(os.getpid(), 11)"], deadline_s=20).rc == -signal.SIGSEGV


def test_bytes_that_are_no_text_become_escapes():
    code = r"import sys; sys.stdout.buffer.write(b'GPU \xff\xfe')"
    assert run_command([*PYTHON, code], deadline_s=20).stdout == "GPU \\xff\\xfe"


def test_it_has_no_input_and_speaks_english():
    code = "import os, sys; print(repr(sys.stdin.read()), os.environ['LC_ALL'])"
    assert run_command([*PYTHON, code], deadline_s=20, env={"LC_ALL": "de_DE"}).stdout == "'' C\n"


def test_no_process_is_left(tmp_path):
    before = list_children()
    for _ in range(3):
        run_command(["sleep", "600"], deadline_s=0.05)
        run_command(["true"], deadline_s=5)
    assert list_children() <= before


def list_children() -> Counter[str]:
    """Names of the children of this process, which may have some of other tests."""
    listed = subprocess.run(["ps", "-o", "comm=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return Counter(name for name in listed.stdout.split() if name != "ps")

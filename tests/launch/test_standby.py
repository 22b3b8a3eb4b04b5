"""Is a worker that a standby forked what a fresh start would be, but faster?"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

import allranks
from allranks.guard.inside.cell import Cell
from allranks.host.process import read_environment
from allranks.join.standby import NO_TORCH, READY, differing
from allranks.launch import workers
from allranks.launch.workers import END_S, PR_SET_CHILD_SUBREAPER, Standby, become_subreaper, spawn
from conftest import Allranks, agents_in_background, clean_env, detached_children, is_alive, wait_until, write

pytestmark = pytest.mark.torch
SITE = Path(allranks.__file__).parent / "join" / "site"
LATER = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "1", "WEIRD": "a=b\nc\udcff"}
FAKE = """
    class cuda:
        is_initialized = staticmethod(lambda: False)
    class default_generator:
        seed = staticmethod(lambda: 0)
    """
"""A torch that is imported at once."""


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    """This process is the agent, and adopts what a standby forks."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def base_env(**more: str) -> dict[str, str]:
    ours = {"PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1", "ALLRANKS_AGENT_PID": str(os.getpid())}
    return clean_env(os.environ, **ours) | more


def env_with_torch(directory: Path, text: str) -> dict[str, str]:
    """An environment whose torch is this text."""
    write(directory / "libs/torch/__init__.py", textwrap.dedent(FAKE) + text)
    return base_env(PYTHONPATH=f"{SITE}:{directory / 'libs'}")


@contextlib.contextmanager
def standby(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Standby]:
    made = Standby.start(command, env)
    try:
        wait_until(lambda: not made.is_importing, "import torch")
        yield made
    finally:
        made.end()


def fork(made: Standby, folder: Path, env: Mapping[str, str], **fds: int) -> psutil.Process:
    with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
        forked = made.fork(env, out=out.fileno(), err=err.fileno(), fds=fds)
    assert forked is not None
    return forked


def run_forked(made: Standby, folder: Path, env: Mapping[str, str], **fds: int) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = fork(made, folder, env, **fds).wait()
    return code, (folder / "out").read_text(), (folder / "err").read_text()


def run_fresh(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str, str]:
    with (folder / "out_").open("wb") as out, (folder / "err_").open("wb") as err:
        started = spawn(command, env, out=out.fileno(), err=err.fileno(), fds=())
    return started.wait(60), (folder / "out_").read_text(), (folder / "err_").read_text()


SHOW = """
    import atexit, gc, importlib.util, json, locale, logging, multiprocessing, os, pickle, random, signal, sys
    import threading, warnings

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
        print("torch" in sys.modules, "numpy" in sys.modules, importlib.util.find_spec("torch").origin)
        print([(each, signal.getsignal(each)) for each in sorted(signal.valid_signals())])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), oct(os.umask(0)), os.nice(0), os.sched_getaffinity(0))
        print(os.getppid() == int(os.environ["ALLRANKS_AGENT_PID"]), os.getsid(0) == os.getpgid(0) == os.getpid())
        print(threading.get_native_id() == os.getpid(), threading.current_thread() is threading.main_thread())
        print(sys.stdout.encoding, sys.stdout.line_buffering, sys.stdin.fileno(), repr(sys.stdin.read()))
        print(locale.setlocale(locale.LC_ALL), gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit())
        print(logging.root.handlers, logging.root.level, sys.excepthook.__name__)
        print(sorted(m for m in sys.modules if "allranks" in m and "inside" not in m))
        for method in ("spawn", "fork"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(method, pool.map(square, [1, 2, 3]))
        import numpy, torch
        print(torch.__spec__.name, torch.__spec__.origin, type(torch.__spec__.loader).__name__, numpy.ones(2).sum())
        print(torch.get_num_threads(), threading.active_count(), torch.ones(2).sum().item(), warnings.filters)
        atexit.register(print, "at exit")
        warnings.warn("seen")
        print("to stderr", file=sys.stderr)
        1 / int(sys.argv[1])
    """


@pytest.mark.parametrize(("form", "divisor"), [("script", "0"), ("module", "1")])
def test_the_script_sees_what_a_fresh_start_would_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, divisor: str
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / ("code_" if form == "module" else "code") / "show.py", SHOW)
    (tmp_path / "linked.py").symlink_to("code/show.py")
    command = [sys.executable, *(["./linked.py"] if form == "script" else ["-m", "code_.show"]), divisor, "x y"]
    env = base_env()
    with standby(command, env) as made:
        ours = run_forked(made, tmp_path, env | LATER)
    theirs = run_fresh(command, tmp_path, env | LATER)
    assert ours[1].splitlines() == theirs[1].splitlines()
    assert ours[2].splitlines() == theirs[2].splitlines()
    assert ours[0] == theirs[0] == int(divisor == "0")
    assert "at exit" in ours[1]


def without_addresses(text: str) -> str:
    """What faulthandler prints, without what differs between two processes: addresses, and the modules in memory."""
    return re.sub(r"0x[0-9a-f]+|\nExtension modules: .*", "", text).rstrip()


def test_its_end_is_the_scripts_own(tmp_path: Path):
    """All from one standby, which none of these ends harms."""
    ends = {
        "raise SystemExit(7)": 7,
        "import sys; sys.exit('said')": 1,
        "raise KeyboardInterrupt": -signal.SIGINT,
        "import os; os._exit(3)": 3,
        "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
        "import ctypes; ctypes.string_at(0)": -signal.SIGSEGV,
        "x = (": 1,
    }
    script = tmp_path / "train.py"
    command, env = [sys.executable, str(script)], base_env()
    script.write_text("")
    with standby(command, env) as made:
        for number, (text, code) in enumerate(ends.items()):
            script.write_text(text + "\n")
            (folder := tmp_path / str(number)).mkdir()
            ours = run_forked(made, folder, env | LATER)
            theirs = run_fresh(command, folder, env | LATER)
            assert ours[:2] == theirs[:2] == (code, ours[1])
            assert without_addresses(ours[2]) == without_addresses(theirs[2])
        assert made.process.poll() is None


def test_an_exception_leaves_the_file_that_a_verdict_reads(tmp_path: Path):
    command = [sys.executable, str(write(tmp_path / "train.py", "raise ValueError('batch 17')"))]
    env = env_with_torch(tmp_path, "")
    with standby(command, env) as made:
        run_forked(made, tmp_path, env | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: batch 17"


def test_no_two_workers_draw_the_same_numbers(tmp_path: Path):
    script = write(
        tmp_path / "train.py",
        """
        import multiprocessing, random, numpy, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), multiprocessing.current_process().authkey)
        """,
    )
    command, env = [sys.executable, str(script)], base_env()
    with standby(command, env) as made:
        for _ in range(2):
            _, out, err = run_forked(made, tmp_path, env)
    first, second = out.splitlines()
    assert not set(first.split()) & set(second.split()), err


def test_its_environment_can_be_read_from_outside(tmp_path: Path):
    script = write(
        tmp_path / "train.py", "import os, time\nos.fork()\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    command, env = [sys.executable, str(script)], env_with_torch(tmp_path, "")
    with standby(command, env) as made:
        worker = fork(made, tmp_path, env | LATER)
        both = wait_until(lambda: (pids := (tmp_path / "out").read_text().split())[1:] and pids, "both processes")
        for pid in both:
            found = read_environment(int(pid))
            assert found | LATER | {"WEIRD": ""} == found | {"WEIRD": ""}
            assert "ALLRANKS_STANDBY" not in found
        assert "ALLRANKS_STANDBY" in read_environment(made.process.pid)
        os.killpg(worker.pid, signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL


def test_what_the_import_says_each_worker_says(tmp_path: Path):
    command = [sys.executable, str(write(tmp_path / "train.py", "print('of the script')"))]
    env = env_with_torch(tmp_path, "import warnings\nwarnings.warn('of the import')\nprint('printed')")
    with standby(command, env) as made:
        (_, out, err), _ = run_forked(made, tmp_path, env), run_forked(made, tmp_path, env)
    assert out == "printed\nof the script\n"
    assert "UserWarning: of the import" in err
    assert (tmp_path / "out").read_text() == 2 * out


def test_it_joins_a_group_and_beats_through_the_cell_it_got(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.all_reduce(torch.ones(3))\n"
        "dist.destroy_process_group()\n"
    )
    command, env = [sys.executable, str(script)], base_env(GLOO_SOCKET_IFNAME="lo")
    cell = Cell.create()
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with standby(command, env) as made:
        with (tmp_path / "out").open("wb") as out:
            worker = made.fork(env | group, out=out.fileno(), err=out.fileno(), fds={"ALLRANKS_CELL_FD": cell.fd})
        assert worker is not None
        assert worker.wait() == 0, (tmp_path / "out").read_text()
    read = cell.read()
    cell.close()
    assert (read.pid, read.phase) == (worker.pid, "leaving")
    assert read.call is not None
    told = json.loads(read.call.data)
    assert (told["op"], told["sizes"]) == ("all_reduce", [[3]])


# What cannot be forked


def test_only_python_scripts_and_modules_with_the_hook_can_be_forked():
    env = base_env()
    assert Standby.can_serve(["/usr/bin/python3", "train.py"], env)
    assert Standby.can_serve(["python3.12", "-m", "train"], env)
    assert not Standby.can_serve(["python3", "-c", "pass"], env)
    assert not Standby.can_serve(["python3"], env)
    assert not Standby.can_serve(["bash", "train.sh"], env)
    assert not Standby.can_serve(["python3", "train.py", "--rank=${local_rank}"], env)
    assert not Standby.can_serve(["python3", "train.py"], env | {"ALLRANKS_HOOK": "0"})
    assert not Standby.can_serve(["python3", "train.py"], {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads"),
        ("held = open('/dev/zero')", "/dev/zero"),
        ("import socket\nheld = socket.socket()", "socket:"),
        ("cuda.is_initialized = lambda: True", "CUDA"),
        ("raise OSError('libcudart.so.12: not found')", "torch cannot be imported: libcudart.so.12: not found"),
        ("raise ModuleNotFoundError(name='torch')", NO_TORCH),
        ("import os\nos._exit(3)", "it ended while it imported torch"),
    ],
)
def test_it_says_why_it_cannot_fork(tmp_path: Path, text: str, reason: str):
    script = write(tmp_path / "train.py", "")
    with standby([sys.executable, str(script)], env_with_torch(tmp_path, text)) as made:
        assert reason in (made.answer or "")
        assert made.answer != READY


@pytest.mark.parametrize(("name", "is_hidden"), [("queue.py", True), ("queue/__init__.py", True), ("queue/x", False)])
def test_a_file_beside_the_script_may_hide_a_module_of_torch(tmp_path: Path, name: str, is_hidden: bool):
    script = write(tmp_path / "home/train.py", "")
    beside = write(tmp_path / "home" / name, "")
    with standby([sys.executable, str(script)], env_with_torch(tmp_path, "import queue")) as made:
        assert made.answer == (f"{beside} has the name of a module that torch imports" if is_hidden else READY)


def test_the_threads_of_openblas_are_no_obstacle(tmp_path: Path):
    """It ends them before a fork, and starts them again in parent and child."""
    text = """
        import numpy, os
        before = len(os.listdir("/proc/self/task"))
        numpy.ones((400, 400)) @ numpy.ones((400, 400))
        print(before, len(os.listdir("/proc/self/task")))
        """
    command = [sys.executable, str(write(tmp_path / "train.py", text))]
    env = base_env(OMP_NUM_THREADS="2")  # at most as many as there are cores
    with standby(command, env) as made:
        assert made.answer == READY
        _, out, _ = run_forked(made, tmp_path, env)
    assert out == "1 2\n"


def test_variables_that_are_read_once_must_be_equal():
    env = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TORCH_LOGS": "x", "LD_PRELOAD": "y", "RANK": "0"}
    later = {
        "TORCHELASTIC_RUN_ID": "5",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "z",
        "CUDA_VISIBLE_DEVICES": "3",
        "RANK": "1",
    }
    assert differing(env, env | later) == []
    assert differing(env, later) == ["LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_LOGS"]


def test_a_script_that_changes_what_an_import_reads_starts_again(tmp_path: Path):
    """All from one standby, which serves the next one as if nothing had been changed."""
    script = tmp_path / "train.py"
    command, env = [sys.executable, str(script)], base_env()
    script.write_text("")
    with standby(command, env) as made:
        for module in ("torch", "numpy", "torch.nn"):
            for set_to, is_anew in (("2", True), ("1", False)):
                (folder := tmp_path / f"{module}_{set_to}").mkdir()
                write(
                    script,
                    f"""
                    import os
                    os.environ["OMP_NUM_THREADS"] = "{set_to}"
                    print("begins", os.getpid(), os.getcwd(), flush=True)
                    os.chdir("/")
                    import {module}, torch
                    print("goes on", os.getpid(), os.environ["RANK"], torch.get_num_threads())
                    """,
                )
                worker = fork(made, folder, env | LATER | {"RANK": "0"})
                assert worker.wait() == 0, (folder / "err").read_text()
                begins = f"begins {worker.pid} {Path.cwd()}\n"
                goes_on = f"goes on {worker.pid} 0 {set_to}\n"
                assert (folder / "out").read_text() == begins * (1 + is_anew) + goes_on, module
                line = "allranks: the script changes OMP_NUM_THREADS before it imports torch: its workers start again, "
                assert (folder / "err").read_text().startswith(line) is is_anew, module


def test_a_script_that_puts_another_torch_before_ours_gets_it(tmp_path: Path):
    write(tmp_path / "own/torch.py", "kind = 'the other'")
    script = write(tmp_path / "train.py", "import sys\nsys.path.insert(0, 'own')\nimport torch\nprint(torch.kind)\n")
    command, env = [sys.executable, str(script)], env_with_torch(tmp_path, "kind = 'ours'")
    with contextlib.chdir(tmp_path), standby(command, env) as made:
        assert run_forked(made, tmp_path, env)[:2] == (0, "the other\n")


def test_a_child_of_the_script_does_not_start_the_script_again(tmp_path: Path):
    script = write(
        tmp_path / "train.py",
        """
        import os
        print("begins", flush=True)
        if os.fork() == 0:
            os.environ["OMP_NUM_THREADS"] = "2"
            import torch
            print("imports", flush=True)
            os._exit(0)
        os.wait()
        """,
    )
    command, env = [sys.executable, str(script)], env_with_torch(tmp_path, "")
    with standby(command, env) as made:
        assert run_forked(made, tmp_path, env)[:2] == (0, "begins\nimports\n")


@pytest.mark.parametrize(
    ("set_to", "is_anew"), [({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, False), ({"TORCH_LOGS": ""}, True)]
)
def test_what_lightning_sets_before_it_imports_torch_starts_nothing_again(
    tmp_path: Path, set_to: dict[str, str], is_anew: bool
):
    script = write(
        tmp_path / "train.py", f"import os\nos.environ |= {set_to}\nprint('begins', flush=True)\nimport torch\n"
    )
    command, env = [sys.executable, str(script)], env_with_torch(tmp_path, "")
    with standby(command, env) as made:
        assert run_forked(made, tmp_path, env)[:2] == (0, "begins\n" * (1 + is_anew))


# What scripts import later


SOON = """
    import importlib.util, sys
    path = {path!r}
    spec = importlib.util.spec_from_file_location("_allranks_standby", path)
    sys.modules["_allranks_standby"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.IDLE_S = 0.05
    module.stand_by()
    """
"""A sitecustomize whose standby does not wait for seconds."""
IMPORTS = """
    import os
    import torch
    {before}
    import torch._dynamo
    print(torch._dynamo.imported_by == os.getpid(), torch._dynamo.seen, os.getppid() == {agent})
    """


class Later:
    """A standby of a torch whose _dynamo says who imported it, and a script that imports it."""

    def __init__(self, folder: Path, *, before: str = "", dynamo: str = "") -> None:
        site, self.folder = folder / "site", folder
        write(site / "sitecustomize.py", SOON.format(path=str(SITE.parent / "standby.py")))
        told = "import os\nimported_by, seen = os.getpid(), os.environ.get('TORCHDYNAMO_X')\n"
        self.env = env_with_torch(folder, "") | {"PYTHONPATH": f"{site}:{folder / 'libs'}"}
        write(folder / "libs/torch/_dynamo.py", told + f"open('{folder}/imported', 'a').write('x')\n" + dynamo)
        script = write(folder / "train.py", IMPORTS.format(before=before or "pass", agent=os.getpid()))
        self.command = [sys.executable, str(script)]

    def run(self, made: Standby) -> str:
        """One worker; what it says."""
        (self.folder / "out").write_text("")
        code, out, err = run_forked(made, self.folder, self.env)
        assert (code, err) == (0, "")
        return out

    def imports(self) -> int:
        return len((self.folder / "imported").read_text())


def children_of(made: Standby) -> list[psutil.Process]:
    return psutil.Process(made.process.pid).children()


def test_what_the_first_worker_imports_the_next_generation_finds_imported(tmp_path: Path):
    later = Later(tmp_path)
    with standby(later.command, later.env) as made:
        assert later.run(made) == "True None True\n"
        wait_until(lambda: later.imports() == 2, "the import in the standby's child")
        wait_until(lambda: later.run(made) == "False None True\n", "a worker of the child")
        [child] = children_of(made)
        before = later.imports()
        assert later.run(made) == "False None True\n"
        assert later.imports() == before
        child.kill()  # the standby goes on without it
        wait_until(lambda: not children_of(made), "the end of the child")
        assert later.run(made) == "True None True\n"


@pytest.mark.parametrize(
    ("before", "dynamo"),
    [
        ("os.environ['TORCHDYNAMO_X'] = str(os.getpid())", ""),
        ("import sys; sys.modules['torch'].__spec__.origin = '/elsewhere'", ""),
        ("", "if os.environ.get('ALLRANKS_AGENT_PID') != str(os.getppid()): held = open('/dev/zero')"),
        ("", "if os.environ.get('ALLRANKS_AGENT_PID') != str(os.getppid()): raise OSError('no libcuda')"),
    ],
    ids=["a variable of the script", "a torch from elsewhere", "a device in use", "an import that fails"],
)
def test_what_the_standby_cannot_import_as_the_script_does_each_worker_imports(
    tmp_path: Path, before: str, dynamo: str
):
    later = Later(tmp_path, before=before, dynamo=dynamo)
    with standby(later.command, later.env) as made:
        assert later.run(made).startswith("True ")
        if dynamo:
            wait_until(lambda: later.imports() == 2 and not children_of(made), "the child's end")
        else:
            time.sleep(0.3)  # it would have been there by now
        assert later.run(made).startswith("True ")


def test_the_child_of_a_standby_ends_with_it(tmp_path: Path):
    later = Later(tmp_path)
    with standby(later.command, later.env) as made:
        later.run(made)
        [child] = wait_until(lambda: children_of(made), "the child")
    wait_until(lambda: not is_alive(child.pid), "its end")


# Ends


def test_one_whose_agent_is_gone_ends_and_does_not_run_the_script(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    made = Standby.start([sys.executable, str(script)], env_with_torch(tmp_path, ""))
    made._control.close()
    assert made.process.wait(60) == 0
    assert not (tmp_path / "ran").exists()


def test_a_killed_standby_forks_nothing_and_its_workers_live(tmp_path: Path):
    command = [sys.executable, str(write(tmp_path / "train.py", "import time\ntime.sleep(60)\n"))]
    env = env_with_torch(tmp_path, "")
    with standby(command, env) as made, (tmp_path / "out").open("wb") as out:
        worker = fork(made, tmp_path, env)
        made.process.kill()
        wait_until(lambda: made.process.poll() is not None, "its end")
        assert made.fork(env, out=out.fileno(), err=out.fileno(), fds={}) is None
        assert is_alive(worker.pid)
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait() == -signal.SIGTERM


def test_a_fork_that_comes_too_late_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "FORK_S", 0.2)
    script = write(tmp_path / "train.py", f"open({str(tmp_path / 'ran')!r}, 'a').write('once')\n")
    command, env = [sys.executable, str(script)], env_with_torch(tmp_path, "")
    with standby(command, env) as made:
        others = detached_children()
        made.process.send_signal(signal.SIGSTOP)
        with (tmp_path / "out").open("wb") as out:
            assert made.fork(env, out=out.fileno(), err=out.fileno(), fds={}) is None
        made.process.send_signal(signal.SIGCONT)
        wait_until(lambda: detached_children() - others, "the late one")
        (late,) = detached_children() - others
        assert os.waitstatus_to_exitcode(os.waitpid(late, 0)[1]) == 0
        monkeypatch.undo()
        assert fork(made, tmp_path, env).wait() == 0
    assert (tmp_path / "ran").read_text() == "once"


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
            Standby(process, {}, ours).end()
        process.wait = really  # type: ignore[method-assign]
    assert waits == [END_S]


# Under allranks run

AGAIN = """
    import os, signal, sys, time

    life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    print(life, rank, "forked" if "torch._C" in sys.modules else "started", flush=True)
    if life == "0":
        while rank != "0" or not os.path.exists("go"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    """


def shown(stdout: str) -> list[str]:
    return sorted(line.partition("] ")[2] or line for line in stdout.splitlines())


def test_first_start_and_restart_are_forked(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", AGAIN)
    (tmp_path / "go").touch()
    result = allranks("run", "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    assert result.returncode == 0, result.stderr
    assert shown(result.stdout) == ["0 0 forked", "0 1 forked", "1 0 forked", "1 1 forked"]
    assert "without a standby" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "how"),
    [(("--max-restarts", "1"), "forked"), (("--max-restarts", "1", "--no-standby"), "started"), ((), "started")],
)
def test_one_worker_is_forked_if_it_may_be_restarted(
    allranks: Allranks, tmp_path: Path, flags: tuple[str, ...], how: str
):
    write(tmp_path / "train.py", "import sys\nprint('forked' if 'torch._C' in sys.modules else 'started')\n")
    result = allranks("run", *flags, "train.py")
    assert (result.returncode, result.stdout) == (0, f"{how}\n"), result.stderr


def standby_of(agent: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(agent)], capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in found if "ALLRANKS_STANDBY" in read_environment(int(pid))]


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with agents_in_background() as started:
        yield lambda *arguments, **env: started(tmp_path, *arguments, **env)


def pids_in(out: Path, count: int) -> list[int]:
    return wait_until(
        lambda: (found := re.findall(r"pid (\d+)", read(out))) and len(found) == count and [*map(int, found)], "workers"
    )


def read(out: Path) -> str:
    return "".join(path.read_text() for path in sorted(out.glob("runs/latest/attempt_0/*/rank_*.out")))


def test_a_killed_standby_is_replaced(start: Start, tmp_path: Path):
    write(tmp_path / "train.py", AGAIN)
    agent = start("--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    wait_until(lambda: read(tmp_path).count("forked") == 2, "the first generation")
    [first] = standby_of(agent.pid)
    os.kill(first, signal.SIGKILL)
    [second] = wait_until(lambda: [pid for pid in standby_of(agent.pid) if pid != first], "another standby")
    (tmp_path / "go").touch()
    out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    assert shown(out) == ["0 0 forked", "0 1 forked", "1 0 forked", "1 1 forked"]
    assert not is_alive(second)


def test_without_its_standby_a_restart_starts_workers_one_by_one(start: Start, tmp_path: Path):
    write(tmp_path / "train.py", AGAIN)
    agent = start("--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    wait_until(lambda: read(tmp_path).count("forked") == 2, "the first generation")
    (tmp_path / "go").touch()
    os.kill(*standby_of(agent.pid), signal.SIGKILL)
    out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    assert shown(out)[:2] == ["0 0 forked", "0 1 forked"]
    assert [line[:3] for line in shown(out)[2:]] == ["1 0", "1 1"]


def test_workers_and_standby_end_with_their_agent(start: Start, tmp_path: Path):
    write(tmp_path / "train.py", "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(60)\n")
    agent = start("--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    workers = pids_in(tmp_path, 2)
    [made] = standby_of(agent.pid)
    agent.kill()
    wait_until(lambda: not any(map(is_alive, [*workers, made])), "the end of all")


def test_a_standby_that_cannot_fork_is_named_once(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", AGAIN)
    (tmp_path / "go").touch()
    beside = write(
        tmp_path / "queue.py",
        "from _queue import *\nclass Full(Exception): pass\nQueue = LifoQueue = PriorityQueue = Empty\n",
    )
    result = allranks("run", "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    assert result.returncode == 0, result.stderr
    assert shown(result.stdout) == ["0 0 started", "0 1 started", "1 0 started", "1 1 started"]
    line = f"allranks: workers start without a standby: {beside} has the name of a module that torch imports\n"
    assert result.stderr.count(line) == result.stderr.count("without a standby") == 1


def test_a_signal_does_not_wait_for_the_import(start: Start, tmp_path: Path):
    write(tmp_path / "libs/torch/__init__.py", "import time\nopen('importing', 'w')\ntime.sleep(60)\n")
    write(tmp_path / "train.py", "import time\ntime.sleep(60)\n")
    agent = start("--nproc-per-node", "2", "train.py", PYTHONPATH=str(tmp_path / "libs"))
    wait_until((tmp_path / "importing").exists, "the import")
    began_s = time.monotonic()
    agent.send_signal(signal.SIGINT)
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 130, err
    assert time.monotonic() < began_s + 15

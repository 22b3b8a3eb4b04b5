"""Does `allranks run` end with the first failure, name exactly that one, and say it alike everywhere?"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Allranks, write

NODE = {"SLURMD_NODENAME": "node07", "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
"""What makes the text of a report the same on every machine."""


ANY_CORES = ("--ignore", "AR011")
"""Whatever machine runs the tests may have fewer cores than workers."""


def read_verdict(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "runs/latest/attempt_0/verdict.json").read_text())


def read_events(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "runs/latest/attempt_0/events.jsonl").read_text().splitlines()]


def only_finding(tmp_path: Path) -> dict[str, Any]:
    (finding,) = read_verdict(tmp_path)["findings"]
    return finding


def test_an_exception_is_reported_with_rank_node_line_traceback_and_victims(allranks: Allranks, tmp_path: Path):
    script = write(
        tmp_path / "train.py",
        """
        import os, time

        def load_batch(rank):
            if rank == 1:
                raise ValueError("expected 4 columns, got 3")
            time.sleep(300)

        load_batch(int(os.environ["RANK"]))
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "4", "train.py", env=NODE)
    log = f"runs/{(tmp_path / 'runs/latest').readlink()}/attempt_0/node07/rank_1.err"
    report = f"""
✗ AR590 user-code-error   node07 · rank 1                                certain
  ValueError: expected 4 columns, got 3 (train.py:5 in load_batch)
  seen Traceback (most recent call last):
         File "{script}", line 8, in <module>
           load_batch(int(os.environ["RANK"]))
         File "{script}", line 5, in load_batch
           raise ValueError("expected 4 columns, got 3")
       ValueError: expected 4 columns, got 3
  log  {log}
  more allranks explain AR590
  others waited for it or were ended: ranks 0,2-3
"""
    said, last = result.stderr[:-1].rsplit("\n", 1)
    assert f"{said}\n".endswith(report)
    run = (tmp_path / "runs/latest").readlink()  # no step was made; where the files are, is said all the same
    assert re.fullmatch(
        r"allranks: train\.py failed \(exit 1\): 4 ranks, \d+(\.\d)? s; "
        rf"output in runs/{run}/attempt_0; report in runs/{run}/report\.html",
        last,
    )
    assert result.stderr.count("AR590 user-code-error") == 1
    assert result.returncode == 1
    assert "ValueError: expected 4 columns, got 3" in (tmp_path / log).read_text()
    page = (tmp_path / "runs/latest/report.html").read_text()  # written at the end of each run
    assert "AR590 user-code-error · node07 · rank 1" in page
    assert "(train.py:5 in load_batch)" in page


def test_the_report_is_ascii_where_the_terminal_is(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "raise ValueError('caf\\u00e9')")
    result = allranks("run", "train.py", env=NODE | {"PYTHONIOENCODING": "ascii"})
    assert "\nx AR590 user-code-error   node07 - rank 0    " in result.stderr
    assert result.returncode == 1


def test_verdict_and_events_agree_with_the_report(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "import os, time\nif os.environ['RANK'] == '2': 1 / 0\ntime.sleep(300)\n")
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "3", "train.py", env=NODE)
    verdict, events = read_verdict(tmp_path), read_events(tmp_path)
    finding = only_finding(tmp_path)
    assert verdict["exit_code"] == result.returncode == 1
    assert (finding["cause"], finding["node"], finding["ranks"]) == ("AR590 user-code-error", "node07", [2])
    assert finding["message"] == "ZeroDivisionError: division by zero (train.py:2 in <module>)"
    assert finding["message"] in result.stderr
    assert finding["victims"] == [0, 1]
    assert finding["evidence"][0]["seen"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert [event["event"] for event in events] == [
        *("started", "worker_ended", "worker_ended", "worker_ended", "verdict", "ended")
    ]
    assert {event["rank"]: (event["exit_code"], event["told"]) for event in events if "rank" in event} == {
        2: (1, False),
        0: (-15, True),
        1: (-15, True),
    }
    assert events[1]["rank"] == 2
    assert events[-1]["exit_code"] == 1
    assert [event["time_s"] for event in events] == sorted(event["time_s"] for event in events)


@pytest.mark.parametrize(
    ("death", "exit_code", "cause", "message"),
    [
        ("os.kill(os.getpid(), 9)", 137, "AR407 dead-rank", "killed by SIGKILL (signal 9), not by allranks"),
        (
            "os.kill(os.getpid(), 11)",
            139,
            "AR407 dead-rank",
            "killed by SIGSEGV (signal 11), not by allranks (train.py:5 in <module>)",
        ),
        (
            "os.abort()",
            134,
            "AR407 dead-rank",
            "killed by SIGABRT (signal 6), not by allranks (train.py:5 in <module>)",
        ),
        ("os.kill(os.getpid(), 15)", 143, "AR407 dead-rank", "killed by SIGTERM (signal 15), not by allranks"),
        ("sys.exit(3)", 1, "AR590 user-code-error", "ended with exit code 3"),
        ("sys.exit('no data')", 1, "AR590 user-code-error", "ended with exit code 1"),
        ("os._exit(255)", 1, "AR590 user-code-error", "ended with exit code 255"),
    ],
)
def test_a_death_without_an_exception_is_named_at_once(
    allranks: Allranks, tmp_path: Path, death: str, exit_code: int, cause: str, message: str
):
    write(
        tmp_path / "train.py",
        f"""
        import os, sys, time

        if os.environ["RANK"] == "1":
            open("died_s", "w").write(str(time.time()))
            {death}
        time.sleep(300)
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "2", "train.py", env=NODE)
    finding = only_finding(tmp_path)
    assert result.returncode == exit_code
    assert (finding["cause"], finding["ranks"], finding["victims"]) == (cause, [1], [0])
    assert finding["message"] == message
    assert f"\n  {message}\n" in result.stderr
    assert (
        read_events(tmp_path)[-1]["time_s"] - float((tmp_path / "died_s").read_text()) < 30
    )  # the other rank sleeps for 300


def test_an_exception_is_reported_at_once(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "import os, time\nif os.environ['RANK'] == '0': 1 / 0\ntime.sleep(300)\n")
    allranks("run", *ANY_CORES, "--nproc-per-node", "2", "train.py", env=NODE)
    raised = json.loads((tmp_path / "runs/latest/attempt_0/node07/rank_0.error.json").read_text())
    assert (
        read_events(tmp_path)[-1]["time_s"] - raised["message"]["extraInfo"]["time_s"] < 30
    )  # the other rank sleeps for 300


def test_last_words_are_shown_where_there_is_no_traceback(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "import sys\nsys.exit('cannot find /data/imagenet')\n")
    result = allranks("run", "train.py", env=NODE)
    assert "\n  ended with exit code 1\n  seen cannot find /data/imagenet\n" in result.stderr


def test_ranks_that_fail_alike_make_one_finding_also_with_restarts_left(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "import no_such_module\n")
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "3", "--max-restarts", "2", "train.py", env=NODE)
    finding = only_finding(tmp_path)
    assert (finding["ranks"], finding["notes"], finding["victims"]) == ([0, 1, 2], ["all 3 ranks failed alike"], [])
    assert result.stderr.count("AR590 user-code-error   node07 · ranks 0-2 ") == 1
    assert "  more allranks explain AR590\n  all 3 ranks failed alike\n" in result.stderr
    assert result.returncode == 1


def test_a_crash_beside_an_error_of_the_script_burns_no_restart(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os, time

        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 11)
        time.sleep(0.02)
        if os.environ["RANK"] == "2":
            raise ValueError("batch 17 has no label")
        time.sleep(300)
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "4", "--max-restarts", "2", "train.py", env=NODE)
    first, second = read_verdict(tmp_path)["findings"]
    assert sorted([first["ranks"], second["ranks"]]) == [[1], [2]]
    assert (first["victims"], second["victims"], second["notes"]) == ([0, 3], [], [])
    assert first["notes"][0].startswith(f"also by itself: rank {second['ranks'][0]}, ")
    assert f"  {first['notes'][0]}\n  others waited for it or were ended: ranks 0,3\n" in result.stderr
    assert "restart 1" not in result.stderr
    assert "not restarted: a restart does not cure an error of the script" in result.stderr


def test_a_rank_whose_script_fails_because_it_lost_another_one_is_a_victim_whatever_it_does(
    allranks: Allranks, tmp_path: Path
):
    write(
        tmp_path / "train.py",
        """
        import os, sys, time

        rank = int(os.environ["RANK"])
        if rank == 3:
            time.sleep(0.1)  # its interpreter takes its time to leave
            raise ValueError("batch 17 has no label")
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:41")
        except RuntimeError:
            if rank == 0:
                sys.exit(1)
            if rank == 1:
                os._exit(2)
            raise TypeError("step 3 failed") from None
        """,
    )
    allranks("run", *ANY_CORES, "--nproc-per-node", "4", "train.py", env=NODE)
    assert (only_finding(tmp_path)["ranks"], only_finding(tmp_path)["victims"]) == ([3], [0, 1, 2])


def test_the_line_named_is_the_users_not_the_librarys(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import json

        def read_config():
            return json.loads("{")

        read_config()
        """,
    )
    allranks("run", "train.py", env=NODE)
    assert only_finding(tmp_path)["message"] == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
        "(train.py:4 in read_config)"
    )


def test_a_message_of_many_lines_and_escapes_cannot_paint_the_report(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", r"raise ValueError('one\x1b[31m\ntwo\x07\x9b3')")
    result = allranks("run", "train.py", env=NODE)
    report = result.stderr.partition("✗")[2]
    assert "\n  ValueError: one\\x1b[31m (train.py:1 in <module>)\n" in report
    assert "\n       two\\x07\\x9b3\n" in report
    assert not set(report) & {"\x1b", "\x07", "\x9b"}


def test_a_script_that_python_cannot_parse_is_reported_with_its_line(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "import os\nx = (\n")
    result = allranks("run", "train.py", env=NODE)
    assert result.returncode == 1
    assert only_finding(tmp_path)["message"] == "SyntaxError: '(' was never closed (train.py, line 2)"
    assert result.stderr.count("was never closed") == 1
    assert f'\n  seen   File "{tmp_path}/train.py", line 2\n           x = (\n  log ' in result.stderr


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_an_exception_is_shown_once_not_by_the_worker_and_in_the_report(
    allranks: Allranks, tmp_path: Path, num_ranks: str
):
    write(tmp_path / "train.py", "raise ValueError('bad batch')\n")
    result = allranks("run", *ANY_CORES, "--nproc-per-node", num_ranks, "train.py", env=NODE)
    assert result.stderr.count("Traceback (most recent call last):") == 1
    assert "Traceback" in (tmp_path / "runs/latest/attempt_0/node07/rank_0.err").read_text()


def test_without_torch_the_interpreter_that_lacks_it_is_named_with_the_command(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    result = allranks("run", "train.py", env=NODE)
    fix = f"{sys.executable} -m pip install torch: that interpreter runs the script and has no torch"
    assert f"\n  fix  {fix}\n" in result.stderr


def test_an_exception_without_a_text_is_its_name(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "assert 1 == 2\n")
    allranks("run", "train.py", env=NODE)
    assert only_finding(tmp_path)["message"] == "AssertionError (train.py:1 in <module>)"


@pytest.mark.parametrize("ask", ["input('overwrite? ')", "breakpoint()"])
def test_a_rank_that_asks_in_vain_learns_that_only_rank_0_has_standard_input(
    allranks: Allranks, tmp_path: Path, ask: str
):
    write(tmp_path / "train.py", f"import os\nif os.environ['RANK'] == '1':\n    {ask}\n    print()\n")
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "2", "train.py", env=NODE)
    assert "\n  fix  only rank 0 reads standard input: ask there, and broadcast the answer\n" in result.stderr


def test_without_torch_and_without_the_hook_stderr_names_the_missing_module(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "3", "train.py", env={**NODE, "ALLRANKS_HOOK": "0"})
    assert only_finding(tmp_path)["message"] == "ModuleNotFoundError: No module named 'torch' (train.py:1 in <module>)"
    assert "\n  fix  python -m pip install torch: that interpreter runs the script and has no torch\n" in result.stderr


def test_another_module_that_is_not_there_is_not_taken_for_torch(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "import torch_of_mine\n")
    result = allranks("run", "train.py", env=NODE)
    assert "No module named 'torch_of_mine'" in result.stderr
    assert "pip install" not in result.stderr


def test_a_program_with_a_broken_interpreter_line_could_not_be_started(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.sh", "#!/no/such/shell\n").chmod(0o755)
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "2", "--no-python", "./train.sh", env=NODE)
    assert result.returncode == 78
    assert "could not be started: ./train.sh: " in result.stderr
    assert read_verdict(tmp_path)["exit_code"] == 78
    assert "Traceback" not in result.stderr


def test_a_program_of_another_format_could_not_be_started(allranks: Allranks, tmp_path: Path):
    program = tmp_path / "train"
    program.write_bytes(b"\x7fELF not really")
    program.chmod(0o755)
    result = allranks("run", "--no-python", "./train", env=NODE)
    assert result.returncode == 78
    assert "could not be started: ./train: Exec format error" in result.stderr


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os, signal, time
        from pathlib import Path

        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path("deaf").touch()
            time.sleep(300)
        while not Path("deaf").exists():
            time.sleep(0.01)
        raise RuntimeError("broken")
        """,
    )
    started_s = time.monotonic()
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "2", "train.py", env=NODE)
    assert time.monotonic() - started_s < 100
    assert "allranks: rank 0 has not ended after SIGTERM yet; SIGKILL in 2 s\n" in result.stderr
    assert result.returncode == 1
    assert only_finding(tmp_path)["message"] == "RuntimeError: broken (train.py:10 in <module>)"
    ends = {event["rank"]: event["exit_code"] for event in read_events(tmp_path) if event["event"] == "worker_ended"}
    assert ends == {0: -9, 1: 1}


def test_a_rank_that_leaves_early_with_0_is_no_failure(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os, time
        from pathlib import Path

        if os.environ["RANK"] != "0":
            time.sleep(2)
            Path("finished" + os.environ["RANK"]).touch()
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "3", "train.py", env=NODE)
    assert result.returncode == 0
    assert read_verdict(tmp_path)["findings"] == []
    assert (tmp_path / "finished1").exists()
    assert (tmp_path / "finished2").exists()
    assert "others waited for it" not in result.stderr


def test_a_failed_helper_process_of_a_worker_is_not_the_ranks_failure(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1 / 0'])\n")
    result = allranks("run", "train.py", env=NODE)
    assert result.returncode == 0
    assert not (tmp_path / "runs/latest/attempt_0/node07/rank_0.error.json").exists()


def test_a_run_directory_that_cannot_be_written_is_one_line(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "")
    (tmp_path / "runs").write_text("a file in its place")
    result = allranks("run", "train.py")
    assert result.returncode == 2
    (said,) = (line for line in result.stderr.splitlines() if not line.startswith("allranks: port "))
    assert said.startswith("error: runs/")
    assert said.endswith(": Not a directory; logs and verdicts go there; choose another directory with --log-dir")


@pytest.mark.torch
def test_the_culprit_is_named_though_its_victims_die_first(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os, time
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        pids = [None] * 3
        dist.all_gather_object(pids, os.getpid())
        try:
            for step in range(1000):
                if dist.get_rank() == 2 and step == 3:
                    raise ValueError("bad batch")
                dist.all_reduce(torch.ones(4))
        finally:
            dist.destroy_process_group()
            while pids[2] == os.getpid() and any(os.path.exists(f"/proc/{pid}") for pid in pids[:2]):
                time.sleep(0.01)
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "3", "train.py", env=NODE)
    finding = only_finding(tmp_path)
    assert result.returncode == 1
    assert (finding["ranks"], finding["victims"], finding["confidence"]) == ([2], [0, 1], "certain")
    assert finding["message"] == "ValueError: bad batch (train.py:10 in <module>)"
    assert [event["rank"] for event in read_events(tmp_path) if event["event"] == "worker_ended"][-1] == 2
    assert result.stderr.count("AR590 user-code-error") == 1


@pytest.mark.torch
def test_an_exception_beside_a_thread_that_goes_on_is_the_verdict_within_seconds(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import threading, time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            threading.Thread(target=time.sleep, args=(300,), name="upload").start()
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1))
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "2", "train.py", env=NODE)
    finding = only_finding(tmp_path)
    assert (result.returncode, finding["cause"], finding["ranks"]) == (1, "AR590 user-code-error", [1])
    assert finding["message"] == "ValueError: bad batch (train.py:8 in <module>); has not exited: thread upload"
    raised_s = json.loads((tmp_path / "runs/latest/attempt_0/node07/rank_1.error.json").read_text())
    verdict_s = next(event["time_s"] for event in read_events(tmp_path) if event["event"] == "verdict")
    assert verdict_s - raised_s["message"]["extraInfo"]["time_s"] < 20  # 3.1 s where nothing else runs


@pytest.mark.torch
def test_a_rank_that_calls_its_groups_in_another_order_is_named_within_seconds(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        a, b = dist.new_group(ranks), dist.new_group(ranks)
        for step in range(1000):
            for group in (b, a) if (rank, step) == (1, 50) else (a, b):
                if (rank, step) == (1, 50):
                    open("began", "w").write(str(time.time()))
                dist.all_reduce(torch.ones(1), group=group)
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "3", "train.py", env=NODE)
    finding = only_finding(tmp_path)
    assert (result.returncode, finding["cause"], finding["ranks"]) == (1, "AR410 collective-mismatch", [1])
    assert finding["confidence"] == "certain"
    assert finding["message"].startswith("rank 1 called the groups in another order than ranks 0,2: ")
    assert "rank 1: all_reduce [1] Float, number 51 of group 2 at train.py:12 in <module>" in result.stderr
    verdict_s = next(event["time_s"] for event in read_events(tmp_path) if event["event"] == "verdict")
    assert verdict_s - float((tmp_path / "began").read_text()) < 10  # 3 s where nothing else runs


@pytest.mark.torch
def test_a_dataloaders_exception_is_the_one_of_its_worker(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        from torch.utils.data import DataLoader

        class Rows:
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return {}["label"]

        for batch in DataLoader(Rows(), num_workers=1):
            pass
        """,
    )
    result = allranks("run", "train.py", env=NODE)
    message = "KeyError: 'label' (train.py:8 in __getitem__)"
    assert only_finding(tmp_path)["message"].startswith(message)  # a busy machine may take long to exit
    assert "Caught KeyError in DataLoader worker process 0." in result.stderr


@pytest.mark.torch
def test_the_error_file_of_record_is_read(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os, time
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            if os.environ["RANK"] == "1":
                raise KeyError("no such layer")
            time.sleep(300)

        main()
        """,
    )
    result = allranks("run", *ANY_CORES, "--nproc-per-node", "2", "train.py", env=NODE)
    finding = only_finding(tmp_path)
    assert result.returncode == 1
    assert (finding["ranks"], finding["victims"]) == ([1], [0])
    assert finding["message"] == "KeyError: 'no such layer' (train.py:7 in main)"
    record = json.loads((tmp_path / "runs/latest/attempt_0/node07/rank_1.error.json").read_text())
    assert record["message"]["extraInfo"]["py_callstack"].startswith("Traceback")
    assert os.fspath(tmp_path) in finding["evidence"][0]["seen"]


def test_words_that_are_no_utf_8_reach_the_verdict_as_escapes(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.py").write_text("import os\nraise ValueError('cannot read ' + os.fsdecode(b'caf\\xe9'))\n")
    result = allranks("run", "train.py", env={"PYTHONIOENCODING": "utf-8"})
    assert result.returncode == 1
    assert "ValueError: cannot read caf\\udce9 (train.py:2 in <module>)" in result.stderr
    assert (tmp_path / "runs/latest/attempt_0/verdict.json").exists()


def test_a_program_without_the_right_to_execute_is_refused_with_the_cure(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    result = allranks("run", "--no-python", "./train.sh")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ./train.sh: not executable; run chmod +x on it")
    assert not (tmp_path / "runs").exists()


def test_a_missing_interpreter_is_named_as_such(allranks: Allranks, tmp_path: Path):
    script = tmp_path / "train.sh"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    result = allranks("run", "--no-python", "./train.sh")
    assert result.returncode == 78
    assert "could not be started: ./train.sh: the interpreter in its #! line is not there" in result.stderr


def test_what_cannot_work_leaves_no_run_directory(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    result = allranks("run", "--backend", "nccl", "train.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 78
    assert not (tmp_path / "runs").exists()


RAISES = """
import os, sys
from pathlib import Path

with Path("starts").open("a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
if "once" not in sys.argv or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad batch")
"""


def test_an_exception_is_not_retried_and_a_line_says_so(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", RAISES)
    result = allranks("run", "--max-restarts", "2", "train.py", env=NODE)
    assert (result.returncode, (tmp_path / "starts").read_text()) == (1, "0")
    line = "allranks: not restarted: a restart does not cure an error of the script; --restart-on-error restarts"
    assert result.stderr.count(line) == 1


def test_an_exception_is_retried_as_often_as_was_asked_for(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", RAISES)
    flags = ("--max-restarts", "2", "--restart-on-error", "--no-standby")
    result = allranks("run", *flags, "train.py", env=NODE)
    assert (result.returncode, (tmp_path / "starts").read_text()) == (1, "012")
    assert result.stderr.count("allranks: restart ") == 2
    (tmp_path / "starts").unlink()
    result = allranks("run", *flags, "train.py", "once", env=NODE)
    assert (result.returncode, (tmp_path / "starts").read_text()) == (0, "01")
    assert "allranks: restart 1 on 1 node, from what the script itself saved; 1 more restart left" in result.stderr

"""SLURM's commands on PATH, faked: they record what they were given and replay what a real SLURM 22.05.8 printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

TOOLS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "sacct", "sacctmgr")
PROGRAM = """\
#!{python} -SE
import json, os, re, sys
folder = {folder!r}
call = dict(tool=os.path.basename(sys.argv[0]), argv=sys.argv[1:], env=dict(os.environ), stdin="")
if call["tool"] == "sbatch":
    call["stdin"] = sys.stdin.read()
with open(folder + "/calls.jsonl", "a") as file:
    file.write(json.dumps(call) + "\\n")
for number, (tool, pattern, code, out, err, once) in enumerate(json.load(open(folder + "/answers.json"))):
    if tool == call["tool"] and re.search(pattern, " ".join(call["argv"])):
        if once:
            if os.path.exists(f"{{folder}}/{{once}}"):
                continue
            open(f"{{folder}}/{{once}}", "w").close()
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
sys.exit("nothing to replay for " + " ".join(sys.argv))
"""

SHOW_JOB = """\
JobId={id} JobName={name}
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   Priority=4294901755 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:00:02 TimeLimit=02:00:00 TimeMin=N/A
   SubmitTime=2026-11-21T03:16:18 EligibleTime=2026-11-21T03:16:18
   StartTime={start} EndTime=2026-11-21T05:16:18 Deadline=N/A
   Partition=main AllocNode:Sid=master-node:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
   BatchHost=master-node
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command={work}/a.sh
   WorkDir={work}
   Comment=x JobId=77 JobState=FAILED y
   StdErr={work}/slurm-{id}.out
   StdIn=/dev/null
   StdOut={work}/slurm-{id}.out
   Power=


"""


def show_job(
    id: str = "12",  # noqa: A002
    *,
    name: str = "train",
    state: str = "RUNNING",
    reason: str = "None",
    code: str = "0:0",
    start: str = "2026-11-21T03:16:18",
    nodes: str = "node[01-02]",
    restarts: int = 0,
    work: Path | str = "/home/ada",
) -> str:
    """What `scontrol show job` printed, with other values."""
    return SHOW_JOB.format(**locals())


class FakeSlurm:
    """A folder of commands; the first answer that fits is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._answers: list[tuple[str, str, int, str, str, str]] = []
        for tool in TOOLS:
            path = self.bin / tool
            path.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
            path.chmod(0o755)
        self.answer("scontrol", out="", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
        self.answer("sacct", out="", err="Slurm accounting storage is disabled\n", code=1)
        self.answer("sacctmgr", err="You are not running a supported accounting_storage plugin\n", code=1)
        self.answer(
            "sinfo",
            out="node01\x1fidle\x1fnone\x1fmain*\x1f(null)\nnode02\x1fdown*\x1fbad NIC, see T-12\x1fmain*\x1f(null)\n",
        )
        self.answer("squeue", out="")
        self.answer("scancel", out="")
        self.answer("sbatch", "--parsable", out="12\n")
        self.answer(
            "sbatch",
            "--test-only",
            err="sbatch: Job 11 to start at 2026-11-21T03:16:17 using 2 processors "
            "on nodes node[01-02] in partition x\n",
        )

    def answer(
        self, tool: str, pattern: str = "", *, out: str = "", err: str = "", code: int = 0, once: str = ""
    ) -> None:
        """From now on, calls that fit get this."""
        self._answers.insert(0, (tool, pattern, code, out, err, once))
        fresh = self.folder / "answers.json.new"  # a command may be reading the old ones
        fresh.write_text(json.dumps(self._answers))
        fresh.rename(self.folder / "answers.json")

    def answer_once(self, tool: str, pattern: str = "", *, out: str = "", err: str = "", code: int = 0) -> None:
        """The next call that fits gets this, later ones what was said before."""
        self.answer(tool, pattern, out=out, err=err, code=code, once=f"said-{len(self._answers)}")

    def calls(self, tool: str = "") -> list[dict[str, object]]:
        path = self.folder / "calls.jsonl"
        whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")  # the last one may be half written
        lines = whole.splitlines()
        return [call for call in map(json.loads, lines) if tool in ("", call["tool"])]


@pytest.fixture(name="slurm")
def fake_slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path_factory.mktemp("slurm"))
    monkeypatch.setenv("PATH", f"{fake.bin}:/usr/bin:/bin")
    return fake


def assert_one_line(text: str) -> None:
    assert re.fullmatch(r"error: [^\n]+\n", text), text

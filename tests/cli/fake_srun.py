"""`srun` and `sinfo` on PATH: they start allranks' members here, one for each node that is asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SRUN = """\
#!{python}
# FAKE_NODES: what the cluster has. FAKE_SILENT: who never says a word. FAKE_REFUSAL, FAKE_QUEUE: what SLURM says.
import json, os, re, subprocess, sys, time
first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("--"))
flags = dict(word[2:].partition("=")[::2] for word in sys.argv[1:first])
with open({folder!r} + "/srun.json", "w") as file:
    json.dump(dict(pid=os.getpid(), flags=flags, env=dict(os.environ), cwd=os.listdir(".")), file)
assert not [name for name in os.environ if name.startswith("SLURM_")], os.environ
print("*** Welcome to the site. ***", flush=True)
if os.environ.get("FAKE_REFUSAL"):
    sys.exit("srun: error: Unable to allocate resources: " + os.environ["FAKE_REFUSAL"])
if os.environ.get("FAKE_QUEUE"):
    print("srun: job 7 queued and waiting for resources", file=sys.stderr, flush=True)
    time.sleep(60)
names = (flags.get("nodelist") or os.environ["FAKE_NODES"]).split(",")[: int(flags["nodes"])]
children = []
for index, name in enumerate(names):
    env = dict(os.environ, SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=str(len(names)),
               SLURM_STEP_NUM_NODES=str(len(names)), SLURM_STEP_TASKS_PER_NODE="1(x%d)" % len(names),
               SLURM_STEP_NODELIST=",".join(names), SLURM_PROCID=str(index), SLURM_NODEID=str(index),
               SLURM_LOCALID="0", SLURM_GTIDS=str(index), SLURMD_NODENAME=name)
    silent = name in os.environ.get("FAKE_SILENT", "").split(",")
    children.append(subprocess.Popen(["sleep", "60"] if silent else sys.argv[first:], env=env))
def end(*_):
    for child in children:
        child.kill()
    sys.exit(143)
import signal
signal.signal(signal.SIGTERM, end)
sys.exit(max(child.wait() for child in children))
"""
SINFO = """\
#!/bin/sh
case "$*" in
  *"-p nope"*) exit ;;
esac
printf 'n1\\037idle\\037none\\037gpu\\037gpu:a100:4(S:0-1)\\n'
printf 'n1\\037idle\\037none\\037main*\\037gpu:a100:4(S:0-1)\\n'
printf 'n2\\037idle\\037none\\037main*\\037gpu:4\\n'
printf 'n3\\037drained\\037bad NIC\\037main*\\037(null)\\n'
"""
SCONTROL = "#!/bin/sh\necho 'ClusterName             = ada'\n"


class FakeStep:
    """Folder of the faked commands, and what srun was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        commands = {"srun": SRUN.format(python=sys.executable, folder=str(folder)), "sinfo": SINFO}
        for name, text in (commands | {"scontrol": SCONTROL}).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "FAKE_NODES": "n1,n2,n3"}

    @property
    def call(self) -> dict[str, object]:
        """flags, env and pid of the last srun."""
        found: dict[str, object] = json.loads((self.folder / "srun.json").read_text())
        return found

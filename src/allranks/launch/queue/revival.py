"""How does a lost node's agent come back into a running job? The leader starts it again there, with `srun --overlap`.

    revivals = Revivals(env=os.environ, run_dir=run_dir, patience_s=600)
    revivals.expect("node03", node_index=3)
    for line in revivals.turn(now_s): ...       # in the agent's own loop; never blocks
    revivals.close()                            # agents there end with their srun

The new agent is a step of its own, but takes the place of the lost one: it gets the variables of the lost agent's step,
so it finds the same job, node index and size, and joins like any node that joins a running job.

Measured with SLURM 22.05, for a node on which every process was killed and which comes up again:

- Until SLURM gives the node up (SlurmdTimeout, 300 s by default; with 15 s, up to 28 s in practice), it stays in the
  job, and `srun --overlap -w NODE` starts there. An srun that is started while the node is still dead waits, and
  succeeds within a second of its return.
- After that, the node is no longer in the job (--no-kill keeps the job, not the node), even if it is in service again:
  `Requested node configuration is not available`. It takes part in the job's next attempt.
- Ending the srun with SIGTERM kills the agent there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from allranks.host.signals import die_with_parent
from allranks.launch.srun import end_srun, step_env
from allranks.report.rundir import RunDir

BACK_LOG = "back.log"
AGAIN_S = 2.0
"""Before the second try; doubled before each further one."""
LONGEST_PAUSE_S = 30.0
TAKEN_AWAY = ("Requested node configuration is not available", "not in this job", "Invalid node name", "Invalid job id")
"""Messages of srun after which another try does not help."""
BACK_VARIABLE = "ALLRANKS_BACK"
"""Set for an agent that takes the place of a lost one: it looks for the leader, even as the first node of the job."""
_KEPT = frozenset({"SLURM_JOB_ID", "SLURM_CONF", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "SLURM_JOB_NAME"})
_OF_THE_STEP = (
    "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NODELIST",
    "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Revivals:
    """All nodes that may come back, for launch.lead.driver."""

    env: Mapping[str, str]
    """This agent's; its step's variables are no options for srun."""
    run_dir: RunDir
    """Gets the output of a node's srun and agent, as `back.log`."""
    patience_s: float
    """How long to start new tries for each node; an srun that runs at that time continues."""
    command: Sequence[str] = field(default_factory=lambda: [sys.executable, *sys.orig_argv[1:]])
    """The agent's command line: that of this process."""
    _tries: dict[str, Generator[str, float, None]] = field(default_factory=dict)
    """By node: gets the time of each turn, and yields the line for the user, mostly an empty one."""
    _sruns: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By node, of the latest try."""

    def expect(self, node: str, node_index: int) -> None:
        """Begin to try: the agent of this node is gone."""
        if node not in self._tries:
            self._tries[node] = self._try_again(node, srun_command(node, node_index, self.command, self.env))
            next(self._tries[node])  # up to the first turn

    def turn(self, now_s: float) -> list[str]:
        """Do what is due, without blocking; return lines for the user."""
        lines = [tries.send(now_s) for tries in list(self._tries.values())]
        return [line for line in lines if line]

    @property
    def pids(self) -> list[int]:
        """Pids of all srun processes."""
        return [srun.pid for srun in self._sruns.values() if srun.returncode is None]

    def close(self) -> None:
        """End every srun, and with it the agent that it started."""
        for srun in self._sruns.values():
            end_srun(srun)
        self._tries.clear()

    def _try_again(self, node: str, command: Sequence[str]) -> Generator[str, float, None]:
        """Start srun, again each time it has ended; the last line says why there is no further try."""
        pause_s, log = AGAIN_S, self.run_dir.node_path(node) / BACK_LOG
        why = f"{node} has not come back; see {log}"
        now_s = yield ""
        end_s = now_s + self.patience_s
        now_s = yield f"{node}: its agent will be restarted when the node comes back; see {log}"
        while now_s < end_s:
            with self._open_log(node) as output:
                begin = output.tell()
                try:
                    self._sruns[node] = srun = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=step_env(self.env, kept=_KEPT),
                        start_new_session=True,  # Ctrl-C reaches only the agent, which ends this process, too
                        preexec_fn=die_with_parent(signal.SIGTERM),
                    )
                except OSError as exc:
                    output.write(f"srun: {exc.strerror}\n".encode())
                    break
            while srun.poll() is None:
                now_s = yield ""
            with contextlib.suppress(OSError), self.run_dir.hold_node(node, make=False).open_read(BACK_LOG) as file:
                file.seek(begin)
                said = file.read(1 << 16).decode(errors="replace")
                if any(words in said for words in TAKEN_AWAY):
                    why = f"{node}: SLURM has removed it from the job; it can take part again in the job's next run"
                    break
            again_s, pause_s = now_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
            while now_s < min(again_s, end_s):
                now_s = yield ""
        del self._tries[node]
        yield why

    def _open_log(self, node: str) -> BinaryIO:
        """Open the file for what srun prints; where the run directory has no room for it, nobody will read that."""
        with contextlib.suppress(OSError):
            return self.run_dir.hold_node(node).append(BACK_LOG)
        return os.fdopen(os.open(os.devnull, os.O_WRONLY), "wb")


def srun_command(node: str, node_index: int, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command that starts one agent on one node, beside the step that holds all resources.

    It takes the lost agent's place in the first step. SLURM_STEP_ID stays that of its own step, so cancelling this step
    does not cancel the others. ALLRANKS_STEP says which step it counts as, and so where the job's run directory is.

    Args:
        env: the leader's, a task of the first step.
    """
    variables: dict[str, object] = {name: env[name] for name in _OF_THE_STEP if name in env}
    variables |= dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID", "SLURM_GTIDS"), node_index)
    variables |= {"SLURM_LOCALID": 0, "SLURMD_NODENAME": node, BACK_VARIABLE: 1}
    variables["ALLRANKS_STEP"] = env.get("ALLRANKS_STEP") or env.get("SLURM_STEP_ID", "0")
    cpus_per_task = env.get("SLURM_CPUS_PER_TASK")  # without the option, the step may get one core
    return [
        *("srun", f"--jobid={env['SLURM_JOB_ID']}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"),
        *([f"--cpus-per-task={cpus_per_task}"] if cpus_per_task else []),
        *("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--export=ALL", "--input=none"),
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *command,
    ]

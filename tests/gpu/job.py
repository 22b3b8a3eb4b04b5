"""Starts what the tests of a GPU look at: jobs of `allranks run`, and ranks that nobody watches.

A job's nodes are agents on this one machine, with one rank each; all ranks use the same GPU (see rank.py). Everything
that they say lies in the job's folder, which run.py keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import allranks_command, clean_env, free_port, is_alive, wait_until

HERE = Path(__file__).parent
PATIENCE_S = 200.0 if os.environ.get("GPU_SUITE_REHEARSAL") == "1" else 50.0
"""run.py gives each test 60 s on a GPU; a rehearsal may be on a small and busy machine."""
NOT_ENDED = 999
GUARD = """\
[guard]
stopped_s = 2
slow_s = 2
"""


def is_rehearsal() -> bool:
    """Whether the CPU and Gloo take the place of the GPU and NCCL."""
    return os.environ.get("GPU_SUITE_REHEARSAL") == "1"


def suite_env(**more: str) -> dict[str, str]:
    """What every process of the suite runs in; scripts find `rank` beside this file."""
    path = [str(HERE), *filter(None, [os.environ.get("GPU_SUITE_PATH")])]
    return clean_env(os.environ, PYTHONPATH=os.pathsep.join(path), PYTHONIOENCODING="utf-8", **more)


class Job:
    """`allranks run` of a script on so many nodes, while the test lasts."""

    def __init__(
        self,
        where: Path,
        script: str | Path,
        *arguments: str,
        nodes: int = 2,
        min_nodes: int | None = None,
        ranks_per_node: int = 1,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cluster: str = GUARD,
        prefixes: Sequence[Sequence[str]] = (),
        endpoint: str = "localhost",
    ) -> None:
        """Start it.

        Args:
            where: folder of the job; nodes share it.
            script: a file, or the text of one.
            arguments: of the script.
            nodes: agents on this machine; one: without a rendezvous.
            min_nodes: with how many it goes on; with all of them if None.
            ranks_per_node: more than one: they share the GPU although they are on one node.
            flags: of `allranks run`.
            env: beside the usual.
            cluster: text of cluster.toml.
            prefixes: of each node's command line, such as `ip netns exec a`.
            endpoint: where the nodes meet.
        """
        self.where = where
        where.mkdir(parents=True)
        (where / "cluster.toml").write_text(cluster)
        path = script if isinstance(script, Path) else where / "script.py"
        if isinstance(script, str):
            path.write_text(textwrap.dedent(script))
        span = f"{min_nodes or nodes}:{nodes}"
        meet = ["--nnodes", span, "--rdzv-endpoint", f"{endpoint}:{free_port()}"] if nodes > 1 else []
        meet += ["--nproc-per-node", str(ranks_per_node), "--rdzv-id", "job", "--cluster", str(where / "cluster.toml")]
        self._agents = []
        self.began_s = time.monotonic()
        for index in range(nodes):
            place = ["--node-rank", str(index)] if nodes > 1 else []
            own = {"NCCL_HOSTID": f"host-{index}"} if nodes > 1 else {}
            prefix = prefixes[index] if prefixes else []
            node = chr(ord("a") + index)
            with (where / f"{node}.out").open("w") as out, (where / f"{node}.err").open("w") as err:
                self._agents.append(
                    subprocess.Popen(
                        [*prefix, *allranks_command("run", *meet, *place, *flags, path, *arguments)],
                        cwd=where, env=suite_env(SLURMD_NODENAME=node, **own, **(env or {})), stdin=subprocess.DEVNULL,
                        stdout=out, stderr=err,
                    )
                )  # fmt: skip

    @property
    def out(self) -> str:
        """What all nodes' ranks wrote to standard output."""
        return "".join(path.read_text() for path in sorted(self.where.glob("?.out")))

    @property
    def err(self) -> str:
        """What all agents said; the first one is the leader."""
        return "".join(path.read_text() for path in sorted(self.where.glob("?.err")))

    @property
    def rank_errors(self) -> str:
        """What all ranks wrote to standard error, of all generations."""
        return "".join(path.read_text() for path in sorted(self.where.glob("runs/job/attempt_*/*/rank_*.err*")))

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Of the verdict."""
        return list(json.loads((self.where / "runs/job/attempt_0/verdict.json").read_text())["findings"])

    def culprits(self) -> list[tuple[str, list[int]]]:
        """Cause and ranks of each finding that is a failure: `("AR407", [1])`."""
        failures = [each for each in self.findings if each["severity"] == "fail"]
        return [(each["cause_id"], list(each.get("ranks") or [])) for each in failures]

    def json_of(self, rank: int) -> Any:
        """What a rank told by `rank.tell`."""
        return json.loads((self.where / f"{rank}.json").read_text())

    def wait_for(self, text: str, *, timeout_s: float = PATIENCE_S) -> float:
        """Wait until somebody says this; returns the clock."""
        wait_until(
            lambda: text in self.out + self.err or (self._all_ended() and self._fail(text)), repr(text), timeout_s
        )
        return time.monotonic()

    def _all_ended(self) -> bool:
        return all(agent.poll() is not None for agent in self._agents)

    def _fail(self, text: str) -> bool:
        if text in self.out + self.err:
            return True
        raise AssertionError(f"the job ended and nobody said {text!r}:\n{self.tail()}")

    def strike(self, rank: int, signum: int) -> float:
        """Send a signal to one rank; returns when."""
        os.kill(int((self.where / f"{rank}.pid").read_text()), signum)
        return time.monotonic()

    def kill_agent(self, node: int) -> float:
        """Send SIGKILL to one node's agent; returns when."""
        self._agents[node].kill()
        return time.monotonic()

    def end(self, *, timeout_s: float = PATIENCE_S) -> list[int]:
        """Wait for all agents; returns their exit codes."""
        end_s = time.monotonic() + timeout_s
        try:
            return [agent.wait(max(0.1, end_s - time.monotonic())) for agent in self._agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout_s:.0f} s:\n{self.tail()}") from None

    def tail(self) -> str:
        """The last words of all, for messages."""
        return f"{self.out[-1500:]}\n{self.err[-3000:]}\n{self.rank_errors[-3000:]}"

    def close(self) -> None:
        """End whatever is left of it."""
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(8)
            agent.kill()
            agent.wait(5)
        for path in self.where.glob("*.pid"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                if is_alive(pid := int(path.read_text())):
                    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of ranks that nobody watched."""

    codes: list[int]
    """By rank; NOT_ENDED for one that had to be killed."""
    text: str
    """What all of them wrote, with `[rank]` before each line, as torchrun shows it."""


def run_bare(
    where: Path,
    script: str,
    *,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    strike: tuple[int, int] | None = None,
    timeout_s: float = PATIENCE_S,
) -> Ended:
    """Run ranks as a plain launcher does, so that NCCL itself says what is wrong; keeps what they wrote in `where`.

    Args:
        where: folder for the script and `rank_0.err` and so on.
        script: its text. A rank that prints `READY` may be struck.
        ranks: how many; they share the GPU.
        env: beside the usual.
        strike: a rank and the signal that it gets when all ranks are ready.
        timeout_s: ranks that still run then are killed.
    """
    where.mkdir(parents=True)
    (where / "script.py").write_text(textwrap.dedent(script))
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    place |= {"MASTER_PORT": str(free_port()), "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(ranks):
        with (where / f"rank_{rank}.out").open("w") as out, (where / f"rank_{rank}.err").open("w") as err:
            own = suite_env(**{**place, **(env or {}), "RANK": str(rank)})
            command = [sys.executable, "-u", str(where / "script.py")]
            processes.append(subprocess.Popen(command, cwd=where, env=own, stdout=out, stderr=err))
    end_s = time.monotonic() + timeout_s
    try:
        if strike:
            outs = [where / f"rank_{rank}.out" for rank in range(ranks)]
            wait_until(lambda: all("READY" in path.read_text() for path in outs), "all ranks are ready", timeout_s)
            processes[strike[0]].send_signal(strike[1])
        struck = processes[strike[0]] if strike else None
        for process in sorted(processes, key=lambda each: each is struck):
            left_s = 0.5 if process is struck else end_s - time.monotonic()  # a stopped one does not end
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, left_s))
        codes = [NOT_ENDED if (code := process.poll()) is None else code for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [
        f"[rank{rank}]: {line}"
        for rank in range(ranks)
        for kind in ("out", "err")
        for line in (where / f"rank_{rank}.{kind}").read_text().splitlines()
    ]
    return Ended(codes, "\n".join(lines))


def run_one(where: Path, script: str, *, env: Mapping[str, str] | None = None, timeout_s: float = PATIENCE_S) -> Any:
    """Run a script without any group, and return what it told by `rank.tell`."""
    ended = run_bare(where, script, ranks=1, env=env, timeout_s=timeout_s)
    assert ended.codes == [0], ended.text
    return json.loads((where / "0.json").read_text())


def why(where: Path) -> list[str]:
    """Ids of the causes that `allranks why` finds in these logs, the culprit first."""
    logs = sorted(map(str, [*where.glob("rank_*.out"), *where.glob("rank_*.err")]))
    ran = subprocess.run(
        allranks_command("why", "--json", *logs), cwd=where, env=suite_env(), capture_output=True, text=True,
        timeout=40, check=False,
    )  # fmt: skip
    (where / "why.json").write_text(ran.stdout + ran.stderr)
    return re.findall(r'"cause": ?"(AR\d{3})', ran.stdout)

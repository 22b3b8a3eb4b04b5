"""What happens after a fault: a discrete-event job whose ranks, agents, srun and kernel react and write lines.

Delays are those of torch, NCCL, torchrun and srun: a lost peer is noticed after 3 to 20 s over InfiniBand and at once
over sockets, a blocked collective after its timeout, an ended worker when its agent looks next; srun ends the other
tasks if it is told to.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from .collectives import Deviation, Operation, Place, Play, program_of
from .lines import Fields, Line, Mark, Speaker
from .plan import NCCL, POLL_S, TORCH, Plan
from .wordings import Wording, choose_wording

SIGNALS = {-6: "Aborted (core dumped)", -7: "Bus error", -9: "Killed", -11: "Segmentation fault", -15: "Terminated"}
"""As strsignal names them in srun's lines."""
GROUPS = {"tp": "mesh_tp", "dp": "mesh_dp", "pp": "mesh_pp", "me": "metrics"}
"""Beginning of a group's name in the play -> its description in torch."""
SIGNAL_NAMES = {-6: "SIGABRT", -7: "SIGBUS", -9: "SIGKILL", -11: "SIGSEGV", -15: "SIGTERM"}


class Job:
    """One job, from the first line to the last."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        self.now_s = 0.0
        self.lines: list[Line] = []
        self.is_alive = [True] * plan.world
        self.pids = list(plan.pids)
        self._known: dict[tuple[Speaker, int], dict[str, Any]] = {}
        self.attempt = 0
        """Starts of the workers before this one."""
        self.step = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._wordings: dict[str, Wording] = {}
        self.aliases: dict[str, str] = {}
        """Keys of wordings -> those of the program that takes the usual one's place."""
        self._places: list[Place] | None = None
        self._ended: dict[int, list[tuple[int, int, int | None]]] = {}
        """By node: ranks that ended, with code and fault."""
        self._is_agent_busy = [False] * plan.num_nodes
        self._is_agent_alive = [True] * plan.num_nodes
        self._is_lost = [False] * plan.num_nodes
        """Nodes that are gone: nobody there writes any more."""
        self._first_timeout: int | None = None
        self._is_step_ending = False
        self._is_store_gone = False
        self._abort_s = rng.uniform(0.05, 0.3) if plan.versions["torch"] == "2.0" else rng.uniform(2, 40)
        self._kernel_form = rng.choice(("seconds", "date", "journal"))
        self.weak_causes: dict[int, tuple[str, ...]] = {}
        """By fault: what an exit code alone fits."""
        self.code_level: dict[int, int] = {}
        """By fault: how much the exit code or signal shows (Mark.level)."""
        self.end_word: dict[int, str] = {}
        """By rank: what srun says of its end, where that is no signal: Out Of Memory."""

    # Time

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, call, arguments))

    def run(self, until_s: float = 1e12) -> None:
        """Let everything happen."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, call, arguments = heapq.heappop(self._heap)
            call(*arguments)

    # Lines

    def forget(self, key: str) -> None:
        """Choose another wording the next time."""
        self._wordings.pop(key, None)

    def wording(self, key: str) -> Wording:
        """Return the wording that this job has for it, the same each time."""
        key = self.aliases.get(key, key)
        if key not in self._wordings:
            self._wordings[key] = choose_wording(key, self.plan.versions, self.rng)
        return self._wordings[key]

    def node_of(self, speaker: Speaker) -> int:
        """Return the node on which somebody runs; srun runs on the first."""
        kind, number = speaker
        return self.plan.node_of(number) if kind == "rank" else number

    def fields(self, speaker: Speaker, at_s: float, extra: Mapping[str, Any]) -> Fields:
        """Return the values for a wording that somebody uses at a time, by its own clock."""
        plan = self.plan
        when = plan.start + timedelta(seconds=at_s + plan.skews_s[self.node_of(speaker)])
        key = (speaker, self.attempt)
        if key not in self._known:
            self._known[key] = self._lasting_fields(speaker)
        fields = Fields(self._known[key])
        fields["step"] = self.step
        fields["milli"] = when.microsecond // 1000
        fields.update(extra)
        fields.when, fields.nanos = when, (when.microsecond * 7) % 1000
        return fields

    def _lasting_fields(self, speaker: Speaker) -> dict[str, Any]:
        """Return the values that hold for all lines of somebody in one start of the workers."""
        plan, node = self.plan, self.node_of(speaker)
        fields: dict[str, Any] = {
            "node": plan.nodes[node],
            "ip": plan.ip_of(node),
            "master": plan.nodes[0],
            "agent_pid": plan.agent_pid(node),
            "job": plan.job_id,
            "run_id": plan.job_id,
            "world": plan.world,
            "script": plan.script,
            "nccl_full": f"{NCCL[plan.versions['nccl']]}+cuda12.4",
            "torch_full": TORCH[plan.versions["torch"]],
            "number": plan.seed % 97 + 3,
            "tp": plan.tensor,
            "pp": plan.pipeline,
            "dp": plan.data,
        }
        if speaker[0] == "rank":
            rank = speaker[1]
            local = plan.local_of(rank)
            fields |= {
                "rank": rank,
                "local": local,
                "pid": self.pids[rank],
                "tid": self.pids[rank] + 611,
                "child": self.pids[rank] + 733,
                "bus": f"{(local * 0x11 + 0x0B) << 12:x}",
            }
        return fields

    def say(self, speaker: Speaker, key: str, *, mark: Mark | None = None, stream: str = "err",
            stuck: tuple[Any, ...] = (), **extra: Any) -> None:  # fmt: skip
        """Let somebody write a line now."""
        if speaker[0] != "events" and self._is_lost[self.node_of(speaker)]:
            return
        wording = self.wording(key)
        text = wording.text.format_map(self.fields(speaker, self.now_s, extra))
        if speaker[0] == "kernel":
            text = self._as_kernel(speaker[1], text)
        self.lines.append(Line(self.now_s, speaker, text, stream, mark, wording.names, self.attempt, stuck))

    def _as_kernel(self, node: int, text: str) -> str:
        plan = self.plan
        when = plan.start + timedelta(seconds=self.now_s + plan.skews_s[node])
        uptime = f"[{86400 * 3 + self.now_s:.6f}]"
        head = {
            "seconds": uptime,
            "date": f"[{when:%a %b} {when.day:2d} {when:%H:%M:%S %Y}]",
            "journal": f"{when:%b %d %H:%M:%S} {plan.nodes[node]} kernel: {uptime}",
        }[self._kernel_form]
        return "\n".join(f"{head} {line}" for line in text.split("\n"))

    def kernel(self, node: int, key: str, mark: Mark | None = None, **extra: Any) -> None:
        """Let the kernel of a node write, if its log is kept."""
        if self.plan.has_kernel_log:
            self.say(("kernel", node), key, mark=mark, **extra)

    def raise_(self, rank: int, key: str, *, mark: Mark | None = None, fault: int | None = None) -> None:
        """Let a rank end with an exception."""
        if self.is_alive[rank]:
            self.say_exception(rank, key, mark)
            self.after(self.rng.uniform(0.2, 2.5), self.end, rank, 1, fault)

    def say_exception(self, rank: int, key: str, mark: Mark | None = None) -> None:
        """Let a rank write an exception; torch 2.3 and later put its number before each line."""
        wording = self.wording(key)
        text = wording.text.format_map(self.fields(("rank", rank), self.now_s, {}))
        names = wording.names - {"rank"}
        if self.plan.versions["torch"] != "2.0" and self.rng.random() < 0.9:
            text = "\n".join(f"[rank{rank}]: {line}" for line in text.split("\n"))
            names |= {"rank"}
        self.lines.append(Line(self.now_s, ("rank", rank), text, "err", mark, names, self.attempt))

    # Blocked collectives

    def block(self, deviations: Mapping[int, Deviation], *, also_blocked: tuple[int, ...] = ()) -> None:
        """Bring all ranks where they stand when some deviate, and let watchdogs wait for it.

        Args:
            deviations: by rank.
            also_blocked: ranks that stop in the sense of the play, but have enqueued their next operation.
        """
        places = Play(self.plan, deviations, self.step, self.rng).run()
        for rank in also_blocked:
            operation = program_of(self.plan, rank)[deviations[rank].index]
            place = places[rank]
            place.enqueued[operation.group] += 1
            place.blocked, place.seq = operation, place.enqueued[operation.group]
            place.since_s = min((other.since_s for other in places if other.blocked), default=0.0)
        self._places = places
        first_s = min((place.since_s for place in places if place.blocked), default=0.0)
        for rank, place in enumerate(places):
            if place.blocked:
                delay = self.plan.timeout_s + place.since_s - first_s + self.rng.uniform(0.01, 0.4)
                self.after(delay, self._time_out, rank)

    def _group(self, rank: int, operation: Operation) -> dict[str, Any]:
        plan = self.plan
        kind = operation.group[:2]
        is_default = kind == "dp" and plan.world == plan.data
        number = 0 if is_default else {"tp": 1, "dp": 2, "pp": 3, "me": 4}[kind]
        return {
            "group": "default_pg" if is_default else GROUPS[kind],
            "group_id": number,
            "group_guid": 0 if is_default else number + operation.members[0] * 4,
            "group_rank": operation.members.index(rank),
        }  # fmt: skip

    def _stands(self, rank: int) -> dict[str, Any]:
        assert self._places is not None
        place = self._places[rank]
        operation = place.blocked
        assert operation is not None
        return {
            "seq": place.seq,
            "op": operation.op,
            "numel": operation.numel,
            "numel_out": operation.numel_out,
            "timeout_ms": self.plan.timeout_s * 1000,
            "enqueued": place.enqueued[operation.group],
            "completed": place.completed[operation.group],
            **self._group(rank, operation),
        }

    def _time_out(self, rank: int) -> None:
        if not self.is_alive[rank]:
            return
        assert self._places is not None
        place = self._places[rank]
        stands = self._stands(rank) | {"ran_ms": self.plan.timeout_s * 1000 + self.rng.randrange(3, 980)}
        assert place.blocked is not None
        told = ("timeout", rank, place.blocked.group, place.seq, place.blocked.op, place.blocked.members)
        self.say(("rank", rank), "timeout", stuck=told, **stands)
        if self.plan.versions["torch"] != "2.0":
            self.say(("rank", rank), "timeout-status", **stands)
        if self._first_timeout is None:
            self._first_timeout = rank
            if self.plan.versions["torch"] != "2.0":
                for other in range(self.plan.world):
                    self.after(self.rng.uniform(0.3, 1.4), self._see_dump_signal, other)
        if self.plan.is_watchdog_stuck and rank == self._first_timeout:
            self.after(480, self._get_stuck, rank)
            return
        self.after(self._abort_s + self.rng.uniform(0, 0.2), self._abort, rank, "timeout-end", stands)

    def _get_stuck(self, rank: int) -> None:
        """The watchdog could not abort: its monitor ends the process, minutes after the timeout."""
        if self.is_alive[rank]:
            self.say(("rank", rank), "watchdog-stuck")
            self.after(5, self.end, rank, -6)

    def _see_dump_signal(self, rank: int) -> None:
        if not self.is_alive[rank]:
            return
        assert self._places is not None
        place = self._places[rank]
        default = next((group for group in place.enqueued if group.startswith("dp")), None)
        is_flat = self.plan.world == self.plan.data and default is not None
        enqueued = place.enqueued[default] if is_flat and default else 8
        completed = place.completed[default] if is_flat and default else 8
        told = ("behind", rank, default, enqueued) if is_flat else ()
        self.say(
            ("rank", rank), "dump-signal", stuck=told, first=self._first_timeout, enqueued=enqueued, completed=completed
        )
        if place.blocked is None:
            self.after(self._abort_s + self.rng.uniform(15, 30), self._end_after_dump, rank)

    def _end_after_dump(self, rank: int) -> None:
        if self.is_alive[rank]:
            self.say(("rank", rank), "dump-end")
            self.after(0.1, self.end, rank, -6)

    def _abort(self, rank: int, key: str, stands: Mapping[str, Any]) -> None:
        if self.is_alive[rank]:
            if key == "timeout-end":
                self.say(("rank", rank), "taken-down")
            self.say(("rank", rank), key, **stands)
            self.after(self.rng.uniform(0.01, 0.3), self.end, rank, -6)

    # Lost peers

    def lose_peer(self, rank: int, peer: int, fault: int | None) -> None:
        """Let a rank notice over the network that a peer is gone."""
        if not self.is_alive[rank]:
            return
        plan = self.plan
        peer_node = plan.node_of(peer)
        local = plan.local_of(rank)
        port = 30000 + (rank * 37 + peer) % 20000
        key = "ib-status-12" if plan.net == "ib" else "socket-closed"
        mark = None if fault is None else Mark(fault, is_of_speaker=False, address=True)
        names = {"peer_ip": plan.ip_of(peer_node), "peer_node": plan.nodes[peer_node], "port": port, "hca": local}
        self.say(("rank", rank), key, mark=mark, **names)
        last = (
            f"NET/IB: Got completion from peer {names['peer_ip']}<{port}> with status=12 opcode=0 len=0 vendor err 129"
            if plan.net == "ib"
            else f"socketProgress: Connection closed by remote peer {names['peer_node']}<{port}>"
        )
        self.after(
            self.rng.uniform(0.05, 1), self._abort, rank, "peer-error", self._stands(rank) | {"last_error": last}
        )

    def _tell_neighbours(self, dead: int, fault: int | None) -> None:
        plan = self.plan
        if self._places is None or (plan.net == "socket" and self._is_lost[plan.node_of(dead)]):
            return
        for rank, place in enumerate(self._places):
            operation = place.blocked
            if operation is None or dead not in operation.members or plan.node_of(rank) == plan.node_of(dead):
                continue
            size = len(operation.members)
            distance = (operation.members.index(rank) - operation.members.index(dead)) % size
            if distance in {1, size - 1}:
                delay = self.rng.uniform(3, 20) if plan.net == "ib" else self.rng.uniform(0.01, 0.6)
                self.after(delay, self.lose_peer, rank, dead, fault)

    # Ends

    def end(self, rank: int, code: int, fault: int | None = None) -> None:
        """End a rank's process; its launcher and its peers will notice."""
        if not self.is_alive[rank]:
            return
        plan = self.plan
        self.is_alive[rank] = False
        node = plan.node_of(rank)
        self._ended.setdefault(node, []).append((rank, code, fault))
        self._tell_neighbours(rank, fault)
        if plan.has_agents:
            if not self._is_agent_busy[node] and code != 0:
                self._is_agent_busy[node] = True
                poll = POLL_S[plan.versions["torch"]]
                self.after(self.rng.uniform(0.02, poll), self._agent_looks, node)
            return
        if rank == 0 and code != 0:
            self._lose_store()
        if code != 0 and not self._is_step_ending:
            self.after(self.rng.uniform(0.02, 0.8), self._srun_sees, rank, code, fault)

    def _mark_of(self, fault: int | None) -> Mark | None:
        if fault is None:
            return None
        return Mark(fault, self.weak_causes[fault], level=self.code_level.get(fault, 1), is_of_speaker=False)

    def _srun_sees(self, rank: int, code: int, fault: int | None) -> None:
        node = self.plan.nodes[self.plan.node_of(rank)]
        extra = {"node": node, "task": rank, "code": code}
        mark = self._mark_of(fault)
        if word := self.end_word.get(rank):
            told = None if fault is None else Mark(fault, ("host-oom-kill",), level=2, is_of_speaker=False)
            self.say(("srun", 0), "task-signal", mark=told, signal=word, **extra)
        elif code > 0:
            self.say(("srun", 0), "task-exit", mark=mark, **extra)
        else:
            self.say(("srun", 0), "task-signal", mark=mark, signal=SIGNALS[code], **extra)
        if self.plan.is_kill_on_bad_exit:
            self.end_step()

    def end_step(self, why: str = "step-cancelled", *, is_own: bool = True, mark: Mark | None = None) -> None:
        """Let srun end all tasks, once.

        Args:
            why: the line that slurmstepd writes.
            is_own: srun decided it, because a task failed.
            mark: what the line tells.
        """
        if self._is_step_ending:
            return
        self._is_step_ending = True
        if is_own:
            self.say(("srun", 0), "terminating")
        first = self._is_lost.index(False)
        self.after(0.01, lambda: self.say(("stepd", first), why, mark=mark))
        if self.rng.random() < 0.6:
            self.say(("srun", 0), "step-aborted")
        for node in range(self.plan.num_nodes):
            self.after(self.rng.uniform(0.05, 1.5), self._terminate_node, node)
        self.after(self.rng.uniform(4, 30), self.say, ("srun", 0), "force-terminated")

    def _terminate_node(self, node: int) -> None:
        plan = self.plan
        alive = [rank for rank in plan.ranks_of(node) if self.is_alive[rank]]
        if plan.has_agents:
            if self._is_agent_alive[node] and not self._is_lost[node]:
                self.close_agent(node)
                if plan.is_slurm:
                    self.after(1.5, self.say_srun, node, [node], 1)
            return
        if alive and not self._is_lost[node]:
            self._end_tasks(node, -15) if self.rng.random() < 0.8 else self.after(30, self._end_tasks, node, -9)

    def _end_tasks(self, node: int, code: int) -> None:
        """SIGTERM ends the tasks of a node, or SIGKILL half a minute later."""
        alive = [rank for rank in self.plan.ranks_of(node) if self.is_alive[rank]]
        for rank in alive:
            self.end(rank, code)
        if alive:
            self.after(0.4, self.say_srun, node, alive, code)

    def say_srun(self, node: int, tasks: list[int], code: int) -> None:
        """Let srun say how several tasks of a node ended."""
        name = f"task{'s' if len(tasks) > 1 else ''} {_fold(tasks)}"
        extra = {"node": self.plan.nodes[node], "tasks": name, "code": code}
        if code > 0:
            self.say(("srun", 0), "tasks-exit", **extra)
        else:
            self.say(("srun", 0), "tasks-signal", signal=SIGNALS[code], **extra)

    def close_agent(self, node: int) -> None:
        """Send SIGTERM to an agent: it ends its workers and itself."""
        if not self._is_agent_alive[node]:
            return
        self._is_agent_alive[node] = False
        self._is_agent_busy[node] = True
        self.say(("agent", node), "agent-told-to-end")
        for rank in self.plan.ranks_of(node):
            if self.is_alive[rank]:
                self.say(("agent", node), "agent-closes", pid=self.pids[rank])
                self.end(rank, -15)
        self.after(self.rng.uniform(0.2, 1.5), self.say, ("agent", node), "agent-signal")

    def _agent_looks(self, node: int) -> None:
        """An agent finds workers that ended, ends the others and gives its summary."""
        if not self._is_agent_alive[node] or self._is_lost[node]:
            return
        plan = self.plan
        found = sorted(self._ended[node])  # of those that it finds at once the first by number
        seen_s = self.now_s
        for rank in plan.ranks_of(node):
            if self.is_alive[rank]:
                self.say(("agent", node), "agent-closes", pid=self.pids[rank])
                self.after(self.rng.uniform(0.01, 0.4), self.end, rank, -15)
        self.after(self.rng.uniform(0.5, 2), self._agent_sums_up, node, found, seen_s)

    def _agent_sums_up(self, node: int, found: list[tuple[int, int, int | None]], seen_s: float) -> None:
        if not self._is_agent_alive[node] or self._is_lost[node]:
            return
        plan = self.plan
        rank, code, fault = found[0]
        agent = ("agent", node)
        self.say(
            agent, "agent-failed", mark=self._mark_of(fault), code=code, local=plan.local_of(rank), pid=self.pids[rank]
        )
        self.say(agent, "summary-trace")
        title = f"{plan.script.rpartition('/')[2]} FAILED"
        self._write(agent, f"{'=' * 60}\n{title}\n{'-' * 60}\nFailures:")
        for index, entry in enumerate(found[1:], 1):
            self._entry(agent, index, entry, seen_s)
        if not found[1:]:
            self._write(agent, "  <NO_OTHER_FAILURES>")
        self._write(agent, f"{'-' * 60}\nRoot Cause (first observed failure):")
        self._entry(agent, 0, found[0], seen_s)
        self._write(agent, "=" * 60)
        self.after(self.rng.uniform(0.3, 2), self._end_agent, node)

    def _write(self, speaker: Speaker, text: str) -> None:
        self.lines.append(Line(self.now_s, speaker, text))

    def _entry(self, agent: Speaker, index: int, entry: tuple[int, int, int | None], at_s: float) -> None:
        rank, code, fault = entry
        plan = self.plan
        when = plan.start + timedelta(seconds=at_s + plan.skews_s[agent[1]])
        self.say(
            agent,
            "summary-entry",
            mark=self._mark_of(fault),
            index=index,
            torch_time=f"{when:%Y-%m-%d_%H:%M:%S}",
            rank=rank,
            local=plan.local_of(rank),
            code=code,
            pid=self.pids[rank],
            trace=f"Signal {-code} ({SIGNAL_NAMES[code]}) received by PID {self.pids[rank]}"
            if code < 0
            else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        )

    def _end_agent(self, node: int) -> None:
        if not self._is_agent_alive[node]:
            return
        plan = self.plan
        self._is_agent_alive[node] = False
        if node == 0:
            self._lose_store()
        if plan.is_slurm and not self._is_step_ending:
            fault = next((fault for _, _, fault in self._ended[node] if fault is not None), None)
            mark = None if fault is None else Mark(fault, is_of_speaker=False)
            extra = {"node": plan.nodes[node], "task": node, "code": 1}
            self.say(("srun", 0), "task-exit", mark=mark, **extra)
            if plan.is_kill_on_bad_exit:
                self.after(0.05, self.end_step)
        if plan.launcher == "pods" and plan.is_kill_on_bad_exit:
            for other in range(plan.num_nodes):  # the operator deletes the pods of a failed job
                self.after(self.rng.uniform(1, 20), self._terminate_node, other)

    def _lose_store(self) -> None:
        """The process with the store is gone: whoever asks it next says so."""
        if self._is_store_gone:
            return
        self._is_store_gone = True
        plan = self.plan
        if plan.has_agents:
            for node in range(1, plan.num_nodes):
                self.after(self.rng.uniform(1, 6), self._miss_store, node)
        elif plan.versions["torch"] != "2.0":
            for rank in range(1, plan.world):
                self.after(self.rng.uniform(0.1, 5), self._store_gone, rank)

    def _miss_store(self, node: int) -> None:
        if self._is_agent_alive[node]:
            self.say(("agent", node), "agent-lost-store")

    def _store_gone(self, rank: int) -> None:
        if self.is_alive[rank]:
            self.say(("rank", rank), "store-gone")

    def lose_node(self, node: int, fault: int) -> None:
        """A node is gone: nobody there writes any more; the others notice."""
        self._is_lost[node] = True
        for rank in self.plan.ranks_of(node):
            if self.is_alive[rank]:
                self.is_alive[rank] = False
                self._tell_neighbours(rank, fault)
        if node == 0:
            self._lose_store()


def _fold(numbers: list[int]) -> str:
    """Numbers as srun writes them: `0-3,7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)

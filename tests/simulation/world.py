"""One job lived through in virtual time: the real reducers of leader and agents on simulated machines and lines.

    world = World(draw(seed)).run()      # raises Violation if an invariant falls

Every event of a process comes at its own time; a process that is stopped gets what it missed when it goes on.
"""

from __future__ import annotations

import functools
import heapq
import signal
from collections.abc import Callable
from typing import Any

from allranks.guard.verdict import Guard
from allranks.host.slurm_job import OwnJob
from allranks.launch import events
from allranks.launch.lead.group import make_group
from allranks.launch.queue import ending
from allranks.model.beat import TrySeen
from allranks.model.card import Card
from allranks.model.cluster import GuardTable
from allranks.model.finding import Finding
from allranks.wire.protocol import Ping, Plan, Try

from .invariants import check_after, check_agent, check_end
from .kernel import Kernel, Machine, Worker
from .lives import FOREVER_S, Fault, Life, Stream
from .mutants import CORES, Cores
from .network import Line, Network, Process

TERMS = GuardTable(join_s=25, gone_s=3, beat_s=0.5, stopped_s=1.5, stalled_s=1.5, slow_s=8, hang_s=15)
CAPACITY_S = 12.0
LIMIT_S = 400.0
"""Longer than all deadlines of a life with all its restarts: who still runs then hangs."""
KILL_WAIT_S = 30.0


class World(Network):
    """One life."""

    def __init__(self, life: Life, cores: Cores = CORES, *, log: list[str] | None = None) -> None:
        self.life, self.cores = life, cores
        self.now_s = 1000.0
        self.begun_s = self.now_s
        self.log = log
        """What happens is written there; None: it is not, which is much faster."""
        self.num_events = 0
        self.shown: list[tuple[float, Finding]] = []
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.faulty: set[int] = set()
        """Nodes to which something has happened, or to one of their workers."""
        self.is_network_faulty = False
        self.verdicts: list[Any] = []
        self.requeues: list[Process] = []
        self.restarts = self.grows = 0
        self.phase_since_s = self.noticed_s = self.woke_s = self.now_s
        self.last_phase = "running"
        self.leader_generation = 0
        self.running: set[int] = set()
        self.running_before: set[int] = set()
        self.may_grow = self.has_acted = False
        self.told_s: float | None = None
        """Since when the leader knows of a stop signal."""
        self.left_out: set[int] = set()
        self.suspended_until_s = 0.0
        self.slept_s = self.slept_before_s = 0.0
        """How long the leader's process was stopped, at all and before this phase."""
        self.lost_first: dict[int, bool] = {}
        """By node: whether its agent lost the leader before it got a signal."""
        self.ending_s: dict[tuple[int, int], float] = {}
        """By node and generation: how long its workers took to end."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._rngs: dict[str, Stream] = {}
        self.cut: set[int] = set()
        self.slow: dict[int, float] = {}
        self._joining: dict[int, Line] = {}
        self.machines = [Machine(i, 600 * self.rng("clocks").random() - 300) for i in range(life.num_nodes)]
        self.kernel = Kernel(
            self.rng, self.machines, at=self.at, clock=lambda: self.now_s, on_end=self._worker_ended,
            num_steps=life.num_steps, is_tracked=life.is_tracked, is_cut=lambda node: node in self.cut,
        )  # fmt: skip
        self._begin()

    # Time

    def rng(self, purpose: str) -> Stream:
        if (rng := self._rngs.get(purpose)) is None:
            rng = self._rngs[purpose] = Stream(f"{purpose} {self.life.seed}")
        return rng

    def at(self, after_s: float, do: Callable[[], None]) -> None:
        if after_s < FOREVER_S:
            self._number += 1
            heapq.heappush(self._heap, (self.now_s + after_s, self._number, do))

    def run(self) -> World:
        """Live to the end."""
        end_s = self.begun_s + LIMIT_S
        heap, pop, first = self._heap, heapq.heappop, self.processes[0]
        while heap and heap[0][0] <= end_s and ((first.is_alive and not first.is_stopped) or not self.is_done):
            self.now_s, _, do = pop(heap)
            do()
        check_end(self)
        return self

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self._joining

    @property
    def waiting(self) -> list[Process]:
        """Processes that still run; without those that are stopped for good, or wait for such a leader to begin."""
        first = self.processes[0]
        is_leader_stopped = first.is_stopped and not first.goes_on
        running = [each for each in self.processes if each.is_alive and (each.goes_on or not each.is_stopped)]
        return [each for each in running if each.agent is not None or not is_leader_stopped]

    # Beginning

    def _begin(self) -> None:
        life = self.life
        self.cards = {
            i: Card(host=f"n{i}", pid=1, node_index=i, num_workers=life.workers, num_gpus=0)
            for i in range(life.num_nodes)
        }
        plans = make_group(
            self.cards, wanted_backend="gloo", attempt=0, store_address="10.0.0.1", store_port=1,
            max_restarts=life.max_restarts,
        )  # fmt: skip
        cores = self.cores
        self.leader = cores.Leader(
            cores.Terms(
                job="j", attempt=0, wanted_backend="gloo", store_address="10.0.0.1", store_port=1,
                num_nodes=life.num_nodes, min_nodes=life.min_nodes, max_restarts=life.max_restarts,
                capacity_s=CAPACITY_S,
            ),
            guard=Guard(TERMS),
            history=cores.History(restarts_left=life.max_restarts),
            nodes={i: cores.Node(card=each, name=f"n{i}", address=f"10.0.0.{i + 1}") for i, each in self.cards.items()},
            plans=plans,
            now_s=self.now_s,
        )  # fmt: skip
        self._feed_leader = events.Driver(self._step_leader, self._do_leader).feed
        self.lines: dict[int, Line] = {}
        self.processes: list[Process] = []
        self.current: dict[int, Process] = {}
        """By node, its newest process."""
        for node, plan in plans.items():
            process = Process(node)
            self.processes.append(process)
            self.current[node] = process
            process.line = self.lines[node] = Line(node, process)
            self._begin_agent(process, plan)
            self._begin_turns(process, life.turn_s * self.rng(f"turns {node}").random())
        for fault in life.faults:
            self.at(fault.at_s, lambda fault=fault: self._strike(fault))

    def _begin_agent(self, process: Process, plan: Plan) -> None:
        process.agent = agent = self.cores.Agent(plan, now_s=self.now_s)
        process.feed = events.Driver(self._stepper(process), lambda effect: self._do_agent(process, effect)).feed
        for effect in agent.begin():
            self._do_agent(process, effect)

    def _stepper(self, process: Process) -> Callable[[Any], list[Any]]:
        name, agent = f"n{process.node}", process.agent

        def step(event: Any) -> list[Any]:
            effects = agent.step(event)
            self._note(name, event, effects)
            return effects

        return step

    def _step_leader(self, event: Any) -> list[Any]:
        effects = self.leader.step(event)
        self._note("leader", event, effects)
        check_after(self, event, effects)
        return effects

    def _note(self, who: str, event: Any, effects: list[Any]) -> None:
        self.num_events += 1
        if self.log is not None and effects and not isinstance(getattr(effects[-1], "message", None), Ping):
            self.log.append(f"{self.now_s - self.begun_s:8.3f} {who:6} {type(event).__name__}: {effects}")

    # Processes

    def _on(self, process: Process, do: Callable[[], None]) -> None:
        """Something reaches a process: now, or when it goes on."""
        if process.is_stopped:
            process.backlog.append(do)
        elif process.is_alive:
            do()

    def _begin_turns(self, process: Process, after_s: float) -> None:
        process.draw, process.turn = self.rng(f"turns {process.node}").random, functools.partial(self._turn, process)
        self.at(after_s, process.turn)

    def _turn(self, process: Process) -> None:
        if not process.is_alive:
            return
        self.at(self.life.turn_s * (0.9 + 0.2 * process.draw()), process.turn)
        if process.is_stopped or process.agent is None:
            return
        agent = process.agent
        if agent.phase != "watching" or self.now_s >= process.due_s:
            process.due_s = self.now_s + self.life.beats_s / 2
            self._feed_agent(process, events.Due(now_s=self.now_s))
            check_agent(self, process)
        if agent.phase == "ending":
            key = (process.node, agent.plan.generation)
            self.ending_s[key] = self.ending_s.get(key, 0.0) + self.life.turn_s
        if agent.phase not in ("waiting", "gone") and self._has_news(process):
            self._observe(process)
        if process is self.processes[0]:
            self._feed_leader(events.Due(now_s=self.now_s))
        if agent.phase == "gone":
            self._exit(process)

    def _feed_agent(self, process: Process, event: Any) -> None:
        if process.is_alive and process.feed is not None:
            process.feed(event)

    def _has_news(self, process: Process) -> bool:
        """Whether a beat is due: its workers do something else than in the last one, or that is some time ago."""
        news = self.kernel.news(process.node)
        if news == process.told and self.now_s < process.tells_s:
            return False
        process.told, process.tells_s = news, self.now_s + self.life.beats_s
        return True

    def _observe(self, process: Process) -> None:
        plan = process.agent.plan
        beat = self.kernel.beat(process.node, plan.node_index, plan.generation)
        self._feed_agent(process, events.Observed(now_s=self.now_s, beat=beat))

    def _exit(self, process: Process) -> None:
        """An agent is through; what launch.job does at its end."""
        agent = process.agent
        process.is_alive, process.exit_code = False, agent.goodbye.exit_code
        self._close(process)
        if not self.life.is_slurm:
            return
        if process is self.processes[0]:
            sequel = self.cores.decide_sequel(
                process.exit_code,
                is_to_requeue=self.leader.is_to_requeue,
                interrupted_by=self.leader.interrupted_by or next(iter(process.signalled), None),
                has_restarts=bool(self.life.max_restarts) and not self.leader.is_finished,
            )
            if sequel.value == "requeue":
                self.requeues.append(process)
        elif agent.is_leader_lost and not process.signalled and self.life.max_restarts:
            self.at(TERMS.gone_s + 5.0, lambda: self._requeue_alone(process))

    def _requeue_alone(self, process: Process) -> None:
        """Requeue, unless the leader has written that it lost this node, or somebody has requeued already."""
        has_lost = any(name == "node_lost" and more["node"] == f"n{process.node}" for name, more in self.records)
        if not has_lost and not self.requeues:
            self.requeues.append(process)

    def _close(self, process: Process) -> None:
        """A process is gone, and its ends of all lines."""
        if process is self.processes[0]:
            for line in [*self.lines.values(), *self._joining.values()]:
                self._end_line(line, by_leader=True)
            self._joining.clear()
        if process.line is not None:
            self._end_line(process.line, by_leader=False)

    # Effects

    def _do_leader(self, effect: Any) -> None:
        answer_s = self.life.answer_s
        match effect:
            case events.Send(node=node, message=message):
                if (line := self.lines.get(node)) is not None:
                    if line.agent is not None and "continues without" in getattr(message, "summary", ""):
                        line.agent.was_left_out = True
                        self.left_out.add(node)
                        self._revive(node, 2.0)  # somebody starts it again by hand
                    self._tell_agent(line, message)
            case events.Disconnect(node=node):
                if (line := self.lines.pop(node, None)) is not None:
                    self._end_line(line, by_leader=True)
            case events.Accept(connection=number, node=node):
                self.lines[node] = self._joining.pop(number)
            case events.Reject(connection=number):
                line = self._joining.pop(number)
                if line.agent is not None:
                    line.agent.is_alive = False
                    self._revive(line.node, 3.0)
            case events.Record(event=name, fields=fields):
                self.records.append((name, dict(fields)))
            case events.Show(findings=findings):
                self.shown += [(self.now_s, finding) for finding in findings]
            case events.ExpectBack(node=node):
                if self.life.is_slurm and self.life.max_restarts:
                    self._revive(node, 2.0)
            case events.AskScheduler(signum=signum, save_s=save_s):
                job = OwnJob(id="1", restarts=0, num_nodes=1, is_heterogeneous=False) if self.life.is_slurm else None
                no = "" if self.life.can_requeue else "no batch script"
                meant = ending.decide(signum, job=job, save_s=save_s, no_requeue=no, grace_s=KILL_WAIT_S, left_s=60.0)
                self._answer(answer_s, events.Meant, signum=signum, decision=meant)
            case events.FindCheckpoint():
                self.kernel.checkpoints_found += 1
                self._answer(answer_s, events.CheckpointFound, step=self.kernel.checkpoint)
            case events.Over(verdict=verdict):
                self.verdicts.append(verdict)

    def _answer(self, after_s: float, kind: type, **more: Any) -> None:
        feed = lambda: self._feed_leader(kind(now_s=self.now_s, **more))  # noqa: E731
        self.at(after_s, lambda: self._on(self.processes[0], feed))

    def _revive(self, node: int, after_s: float) -> None:
        """SLURM starts the agent of a node again, as soon as the node is up."""
        if self.now_s - self.begun_s > LIMIT_S / 2:
            return
        self.at(after_s, lambda: self._start_again(node))

    def _start_again(self, node: int) -> None:
        first = self.processes[0]
        if not first.is_alive or first.is_stopped or self.leader.phase == "over" or node in self.lines:
            return
        if not self.machines[node].is_up or node in self.cut or self.current[node].is_alive:
            self._revive(node, 3.0)
            return
        process = Process(node)
        self.processes.append(process)
        self.current[node] = process
        self._number += 1
        process.line = self._joining[self._number] = Line(node, process, number=self._number)
        joined = events.Joined(
            now_s=self.now_s, connection=self._number, card=self.cards[node], address=f"10.0.0.{node + 1}"
        )
        self._feed_leader(joined)
        self._begin_turns(process, self.life.turn_s)

    def _do_agent(self, process: Process, effect: Any) -> None:
        life, node = self.life, process.node
        match effect:
            case events.Send(message=message):
                if process.line is not None and process.line.agent_open:
                    self._tell_leader(process.line, message)
            case events.Disconnect():
                if process.line is not None:
                    self._end_line(process.line, by_leader=False)
            case events.Start(plan=plan):
                self.at(life.start_s, lambda: self._on(process, lambda: self._start(process, plan)))
            case events.Signal(signum=signum, ranks=ranks):
                for worker in self.machines[node].crew:
                    if worker.rank in ranks:
                        self.kernel.signal(worker, signum)
            case events.GiveOrder(order=order):
                for worker in self.machines[node].crew:
                    worker.order = order
            case events.MakeTries(order=order):
                self.at(order.within_s / 2, lambda: self._tried(node, order))
            case events.Sweep():
                swept = lambda: self._feed_agent(process, events.Swept(now_s=self.now_s))  # noqa: E731
                self.at(life.sweep_s, lambda: self._on(process, swept))

    def _start(self, process: Process, plan: Plan) -> None:
        crew = self.kernel.start(plan, process.node)
        pids = {worker.rank: worker.pid for worker in crew}
        self._feed_agent(process, events.Started(now_s=self.now_s, generation=plan.generation, pids=pids))
        self._observe(process)

    def _worker_ended(self, worker: Worker) -> None:
        process = self.current[worker.node]

        def tell() -> None:
            if process.agent is None or worker.end is None:
                return
            if worker.end.exit_code and not worker.is_told:
                self._observe(process)
            is_finished = worker.end.exit_code == 0 and self.kernel.generations[worker.generation].step >= (
                self.life.num_steps
            )
            ended = events.WorkerEnded(
                now_s=self.now_s, generation=worker.generation, end=worker.end, age_s=self.now_s - worker.end.time_s,
                is_finished=is_finished and self.life.is_tracked,
            )  # fmt: skip
            self._feed_agent(process, ended)

        self.at(0.01, lambda: self._on(process, tell))

    def _tried(self, node: int, order: Try) -> None:
        for target in order.targets:
            index = int(target.address.rpartition(".")[2]) - 1
            machine, process = self.machines[index], self.current[index]
            is_reached = machine.is_up and not {index, node} & self.cut
            is_refused = is_reached and not process.is_alive
            seen = TrySeen(
                target=target.node_index, network=target.network, connects=is_reached, refused=is_refused,
                carries=True if is_reached and not is_refused else None,
            )  # fmt: skip
            self.machines[node].tries = [*self.machines[node].tries[-8:], (self.now_s, seen)]

    # Faults

    def _strike(self, fault: Fault) -> None:
        from .strikes import strike

        strike(self, fault)

    def kill(self, process: Process, *, is_node: bool) -> None:
        """A process is killed, and its workers with it; a dead node says nothing any more."""
        if not process.is_alive:
            return
        process.is_alive, process.was_killed, process.is_stopped, process.goes_on = False, True, False, False
        process.backlog.clear()
        if not is_node:
            self._close(process)
            return
        own = list(self.lines.values()) if process is self.processes[0] else [process.line]
        for line in filter(None, own):
            self.at(TERMS.gone_s, lambda line=line: self._break_line(line))

    def signal(self, process: Process, signum: int) -> None:
        """A process gets a signal."""
        if not process.is_alive:
            return
        if process.agent is None:
            process.is_alive = signum == signal.SIGUSR1
            if not process.is_alive and process.line is not None:
                self._end_line(process.line, by_leader=False)
            return
        if signum != signal.SIGUSR1:
            process.signalled.append(signum)
        self._on(process, lambda: self._feed_agent(process, events.Signalled(now_s=self.now_s, signum=signum)))

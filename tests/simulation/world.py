"""One job lived through in virtual time: the real reducers of leaders and agents on simulated machines and lines.

    world = World(draw(seed)).run()      # raises Violation if an invariant falls

Every event of a process comes at its own time; a process that is stopped gets what it missed when it goes on.
"""

from __future__ import annotations

import functools
import heapq
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from allranks.launch import events
from allranks.launch.lead.assignment import make_group
from allranks.launch.succession import find_events
from allranks.launch.workers import LINGERS_S
from allranks.model.beat import TrySeen
from allranks.model.card import Card
from allranks.model.finding import Finding
from allranks.model.past import History, Past
from allranks.wire.protocol import Beat, Ended, Order, Ping, Plan, Srun, Try, WorkerEnd

from . import dialing
from .ending import Ends
from .invariants import check_agent, check_kill, check_save, check_start, check_step, check_succession, check_take_over
from .kernel import Generation, Kernel, Machine, Worker
from .leading import Lead
from .lives import FOREVER_S, Life, Stream
from .mutants import CORES, Cores
from .network import GONE_S, Process, copied
from .outcomes import check_end
from .strikes import Strikes
from .terms import LIMIT_S


class World(Ends, Strikes):
    """One life."""

    def __init__(self, life: Life, cores: Cores = CORES, *, log: list[str] | None = None) -> None:
        self.life, self.cores = life, cores
        self.now_s = self.begun_s = 1000.0
        self.log = log
        """What happens is written there; None: it is not, which is much faster."""
        self.num_events = 0
        self.shown: list[tuple[float, Finding]] = []
        self.faulty: set[int] = set()
        """Nodes to which something has happened, or to one of their workers."""
        self.verdicts: list[tuple[Lead, Any]] = []
        self.leads: list[Lead] = []
        self.processes: list[Process] = []
        self.current: dict[int, Process] = {}
        """By node, its newest process."""
        self.trained: Generation | None = None
        """The generation that has made the last step."""
        self.saved: Generation | None = None
        """And the last checkpoint."""
        self.lost_first: dict[int, bool] = {}
        """By node: whether its agent lost the leader before it got a signal."""
        self.ending_s: dict[tuple[int, int], float] = {}
        """By node and generation: how long its workers took to end."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._rngs: dict[str, Stream] = {}
        self.slow: dict[int, float] = {}
        self.walls, self.open_lines = [], []
        self._may_be_done = False
        self.begin_ends()
        self.begin_strikes()
        self.machines = [Machine(i, 600 * self.rng("clocks").random() - 300) for i in range(life.num_nodes)]
        self.kernel = Kernel(
            self.rng, self.machines, at=self.at, clock=lambda: self.now_s, on_end=self._worker_ended,
            on_linger=self._worker_lingers,
            on_step=lambda generation: check_step(self, generation),
            on_save=lambda generation: check_save(self, generation),
            num_steps=life.num_steps, is_tracked=life.is_tracked, saves_s=life.saves_s, is_split=self.is_split,
        )  # fmt: skip
        self._begin()

    # Time

    def rng(self, purpose: str) -> Stream:
        if (rng := self._rngs.get(purpose)) is None:
            rng = self._rngs[purpose] = Stream(f"{purpose} {self.life.seed}")
        return rng

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def at(self, after_s: float, do: Callable[[], None]) -> None:
        if after_s < FOREVER_S:
            heapq.heappush(self._heap, (self.now_s + after_s, self.next_number(), do))

    def run(self) -> World:
        """Live to the end."""
        end_s = self.begun_s + LIMIT_S
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end_s:
            if self._may_be_done:
                self._may_be_done = False
                if not self.waiting:
                    break
            self.now_s, _, do = pop(heap)
            do()
        check_end(self)
        return self

    def look_whether_done(self) -> None:
        """A process has ended, or is stopped."""
        self._may_be_done = True

    @property
    def waiting(self) -> list[Process]:
        """Processes that still run; without those that are stopped for good, or wait for such a leader to begin."""
        return [each for each in self.processes if each.runs and (each.agent is not None or each.line.host.runs)]

    @property
    def lead(self) -> Lead:
        """The newest one."""
        return self.leads[-1]

    # Beginning

    def address_of(self, node: int) -> str:
        return f"10.0.0.{node + 1}"

    def port_of(self, process: Process) -> int:
        return 4000 + process.incarnation

    def card_of(self, process: Process) -> Card:
        return Card(
            host=f"n{process.node}", pid=1, node_index=process.node, num_workers=self.life.workers, num_gpus=0,
            agent_port=self.port_of(process), incarnation=process.incarnation,
        )  # fmt: skip

    def _begin(self) -> None:
        life, nodes = self.life, range(self.life.num_nodes)
        for node in nodes:
            self._add_process(node)
        cards = {i: self.card_of(self.current[i]) for i in nodes}
        past = Past(history=History(restarts_left=life.max_restarts))
        plans = make_group(
            cards, addresses={i: self.address_of(i) for i in nodes}, past=past, wanted_backend="gloo", attempt=0,
            store_address=self.address_of(0), store_port=1, max_restarts=life.max_restarts,
            srun=Srun(node=0, address=self.address_of(0), port=1) if life.is_batch else None,
        )  # fmt: skip
        first = self.processes[0]
        for process in self.processes:
            process.line = self.open_line(process, first)
        lines = {process.node: process.line for process in self.processes}
        first.lead = Lead(self, first, lines, plan=plans[0], past=copied(past), cards=cards, store_port=1)
        self.leads.append(first.lead)
        for process in self.processes:
            self._begin_agent(process, copied(plans[process.node]))
            self.at(life.turn_s * self.rng(f"turns {process.node}").random(), process.turn)
        for fault in life.faults:
            self.at(fault.at_s, lambda fault=fault: self.strike(fault))

    def _add_process(self, node: int) -> Process:
        process = Process(node, len(self.processes) + 1)
        process.turn = functools.partial(self._turn, process)
        process.times_lost = len(find_events(self.read_events(node), "node_lost", node=f"n{node}"))
        self.processes.append(process)
        self.current[node] = process
        return process

    def _begin_agent(self, process: Process, plan: Plan) -> None:
        process.agent = self.cores.Agent(plan, now_s=self.now_s)
        process.feed = events.Driver(self._stepper(process), lambda effect: self._do_agent(process, effect)).feed
        process.feed(events.Due(now_s=self.now_s))

    def _stepper(self, process: Process) -> Callable[[Any], list[Any]]:
        name, agent = f"n{process.node}", process.agent

        def step(event: Any) -> list[Any]:
            effects = agent.step(event)
            self.note(name, event, effects)
            return effects

        return step

    def note(self, who: str, event: Any, effects: list[Any]) -> None:
        self.num_events += 1
        if self.log is None:
            return
        told = [_describe(each) for each in effects if not isinstance(getattr(each, "message", None), Ping | Beat)]
        if told:
            what = type(event.message).__name__ if isinstance(event, events.Heard) else type(event).__name__
            self.log.append(f"{self.now_s - self.begun_s:8.3f} {who:6} {what}: {', '.join(told)}")

    def tell(self, text: str) -> None:
        """Write into the log what no reducer says."""
        if self.log is not None:
            self.log.append(f"{self.now_s - self.begun_s:8.3f} -- {text}")

    # Processes

    def on(self, process: Process, do: Callable[[], None]) -> None:
        """Something reaches a process: now, or when it goes on."""
        if process.is_stopped:
            process.backlog.append(do)
        elif process.is_alive:
            do()

    _on = on

    def _turn(self, process: Process) -> None:
        if not process.is_alive or process.is_through:
            return
        self.at(self.life.turn_s * (0.9 + 0.2 * self.rng(f"turns {process.node}").random()), process.turn)
        if process.is_stopped or process.agent is None:
            return
        agent = process.agent
        if agent.phase != "watching" or self.now_s >= process.due_s or agent.succession is not None:
            process.due_s = self.now_s + self.life.beats_s / 2
            dialing.knock(self, process)
            self._feed_agent(process, events.Due(now_s=self.now_s))
            check_agent(self, process)
        if agent.phase == "ending":
            key = (process.node, agent.plan.generation)
            self.ending_s[key] = self.ending_s.get(key, 0.0) + self.life.turn_s
        if agent.phase not in ("starting", "gone") and self._has_news(process):
            self._observe(process)
        if process.lead is not None and process.is_alive:
            process.lead.feed(events.Due(now_s=self.now_s))
        if agent.phase == "gone" and process.is_alive:
            self.exit(process)

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

    # Effects of agents

    def _do_agent(self, process: Process, effect: Any) -> None:
        life, node = self.life, process.node
        if not process.is_alive:
            return
        match effect:
            case events.Send(message=message):
                if process.line is not None and process.line.agent_open:
                    self._tell_host(process.line, message)
            case events.Disconnect():
                if process.line is not None:
                    self._end_line(process.line, by_host=False)
            case events.Seek(contacts=contacts):
                self.note_leaderless()
                dialing.seek(self, process, contacts)
            case events.Reject(connection=number):
                self._end_line(process.joined.pop(number), by_host=True)
            case events.Lead(joined=joined) if why := self._why_not_lead(process):
                for each in joined.values():
                    self._end_line(process.joined.pop(each.connection), by_host=True)
                self._feed_agent(process, events.NotFound(now_s=self.now_s, reason=why))
            case events.Lead():
                self._become_leader(process, effect)
            case events.Start(plan=plan):
                self.at(life.start_s, lambda: self.on(process, lambda: self._start(process, plan)))
            case events.Signal(signum=signum, ranks=ranks):
                for worker in self.machines[node].workers:
                    if worker.rank in ranks:
                        check_kill(self, process, worker, signum)
                        self.kernel.signal(worker, signum)
            case events.Forward(signum=signum, ranks=ranks, ends=ends):
                for worker in self.machines[node].workers:
                    if worker.rank in ranks:
                        self.kernel.forward(worker, signum, ends=ends)
            case events.PassOn(order=Order() as order):
                for worker in self.machines[node].workers:
                    worker.order = order
            case events.PassOn(order=order):
                self.at(order.within_s / 2, lambda: self._tried(node, order))
            case events.Sweep():
                swept = lambda: self._feed_agent(process, events.Swept(now_s=self.now_s))  # noqa: E731
                self.at(life.sweep_s, lambda: self.on(process, swept))

    def _why_not_lead(self, process: Process) -> str | None:
        agent, srun = process.agent, process.agent.succession.srun
        if why := self.cores.why_not_lead(self.read_events(process.node), agent.leader_name):
            return why
        is_lost = srun is not None and not (self.machines[srun.node].is_up and self.reaches(process.node, srun.node))
        return "srun does not answer" if is_lost else None

    def _become_leader(self, process: Process, effect: events.Lead) -> None:
        check_succession(self, process, effect)
        own = self.open_line(process, process)
        lines = {node: process.joined.pop(each.connection) for node, each in effect.joined.items()}
        cards = {
            process.node: msgspec.structs.replace(self.card_of(process), generation=effect.plan.generation),
            **{node: each.card for node, each in effect.joined.items()},
        }
        process.lead = Lead(
            self, process, {process.node: own, **lines}, plan=effect.plan, past=effect.plan.past, cards=cards,
            store_port=len(self.leads) + 1, takes_over=effect,
        )  # fmt: skip
        self.leads.append(process.lead)
        self.tell(f"n{process.node} leads, with {sorted(lines)}")
        check_take_over(self, process.lead, effect.plan)
        process.lead.attach()
        dialing.follow(self, process, own)
        self.note_lead(process)

    def _start(self, process: Process, plan: Plan) -> None:
        check_start(self, process, plan)
        workers = self.kernel.start(plan, process.node)
        pids = {worker.rank: worker.pid for worker in workers}
        self._feed_agent(process, events.Started(now_s=self.now_s, generation=plan.generation, pids=pids))
        holds = {worker.rank: self.kernel.hold(worker) for worker in workers}
        self._feed_agent(process, events.Sensed(now_s=self.now_s, ranks=holds))
        self._observe(process)

    def _worker_ended(self, worker: Worker) -> None:
        process = self.current[worker.node]

        def tell() -> None:
            if process.agent is None or worker.end is None:
                return
            if worker.end.exit_code and not worker.end.ended_by_us:
                self._observe(process)
            is_finished = worker.end.exit_code == 0 and self.kernel.generations[worker.key].step >= self.life.num_steps
            end = msgspec.structs.replace(worker.end, is_finished=is_finished and self.life.is_tracked)
            ended = Ended(end=end, age_s=self.now_s - worker.ended_s, generation=worker.generation)
            self._feed_agent(process, events.WorkerEnded(now_s=self.now_s, ended=ended))

        self.at(0.01, lambda: self.on(process, tell))

    def _worker_lingers(self, worker: Worker) -> None:
        process = self.current[worker.node]
        end = WorkerEnd(
            rank=worker.rank, node=f"n{worker.node}", exit_code=1, time_s=self.now_s - LINGERS_S,
            message="ValueError: batch 17 has no label", lingers="thread upload",
        )  # fmt: skip

        def tell() -> None:
            if process.agent is not None and worker.end is None and not worker.is_told:
                self._observe(process)
                ended = Ended(end=end, age_s=self.now_s - end.time_s, generation=worker.generation)
                self._feed_agent(process, events.WorkerFailed(now_s=self.now_s, ended=ended))

        self.on(process, tell)

    def _tried(self, node: int, order: Try) -> None:
        for target in order.targets:
            index = int(target.address.rpartition(".")[2]) - 1
            machine, process = self.machines[index], self.current[index]
            is_reached = machine.is_up and self.reaches(index, node)
            is_refused = is_reached and (not process.is_alive or process.is_through)
            seen = TrySeen(
                target=target.node_index, network=target.network, connects=is_reached, refused=is_refused,
                carries=True if is_reached and not is_refused else None,
            )  # fmt: skip
            self.machines[node].tries = [*self.machines[node].tries[-8:], (self.now_s, seen)]

    # What happens to processes

    def kill(self, process: Process, *, is_node: bool) -> None:
        """A process is killed, and its workers with it; a dead node says nothing any more."""
        if not process.is_alive:
            return
        self.tell(f"n{process.node} is killed")
        process.is_alive, process.was_killed, process.is_stopped, process.goes_on = False, True, False, False
        process.backlog.clear()
        dialing.stop(process)
        self.look_whether_done()
        if not is_node:
            self.close(process)
            return
        for line in self.open_lines:
            if process in (line.agent, line.host):
                self.at(GONE_S, lambda line=line: self.break_line(line))

    def signal(self, process: Process, signum: int) -> None:
        """A process gets a signal."""
        if not process.is_alive:
            return
        if process.agent is None:
            process.is_alive = signum == signal.SIGUSR1
            if not process.is_alive and process.line is not None:
                self._end_line(process.line, by_host=False)
                self.look_whether_done()
            return
        if signum != signal.SIGUSR1:
            process.signalled.append(signum)
        self.on(process, lambda: self._feed_agent(process, events.Signalled(now_s=self.now_s, signum=signum)))


def _describe(effect: Any) -> str:
    """An effect in a few words."""
    name, message = type(effect).__name__, getattr(effect, "message", None)
    if message is None:
        names = [each for each in effect.__struct_fields__ if each not in ("plan", "cards", "past")]
        return f"{name}({', '.join(f'{each}={getattr(effect, each)!r:.300}' for each in names)})"
    generation = getattr(message, "generation", "")
    return f"{type(message).__name__} {generation} to n{effect.node}" if generation != "" else f"{message!r:.200}"

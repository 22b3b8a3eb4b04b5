"""Who leads, and how this agent gets its place in the group.

The leader is the agent of the scheduler's first task, or the one with `--node-rank 0`, or, where nobody counts the
nodes, the one on the endpoint's machine that gets the port. Everybody else looks for it. Then the roll call is held
(preflight.rollcall, preflight.attend). A one-machine job is led by its only agent, which speaks with nobody and only
looks at its own node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from allranks.host.limits import NONCE, read_place
from allranks.host.net import describe_port_holder, is_local_host
from allranks.host.slurm import read_munge_socket
from allranks.launch.group import make_group
from allranks.launch.plan import LOOPBACK, JobPlan
from allranks.launch.rundir import RunDir
from allranks.model.card import Card, Facts, Place
from allranks.model.errors import AllranksError, NodeFaultError
from allranks.model.finding import Finding, Verdict
from allranks.model.identity import Launcher
from allranks.preflight.attend import Attendance
from allranks.preflight.judge import Judgement, Observations, judge
from allranks.preflight.mesh import Mesh
from allranks.preflight.rollcall import RollCall, Terms, stop
from allranks.report.text import say
from allranks.wire.door import Door
from allranks.wire.leader import PORTS_TRIED, Announcement, announce, bind_port, collect_hints
from allranks.wire.protocol import Connection, Goodbye, Plan, as_utf8
from allranks.wire.secret import (
    OPEN_GROUP,
    SECRET_VARIABLE,
    Secret,
    ensure_secret_file,
    read_secret_file,
    secret_from_env,
    secret_from_munge,
    secret_from_name,
)
from allranks.wire.seek import seek_leader

SECRET_FILE = "secret"  # noqa: S105  (a name, not a secret)


@dataclass(slots=True, kw_only=True)
class Membership:
    """This agent's place in the group."""

    group: Plan
    listener: socket.socket | None = None
    """The leader's: rank 0's store listens on it."""
    peers: dict[int, Connection] = field(default_factory=dict)
    """On the leader, the other agents by node index."""
    leader: Connection | None = None
    """On the others."""
    warnings: tuple[Finding, ...] = ()
    """On the leader: what the roll call found that stops nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """This node, as it takes part in the roll call."""

    plan: JobPlan
    run_dir: RunDir
    env: Mapping[str, str]
    problem: AllranksError | None
    """Why this node cannot take part, if so; in a job of several nodes the leader tells everybody."""
    facts: Callable[[], Facts]
    """What this node is; waits until it has been read."""
    check_signals: Callable[[], None]
    """Raises StoppedBySignal when somebody told this agent to stop."""


def find_membership(applicant: Applicant) -> Membership | Goodbye:
    """Lead the group or join it, and return this agent's place in it, or the verdict why it does not begin.

    Raises:
        AllranksError: it could not begin.
    """
    plan = applicant.plan
    if plan.is_one_machine and applicant.problem is not None:
        raise applicant.problem
    secret: Secret | None = OPEN_GROUP
    if not plan.is_one_machine:
        secret = secret_from_env(applicant.env)
        if plan.world.launcher is not Launcher.SLURM:  # there, the nodes share the run directory and a key in it
            secret = secret or secret_from_name(plan.request.rdzv_id) or OPEN_GROUP
    with contextlib.nullcontext() if plan.is_one_machine else contextlib.closing(Mesh()) as mesh:
        entry = _Entry(applicant, secret, mesh)
        if plan.node_index == 0:
            return entry.lead()
        if plan.node_index is None and plan.request.endpoint and is_local_host(plan.request.endpoint.host):
            return entry.lead_or_follow()
        return entry.follow(patience_s=plan.cluster.guard.join_s)


@dataclass(frozen=True, slots=True)
class _Entry:
    applicant: Applicant
    secret: Secret | None
    """None: in a file of the run directory, or munge."""
    mesh: Mesh | None

    @property
    def plan(self) -> JobPlan:
        return self.applicant.plan

    @property
    def run_dir(self) -> RunDir:
        return self.applicant.run_dir

    def lead_or_follow(self) -> Membership | Goodbye:
        # Several agents on the endpoint's machine and no --node-rank: whoever gets the port leads, the others join it.
        first, last = self.plan.port, min(self.plan.port + PORTS_TRIED - 1, 65535)
        patience_s = 0.0
        for port in range(first, last + 1):
            with contextlib.suppress(NodeFaultError):
                return self.follow(patience_s=patience_s)
            with contextlib.suppress(AllranksError):
                listener = bind_port(port, tries=1)
                return self.lead(listener)
            patience_s = 2.0  # the port went to somebody: give it the time to say whether it is our leader
        raise NodeFaultError(f"ports {first} to {last} are all in use by others")

    def lead(self, listener: socket.socket | None = None) -> Membership | Goodbye:
        listener = listener or bind_port(self.plan.port)
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(listener)
            port = int(listener.getsockname()[1])
            holder = describe_port_holder(self.plan.port) if self.plan.port not in (0, port) else None
            if holder:
                say(f"port {self.plan.port} is in use by {holder}; taking {port}")
            self.run_dir.create()
            self.run_dir.create_attempt(self.plan.attempt)
            card = _own_card(self.applicant, self.mesh, port_holder=holder)
            judgement, cards, peers = self._call_roll(card, listener)
            verdict = self._verdict(judgement)
            try:
                address = _store_address(self.plan, peers)
                plans = {} if verdict.exit_code else self._make_plans(cards, address, port)
                for index, peer in peers.items() if plans else ():
                    peer.send(plans[index])
            except ConnectionError as exc:
                verdict = self._stopped(NodeFaultError(f"an agent came and left again: {exc}"))
            except AllranksError as exc:
                verdict = self._stopped(exc)
            if verdict.exit_code:
                stop(peers, verdict)
                return Goodbye(exit_code=verdict.exit_code, summary="", verdict=verdict)
            on_failure.pop_all()
            peers = {plans[index].node_index: peer for index, peer in peers.items()}
            return Membership(group=plans[0], listener=listener, peers=peers, warnings=judgement.findings)

    def follow(self, *, patience_s: float) -> Membership | Goodbye:
        named = [self.plan.request.endpoint] if self.plan.request.endpoint else []
        path, job = self.run_dir.path, self.plan.job
        card = _own_card(self.applicant, self.mesh)
        connection = seek_leader(
            lambda: collect_hints(path, job=job, named=named, guessed=self.plan.guesses),
            job=job,
            attempt=self.plan.attempt,
            secret=self._followers_secret,
            card=card,
            deadline_s=patience_s,
            on_wait=_say_waiting,
            check_signals=self.applicant.check_signals,
        )
        connection.expect_alive_within(self.plan.cluster.guard.gone_s)
        answer = Attendance(
            connection,
            card,
            mesh=self.mesh,
            look_at_run_dir=self._look_at_run_dir,
            check_signals=self.applicant.check_signals,
        ).wait()
        if isinstance(answer, Goodbye):
            connection.close()
            return answer
        self.run_dir.attempt = answer.attempt
        return Membership(group=answer, leader=connection)

    def _followers_secret(self) -> Secret | None:
        # Asked for once a leader has said Hello: by then its key is in the run directory, if that is shared at all.
        found = self.secret or read_secret_file(self.run_dir.path / SECRET_FILE)
        return found or secret_from_munge(read_munge_socket(self.applicant.env))

    def _call_roll(
        self, card: Card, listener: socket.socket
    ) -> tuple[Judgement, Mapping[int, Card], dict[int, Connection]]:
        """Hold the roll call; on one machine, look at its own card alone."""
        port = int(listener.getsockname()[1])
        terms = Terms(
            job=self.plan.job,
            attempt=self.run_dir.attempt,
            num_nodes=self.plan.num_nodes,
            min_nodes=self.plan.min_nodes,
            node_names=self.plan.node_names,
            join_s=self.plan.cluster.guard.join_s,
            gone_s=self.plan.cluster.guard.gone_s,
            store_port=port,
            run_dir_nonce=self._write_nonce(),
            ignored=frozenset(self.plan.request.ignored),
        )
        if self.plan.is_one_machine:
            return judge(Observations(cards={0: card}), terms), {0: card}, {}
        secret = self.secret or ensure_secret_file(self.run_dir.path / SECRET_FILE)
        if secret is OPEN_GROUP:
            say(f"anybody who reaches port {port} can join this group; close it with --rdzv-id or ${SECRET_VARIABLE}")
        secret = replace(secret, munge_socket=read_munge_socket(self.applicant.env))
        with bind_port(0) as side:
            self._announce(port, side_port=int(side.getsockname()[1]))
            doors = [Door(each, job=terms.job, attempt=terms.attempt, secret=secret) for each in (listener, side)]
            call = RollCall(
                terms,
                card,
                doors=doors,
                mesh=self.mesh,
                look_at_run_dir=self._look_at_run_dir,
                say=say,
                on_event=self.run_dir.add_event,
                check_signals=self.applicant.check_signals,
            )
            try:
                judgement = call.hold()
            finally:
                self.run_dir.write_roll_call(call.observations)
        return judgement, call.roster.cards, call.roster.peers

    def _announce(self, port: int, *, side_port: int) -> None:
        announcement = Announcement(
            job=self.plan.job,
            attempt=self.run_dir.attempt,
            host=self.plan.facts.host,
            addresses=_reachable_addresses(self.plan),
            port=port,
            side_port=side_port,
        )
        announce(self.run_dir.path, announcement)

    def _write_nonce(self) -> str | None:
        """Put something into the run directory that the other nodes must see; only SLURM's nodes need to share it."""
        if self.plan.world.launcher is not Launcher.SLURM or self.plan.is_one_machine:
            return None
        nonce = secrets.token_hex(8)
        with contextlib.suppress(OSError):
            (self.run_dir.path / NONCE).write_text(nonce)
        return nonce

    def _look_at_run_dir(self) -> Place | None:
        return read_place("run directory", self.run_dir.path)

    def _make_plans(self, cards: Mapping[int, Card], address: str, port: int) -> Mapping[int, Plan]:
        return make_group(
            cards,
            wanted_backend=self.plan.wanted_backend,
            attempt=self.run_dir.attempt,
            store_address=address,
            store_port=port,
        )

    def _verdict(self, judgement: Judgement) -> Verdict:
        return Verdict(
            job=self.plan.job,
            attempt=self.run_dir.attempt,
            exit_code=judgement.exit_code,
            findings=judgement.findings,
        )

    def _stopped(self, why: AllranksError) -> Verdict:
        findings = (why.finding,) if why.finding else ()
        return Verdict(job=self.plan.job, attempt=self.run_dir.attempt, exit_code=why.exit_code, findings=findings)


def _own_card(applicant: Applicant, mesh: Mesh | None, *, port_holder: str | None = None) -> Card:
    plan, problem = applicant.plan, applicant.problem
    return Card(
        host=plan.facts.host,
        pid=os.getpid(),
        node_index=plan.node_index,
        num_workers=plan.num_workers,
        num_gpus=plan.facts.num_gpus,
        num_promised_gpus=plan.facts.num_promised_gpus,
        problem=as_utf8(str(problem)) if problem else None,
        problem_exit=problem.exit_code if problem else 0,
        problem_finding=problem.finding if problem else None,
        data_interface=plan.data_path.interface if plan.data_path else None,
        data_address=plan.data_path.address if plan.data_path else None,
        endpoint=plan.request.endpoint.host if plan.request.endpoint else None,
        wanted_port=plan.port,
        port_holder=port_holder,
        wanted_backend=plan.wanted_backend,
        attempt=plan.attempt,
        test_ports=mesh.ports if mesh is not None else None,
        facts=applicant.facts(),
    )


def _say_waiting(waited_s: float, obstacle: str) -> None:
    if waited_s >= 3 and round(waited_s) % 5 == 0:
        say(f"waiting {waited_s:.0f} s for the leader; {obstacle}")


def _reachable_addresses(plan: JobPlan) -> tuple[str, ...]:
    """This node's addresses that others may try: the data network's last, so that a path
    beside it is found where it is broken; loopback only where there is no other."""
    own = [
        address
        for interface in plan.facts.interfaces
        for address in interface.addresses
        if interface.is_up and not address.startswith(("127.", "fe80:")) and address != "::1"
    ]
    last = [plan.data_path.address] if plan.data_path else []
    return tuple(dict.fromkeys([*(each for each in own if each not in last), *last])) or (LOOPBACK,)


def _store_address(plan: JobPlan, peers: Mapping[int, Connection]) -> str:
    """Where the other nodes' ranks find the store: on the data network, else where their agents found this one."""
    if plan.data_path is not None:
        return plan.data_path.address
    peer = next(iter(peers.values()), None)
    return peer.own_address if peer else LOOPBACK

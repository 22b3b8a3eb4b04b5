"""Who leads, and how this agent gets its place in the group.

The leader is the agent of the scheduler's first task, or the one with `--node-rank 0`, or, where nobody counts the
nodes, the one on the endpoint's machine that gets the port. Everybody else looks for it. A one-machine job is led by
its only agent, which speaks with nobody.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from allranks.host.net import describe_port_holder, is_local_host
from allranks.launch.gather import Roster, dismiss, gather, make_group
from allranks.launch.plan import LOOPBACK, JobPlan
from allranks.launch.rundir import RunDir
from allranks.model.card import Card
from allranks.model.errors import AllranksError, NodeFaultError, WireError
from allranks.model.identity import Launcher
from allranks.report.text import say
from allranks.wire.handshake import seek_leader
from allranks.wire.leader import PORTS_TRIED, Announcement, announce, bind_port, collect_hints
from allranks.wire.protocol import Connection, Goodbye, Plan, Refused, as_utf8
from allranks.wire.secret import (
    OPEN_GROUP,
    SECRET_VARIABLE,
    Secret,
    ensure_secret_file,
    read_secret_file,
    secret_from_env,
    secret_from_name,
)

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


def find_membership(
    plan: JobPlan,
    run_dir: RunDir,
    env: Mapping[str, str],
    *,
    problem: AllranksError | None,
    check_signals: Callable[[], None],
) -> Membership | Goodbye:
    """Lead the group or join it, and return this agent's place in it, or the leader's word that it does not begin.

    Args:
        plan: what this agent knows of the job.
        run_dir: the job's run directory; the leader makes it.
        env: where $ALLRANKS_SECRET may be.
        problem: why this node cannot take part, if so; in a job of several nodes the leader tells everybody.
        check_signals: raises StoppedBySignal when somebody told this agent to stop.

    Raises:
        AllranksError: it could not begin.
    """
    if plan.is_one_machine and problem is not None:
        raise problem
    secret: Secret | None = OPEN_GROUP
    if not plan.is_one_machine:
        secret = secret_from_env(env)
        if plan.world.launcher is not Launcher.SLURM:  # there, the nodes share the run directory and a key in it
            secret = secret or secret_from_name(plan.request.rdzv_id) or OPEN_GROUP
    entry = _Entry(plan, _own_card(plan, problem), run_dir, secret, check_signals)
    if plan.node_index == 0:
        return entry.lead()
    if plan.node_index is None and plan.request.endpoint and is_local_host(plan.request.endpoint.host):
        return entry.lead_or_follow()
    return entry.follow(patience_s=plan.cluster.guard.join_s)


@dataclass(frozen=True, slots=True)
class _Entry:
    plan: JobPlan
    card: Card
    run_dir: RunDir
    secret: Secret | None
    """None: in a file of the run directory."""
    check_signals: Callable[[], None]

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

    def lead(self, listener: socket.socket | None = None) -> Membership:
        listener = listener or bind_port(self.plan.port)
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(listener)
            port = int(listener.getsockname()[1])
            if self.plan.port not in (0, port):
                say(f"port {self.plan.port} is in use by {describe_port_holder(self.plan.port)}; taking {port}")
            self.run_dir.create()
            self.run_dir.create_attempt(self.plan.attempt)
            roster = Roster(self.plan, cards={0: self.card})
            if not self.plan.is_one_machine:
                roster = self._gather(listener, port)
            group, peers = self._give_out_plans(roster, port)
            on_failure.pop_all()
            return Membership(group=group, listener=listener, peers=peers)

    def follow(self, *, patience_s: float) -> Membership | Goodbye:
        named = [self.plan.request.endpoint] if self.plan.request.endpoint else []
        path, job = self.run_dir.path, self.plan.job
        connection = seek_leader(
            lambda: collect_hints(path, job=job, named=named, guessed=self.plan.guesses),
            job=job,
            attempt=self.plan.attempt,
            secret=lambda: self.secret or read_secret_file(path / SECRET_FILE),
            card=self.card,
            deadline_s=patience_s,
            on_wait=_say_waiting,
            check_signals=self.check_signals,
        )
        connection.expect_alive_within(self.plan.cluster.guard.gone_s)
        answer = self._wait_for_plan(connection)
        if isinstance(answer, Goodbye):
            connection.close()
            return answer
        self.run_dir.attempt = answer.attempt
        return Membership(group=answer, leader=connection)

    def _gather(self, listener: socket.socket, port: int) -> Roster:
        secret = self.secret or ensure_secret_file(self.run_dir.path / SECRET_FILE)
        if secret is OPEN_GROUP:
            say(f"anybody who reaches port {port} can join this group; close it with --rdzv-id or ${SECRET_VARIABLE}")
        addresses = _reachable_addresses(self.plan)
        attempt, host = self.run_dir.attempt, self.plan.facts.host
        announce(
            self.run_dir.path,
            Announcement(job=self.plan.job, attempt=attempt, host=host, addresses=addresses, port=port),
        )
        return gather(
            self.plan,
            self.card,
            listener,
            attempt=attempt,
            secret=secret,
            say=say,
            on_event=self.run_dir.add_event,
            check_signals=self.check_signals,
        )

    def _give_out_plans(self, roster: Roster, port: int) -> tuple[Plan, dict[int, Connection]]:
        address = _store_address(self.plan, roster)
        plans, peers = make_group(roster, attempt=self.run_dir.attempt, store_address=address, store_port=port)
        for index, peer in peers.items():
            try:
                peer.send(plans[index])
            except ConnectionError as exc:
                lost = NodeFaultError(f"{plans[0].members[index].name} came and left again: {exc}")
                dismiss(roster, lost)
                raise lost from exc
        return plans[0], peers

    def _wait_for_plan(self, connection: Connection) -> Plan | Goodbye:
        # No deadline of its own: the leader has one for the gathering, and the kernel one for a silent leader.
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as on_failure:
            on_failure.callback(connection.close)
            selector.register(connection, selectors.EVENT_READ)
            while True:
                selector.select(0.25)
                self.check_signals()
                try:
                    messages = connection.receive(at_most=1)  # what follows the Plan is the agent's
                except (ConnectionError, WireError) as exc:
                    raise NodeFaultError(f"the leader left before the job began: {exc}") from exc
                for message in messages:
                    if isinstance(message, Refused):
                        raise WireError(f"the leader refused this node: {message.reason}")
                    if isinstance(message, Plan | Goodbye):
                        on_failure.pop_all()
                        return message


def _own_card(plan: JobPlan, problem: AllranksError | None) -> Card:
    return Card(
        host=plan.facts.host,
        pid=os.getpid(),
        node_index=plan.node_index,
        num_workers=plan.num_workers,
        num_gpus=plan.facts.num_gpus,
        num_promised_gpus=plan.facts.num_promised_gpus,
        problem=as_utf8(str(problem)) if problem else None,
        problem_exit=problem.exit_code if problem else 0,
    )


def _say_waiting(waited_s: float, obstacle: str) -> None:
    if waited_s >= 3 and round(waited_s) % 5 == 0:
        say(f"waiting {waited_s:.0f} s for the leader; {obstacle}")


def _reachable_addresses(plan: JobPlan) -> tuple[str, ...]:
    """This node's addresses that others may try: the data network's first, loopback only where there is no other."""
    own = [
        address
        for interface in plan.facts.interfaces
        for address in interface.addresses
        if interface.is_up and not address.startswith(("127.", "fe80:")) and address != "::1"
    ]
    first = [plan.data_path.address] if plan.data_path else []
    return tuple(dict.fromkeys([*first, *own])) or (LOOPBACK,)


def _store_address(plan: JobPlan, roster: Roster) -> str:
    """Where the other nodes' ranks find the store: on the data network, else where their agents found this one."""
    if plan.data_path is not None:
        return plan.data_path.address
    peer = next(iter(roster.peers.values()), None)
    return peer.own_address if peer else LOOPBACK

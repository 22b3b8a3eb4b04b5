"""Who leads, and how a node gets through the roll call, as leader or as one of the others.

The leader is the agent of the scheduler's first task, or the one with `--node-rank 0`, or, where nobody counts the
nodes, the one on the endpoint's machine that gets the port. Everybody else looks for it. Then the roll call is held
(preflight.rollcall, preflight.attend). A one-machine job is led by its only agent, which speaks with nobody and only
looks at its own node.

    with Entry(applicant) as entry:
        called = entry.take_part()

What becomes of a roll call that says go (workers, a process group, a table) is the caller's business.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import time
from dataclasses import replace
from typing import Self

import msgspec

from allranks.causes.book import all_causes, find_cause
from allranks.causes.cause import Trait
from allranks.causes.outcome import failed
from allranks.host.limits import raise_open_files, read_limits, read_place
from allranks.host.net import describe_port_holder, is_local_host
from allranks.host.slurm import read_munge_socket
from allranks.model.card import Card, Facts, JobDirectory
from allranks.model.claims.launcher_table import row_of
from allranks.model.errors import AllranksError, NodeFaultError, SetupError, UsageError
from allranks.model.finding import Finding
from allranks.model.hostlist import fold_hosts
from allranks.preflight import itself
from allranks.preflight.applicant import Applicant, NodePlan
from allranks.preflight.attend import Attendance
from allranks.preflight.called import Called, Rendezvous
from allranks.preflight.datapath import LOOPBACK, LOOPBACK_6
from allranks.preflight.judge import Observations, judge
from allranks.preflight.meeting import (
    announce_leader,
    ensure_secret,
    find_announcement,
    find_left_over,
    read_secret,
    write_nonce,
)
from allranks.preflight.mesh.tester import Mesh
from allranks.preflight.rollcall import RollCall
from allranks.preflight.roster import RollCallTerms, see_waiting, with_place, with_problem
from allranks.preflight.vet import vet_card
from allranks.report.rundir import EventWriter
from allranks.report.text import say
from allranks.wire.accept import Acceptor
from allranks.wire.leader_port import PORTS_TRIED, Hint, bind_port, collect_hints
from allranks.wire.protocol import Goodbye, own_age_s
from allranks.wire.secret import (
    OPEN_GROUP,
    SECRET_VARIABLE,
    Secret,
    group_name,
    secret_from_munge,
    secret_from_user,
)
from allranks.wire.seek import Search

STATUS_S = 1.0
"""Between two statuses of a roll call."""
PATIENCE_JOINS = 4.0
"""Times `join_s`: each node that comes may make the leader wait a third of it longer."""


class Entry:
    """One node's way through the roll call; owns the sockets that it is tested with."""

    def __init__(self, applicant: Applicant) -> None:
        self.applicant, self.run_dir = applicant, applicant.run_dir
        self.plan = plan = applicant.plan
        self._secret: Secret | None = OPEN_GROUP  # None: in a file of the run directory, or munge
        if not plan.is_alone:
            self._secret = secret_from_user(applicant.env, None if plan.is_slurm else plan.rdzv_id)
            if not plan.is_slurm:
                self._secret = self._secret or OPEN_GROUP
        # What the job is called on the wire: where that is its --rdzv-id, it may be the key.
        is_key = not plan.is_alone and plan.job == plan.rdzv_id
        self.group = group_name(plan.job) if is_key else plan.job
        before = read_limits()["nofile"]
        self._max_files = raise_open_files(plan.num_files)
        self._has_more_files = before is not None and self._max_files > before
        self._mesh = None if plan.is_alone else Mesh()
        self._side = bind_port(0) if applicant.has_successors and not plan.is_alone else None
        self._incarnation = secrets.randbits(63)
        # SLURM tells the attempt; elsewhere each start has one of its own, so what an earlier one announced is known.
        self._left_over = find_left_over(self.run_dir) if plan.attempt is None else None
        self._told_s = 0.0
        """When the status was written last, since the epoch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mesh is not None:
            self._mesh.close()
        if self._side is not None:
            self._side.close()

    def take_part(self) -> Called | Rendezvous | Goodbye:
        """Lead or follow, as the node index says.

        Raises:
            AllranksError: it could not begin.
        """
        plan = self.plan
        is_on_loopback = plan.data_path is not None and plan.data_path.address in (LOOPBACK, LOOPBACK_6)
        if self._problem is not None and (plan.is_alone or is_on_loopback):
            raise self._problem  # there is nobody to tell
        if self.applicant.leads:
            return self.lead()
        if plan.node_index is None and plan.endpoint and is_local_host(plan.endpoint.host):
            return self._lead_or_follow(plan.endpoint)
        return self.follow(patience_s=plan.guard.join_s)

    def lead(self, listener: socket.socket | None = None) -> Called:
        """Bind the port and hold the roll call.

        Raises:
            AllranksError: it could not begin; whoever came has been told.
        """
        plan = self.plan
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(listener or bind_port(plan.port))
            port = int(listener.getsockname()[1])
            holder = describe_port_holder(plan.port) if plan.port not in (0, port) else None
            if holder:
                say(f"port {plan.port} is in use by {holder}; taking {port}")
            if self._max_files < plan.num_files:
                say(
                    f"{plan.facts.host} may open {self._max_files} files, the leader of {plan.num_nodes} nodes needs "
                    f"up to {plan.num_files}; raise the hard limit (ulimit -Hn; for slurmd: LimitNOFILE=131072)"
                )
            problem = self._problem or self._make_run_dir()
            is_shared = self.applicant.shares_run_dir and not plan.is_alone
            nonce = write_nonce(self.run_dir) if is_shared else None
            place = self._look_at_run_dir() if self.run_dir.path.is_dir() else None  # a check may have none
            card = with_place(self.card(port_holder=holder, problem=problem), place)
            called = self._call_roll(card, listener, nonce)
            on_failure.pop_all()
            return called

    def follow(self, *, patience_s: float) -> Rendezvous | Goodbye:
        """Find the leader, and answer what it asks until it says go or stop.

        Raises:
            AllranksError: there is no leader, or it refused this node.
        """
        plan = self.plan
        card = vet_card(self.card())  # one that is too long to be sent becomes a problem of this node
        # In a SLURM step all terminals are one: one agent speaks for those that wait for the leader.
        is_speaker = not plan.is_slurm or plan.node_index == 1
        search = Search(
            lambda: collect_hints(
                find_announcement(self.run_dir, left_over=self._left_over),
                job=plan.job,
                named=[plan.endpoint] if plan.endpoint else [],
                guessed=plan.guesses,
            ),
            job=self.group,
            secret=self._followers_secret,
            card=card,
        )
        try:
            connection = search.wait(
                deadline_s=patience_s,
                on_wait=_say_waiting if is_speaker else lambda *_: None,
                check_signals=self.applicant.check_signals,
            )
        except NodeFaultError as exc:
            reason = str(exc).replace(self.group, plan.job)
            raise NodeFaultError(reason, finding=self._leader_missing(reason, search)) from exc
        connection.expect_alive_within(plan.guard.gone_s)
        answer = Attendance(
            connection,
            card,
            mesh=self._mesh,
            look_at_run_dir=self._look_at_run_dir,
            patience_s=PATIENCE_JOINS * plan.guard.join_s,
            check_signals=self.applicant.check_signals,
        ).wait()
        if isinstance(answer, Goodbye):
            connection.close()
            if answer.verdict is not None:
                self.run_dir.attempt = answer.verdict.attempt
                answer = msgspec.structs.replace(answer, verdict=msgspec.structs.replace(answer.verdict, job=plan.job))
            return answer
        self.run_dir.attempt = answer.attempt
        acceptor = None
        if self._side is not None:
            side, self._side = self._side, None
            secret = self._with_munge(self._followers_secret() or OPEN_GROUP)
            acceptor = Acceptor(side, job=self.group, attempt=answer.attempt, secret=secret)
        return Rendezvous(
            group=answer,
            applicant=self.applicant,
            card=card,
            own_address=connection.own_address,
            leader=connection,
            acceptor=acceptor,
        )

    def _lead_or_follow(self, endpoint: Hint) -> Called | Rendezvous | Goodbye:
        # Several agents on the endpoint's machine and no --node-rank: whoever gets the port leads, the others join it.
        first = self.plan.port
        last = min(first + PORTS_TRIED - 1, 65535)
        patience_s = 0.0
        for port in range(first, last + 1):
            with contextlib.suppress(NodeFaultError):
                return self.follow(patience_s=patience_s)
            with contextlib.suppress(AllranksError):
                listener = bind_port(port, tries=1)
                return self.lead(listener)
            patience_s = 2.0  # the port went to somebody: give it the time to say whether it is our leader
        raise NodeFaultError(f"ports {first} to {last} of {endpoint.host} are all in use by other processes")

    def _call_roll(self, card: Card, listener: socket.socket, nonce: str | None) -> Called:
        plan, port = self.plan, int(listener.getsockname()[1])
        own_address = plan.data_path.address if plan.data_path else None
        terms = RollCallTerms(
            job=plan.job,
            attempt=self.run_dir.attempt,
            num_nodes=plan.num_nodes,
            min_nodes=plan.min_nodes,
            node_names=plan.node_names,
            join_s=plan.guard.join_s,
            gone_s=plan.guard.gone_s,
            store_port=port,
            second_network=plan.second_network,
            run_dir_nonce=nonce,
            ignored=_ids_to_ignore(plan),
        )
        if plan.is_alone:
            seen = Observations(cards={0: card})
            return Called(
                applicant=self.applicant,
                judgement=judge(seen, terms),
                observations=seen,
                cards={0: card},
                peers={},
                listener=listener,
                store_address=own_address or LOOPBACK,
                group=self.group,
            )
        secret = self._leaders_secret()
        if secret is OPEN_GROUP:
            row = row_of(plan.launcher)
            key = row.key_from if row else f"${SECRET_VARIABLE}"
            say(f"any process that reaches port {port} can join; protect the group with --rdzv-id or {key}")
        secret = self._with_munge(secret)
        with contextlib.ExitStack() as on_failure, EventWriter(self.run_dir) as events:
            side = on_failure.enter_context(self._side or bind_port(0))
            self._side = None
            announce_leader(self.applicant, port, side_port=int(side.getsockname()[1]))
            acceptors = [
                Acceptor(sock, job=self.group, attempt=terms.attempt, secret=secret) for sock in (listener, side)
            ]
            call = RollCall(
                terms,
                card,
                acceptors=acceptors,
                mesh=self._mesh,
                say=say,
                on_event=events.add,
                check_signals=lambda: self._tell(call),
            )
            try:
                judgement = call.hold()
            finally:
                self.run_dir.write_roll_call(call.observations)
            on_failure.pop_all()
        peers = call.roster.peers
        any_peer = next(iter(peers.values()), None)
        return Called(
            applicant=self.applicant,
            judgement=judgement,
            observations=call.observations,
            cards=call.roster.cards,
            peers=peers,
            listener=listener,
            store_address=own_address or (any_peer.own_address if any_peer else LOOPBACK),
            group=self.group,
            acceptor=acceptors[1],
        )

    def _tell(self, call: RollCall) -> None:
        """Write down who is missing, if that is due; raises StoppedBySignal as `check_signals` does."""
        self.applicant.check_signals()
        now_s = time.time()
        if self.applicant.has_successors and abs(now_s - self._told_s) >= STATUS_S:  # else no leader goes on with it
            self._told_s, left_s = now_s, call.left_s(time.monotonic())
            status = see_waiting(call.roster, left_s=left_s, now_s=now_s, started_s=now_s - own_age_s())
            self.run_dir.status_files.show(status)

    def _make_run_dir(self) -> AllranksError | None:
        """Make the job's directory; where that fails the others must hear it, or they would wait for this node."""
        plan = self.plan
        if plan.is_slurm and not self.applicant.shares_run_dir:
            return None  # a check that must leave nothing behind, or that found no place to write
        try:
            self.run_dir.create()
            self.run_dir.create_attempt(plan.attempt)
        except UsageError as exc:
            if plan.is_alone:
                raise
            what = failed(path=self.run_dir.path, what=str(exc))
            facts = plan.facts
            finding = what.to_finding(find_cause("AR006"), node=facts.host, reader=facts.reader)
            return SetupError(str(exc), finding=finding)
        return None

    def _leaders_secret(self) -> Secret:
        try:
            return self._secret or ensure_secret(self.run_dir)
        except SetupError:  # nobody finds it there; munge tells who is of this user
            return Secret(secrets.token_bytes(32), "a directory that cannot be written")

    def _look_at_run_dir(self) -> JobDirectory | None:
        return read_place("run directory", self.run_dir.path)

    def _leader_missing(self, reason: str, search: Search) -> Finding:
        """What a node can say when it finds no leader: it was never there, or it is not reached from here."""
        plan = self.plan
        found = find_announcement(self.run_dir, left_over=self._left_over)
        leader = plan.node_names[0] if plan.node_names else "the leader"
        if found is not None and found.job == plan.job and found.attempt == (plan.attempt or found.attempt):
            there = f"the leader listens at {', '.join(found.addresses)}"
            what = f"{there}, but {plan.facts.host} reaches none of these addresses"
            return failed(reason, what=what).to_finding(find_cause("AR201"), node=found.host, reader=plan.facts.reader)
        what = f"no leader answered within {plan.guard.join_s:.0f} s"
        if plan.endpoint is not None and not plan.node_names:
            host, seen = plan.endpoint.host, search.describe()
            if search.is_nowhere(host):
                no_address = failed(seen, names=host, contrast=what)
                return no_address.to_finding(find_cause("AR202"), node=plan.facts.host, reader=plan.facts.reader)
            return failed(seen, what=what).to_finding(find_cause("AR001"), node=host, reader=plan.facts.reader)
        # No word of this node alone: all that wait say the same.
        waiting = fold_hosts(plan.node_names[1:]) if plan.node_names else None
        said = failed(what=what)
        return said.to_finding(find_cause("AR001"), node=leader, waiting=waiting, reader=plan.facts.reader)

    def _with_munge(self, secret: Secret) -> Secret:
        return replace(secret, munge_socket=read_munge_socket(self.applicant.env) if self.plan.is_slurm else None)

    def _followers_secret(self) -> Secret | None:
        # Asked for once a leader has said Hello: by then its key is in the run directory, if that is shared at all.
        found = self._secret or read_secret(self.run_dir)
        return found or secret_from_munge(read_munge_socket(self.applicant.env))

    @functools.cached_property
    def _facts(self) -> Facts:
        """Waited for once, although a node may look for a leader several times; with the limit as it is now."""
        facts = _without_unmade(self.applicant.card_facts())
        if not self._has_more_files:
            return facts
        return msgspec.structs.replace(facts, limits=facts.limits | {"nofile": self._max_files})

    def card(self, *, port_holder: str | None = None, problem: AllranksError | None = None) -> Card:
        """Return the report of this node; with a problem, if there is one."""
        plan, facts, path = self.plan, self.plan.facts, self.plan.data_path
        card = Card(
            host=facts.host,
            pid=os.getpid(),
            node_index=plan.node_index,
            num_workers=plan.num_workers,
            num_gpus=facts.num_gpus,
            num_promised_gpus=facts.num_promised_gpus,
            data_interface=path.interface if path else None,
            data_address=path.address if path else None,
            endpoint=plan.endpoint.host if plan.endpoint else None,
            wanted_port=plan.port,
            port_holder=port_holder,
            wanted_backend=plan.wanted_backend,
            attempt=plan.attempt,
            test_ports=self._mesh.ports if self._mesh is not None else None,
            agent_port=int(self._side.getsockname()[1]) if self._side is not None else 0,
            incarnation=self._incarnation,
            facts=self._facts,
        )
        return with_problem(card, problem or self._problem)

    @functools.cached_property
    def _problem(self) -> AllranksError | None:
        """Why this node cannot take part."""
        return self.plan.problem or itself.find_problem(self.plan)


def _without_unmade(facts: Facts) -> Facts:
    """Leave out a run directory that is not there yet: whoever starts makes it, and SLURM's nodes look again later."""
    unmade = os.strerror(errno.ENOENT)
    places = [
        place for place in facts.places if place.purpose != "run directory" or unmade not in (place.problem or "")
    ]
    return facts if len(places) == len(facts.places) else msgspec.structs.replace(facts, places=tuple(places))


def _ids_to_ignore(plan: NodePlan) -> frozenset[str]:
    """Return the causes that stop nobody: what the user ignores, and what is normal where ranks share a machine."""
    normal = [cause.id for cause in all_causes() if plan.is_of_a_rank and Trait.NORMAL_AMONG_RANKS in cause.traits]
    return plan.ignored.union(normal)


def _say_waiting(waited_s: float, obstacle: str) -> None:
    if waited_s >= 3 and round(waited_s) % 5 == 0:
        say(f"still waiting for the leader after {waited_s:.0f} s; {obstacle}")

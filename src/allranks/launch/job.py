"""One job, as one agent goes through it: who am I, gather, start the workers, watch them, say what it came to.

Phase 1  who am I            identity, this machine, cluster.toml -> JobPlan             (launch.plan)
Phase 2  who leads           the leader binds the port, the others look for it           (wire.leader, launch.gather)
Phase 3  start               environment of every worker, with reasons                   (launch.environment)
Phase 4  watch, end          until all ended well, or the first failure                  (launch.agent)
Phase 5  say                 one verdict on the leader's terminal, the same exit code everywhere
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from allranks.host.gpu import count_gpus
from allranks.host.net import (
    describe_port_holder,
    find_interface_of,
    host_name,
    is_local_host,
    read_interfaces,
)
from allranks.launch.agent import Agent, SignalInbox
from allranks.launch.console import Console
from allranks.launch.environment import node_settings, rank_settings
from allranks.launch.gather import Roster, dismiss, gather, make_group
from allranks.launch.plan import LOOPBACK, JobPlan, NodeFacts, Request, count_of
from allranks.launch.rundir import RunDir, describe_command
from allranks.launch.workers import Worker, become_subreaper
from allranks.model.errors import AllranksError, NodeFaultError, UsageError, WireError
from allranks.model.hostlist import fold_hosts
from allranks.model.identity import Launcher
from allranks.report.text import Style, render_verdict, say
from allranks.wire.handshake import seek_leader
from allranks.wire.leader import PORTS_TRIED, Announcement, Hint, announce, bind_port, collect_hints
from allranks.wire.protocol import Card, Connection, Goodbye, Plan
from allranks.wire.secret import (
    OPEN_GROUP,
    SECRET_VARIABLE,
    Secret,
    create_secret_file,
    read_secret_file,
    secret_from_env,
    secret_from_name,
)

HOOK_PATH = Path(__file__).parent.parent / "join" / "site"
SECRET_FILE = "secret"  # noqa: S105  (a name, not a secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the workers' output goes; the files of the run directory get it in any case.

    `hidden` names local ranks and streams (`out`, `err`) that the terminal does not show.
    """

    log_dir: Path
    hidden: frozenset[tuple[int, str]] = frozenset()


def read_facts(env: Mapping[str, str]) -> NodeFacts:
    """Look at this machine."""
    return NodeFacts(
        host=env.get("SLURMD_NODENAME") or host_name(),
        interfaces=tuple(read_interfaces()),
        num_gpus=count_gpus(env),
        num_cpus=len(os.sched_getaffinity(0)),
    )


def worker_command(request: Request) -> list[str]:
    """Return what is executed for each worker.

    Raises:
        UsageError: the script, module or program is not there.
    """
    first, *arguments = request.command
    if request.no_python:
        program = shutil.which(first)
        if program is None:
            raise UsageError(f"{first}: no such program; --no-python runs it as it is, give a path or one on PATH")
        return [program, *arguments]
    if request.is_module:
        # Where `python -m` looks: this directory first.
        if PathFinder.find_spec(first.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"-m {first}: no such module in {sys.executable} or this directory")
        return [sys.executable, "-m", first, *arguments]
    if not Path(first).exists():
        raise UsageError(f"{first}: no such script; expected a Python file (a module takes -m, a program --no-python)")
    return [sys.executable, first, *arguments]


def run_job(plan: JobPlan, output: Output, env: Mapping[str, str]) -> int:
    """Run this node's part of the job and return the exit code, which is the same on all nodes.

    Raises:
        AllranksError: it could not begin.
    """
    inbox = SignalInbox()
    become_subreaper()
    run_dir = RunDir(output.log_dir, plan.job)
    membership = _lead_alone_or_join(plan, run_dir, inbox, env)
    if isinstance(membership, Goodbye):
        say(membership.summary)
        return membership.exit_code
    with membership.listener or contextlib.nullcontext():
        return _run_workers(plan, output, run_dir, membership, inbox, env)


@dataclass(slots=True, kw_only=True)
class _Membership:
    """This agent's place in the group."""

    group: Plan
    listener: socket.socket | None = None
    """The leader's: rank 0's store listens on it."""
    peers: dict[int, Connection]
    leader: Connection | None = None


def _lead_alone_or_join(
    plan: JobPlan, run_dir: RunDir, inbox: SignalInbox, env: Mapping[str, str]
) -> _Membership | Goodbye:
    card = _own_card(plan)
    if plan.is_one_machine:
        if card.problem is not None:
            raise UsageError(card.problem)
        run_dir.create()
        return _lead(plan, card, run_dir, inbox, Secret(b"", "none"))
    secret = secret_from_env(env)
    if plan.world.launcher is not Launcher.SLURM:
        secret = secret or secret_from_name(plan.request.rdzv_id) or OPEN_GROUP
    if plan.node_index == 0:
        return _lead_nodes(plan, card, run_dir, inbox, secret)
    if plan.node_index is None and plan.request.endpoint and _leads_by_address(plan, plan.request.endpoint):
        return _lead_or_follow(plan, card, run_dir, inbox, secret)
    return _follow(plan, card, run_dir, inbox, secret, deadline_s=plan.cluster.guard.join_s)


def _own_card(plan: JobPlan) -> Card:
    problem, problem_exit = None, 0
    try:
        worker_command(plan.request)
    except AllranksError as exc:
        problem, problem_exit = str(exc), exc.exit_code
    return Card(
        host=plan.facts.host,
        pid=os.getpid(),
        node_index=plan.node_index,
        num_workers=plan.num_workers,
        num_gpus=plan.facts.num_gpus,
        address=plan.data_address,
        problem=problem,
        problem_exit=problem_exit,
    )


def _leads_by_address(plan: JobPlan, endpoint: Hint) -> bool:
    """Whether the meeting point is this machine, so that this agent may be the leader (as with torchrun's c10d)."""
    return is_local_host(endpoint.host, plan.facts.interfaces)


def _lead_or_follow(
    plan: JobPlan, card: Card, run_dir: RunDir, inbox: SignalInbox, secret: Secret | None
) -> _Membership | Goodbye:
    # Several agents on the endpoint's machine and no --node-rank: whoever gets the port leads, the others join it.
    patience_s = 0.0
    for port in range(plan.port, plan.port + PORTS_TRIED):
        with contextlib.suppress(NodeFaultError):
            return _follow(plan, card, run_dir, inbox, secret, deadline_s=patience_s, is_quiet=True)
        with contextlib.suppress(AllranksError):
            listener = bind_port(port, tries=1)
            return _lead_nodes(plan, card, run_dir, inbox, secret, listener=listener)
        patience_s = 2.0  # the port went to somebody: give it the time to say whether it is our leader
    raise NodeFaultError(f"ports {plan.port} to {plan.port + PORTS_TRIED - 1} are all in use by others")


def _lead_nodes(
    plan: JobPlan,
    card: Card,
    run_dir: RunDir,
    inbox: SignalInbox,
    secret: Secret | None,
    *,
    listener: socket.socket | None = None,
) -> _Membership:
    run_dir.create()
    if secret is None:
        secret = create_secret_file(run_dir.path / SECRET_FILE)
    if secret is OPEN_GROUP:
        say(f"anybody who reaches the port can join this group; close it with ${SECRET_VARIABLE} or --rdzv-id")
    return _lead(plan, card, run_dir, inbox, secret, listener=listener)


def _lead(
    plan: JobPlan,
    card: Card,
    run_dir: RunDir,
    inbox: SignalInbox,
    secret: Secret,
    *,
    listener: socket.socket | None = None,
) -> _Membership:
    listener = listener or bind_port(plan.port)
    try:
        port = int(listener.getsockname()[1])
        if plan.port not in (0, port):
            say(f"port {plan.port} is in use by {describe_port_holder(plan.port)}; taking {port}")
        run_dir.create_attempt(plan.attempt)
        roster = Roster(plan, cards={0: card})
        if not plan.is_one_machine:
            addresses = _reachable_addresses(plan)
            announce(
                run_dir.path,
                Announcement(
                    job=plan.job, attempt=run_dir.attempt, host=plan.facts.host, addresses=addresses, port=port
                ),
            )
            roster = gather(
                plan,
                card,
                listener,
                attempt=run_dir.attempt,
                secret=secret,
                say=say,
                on_event=run_dir.add_event,
                check_signals=inbox.check,
            )
        groups, peers = make_group(
            roster, attempt=run_dir.attempt, store_address=_store_address(plan, roster), store_port=port
        )
        for index, peer in peers.items():
            try:
                peer.send(groups[index])
            except ConnectionError as exc:
                lost = NodeFaultError(f"{groups[0].members[index].name} came and left again: {exc}")
                dismiss(roster, lost)
                raise lost from exc
        return _Membership(group=groups[0], listener=listener, peers=peers)
    except BaseException:
        listener.close()
        raise


def _follow(
    plan: JobPlan,
    card: Card,
    run_dir: RunDir,
    inbox: SignalInbox,
    secret: Secret | None,
    *,
    deadline_s: float,
    is_quiet: bool = False,
) -> _Membership | Goodbye:
    named = [plan.request.endpoint] if plan.request.endpoint else []

    def find_secret() -> Secret | None:
        return secret or read_secret_file(run_dir.path / SECRET_FILE)

    def tell(waited_s: float, obstacle: str) -> None:
        if not is_quiet and waited_s >= 3 and round(waited_s) % 5 == 0:
            say(f"waiting {waited_s:.0f} s for the leader; {obstacle}")

    connection = seek_leader(
        lambda: collect_hints(run_dir.path, job=plan.job, named=named, guessed=plan.guesses),
        job=plan.job,
        attempt=plan.attempt,
        secret=find_secret,
        card=card,
        deadline_s=deadline_s,
        on_wait=tell,
        check_signals=inbox.check,
    )
    connection.expect_alive_within(plan.cluster.guard.gone_s)
    answer = _wait_for_plan(connection, inbox)
    if isinstance(answer, Goodbye):
        connection.close()
        return answer
    run_dir.attempt = answer.attempt
    return _Membership(group=answer, peers={}, leader=connection)


def _wait_for_plan(connection: Connection, inbox: SignalInbox) -> Plan | Goodbye:
    # No deadline of its own: the leader has one for the gathering, and the kernel one for a silent leader.
    import selectors

    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(inbox, selectors.EVENT_READ)
        while True:
            selector.select(1.0)
            inbox.check()
            try:
                messages = connection.receive()
            except (ConnectionError, WireError) as exc:
                raise NodeFaultError(f"the leader left before the job began: {exc}") from exc
            for message in messages:
                if isinstance(message, Plan | Goodbye):
                    return message


def _run_workers(
    plan: JobPlan,
    output: Output,
    run_dir: RunDir,
    membership: _Membership,
    inbox: SignalInbox,
    env: Mapping[str, str],
) -> int:
    group = membership.group
    me = group.members[group.node_index]
    is_leader = membership.leader is None
    node_path = run_dir.create_node(me.name)
    interface = plan.data_interface or _interface_to_leader(plan, membership)
    has_hook = env.get("ALLRANKS_HOOK") != "0"
    listener = membership.listener
    store_fd = listener.fileno() if listener is not None and has_hook else None
    settings = node_settings(plan, group, interface=interface, store_fd=store_fd, env=env, hook_path=HOOK_PATH)
    run_dir.write_settings(me.name, settings)
    command = worker_command(plan.request)
    world_size = sum(member.num_workers for member in group.members)
    if is_leader:
        run_dir.add_event(
            "started", job=plan.job, command=describe_command(command, env), members=[m.name for m in group.members]
        )
        say(_headline(group, interface, world_size, run_dir))
    if listener is not None and not has_hook:
        listener.close()  # rank 0 binds the port itself; between here and there it is free for anybody

    base = {name: value for name, value in env.items() if name != SECRET_VARIABLE}
    base |= {setting.name: setting.value for setting in settings} | {
        "ALLRANKS_AGENT_PID": str(os.getpid()),
        "ALLRANKS_STARTED_S": str(time.time()),
    }
    console = Console()
    workers = []
    for local_rank in range(me.num_workers):
        rank = me.first_rank + local_rank
        worker = Worker(
            rank=rank,
            local_rank=local_rank,
            node=me.name,
            out_path=node_path / f"rank_{rank}.out",
            err_path=node_path / f"rank_{rank}.err",
            error_file=node_path / f"rank_{rank}.error.json",
        )
        own = rank_settings(group, local_rank, error_file=worker.error_file.absolute())
        local_command = [word.replace("${local_rank}", str(local_rank)) for word in command]
        worker.start(
            local_command,
            base | {setting.name: setting.value for setting in own},
            pass_fds=(store_fd,) if store_fd is not None and rank == 0 else (),
        )
        prefix = f"[{me.name} r{rank}] " if world_size > 1 else ""
        for stream, path, start in (
            ("out", worker.out_path, worker.out_start),
            ("err", worker.err_path, worker.err_start),
        ):
            if (local_rank, stream) not in output.hidden:
                console.follow(path, start=start, stream=stream, prefix=prefix)
        workers.append(worker)

    agent = Agent(
        group,
        workers,
        console=console,
        inbox=inbox,
        say=say,
        on_event=run_dir.add_event if is_leader else lambda *_, **__: None,
        leader=membership.leader,
        peers=membership.peers,
    )
    started_s = time.monotonic()
    exit_code, verdict, summary = agent.run(job=plan.job)
    if verdict is not None:
        run_dir.write_verdict(verdict)
        run_dir.add_event("ended", exit_code=exit_code)
        if verdict.findings:
            print("\n" + render_verdict(verdict, Style.of(sys.stderr)), file=sys.stderr, flush=True)
    if inbox.received:
        name = signal.Signals(inbox.received[0]).name
        say(f"{name} after {time.monotonic() - started_s:.0f} s: all workers here have ended; output in {node_path}")
    elif summary and plan.world.launcher is not Launcher.SLURM:
        say(f"ended: {summary}; the whole report is on {group.members[0].name}")
    return exit_code


def _headline(group: Plan, interface: str | None, world_size: int, run_dir: RunDir) -> str:
    names = [member.name for member in group.members]
    where = names[0] if len(names) == 1 else f"{len(names)} nodes ({fold_hosts(names)})"
    over = f" over {interface}" if interface else ""
    return f"{count_of(world_size, 'rank')} on {where}, {group.backend}{over}; logs in {run_dir.attempt_path}"


def _reachable_addresses(plan: JobPlan) -> tuple[str, ...]:
    """This node's addresses that others may try: the data network's first, never loopback unless there is no other."""
    own = [
        address
        for interface in plan.facts.interfaces
        for address in interface.addresses
        if interface.is_up and not address.startswith(("127.", "fe80:")) and address != "::1"
    ]
    first = [plan.data_address] if plan.data_address else []
    return tuple(dict.fromkeys([*first, *own])) or (LOOPBACK,)


def _store_address(plan: JobPlan, roster: Roster) -> str:
    """Where the other nodes' ranks find the store: on the data network, else where their agents found this one."""
    if plan.is_one_machine:
        return LOOPBACK
    if plan.data_address is not None:
        return plan.data_address
    peer = next(iter(roster.peers.values()))
    return str(peer.sock.getsockname()[0]).removeprefix("::ffff:")


def _interface_to_leader(plan: JobPlan, membership: _Membership) -> str | None:
    """The interface that the agents' own connection uses: it works."""
    connection = membership.leader or next(iter(membership.peers.values()), None)
    if connection is None:
        return None
    address = str(connection.sock.getsockname()[0]).removeprefix("::ffff:").partition("%")[0]
    nic = find_interface_of(address, plan.facts.interfaces)
    return nic.name if nic else None

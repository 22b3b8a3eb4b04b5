"""How do the roll call and the first Plan grow with the nodes? Simulated agents over real sockets.

    python benchmarks/roll_call.py                    # whole agents: 8, 64 (all pairs), 256, 1024
    python benchmarks/roll_call.py --light            # agents that only talk: 1024, 4096; with faults at the largest
    python benchmarks/roll_call.py --light --nodes 1024 4096 16384 --beats 10

The leader is a process of its own, as on its node. Whole agents share as many processes as the machine has cores, each
with its own connection, ports and card, and try each other. What is measured is the leader's: from the first agent that
may join to the verdict. Above 64 nodes pairs are tried sparsely, with one connection and at most 4 KiB each, but for
one packet of MTU 9000 that each node sends to one other and gets back.

Agents that only talk (benchmarks/many_agents.py) are there to load the leader: the processor time of its process is
counted by phase, and the exponent says by which power of the number of nodes a column grew since the line above.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import multiprocessing as mp
import os
import resource
import selectors
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import msgspec
from many_agents import KEY, MTU, Faults, address_of, run_agents
from many_agents import card_of as talking_card

from allranks.guard.verdict import Guard
from allranks.host.node import NodeFacts, read_card_facts
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import Terms as CourseTerms
from allranks.launch.lead.driver import LeaderDriver
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import ConnectedNode
from allranks.launch.loop import PUMP_S
from allranks.launch.plan import Request, plan_job
from allranks.launch.worker_group import WorkerGroup
from allranks.model.card import Card, Facts, Interface
from allranks.model.cluster import Cluster, GuardTable
from allranks.model.finding import Finding, Verdict
from allranks.model.identity import world_from_env
from allranks.model.past import History, Past
from allranks.preflight.attend import Attendance
from allranks.preflight.judge import judge
from allranks.preflight.look import FULL_UP_TO, plan_first_look
from allranks.preflight.mesh.tester import Mesh
from allranks.preflight.pairs import choose_pairs
from allranks.preflight.rollcall import RollCall, stop
from allranks.preflight.roster import RollCallTerms
from allranks.report.rundir import RunDir
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection
from allranks.wire.leader_port import Hint, bind_port
from allranks.wire.protocol import Plan
from allranks.wire.seek import Search

JOIN_S = 60.0
TESTS_S = 60.0
"""Simulated nodes share two cores: the deadline of real ones is not theirs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--light", action="store_true", help="agents that only talk")
    parser.add_argument("--beats", type=float, default=0, help="seconds of heartbeats after the Plan")
    parser.add_argument("--profile", help="write a profile of the leader's process, after each size")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.light:
        load_leader(options.nodes or [1024, 4096], beats_s=options.beats, profile=options.profile)
        return
    facts = read_card_facts(os.environ)
    print(f"{os.cpu_count()} cores, {options.rounds} rounds; seconds at the leader, median (least to most)")
    print("nodes  pairs    join          roll call          frames  bytes a card")
    for num_nodes in options.nodes or [8, 64, 256, 1024]:
        took = [call_roll(num_nodes, facts) for _ in range(options.rounds)]
        total, joined = [each[0] for each in took], [each[1] for each in took]
        pairs = len(choose_pairs(num_nodes, full_up_to=FULL_UP_TO, seed=0))
        # Hello, Join, Welcome, Test, Tested, and the word at the end, for each agent but the leader's own.
        frames = 6 * (num_nodes - 1)
        size = len(msgspec.msgpack.encode(card_of(1, facts, None)))
        print(
            f"{num_nodes:5}  {pairs:6}  {statistics.median(joined):5.2f}"
            f"  {statistics.median(total):8.2f} ({min(total):.2f} to {max(total):.2f})  {frames:8}  {size:6}",
            flush=True,
        )


def card_of(index: int, facts: Facts, mesh: Mesh | None) -> Card:
    nic = Interface("lo0", (address_of(index),), is_up=True, networks=("127.0.0.0/8",), mtu=MTU)
    own = msgspec.structs.replace(facts, host_name=f"node{index:04d}", boot_id=f"boot-{index}", interfaces=(nic,))
    return Card(
        host=f"node{index:04d}",
        pid=os.getpid(),
        node_index=index,
        num_workers=1,
        num_gpus=0,
        data_interface="lo0",
        data_address=address_of(index),
        test_ports=mesh.ports if mesh else None,
        facts=own,
    )


def call_roll(num_nodes: int, facts: Facts) -> tuple[float, float]:
    """Hold one roll call; return the seconds until the verdict, and those until all were here."""
    is_sparse = num_nodes > FULL_UP_TO
    listener = bind_port(0)
    port = int(listener.getsockname()[1])
    groups = max(1, min(os.cpu_count() or 1, num_nodes - 1))
    shares = [range(1 + start, num_nodes, groups) for start in range(groups)]
    context = mp.get_context("fork")
    pipes, workers = [], []
    for share in shares:
        mine, theirs = context.Pipe()
        worker = context.Process(target=attend, args=(share, port, facts, is_sparse, theirs))
        worker.start()
        pipes.append(mine)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()  # their sockets are open, as those of agents are that start on nodes of their own
    mesh = Mesh(1 if is_sparse else 8)
    joined_s = [0.0]
    try:
        terms = RollCallTerms(
            job="benchmark", attempt=0, num_nodes=num_nodes, min_nodes=num_nodes, join_s=JOIN_S, tests_s=TESTS_S
        )
        call = RollCall(
            terms,
            card_of(0, facts, mesh),
            acceptors=[Acceptor(listener, job="benchmark", attempt=0, secret=KEY)],
            mesh=mesh,
            say=lambda line: print(f"  {line}", file=sys.stderr),
            on_event=lambda event, **_: joined_s.append(time.monotonic()) if event == "joined" else None,
            check_signals=lambda: None,
        )
        for pipe in pipes:
            pipe.send("go")
        began_s = time.monotonic()
        judgement = call.hold()
        took_s = time.monotonic() - began_s
        verdict = Verdict(job="benchmark", attempt=0, exit_code=judgement.exit_code, findings=judgement.findings)
        stop(call.roster.peers, verdict)
    finally:
        mesh.close()
        listener.close()
        for worker in workers:
            worker.join(10)
            worker.kill()
    assert judgement.is_go, judgement.findings[:3]  # busy cores are worth a warning about clocks
    return took_s, max(joined_s) - began_s


def attend(share: range, port: int, facts: Facts, is_sparse: bool, pipe: Pipe) -> None:
    """Be many agents in one process, on one selector."""
    meshes = {index: Mesh(1 if is_sparse else 8) for index in share}
    cards = {index: card_of(index, facts, meshes[index]) for index in share}
    pipe.send("ready")
    pipe.recv()
    selector = selectors.DefaultSelector()
    agents = {}
    for index in share:
        connection = Search(
            lambda: [[Hint("127.0.0.1", port, "benchmark")]],
            job="benchmark",
            secret=lambda: KEY,
            card=cards[index],
        ).wait(
            deadline_s=JOIN_S,
            on_wait=lambda *_: None,
            check_signals=lambda: None,
        )
        agents[index] = Attendance(
            connection,
            cards[index],
            mesh=meshes[index],
            look_at_run_dir=lambda: None,
            patience_s=JOIN_S,
            check_signals=lambda: None,
        )
        agents[index].attach(selector)
    while agents:
        for key, mask in selector.select(0.01):
            key.data(mask)
        for index, agent in list(agents.items()):
            answer, _ = agent.step()
            if answer is not None:
                meshes[index].close()
                del agents[index]


PHASES = ("join", "test", "judge", "plans")


def load_leader(sizes: Sequence[int], *, beats_s: float, profile: str | None) -> None:
    """Measure the leader's process with agents that only talk; faults are planted in a second round of the largest."""
    print(f"{os.cpu_count()} cores; seconds of processor time at the leader, by phase; agents share the cores with it")
    print("nodes   join   test  judge  plans    all  exponent  since last  frames  CPU/frame  in MB  out MB  RSS MB")
    before: tuple[int, float] | None = None
    for num_nodes in sizes:
        seen = load(num_nodes, Faults(), beats_s=beats_s, profile=profile)
        assert not seen.findings, seen.findings[:3]
        total_s = sum(seen.cpu_s.values())
        grown = f"{math.log(total_s / before[1]) / math.log(num_nodes / before[0]):8.2f}" if before else " " * 8
        before = num_nodes, total_s
        frames, size = frames_of(seen.count)
        print(
            f"{num_nodes:5}", *(f"{seen.cpu_s[phase]:6.2f}" for phase in PHASES), f"{total_s:6.2f}  {grown}",
            f"{seen.since_last_s:8.2f} s {frames:9,}  {1e6 * total_s / frames:6.0f} us {size[0] / 1e6:6.1f}",
            f"{size[1] / 1e6:7.1f} {seen.rss_mb:7.0f}", flush=True,
        )  # fmt: skip
        print("   ", *(f"{name} {seen.count[name]}" for name in sorted(seen.count) if name.endswith("bytes")))
        if seen.beats:
            print(f"    {seen.beats}")
    last = max(sizes)
    tried = plan_first_look(range(1, last), seed=0).pairs
    faults = Faults(other_nccl=last // 3, cut=tried[len(tried) // 2])
    seen = load(last, faults, beats_s=0, profile=None)
    print(f"{last} nodes, with other NCCL on node {faults.other_nccl} and no path between nodes {faults.cut}:")
    for finding in seen.findings:
        print(f"    {finding.cause} {finding.severity} {finding.node}: {finding.message[:120]}")
    took = f"{sum(seen.cpu_s.values()):.2f} s of processor time, {seen.since_last_s:.2f} s since the last arrival"
    print(f"    the verdict took {took}")


class Seen(msgspec.Struct):
    cpu_s: dict[str, float]
    since_last_s: float
    """From the last arrival to the last Plan, or to the verdict, that the kernel has taken."""
    count: Counter[str]
    findings: tuple[Finding, ...]
    rss_mb: float
    beats: str


def frames_of(count: Counter[str]) -> tuple[int, tuple[int, int]]:
    """Frames both ways, and bytes into and out of the leader; without the heartbeats."""
    into, out = ("Join", "Tested"), ("Hello", "Welcome", "Test", "Plan", "Goodbye")
    return sum(count[each] for each in (*into, *out)), tuple(
        sum(count[f"{each} bytes"] for each in way) for way in (into, out)
    )


def load(num_nodes: int, faults: Faults, *, beats_s: float, profile: str | None) -> Seen:
    listener = bind_port(0)
    port, beat_s = int(listener.getsockname()[1]), GuardTable().for_nodes(num_nodes).beat_s if beats_s else 0
    context = mp.get_context("fork")
    pipes, workers = [], []
    num_groups = max(2, num_nodes // 8000 + 1)
    for group in range(num_groups):
        mine, theirs = context.Pipe()
        share = range(1 + group, num_nodes, num_groups)
        worker = context.Process(target=run_agents, args=(share, port, faults, beat_s, theirs))
        worker.start()
        pipes.append(mine)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()
    mesh, arrived_s = Mesh(1), [0.0]
    terms = RollCallTerms(
        job="benchmark", attempt=0, num_nodes=num_nodes, min_nodes=num_nodes, join_s=300.0, tests_s=60.0
    )
    own = msgspec.structs.replace(talking_card(0), test_ports=None)  # nobody tries the leader, nor it the others
    cpu_s, joined_cpu_s = dict.fromkeys(PHASES, 0.0), [0.0]

    def note(event: str, **_: object) -> None:
        if event == "joined":
            arrived_s[0] = time.monotonic()
            if call.roster.is_complete:
                joined_cpu_s[0] = time.process_time()

    acceptor = Acceptor(listener, job="benchmark", attempt=0, secret=KEY)
    call = RollCall(terms, own, acceptors=[acceptor], mesh=mesh, say=print, on_event=note, check_signals=lambda: None)
    for pipe in pipes:
        pipe.send("go")
    profiler = cProfile.Profile() if profile else None
    if profiler:
        profiler.enable()
    began_s = time.process_time()
    judgement = call.hold()
    held_s, again_s = time.process_time(), time.monotonic()
    judge(call.observations, terms)
    cpu_s["judge"] = time.process_time() - held_s
    cpu_s["join"], cpu_s["test"] = joined_cpu_s[0] - began_s, held_s - joined_cpu_s[0] - cpu_s["judge"]
    again_s = time.monotonic() - again_s
    peers, cards, beats = call.roster.peers, call.roster.cards, ""
    sending_s = time.process_time()
    if judgement.exit_code:
        verdict = Verdict(job="benchmark", attempt=0, exit_code=judgement.exit_code, findings=judgement.findings)
        stop(peers, verdict)
    else:
        plans = make_group(cards, wanted_backend="nccl", attempt=0, store_address="127.0.0.1", store_port=29500)
        for index, peer in peers.items():
            peer.send(plans[index])
        unsent = list(peers.values())
        while unsent := [peer for peer in unsent if peer.flush()]:
            time.sleep(0.001)
    cpu_s["plans"] = time.process_time() - sending_s
    since_last_s = time.monotonic() - arrived_s[0] - again_s
    if profiler:
        profiler.disable()
        profiler.dump_stats(f"{profile}.{num_nodes}")
    rss_mb = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    if beats_s and not judgement.exit_code:
        beats = lead_for(beats_s, cards, plans, peers, profile=profile)
    for peer in peers.values():
        peer.close()
    count: Counter[str] = sum((pipe.recv() for pipe in pipes), Counter())
    for worker in workers:
        worker.join(10)
        worker.kill()
    mesh.close()
    listener.close()
    return Seen(cpu_s, since_last_s, count, judgement.findings, rss_mb, beats)


def lead_for(
    beats_s: float,
    cards: Mapping[int, Card],
    plans: Mapping[int, Plan],
    peers: Mapping[int, Connection],
    *,
    profile: str | None,
) -> str:
    """Lead the job for so long while all nodes say how they are; return what that costs."""
    settings = GuardTable().for_nodes(len(cards))
    terms = CourseTerms(
        job="benchmark", wanted_backend="nccl", store_address="127.0.0.1", store_port=29500,
        num_nodes=len(cards), min_nodes=len(cards), capacity_s=60.0,
    )  # fmt: skip
    ours, theirs = socket.socketpair()
    nodes = {
        index: ConnectedNode(card=card, name=card.host, address=address_of(index)) for index, card in cards.items()
    }
    past = Past(history=History(restarts_left=0))
    leader = Leader(terms, guard=Guard(settings), past=past, nodes=nodes, plan=plans[0], now_s=time.monotonic())
    facts = NodeFacts(host="own", interfaces=(), num_gpus=0, num_cpus=2)
    plan = plan_job(Request(), world_from_env({}), Cluster(guard=settings), facts, job="benchmark", origin={})
    workers = WorkerGroup(job=plan, command=[], run_dir=RunDir(Path("/nowhere"), "benchmark"), hidden=(), env={})
    selector = selectors.DefaultSelector()
    connections = {0: Connection(ours, peer="own"), **peers}
    driver = LeaderDriver(leader, workers, None, selector=selector, connections=connections, acceptor=None)
    profiler = cProfile.Profile() if profile else None
    began_s, began_cpu_s, num_turns = time.monotonic(), time.process_time(), 0
    num_heard = 0
    if profiler:
        profiler.enable()
    while time.monotonic() < began_s + beats_s:
        num_turns += 1
        for key, _ in selector.select(PUMP_S):
            key.data(key.fileobj)
            num_heard += 1
        driver.turn(time.monotonic())
    if profiler:
        profiler.disable()
        profiler.dump_stats(f"{profile}.beats.{len(cards)}")
    took_s, used_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    theirs.close()
    selector.close()
    return (
        f"beats: {num_heard / took_s:,.0f} a second of {len(peers) / settings.beat_s:,.0f} due; the leader used "
        f"{used_s / took_s:.0%} of a core, {1e6 * used_s / max(num_heard, 1):.0f} us a beat; "
        f"{num_turns / took_s:.1f} turns a second"
    )


if __name__ == "__main__":
    main()

"""Is a link between nodes broken, and which node or link is at fault? Pure.

It begins with a connection that does not get its bytes across: the other kernel acknowledges nothing for stalled_s,
whatever the processes do. Then every node tries the machines at both ends of such connections, in rounds. Packets that
come through join nodes; where the rest of the nodes is joined and one is apart, that one is it:

    nothing of any size between it and anybody     AR210 link-down      its interface, cable or switch port
    small packets pass, full-sized ones do not     AR204 mtu-blackhole
    two nodes, or two groups; each has others      AR211 partition      between them; undecided which side
    now it passes, now it does not                 AR212 packet-loss    where all bad pairs meet
    all tries pass, and the bytes never do         AR206 firewall-port  something drops just that connection

What one round shows counts at once where a node is cut off from three others or more; else a second round must show
the same. Nobody is judged here while an agent involved is silent: that may be a lost node (presence.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.guard.faults import FIREWALL_PORT, LINK_DOWN, MTU_BLACKHOLE, PACKET_LOSS, PARTITION
from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.scene import Scene, Tried
from allranks.model.beat import LinkSeen
from allranks.model.errors import Exit
from allranks.model.finding import Confidence
from allranks.model.fix import Fix
from allranks.model.hostlist import fold_hosts
from allranks.wire.protocol import TryTarget

ROUND_SLACK_S = 0.6
"""For the order to get there and the answer to come back in a beat, besides two beats."""
TRIED_EARLY = 0.5
"""Of stalled_s: to try does no harm, so it begins before anything would be judged."""
MIN_APART = 3
"""Nodes that all fail to reach one: enough for a verdict from a single round."""
MAX_ROUNDS = 4
"""Of tries that all pass: then only that connection can be at fault."""
FILTERED_S = 10.0
"""How long a connection must have been stalled, besides, before something is said to drop just it."""

SAFE_MTU = 1500
"""Bytes that every Ethernet link carries."""
_FIX_OF_PAIR = Fix(
    text="check the path between {one} and {two}: filter, route, trunk, MTU; until then exclude one of them",
    slurm=": --exclude={two}",
    pod="",
    none="",
)

Pair = tuple[int, int]
"""Of node indices, the smaller first."""
Round = Mapping[Pair, Sequence[Tried]]
"""What the tries of one round showed, by pair."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """One connection that is stuck, and between whom."""

    own: int
    peer: int
    link: LinkSeen

    @property
    def pair(self) -> Pair:
        """Of its nodes."""
        return _pair(self.own, self.peer)


@dataclass(slots=True)
class Episode:
    """One time of trouble: what was tried, round by round."""

    suspects: set[int] = field(default_factory=set)
    ordered_s: float = 0.0
    until_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    """Finished ones only."""


def find_stalled(scene: Scene, now_s: float, *, share: float = 1.0) -> list[Stalled]:
    """Return the connections between nodes of ours that have got nothing across for (this share of) stalled_s."""
    told = [node for node in scene.nodes if node.beat is not None and node.beat.links]
    if not told:
        return []
    owner = {address: node.index for node in scene.nodes if node.beat for address in node.beat.addresses}
    owner |= {node.address("data"): node.index for node in scene.nodes}
    found = []
    for node in told:
        if node.beat is None or node.heard_s is None or now_s - node.heard_s > scene.fresh_s:
            continue
        for link in node.beat.links:
            peer = owner.get(link.peer_address) if link.peer_address else None
            if peer is not None and peer != node.index and link.stalled_s >= share * scene.settings.stalled_s:
                found.append(Stalled(node.index, peer, link))
    return found


def round_s(scene: Scene, num_rounds: int) -> float:
    """How long the tries of the next round may take; in the first one a lost SYN is not sent again, which takes 1 s."""
    longest_s = min(max(scene.settings.stalled_s * 0.8, 1.1), 3.0)
    return longest_s if num_rounds else longest_s / 2


def find_stuck_at(scene: Scene, stalled: Sequence[Stalled]) -> dict[int, str]:
    """Return for each node at which address it is stuck, where that is only on another interface than the first."""
    seen: dict[int, set[str]] = {}
    for stall in stalled:
        seen.setdefault(stall.own, set()).add(stall.link.own_address)
        seen.setdefault(stall.peer, set()).add(stall.link.peer_address)
    return {index: min(at) for index, at in seen.items() if scene.nodes[index].address("data") not in at}


def plan_round(scene: Scene, suspects: set[int]) -> dict[int, tuple[TryTarget, ...]]:
    """Return whom each node is to try on the data network, at the interface where connections are stuck."""
    targets = [t for index in sorted(suspects) for t in scene.nodes[index].targets(scene.stuck_at.get(index, ""))]
    wanted = [target for target in targets if target.network == "data"]
    plans = {node.index: tuple(target for target in wanted if target.node_index != node.index) for node in scene.nodes}
    return {index: plan for index, plan in plans.items() if plan}


def is_round_over(scene: Scene, episode: Episode, now_s: float) -> bool:
    """Whether all answers are there, or their time is up."""
    return now_s >= episode.until_s or all(
        (tried := scene.nodes[index].tries.get((target.node_index, "data"))) and tried.at_s >= episode.ordered_s
        for index, targets in plan_round(scene, episode.suspects).items()
        for target in targets
    )


def collect_round(scene: Scene, episode: Episode) -> Round:
    """Return what the tries since the order showed."""
    found: dict[Pair, list[Tried]] = {}
    for node in scene.nodes:
        for (target, network), tried in node.tries.items():
            if network == "data" and tried.at_s >= episode.ordered_s:
                found.setdefault(_pair(node.index, target), []).append(tried)
    return found


def judge_links(scene: Scene, episode: Episode, stalled: Sequence[Stalled]) -> GuardVerdict | None:
    """Return the verdict that the finished rounds, at least one, allow; None where another round is needed."""
    now = episode.rounds[-1]
    bad = _bad(now)
    if not bad:
        return _judge_filtered(scene, episode, stalled)
    apart = _apart(now.keys() - bad, bad, scene.leader)
    if len(episode.rounds) < 2:
        is_plain = len(apart) == 1 and len(apart[0]) == 1 and sum(apart[0][0] in pair for pair in bad) >= MIN_APART
        return _judge_apart(scene, apart, now, stalled) if is_plain else None
    if (bad_before := _bad(episode.rounds[-2])) != bad:
        return _judge_lossy(scene, episode, bad | bad_before, stalled)
    if apart:
        return _judge_apart(scene, apart, now, stalled)
    return _judge_pairs(scene, now, stalled)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def _bad(now: Round) -> set[Pair]:
    """Pairs between which nothing came through."""
    return {pair for pair, tried in now.items() if not any(result.is_ok for result in tried)}


def _apart(ok: set[Pair], bad: set[Pair], leader: int) -> list[tuple[int, ...]]:
    """Parts that packets do not join to the main one; the main one is the largest, of equal ones the leader's."""
    parts = [{index} for index in sorted({index for pair in ok | bad for index in pair})]
    for pair in ok:
        joined = [part for part in parts if part & set(pair)]
        parts = [part for part in parts if part not in joined] + [set[int]().union(*joined)]
    parts.sort(key=min)
    main = max(parts, key=lambda members: (len(members), leader in members))
    return [tuple(sorted(part)) for part in parts if part is not main]


def _is_large_lost(tried: Sequence[Tried]) -> bool:
    return any(result.seen.connects for result in tried)


def _judge_apart(
    scene: Scene, apart: Sequence[tuple[int, ...]], now: Round, stalled: Sequence[Stalled]
) -> GuardVerdict:
    in_main = {index for pair in now for index in pair} - {index for part in apart for index in part}
    findings, bad = [], sorted(_bad(now))
    for part in apart:
        mine = [pair for pair in bad if set(pair) & set(part)]
        one, two = (fold_hosts([scene.nodes[i].name for i in sorted(side)]) for side in (in_main, part))
        is_undecided = len(part) > 1 or len(in_main) < 2
        cause_id, ranks = LINK_DOWN, scene.nodes[part[0]].ranks
        values = scene.values(*ranks)
        what = f"no packets pass between {two} and {one} on the data network; its agent still answers"
        if is_undecided:
            what = f"no packets pass between {one} and {two} on the data network; both agents still answer"
        if len(part) > 1:
            cause_id, ranks = PARTITION, range(0)
            what = f"no packets pass between {one} and {two} on the data network; each group works on its own"
        elif all(_is_large_lost(now[pair]) for pair in mine):
            cause_id = MTU_BLACKHOLE
            what = f"small packets pass between {two} and {one}, but full-sized ones are lost"
            values = scene.values() | {"culprit": two, "path_mtu": SAFE_MTU}
        node, confidence = (f"{one} or {two}", Confidence.UNDECIDED) if is_undecided else (two, Confidence.CERTAIN)
        seen = _evidence(scene, stalled, mine, now)
        about = {"node": node, "evidence": seen, "confidence": confidence, "values": values}
        findings.append(scene.fault(cause_id, what, *ranks, **about))
    nodes = tuple(sorted(index for part in apart for index in part))
    ranks_apart = tuple(rank for index in nodes for rank in scene.nodes[index].ranks)
    return GuardVerdict(findings=tuple(findings), exit_code=Exit.NODE_FAULT, ranks=ranks_apart, nodes=nodes, cures=True)


def _judge_pairs(scene: Scene, now: Round, stalled: Sequence[Stalled]) -> GuardVerdict:
    """Pairs that do not reach each other, while others reach both."""
    pairs = sorted(_bad(now))
    is_mtu = all(_is_large_lost(now[pair]) for pair in pairs)
    met = Counter(index for pair in pairs for index in pair)
    leave = max(met, key=lambda index: (met[index], index != scene.leader, index))
    one, two = (scene.nodes[index].name for index in pairs[0])
    more = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
    cause_id, passes = (MTU_BLACKHOLE, "only small packets pass") if is_mtu else (PARTITION, "no packets pass")
    what = f"{passes} between {one} and {two} on the data network{more}; other nodes reach both"
    fix = _FIX_OF_PAIR.tell(scene.reader, {"one": one, "two": two})
    seen = _evidence(scene, stalled, pairs, now)
    return _undecided(scene, cause_id, what, (one, two), leave, evidence=seen, fix=fix)


def _judge_lossy(scene: Scene, episode: Episode, bad: set[Pair], stalled: Sequence[Stalled]) -> GuardVerdict | None:
    """Now it passes, now it does not."""
    met = Counter(index for pair in bad for index in pair)
    most = max(met.values())
    culprits = sorted((index for index in met if met[index] == most), key=lambda index: index != scene.leader)
    is_decided = len(culprits) == 1 and most >= 2
    if not is_decided and len(episode.rounds) < MAX_ROUNDS:
        return None
    leave = culprits[-1]
    names = [scene.nodes[index].name for index in sorted(culprits)]
    tries = [result for one in episode.rounds for pair, tried in one.items() if leave in pair for result in tried]
    lost = sum(not result.is_ok for result in tries)
    node = scene.nodes[leave]
    what = f"packets to or from {node.name} are lost: {lost} of {len(tries)} tests between it and other nodes failed, "
    what += "the others passed"
    interface = scene.interface(leave)
    values = {"culprit": node.name} | ({"interface": interface} if interface else {})
    seen = _evidence(scene, stalled, sorted(bad), episode.rounds[-1])
    about: dict[str, Any] = {"evidence": seen, "values": values, "victims": scene.others(*node.ranks)}
    if not is_decided:
        return _undecided(scene, PACKET_LOSS, what, names[:2], leave, **about)
    finding = scene.fault(PACKET_LOSS, what, *node.ranks, node=node.name, confidence=Confidence.LIKELY, **about)
    return GuardVerdict(findings=(finding,), exit_code=Exit.NODE_FAULT, ranks=finding.ranks, nodes=(leave,), cures=True)


def _judge_filtered(scene: Scene, episode: Episode, stalled: Sequence[Stalled]) -> GuardVerdict | None:
    """Every try passes, and a connection does not."""
    old = [stall for stall in stalled if stall.link.stalled_s >= max(FILTERED_S, 4 * scene.settings.stalled_s)]
    if not old or len(episode.rounds) < MAX_ROUNDS:
        return None
    if any(not result.is_ok for one in episode.rounds for tried in one.values() for result in tried):
        bad = set().union(*map(_bad, episode.rounds))
        return _judge_lossy(scene, episode, bad, stalled) if bad else None
    worst = max(old, key=lambda stall: stall.link.stalled_s)
    one, two = (scene.nodes[index].name for index in worst.pair)
    what = f"a connection between {one} and {two} is stalled, but new ones work: "
    what += "something between them drops its packets"
    fix = f"on {one} and {two}: nft list ruleset; conntrack -S: "
    fix += "a stateful firewall, or a full table, drops connections that it no longer knows"
    seen = _evidence(scene, stalled, [worst.pair], {})
    return _undecided(scene, FIREWALL_PORT, what, (one, two), worst.pair[1], evidence=seen, fix=fix)


def _undecided(scene: Scene, cause_id: str, what: str, names: Sequence[str], leave: int, **more: Any) -> GuardVerdict:
    """One of two nodes is at fault; `leave` is to be left out."""
    finding = scene.fault(cause_id, what, node=" or ".join(names), confidence=Confidence.UNDECIDED, **more)
    return GuardVerdict(findings=(finding,), exit_code=Exit.NODE_FAULT, nodes=(leave,), cures=True)


def _evidence(scene: Scene, stalled: Sequence[Stalled], pairs: Sequence[Pair], now: Round) -> list[str]:
    theirs = sorted((stall for stall in stalled if stall.pair in pairs), key=lambda stall: -stall.link.stalled_s)
    lines = [
        f"{scene.nodes[stuck.own].name} -> {scene.nodes[stuck.peer].name}: {stuck.link.unacked_bytes} bytes "
        f"unacknowledged for {stuck.link.stalled_s:.1f} s, {stuck.link.retransmits} retransmits"
        for stuck in theirs[:4]
    ]
    for pair in pairs[:6]:
        for result in now.get(pair, ())[:2]:
            source = pair[0] if result.seen.target == pair[1] else pair[1]
            what = result.seen.error or "no answer"
            if result.seen.connects:
                what = "connects, but no full-sized data is acknowledged" if not result.is_ok else "passes"
            lines.append(f"tried {scene.nodes[source].name} -> {scene.nodes[result.seen.target].name}: {what}")
    return lines[:10]

"""Which connections of the pair tests did a node's own kernel not even make, and why? Pure.

Too many open files, no free local port, no route: such an errno says nothing of the other node, so nobody is blamed for
it. The tester's node is named with what its kernel said, as a warning: the job may need less than the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from allranks.causes.outcome import Outcome, warned
from allranks.model.card import Card
from allranks.model.hostlist import fold_hosts
from allranks.model.pair import PairResult
from allranks.preflight.links import LinkVerdict
from allranks.preflight.symptoms import is_silent, own_errno
from allranks.preflight.vet import is_plausible

_LOCAL_PORTS = frozenset({"EADDRINUSE", "EADDRNOTAVAIL"})
_NO_ROUTE = frozenset({"EHOSTUNREACH", "ENETUNREACH", "EHOSTDOWN", "ENETDOWN", "EINVAL"})
_CANNOT_SEND = "cannot send from "
"""How the problem of a pair begins whose datagrams this kernel did not send."""


def judge_untried(results: Sequence[PairResult], cards: Mapping[int, Card]) -> list[LinkVerdict]:
    """Name the nodes whose own kernel made no connection to some others.

    Args:
        results: of the last time each pair was tried.
        cards: by node index; their hosts are the names.
    """
    targets: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)
    reasons: dict[tuple[int, str], str] = {}
    for result in results:
        if result.source not in cards or result.target not in cards or not is_plausible(result) or is_silent(result):
            continue  # of a pair between which nothing at all comes through AR210 and AR211 tell
        said = [*result.closed.values(), result.store or ""]
        if (result.problem or "").startswith(_CANNOT_SEND):
            said.append((result.problem or "").rpartition(": ")[2])
        for reason in dict.fromkeys(said):
            if (name := own_errno(reason)) is not None:
                key = result.source, name
                reasons[key] = reason
                targets[key][result.target] = None
    return [
        _judge(cards, index, name, reasons[index, name], [*found]) for (index, name), found in sorted(targets.items())
    ]


def _judge(cards: Mapping[int, Card], index: int, name: str, reason: str, targets: Sequence[int]) -> LinkVerdict:
    card = cards[index]
    to = fold_hosts(sorted(cards[target].host for target in targets))
    if name == "EMFILE":
        limit = card.facts.limits.get("nofile") if card.facts else None
        evidence = f"connections to {to} could not be tested: {reason}"
        return LinkVerdict("AR004", card.host, (card.host,), warned(evidence, limit=limit or "a few"))
    what = f"the node's own kernel could not connect to {to}, so the path is untested: {reason}"
    return LinkVerdict("AR217", card.host, (card.host,), _outcome(card, name, what, cards[targets[0]].data_address))


def _outcome(card: Card, name: str, what: str, address: str | None) -> Outcome:
    interfaces = card.facts.interfaces if card.facts else ()
    if name in _NO_ROUTE:
        hint = "other packets pass: only some have a route, or a firewall rejects these"
        return warned(hint, what=what, command=f"ip route get {address or 'ADDRESS'}; nft list ruleset")
    if name == "EADDRNOTAVAIL" and interfaces and not any(card.data_address in nic.addresses for nic in interfaces):
        return warned(f"no interface has {card.data_address}", what=what, command="ip -br addr")
    if name in _LOCAL_PORTS:
        ports = card.facts.port_range if card.facts else None
        hint = f"net.ipv4.ip_local_port_range is {ports[0]} to {ports[1]}" if ports else "no local port is free"
        return warned(hint, what=what, command="sysctl net.ipv4.ip_local_port_range; ss -s")
    return warned(what=what, command=f"ip route get {address or 'ADDRESS'}; nft list ruleset; ulimit -a")

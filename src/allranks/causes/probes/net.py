"""Do names, addresses, packet sizes and speeds of the data network agree on all nodes?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from allranks.causes.outcome import PASSED, Checks, Outcome, Surveyed, failed, skipped, unknown, warned
from allranks.causes.probes.cards import data_interface, data_network, parse_address, subnet_of, with_facts
from allranks.causes.probes.rdma import why_no_rdma
from allranks.model.card import Card, Interface
from allranks.model.finding import Confidence, Status
from allranks.model.hostlist import fold_hosts

# Do the names of nodes lead anywhere?

MAX_NAMES = 4
"""Names that are shown of those that do not resolve."""


def survey_master_dns(cards: Sequence[Card]) -> Surveyed:
    """Fails if the configured endpoint does not resolve on a node; warns about other names."""
    endpoints = {card.endpoint for card in cards if card.endpoint}
    known = [(card, facts) for card, facts in with_facts(cards) if "resolved" not in facts.unread]
    found: dict[tuple[Status, tuple[str, ...], int], list[str]] = {}
    by_name: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for card, facts in known:
        for name, addresses in facts.resolved.items():
            if name != facts.host_name:  # found in its own /etc/hosts, it says nothing of the others
                by_name[name][card.host] = addresses
    for name, asked in by_name.items():
        lost = tuple(host for host, addresses in asked.items() if not addresses)
        num_found = len(asked) - len(lost)
        is_endpoint = name in endpoints
        if not lost or parse_address(name) or (num_found * 2 <= len(asked) - 1 and not is_endpoint):
            continue
        found.setdefault((Status.FAIL if is_endpoint else Status.WARN, lost, num_found), []).append(name)
    return [(lost, _outcome(status, names, num_found)) for (status, lost, num_found), names in found.items()]


def _outcome(status: Status, names: Sequence[str], num_found: int) -> Outcome:
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else "")
    contrast = {0: "no node that looked it up got an address", 1: "another node resolves it"}
    values = {"names": shown, "contrast": contrast.get(num_found, f"{num_found} other nodes resolve it")}
    return Outcome(status, values=values)


# Are names and addresses of the nodes fit to be announced to others?


def survey_loopback_hostname(cards: Sequence[Card]) -> Surveyed:
    """Warns if a node's own name resolves to its loopback address, unless this is so on all nodes."""
    known = [(card, facts.host_name, facts.resolved.get(facts.host_name, ())) for card, facts in with_facts(cards)]
    odd = [(card, name, addresses) for card, name, addresses in known if _are_loopback(addresses)]
    is_one_machine = len(cards) == 1 and cards[0].test_ports is None
    if is_one_machine or (len(odd) == len(known) and len(cards) > 1):
        return []
    return [((card.host,), warned(name=name, address=", ".join(addresses))) for card, name, addresses in odd]


def survey_ip_family_mismatch(cards: Sequence[Card]) -> Surveyed:
    """Fails if some data addresses are IPv4 and others IPv6."""
    families = {
        card.host: address.version for card in cards if (address := parse_address(card.data_address)) is not None
    }
    counts = Counter(families.values()).most_common()
    if len(counts) < 2:
        return []
    (usual, num_usual), (odd, num_odd) = counts
    by_family = {family: tuple(host for host, own in families.items() if own == family) for family in (usual, odd)}
    evidence = tuple(f"{fold_hosts(list(hosts))}: IPv{family}" for family, hosts in by_family.items())
    if num_usual == num_odd:
        what = f"{num_usual} of {len(families)} data addresses are IPv{usual}, the others IPv{odd}"
        values = {"what": what}
        outcome = Outcome(Status.FAIL, values=values, evidence=evidence, confidence=Confidence.UNDECIDED)
        return [(tuple(families), outcome)]
    what = f"the data address is IPv{odd}; {num_usual} of {len(families)} nodes use IPv{usual}"
    return [(by_family[odd], failed(*evidence, what=what))]


def probe_duplicate_subnet(card: Card) -> Outcome:
    """Warns if a second interface that is up has an address in the data subnet."""
    if card.facts is None or "interfaces" in card.facts.unread:
        return unknown("the node's interfaces could not be read")
    own, network = data_interface(card), data_network(card)
    if own is None or network is None:
        return skipped("the network that carries gradients is unknown")
    others = [nic for nic in card.facts.interfaces if nic.name != own.name and nic.is_up and _is_in(network, nic)]
    are_apart = own.arp is not None and all(nic.answers_for_itself for nic in (own, *others))
    if not others or own.kind == "loopback" or are_apart:
        return PASSED
    return warned(interface=own.name, names=" and ".join(nic.name for nic in (own, *others)), network=network)


def _is_in(network: str, nic: Interface) -> bool:
    return any(subnet_of(nic, address) == network for address in nic.addresses)


def _are_loopback(addresses: Sequence[str]) -> bool:
    parsed = [parse_address(text) for text in addresses]
    return bool(parsed) and all(address is not None and address.is_loopback for address in parsed)


# Do the data interfaces have the same MTU and speed on all nodes?


def survey_mtu_unequal(cards: Sequence[Card]) -> Surveyed:
    """Warns if the MTUs of the data interfaces differ; fails if RoCE uses them."""
    nics = _data_interfaces(cards)
    mtus = {host: nic.mtu for host, nic in nics.items() if nic.mtu}
    counts = Counter(mtus.values()).most_common()
    if len(counts) < 2:
        return []
    status = Status.FAIL if any(_has_roce(card, nics) for card in cards) else Status.WARN
    evidence = tuple(f"{_fold(mtus, mtu)}: MTU {mtu}" for mtu, _ in counts[:4])
    usual, num_usual = counts[0]
    if counts[1][1] == num_usual:
        values: Mapping[str, object] = {
            "what": f"the MTUs of the data interfaces differ: {' and '.join(str(mtu) for mtu, _ in counts[:4])}",
            "wanted": " or ".join(str(mtu) for mtu, _ in counts[:4]),
        }
        outcome = Outcome(status, values=values, evidence=evidence, confidence=Confidence.UNDECIDED)
        return [(tuple(mtus), outcome)]
    found = []
    for mtu, _ in counts[1:]:
        hosts = tuple(host for host, own in mtus.items() if own == mtu)
        values = {
            "what": f"the data interface has MTU {mtu}; {num_usual} of {len(mtus)} nodes have {usual}",
            "wanted": usual,
        }
        outcome = Outcome(status, values=values, evidence=evidence, interface=_common_name(nics, hosts))
        found.append((hosts, outcome))
    return found


def survey_slow_link(cards: Sequence[Card]) -> Surveyed:
    """Warns if a minority of the data interfaces came up at a lower speed than the others."""
    nics = _data_interfaces(cards)
    speeds = {host: nic.speed_mbit_s for host, nic in nics.items() if nic.speed_mbit_s and nic.speed_mbit_s > 0}
    counts = Counter(speeds.values()).most_common()
    if len(counts) < 2 or counts[1][1] == counts[0][1]:
        return []
    usual = counts[0][0]
    found = []
    for speed, _ in counts[1:]:
        if speed >= usual:
            continue
        hosts = tuple(host for host, own in speeds.items() if own == speed)
        outcome = warned(
            *(f"{_fold(speeds, mbit_s)}: {mbit_s} Mbit/s by /sys/class/net/*/speed" for mbit_s in (speed, usual)),
            interface=_common_name(nics, hosts),
            culprit=fold_hosts(list(hosts)),
            mbit_s=speed,
            usual_mbit_s=usual,
        )
        found.append((hosts, outcome))
    return found


def _data_interfaces(cards: Sequence[Card]) -> dict[str, Interface]:
    """The data interface of each node that has one and is up; one machine's loopback is none."""
    nics = {card.host: data_interface(card) for card, _ in with_facts(cards)}
    return {host: nic for host, nic in nics.items() if nic is not None and nic.is_up and nic.kind != "loopback"}


def _fold(values: Mapping[str, int], value: int) -> str:
    return fold_hosts([host for host, own in values.items() if own == value])


def _common_name(nics: Mapping[str, Interface], hosts: Sequence[str]) -> str | None:
    names = {nics[host].name for host in hosts}
    return names.pop() if len(names) == 1 else None


def _has_roce(card: Card, nics: Mapping[str, Interface]) -> bool:
    """Whether NCCL would speak RDMA over this node's data interface."""
    if card.facts is None or card.host not in nics or why_no_rdma(card):
        return False
    return any(
        port.state == "ACTIVE" and port.link_layer == "Ethernet" and port.netdev in (None, nics[card.host].name)
        for port in card.facts.rdma_ports
    )


# Can the data interface and the leader's port be used?


def probe_link_down(card: Card) -> Outcome:
    """Fails if the data interface is switched off or has no carrier."""
    if card.facts is None or "interfaces" in card.facts.unread:
        return unknown("the node's interfaces could not be read")
    nic = data_interface(card)
    if nic is None:
        return skipped("the interface that carries gradients is unknown")
    if nic.is_up:
        return PASSED
    why = {False: "no carrier", None: "switched off"}.get(nic.has_carrier, "not running")
    return failed(
        f"{nic}, carrier: {nic.has_carrier}, changes since boot: {nic.carrier_changes}",
        interface=nic.name,
        what=f"the data interface {nic.name} is down: {why}",
    )


def probe_port_in_use(card: Card) -> Outcome | None:
    """Warns if another process used the leader's port."""
    if card.came_by is not None:
        return None
    if card.port_holder is None or card.test_ports is None:  # on one machine any port does
        return PASSED
    return warned(port=card.wanted_port or "of the leader", holder=card.port_holder)


# Do the nodes reach the address at which they meet?


def survey_master_unreachable(cards: Sequence[Card]) -> Surveyed:
    """Fails if the configured endpoint is no address of the leader, and no node joined through it."""
    asked = [card for card in cards if card.endpoint]
    if not asked or len(cards) < 2 or cards[0].facts is None:
        return []
    leader, card = cards[0], asked[0]
    endpoint = card.endpoint or ""
    resolved = card.facts.resolved.get(endpoint, ()) if card.facts else ()
    literal = parse_address(endpoint)
    led_to = {literal} if literal else {parse_address(text) for text in resolved} - {None}
    own = {parse_address(text) for nic in cards[0].facts.interfaces for text in nic.addresses}
    came_by = {joined.came_by.rpartition(":")[0].strip("[]") for joined in cards if joined.came_by}
    has_led = endpoint.strip("[]") in came_by or led_to & {parse_address(text) for text in came_by}
    if not led_to or not own or led_to & own or has_led or any(address and address.is_loopback for address in led_to):
        return []
    there = "" if literal else f" (there {', '.join(sorted(map(str, led_to)))})"
    what = f"the nodes were told to meet at {endpoint}, but the leader {leader.host} has no such address"
    evidence = (
        f"{card.host} got {endpoint}{there} from --rdzv-endpoint or --master-addr",
        f"{leader.host} has {', '.join(str(nic) for nic in cards[0].facts.interfaces if nic.addresses)}",
    )
    return [((leader.host,), failed(*evidence, what=what))]


CHECKS = {
    "AR201": Checks(survey=survey_master_unreachable),
    "AR202": Checks(survey=survey_master_dns),
    "AR205": Checks(survey=survey_mtu_unequal),
    "AR207": Checks(probe=probe_port_in_use),
    "AR209": Checks(survey=survey_loopback_hostname),
    "AR210": Checks(probe=probe_link_down),
    "AR213": Checks(survey=survey_slow_link),
    "AR214": Checks(survey=survey_ip_family_mismatch),
    "AR216": Checks(probe=probe_duplicate_subnet),
}

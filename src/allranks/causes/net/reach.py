"""Can the nodes find each other: the leader's address, names, ports and firewalls?"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, Symptom, failed, warned
from allranks.causes.net.cards import parse_address, with_facts
from allranks.causes.sign import Sign
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Status

MAX_NAMES = 4
"""Names that are shown of those that do not resolve."""


class MasterUnreachable(Cause, id="AR201"):
    """The address of the leader is not the leader's, or is not reached.

    ## What it means
    The nodes were told to meet at an address (`--rdzv-endpoint`, `--master-addr`) that no interface of the first node
    has, or the leader listens and another node reaches none of its addresses.

    ## Why it breaks the job
    All ranks meet at one store. Plain PyTorch knocks at the wrong address without a word until its timeout, 10 to 30
    minutes, tries once more, and then prints a C++ stack.

    ## Example
    From pytorch/pytorch#107021, the same with torchrun:

        [E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 192.0.0.1:1234
        RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.

    ## Fix
    Under SLURM leave the flag away: the leader announces where it is. Without SLURM name the first node by an address
    that it has on a network that all nodes share:

        ip -br addr                                       # on the first node
        allranks run --nnodes 2 --rdzv-endpoint 192.168.20.15:29500 train.py

    Usual mistakes: an address from an older job in .bashrc, the address of the login node, `hostname -I` (several
    words), a public address in front of a NAT.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/TCPStore.cpp and socket.cpp (2.13: seen there, 2026-11-21).
    https://github.com/pytorch/pytorch/issues/107021 and /issues/79388 (read 2026-11-21).
    """

    message = "{what}"
    fix = "leave the address away under SLURM, else name one of {node} that all nodes reach: ip -br addr"
    exit_code = Exit.SETUP
    also = ("AR202", "AR206", "AR210", "AR401")
    signs = (
        Sign(r"The client socket has timed out after [0-9]+m?s while trying to connect to"),
        Sign(r"TCP client failed to connect/validate to host"),
        Sign(r"RendezvousConnectionError: The connection to the C10d store has failed"),
    )
    hits = (
        "[E socket.cpp:793] [c10d] The client socket has timed out after 60s while trying to connect to (IP1, 2222).",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
        "(172.17.0.9, 46229).",
        "[W1121 09:34:36.623191250 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host "
        "no-such-host.invalid:29555 - retrying (try=0, timeout=3000ms, delay=3569ms): The client socket has timed out "
        "after 3000ms while trying to connect to (no-such-host.invalid, 29555).",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed. See inner exception for details.",
    )
    misses = (
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "[W503 01:52:07.597517393 socket.cpp:204] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    )

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails where the endpoint that was named leads to no address of the leader, and nobody came by it."""
        asked = [card for card in cards if card.endpoint]
        if not asked or len(cards) < 2 or cards[0].facts is None:
            return []
        leader, card = cards[0], asked[0]
        endpoint = card.endpoint or ""
        resolved = card.facts.resolved.get(endpoint, ()) if card.facts else ()
        literal = parse_address(endpoint)
        led_to = {literal} if literal else {parse_address(text) for text in resolved} - {None}
        own = {parse_address(text) for nic in cards[0].facts.interfaces for text in nic.addresses}
        came_by = {each.came_by.rpartition(":")[0].strip("[]") for each in cards if each.came_by}
        has_led = endpoint.strip("[]") in came_by or led_to & {parse_address(text) for text in came_by}
        if not led_to or not own or led_to & own or has_led or any(each and each.is_loopback for each in led_to):
            return []
        there = "" if literal else f", which is {', '.join(sorted(map(str, led_to)))} there,"
        what = f"the nodes were told to meet at {endpoint}; {leader.host}, which leads, has no such address"
        evidence = (
            f"{endpoint}{there} was named on {card.host} by --rdzv-endpoint or --master-addr",
            f"{leader.host} has {', '.join(str(nic) for nic in cards[0].facts.interfaces if nic.addresses)}",
        )
        return [((leader.host,), failed(*evidence, what=what))]


class MasterDns(Cause, id="AR202"):
    """A host name does not resolve on a node.

    ## What it means
    This node asks for the address of another one, most often of the first node, and gets none. Other nodes get one.

    ## Why it breaks the job
    A rank there never finds the store. PyTorch asks again and again until its timeout; the other ranks wait for it as
    long and then report a rank that is missing, not a name.

    ## Example
    From PyTorch 2.13, seen 2026-11-21 with a name that does not exist:

        [W1121 09:34:34.642965573 socket.cpp:764] [c10d] The IPv6 network addresses of (no-such-host.invalid, 29555) cannot be retrieved (gai error: -2 - Name or service not known).

    Older versions print this line for every name without an IPv6 address, too: alone it proves nothing there.

    ## Fix
    Ask as the node does, then look at why it answers so:

        getent hosts NAME; cat /etc/resolv.conf /etc/nsswitch.conf; grep NAME /etc/hosts

    Quick way round: give an address in place of the name. Lasting: the same /etc/hosts or DNS on all nodes.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/socket.cpp (2.13). https://github.com/pytorch/pytorch/issues/150532.
    """  # noqa: E501  (a real line)

    message = "{names} has no address there; {contrast}"
    fix = "on {node}: getent hosts {names}; add it to DNS or /etc/hosts there, or give an address in its place"
    exit_code = Exit.NODE_FAULT

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails where the endpoint that was named does not resolve on a node, warns for other nodes' names."""
        endpoints = {card.endpoint for card in cards if card.endpoint}
        known = [(card, facts) for card, facts in with_facts(cards) if "resolved" not in facts.unread]
        found: dict[tuple[Status, tuple[str, ...], int], list[str]] = {}
        for name in dict.fromkeys(name for _, facts in known for name in facts.resolved):
            # A node finds its own name in its own /etc/hosts: that says nothing of the others.
            asked = {c.host: f.resolved[name] for c, f in known if name in f.resolved and name != f.host_name}
            lost = tuple(host for host, addresses in asked.items() if not addresses)
            num_found = len(asked) - len(lost)
            is_endpoint = name in endpoints
            if not lost or parse_address(name) or (num_found * 2 <= len(asked) - 1 and not is_endpoint):
                continue
            found.setdefault((Status.FAIL if is_endpoint else Status.WARN, lost, num_found), []).append(name)
        return [(lost, cls._outcome(status, names, num_found)) for (status, lost, num_found), names in found.items()]

    @classmethod
    def _outcome(cls, status: Status, names: Sequence[str], num_found: int) -> Outcome:
        shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else "")
        contrast = {0: "nobody who asked finds one", 1: "another node finds one"}
        values = {"names": shown, "contrast": contrast.get(num_found, f"{num_found} other nodes find one")}
        return Outcome(status, values=values)


class FirewallPort(Cause, id="AR206"):
    """A firewall lets some ports through and others not.

    ## What it means
    Two nodes reach each other, but not at every port: the leader's port, or ports of the ephemeral range, do not
    answer. Something drops or rejects them: a firewall on a node, a security group, a switch.

    ## Why it breaks the job
    NCCL and Gloo listen at ports that the kernel picks from `net.ipv4.ip_local_port_range`, another one for each
    connection. With the master port alone opened the ranks find the store, and then hang when they connect to each
    other. A port that rejects shows as "No route to host", one that drops shows as nothing at all.

    ## Example
    From sgl-project/sglang#3820, two nodes with a firewall that rejects:

        misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115(Operation now in progress)

    ## Fix
    See what filters, on both nodes:

        nft list ruleset; iptables -S; firewall-cmd --list-all; ufw status

    Let the nodes of the data network reach each other at all ports (the simplest rule is one for the subnet):

        firewall-cmd --permanent --zone=trusted --add-source=192.168.20.0/24 && firewall-cmd --reload

    Or narrow what the kernel picks and open that: `sysctl -w net.ipv4.ip_local_port_range="50000 51000"`, and the
    port in `[network] port`.

    ## Source
    NCCL user guide, "Networking Troubleshooting", IP ports:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/networking_troubleshooting.html (read
    2026-11-21). https://github.com/sgl-project/sglang/issues/3820, https://github.com/NVIDIA/nccl/issues/1956.
    """  # noqa: E501  (a real line)

    message = "{what}"
    fix = "open {ports} on {where} to the nodes of the data network: nft list ruleset shows what filters there"
    exit_code = Exit.SETUP
    symptoms = (Symptom.FILTERED, Symptom.STORE_FILTERED)
    also = ("AR203", "AR210", "AR211")
    signs = (
        Sign(r"NCCL WARN socketPollConnect: Connect to .{3,80} returned 113\(No route to host\)"),
        Sign(r"socketPollConnect: connect returned No route to host, retrying"),
    )
    hits = (
        "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No "
        "route to host) errno 115(Operation now in progress)",
        "zgiot:1183664:1184669 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying (34/34) "
        "after sleep for 3400 msec",
    )
    misses = (
        "ubuntu:39964:40075 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : "
        "Software caused connection abort",
    )


class PortInUse(Cause, id="AR207"):
    """Another process holds the leader's port.

    ## What it means
    The preferred port (29500, or what flag or cluster.toml say) is taken on the first node: by another job, by a worker
    that an earlier job left behind, by a service.

    ## Why it breaks the job
    It does not break this one: the leader took another port and announced it. Where a firewall opens the preferred
    port only, the nodes do not reach the other one. With plain PyTorch the first rank ends with an error, and if what
    holds the port stays silent the other ranks hang beyond their timeout.

    ## Example
    From modelscope/ms-swift#3988; PyTorch 2.13 writes the same:

        RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use

    ## Fix
    See who it is, and end it where it is a left-over of yours:

        ss -ltnp 'sport = :29500'

    Or prefer another port: `[network] port` in cluster.toml, `--master-port`. Choose one outside of
    `net.ipv4.ip_local_port_range`: the kernel gives those to anybody.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/socket.cpp (2.13, seen 2026-11-21).
    https://github.com/modelscope/ms-swift/issues/3988 (read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "port {port} is held by {holder}; the leader took another one"
    fix = "on {node}: ss -ltnp 'sport = :{port}'; end what was left behind, or set another [network] port"
    exit_code = Exit.SETUP
    also = ("AR502",)
    signs = (
        Sign(r"The server socket has failed to listen on any local network address\..{1,200}[Aa]ddress already in use"),
    )
    hits = (
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, "
        "code: -98, name: EADDRINUSE, message: address already in use",
        "RuntimeError: The server socket has failed to listen on any local network address. The server socket has "
        "failed to bind to [::]:29500 (errno: 98 - Address already in use). The server socket has failed to bind to "
        "0.0.0.0:29500 (errno: 98 - Address already in use).",
    )
    misses = ("OSError: [Errno 98] Address already in use",)

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Warns where the leader found its port taken."""
        if card.came_by is not None:
            return None
        if card.port_holder is None or card.test_ports is None:  # on one machine any port does
            return PASSED
        return warned(port=card.wanted_port or "of the leader", holder=card.port_holder)

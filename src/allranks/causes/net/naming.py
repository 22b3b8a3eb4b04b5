"""Are names and addresses of the nodes fit to be announced to others?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, unknown, warned
from allranks.causes.net.cards import data_interface, data_network, parse_address, subnet_of, with_facts
from allranks.causes.net.lines import ANY_PORT, NCCL_PEER
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card, Interface
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status
from allranks.model.hostlist import fold_hosts


class LoopbackHostname(Cause, id="AR209"):
    """A node's own name resolves to its loopback address.

    ## What it means
    /etc/hosts on this node maps the node's name to 127.0.0.1 or 127.0.1.1. The installers of Debian and Ubuntu write
    such a line. On the other nodes the name resolves to a real address.

    ## Why it breaks the job
    Without GLOO_SOCKET_IFNAME, Gloo announces the address of the host name. The other nodes then connect to themselves
    and get "connection refused". allranks sets GLOO_SOCKET_IFNAME for its workers, so its jobs run. Scripts that look
    up their own name, and jobs that something else starts, fail on this node.

    ## Example
    From ray-project/ray#37461: Gloo could not connect two machines until this line of Ubuntu's /etc/hosts was changed:

        127.0.1.1 node03

    ## Fix
    Map the name to the node's data address in /etc/hosts. If DNS knows the name, delete the line instead:

        getent hosts $(hostname); sed -i 's/^127.0.1.1 /192.168.20.13 /' /etc/hosts

    ## Source
    PyTorch, torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice (2.13).
    https://github.com/ray-project/ray/issues/37461, https://github.com/PaddlePaddle/Paddle/issues/37951 (read
    2026-11-21).
    """

    message = "the node's own name {name} resolves to {address}, a loopback address; other nodes have a real address"
    fix = "in /etc/hosts on {node}: map {name} to the node's address on the data network instead of {address}"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.BEFORE_THE_FIRST_STEP})
    also = ("AR201", "AR203", "AR206", "AR215")
    told = "a rank announced its loopback address; other nodes that connect to it reach only themselves"
    signs = (
        Sign(
            r"connect \[(?P<address>127\.0\.(?:1\.1|0\.[2-9]))\]:" + ANY_PORT + r": (?P<error>[A-Z][a-z ]{4,50})",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"SO_ERROR: (?P<error>[A-Z][a-z ]{4,50}), remote=\[(?P<address>127\.0\.(?:1\.1|0\.[2-9]))\]",
            confidence=Confidence.LIKELY,
        ),
        # On one machine a rank that died leaves the same line.
        Sign(
            r"connect \[(?P<address>127\.0\.0\.1|::1)\]:" + ANY_PORT + r": (?P<error>[A-Z][a-z ]{4,50})",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            r"(?:SO_ERROR: (?P<error>[A-Z][a-z ]{4,50}), )?remote=\[(?P<address>127\.0\.0\.1|::1)\]:[0-9A-Za-z*<]",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            r"[Cc]onnect to (?P<address>127\.0\.[01]\.1)<[0-9A-Za-z_*]{1,12}> (?:failed : |returned )(?:[0-9]+\()?"
            r"(?P<error>[A-Z][a-z ]{4,50})",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            r"client socket has (?:timed out after [0-9]+m?s while trying to connect to \(?|failed to connect to "
            r"(?:any network address of )?[\[(]?(?:::ffff:)?)(?P<address>127\.0\.1\.1)(?:, |\]?:)[0-9]",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"IP address (?P<address>127\.0\.[01]\.[0-9]{1,3}) not found in cluster IPs", confidence=Confidence.LIKELY
        ),
        Sign(r"Unable to resolve hostname to a \(local\) address\. Using the loopback address", Role.CONTEXT),
        # With that line above it; Gloo of torch 2.2 to 2.6 does not say which address it was.
        Sign(
            r"Gloo connectFullMesh failed with \[.{3,200}\] no error", Role.LIKELY, Blames.NOBODY, Confidence.UNDECIDED
        ),
        Sign(r"master_addr=(?P<address>127\.0\.1\.1)", Role.CONTEXT),
        # TensorPipe (tensorpipe_agent.cpp), which goes on.
        Sign(
            r"Failed to look up the IP address for the hostname \(.{1,200}\), defaulting to "
            r"(?P<address>[0-9a-f.:]{3,45})",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
    )
    hits = (
        "RuntimeError: "
        "[/opt/conda/conda-bld/pytorch_1607370120218/work/third_party/gloo/gloo/transport/tcp/pair.cc:769] "
        "connect [127.0.1.1]:3496: Connection refused",
        "RuntimeError: Gloo connectFullMesh failed with "
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] timed "
        "out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:34567",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.0.1]:8463: Connection "
        "refused",
        "RuntimeError: timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:8463",
        "n1:71:80 [0] include/socket.h:403 NCCL WARN Connect to 127.0.0.1<40123> failed : Connection refused",
        "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to (127.0.1.1, "
        "29500).",
        "RuntimeError: IP address 127.0.1.1 not found in cluster IPs: ['10.0.0.3']",
        "[W ProcessGroupGloo.cpp:558] Warning: Unable to resolve hostname to a (local) address. Using the loopback "
        "address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME. (function "
        "operator())",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        "[2023-05-01 10:00:00,123] [INFO] [comm.py:656:mpi_discovery] Discovered MPI settings of world_rank=0, "
        "local_rank=0, world_size=4, master_addr=127.0.1.1, master_port=29500",
        "[W tensorpipe_agent.cpp:63] Failed to look up the IP address for the hostname (EAI_NONAME: unknown node or "
        "service), defaulting to 127.0.0.1",
    )
    misses = (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:575] Connection closed by peer "
        "[127.0.1.1]:39827",
        "ValueError: 'localhost.localdomain' does not appear to be an IPv4 or IPv6 address",
    )

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Warns if a node's own name resolves to its loopback address, unless this is so on all nodes."""
        known = [(card, facts.host_name, facts.resolved.get(facts.host_name, ())) for card, facts in with_facts(cards)]
        odd = [(card, name, addresses) for card, name, addresses in known if _are_loopback(addresses)]
        is_one_machine = len(cards) == 1 and cards[0].test_ports is None
        if is_one_machine or (len(odd) == len(known) and len(cards) > 1):
            return []
        return [((card.host,), warned(name=name, address=", ".join(addresses))) for card, name, addresses in odd]


class IpFamilyMismatch(Cause, id="AR214"):
    """Some nodes use IPv4 on the data network, others IPv6.

    ## What it means
    The data address of this node is of another family (IPv4 or IPv6) than those of most nodes. Either cluster.toml
    names it, or the node has only one family on that network.

    ## Why it breaks the job
    A rank that has only IPv4 cannot connect to a rank that announces an IPv6 address, and vice versa. NCCL takes the
    first address of the interface, whatever its family. The connection fails with "address family not supported", or is
    never made.

    ## Example
    From NVIDIA/nccl#210, where one node had IPv6 and the others IPv4:

        include/socket.h:344 WARN Socket creation failed : Address family not supported by protocol

    ## Fix
    Use one family on all nodes. Give the node an address of that family, name it in cluster.toml, and tell NCCL:

        ip -br addr
        export NCCL_SOCKET_FAMILY=AF_INET                 # or AF_INET6

    ## Source
    NCCL user guide, NCCL_SOCKET_FAMILY: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30, read
    2026-11-21). https://github.com/NVIDIA/nccl/issues/210, https://github.com/pytorch/gloo/issues/399 (read
    2026-11-21).
    """

    message = "{what}"
    fix = "use IPv4 or IPv6 for all data addresses: ip -br addr shows them; [network] data in cluster.toml selects one"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.BEFORE_THE_FIRST_STEP})
    no_fault_yet = "a lab is either IPv4 or IPv6"
    also = ("AR202", "AR203", "AR206", "AR208")
    told = "one end uses IPv4, the other IPv6"
    signs = (
        Sign(r"Socket creation failed : Address family not supported by protocol", confidence=Confidence.LIKELY),
        Sign(r"Call to socket failed ?: Address family not supported by protocol", confidence=Confidence.LIKELY),
        Sign(
            r"[Cc]onnect to " + NCCL_PEER + r" failed : Address family not supported by protocol",
            confidence=Confidence.LIKELY,
        ),
        Sign(r"ss1\.ss_family == ss2\.ss_family\. [0-9]+ vs [0-9]+"),
        Sign(r"transport/tcp/[a-z_]{3,20}\.cc:[0-9]+\] address family mismatch"),
        Sign(r"useIpv6: [a-z0-9]{1,5}, code: -97, name: EAFNOSUPPORT"),
        # What a machine without IPv6 says of an IPv4 address, and goes on.
        Sign(r"cannot be retrieved \(gai error: -9 - Address family for hostname not supported\)", Role.CONTEXT),
    )
    hits = (
        "include/socket.h:344 WARN Socket creation failed : Address family not supported by protocol",
        "n1:71:80 [0] misc/socket.cc:797 NCCL WARN Call to socket failed: Address family not supported by protocol",
        "n1:71:80 [0] misc/socket.cc:456 NCCL WARN Net : Connect to 2001:db8::7<40537> failed : Address family not "
        "supported by protocol",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:210] address family mismatch",
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:276] ss1.ss_family == "
        "ss2.ss_family. 2 vs 10",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: "
        "29500, useIpv6: 1, code: -97, name: EAFNOSUPPORT, message: address family not supported",
        "[W socket.cpp:697] [c10d] The IPv6 network addresses of (10.0.0.1, 29500) cannot be retrieved (gai "
        "error: -9 - "
        "Address family for hostname not supported).",
    )
    misses = (
        "[W socket.cpp:426] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family "
        "not supported by protocol).",
        "[W1226 15:35:11.626067741 socket.cpp:752] [c10d] The client socket cannot be initialized to connect to "
        "[node05.example.org]:8000 (errno: 97 - Address family not supported by protocol).",
    )

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
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


class DuplicateSubnet(Cause, id="AR216"):
    """Two interfaces of one node are in the data subnet.

    ## What it means
    Two interfaces of the node are up and have an address in the subnet that carries gradients.

    ## Why it breaks the job
    The kernel sends all traffic for the subnet through one of the two interfaces: the one whose route comes first. It
    answers ARP requests for both addresses on either interface. Traffic that a rank sends to the fast interface's
    address may therefore use the slow one. Replies arrive on the other interface, where a reverse path filter may drop
    them. Which interface wins can change from node to node and from boot to boot.

    ## Example
    Output of `ip route`; the first line wins:

        192.168.20.0/24 dev eno2 proto kernel scope link src 192.168.20.113
        192.168.20.0/24 dev ens1f1 proto kernel scope link src 192.168.20.13

    ## Fix
    Move one of them to another subnet, bond the two, or remove an address with `ip addr del`. If you want several rails
    in one subnet, have each interface answer for its own addresses only (then this check passes, and Gloo uses them in
    turn), and give each its own routing table:

        sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
        ip rule add from 192.168.20.13 table 101; ip route add 192.168.20.0/24 dev ens1f1 table 101

    ## Source
    Linux, Documentation/networking/ip-sysctl.rst, arp_filter, arp_ignore, rp_filter (6.18).
    https://github.com/NVIDIA/nccl/issues/1580.
    """

    message = "{names} are both in {network}: traffic meant for one may leave through the other"
    fix = (
        "on {node}: keep only one of {names} in {network}, or bond them; for Gloo to use both: "
        "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2"
    )
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "the lab gives each node one interface in the data subnet"

    @classmethod
    def probe(cls, card: Card) -> Outcome:
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

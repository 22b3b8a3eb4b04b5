"""Do the names of nodes lead anywhere?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from allranks.causes.cause import Cause, Outcome
from allranks.causes.net.cards import parse_address, with_facts
from allranks.causes.net.lines import NAME, PORT
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status

MAX_NAMES = 4
"""Names that are shown of those that do not resolve."""


class MasterDns(Cause, id="AR202"):
    """A host name does not resolve on a node.

    ## What it means
    This node looked up the name of another node, most often the first one, and got no address. Other nodes got one.

    ## Why it breaks the job
    A rank on this node cannot find the store. PyTorch repeats the lookup until its timeout. The other ranks wait as
    long, and then report a missing rank, not a name.

    ## Example
    From PyTorch 2.13, seen 2026-11-21 with a name that does not exist:

        [W1121 09:34:34.642965573 socket.cpp:764] [c10d] The IPv6 network addresses of (no-such-host.invalid, 29555) cannot be retrieved (gai error: -2 - Name or service not known).

    Older versions print this line for every name without an IPv6 address, so the line alone proves little there. A host
    name that consists of digits is taken for an address: 05 is 0.0.0.5, from ofsoundof/GRL-Image-Restoration#27:

        [W socket.cpp:558] [c10d] The client socket has failed to connect to [::ffff:0.0.0.5]:40323 (errno: 110 - Connection timed out).

    ## Fix
    Look the name up on the node, then see which configuration gives that answer:

        getent hosts NAME; cat /etc/resolv.conf /etc/nsswitch.conf; grep NAME /etc/hosts

    As a workaround, give an address instead of the name. For a permanent fix, use the same /etc/hosts or DNS on all
    nodes.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/socket.cpp (2.13). https://github.com/pytorch/pytorch/issues/150532, /64990.
    https://github.com/hpcaitech/Open-Sora/issues/667, https://github.com/ofsoundof/GRL-Image-Restoration/issues/27.
    NCCL, src/misc/socket.cc, ncclSocketGetAddrFromString. Gloo, gloo/transport/tcp/device.cc. SLURM:
    https://github.com/stackhpc/ansible-role-openhpc/issues/157 (all read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{names} does not resolve on this node; {contrast}"
    fix = "on {node}: getent hosts {names}; add the name to DNS or to /etc/hosts there, or give an address instead"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.AT_THE_MEETING, Trait.BEFORE_THE_FIRST_STEP})
    also = ("AR201", "AR214")
    told = "a host name does not resolve, or resolves to an address of another machine"
    signs = (
        Sign(
            r"The (?:IPv4 )?network addresses of \((?P<node>[^,)]{1,120}), " + PORT + r"\) cannot be retrieved "
            r"\(gai error: (?:-(?:2|3|4|5|11)|8|1100[1-4]) - (?P<error>[^)]{4,60})\)",
            confidence=Confidence.LIKELY,
        ),
        # Also where a name has an IPv4 address only, in torch before 2.4; a later one gives the job up over it.
        Sign(
            r"The IPv6 network addresses of \((?P<node>[^,)]{1,120}), " + PORT + r"\) cannot be retrieved "
            r"\(gai error: (?:-(?:2|3|4|5|11)|8|1100[1-4]) - (?P<error>[^)]{4,60})\)",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # A host that is called by a number, and a proxy's name server that answers everything with 198.18.x.x.
        Sign(
            r"client socket has failed to connect to \[?(?:::ffff:)?(?P<address>0\.(?:0\.0\.[1-9][0-9]{0,2}"
            r"|0\.[1-9][0-9]{0,2}\.[0-9]{1,3}|[1-9][0-9]{0,2}\.[0-9]{1,3}\.[0-9]{1,3})"
            r"|198\.1[89]\.[0-9]{1,3}\.[0-9]{1,3})"
            r"\]?:[0-9]+ \(errno: ",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"client socket has (?:failed to connect to any network address of|timed out after [0-9]+m?s while "
            r"trying to "
            r"connect to) \((?P<node>[0-9]{1,12}), (?P<port>[0-9]+)\)",
            confidence=Confidence.LIKELY,
        ),
        Sign(r"host not found: (?P<error>(?:Name or service|Temporary failure|No address|Non-recov)[A-Za-z -]{4,60})"),
        Sign(r"ValueError: host not found: (?P<error>[A-Z][a-z][A-Za-z ]{4,60})"),
        Sign(r"socket\.gaierror: \[Errno -(?:2|3|4|5)\] ", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"error encountered when getting address info : (?P<error>[A-Z][a-z][A-Za-z ]{4,60})"),
        Sign(r"tcp/device\.cc:[0-9]+\] rv == 0\. -(?:2|3|4|5) vs 0", confidence=Confidence.LIKELY),
        Sign(r"ssh: Could not resolve hostname (?P<node>[^ ]{1,120}): ", Role.LIKELY, Blames.NAMED, Confidence.LIKELY),
        # What a start script asks first: nslookup of BusyBox and of BIND, ping, curl.
        Sign(r"nslookup: can't resolve '(?P<node>[A-Za-z0-9_][^']{0,120})'", Role.LIKELY, Blames.NAMED),
        Sign(r"\*\* server can't find (?P<node>[^ :]{1,120}): (?:NXDOMAIN|SERVFAIL)", Role.LIKELY, Blames.NAMED),
        Sign(r"ping: bad address '(?P<node>[^']{1,120})'", Role.LIKELY, Blames.NAMED),
        Sign(
            r"ping: (?P<node>[^ :]{1,120}): (?:Name or service not known|Temporary failure in name resolution)",
            Role.LIKELY,
            Blames.NAMED,
        ),
        Sign(r"LoadServer +(?P<node>" + NAME + r") Failed at [0-9]+ times .{0,40}DNS resolution failed"),
        Sign(r"unable to get host address for (?P<node>[A-Za-z0-9_.-]{1,120})", Role.PRIMARY, Blames.NAMED),
        Sign(r'error: (?:slurm_set_addr: )?Unable to resolve "(?P<node>[^"]{1,120})"'),
        Sign(
            r"getaddrinfo\((?P<node>[A-Za-z0-9_.-]{0,120})(?::[0-9]+)?\) failed: (?P<error>Name or|Temporary "
            r"failure in)"
        ),
    )
    hits = (
        "[W1121 09:34:34.642965573 socket.cpp:764] [c10d] The IPv6 network addresses of (no-such-host.invalid, 29555) "
        "cannot be retrieved (gai error: -2 - Name or service not known).",
        "[W socket.cpp:601] [c10d] The IPv4 network addresses of (node07, 29500) cannot be retrieved (gai error: -3 - "
        "Temporary failure in name resolution).",
        "[W socket.cpp:663] [c10d] The IPv6 network addresses of (job-master-0, 23456) cannot be retrieved (gai error: "
        "11001 - No such host is known).",
        "trainer/0 [1]:[W socket.cpp:558] [c10d] The client socket has failed to connect to [::ffff:0.0.0.5]:40323 "
        "(errno: 110 - Connection timed out).",
        "[W socket.cpp:697] [c10d] The client socket has failed to connect to 0.104.99.143:47389 (errno: 110 - "
        "Connection timed out).",
        "[E socket.cpp:753] [c10d] The client socket has failed to connect to any network address of (6841231, 47389).",
        "ValueError: host not found: Temporary failure in name resolution",
        "socket.gaierror: [Errno -2] Name or service not known",
        "node1:71:71 [0] misc/socket.cc:328 NCCL WARN Net : error encountered when getting address info : Name or "
        "service not known",
        "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:83] rv == 0. -2 vs 0. ",
        "ssh: Could not resolve hostname worker-2: Name or service not known",
        "nslookup: can't resolve 'job-master-0': Name does not resolve",
        "** server can't find job-master-0.ns.svc: NXDOMAIN",
        "ping: bad address 'job-master-0'",
        "ping: node07: Temporary failure in name resolution",
        "ctrl_client.cpp:234] LoadServer  gpu9 Failed at 0 times error_code 14 error_message DNS resolution failed",
        "ssh: Could not resolve hostname localhost:4: Name or service not known",
        "[mpiexec@n1] HYDU_sock_get_iface_ip (lib/utils/sock.c:446): unable to get host address for n9 (1)",
        'srun: error: slurm_set_addr: Unable to resolve "gpu007"',
        'sinfo: error: Unable to resolve "login": Host name lookup failure',
        "srun: error: xgetaddrinfo: getaddrinfo(gpu007:6818) failed: Name or service not known",
        "slurmd: error: get_addr_info: getaddrinfo() failed: Name or service not known",
    )
    misses = (
        "[W503 01:52:07.597517393 socket.cpp:204] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
        "[W socket.cpp:697] [c10d] The IPv6 network addresses of (10.0.0.1, 29500) cannot be retrieved (gai "
        "error: -9 - "
        "Address family for hostname not supported).",
        "[W socket.cpp:558] [c10d] The client socket has failed to connect to [::ffff:10.0.0.5]:40323 (errno: 110 - "
        "Connection timed out).",
        "(Caused by NameResolutionError(\"Failed to resolve 'huggingface.co' ([Errno -3] Temporary failure in name "
        'resolution)"))',
    )

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
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
        return [(lost, cls._outcome(status, names, num_found)) for (status, lost, num_found), names in found.items()]

    @classmethod
    def _outcome(cls, status: Status, names: Sequence[str], num_found: int) -> Outcome:
        shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else "")
        contrast = {0: "no node that looked it up got an address", 1: "another node resolves it"}
        values = {"names": shown, "contrast": contrast.get(num_found, f"{num_found} other nodes resolve it")}
        return Outcome(status, values=values)

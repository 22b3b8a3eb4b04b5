"""Can the nodes find each other: the leader's address, and names?"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.causes.cause import Cause, Outcome, failed
from allranks.causes.net.cards import parse_address, with_facts
from allranks.causes.net.lines import ENDPOINT, IPV4, NAME, PORT, TRIED
from allranks.causes.sign import Blames, Role, Sign
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status

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
    https://github.com/pytorch/pytorch/issues/107021 and /issues/79388; "connect() timed out." of torch before 1.12:
    https://github.com/pytorch/ignite/issues/2210; Horovod: https://github.com/horovod/horovod/issues/2547 and
    /issues/2432; ssh(1) of the launchers (all read 2026-11-21).
    """

    message = "{what}"
    fix = "leave the address away under SLURM, else name one of {node} that all nodes reach: ip -br addr"
    exit_code = Exit.SETUP
    also = ("AR206", "AR203", "AR209", "AR202", "AR401", "AR402", "AR210", "AR414")
    told = (
        "nothing answers where the ranks were told to meet: a wrong address, a filtered port, or a host that is not "
        "up; these logs cannot tell which"
    )
    signs = (
        Sign(
            r"client socket has timed out after [0-9]+m?s while trying to connect to " + ENDPOINT,
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"client socket has failed to connect to any network address of " + ENDPOINT,
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        # 99 (its own ::1) and 97 (no IPv6) are left out: healthy machines without IPv6 write them.
        Sign(
            r"client socket has failed to connect to "
            + TRIED
            + r" \(errno: 1(?:10|11|13) - (?P<error>[A-Za-z ]{5,40})\)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"server socket on " + TRIED + r" has timed out, will retry", Role.CONTEXT, Blames.NAMED),
        Sign(
            r"TCP client failed to connect/validate to host " + ENDPOINT + r" - timed out \(",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"TCP client failed to connect/validate to host " + ENDPOINT + r" - retrying \(", Role.CONTEXT, Blames.NAMED
        ),
        # Dask, of its scheduler above all.
        Sign(r"Timed out trying to connect to '?tcp://" + ENDPOINT, Role.LIKELY, Blames.NAMED, Confidence.UNDECIDED),
        # Said of a store that was never reached and of one that was lost.
        Sign(
            r"RendezvousConnectionError: The connection to the C10d store has failed",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
        # gRPC, as of JAX's coordinator; PaddlePaddle's store.
        Sign(
            r"ailed to connect to all addresses.{0,60} ipv[46]:" + TRIED + ": Failed to connect to remote host",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"Retry to connect to " + TRIED + " while the server is not yet listening",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"LoadServer +(?:(?P<address>"
            + IPV4
            + ")|(?P<node>"
            + NAME
            + r")) Failed at [0-9]+ times .{0,40}failed to "
            r"connect to all addresses",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.UNDECIDED,
        ),
        # torch before 1.12: c10d's Utils.hpp throws the bare errno.
        Sign(
            r"connect\(\) timed out\.(?: Original timeout was [0-9]+ ms)?",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"RuntimeError: (?P<error>Connection refused|Connection timed out|No route to host)",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"ssh: connect to host (?P<node>[^ ]{1,120}) port (?P<port>[0-9]+): (?P<error>[A-Z][a-z]{2,12} "
            r"[a-z ]{3,30})",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"orovod(?:run)? was unable to connect to (?:the )?(?P<service>[a-z ]{3,30}(?:#[0-9]+ )?)on any of the "
            r"following addresses(?:: \{(?:'lo': \[[^\]]{0,80}\], )?'(?P<interface>[^']{1,30})': "
            r"\[\('(?P<address>[0-9a-fA-F.:]{3,45})', (?P<port>[0-9]+)\))?",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"ssh not successful for host (?P<node>[A-Za-z0-9_.-]{1,120})", Role.LIKELY, Blames.NAMED, Confidence.LIKELY
        ),
        Sign(
            r'unable to connect from "[^"]{1,120}" to "(?P<node>[^"]{1,120})"',
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"ORTE was unable to reliably start one or more daemons", Role.LIKELY, Blames.NOBODY, Confidence.UNDECIDED
        ),
        Sign(
            r"ORTE daemon has unexpectedly failed after launch and before",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"ORTE does not know how to route a message to the specified daemon",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(r"target node: +(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,120})$", Role.CONTEXT, Blames.NAMED),
        Sign(r"Host key verification failed\.", Role.LIKELY, Blames.NOBODY, Confidence.UNDECIDED),
        Sign(
            r"CalledProcessError: Command '(?:\[')?ssh (?:-[a-zA-Z] [^ ]{1,60} ){0,4}"
            r"(?P<node>[A-Za-z0-9<][^ ']{0,120}) hostname",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"Using hostfile at [^ ]{1,200} but host=(?P<node>[^ ]{1,120}) was not reachable via ssh",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"EtcdConnectionFailed: Connection to etcd failed", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
    )
    hits = (
        "OSError: Timed out trying to connect to 'tcp://10.0.0.1:8786' after 10 s: connect() didn't finish in time",
        "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no 192.168.3.100 hostname' returned "
        "non-zero exit status 255.",
        "ORTE does not know how to route a message to the specified daemon",
        "  target node:  mxnet-worker-1",
        "Host key verification failed.",
        "RuntimeError: Using hostfile at /etc/hostfile but host=node-1.train was not reachable via ssh. If you are "
        "running with",
        "[E socket.cpp:793] [c10d] The client socket has timed out after 60s while trying to connect to (IP1, 2222).",
        "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 192.0.0.1:1234",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
        "(172.17.0.9, 46229).",
        "[W427 01:04:16.149509694 socket.cpp:752] [c10d] The client socket has failed to connect to "
        "[::ffff:203.0.113.7]:3254 (errno: 110 - Connection timed out).",
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node01]:29500 (errno: 113 - No route to "
        "host).",
        "[E socket.cpp:610] [c10d] The client socket has failed to connect to any network address of (gpu01, 40323).",
        "[W1121 09:34:36.623191250 socket.cpp:770] [c10d] The server socket on [node01]:29500 has timed out, "
        "will retry.",
        "[W1121 09:34:36.623191250 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host "
        "no-such-host.invalid:29555 - retrying (try=0, timeout=3000ms, delay=3569ms): The client socket has timed out "
        "after 3000ms while trying to connect to (no-such-host.invalid, 29555).",
        "[E1121 09:34:46.623191250 TCPStore.cpp:331] [c10d] TCP client failed to connect/validate to host "
        "10.0.0.1:29555 - timed out (try=1, timeout=3000ms): The client socket has timed out after 3000ms while trying "
        "to connect to (10.0.0.1, 29555).",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed. See inner exception for details.",
        "RuntimeError: connect() timed out. Original timeout was 1800000 ms.",
        "RuntimeErrorRuntimeError: : connect() timed out.connect() timed out.",
        "RuntimeError: No route to host",
        "ssh: connect to host worker-1 port 22: Connection refused",
        "[1,96]<stderr>:horovod.run.common.util.network.NoValidAddressesFound: Horovodrun was unable to connect to "
        "driver service on any of the following addresses: {'eth0': [('10.0.0.5', 33423)]}.",
        "horovod.runner.common.util.network.NoValidAddressesFound: Horovod was unable to connect to task service #1 on "
        "any of the following addresses: {'ens192': [('192.168.21.50', 8394)]}.",
        "ssh not successful for host worker2:",
        "jaxlib.xla_extension.XlaRuntimeError: UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: "
        "ipv4:10.0.0.7:13305: Failed to connect to remote host: Connection refused",
        "I1127 19:18:22.167176 3907468 tcp_utils.cc:107] Retry to connect to 10.0.0.1:51920 while the server is not "
        "yet listening.",
        '[proxy:0:1@node02] HYDU_sock_connect (lib/utils/sock.c:145): unable to connect from "node02" to "node01" '
        "(Connection refused)",
        "ORTE was unable to reliably start one or more daemons.",
        "An ORTE daemon has unexpectedly failed after launch and before",
        "I0103 21:17:57.216329 20165 ctrl_client.cpp:234] LoadServer 127.0.0.1 Failed at 1 times error_code 14 "
        "error_message failed to connect to all addresses",
        "etcd.EtcdConnectionFailed: Connection to etcd failed due to MaxRetryError",
    )
    misses = (
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "[W503 01:52:07.597517393 socket.cpp:204] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
        "[W socket.cpp:558] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - Cannot "
        "assign requested address).",
        "[W1226 15:35:11.626067741 socket.cpp:752] [c10d] The client socket cannot be initialized to connect to "
        "[node05.example.org]:8000 (errno: 97 - Address family not supported by protocol).",
        "[I socket.cpp:747] [c10d] No socket on (127.0.0.1, 29500) is listening yet, will retry.",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries "
        "exceeded "
        "with url: /bert-base-uncased (Caused by NewConnectionError('Failed to establish a new connection: [Errno 111] "
        "Connection refused'))",
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

    Older versions print this line for every name without an IPv6 address, too: alone it proves little there. A host
    that is called by a number is taken for an address: 05 is 0.0.0.5, from ofsoundof/GRL-Image-Restoration#27:

        [W socket.cpp:558] [c10d] The client socket has failed to connect to [::ffff:0.0.0.5]:40323 (errno: 110 - Connection timed out).

    ## Fix
    Ask as the node does, then look at why it answers so:

        getent hosts NAME; cat /etc/resolv.conf /etc/nsswitch.conf; grep NAME /etc/hosts

    Quick way round: give an address in place of the name. Lasting: the same /etc/hosts or DNS on all nodes.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/socket.cpp (2.13). https://github.com/pytorch/pytorch/issues/150532, /64990.
    https://github.com/hpcaitech/Open-Sora/issues/667, https://github.com/ofsoundof/GRL-Image-Restoration/issues/27.
    NCCL, src/misc/socket.cc, ncclSocketGetAddrFromString. Gloo, gloo/transport/tcp/device.cc. SLURM:
    https://github.com/stackhpc/ansible-role-openhpc/issues/157 (all read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{names} has no address there; {contrast}"
    fix = "on {node}: getent hosts {names}; add it to DNS or /etc/hosts there, or give an address in its place"
    exit_code = Exit.NODE_FAULT
    also = ("AR201", "AR214")
    told = "a host name does not resolve, or resolves to an address that is not the host's"
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

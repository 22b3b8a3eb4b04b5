"""Do the nodes reach the address at which they meet?"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.causes.cause import Cause, Outcome, failed
from allranks.causes.net.cards import parse_address
from allranks.causes.net.lines import ENDPOINT, IPV4, NAME, TRIED
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class MasterUnreachable(Cause, id="AR201"):
    """The configured leader address is not the leader's, or cannot be reached.

    ## What it means
    The nodes were told to meet at an address (`--rdzv-endpoint`, `--master-addr`) that no interface of the first node
    has. Or the leader listens, and another node can reach none of its addresses.

    ## Why it breaks the job
    All ranks meet at one store. Plain PyTorch tries the wrong address without a message until its timeout of 10 to 30
    minutes, tries once more, and then prints a C++ stack.

    ## Example
    From pytorch/pytorch#107021; torchrun prints the same:

        [E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 192.0.0.1:1234
        RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.

    ## Fix
    Under SLURM, omit the flag: the leader announces its own address. Without SLURM, give an address of the first node
    on a network that all nodes share:

        ip -br addr                                       # on the first node
        allranks run --nnodes 2 --rdzv-endpoint 192.168.20.15:29500 train.py

    Common mistakes are an address of an older job in .bashrc, the address of the login node, the output of `hostname
    -I` (several words), and a public address behind NAT.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/TCPStore.cpp and socket.cpp (2.13: seen there, 2026-11-21).
    https://github.com/pytorch/pytorch/issues/107021 and /issues/79388; "connect() timed out." of torch before 1.12:
    https://github.com/pytorch/ignite/issues/2210; Horovod: https://github.com/horovod/horovod/issues/2547 and
    /issues/2432; ssh(1) of the launchers (all read 2026-11-21).
    """

    message = "{what}"
    fix = "under SLURM omit the address; otherwise give one of {node} that all nodes reach (on {node}: ip -br addr)"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.AFTER_THE_END, Trait.AT_THE_MEETING, Trait.BEFORE_THE_FIRST_STEP})
    also = ("AR206", "AR203", "AR209", "AR202", "AR401", "AR402", "AR210", "AR414")
    told = (
        "the rendezvous address does not answer: wrong address, filtered port, or host down; these logs cannot tell "
        "which"
    )
    signs = (
        Sign(
            r"client socket has timed out after [0-9]+m?s while trying to connect to " + ENDPOINT,
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
            where=("log", "end"),
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
        came_by = {each.came_by.rpartition(":")[0].strip("[]") for each in cards if each.came_by}
        has_led = endpoint.strip("[]") in came_by or led_to & {parse_address(text) for text in came_by}
        if not led_to or not own or led_to & own or has_led or any(each and each.is_loopback for each in led_to):
            return []
        there = "" if literal else f" (there {', '.join(sorted(map(str, led_to)))})"
        what = f"the nodes were told to meet at {endpoint}, but the leader {leader.host} has no such address"
        evidence = (
            f"{card.host} got {endpoint}{there} from --rdzv-endpoint or --master-addr",
            f"{leader.host} has {', '.join(str(nic) for nic in cards[0].facts.interfaces if nic.addresses)}",
        )
        return [((leader.host,), failed(*evidence, what=what))]

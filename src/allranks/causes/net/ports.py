"""Is a port of a node that is reached in the way: filtered, or taken?"""

from __future__ import annotations

from allranks.causes.cause import PASSED, Cause, Outcome, Symptom, warned
from allranks.causes.net.lines import FAR_PEER, GLOO_PEER, IPV4, MASKED, NCCL_PEER, PORT
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class FirewallPort(Cause, id="AR206"):
    """A firewall blocks some ports between two nodes.

    ## What it means
    Two nodes reach each other, but not on every port: the leader's port, or ports of the ephemeral range, do not
    answer. A firewall on a node, a security group or a switch drops or rejects the packets.

    ## Why it breaks the job
    NCCL and Gloo listen on ports that the kernel picks from `net.ipv4.ip_local_port_range`, a new one for each
    connection. If only the master port is open, the ranks find the store, and then hang when they connect to each
    other. A rejected connection shows as "No route to host"; a dropped one shows no message at all.

    ## Example
    From sgl-project/sglang#3820: two nodes with a firewall that rejects:

        misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115(Operation now in progress)

    ## Fix
    List the firewall rules on both nodes:

        nft list ruleset; iptables -S; firewall-cmd --list-all; ufw status

    Allow all ports between the nodes of the data network (one rule for the subnet is simplest):

        firewall-cmd --permanent --zone=trusted --add-source=192.168.20.0/24 && firewall-cmd --reload

    Or narrow the range from which the kernel picks, and open that range and the port in `[network] port`: `sysctl -w
    net.ipv4.ip_local_port_range="50000 51000"`.

    ## Source
    NCCL user guide, "Networking Troubleshooting", IP ports:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/networking_troubleshooting.html (read
    2026-11-21). https://github.com/sgl-project/sglang/issues/3820, https://github.com/NVIDIA/nccl/issues/1956.
    NCCL, src/include/socket.h (2.7), src/misc/socket.cc (several versions), src/os/linux.cc (2.29): what connect says.
    Gloo, gloo/transport/tcp/helpers.cc. https://github.com/NVIDIA/nccl-tests/issues/166 (all read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{what}"
    fix = "open {ports} on {where} to the nodes of the data network; nft list ruleset shows the rules in force"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.BEFORE_THE_FIRST_STEP})
    symptoms = (Symptom.FILTERED, Symptom.STORE_FILTERED)
    also = ("AR201", "AR203", "AR210", "AR211", "AR215")
    told = "the host answers, but one of its ports does not"
    signs = (
        Sign(
            r"[Cc]onnect to " + FAR_PEER + rf"<{PORT}> (?:failed : |returned (?:113\()?)No route to host",
            Role.PRIMARY,
            Blames.PEER,
            Confidence.LIKELY,
        ),
        Sign(
            r"ocket(?:Start|Poll)Connect: connect returned No route to host, retrying",
            Role.PRIMARY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"connect \[" + FAR_PEER + rf"\]:{PORT}: No route to host",
            Role.PRIMARY,
            Blames.PEER,
            Confidence.LIKELY,
        ),
        Sign(
            r"SO_ERROR: No route to host, remote=\[" + FAR_PEER + rf"\]:{PORT}",
            Role.PRIMARY,
            Blames.PEER,
            Confidence.LIKELY,
        ),
        Sign(
            r"[Cc]onnect to " + NCCL_PEER + r" (?:failed : |returned (?:110\()?)Connection timed out",
            Role.LIKELY,
            Blames.PEER,
            Confidence.LIKELY,
        ),
        # NCCL 2.4 to 2.17: to whom, it does not say.
        Sign(
            r"Call to connect (?:returned Connection timed out, retrying|failed ?: Connection timed out)",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            r"Call to connect (?:returned No route to host, retrying|failed ?: No route to host)",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"socket(?:Start|Poll)Connect: (?:connect returned Connection timed out|exceeded timeouts \()",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
        # NCCL 2.18 connects anew on the same socket, and the second errno hides the first.
        Sign(
            r"[Cc]onnect to " + FAR_PEER + rf"<{PORT}> failed : Software caused connection abort",
            Role.LIKELY,
            Blames.PEER,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"connect " + GLOO_PEER + ": Connection timed out",
            Role.LIKELY,
            Blames.PEER,
            Confidence.LIKELY,
        ),
        Sign(r"SO_ERROR: Connection timed out, remote=" + GLOO_PEER, Role.LIKELY, Blames.PEER, Confidence.LIKELY),
        # Gloo's pair.cc, of a pair that is not connected after five times its timeout.
        Sign(r"Connect timeout " + GLOO_PEER, Role.LIKELY, Blames.PEER, Confidence.LIKELY, where=("log", "end")),
        Sign(
            r"A process or daemon was unable to complete a TCP connection",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        # The lines below Open MPI's words.
        Sign(r"Remote host: +(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,120})$", Role.CONTEXT, Blames.NAMED),
        Sign(
            rf"connect\(\) to (?P<peer>{IPV4}|{MASKED}|[A-Za-z][A-Za-z0-9_.-]{{1,120}})(?::{PORT})? failed",
            Role.LIKELY,
            Blames.PEER,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "  what():  [/tmp/third_party/gloo/gloo/transport/tcp/pair.cc:575] Connect timeout [10.12.40.7]:31044",
        "  Remote host:   psfwnezg3",
        "gpu-103:18553:18611 [0] include/socket.h:360 WARN Call to connect failed : Connection timed out",
        "node1:71:80 [0] NCCL INFO Call to connect returned No route to host, retrying",
        "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No "
        "route to host) errno 115(Operation now in progress)",
        "node5:240:240 [6] misc/socket.cc:452 NCCL WARN Net : Connect to 10.0.0.4<56849> failed : No route to host",
        "node5:240:240 [6] NCCL INFO ncclOsSocketPollConnect: connect to 10.0.0.4<56849> returned No route to host, "
        "retrying (1/34) after sleep for 100 msec",
        "zgiot:1183664:1184669 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying (34/34) "
        "after sleep for 3400 msec",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [10.0.0.2]:8463: No route to "
        "host",
        "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] "
        "timed out connecting: SO_ERROR: No route to host, remote=[10.0.0.2]:34567",
        "node5:240:240 [6] include/socket.h:403 NCCL WARN Connect to 10.0.0.4<56849> failed : Connection timed out",
        "node5:240:241 [0] misc/socket.cc:61 NCCL WARN ncclOsSocketPollConnect: connect to 10.0.0.4<40123> returned "
        "Connection timed out, exceeded error retry count after 35 attempts",
        "worker-b:101542:101934 [0] NCCL INFO Call to connect returned Connection timed out, retrying",
        "node5:240:240 [6] misc/socket.cc:510 NCCL WARN socketPollConnect: exceeded timeouts (3)",
        "ubuntu:39964:40075 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : "
        "Software caused connection abort",
        "RuntimeError: "
        "[/opt/conda/conda-bld/pytorch_1607370120218/work/third_party/gloo/gloo/transport/tcp/pair.cc:769] "
        "connect [10.0.0.2]:3496: Connection timed out",
        "[1,1]<stderr>:RuntimeError: timed out connecting: SO_ERROR: Connection timed out, remote=[10.0.0.2]:34567",
        "A process or daemon was unable to complete a TCP connection",
        "  Message:    connect() to 10.7.0.188:1024 failed",
        "[n1][[5412,1],1][btl_tcp_endpoint.c:796:mca_btl_tcp_endpoint_complete_connect] connect() to 10.0.0.2 failed: "
        "Connection timed out (110)",
    )
    misses = (
        "node1:71:80 [0] NCCL INFO Call to connect returned Connection refused, retrying",
        "OSError: [Errno 113] No route to host",
        "INFO: Connected to 10.0.0.2<45763>",
    )


class PortInUse(Cause, id="AR207"):
    """Another process holds the leader's port.

    ## What it means
    Another program uses the preferred port on the first node (29500, or the port of the flag or of cluster.toml). It
    may be another job, a worker left over from an earlier job, or a service.

    ## Why it breaks the job
    It does not break this job: the leader took another port and announced it. If a firewall opens only the preferred
    port, the nodes cannot reach the other one. With plain PyTorch, the first rank fails with an error. If the program
    on the port stays silent, the other ranks hang beyond their timeout.

    ## Example
    From modelscope/ms-swift#3988; PyTorch 2.13 writes the same:

        RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use

    ## Fix
    Find the process, and end it if it is a leftover of yours:

        ss -ltnp 'sport = :29500'

    Or choose another port with `[network] port` in cluster.toml or with `--master-port`. Choose one outside
    `net.ipv4.ip_local_port_range`: the kernel may give those to any program.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/socket.cpp (2.13, seen 2026-11-21).
    https://github.com/modelscope/ms-swift/issues/3988. Accelerate, src/accelerate/utils/launch.py (read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{holder} uses port {port}; the leader took another port"
    fix = (
        "on {node}: ss -ltnp 'sport = :{port}'; end the leftover process, or set another [network] port in cluster.toml"
    )
    exit_code = Exit.SETUP
    traits = frozenset({Trait.BEFORE_THE_FIRST_STEP})
    also = ("AR201", "AR405", "AR501", "AR502")
    told = "another process uses the port that this one was told to listen on"
    signs = (
        Sign(
            r"server socket has failed to listen on any local network address\. port: (?P<port>[0-9]+), useIpv6: "
            r"[a-z0-9]{1,5}, "
            r"(?:code: -98|code: -[0-9]{1,5}, name: EADDRINUSE)"
        ),
        Sign(
            r"server socket has failed to listen on any local network address\."
            r"(?: The server socket has failed to bind to [^ ]{1,80}:(?P<port>[0-9]+))?.{1,300}"
            r"(?:[Aa]ddress already in use|system error: 10048 )"
        ),
        # torchrun's agents try to listen, and the ones that come too late connect instead: a warning there.
        Sign(
            r"server socket has failed to bind to (?:[^ ]{1,80}:(?P<port>[0-9]+) )?"
            r"\((?:errno: 98 - Address already in use|system error: 10048 )",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"RuntimeError: Address already in use"),
        Sign(
            r"Tried to launch distributed communication on port `(?P<port>[0-9]+)`, but another process is utilizing it"
        ),
        # Somebody listens there, and does not speak as a store does.
        Sign(
            r"TCP client failed to connect/validate to host (?P<node>[^ :]{1,120}):(?P<port>[0-9]+) - retrying "
            r"\(.{1,80}: (?:Connection reset by peer|Broken pipe)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"Call to bind failed ?: Address already in use"),
        Sign(r" vs -1\. ?bind: Address already in use"),
        Sign(r"tcp/[a-z_]{3,12}\.cc:[0-9]+\] (?:bind|listen): Address already in use"),
        # Of any server: tensorboard's too.
        Sign(r"OSError: \[WinError 10048\] ", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"OSError: \[Errno 98\] Address already in use", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(
            r"attempting to bind on address \('[^']{1,80}', (?P<port>[0-9]+)(?:, [0-9]+)*\): (?:\[errno 98\] )?address "
            r"already in use",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # gRPC, LightGBM, ps-lite: the port may also be one that only root may take.
        Sign(r"Failed to bind to address [^ ;]{1,80}:(?P<port>[0-9]+)", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"[Bb]inding port (?P<port>[0-9]+) failed", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"Check failed: .{0,60}\bport\b.{0,60} bind failed", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"Port (?P<port>[0-9]+) is unavailable", Role.LIKELY, confidence=Confidence.UNDECIDED),
    )
    hits = (
        "RuntimeError: Failed to bind to address 127.0.0.1:9923; set GRPC_VERBOSITY=debug environment variable to see",
        "[LightGBM] [Fatal] Binding port 12402 failed",
        "ps-lite/src/van.cc:76: Check failed: (my_node_.port) != (-1) bind failed",
        "ctrl_server.cpp:52] Check failed: port == bound_port (22 vs. 0) Port 22 is unavailable",
        "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 23456): address already in use",
        "RuntimeError: [/work/third_party/gloo/gloo/transport/tcp/pair.cc:176] bind: Address already in use",
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, "
        "code: -98, name: EADDRINUSE, message: address already in use",
        "[rank0]: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29511, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "RuntimeError: The server socket has failed to listen on any local network address. The server socket has "
        "failed to bind to [::]:29500 (errno: 98 - Address already in use). The server socket has failed to bind to "
        "0.0.0.0:29500 (errno: 98 - Address already in use).",
        "[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in "
        "use).",
        "The server socket has failed to bind to (errno: 98 - Address already in use)",
        "[W1121 11:07:23.060430033 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host "
        "master-node:29500 - retrying (try=1, timeout=60000ms, delay=1041ms): Connection reset by peer",
        "RuntimeError: Address already in use",
        "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is utilizing "
        "it. Please specify a different port (such as using the `--main_process_port` flag or specifying a different "
        "`main_process_port` in your config file) and rerun your script.",
        "n1:2144:2144 [0] misc/socket.cc:365 NCCL WARN Call to bind failed : Address already in use",
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/socket.cc:84] rv != -1. -1 vs "
        "-1. bind: "
        "Address already in use",
        "OSError: [Errno 98] Address already in use",
        "[W socket.cpp:436] [c10d] The server socket has failed to bind to [DESKTOP-A]:10086 (system error: 10048 - "
        "Only one usage of each socket address (protocol/network address/port) is normally permitted.).",
        "RuntimeError: The server socket has failed to listen on any local network address. The server socket has "
        "failed to bind to 0.0.0.0:29500 (system error: 10048 - Only one usage of each socket address",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -4091, name: EADDRINUSE, message: address already in use",
        "OSError: [WinError 10048] Only one usage of each socket address (protocol/network address/port) is normally "
        "permitted",
    )
    misses = (
        "[W socket.cpp:426] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family "
        "not supported by protocol).",
        "The server socket on [::]:29500 has failed to bind. TORCHELASTIC_USE_AGENT_STORE is enabled so ignoring the "
        "error.",
        "TensorBoard could not bind to port 6006, it was already in use",
        "bind [127.0.0.1]:8888: Address already in use",
    )

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Warns if another process used the leader's port."""
        if card.came_by is not None:
            return None
        if card.port_holder is None or card.test_ports is None:  # on one machine any port does
            return PASSED
        return warned(port=card.wanted_port or "of the leader", holder=card.port_holder)


class LocalConnectError(Cause, id="AR217"):
    """A node's own kernel could not open a connection.

    ## What it means
    In the pair tests of the roll call, or before it, when the node tried the address at which its own ranks meet,
    `connect` failed on this node itself before anything was sent. Either no local port is free, an address is not the
    node's own, there is no route for these packets, or a policy forbids them. This says nothing about the other node,
    which could not be tested.

    ## Why it breaks the job
    It may not. The pair tests open some dozens of connections at once; NCCL and Gloo open more, at other times. If the
    error persists, the ranks of this node fail with the same errno, and all others wait for them.

    ## Example
    From a finding of allranks, with ten ports in `net.ipv4.ip_local_port_range`, all used by other programs:

        the node's own kernel could not connect to node01, so the path is untested: Address already in use (EADDRINUSE)

    ## Fix
    The errno decides. For EADDRINUSE and EADDRNOTAVAIL, widen the range of local ports, or end the processes that use
    them:

        sysctl -w net.ipv4.ip_local_port_range="32768 60999"; ss -s

    For EHOSTUNREACH and ENETUNREACH, check the route and the firewall:

        ip route get 192.168.20.15; nft list ruleset

    For EPERM and EACCES, check the node's firewall, cgroups and security modules.

    ## Source
    Linux, connect(2) and ip(7), ip_local_port_range (man-pages 6.9).
    """

    roll_call = "a node's own kernel blocks its connections"
    message = "{what}"
    fix = "on {node}: {command}"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = (
        "the tests of the pair tests provoke it: a range of ten local ports, and a rule that prohibits a route"
    )

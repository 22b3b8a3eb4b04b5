"""Which interface is NCCL or Gloo made to use by hand, and does it lead to the other nodes?

Where the user sets nothing, allranks sets the data interface, and there is nothing to judge.
"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.causes.cause import Cause, Outcome
from allranks.causes.net.cards import data_network, most_common, with_facts
from allranks.causes.net.choices import GLOO, NCCL, Choice, find_astray, list_choices
from allranks.causes.net.lines import NIC_OF_ONE_MACHINE, NOT_REACHED, OF_A_CONTAINER, OF_ONE_MACHINE
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status


class WrongNic(Cause, id="AR203"):
    """NCCL or Gloo is set to an interface that does not lead to the other nodes.

    ## What it means
    NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is set on this node and selects docker0, the loopback, or an interface on
    another network than the other nodes use. Or neither is set, and the library chose the bridge or veth of a container
    by itself. The rank announces the address of that interface, which the others cannot use.

    ## Why it breaks the job
    The other ranks connect to the announced address. They reach themselves (127.0.0.1, or docker0, which has the same
    address on every node) or nothing. Each of them reports itself; no message names the node that announced the wrong
    address. If the address can be reached, gradients use the slow management network.

    ## Example
    From our lab: one of six ranks uses docker0, with PyTorch 2.13 and Gloo. Five ranks fail with `connectFullMesh
    failed`, each with `remote=[172.17.0.1]`. No line names the sixth, which announced that address.

    ## Fix
    Unset the variables: allranks sets both to the data interface of each node, whatever its name there.

        unset NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME     # also in .bashrc, /etc/nccl.conf, the batch script
        allranks env --explain                          # shows which values it sets, and why

    If you must set them by hand: NCCL takes prefixes (`eth` means eth0, eth1, ...), exact names after `=`, and
    exclusions after `^`. `^docker0` alone still allows the loopback. Gloo takes exact names only.

    ## Source
    NCCL user guide, NCCL_SOCKET_IFNAME: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (read
    2026-11-21); src/misc/socket.cc (2.28). https://github.com/NVIDIA/nccl/issues/286 and /issues/913; "no error":
    https://github.com/pytorch/gloo/pull/412; https://github.com/jbornschein/mpi4py-examples/issues/11 (2026-11-21).
    """

    aliases = ("MN2",)
    message = "{variable}={spelled} selects {nic} with {address}, {why}"
    fix = "on {node}: unset {variable}; allranks then sets the data interface (or name the interface in {network})"
    exit_code = Exit.NODE_FAULT
    also = ("AR206", "AR201", "AR209", "AR208", "AR215", "AR210", "AR214")
    told = "a rank announced an address that other nodes cannot reach: that of a bridge, a veth or a loopback"
    signs = (
        Sign(
            r"[Cc]onnect to "
            + OF_ONE_MACHINE
            + r"<[0-9A-Za-z_*]{1,12}> (?:failed : |returned )(?:[0-9]+\()?"
            + NOT_REACHED,
            Role.PRIMARY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"connect \[" + OF_ONE_MACHINE + r"\]:[^ ]{1,12}: " + NOT_REACHED,
            Role.PRIMARY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"SO_ERROR: " + NOT_REACHED + r", remote=\[" + OF_ONE_MACHINE + r"\]",
            Role.PRIMARY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"connect\(\) to " + OF_ONE_MACHINE + r"(?::[0-9]+)? failed", Role.PRIMARY, Blames.NAMED, Confidence.LIKELY
        ),
        Sign(
            r"[Cc]onnect to "
            + OF_A_CONTAINER
            + r"<[0-9A-Za-z_*]{1,12}> (?:failed : |returned )(?:[0-9]+\()?"
            + NOT_REACHED,
            Role.LIKELY,
            Blames.NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"connect \[" + OF_A_CONTAINER + r"\]:[^ ]{1,12}: " + NOT_REACHED,
            Role.LIKELY,
            Blames.NAMED,
            Confidence.UNDECIDED,
        ),
        # Gloo of torch 2.2 to 2.6 loses its own message on the way.
        Sign(
            r"Gloo connectFullMesh failed with \[.{3,200}\] no error", Role.LIKELY, Blames.NOBODY, Confidence.UNDECIDED
        ),
        Sign(
            r"Gloo connectFullMesh failed with .{3,200}, "
            r"remote=\[(?P<peer>(?:[0-9]{1,2}|1[013-9][0-9]|2[0-9]{2})\.[0-9.]{5,11})\]",
            Role.LIKELY,
            Blames.PEER,
            Confidence.UNDECIDED,
        ),
        # NCCL 2.4 to 2.17: to whom, it does not say; the interfaces it took stand above it.
        Sign(
            r"Call to connect returned Connection timed out, retrying", Role.LIKELY, Blames.NOBODY, Confidence.UNDECIDED
        ),
        # NCCL 2.2 and 2.3; a rank that ended leaves the same line.
        Sign(r"Call to connect (?:timeout|failed) ?: Connection refused", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"NET : Using interface (?:(?P<loopback>lo):127\.|" + NIC_OF_ONE_MACHINE + r":)", Role.CONTEXT),
        Sign(
            r"nable to find a set of common task-to-task communication interfaces",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"but has connected from a different address (?P<address>[0-9a-f.:]{3,45})\. This is not supported",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"(?:Bootstrap ?|NET/Socket ): Using .{0,200}\b" + NIC_OF_ONE_MACHINE + r":", Role.CONTEXT),
        Sign(r"(?:Bootstrap ?|NET/Socket ): Using (?:\[0\])?(?P<interface>lo):127\.", Role.CONTEXT),
        Sign(r"(?:Bootstrap ?|NET/Socket ): Using (?:\[0\])?(?P<interface>[A-Za-z0-9_.-]{1,15}):fe80:", Role.CONTEXT),
        Sign(r"(?:send|receive)\] via NET/Socket/[1-9]", Role.CONTEXT),
        # It listens at the address of its own interface: a link-local one that is not there any more, or not ready.
        Sign(r"Call to bind failed ?: Cannot assign requested address", Role.LIKELY, confidence=Confidence.LIKELY),
        # It is told to listen at an address that no interface of its own has: DGL, ZeroMQ (of vLLM), asyncio.
        Sign(
            r"Failed bind on (?P<address>[0-9a-f.:]{3,45}):(?P<port>[0-9]+) ?, ?errno=99",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"Cannot assign requested address \(addr='tcp://(?P<address>[^ ':]{3,45}):(?P<port>[0-9]+)'\)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"attempting to bind on address \('(?P<address>[^']{1,80})', (?P<port>[0-9]+)(?:, [0-9]+)*\): "
            r"(?:\[errno 99\] )?cannot assign requested address",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        # Open MPI: a peer comes from, or is reached at, an address that it has not announced.
        Sign(
            r"Match incoming connection from \[\[[0-9,]+\],[0-9]+\] (?P<address>[0-9a-f.:]{3,45}) with locally known "
            r"IP",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"Source IP of socket: +(?P<address>[0-9a-f.:]{3,45})", Role.LIKELY, Blames.NAMED, Confidence.LIKELY),
        Sign(r"received unexpected process identifier \[\[", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(
            r"at least one routable network interface with the same name",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "51ca79e04561:4880:5140 [1] include/socket.h:361 NCCL WARN Call to connect timeout : Connection refused",
        "51ca79e04561:4880:5140 [1] NCCL INFO NET : Using interface lo:127.0.0.1<0>",
        "ml3:32632:32662 [0] NCCL INFO NET : Using interface br-4e5f60905511:172.18.0.1<0>",
        "node-a:31:99 [0] include/socket.h:403 NCCL WARN Connect to fe80::380d:bfff:fe5b:54d2%veth25f2e72<40123> "
        "failed : "
        "No route to host",
        "node-a:31:99 [0] misc/socket.cc:61 NCCL WARN ncclOsSocketPollConnect: connect to 172.17.0.1<40123> returned "
        "Connection refused, exceeded error retry count after 35 attempts",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [172.17.0.1]:8463: "
        "Connection "
        "refused",
        "RuntimeError: Gloo connectFullMesh failed with "
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] timed "
        "out connecting: SO_ERROR: Connection refused, remote=[172.17.0.1]:34567",
        "  Message:    connect() to 169.254.140.13:1026 failed",
        "RuntimeError: Gloo connectFullMesh failed with "
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] timed "
        "out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:34567",
        "[rank0]: RuntimeError: Gloo connectFullMesh failed with "
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:144] no "
        "error",
        "worker-b:101542:101934 [0] NCCL INFO Call to connect returned Connection timed out, retrying",
        "Unable to find a set of common task-to-task communication interfaces: [(0, {}), (1, {})]",
        "ERROR: Task 1 declared addresses {'lo': [('127.0.0.1', 55651)], 'eth0': [('192.168.101.5', 55651)]}, but has "
        "connected from a different address 192.168.101.0. This is not supported. Is the server behind NAT?",
        "worker-b:101542:101542 [0] NCCL INFO NET/Socket : Using [0]eno1:172.18.233.41<0> "
        "[1]veth25f2e72:fe80::380d:bfff:fe5b:54d2%veth25f2e72<0>",
        "axa:30483:30485 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>",
        "worker-b:101542:101934 [0] NCCL INFO Channel 00 : 0[18000] -> 1[18000] [receive] via NET/Socket/1",
        "node20:275975:275975 [0] NCCL INFO Bootstrap : Using ib0:fe80::ba59:9f03:fc:765c%ib0<0>",
        "node20:275975:275975 [0] misc/socket.cc:379 NCCL WARN Call to bind failed : Cannot assign requested address",
        "[11:33:22] /opt/dgl/src/rpc/network/tcp_socket.cc:69: Failed bind on 10.16.128.31:3026 ,errno=99",
        "zmq.error.ZMQError: Cannot assign requested address (addr='tcp://192.168.1.20:35795')",
        "OSError: [Errno 99] error while attempting to bind on address ('10.1.2.3', 8265): cannot assign requested "
        "address",
        "[n1:06805] btl: tcp: Match incoming connection from [[27443,1],1] 44.128.0.4 with locally known IP 2.2.2.77 "
        "failed (iface 0/4)!",
        "  Source IP of socket:      10.9.0.4",
        "[n1][[31589,1],2][btl_tcp_endpoint.c:638:mca_btl_tcp_endpoint_recv_connect_ack] received unexpected process "
        "identifier [[31589,1],3]",
        "One possible cause of this problem is that horovodrun currently requires every host to have at least one "
        "routable network interface with the same name across all of the hosts.",
    )
    misses = (
        "worker-b:101542:101542 [0] NCCL INFO Bootstrap : Using eth0:172.17.0.4<0>",
        "worker-b:101542:101934 [0] NCCL INFO Channel 00 : 0[18000] -> 1[18000] [receive] via NET/Socket/0",
        "node-a:31:99 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ^docker0,lo",
        "9306dc444753:248281:248336 [3] misc/socket.cc:456 NCCL WARN Net : Connect to 172.17.0.2<40537> failed : "
        "Connection reset by peer",
    )

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails if a variable of the user selects an interface outside the network of the other nodes."""
        if len(cards) < 2:
            return []
        own = {card.host: data_network(card) for card, _ in with_facts(cards)}
        shared = most_common(network for network in own.values() if network is not None)
        off: dict[tuple[str, str | None], list[Choice]] = {}
        for variable in (NCCL, GLOO):
            picked = [choice for choice in list_choices(cards, variable) if choice.interface and not choice.problem]
            for choice in find_astray(picked, own, shared):
                assert choice.interface is not None
                off.setdefault((choice.host, choice.interface.name), []).append(choice)
        groups: dict[tuple[object, ...], list[tuple[str, list[Choice]]]] = {}
        for (host, _), choices in off.items():
            first = choices[0]
            # docker0 and lo look alike on all nodes: one finding names all of them.
            key = (first.spelled, first.address, tuple(each.variable for each in choices))
            groups.setdefault(key, []).append((host, choices))
        return [
            (tuple(host for host, _ in group), _outcome(group[0][1], shared or own.get(group[0][0])))
            for group in groups.values()
        ]


class NicNotFound(Cause, id="AR208"):
    """A network interface that the configuration names does not exist.

    ## What it means
    cluster.toml, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that is missing or switched off on this
    node. Or no interface of the node is in the subnet of `[network] data`. Names differ between machines (`eth0`,
    `ens1f1`, `enp5s0f1np1`) and change with kernels, slots and firmware.

    ## Why it breaks the job
    Gloo fails at once on this node, and all others wait for it until their timeout. NCCL fails with "no socket
    interface found", or in some versions with a meaningless address family.

    ## Example
    From PyTorch 2.13, seen 2026-11-21 with GLOO_SOCKET_IFNAME=eth99; the second from EasonXiao-888/MambaTree#14:

        [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth99
        Bootstrap : no socket interface found

    ## Fix
    List the node's interfaces:

        ip -br addr

    Unset the variable: allranks finds the interface of each node by its address. In cluster.toml, the subnet in
    `[network] data` fits all nodes, whatever the names of their interfaces. You need `interface` under `[[node]]` only
    if two interfaces are in that subnet.

    ## Source
    Gloo, gloo/transport/tcp/device.cc (in PyTorch 2.13). https://github.com/NVIDIA/nccl/issues/1837 (NCCL 2.27.7) and
    /issues/210. https://github.com/msr-fiddle/pipedream/issues/32 (all read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{what}"
    fix = "on {node}: ip -br addr lists the interfaces; correct the name in cluster.toml, or unset the variable"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.BEFORE_THE_FIRST_STEP, Trait.CUTS_ITS_NODE_OFF})
    also = ("AR203", "AR202", "AR214")
    told = "a network interface that was selected by name does not exist or has no address"
    signs = (
        Sign(r"ifa != nullptr\. Unable to find address for: (?P<interface>[^\s,]{1,60})"),
        Sign(r"(?:Error|\]): Unable to find address for: (?P<interface>[^\s,]{1,60})", confidence=Confidence.LIKELY),
        Sign(r"Unable to find interface for: (?P<address>\[?[0-9A-Fa-f.:]{3,45})"),
        # A host name, and nothing of the machine has an address that it stands for.
        Sign(
            r"rp != nullptr\. Unable to find address for: (?P<node>[A-Za-z0-9_.-]{1,120})",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"Unable to find address for (?P<node>[A-Za-z0-9_.-]{1,120}); bind\(2\) for ",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"Bootstrap ?: no socket interface found"),
        Sign(r"Bootstrap ?: no NCCL_SOCKET_IFNAME interface found"),
        # What NCCL says of an address that was never filled in, before it knew better.
        Sign(r"Socket creation failed : Address family not supported by protocol", confidence=Confidence.LIKELY),
        Sign(r"NET/(?:Socket|IB|ND) ?: [Nn]o (?:IP |socket )?interface found", confidence=Confidence.LIKELY),
        Sign(
            r"No interface found in the same subnet as remote address (?P<peer>[0-9A-Za-z.:%_-]{2,120})",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"ncclSocketInit: connecting to address .{0,60} with family [0-9]+ is neither AF_INET",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"An invalid value was given for (?:btl|oob)_tcp_if_include",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # What was asked for; a line of healthy runs, too.
        Sign(
            r"NCCL_SOCKET_IFNAME set (?:by environment )?to =?(?P<interface>[A-Za-z0-9_.-]{1,15})(?:$|[ ,])",
            Role.CONTEXT,
            Blames.NAMED,
        ),
    )
    hits = (
        "e66aa18dc444:3171:3171 [0] include/socket.h:311 WARN Socket creation failed : Address family not supported by "
        "protocol",
        "[enforce fail at .../gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ^lo",
        "RuntimeError: Unable to find address for: eth0",
        "trainer3:1958:1958 [3] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth2",
        "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. "
        "Unable to find address for: eth99",
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:208] ifa != nullptr. "
        "Unable to "
        "find interface for: [10.0.0.3]",
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:127] rp != nullptr. Unable to "
        "find address for: dgx-1.ai",
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:121] bind_rv == 0. Unable to "
        "find address for n7; bind(2) for [10.9.9.9]:0 failed with: Cannot assign requested address",
        "Bootstrap : no socket interface found",
        "n7:71:71 [0] bootstrap.cc:47 NCCL WARN Bootstrap: no NCCL_SOCKET_IFNAME interface found",
        "n7:71:71 [0] transport/net_socket.cc:66 NCCL WARN NET/Socket : no interface found",
        "n7:71:71 [0] transport/net_ib.cc:190 NCCL WARN NET/IB : No IP interface found.",
        "n7:71:71 [0] misc/socket.cc:233 NCCL WARN Net : No interface found in the same subnet as remote address "
        "10.0.0.1<29500>",
        "[trainer0|0]:ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)",
        "WARNING: An invalid value was given for btl_tcp_if_include.  This",
    )
    misses = (
        "node05:44753:44753 [7] NCCL INFO NET/IB : No device found.",
        "n7:71:71 [0] NCCL INFO NET/OFI No eligible providers were found",
    )

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails if a variable of the user names a missing interface, or one that is down."""
        if len(cards) < 2:
            return []
        found: dict[tuple[Status, str, str | None], list[str]] = {}
        for variable in (NCCL, GLOO):
            for choice in list_choices(cards, variable):
                if choice.problem:
                    what = f"{variable}={choice.spelled}: {choice.problem}"
                    name = choice.interface.name if choice.interface else None
                    found.setdefault((choice.status, what, name), []).append(choice.host)
        return [
            (tuple(hosts), Outcome(status, values={"what": what}, interface=name))
            for (status, what, name), hosts in found.items()
        ]


def _outcome(choices: Sequence[Choice], network: str | None) -> Outcome:
    """Return what the choices that lead astray come to; `network`: the one that the nodes share."""
    first = choices[0]
    assert first.interface is not None
    why = f"but the other nodes are in {network}" if network else "which leads to no other node"
    if first.is_of_one_machine:
        why = "which no other node can reach"
    return Outcome(
        Status.FAIL if any(choice.status is Status.FAIL for choice in choices) else Status.WARN,
        values={
            "variable": " ".join(dict.fromkeys(choice.variable for choice in choices)),
            "spelled": first.spelled,
            "address": first.address,
            "nic": first.interface.name,
            "network": network or "the network that the nodes share",
            "why": why,
        },
        evidence=tuple(
            dict.fromkeys(f"{each.variable}={each.spelled} in the environment of the agent" for each in choices)
        ),
        interface=first.interface.name,
    )

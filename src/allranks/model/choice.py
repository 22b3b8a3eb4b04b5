"""Which interfaces NCCL and Gloo choose on a node by themselves: their rules, applied to the node's facts.

    >>> lan = Interface("eth0", ("10.0.0.7",), is_up=True)
    >>> docker = Interface("docker0", ("172.17.0.1",), is_up=True)
    >>> [nic.name for nic in nccl_candidates([docker, lan], {})]
    ['eth0']

Pure: interfaces in the order of getifaddrs (host.net.read_interfaces keeps it), the environment of the workers, names
as they resolve there. Left out: variables in nccl.conf, and the port half of an NCCL_SOCKET_IFNAME entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from allranks.model.card import Interface

MAX_NCCL_INTERFACES = 16
"""MAX_IFS in NCCL's net_socket.cc: more are not used."""


def nccl_candidates(interfaces: Sequence[Interface], env: Mapping[str, str]) -> list[Interface]:
    """Return the interfaces that NCCL's bootstrap and socket transport would take; bootstrap takes the first.

    Kubernetes' and VPNs' interfaces (veth, cni, flannel, tun, tailscale) are candidates as any other: NCCL leaves out
    docker, lo and virbr by name only, and those only while there is something else. None where NCCL would fail
    with "no socket interface found".

    Args:
        interfaces: in the order of getifaddrs.
        env: NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY and NCCL_COMM_ID in it.
    Source: NCCL 2.28, src/misc/socket.cc ncclFindInterfaces, src/os/linux.cc ncclOsFindInterfaces.
    """
    family = {"AF_INET": 4, "AF_INET6": 6}.get(env.get("NCCL_SOCKET_FAMILY", ""))
    usable = [nic for nic in interfaces if nic.is_up and _nccl_addresses(nic, family)]
    spelled = env.get("NCCL_SOCKET_IFNAME", "")
    if len(spelled) > 1:  # a single character is ignored
        return [nic for nic in usable if _matches(nic.name, spelled)][:MAX_NCCL_INTERFACES]
    comm_id = env.get("NCCL_COMM_ID", "")
    # Order matters: the first that finds something is taken.
    for choice in (
        [nic for nic in usable if _matches(nic.name, "ib")],
        [nic for nic in usable if _is_in_subnet_of(comm_id, nic)],
        [nic for nic in usable if _matches(nic.name, "^docker,lo,virbr")],
        [nic for nic in usable if _matches(nic.name, "docker")],
        [nic for nic in usable if _matches(nic.name, "lo")],
        [nic for nic in usable if _matches(nic.name, "virbr")],
    ):
        if choice:
            return choice[:MAX_NCCL_INTERFACES]
    return []


def nccl_address(interface: Interface, env: Mapping[str, str]) -> str | None:
    """Return the address that NCCL would announce on an interface: its first of the wanted family, no ::1.

    Args:
        interface: one of `nccl_candidates`.
        env: NCCL_SOCKET_FAMILY in it.
    """
    family = {"AF_INET": 4, "AF_INET6": 6}.get(env.get("NCCL_SOCKET_FAMILY", ""))
    return next(iter(_nccl_addresses(interface, family)), None)


def gloo_address(
    interfaces: Sequence[Interface], env: Mapping[str, str], resolved: Mapping[str, Sequence[str]], host_name: str
) -> tuple[Interface | None, str | None, str]:
    """Return the interface and address that Gloo would announce, and why; no address where it would fail.

    Args:
        interfaces: in the order of getifaddrs.
        env: GLOO_SOCKET_IFNAME in it: exact names; of several the first one is told here.
        resolved: host name -> addresses, in the resolver's order.
        host_name: gethostname() there.
    Source: torch 2.13, ProcessGroupGloo.cpp createDefaultDevice and doesHostnameResolveToUsableAddress; Gloo
        transport/tcp/device.cc lookupAddrForIface.
    """
    if spelled := env.get("GLOO_SOCKET_IFNAME", ""):
        name = spelled.split(",")[0]
        reason = f"GLOO_SOCKET_IFNAME={spelled}"
        nic = next((nic for nic in interfaces if nic.name == name), None)
        if nic is None:
            return None, None, f"{reason}: this node has no interface {name!r}"
        if not nic.addresses:
            return nic, None, f"{reason}: {name} has no address"
        return nic, nic.addresses[0], reason
    addresses = resolved.get(host_name, ())
    for text in addresses:  # the first one that can be bound, whatever state its interface is in
        address = _address(text)
        owner = next((nic for nic in interfaces if any(_address(own) == address for own in nic.addresses)), None)
        if owner is not None:
            return owner, text, f"the host name {host_name} resolves to it"
        if address is not None and address.version == 4 and address.is_loopback:  # all of 127/8 can be bound
            return _loopback(interfaces), text, f"the host name {host_name} resolves to it"
    problem = (
        f"resolves to {', '.join(addresses)}, which is not an address of this node" if addresses else "does not resolve"
    )
    return _loopback(interfaces), "127.0.0.1", f"the host name {host_name} {problem}: Gloo falls back to loopback"


def _nccl_addresses(nic: Interface, family: int | None) -> list[str]:
    return [
        text
        for text in nic.addresses
        if (address := _address(text)) is not None
        and family in (None, address.version)
        and not (address.version == 6 and address.is_loopback)
    ]


def _matches(name: str, spelled: str) -> bool:
    """Whether NCCL's list matches a name: `^` all except these, `=` exactly these, else prefixes; empty: all."""
    body = spelled.removeprefix("^")
    is_exact = body.startswith("=")
    entries = [entry.partition(":")[0] for entry in body.removeprefix("=").split(",")]
    entries = [entry for entry in entries if entry]
    is_listed = not entries or any(name == entry if is_exact else name.startswith(entry) for entry in entries)
    return is_listed is not spelled.startswith("^")


def _is_in_subnet_of(comm_id: str, nic: Interface) -> bool:
    """Whether an address of the interface is in one subnet with NCCL_COMM_ID's; a host name there cannot be told."""
    if not comm_id:
        return False
    host = comm_id[1:].partition("]")[0] if comm_id.startswith("[") else comm_id.rpartition(":")[0]
    address = _address(host.partition("%")[0])
    try:
        return address is not None and any(address in ip_network(network) for network in nic.networks)
    except ValueError:
        return False


def _loopback(interfaces: Sequence[Interface]) -> Interface | None:
    return next((nic for nic in interfaces if "127.0.0.1" in nic.addresses), None)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None

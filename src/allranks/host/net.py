"""This machine's network interfaces and ports: read here, decided elsewhere."""

from __future__ import annotations

import fcntl
import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path

import msgspec

from allranks.model.card import Interface

MAX_RESOLVERS = 16
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40


def read_interfaces(*, root: Path = Path("/")) -> list[Interface]:
    """Return all interfaces of this network namespace, IPv4 and IPv6 addresses without scope.

    In the order of getifaddrs, those with an IPv4 address first: the order in which NCCL looks at them. A veth is
    `virtual` although it may be a container's data interface.

    Args:
        root: where /sys/class/net is; tests feed a tree. Names and addresses are always this machine's.
    """
    import psutil  # 30 ms that the other verbs need not pay

    families = (socket.AF_INET, socket.AF_INET6)
    found = [
        _read_interface(name, [(a.address, a.netmask) for a in addresses if a.family in families], root)
        for name, addresses in psutil.net_if_addrs().items()
    ]
    shared = Counter(network for nic in found for network in set(nic.networks) if ":" not in network)
    return [
        msgspec.structs.replace(nic, arp=_read_arp(nic.name, root))
        if any(shared[network] > 1 for network in nic.networks)
        else nic
        for nic in found
    ]


def _read_interface(name: str, addresses: Sequence[tuple[str, str | None]], root: Path) -> Interface:
    link = root / "sys/class/net" / name.partition(":")[0]  # `eth0:1` is a label of eth0's address
    flags = _ask_interface(name, _SIOCGIFFLAGS, "H")
    plain = [(address.partition("%")[0], mask) for address, mask in addresses]
    return Interface(
        name=name,
        addresses=tuple(address for address, _ in plain),
        # sysfs has the administrative flags only: IFF_RUNNING is in the ioctl's answer alone.
        is_up=flags is not None and flags & _IFF_UP != 0 and flags & _IFF_RUNNING != 0,
        networks=tuple(_network_of(address, mask) for address, mask in plain),
        mtu=_number(link / "mtu") or _ask_interface(name, _SIOCGIFMTU, "i"),
        speed_mbit_s=_speed_of(link),
        has_carrier=None if (carrier := _number(link / "carrier")) is None else carrier == 1,
        kind=_kind_of(name, flags, link),
        carrier_changes=_number(link / "carrier_changes"),
    )


def _speed_of(link: Path) -> int | None:
    """Speed of a NIC, or of a bond or VLAN over one; a veth says 10000, a tun 10, whatever they carry."""
    if not (link / "device").exists():
        try:
            lines = (link / "uevent").read_text(errors="replace").splitlines()
        except OSError:
            return None
        if not {"DEVTYPE=bond", "DEVTYPE=vlan"} & set(lines):
            return None
    return _number(link / "speed") or None  # EINVAL, -1, 4294967295 and 0 all say: unknown


def _kind_of(name: str, flags: int | None, link: Path) -> str:
    if name == "lo" or (flags is not None and flags & _IFF_LOOPBACK):
        return "loopback"
    if (link / "bridge").is_dir():
        return "bridge"
    return "physical" if (link / "device").exists() else "virtual"


def _read_arp(name: str, root: Path) -> tuple[int, int]:
    """The kernel takes the larger value of `all` and the interface: Documentation/networking/ip-sysctl.rst."""
    both = [root / "proc/sys/net/ipv4/conf" / where for where in ("all", name.partition(":")[0])]
    ignore, announce = (max(_number(conf / f"arp_{what}") or 0 for conf in both) for what in ("ignore", "announce"))
    return ignore, announce


def _network_of(address: str, mask: str | None) -> str:
    """`192.168.20.15`, `255.255.255.0` -> `192.168.20.0/24`; without a mask the address alone."""
    try:
        length = str(bin(int(IPv6Address(mask))).count("1")) if mask and ":" in mask else mask
        return str(ip_network(f"{address}/{length}" if length else address, strict=False))
    except ValueError:
        return address


def _ask_interface(name: str, request: int, form: str) -> int | None:
    """One number out of `struct ifreq`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, request, struct.pack("16s24x", name.encode()[:15]))
        except OSError:
            return None
    return int(struct.unpack_from(form, answer, 16)[0])


def _number(path: Path) -> int | None:
    """The number in a file of sysfs; None where there is none, or no sensible one."""
    try:
        number = int(path.read_bytes()[:64])
    except (OSError, ValueError):
        return None
    return number if 0 <= number < 1 << 31 else None


def read_tcp_counters(*, root: Path = Path("/")) -> tuple[int, int]:
    """Return how many TCP segments this machine has sent, and how many of them again, since it came up."""
    lines = (root / "proc/net/snmp").read_text().splitlines()
    names, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
    counts = dict(zip(names, map(int, values), strict=True))
    return counts["OutSegs"], counts["RetransSegs"]


def read_port_range(*, root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the first and last ephemeral port: what NCCL, Gloo and the roll call listen on."""
    try:
        words = (root / "proc/sys/net/ipv4/ip_local_port_range").read_bytes()[:64].split()
        first, last = map(int, words)
    except (OSError, ValueError):
        return None
    return (first, last) if 0 < first <= last < 1 << 16 else None


def read_boot_id(*, root: Path = Path("/")) -> str | None:
    """Return the kernel's random id of this boot; NCCL tells hosts apart by it and the host name."""
    try:
        text = (root / "proc/sys/kernel/random/boot_id").read_bytes()[:64].decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return text or None


def resolve(names: Sequence[str], *, deadline_s: float) -> dict[str, tuple[str, ...]]:
    """Return the addresses that each name leads to from here, in the resolver's order.

    A name that does not resolve has none; one that was not answered in time is missing.

    Args:
        names: host names; addresses are taken, too.
        deadline_s: for all of them together. The threads of a resolver that hangs stay behind, as daemons.
    """
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, tuple[str, ...]]] = queue.SimpleQueue()
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        left.put(name)

    def work() -> None:
        while True:
            try:
                name = left.get_nowait()
            except queue.Empty:
                return
            answers.put((name, _resolve_one(name)))

    for _ in range(min(len(wanted), MAX_RESOLVERS)):
        threading.Thread(target=work, daemon=True, name="allranks-resolver").start()
    end_s = time.monotonic() + deadline_s
    found: dict[str, tuple[str, ...]] = {}
    while len(found) < len(wanted):
        try:
            name, addresses = answers.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            break
        found[name] = addresses
    return {name: found[name] for name in wanted if name in found}


def _resolve_one(name: str) -> tuple[str, ...]:
    try:
        # As Gloo asks: any family, streams.
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        return ()
    found: dict[str, None] = {}
    for answer in answers:
        try:
            address = ip_address(str(answer[4][0]).partition("%")[0])
        except ValueError:
            continue
        found[str(getattr(address, "ipv4_mapped", None) or address)] = None
    return tuple(found)


def find_interface_in(
    network: IPv4Network | IPv6Network, interfaces: Sequence[Interface], *, preferred: str | None = None
) -> tuple[Interface, str] | None:
    """Return an interface with an address in the network, and that address: the preferred one, else one that is up."""
    found = [
        (interface, address)
        for interface in interfaces
        for address in interface.addresses
        if ip_address(address) in network
    ]
    return min(found, key=lambda pair: (pair[0].name != preferred, not pair[0].is_up), default=None)


def find_interface_of(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Return the interface that has exactly this address."""
    wanted = ip_address(address)
    return next((nic for nic in interfaces if any(ip_address(own) == wanted for own in nic.addresses)), None)


def is_local_host(host: str) -> bool:
    """Whether a name or address leads to this machine; a name that does not resolve does not."""
    try:
        answers = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return False
    own = {ip_address(address) for interface in read_interfaces() for address in interface.addresses}
    return any(ip_address(str(answer[4][0]).partition("%")[0]) in own for answer in answers)


def answers(address: str, port: int, *, within_s: float) -> bool:
    """Whether a machine's kernel answers on TCP; a refusal is an answer, too."""
    return listens(address, port, within_s=within_s) is not None


def listens(address: str, port: int, *, within_s: float) -> bool | None:
    """Whether a program of a machine listens at a port; None: the machine does not answer."""
    try:
        socket.create_connection((address, port), timeout=within_s).close()
    except ConnectionRefusedError:
        return False
    except (OSError, UnicodeError):
        return None
    return True


def fail_to_reach_self(address: str, *, within_s: float) -> OSError | None:
    """Return why this machine cannot connect to one of its own addresses; None: it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family, backlog=1) as server:
            socket.create_connection(server.getsockname()[:2], timeout=within_s).close()
    except OSError as exc:
        return exc
    return None


def describe_port_holder(port: int) -> str:
    """Say which process listens on a port: `python3 (pid 812, alice)`, as far as this user may see it."""
    import psutil

    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return "another user's process"
            try:
                process = psutil.Process(connection.pid)
                return f"{process.name()} (pid {connection.pid}, {process.username()})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return "a process that has ended, or is in another namespace"

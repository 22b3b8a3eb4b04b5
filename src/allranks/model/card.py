"""The card: the report of one node in the roll call. Data only; `host` reads it, `causes` judge it.

A value that could not be read is None, and `Facts.unread` has the reason, so that "not seen" never counts as "fine". A
card comes over the network from machines that may be broken, so it is small (texts are cut, lists are short) and its
texts may not be printable.
"""

from __future__ import annotations

import msgspec

from allranks.model.finding import Finding
from allranks.model.fix import ANYBODY, Reader, SchedulerKind, Vendor

MAX_VARIABLES = 100
MAX_TEXT = 512
"""Maximum length of an environment value; longer ones are cut, so that a card stays below 64 KiB."""
WIRE_FLAGS = {"ALLRANKS_COMPRESS": "--compress", "ALLRANKS_BUCKET_MB": "--bucket-mb"}
"""Variables that hand these flags of `allranks run` to a worker: its DDP sends other bytes, in other pieces."""
WIRE_FLAGS = {"ALLRANKS_COMPRESS": "--compress", "ALLRANKS_BUCKET_MB": "--bucket-mb"}
"""Variables that hand these flags of `allranks run` to a worker: its DDP sends other bytes, in other pieces."""
WIRE_FLAGS = {"ALLRANKS_COMPRESS": "--compress", "ALLRANKS_BUCKET_MB": "--bucket-mb"}
"""Variables that hand these flags of `allranks run` to a worker: its DDP sends other bytes, in other pieces."""
WIRE_FLAGS = {"ALLRANKS_COMPRESS": "--compress", "ALLRANKS_BUCKET_MB": "--bucket-mb"}
"""Variables that hand these flags of `allranks run` to a worker: its DDP sends other bytes, in other pieces."""
MAX_CODE_FILES = 200
"""Maximum number of files next to the script, the first by name."""


class Interface(msgspec.Struct, frozen=True, gc=False):
    """One network interface with the addresses it has now."""

    name: str
    addresses: tuple[str, ...]
    """IPv4 and IPv6, without prefix length and scope."""
    is_up: bool
    """Administratively up and with a carrier (IFF_UP and IFF_RUNNING): packets may leave."""
    networks: tuple[str, ...] = ()
    """The subnet of each address, in their order: `192.168.20.0/24`."""
    mtu: int | None = None
    speed_mbit_s: int | None = None
    """None if the driver does not report it: virtual interfaces, links that are down."""
    has_carrier: bool | None = None
    """Whether the cable has a signal; None while the interface is administratively down."""
    kind: str = "physical"
    """physical, loopback, bridge, or virtual (veth, docker, tun: no device of this machine behind it)."""
    carrier_changes: int | None = None
    """Number of times the link went up or down since boot."""
    arp: tuple[int, int] | None = None
    """arp_ignore and arp_announce as they hold here; None where no other interface has an address of its subnets."""

    @property
    def answers_for_itself(self) -> bool:
        """Whether ARP tells it from other interfaces in its subnet: arp_ignore from 1, arp_announce 2."""
        return self.arp is None or (self.arp[0] >= 1 and self.arp[1] >= 2)

    def __str__(self) -> str:
        """`ens1f1 192.168.20.15`, and `(down)` where it is."""
        return " ".join([self.name, *self.addresses, *([] if self.is_up else ["(down)"])])


class Gpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU as `nvidia-smi` shows it; None if this version of the driver has no such field."""

    index: int
    uuid: str
    name: str
    pci_bus: str | None = None
    vbios: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    uncorrected_ecc: int | None = None
    """Uncorrected ECC errors since the driver was loaded (volatile)."""
    has_ecc: bool | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: str | None = None
    """None, Reset, Reboot, Drain P2P, Drain and Reset: as the driver (r570 on) asks for."""
    fabric_state: str | None = None
    """N/A, Not Started, In Progress, Completed."""
    fabric_status: str | None = None
    fabric_clique: str | None = None
    fabric_cluster: str | None = None
    compute_mode: str | None = None
    mig_mode: str | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    throttle_reasons: int | None = None
    """Bits of clocks_event_reasons.active."""
    nvlinks_active: int | None = None
    processes: tuple[str, ...] = ()
    """Foreign processes with memory on it: `python3 (pid 812, 14336 MiB)`."""


class Gid(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One entry of a RoCE port's GID table: an address of its interface, under one of the two protocols."""

    index: int
    kind: str
    """`RoCE v2`, or `IB/RoCE v1`."""
    gid: str
    """As sysfs spells it; an IPv4 address is `0000:0000:0000:0000:0000:ffff:c0a8:140f`."""
    netdev: str | None = None


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One port of an RDMA device, from /sys/class/infiniband."""

    device: str
    port: int
    state: str
    """`ACTIVE`, `DOWN`, ... as behind the number in sysfs."""
    phys_state: str
    rate: str
    link_layer: str
    lid: str | None = None
    sm_lid: str | None = None
    has_uverbs: bool | None = None
    """Whether this user may open the device's /dev/infiniband/uverbsN."""
    netdev: str | None = None
    gids: tuple[Gid, ...] = ()
    """Those in use, the first by index; of RoCE ports only."""
    active_mtu: int | None = None
    """Bytes of payload in a packet, a power of 2 up to 4096; None where nothing on the node tells."""
    error_counters: dict[str, int] = {}
    """Those that are not 0."""


class JobDirectory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A directory that the job writes to."""

    purpose: str
    """`run directory`, `TMPDIR`, `HOME`, `/dev/shm`."""
    path: str
    free_bytes: int | None = None
    size_bytes: int | None = None
    free_inodes: int | None = None
    """Files that can still be made; None if the file system does not count them."""
    is_writable: bool | None = None
    problem: str | None = None
    """Why it could not be examined: `no answer within 5 s`, `No such file or directory`."""
    nonce: str | None = None
    """Content of the leader's file in it; None if the file is not visible."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The job's script and the files next to it, each as the beginning of its SHA-256."""

    script: str
    digest: str
    beside: dict[str, str | None] | None = None
    """The other .py files of its directory, by name; None for one that was not read, since it was beyond the bounds or
    may not be, and for all where the directory may not be listed."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a node on which the start of a job can depend."""

    # Who it is.
    host_name: str = ""
    """gethostname(), which may differ from the scheduler's name of the node."""
    boot_id: str | None = None
    kernel: str | None = None

    # Names and addresses.
    interfaces: tuple[Interface, ...] = ()
    resolved: dict[str, tuple[str, ...]] = {}
    """Host name -> its addresses here; none where it does not resolve. Always with the own host name."""
    port_range: tuple[int, int] | None = None
    """Ephemeral ports, first and last: net.ipv4.ip_local_port_range."""

    # Software that the workers will find.
    allranks_version: str = ""
    python_version: str = ""
    glibc_version: str | None = None
    packages: dict[str, str] = {}
    """Distribution -> version, of what takes part in a group: torch, nvidia-nccl-*, ..."""
    torch_cuda: str | None = None
    """CUDA that torch was built for; None without torch and for a CPU build."""
    nccl_version: str | None = None
    net_plugin: str | None = None
    """libnccl-net*.so that the loader would find."""

    code: Code | None = None
    """None where no script is known: a module, a program, a check."""

    # Environment and limits.
    environment: dict[str, str] = {}
    """Variables that affect a process group: NCCL_*, GLOO_*, TORCH_*, CUDA_*, UCX_*, FI_*, LD_LIBRARY_PATH, ..."""
    nccl_conf: str | None = None
    """SHA-256 of the NCCL configuration files there are."""
    limits: dict[str, int | None] = {}
    """memlock_bytes, nofile, stack_bytes, nproc: the soft limit; None is unlimited."""
    num_cpus: int = 0
    """Cores that this process may run on."""
    load: float | None = None
    """Runnable processes, averaged over a minute."""
    places: tuple[JobDirectory, ...] = ()

    scheduler: SchedulerKind = SchedulerKind.SLURM
    """What placed the job on this node."""
    vendor: Vendor = Vendor.NVIDIA
    """Who made its GPUs."""

    # Time.
    clock_s: float = 0.0
    """Seconds since the epoch, when the card was written."""
    is_clock_synchronised: bool | None = None

    # GPUs and fabric.
    driver_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    cuda_init: int | None = None
    """Result of cuInit(0) in a child process; None without libcuda."""
    fabric_manager: str | None = None
    """`active`, `inactive`, `failed`: systemctl's word for nvidia-fabricmanager; None where there is no such unit."""
    fabric_manager_version: str | None = None
    xids: tuple[str, ...] = ()
    """Recent Xid lines of the kernel log."""
    rdma_ports: tuple[RdmaPort, ...] = ()
    has_peer_memory: bool | None = None
    """Whether the kernel can register GPU memory for RDMA (nvidia_peermem or DMA-BUF)."""

    unread: dict[str, str] = {}
    """Field -> why it could not be read: `gpus` -> `nvidia-smi: not installed`."""


class TestPorts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Ports of the ephemeral range on which a node listens for tests during the roll call."""

    __test__ = False

    tcp: tuple[int, ...]
    udp: int


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one agent on its node."""

    host: str
    """Name of the node, as the scheduler knows it, if there is one."""
    pid: int
    node_index: int | None
    """None if unknown; the leader then numbers the nodes in order of arrival."""
    num_workers: int
    num_gpus: int
    num_promised_gpus: int | None = None
    """Number of GPUs of this node that the scheduler allocated to the job."""
    problem: str | None = None
    """Why this node cannot take part, in one line. The leader then stops the job."""
    problem_exit: int = 0
    problem_finding: Finding | None = None
    """The same as a finding, if the cause is known."""
    data_interface: str | None = None
    data_address: str | None = None
    """The data interface; None if not configured: then the path to the leader decides."""
    endpoint: str | None = None
    """Host of --rdzv-endpoint or --master-addr, as spelled."""
    wanted_port: int | None = None
    """The leader's preferred port, from flag or cluster.toml; the leader took another one if it was in use."""
    port_holder: str | None = None
    """On the leader: the process that used that port, `python3 (pid 812, alice)`; None if it was free."""
    wanted_backend: str = "auto"
    attempt: int | None = None
    """Number of the job's start, if the agent knows it; the leader rejects agents of another one."""
    age_s: float | None = None
    """How long the agent had been running when it joined."""
    came_by: str | None = None
    """Address and port at which this agent found the leader; None on the leader."""
    test_ports: TestPorts | None = None
    """None if this node is not tested: a job on one machine."""
    agent_port: int = 0
    """Where the other agents reach this one if they lose their leader; 0: nowhere."""
    incarnation: int = 0
    """A random number of this process: an agent that comes again with the same one has only lost its connection."""
    generation: int = -1
    """Of this agent's workers; -1: they have not been started yet."""
    facts: Facts | None = None

    @property
    def reader(self) -> Reader:
        """For whom is a fix on this node."""
        if self.facts is None:
            return ANYBODY
        return Reader(scheduler=self.facts.scheduler, vendor=self.facts.vendor)

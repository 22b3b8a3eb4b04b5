"""What many agents say to their leader, from a few processes: real frames over real connections, and nothing more.

An agent here is one connection from an address of its own. It says what an agent of a node with 8 GPUs and 10 RDMA
ports says: a Join with a whole report, a Tested that its targets passed, a Beat of 8 ranks. Of a Plan it reads only the
length.
"""

from __future__ import annotations

import itertools
import resource
import secrets
import selectors
import socket
import time
from collections import Counter
from multiprocessing.connection import Connection as Pipe

import msgspec

from allranks import __version__
from allranks.model.beat import CallSeen, GroupSeen, NodeBeat, RankBeat
from allranks.model.card import Card, Code, Facts, Gid, Gpu, Interface, JobDirectory, RdmaPort, TestPorts
from allranks.model.pair import PairResult
from allranks.wire.connection import LENGTH, decode_frames, encode_frame
from allranks.wire.protocol import Beat, Hello, Join, Message, Test, Tested, Welcome
from allranks.wire.secret import Secret, prove_join

KEY = Secret(b"a benchmark", "benchmark")
RANKS = 8
MAX_JOINING = 96
"""Agents of one process that shake hands at a time."""
GREETED_S = 5.0
"""When an agent that was told nothing tries again."""
MTU = 9000
_PLAN = b"\xa4type\xa4plan"
"""How the payload of a Plan begins."""
_PING = b"\xa4type\xa4ping"


def address_of(index: int) -> str:
    """An address of its own for every node, on loopback."""
    return f"127.{1 + index // 16384}.{index // 128 % 128}.{1 + index % 128}"


def card_of(index: int, *, nccl: str = "2.27.5") -> Card:
    """The report of a node with 8 GPUs and 10 RDMA ports."""
    name = f"gpu-{index:05d}"
    own = msgspec.structs.replace(
        FACTS,
        host_name=name,
        boot_id=f"{index:08x}-3c1e-4b52-9f0a-6f2d8e1c7a90",
        interfaces=(
            Interface("eno1", (address_of(index),), True, ("127.0.0.0/8",), MTU, 100_000, True, carrier_changes=2),
            *(
                Interface(f"ibs{port}", (_fabric(index, port),), True, (f"10.{port}.0.0/16",), 4092, 400_000, True)
                for port in range(10)
            ),
        ),
        resolved={name: (address_of(index),)},
        load=index % 7 / 10,
        clock_s=time.time(),
        nccl_version=nccl,
        gpus=tuple(_gpu(index, number) for number in range(RANKS)),
        rdma_ports=tuple(_port(index, number) for number in range(10)),
    )
    return Card(
        host=name, pid=40_000 + index, node_index=index, num_workers=RANKS, num_gpus=RANKS, num_promised_gpus=RANKS,
        data_interface="eno1", data_address=address_of(index), wanted_port=29500, attempt=0, age_s=0.31,
        came_by="127.0.0.1:29500", test_ports=TestPorts(tcp=tuple(range(40000, 40008)), udp=40010), facts=own,
    )  # fmt: skip


def _fabric(index: int, port: int) -> str:
    return f"10.{port}.{index // 250}.{1 + index % 250}"


def _gpu(index: int, number: int) -> Gpu:
    return Gpu(
        index=number, uuid=f"GPU-{index:08x}-{number:04x}-5a1b-8c0d-2e4f6a8b0c1d", name="NVIDIA H100 80GB HBM3",
        pci_bus=f"00000000:{0x18 + 16 * number:02X}:00.0", vbios="96.00.74.00.0D", memory_total_mib=81559,
        memory_used_mib=4, uncorrected_ecc=0, has_ecc=True, remap_pending=False, remap_failed=False,
        recovery_action="None", fabric_state="Completed", fabric_status="Success", fabric_clique="0",
        fabric_cluster="00000000-0000-0000-0000-000000000000", compute_mode="Default", mig_mode="Disabled",
        pcie_width=16, pcie_max_width=16, throttle_reasons=0, nvlinks_active=18,
    )  # fmt: skip


def _port(index: int, number: int) -> RdmaPort:
    high, low = divmod(index, 250)
    address = f"0000:0000:0000:0000:0000:ffff:0a{number:02x}:{high:02x}{low + 1:02x}"
    link_local = f"fe80:0000:0000:0000:a288:c2ff:fe{number:02x}:{index & 0xFFFF:04x}"
    kinds = ("IB/RoCE v1", "RoCE v2")
    gids = tuple(
        Gid(index=2 * at + which, kind=kind, gid=gid, netdev=f"ibs{number}")
        for at, gid in enumerate((link_local, address))
        for which, kind in enumerate(kinds)
    )
    return RdmaPort(
        device=f"mlx5_{number}", port=1, state="ACTIVE", phys_state="LinkUp", rate="400 Gb/sec (4X NDR)",
        link_layer="Ethernet", lid="0x0", sm_lid="0x0", has_uverbs=True, netdev=f"ibs{number}", gids=gids,
        active_mtu=4096,
    )  # fmt: skip


FACTS = Facts(
    kernel="5.15.0-1063-nvidia",
    port_range=(32768, 60999),
    allranks_version=__version__,
    python_version="3.12.4",
    glibc_version="2.39",
    packages={
        f"nvidia-{name}-cu12": "12.8.93"
        for name in ["cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nvtx"]
    }
    | {"torch": "2.9.0", "nvidia-nccl-cu12": "2.27.5", "triton": "3.5.0", "numpy": "2.3.1", "transformers": "4.57.0"},
    torch_cuda="12.8",
    net_plugin="libnccl-net.so",
    code=Code(script="train.py", digest="a" * 64, beside={f"part_{number:02}.py": "b" * 64 for number in range(60)}),
    environment={
        f"NCCL_TUNED_SETTING_{number:02}": f"the value of setting {number}, as long as paths are"
        for number in range(80)
    }
    | {"LD_LIBRARY_PATH": ":".join(f"/opt/software/library-{number}/lib64" for number in range(24))},
    nccl_conf="c" * 64,
    limits={"memlock_bytes": None, "nofile": 131072, "stack_bytes": 8 << 20, "nproc": None},
    num_cpus=192,
    places=tuple(
        JobDirectory(purpose=purpose, path=purpose, free_bytes=1 << 40, size_bytes=1 << 41, is_writable=True)
        for purpose in ("/dev/shm", "TMPDIR", "HOME")  # noqa: S108
    ),
    is_clock_synchronised=True,
    driver_version="570.133.20",
    cuda_init=0,
    fabric_manager="active",
    fabric_manager_version="570.133.20",
    has_peer_memory=True,
)


class Faults(msgspec.Struct, frozen=True):
    """What is planted."""

    other_nccl: int | None = None
    """A node with another NCCL."""
    cut: tuple[int, int] | None = None
    """Two nodes between which nothing passes."""


class Agent:
    """One connection that says what an agent says."""

    def __init__(self, index: int, port: int, faults: Faults, count: Counter[str]) -> None:
        self.index = index
        self.step = 0
        self._faults, self._count = faults, count
        self._buffer = bytearray()
        self.is_greeted = self.is_welcome = self.has_plan = False
        self.began_s = time.monotonic()
        self.sock = socket.socket()
        self.sock.bind((address_of(index), 0))
        self.sock.setblocking(False)
        self.sock.connect_ex(("127.0.0.1", port))

    def listen(self) -> bool:
        """Read, and answer; False: the leader has closed the connection."""
        try:
            while data := self.sock.recv(1 << 18):
                self._buffer += data
                self._count["bytes in"] += len(data)
                if len(data) < 1 << 18:
                    break
            else:
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        while len(self._buffer) >= LENGTH.size:
            size = LENGTH.size + int(LENGTH.unpack_from(self._buffer)[0])
            if len(self._buffer) < size:
                break
            kind = bytes(self._buffer[LENGTH.size + 1 : LENGTH.size + 1 + len(_PLAN)])
            if kind in (_PLAN, _PING):
                del self._buffer[:size]
                if kind == _PLAN:
                    self.has_plan = True
                    self._count["Plan"] += 1
                    self._count["Plan bytes"] += size
                continue
            for message in decode_frames(self._buffer, at_most=1):
                self._answer(message, size)
        return True

    def _answer(self, message: Message, size: int) -> None:
        self._count[type(message).__name__] += 1
        self._count[f"{type(message).__name__} bytes"] += size
        match message:
            case Hello(job=job, nonce=theirs):
                self.is_greeted = True
                card = card_of(self.index, nccl="2.21.5" if self.index == self._faults.other_nccl else "2.27.5")
                join = Join(job=job, nonce=secrets.token_bytes(16), card=card)
                self.send(prove_join(KEY, join, leader_nonce=theirs))
            case Welcome():
                self.is_welcome = True
            case Test():
                self.send(Tested(results=tuple(map(self._try, message.targets)), round=message.round))

    def _try(self, target: msgspec.Struct) -> PairResult:
        pair = self.index, target.node_index
        if self._faults.cut and set(pair) == set(self._faults.cut):
            closed = {target.ports.tcp[0]: "no answer in 1.6 s"}
            return PairResult(source=pair[0], target=pair[1], closed=closed, datagrams_sent=4, datagrams_lost=4)
        return PairResult(
            source=pair[0], target=pair[1], num_open=1, store="" if target.store_port else None,
            large_s=None if target.probe_bytes else 0.000312, large_sent=0 if target.probe_bytes else 1024,
            large_back=0 if target.probe_bytes else 1024, delivery_mbit_s=912.4, segment_bytes=8948, datagrams_sent=4,
            datagrams={target.probe_bytes: True} if target.probe_bytes else {}, rtt_s=0.000087,
            clock_offset_s=0.000021,
        )  # fmt: skip

    def beat(self) -> None:
        """Say how 8 ranks are that train."""
        self.step += 1
        first = self.index * RANKS
        ranks = tuple(
            RankBeat(
                rank=first + at, pid=41_000 + at, cpu_s=1.5 * self.step, silent_s=0.1, step=self.step, phase="training",
                main_at="train.py:120 in step",
                groups=(GroupSeen(name="0", enqueued=self.step, completed=self.step - 1, waiting_s=0.01),),
                calls=(CallSeen(group="0", seq=self.step, op="all_reduce", sizes=((25_000_000,),), dtypes=("Float",)),),
            )
            for at in range(RANKS)
        )  # fmt: skip
        node = NodeBeat(
            node_index=self.index, generation=0, ranks=ranks, addresses=(address_of(self.index),),
            try_ports=(40011, 40012), shm_used=0.01, time_ns=time.time_ns(),
        )  # fmt: skip
        self.send(Beat(node=node))

    def send(self, message: Message) -> None:
        """Send a frame whole; the leader may be slow."""
        frame = encode_frame(message)
        self._count[type(message).__name__] += 1
        self._count[f"{type(message).__name__} bytes"] += len(frame)
        sent = 0
        while sent < len(frame):
            try:
                sent += self.sock.send(frame[sent:])
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:  # the leader has closed it: `listen` notices
                return


def run_agents(share: range, port: int, faults: Faults, beat_s: float, pipe: Pipe) -> None:
    """Be these agents until the leader closes all connections, then tell what was said."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    pipe.send("ready")
    pipe.recv()
    count: Counter[str] = Counter()
    selector = selectors.EpollSelector()
    agents: dict[int, Agent] = {}
    waiting = iter(share)
    next_s = time.monotonic()
    joining: set[int] = set()
    turn = 0

    def leave(agent: Agent) -> None:
        nonlocal waiting
        selector.unregister(agent.sock)
        agent.sock.close()
        del agents[agent.index]
        joining.discard(agent.index)
        if not agent.is_welcome:  # it was too slow for the handshake, or nobody took it from the queue
            waiting = itertools.chain([agent.index], waiting)

    while True:
        # So many at a time: those behind them would wait for this process, where real ones wait for nobody.
        for index in itertools.islice(waiting, MAX_JOINING - len(joining)):
            joining.add(index)
            agents[index] = Agent(index, port, faults, count)
            selector.register(agents[index].sock, selectors.EVENT_READ, agents[index])
        for key, _ in selector.select(0.02):
            if not key.data.listen():
                leave(key.data)
        now_s = time.monotonic()
        for agent in [agents[index] for index in joining]:
            if agent.is_welcome:
                joining.discard(agent.index)
            elif not agent.is_greeted and now_s > agent.began_s + GREETED_S:
                leave(agent)
        if not agents:
            break
        if beat_s and now_s >= next_s and all(agent.has_plan for agent in agents.values()):
            # A twentieth at a time: agents of a real job do not beat as one.
            next_s = max(next_s + beat_s / 20, now_s - beat_s)
            for agent in list(agents.values())[turn % 20 :: 20]:
                agent.beat()
            turn += 1
    pipe.send(count)

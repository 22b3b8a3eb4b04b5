"""What every rank of a group gets in its environment, whoever started it, each value with its reason. Pure.

An agent adds what torchrun sets and what its guard needs (launch.environment); a rank that holds the roll call itself
adds who it is (preflight.ranks); one of torchrun has its place, and gets `lasting` only (session).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allranks.model.setting import Setting
from allranks.report.text import count_of
from allranks.wire.protocol import Plan


@dataclass(slots=True)
class SettingList:
    """Settings, collected in their order."""

    env: Mapping[str, str]
    """Before: what the user set there is kept."""
    settings: list[Setting] = field(default_factory=list)

    def fix(self, name: str, value: object, reason: str, source: str = "allranks") -> None:
        """Set it, whatever the environment has."""
        self.settings.append(Setting(name, str(value), reason=reason, source=source))

    def offer(self, name: str, value: object, reason: str, source: str = "allranks") -> None:
        """Set it, unless the environment has it."""
        if name in self.env:
            self.fix(name, self.env[name], "already set in the environment; kept", "environment")
        else:
            self.fix(name, value, reason, source)

    def lasting(self, *, recorder: Path | None = None) -> None:
        """What ends a group whose collective failed, and keeps its last collectives.

        Args:
            recorder: how the files of torch's flight recorder begin; the rank follows. None: as torch has it.
        """
        name, size = "TORCH_FR_BUFFER_SIZE", self.env.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
        self.offer("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1, "a failed collective ends the worker instead of hanging it")
        if size and name not in self.env:
            self.fix(name, size, "as TORCH_NCCL_TRACE_BUFFER_SIZE, its name before torch 2.8", "environment")
        else:
            self.offer(name, 512, "entries in torch's flight recorder; reading more delays the script")
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE") if recorder is not None else ():
            self.offer(name, recorder, "NCCL's watchdog writes the last collectives here, for allranks why", "run dir")

    def of_group(
        self,
        group: Plan,
        *,
        node: str,
        num_nodes: int,
        num_local: int,
        num_cpus: int,
        members: str,
        interface: str | None,
        infiniband: bool | None,
        recorder: Path | None = None,
    ) -> None:
        """What a rank needs to find the others, and to leave them their cores and their network.

        Args:
            group: who is which rank, and where the store is.
            node: name of this node in the job.
            num_nodes: of the job.
            num_local: ranks on this node.
            num_cpus: cores that they share.
            members: value of ALLRANKS_MEMBERS, which may be `@file`.
            interface: the data interface, None where it could not be found out.
            infiniband: what cluster.toml says; None: nothing.
            recorder: as for `lasting`.
        """
        self.fix("MASTER_ADDR", group.store_address, "the leader announced it" if num_nodes > 1 else "one machine")
        self.fix("MASTER_PORT", group.store_port, "the leader holds this port for the store")
        self.lasting(recorder=recorder)
        cores = f"{count_of(num_cpus, 'core')} for {count_of(num_local, 'rank')}"
        self.offer("OMP_NUM_THREADS", max(1, num_cpus // num_local), f"{cores}; more would compete for cores")
        if interface is not None:
            reason = "all ranks are on this machine" if num_nodes == 1 else "this node's data interface"
            if len(own := group.own_interfaces) > 1:
                several = "data interfaces over which all nodes reach each other; Gloo uses them in turn"
                self.offer("GLOO_SOCKET_IFNAME", ",".join(own), several, "roll call")
            else:
                self.offer("GLOO_SOCKET_IFNAME", interface, reason, "data_interface")
            self.offer("NCCL_SOCKET_IFNAME", f"={interface}", f"{reason}; = means exactly this name", "data_interface")
        if infiniband is False:
            reason = "cluster.toml says that NCCL must not use InfiniBand"
            self.offer("NCCL_IB_DISABLE", 1, reason, "network.infiniband")
        if num_nodes > 1 and (known := group.network).link_mbit_s is not None:
            link = f"what one data interface carries, in Mbit/s: {known.link_reason}"
            self.offer("ALLRANKS_LINK_MBIT", f"{known.link_mbit_s:g}", link, known.link_source)
        self.fix("ALLRANKS_BACKEND", group.backend, group.backend_reason)
        self.fix("ALLRANKS_NODE", node, "name of this node in the job")
        self.fix("ALLRANKS_MEMBERS", members, "node=first rank+number of ranks")

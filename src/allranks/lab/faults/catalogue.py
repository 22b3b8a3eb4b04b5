"""All faults, by name, in the order of `inject --list` and of a drill."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.lab.faults import gpu, host, link, reach, start
from allranks.lab.faults.fault import Fault

FAULTS: Mapping[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        reach.MasterAddressWrong,
        reach.MasterNameUnresolvable,
        reach.PortInUse,
        reach.PortFiltered,
        reach.PortsFilteredBetween,
        reach.Partition,
        reach.LinkCut,
        link.InterfaceDown,
        link.CablePulled,
        link.PortSilent,
        link.InterfaceRenamed,
        reach.NicForcedDocker0,
        reach.NicForcedLo,
        reach.NicForcedManagement,
        reach.LoopbackHostname,
        host.DuplicateHostname,
        link.MtuUnequal,
        link.MtuBlackhole,
        link.PacketLoss2,
        link.PacketLoss20,
        link.SlowLink,
        start.NeverStarts,
        start.StartsLate,
        start.RankTwice,
        start.StaleRank,
        host.EnvDriftNcclAlgo,
        host.EnvDriftLibraryPath,
        host.TorchVersionDiffers,
        host.CodeDiffers,
        start.TorchrunInTasks,
        start.MpSpawnInSrun,
        host.ShmSmall,
        host.MemlockLow,
        host.NofileLow,
        host.RunDirNotShared,
        host.RunDirReadOnly,
        host.DiskFull,
        host.ClockOff,
        gpu.FabricManagerStopped,
        gpu.FabricManagerVersion,
        gpu.GpuMissing,
        gpu.GpuBusy,
        gpu.GpuEcc,
    )
}

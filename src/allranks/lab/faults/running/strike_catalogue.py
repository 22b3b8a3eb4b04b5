"""All faults that strike a running job, by name, in the order of a drill."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.lab.faults.running import checkpoint, collective, disk, leader, network, node, process, scheduler
from allranks.lab.faults.running.strike import Strike

STRIKES: Mapping[str, type[Strike]] = {
    strike.name: strike
    for strike in (
        process.WorkerKilled,
        process.WorkerStopped,
        process.WorkerExits,
        process.WorkerRaises,
        process.WorkerSegfaults,
        process.WorkerOutOfMemory,
        process.WorkerLoops,
        collective.CollectiveSkipped,
        collective.CollectivesDiffer,
        collective.ShapesDiffer,
        collective.DtypesDiffer,
        collective.RankEvaluates,
        collective.RankLate,
        network.LinkCutStrike,
        network.PortSilentStrike,
        network.MtuLowered,
        network.LostOneWay,
        network.NodeSilent,
        node.AgentKilled,
        node.NodeEmptied,
        node.NodeKilled,
        node.TwoNodesKilled,
        node.NodeBack,
        node.BelowMinimumAndBack,
        node.BelowMinimum,
        node.BatchNodeKilled,
        leader.LeaderAgentKilled,
        leader.SecondLeaderKilled,
        leader.BatchLeaderKilled,
        leader.SmallBatchLeaderKilled,
        leader.BatchNodeCutOff,
        leader.SmallBatchNodeCutOff,
        leader.LeaderWorkerKilled,
        leader.LeaderLinkCut,
        leader.LeaderNodeKilled,
        leader.LeaderSilent,
        leader.LeaderBack,
        leader.Split33,
        leader.Split24,
        leader.Split15,
        leader.Split42,
        scheduler.TimeLimitStrike,
        scheduler.Requeued,
        scheduler.Cancelled,
        scheduler.Warned,
        scheduler.WarnedBatch,
        scheduler.Preempted,
        checkpoint.KilledWhileSaving,
        checkpoint.BitFlipped,
        checkpoint.FileTruncated,
        checkpoint.ManifestMissing,
        checkpoint.CheckpointDiskFull,
        checkpoint.CheckpointReadOnly,
        disk.RunDirFull,
        disk.TmpdirFull,
        disk.TmpdirFullUnsaid,
        disk.RunDirWithoutInodes,
        disk.RunDirRemoved,
    )
}

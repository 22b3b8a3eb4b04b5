"""The environment of a task of `srun`, for steps with several tasks a node."""

from __future__ import annotations


def task(rank: int, tasks_per_node: tuple[int, ...] = (3,)) -> dict[str, str]:
    """What srun sets for one task of a step whose nodes n1, n2 ... have so many tasks, in block order."""
    firsts = [sum(tasks_per_node[:index]) for index in range(len(tasks_per_node))]
    index = max(i for i, first in enumerate(firsts) if first <= rank)
    nodes = ",".join(f"n{i + 1}" for i in range(len(tasks_per_node)))
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": str(len(tasks_per_node)),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(sum(tasks_per_node)),
        "SLURM_STEP_NUM_NODES": str(len(tasks_per_node)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks_per_node)),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_DISTRIBUTION": "block",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(index),
        "SLURM_LOCALID": str(rank - firsts[index]),
        "SLURM_GTIDS": ",".join(str(firsts[index] + i) for i in range(tasks_per_node[index])),
        "SLURMD_NODENAME": f"n{index + 1}",
    }

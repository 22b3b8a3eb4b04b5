"""Ranks in the place of nodes: what they are called, which GPU is whose, what they get in their environment. Pure.

For ranks that hold the roll call themselves (preflight.place): they are its applicants, several on a host. A rank that
did not come is called `node03-rank26` there, one that did `node03.2`; `in_ranks` says both as node03, rank 26.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from allranks.causes.book import find_cause
from allranks.causes.outcome import failed
from allranks.causes.probes.gpu import visible_gpus
from allranks.config.file import LoadedCluster
from allranks.model.card import Card
from allranks.model.cluster import Backend
from allranks.model.errors import HostlistError, SetupError
from allranks.model.finding import Finding
from allranks.model.hostlist import expand_hosts, fold_hosts
from allranks.model.setting import Setting
from allranks.model.world import World
from allranks.preflight.group_environment import SettingList
from allranks.report.text import count_of
from allranks.wire.protocol import Plan


def job_name(world: World) -> str:
    """Return the job's name, the same on all ranks."""
    return world.name_job(None, point=world.master, otherwise="local-0")


def hosts_of_ranks(world: World, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the host of each rank; () where the launcher does not say how the ranks are spread.

    SLURM says each task which ranks its own node has; that they follow one another there, from where the nodes before
    leave off, is what block order looks like.
    """
    here = world.local_world_size
    if not world.hosts or not world.tasks_per_node:
        return ()
    before = sum(world.tasks_per_node[: world.node_index])
    is_block = env.get("SLURM_GTIDS") == ",".join(str(before + i) for i in range(here))
    is_spread = max(world.tasks_per_node) == 1 or world.num_nodes == 1 or here > 1
    if not is_block or not (is_spread or env.get("SLURM_DISTRIBUTION", "").startswith("block")):
        return ()
    return tuple(host for host, times in zip(world.hosts, world.tasks_per_node, strict=True) for _ in range(times))


def name_absent(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each rank: its host, with the rank where there are several on it."""
    return tuple(f"{host}-rank{rank}" if hosts.count(host) > 1 else host for rank, host in enumerate(hosts))


def own_gpu(local_rank: int, num_gpus: int) -> int | None:
    """Return the GPU that a rank takes among those it sees: of its local rank, or the only one; None: there is none."""
    return local_rank if local_rank < num_gpus else 0 if num_gpus == 1 else None


def demand_gpu(local_rank: int, num_gpus: int, *, node: str) -> int:
    """Return the GPU that a rank of nccl takes among those that PyTorch sees.

    Raises:
        SetupError: there is none for it.
    """
    position = own_gpu(local_rank, num_gpus)
    if position is None:
        raise SetupError(
            f"backend nccl, but PyTorch sees {num_gpus} GPUs on {node} and this is local rank {local_rank}; nvidia-smi "
            f"and torch.version.cuda say why, or session(backend='gloo')"
        )
    return position


def choose_backend(wanted: str, cards: Mapping[int, Card]) -> tuple[str, str]:
    """Choose nccl where every rank has a GPU that no other rank takes, else gloo; returns it with the reason.

    Args:
        wanted: auto, nccl or gloo.
        cards: by rank.
    Raises:
        SetupError: nccl is asked for and cannot work.
    """
    if wanted == Backend.GLOO:
        return "gloo", "asked for"
    by_host: dict[str, list[Card]] = {}
    for rank in sorted(cards):
        by_host.setdefault(cards[rank].host, []).append(cards[rank])
    short = {}
    for host, own in by_host.items():
        taken = {gpu for local_rank, card in enumerate(own) if (gpu := _name_gpu(card, local_rank)) is not None}
        if all(map(_has_no_cuda, own)):
            short[host] = "a PyTorch without CUDA"
        elif len(taken) < len(own):
            short[host] = f"{len(taken)} GPU{'s' * (len(taken) != 1)} for {len(own)} rank{'s' * (len(own) != 1)}"
    if not short:
        return "nccl", "every rank has a GPU of its own"
    host, has = next(iter(short.items()))
    if wanted != Backend.NCCL:
        return "gloo", f"{host} has {has}"
    what = f"backend nccl needs a GPU for each rank; {len(short)} of {len(by_host)} nodes have too few"
    outcome = failed(*(f"{host}: {has}" for host, has in short.items()), what=what)
    raise SetupError(
        f"backend nccl needs a GPU for each rank, but {host} has {has}; start fewer, or session(backend='gloo')",
        finding=outcome.to_finding(find_cause("AR111"), node=fold_hosts(list(short)), reader=by_host[host][0].reader),
    )


def in_ranks(finding: Finding, places: Mapping[str, tuple[str | None, int]]) -> Finding:
    """Return a finding about applicants as one about hosts and their ranks.

    Args:
        finding: of the roll call, whose nodes are the names of applicants.
        places: host and rank of each name.
    """
    culprits, waiting = _find_places(finding.node, places), _find_places(finding.waiting, places)
    if culprits:
        separator = " or " if " or " in (finding.node or "") else ","
        hosts = list(dict.fromkeys(host for host, _ in culprits if host))
        node = separator.join(hosts) if separator != "," else fold_hosts(hosts)
        ranks = finding.ranks or tuple(sorted(rank for _, rank in culprits))
        finding = msgspec.structs.replace(finding, node=node or None, ranks=ranks)
    if waiting:
        finding = msgspec.structs.replace(
            finding, waiting=None, victims=finding.victims or tuple(sorted(rank for _, rank in waiting))
        )
    return finding


def cores_of_node(own: int, on_node: int, num_local: int) -> int:
    """Return how many cores the ranks of a node share: all that they may use, or each its own if they are bound.

    A rank cannot see whether the others may use its cores. Bound ranks share no more than the node has for them.

    >>> cores_of_node(64, 64, 8), cores_of_node(8, 64, 8), cores_of_node(8, 8, 4), cores_of_node(3, 64, 8)
    (64, 64, 8, 24)

    Args:
        own: cores that this rank may use.
        on_node: cores that the job has on this node, else those of the machine.
        num_local: ranks on this node.
    """
    return min(own * num_local, max(on_node, num_local))


def settings_of(
    world: World,
    group: Plan,
    loaded: LoadedCluster,
    *,
    interface: str | None,
    num_cpus: int,
    recorder: Path | None = None,
    env: Mapping[str, str],
) -> list[Setting]:
    """Return what an agent would give this rank, with the reasons.

    Args:
        world: who it is.
        group: what the leader gave out, a member for each rank.
        loaded: cluster.toml.
        interface: carries gradients here; None where it could not be found out.
        num_cpus: cores that the ranks of this node share.
        recorder: how the files of torch's flight recorder begin; the rank follows.
        env: the environment; what the user set there is kept.
    """
    by_host = groupby(group.members, key=lambda member: member.host)
    runs = [(host, [member.first_rank for member in same]) for host, same in by_host]
    of_launcher = {setting.name: setting.source for setting in world.settings}
    given = SettingList(env)
    given.fix("RANK", world.rank, "of this task", of_launcher["rank"])
    given.fix("WORLD_SIZE", world.world_size, "tasks of the step", of_launcher["world_size"])
    given.fix("LOCAL_RANK", world.local_rank, "counts the tasks of this node", of_launcher["local_rank"])
    given.fix("LOCAL_WORLD_SIZE", world.local_world_size, "tasks on this node", of_launcher["local_world_size"])
    given.of_group(
        group,
        node=group.members[world.rank].host,
        num_nodes=world.num_nodes,
        num_local=world.local_world_size,
        num_cpus=num_cpus,
        members=",".join(f"{host}={ranks[0]}+{len(ranks)}" for host, ranks in runs),
        interface=interface,
        infiniband=loaded.cluster.network.infiniband,
        recorder=recorder,
    )
    given.fix("ALLRANKS_STORE_PORT", group.store_port, "init_process_group on this port is watched", "roll call")
    return given.settings


def describe_group(group: Plan, names: Sequence[str], network: str | None) -> str:
    """`16 ranks on 2 nodes (node[01-02]), nccl over 192.168.20.0/24`."""
    where = names[0] if len(names) == 1 else f"{len(names)} nodes ({fold_hosts(names)})"
    over = f" over {network}" if network else ""
    return f"{count_of(group.world_size, 'rank')} on {where}, {group.backend}{over}"


def _name_gpu(card: Card, local_rank: int) -> str | None:
    """What tells the GPU that a rank takes from those of its neighbours: its UUID where nvidia-smi said it."""
    position = own_gpu(local_rank, card.num_gpus)
    if position is None:
        return None
    seen = visible_gpus(card.facts) if card.facts else ()
    if position < len(seen) and seen[position].uuid:
        return seen[position].uuid
    said = card.facts.environment.get("CUDA_VISIBLE_DEVICES", "") if card.facts else ""
    return f"{said}#{position}"


def _has_no_cuda(card: Card) -> bool:
    facts = card.facts
    return (
        facts is not None
        and "torch" in facts.packages
        and not {"torch_cuda", "packages"} & set(facts.unread)
        and (facts.torch_cuda is None)
    )


def _find_places(text: str | None, places: Mapping[str, tuple[str | None, int]]) -> list[tuple[str | None, int]] | None:
    """The places that a culprit's or waiting line names; None where it names anything else."""
    if not text:
        return None
    try:
        names = re.split(" or |, ", text) if " " in text else expand_hosts(text)
    except HostlistError:
        return None
    found = [places[name] for name in names if name in places]
    return found if len(found) == len(names) else None

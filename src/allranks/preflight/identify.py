"""Who is this process of a script with a session: a worker of an agent, a rank of a launcher, or a world of one?"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping

from allranks.host.node_files import read_node_files
from allranks.model.contradiction import check_no_launcher_inside, check_not_spawned, check_someone_starts_ranks
from allranks.model.identity import NODE_FILES, env_of_worker, world_from_env
from allranks.model.membership import GroupId, Membership, read_members
from allranks.model.world import Launcher, World
from allranks.report.rundir import read_shared_members
from allranks.report.text import say


def identify(env: Mapping[str, str], *, is_below_agent: bool) -> World:
    """Return who this process is.

    Args:
        env: its environment.
        is_below_agent: an agent started it.
    Raises:
        IdentityError: the environment contradicts itself.
    """
    if is_below_agent:
        members = read_shared_members(env.get("ALLRANKS_MEMBERS", ""))
        check_no_launcher_inside({**env, "ALLRANKS_MEMBERS": members})
        env = env_of_worker(env)
    world = world_from_env(env, files={} if is_below_agent else read_node_files(env, NODE_FILES.values()))
    is_spawned = multiprocessing.parent_process() is not None
    if is_spawned and (is_below_agent or world.is_placed):
        check_not_spawned(world)
    check_someone_starts_ranks(world)
    if is_spawned and world.launcher is Launcher.NONE:
        say("no launcher says which rank this process of multiprocessing is: it is a world of one")
    return world


def describe_membership(world: World, env: Mapping[str, str], groups: tuple[GroupId, ...]) -> Membership:
    """Return who trains together, as an agent says it, else with as many ranks on each node.

    Args:
        world: who this process is.
        env: its environment.
        groups: the process groups that were formed.
    """
    spread = Membership.spread(world.rank, world.world_size, per_node=world.local_world_size)
    epoch = int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return Membership(
        epoch=epoch,
        rank=world.rank,
        members=read_members(read_shared_members(env.get("ALLRANKS_MEMBERS", ""))) or spread.members,
        store_prefix=f"allranks/{epoch}",
        groups=groups,
    )

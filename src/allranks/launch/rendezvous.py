"""Get this agent's place in the group: the roll call (preflight.entry), then the assignment of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allranks.launch.lead.group import make_group
from allranks.launch.plan import JobPlan
from allranks.launch.queue.revival import BACK_VARIABLE
from allranks.model.card import Facts
from allranks.model.claims.table import row_of
from allranks.model.past import Past
from allranks.model.world import Launcher
from allranks.preflight.applicant import Applicant
from allranks.preflight.called import Called, Rendezvous
from allranks.preflight.entry import Entry
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Goodbye, Plan


def take_part(applicant: Applicant, *, past: Past) -> Rendezvous | Goodbye:
    """Take part in the roll call; return what came of it, or the verdict why the job does not begin.

    Args:
        past: how often workers are started again; every possible leader must know it.
    Raises:
        AllranksError: it could not begin.
    """
    # The job can go on without this node, but not where its srun runs here: the step ends with it.
    own = {address for interface in applicant.interfaces for address in interface.addresses}
    has_srun = applicant.env.get("SLURM_LAUNCH_NODE_IPADDR", "") in own

    def make_plans(called: Called) -> dict[int, Plan]:
        return make_group(
            called.cards,
            addresses=called.addresses,
            can_change_leader=not has_srun,
            past=past,
            wanted_backend=applicant.wanted_backend,
            attempt=applicant.run_dir.attempt,
            store_address=called.store_address,
            store_port=called.port,
            max_restarts=past.history.restarts_left,
        )

    with Entry(applicant) as entry:
        called = entry.take_part()
    return called.give_out(make_plans) if isinstance(called, Called) else called


def apply(
    plan: JobPlan,
    run_dir: RunDir,
    env: Mapping[str, str],
    *,
    facts: Callable[[], Facts],
    check_signals: Callable[[], None],
) -> Applicant:
    """Return what a plan means for the roll call; all else is as in Applicant.

    Args:
        run_dir: the job's run directory; the leader makes it.
        env: where $ALLRANKS_SECRET may be, and whether this agent takes the place of a lost one.
    """
    return Applicant(
        job=plan.job,
        attempt=plan.attempt,
        host=plan.facts.host,
        node_index=plan.node_index,
        is_back=BACK_VARIABLE in env,
        num_nodes=plan.num_nodes,
        min_nodes=plan.min_nodes,
        node_names=plan.node_names,
        num_workers=plan.num_workers,
        num_gpus=plan.facts.num_gpus,
        num_promised_gpus=plan.facts.num_promised_gpus,
        port=plan.port,
        endpoint=plan.request.endpoint,
        guesses=plan.guesses,
        rdzv_id=plan.request.rdzv_id,
        key_from=row.key_from if (row := row_of(plan.world.launcher)) else "",
        interfaces=plan.facts.interfaces,
        data_interface=plan.data_path.interface if plan.data_path else None,
        data_address=plan.data_path.address if plan.data_path else None,
        wanted_backend=plan.wanted_backend,
        guard=plan.cluster.guard,
        is_slurm=plan.world.launcher is Launcher.SLURM,
        shares_run_dir=plan.world.launcher is Launcher.SLURM,
        has_successors=plan.num_nodes > 1,
        ignored=frozenset(plan.request.ignored),
        run_dir=run_dir,
        env=env,
        problem=plan.problem,
        facts=facts,
        check_signals=check_signals,
    )

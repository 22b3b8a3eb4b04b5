"""`submit --exclude-suspects`: leave out nodes that break more jobs than chance explains."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from allranks.cli.why_history import find_places
from allranks.host.slurm import list_nodes
from allranks.launch.batch.batch_script import SbatchOptions
from allranks.launch.batch.exclusion import choose_exclusion
from allranks.launch.batch.submit import least_nodes
from allranks.model.cluster import SlurmTable
from allranks.model.errors import AllranksError
from allranks.model.hostlist import expand_hosts, fold_hosts
from allranks.report.text import say
from allranks.why.fleet.gather import gather
from allranks.why.fleet.suspects import WINDOW_S, find_suspects


def exclude_suspects(options: SbatchOptions, slurm: SlurmTable, *, log_dir: Path) -> SbatchOptions:
    """Return the options with suspects among the excluded nodes; says who is excluded and why, or why nobody is.

    Args:
        options: of the job.
        slurm: of cluster.toml, with the path of the history.
        log_dir: where run directories are.
    """
    now_s = time.time()
    try:
        places = find_places(Path(slurm.history) if slurm.history else None, log_dir)
        history = gather(places, since_s=now_s - WINDOW_S)
        suspects = find_suspects(history.ends, now_s=now_s).suspects
        if not suspects:
            say(f"--exclude-suspects: no node stands out in {', '.join(map(str, places))}")
            return options
        nodes = [
            node
            for node in list_nodes(partition=options.partition or "")
            if options.partition or any(name.endswith("*") for name in node.partitions)
        ]
        excluded = expand_hosts(options.exclude) if options.exclude else []
        exclusion = choose_exclusion(
            suspects,
            partition=[node.name for node in nodes],
            available=[node.name for node in nodes if node.is_available],
            least=least_nodes(options) or 1,
            excluded=excluded,
            wanted=expand_hosts(options.nodelist) if options.nodelist else (),
        )
    except AllranksError as exc:  # the job is submitted all the same: it ran without this knowledge before
        say(f"--exclude-suspects: nobody is excluded: {exc}")
        return options
    for line in exclusion.lines:
        say(line)
    if not exclusion.nodes:
        return options
    return replace(options, exclude=fold_hosts([*excluded, *exclusion.nodes]))

"""What users write, and what a run leaves on disk: how it is read."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from allranks.model.errors import AllranksError
from allranks.model.finding import Verdict
from made_run import HANG, make_run

from .door import SEEDS, Door, assert_harmless


def read_cluster_file(folder: Path) -> Callable[[bytes], object]:
    from allranks.config.file import read_cluster

    path = folder / "cluster.toml"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return read_cluster(path)

    return read


def read_hostlist(text: str) -> object:
    from allranks.model.hostlist import expand_hosts, fold_hosts

    hosts = expand_hosts(text)
    assert expand_hosts(fold_hosts(hosts)) == hosts or not hosts
    return hosts


def read_environment(data: bytes) -> object:
    from allranks.model.identity import world_from_env

    env = dict(
        line.split("=", 1) for line in data.decode(errors="replace").replace("\0", "").splitlines() if "=" in line
    )
    return world_from_env(env)


def run_file(name: str) -> Door:
    """Return how a file of a run directory is read: as `list`, `status`, `logs`, `clean` and the agents do."""

    def begin(folder: Path) -> Callable[[bytes], object]:
        from allranks.launch.batch.clean import checkpoint_places
        from allranks.launch.queue.scheduler import read_culprits
        from allranks.model.membership import read_members
        from allranks.preflight.meeting import find_announcement, read_secret
        from allranks.report.growth import read_growth
        from allranks.report.history import describe_restarts
        from allranks.report.remains import last_words
        from allranks.report.rundir import RunDir, read_shared_members
        from allranks.report.runs import find_run, list_runs
        from allranks.report.text import Style, render_findings

        run = folder / "runs/7"
        shutil.copytree(SEEDS / "run", run)
        run_dir = RunDir(folder / "runs", "7")
        run_dir.create()
        run_dir.create_attempt(0)
        path = run / name
        (run / "secret").chmod(0o600)

        def read(data: bytes) -> object:
            path.write_bytes(data)
            found = find_run("7", folder / "runs")
            assert found is not None
            assert [each.name for each in list_runs(folder / "runs")] == ["7"]
            describe_restarts(found.restarts, allowed=found.max_restarts)
            if found.verdict is not None:
                assert_harmless(render_findings(found.verdict.findings, Style(True, False, 100)))
                found.verdict.to_json()
            run_dir.read_events()
            find_announcement(run_dir)
            read_culprits(run_dir)
            growth = read_growth(run / "attempt_0/n1")
            [(each.time_of(5), each.size_at(2e9)) for each in growth.values()]
            checkpoint_places(run)
            last_words(run / "attempt_0")
            with contextlib.suppress(AllranksError):
                read_members(read_shared_members(f"@{run}/attempt_0/n1/members"))
            if name == "secret":
                return read_secret(run_dir)
            return found

        return read

    return begin


PAGE_VERDICT = Verdict(job="4711", attempt=0, exit_code=1, findings=(HANG,))


def page_file(name: str) -> Door:
    """Return how a file of a run directory gets into its report."""

    def begin(folder: Path) -> Callable[[bytes], object]:
        from allranks.report.page import render
        from allranks.report.page_data import read_page

        run = make_run(folder, verdict=PAGE_VERDICT, num_values=20)

        def read(data: bytes) -> object:
            (run / name).write_bytes(data)
            page = read_page(run)
            assert_harmless(render(page))
            return page.outcome

        return read

    return begin


def page_seed(name: str) -> Callable[[], list[bytes]]:
    """Return what `page_file` begins with."""

    def read() -> list[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            return [(make_run(Path(folder), verdict=PAGE_VERDICT, num_values=20) / name).read_bytes()]

    return read

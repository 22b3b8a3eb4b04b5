"""Outcome, restarts and goodput of a run, where its training logs: W&B, MLflow, TensorBoard. On rank 0.

    trackers = Trackers(log)          # what `track(log=)` was given
    trackers.tell("finished", step)

    allranks/outcome     running, finished, stopped (it was asked to save and leave), ended, failed (with the exception)
    allranks/restarts    of this attempt of the job
    allranks/goodput     of the job so far, by the leader's ledger, which is up to 6 s old; it is called
                         allranks/goodput_at_most where it is a bound

W&B gets them as values of the summary of its active run, MLflow as metrics and a tag of its active run, and a
SummaryWriter as scalars and a text. No library is imported for it: one that the training has not imported logs nothing.

The outcome is that of this rank's session. A rank that is killed leaves `running` behind, and the next generation goes
on there: nobody else could write into the training's own run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.host.threads import start_thread
from allranks.report.text import one_line, say

if TYPE_CHECKING:
    from allranks.model.job_status import JobStatus

OUTCOME, RESTARTS, GOODPUT = "allranks/outcome", "allranks/restarts", "allranks/goodput"
LIMIT_S = 5.0
"""How long a server of MLflow that does not answer delays the training, at its beginning and at its end."""

Values = Mapping[str, Any]


class Trackers:
    """Where one training logs.

    Args:
        log: as for `Session.track`.
        status: returns what the leader says of the job, or None; tests have their own.
    """

    def __init__(self, log: Any, *, status: Callable[[], JobStatus | None] | None = None) -> None:
        self._log, self._status = log, status or own_status
        self._outcome = ""
        self._failing: set[str] = set()
        """Libraries that are not tried again."""

    def tell(self, outcome: str, step: int) -> None:
        """Write the values, if the outcome has changed; raises nothing.

        Args:
            step: how many are done.
        """
        if outcome == self._outcome:
            return
        self._outcome = outcome
        problems = dict[str, str]()
        try:
            # Here, and not in the thread: MLflow's active run is one of a thread.
            found = [*find_writes(self._log, sys.modules)]
            writes = [(name, put) for name, put in found if name not in self._failing]
            values = {OUTCOME: outcome, **describe(self._status(), os.environ)} if writes else {}
        except Exception as exc:  # whatever the library has
            writes, problems["what the training logs to"] = [], f": {_words(exc)}"

        done = list[str]()

        def write() -> None:
            for name, put in writes:
                try:
                    put(values, step)
                except Exception as exc:  # whatever the library, or its server, has
                    problems[name] = f": {_words(exc)}"
                done.append(name)

        if writes:
            thread = start_thread(write, name="allranks-trackers")
            if thread is not None:
                thread.join(LIMIT_S)
            if thread is None or thread.is_alive():
                late = [name for name, _ in writes[len(done) :]] or done[-1:]
                problems.setdefault(late[0], f" within {LIMIT_S:.0f} s")
        for name, why in [*problems.items()]:
            if name not in self._failing:
                say(f"{name} did not take {OUTCOME}{why}")
                self._failing.add(name)


def _words(error: Exception) -> str:
    return one_line(str(error) or repr(error))[:200]


def own_status() -> JobStatus | None:
    """Return what the leader of this process's run says; None: there is none, or it is another node's file."""
    attempt = os.environ.get("ALLRANKS_ATTEMPT_DIR")
    if not attempt or "ALLRANKS_AGENT_PID" not in os.environ:
        return None
    from allranks.report.runs import read_job_status  # 0.1 s, which only a training that logs needs

    return read_job_status(Path(attempt).parent)


def describe(status: JobStatus | None, env: Mapping[str, str]) -> dict[str, float]:
    """Return restarts and goodput, as far as they are known."""
    count = env.get("TORCHELASTIC_RESTART_COUNT", "")
    restarts, ledger = int(count) if count.isdecimal() else 0, status.ledger if status is not None else None
    if status is None or ledger is None:
        return {RESTARTS: restarts}
    found: dict[str, float] = {RESTARTS: max(restarts, status.num_restarts)}
    if (goodput := ledger.goodput) is not None:
        found[f"{GOODPUT}_at_most" if ledger.is_async else GOODPUT] = round(goodput, 4)
    return found


def find_writes(log: Any, modules: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Values, int], None]]]:
    """Return what takes the values, with the name of its library.

    Args:
        log: as for `Session.track`.
        modules: sys.modules.
    """
    if hasattr(log, "add_scalar"):
        yield "TensorBoard", partial(_write_board, log)
    wandb = modules.get("wandb")
    runs: list[Any] = [getattr(wandb, "run", None), getattr(log, "run", None), log if log is not wandb else None]
    active = {id(run): run for run in runs if hasattr(run, "summary") and not getattr(run, "_is_finished", False)}
    for run in active.values():
        yield "W&B", partial(_write_summary, run.summary)
    mlflow = modules.get("mlflow")
    if mlflow is not None and hasattr(mlflow, "active_run") and (run := mlflow.active_run()) is not None:
        yield "MLflow", partial(_write_mlflow, mlflow.MlflowClient(), run.info.run_id)


def _write_summary(summary: Any, values: Values, _step: int) -> None:
    summary.update(dict(values))


def _write_board(board: Any, values: Values, step: int) -> None:
    for name, value in values.items():
        add = board.add_text if isinstance(value, str) else board.add_scalar
        add(name, value, step)
    board.flush()


def _write_mlflow(client: Any, run_id: str, values: Values, step: int) -> None:
    for name, value in values.items():
        if isinstance(value, str):
            client.set_tag(run_id, name, value)
        else:
            client.log_metric(run_id, name, value, step=step)

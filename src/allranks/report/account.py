"""What has a job done, and where did its time go? The last lines of `allranks run`, and the losses in `status`. Pure.

    goodput 91 % in 2 h 14 min; lost: 4.0 % waiting, most for rank 5 on node03; 2.0 % saving; 1.2 % starting
    1 restart cost 1 min 12 s (AR407 dead-rank on node03): 35 s until the first new step, 50 steps again in 37 s
    12 checkpoints, the last one at step 10,000; saving held training up for 35 s
    train.py succeeded: 16 ranks, 2 h 14 min, 1 restart, step 10,000, 5.4 it/s; output in runs/latest/attempt_0

A job of which no optimizer step was seen gets the last line only.
"""

from __future__ import annotations

from allranks.model.job_status import JobStatus
from allranks.model.ledger import Category, Ledger, LostTime, RestartCost
from allranks.report.status_line import describe_rate, describe_step
from allranks.report.text import count_of, describe_time, one_line

MOST_LOSSES = 3
MIN_REDO_S = 0.05
"""Lost steps that take less time are not worth a word."""
MIN_SHARE = 0.005
"""A smaller loss is not worth a word."""
WORDS = {
    Category.START: "starting",
    Category.WAIT: "waiting",
    Category.TRANSFER: "transferring",
    Category.DATA: "loading data",
    Category.EVAL: "evaluating",
    Category.SAVE: "saving",
    Category.RESTART: "restarting",
    Category.REDO: "in steps that were lost",
    Category.QUEUE: "in SLURM's queue",
    Category.END: "ending",
    Category.UNKNOWN: "not known",
}
"""What a rank did in the time that is lost."""


def describe_account(status: JobStatus | None) -> list[str]:
    """Return where the time of a job went, in at most three lines; none where no step was seen."""
    ledger = status.ledger if status is not None else None
    if status is None or ledger is None or not ledger.is_steps_seen:
        return []
    return [
        *filter(
            None, [describe_goodput(ledger), _describe_restarts(ledger, status), _describe_checkpoints(ledger, status)]
        )
    ]


def describe_end(
    name: str,
    status: JobStatus | None,
    *,
    exit_code: int,
    num_ranks: int,
    took_s: float,
    num_restarts: int,
    output: str,
) -> str:
    """Return the last line: `train.py succeeded: 2 ranks, 3 min 20 s, step 120, 5.4 it/s; output in runs/7/attempt_0`.

    Args:
        name: of the script.
        num_ranks: of the last generation.
        took_s: from the start of the workers to their end.
        output: where it is, from launch.lead.summary.
    """
    outcome = f"failed (exit {exit_code})" if exit_code else "succeeded"  # the words of other launchers are evidence
    restarts = count_of(num_restarts, "restart") if num_restarts else ""
    progress = describe_progress(status) if status is not None else []
    facts = filter(None, [count_of(num_ranks, "rank"), describe_time(took_s), restarts, *progress])
    return f"{name} {outcome}: {', '.join(facts)}; {output}"


def describe_progress(status: JobStatus) -> list[str]:
    """Return the last step, and the usual rate, as far as they are known."""
    rates = sorted(rate for rate in status.rates if rate > 0)
    rate = rates[len(rates) // 2] if rates else status.steps_per_s
    return [*filter(None, [describe_step(status), describe_rate(rate) if rate else ""])]


def describe_goodput(ledger: Ledger) -> str:
    """Return the goodput, and the largest losses with those to whom they are owed."""
    if ledger.goodput is None:
        return "no optimizer step was seen, so goodput is not known"
    losses = "; ".join(describe_losses(ledger))
    at_most = "at most " if ledger.is_async else ""
    of = describe_time(max(0.0, ledger.until_s - ledger.begun_s))
    return f"goodput {at_most}{share_text(ledger.goodput)} in {of}" + (f"; lost: {losses}" if losses else "")


def describe_losses(ledger: Ledger) -> list[str]:
    """Return the largest losses, `4.0 % waiting, most for rank 5 on node03`."""
    told = [loss for loss in ledger.losses if loss.rank_s >= MIN_SHARE * ledger.rank_s > 0]
    return [_describe_loss(loss, ledger.rank_s) for loss in told[:MOST_LOSSES]]


def share_text(share: float) -> str:
    """Return a share as `4.0 %` or `91 %`."""
    return f"{100 * share:.{1 if share < 0.0995 else 0}f} %"


def _describe_loss(loss: LostTime, rank_s: float) -> str:
    about = "about " if loss.is_estimated else ""
    text = f"{about}{share_text(loss.rank_s / rank_s)} {WORDS.get(loss.category, loss.category)}"
    if not loss.ranks:
        return text
    where = f" on {one_line(loss.nodes[0])}" if loss.nodes else ""
    if loss.waited_s:
        return f"{text}, of which {share_text(loss.waited_s / rank_s)} waiting for rank {loss.ranks[0]}{where}"
    return f"{text}, most {'for' if loss.category is Category.WAIT else 'by'} rank {loss.ranks[0]}{where}"


def _describe_restarts(ledger: Ledger, status: JobStatus) -> str:
    restarts = ledger.restarts
    if not restarts:
        return ""
    number = max(len(restarts), status.num_restarts)
    is_part = number > len(restarts) or any(restart.redo_s is None for restart in restarts)
    is_guessed = any(restart.is_redo_guessed for restart in restarts)
    bound = "at least " if is_part else "about " if is_guessed else ""
    head = f"{count_of(number, 'restart')} cost {bound}{describe_time(sum(map(_cost_of, restarts)))}"
    worst = max(restarts, key=_cost_of)
    why = " on ".join(filter(None, [one_line(worst.cause) or "more nodes", one_line(worst.node)]))
    if number > 1:
        return f"{head}, most {describe_time(_cost_of(worst))} ({why})"
    again = ""
    if worst.redo_s is not None and worst.redo_s >= MIN_REDO_S:
        steps = f"{count_of(worst.redo_steps, 'step')} again" if worst.redo_steps else "lost steps again"
        again = f", {steps} in {describe_time(worst.redo_s)}"
    elif worst.redo_s is None:
        again = "; how many steps it lost is not known"
    return f"{head} ({why}): {describe_time(worst.restart_s)} until the first new step{again}"


def _cost_of(restart: RestartCost) -> float:
    return restart.restart_s + (restart.redo_s or 0.0)


def _describe_checkpoints(ledger: Ledger, status: JobStatus) -> str:
    lost = (status.step or 0) - (status.checkpoint or 0) if status.is_step_of_session else 0
    if not ledger.num_checkpoints:
        return f"the last {count_of(lost, 'step')} are in no checkpoint" if lost > 1 else ""
    last = "" if status.checkpoint is None else f", the last one at step {status.checkpoint:,}"
    last += f", {count_of(lost, 'step')} before the end" if last and lost > 0 else ""
    stall = f"; saving held training up for {describe_time(ledger.save_s)}" if ledger.save_s else ""
    return f"{count_of(ledger.num_checkpoints, 'checkpoint')}{last}{stall}"

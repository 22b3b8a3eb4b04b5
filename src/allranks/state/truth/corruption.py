"""What do all ranks say of a replica that differs? One line that names the rank at fault, whoever raises it; pure.

The causes AR610 and AR611 have the same words in their signs: the guard reads from them which rank is meant, and
whether the job may be started again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from allranks.causes.book import find_cause
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.fix import ANYBODY
from allranks.model.hostlist import fold_hosts
from allranks.report.text import fold_ranks
from allranks.state.truth.odd_one import Difference, Reports, Suspects


class OnCorruption(StrEnum):
    """What becomes of the job when one replica has other bits than the rest."""

    ROLL_BACK = "roll-back"
    """It ends, and may be started again from the last checkpoint on which the replicas agreed."""
    STOP = "stop"
    """It ends, and is not started again."""
    HEAL = "heal"
    """The replica gets the bits of the others, and the training goes on."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        known = ", ".join(f'"{own}"' for own in cls)
        raise UsageError(f"track(on_corruption={value!r}): expected one of {known}")


class ReplicaError(AllranksError):
    """A rank has other bits than the rest, or computes others. All ranks raise it with the same words.

    Args:
        cause_id: AR610 or AR611.
        what: was found, in words.
        ranks: at fault; where it is not decided, one of them is.
        policy: says, with `verified`, whether the job may be started again.
        verified: steps of checkpoints on which the replicas agreed, in words: the newest, and one being written.
    """

    def __init__(
        self,
        cause_id: str,
        what: str,
        ranks: Sequence[int],
        reports: Reports,
        *,
        is_decided: bool,
        policy: OnCorruption,
        verified: Sequence[str],
    ) -> None:
        then = "not retried: there is no checkpoint on which replicas agreed"
        if policy is OnCorruption.STOP:
            then = 'not retried: on_corruption="stop"'
        elif verified:
            then = f"may go on from the checkpoint of {', or of '.join(verified)}"
        cause, nodes = find_cause(cause_id), [*dict.fromkeys(reports[rank].node for rank in ranks)]
        finding = Finding(
            cause=cause.label,
            severity=Severity.FAIL,
            confidence=Confidence.CERTAIN if is_decided else Confidence.UNDECIDED,
            node=fold_hosts(nodes),
            ranks=tuple(ranks),
            message=f"{what}; {then}",
            fix=cause.fix.tell(ANYBODY, {"node": nodes[0]} if is_decided else {}),
        )
        super().__init__(f"allranks: {finding.cause}: {finding.message}", finding=finding)
        self.exit_code = Exit.SETUP if then.startswith("not retried") else Exit.NODE_FAULT


def describe_bits(
    suspects: Suspects, count: Difference | None, reports: Reports, *, step: int, equal_step: int | None
) -> str:
    """Return what is known of replicas that differ, in words.

    Args:
        suspects: the first one stands for all.
        count: how it differs; None: its bits are gone.
        equal_step: at which all were equal the last time; None: at no check of this process.
    """
    first = suspects[0]
    what = f"{fold_ranks(first.ranks)} have different bits, and no majority tells which is wrong"
    if first.is_decided:
        others = sum(report.group == reports[first.reference].group for report in reports) - len(first.ranks)
        told = fold_ranks([first.reference]) if others == 1 else f"{others} others"
        what = f"{_name(first.ranks, reports)} {'has' if len(first.ranks) == 1 else 'have'} other bits than {told}"
    equal = "never equal before" if equal_step is None else f"equal at step {equal_step}"
    counted = f"{count.elements} of {count.of} elements" if count else "before gradients were not finite,"
    return f"{what}, in {_first_of([own.name for own in suspects])}: {counted} at step {step}, {equal}"


def describe_gradients(
    told: Sequence[Mapping[str, int]], owner: int, ranks: list[int], right: list[int], step: int, reports: Reports
) -> str:
    """Return who computed other gradients from the batch of its owner, in words.

    Args:
        told: by rank, the number of each gradient by name.
        ranks: at fault; all where nobody decides.
        right: those that agree with each other.
    """
    one = told[ranks[0]]
    other = next(told[rank] for rank in (*right, *ranks[1:]) if told[rank] != one)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    what = f"{fold_ranks(ranks)} computed different gradients, and no majority tells which are wrong,"
    if right:
        what = f"{_name(ranks, reports)} computed other gradients than {fold_ranks(right)}"
    return f"{what} from the batch of rank {owner}, in {_first_of(names)} at step {step}"


def _name(ranks: Sequence[int], reports: Reports) -> str:
    """Return ranks with their nodes and GPUs."""
    places = {own.node + f" ({own.device})" * bool(own.device): None for own in (reports[rank] for rank in ranks)}
    return f"{fold_ranks(ranks)} on {', '.join(places)}"


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} (and in {len(names) - 1} more)" if len(names) > 1 else names[0]

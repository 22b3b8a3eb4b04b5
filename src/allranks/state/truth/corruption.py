"""What do all ranks say of a replica that differs? One line that names the rank at fault, whoever raises it; pure.

The cause AR610 has the same words in its signs: the guard reads from them which rank is meant, and whether the job may
be started again. Wrong gradients (AR611, replay_pairs) become an error here, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from allranks.causes.book import find_cause
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.fix import ANYBODY
from allranks.model.hostlist import fold_hosts
from allranks.report.text import fold_ranks
from allranks.state.truth.odd_one import DifferingTensor, ReplicaReport


class OnCorruption(StrEnum):
    """What becomes of the job when one replica has other bits than the rest."""

    ROLL_BACK = "roll-back"
    """It ends, and may be started again from the last checkpoint on which the replicas agreed."""
    STOP = "stop"
    """It ends, and is not started again."""
    HEAL = "heal"
    """The replica gets the bits of the others, and the training goes on."""

    @classmethod
    def parse(cls, text: str | None) -> OnCorruption:
        """Return the policy of this name; None: the default.

        Raises:
            UsageError: there is none.
        """
        if text is None:
            return cls.ROLL_BACK
        if text not in [*cls]:
            known = ", ".join(f'"{own}"' for own in cls)
            raise UsageError(f"track(on_corruption={text!r}): expected one of {known}")
        return cls(text)


class ReplicaError(AllranksError):
    """A rank has other bits than the rest, or computes others. All ranks raise it with the same words."""

    def __init__(self, finding: Finding, *, is_retryable: bool) -> None:
        super().__init__(f"allranks: {finding.cause}: {finding.message}", finding=finding)
        self.exit_code = Exit.NODE_FAULT if is_retryable else Exit.SETUP


@dataclass(frozen=True, slots=True)
class Corruption:
    """What is known of replicas that differ."""

    suspects: Sequence[DifferingTensor]
    """Those that are decided come first; the first one stands for all."""
    counts: Mapping[str, tuple[int, int]]
    """By name, how many elements differ, of how many; without the first one where its bits are gone."""
    step: int
    equal_step: int | None
    """At which all were equal the last time; None: at no check of this process."""

    def describe(self, reports: Sequence[ReplicaReport]) -> str:
        """Return it in words."""
        suspect, count = self.suspects[0], self.counts.get(self.suspects[0].name)
        who, is_one = fold_ranks(suspect.ranks), len(suspect.ranks) == 1
        of_group = sum(report.group == reports[suspect.reference].group for report in reports)
        if suspect.is_decided:
            places = dict.fromkeys(place_of(reports[rank]) for rank in suspect.ranks)
            what = f"{who} on {', '.join(places)} {'has' if is_one else 'have'} other bits than "
            others = of_group - len(suspect.ranks)
            what += fold_ranks([suspect.reference]) if others == 1 else f"{others} others"
        else:
            what = f"{who} have different bits, and no majority tells which is wrong"
        equal = "never equal before" if self.equal_step is None else f"equal at step {self.equal_step}"
        more = f" (and in {len(self.suspects) - 1} more)" if len(self.suspects) > 1 else ""
        counted = f"{count[0]} of {count[1]} elements" if count else "before gradients were not finite,"
        return f"{what}, in {suspect.name}{more}: {counted} at step {self.step}, {equal}"


def error_that_names(
    cause_id: str,
    what: str,
    ranks: Sequence[int],
    reports: Sequence[ReplicaReport],
    *,
    is_decided: bool,
    policy: OnCorruption,
    verified: int | None,
) -> ReplicaError:
    """Return what all ranks raise.

    Args:
        ranks: at fault; where it is not decided, one of them is.
        reports: of all ranks.
        policy: says, with `verified`, whether the job may be started again.
        verified: step of the newest checkpoint on which the replicas agreed.
    """
    then = f"may go on from the checkpoint of step {verified}, or a newer one"
    if verified is None:
        then = "not retried: there is no checkpoint on which replicas agreed"
    if policy is OnCorruption.STOP:
        then = 'not retried: on_corruption="stop"'
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
    return ReplicaError(finding, is_retryable=verified is not None and policy is not OnCorruption.STOP)


def place_of(report: ReplicaReport) -> str:
    """Return the node of a rank, and its GPU."""
    return f"{report.node} ({report.device})" if report.device else report.node

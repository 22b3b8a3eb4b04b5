"""Strikes at the order of collectives: one rank calls a different one, none, or is late."""

from __future__ import annotations

import re
from typing import ClassVar

from allranks.lab.faults.fault import Expected, LabScene
from allranks.lab.faults.running.process import OrderStrike
from allranks.lab.faults.running.target import DrilledJob

MISMATCH_S = 5.0
EVALUATES_S = 60.0
LATE_S = 0.15


class MismatchStrike(OrderStrike):
    """Ranks call different collectives at the same position. A restart does not cure a script."""

    severity = Expected.FAIL
    verdict_s = MISMATCH_S


class CollectiveSkipped(MismatchStrike, name="collective-skipped", cause="AR410"):
    """One rank skips a collective, and is one ahead from then on."""

    order, has_baseline = "skip", True


class CollectivesDiffer(MismatchStrike, name="collectives-differ", cause="AR410"):
    """One rank broadcasts where the others reduce."""

    order = "other-collective"


class ShapesDiffer(MismatchStrike, name="shapes-differ", cause="AR410"):
    """One rank reduces twice as many numbers as the others."""

    order = "other-shape"


class DtypesDiffer(MismatchStrike, name="dtypes-differ", cause="AR410"):
    """One rank reduces doubles where the others reduce floats; Gloo aborts an innocent rank."""

    order = "other-dtype"


class RankEvaluates(OrderStrike, name="rank-evaluates"):
    """One rank evaluates for a minute while the others wait: it must be reported as slow, not ended."""

    severity = Expected.SURVIVED
    order, seconds, watch_s, has_baseline = "evaluate", EVALUATES_S, EVALUATES_S + 30.0, True
    guard: ClassVar = {"hang_s": 150.0}

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Check that it was named, with its place."""
        rank = target.rank_on(scene.node.name)
        line = rf"slow: rank {rank} has been in user code for \d+ s: orders\.py:\d+ in evaluate; \d+ ranks wait"
        said = (target.directory / "output.txt").read_text(errors="replace")
        return [] if re.search(line, said) else [f"no line reported rank {rank} as slow in evaluate"]


class RankLate(OrderStrike, name="rank-late", cause="AR409"):
    """One rank is 150 ms late in every step: a straggler that must be reported, never ended."""

    severity = Expected.SURVIVED
    order, seconds, does_it_again, watch_s = "late", LATE_S, True, 45.0

"""`allranks why` on whole generated jobs (benchmarks/why): the thresholds hold on 30 small ones."""

import random
from pathlib import Path

import pytest
from benchmarks.why.collectives import Deviation, Play, program_of
from benchmarks.why.faults import FAULTS
from benchmarks.why.generate import Generated, generate, generate_many
from benchmarks.why.plan import LAYOUTS, NCCL_OF_TORCH, SLURM, draw_plan
from benchmarks.why.score import Answer, Score, judge, wrong_ones
from benchmarks.why.wordings import PROGRAMS, read_wordings

NUM_JOBS = 30


@pytest.fixture(scope="module")
def jobs() -> list[Generated]:
    return list(generate_many(5000, NUM_JOBS, half="dev", is_small=True))


def test_small_jobs_are_explained(jobs: list[Generated], tmp_path: Path) -> None:
    from benchmarks.why.ours import ask

    judged = []
    for job in jobs:
        folder = tmp_path / job.name
        job.write(folder)
        judged.append(judge(job.to_json(), Answer.from_json(ask(folder))))
    score = Score.of(judged)
    wrong = [f"{one.fault} (seed {one.job})" for one in wrong_ones(judged)]
    assert score.false_certain == 0, wrong
    assert score.causes >= 0.97 * NUM_JOBS, wrong
    assert score.culprits >= 0.95 * NUM_JOBS, wrong
    assert score.said_undecided == score.undecidable, wrong


def test_a_seed_gives_the_same_job(jobs: list[Generated]) -> None:
    again = generate(jobs[0].seed, is_small=True)
    assert again.written == jobs[0].written
    assert again.to_json() == jobs[0].to_json()


def test_every_program_has_words_for_everything() -> None:
    for key, wordings in read_wordings().items():
        assert all(wording.source for wording in wordings), key
        for torch, nccls in NCCL_OF_TORCH.items():
            if (
                key in {"timeout-status", "dump-signal", "dump-end", "not-destroyed", "watchdog-stuck"}
                and torch == "2.0"
            ):
                continue  # that version does not say it
            for nccl in nccls:
                for slurm in SLURM:
                    versions = dict(zip(PROGRAMS, (torch, nccl, slurm), strict=True))
                    assert any(wording.is_of(versions) for wording in wordings), (key, versions)


def test_a_rank_that_stops_keeps_its_groups_waiting() -> None:
    rng = random.Random(1)
    plan = draw_plan(1, rng, is_small=True, launchers=("srun",), layouts=(), is_flat=True, net=None, loss="nothing")
    places = Play(plan, {1: Deviation("stop", 0)}, 100, rng).run()
    assert places[1].blocked is None
    first = program_of(plan, 0)[0]
    assert {(place.blocked.op, place.seq) for rank, place in enumerate(places) if rank != 1 and place.blocked} == {
        (first.op, 201 + 2)
    }


def test_every_fault_and_layout_occurs_and_every_truth_is_in_the_catalogue() -> None:
    from allranks.causes.book import all_causes

    names = {cause.name for cause in all_causes()}
    faults, layouts = set(), set()
    for job in generate_many(0, 150, is_small=True):
        layouts.add((job.plan.launcher, job.plan.layout))
        faults |= {truth.fault for truth in job.truths}
        assert {cause for truth in job.truths for cause in truth.causes} <= names, job.seed
    assert layouts == {(launcher, layout) for launcher, known in LAYOUTS.items() for layout in known}
    assert faults == set(FAULTS)


def _truth(**changes: object) -> dict[str, object]:
    culprit = {"level": "rank", "ranks": [3], "nodes": ["n2"], "addresses": ["10.0.0.2"], "pids": [77]}
    fault = {"fault": "sigkill", "causes": ["dead-rank"], "is_cause_decidable": True, "may_be_certain": True}
    return {"job": "job", "faults": [{**fault, "culprit": culprit, **changes}]}


@pytest.mark.parametrize(
    ("changes", "answer", "cause", "culprit", "false_certain"),
    [
        ({}, {"cause": "dead-rank", "confidence": "certain", "ranks": [3], "nodes": ["n2"]}, True, True, False),
        ({}, {"cause": "dead-rank", "confidence": "likely", "pids": [77]}, True, True, False),
        ({}, {"cause": "dead-rank", "confidence": "likely", "nodes": ["n2"]}, True, False, False),
        ({}, {"cause": "dead-rank", "confidence": "certain", "ranks": [3, 4]}, True, False, True),
        ({}, {"cause": "cuda-oom", "confidence": "certain", "ranks": [3]}, False, True, True),
        ({}, {"cause": None}, False, False, False),
        ({"may_be_certain": False}, {"cause": "dead-rank", "confidence": "certain", "ranks": [3]}, True, True, True),
        ({"is_cause_decidable": False}, {"cause": "ib-link-error", "confidence": "undecided"}, True, True, False),
        (
            {"is_cause_decidable": False},
            {"cause": "ib-link-error", "confidence": "likely", "ranks": [3]},
            False,
            True,
            False,
        ),
    ],
)
def test_an_answer_is_judged_by_cause_culprit_and_confidence(
    changes: dict[str, object], answer: dict[str, object], cause: bool, culprit: bool, false_certain: bool
) -> None:
    judged = judge(_truth(**changes), Answer.from_json(answer))
    assert (judged.is_cause_right, judged.is_culprit_right, judged.is_false_certain) == (cause, culprit, false_certain)


def test_what_is_lost_makes_the_truth_weaker() -> None:
    kept, lost = set(), set()
    for job in generate_many(0, 150, is_small=True):
        if job.truths[0].fault == "cuda-oom":
            (kept if job.plan.loss == "nothing" else lost).add(job.truths[0].causes)
    assert kept == {("cuda-oom",)}
    assert ("cuda-oom", "user-code-error", "dead-rank") in lost

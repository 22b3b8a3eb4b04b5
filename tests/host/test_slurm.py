"""Is SLURM's output read right, also what a newer version or an odd site makes of it?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.host.slurm import (
    NodeState,
    Trial,
    find_jobs,
    find_old_jobs,
    list_jobs,
    parse_job_id,
    parse_sacct,
    parse_show_job,
    parse_sinfo,
    parse_squeue,
    parse_trial,
    try_script,
)
from allranks.model.errors import SetupError, UsageError
from fake_slurm import FakeSlurm, fake_slurm, show_job  # noqa: F401  (a fixture)

F = "\x1f"


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("4711\n", "4711"),
        ("4711;north\n", "4711"),
        ("Welcome to site X, 2026\n----\n4711\n", "4711"),
        ("12 jobs are waiting\n99\n4711;c1\nyour budget: 3 h\n", "4711"),
    ],
)
def test_the_id_is_the_last_line_that_looks_like_one(text: str, job: str) -> None:
    assert parse_job_id(text) == job


def test_no_id_is_an_error_with_what_was_printed() -> None:
    with pytest.raises(SetupError, match="got 'queued'; see squeue"):
        parse_job_id("queued")


def test_a_trial_says_when_and_where() -> None:
    text = "sbatch: Job 1 to start at 2026-11-21T03:16:17 using 2 processors on nodes n[01-02] in partition main"
    assert parse_trial(text) == Trial(start="2026-11-21T03:16:17", nodes="n[01-02]")
    assert parse_trial("sbatch: looks good") == Trial()


def row(**changes: str) -> str:
    fields = {
        "id": "12", "state": "RUNNING", "reason": "None", "num_nodes": "2", "nodes": "node[01-02]",
        "partition": "main", "user": "ada", "start": "2026-11-21T03:16:18", "end": "2026-11-21T05:16:18",
        "time_limit": "2:00:00", "elapsed": "0:02", "work_dir": "/home/ada", "name": "a | b c=d",
    }  # fmt: skip
    return F.join((fields | changes).values()) + "\n"


def test_squeue_lines_with_any_name_are_read() -> None:
    (job,) = parse_squeue(row())
    assert (job.id, job.state, job.name, job.num_nodes, job.reason) == ("12", "RUNNING", "a | b c=d", 2, "")


def test_a_banner_is_no_job() -> None:
    assert [job.id for job in parse_squeue("Maintenance on Friday!\n" + row() + "\n")] == ["12"]


def test_arrays_have_ids_of_their_own() -> None:
    jobs = parse_squeue(row(id="14_[0-20%2]", state="PENDING", reason="Resources", start="N/A") + row(id="14_3"))
    assert [job.id for job in jobs] == ["14_[0-20%2]", "14_3"]
    assert jobs[0].is_pending
    assert jobs[0].start == ""


def test_a_state_nobody_has_heard_of_stays_as_it_is() -> None:
    (job,) = parse_squeue(row(state="HIBERNATING", reason="Moonphase"))
    assert (job.state, job.reason, job.is_finished, job.is_pending) == ("HIBERNATING", "Moonphase", False, False)


def test_details_are_not_misled_by_the_user_s_words() -> None:
    (job,) = parse_show_job(show_job("5", name="a | b c=d JobState=X", work="/tmp/my dir=1"))
    assert (job.id, job.name, job.state, job.user) == ("5", "a | b c=d JobState=X", "RUNNING", "ada")
    assert (job.work_dir, job.out) == ("/tmp/my dir=1", "/tmp/my dir=1/slurm-5.out")
    assert (job.exit_code, job.signal, job.restarts, job.nodes) == (0, None, 0, "node[01-02]")


def test_the_tasks_of_an_array_come_in_order() -> None:
    records = "".join(
        show_job(f"{20 + task} ArrayJobId=6 ArrayTaskId={task}").replace("JobId=30 ", "JobId=6 ")
        for task in ("10", "2", "1")
        for task in [int(task)]
    ) + show_job("6 ArrayJobId=6 ArrayTaskId=11-20%2", state="PENDING", start="Unknown")
    assert [job.id for job in parse_show_job(records)] == ["6_1", "6_2", "6_10", "6_[11-20%2]"]


def test_parts_of_a_heterogeneous_job_have_ids_of_their_own() -> None:
    (part,) = parse_show_job(show_job("21 HetJobId=20 HetJobOffset=1"))
    assert (part.id, part.number) == ("20+1", "21")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Resources", "Resources"),
        ("None", ""),
        ("ReqNodeNotAvail,_UnavailableNodes:my_node", "ReqNodeNotAvail, UnavailableNodes:my_node"),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved",
            "Nodes required for job are DOWN, DRAINED or reserved",
        ),
        ("Nodes required for job are DOWN, DRAINED", "Nodes required for job are DOWN, DRAINED"),
    ],
)
def test_reasons_are_read_with_and_without_blanks(said: str, meant: str) -> None:
    assert parse_show_job(show_job(state="PENDING", reason=said))[0].reason == meant


def test_exit_codes_and_signals_are_told_apart() -> None:
    (job,) = parse_show_job(show_job(state="FAILED", code="75:0"))
    assert (job.exit_code, job.signal) == (75, None)
    (job,) = parse_show_job(show_job(state="CANCELLED", code="0:15"))
    assert (job.exit_code, job.signal) == (0, 15)


@pytest.mark.parametrize(
    ("said", "state", "reason"),
    [
        ("CANCELLED by 1000", "CANCELLED", "by 1000"),
        ("CANCELLED+", "CANCELLED", ""),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", ""),
        ("HIBERNA+", "HIBERNA+", ""),
    ],
)
def test_accounting_cuts_states_and_adds_to_them(said: str, state: str, reason: str) -> None:
    line = F.join(["6_1", said, "1:0", "2", "n[1-2]", "s", "e", "00:01:20", "2:00:00", "main", "ada", "/h", "a b"])
    (job,) = parse_sacct(line)
    assert (job.id, job.state, job.reason, job.exit_code, job.name) == ("6_1", state, reason, 1, "a b")


def test_a_node_in_two_partitions_is_one_node() -> None:
    text = "".join(
        F.join(row) + "\n"
        for row in (
            ("n1", "idle", "none", "gpu", "gpu:a100:4(S:0-1),gpu:t4:2,nic:1"),
            ("n2", "down*", "bad NIC, see T-12", "main*", "(null)"),
            ("n1", "idle", "none", "main*", "gpu:a100:4(S:0-1),gpu:t4:2,nic:1"),
        )
    )
    assert parse_sinfo(text) == (
        NodeState("n1", "idle", "", ("gpu", "main*"), 6),
        NodeState("n2", "down*", "bad NIC, see T-12", ("main*",)),
    )


@pytest.mark.parametrize(("resources", "num_gpus"), [("gpu:8", 8), ("shard:gpu:3", 0), ("gpu:(S:0)", 0)])
def test_gpus_in_slurm_s_words(resources: str, num_gpus: int) -> None:
    (node,) = parse_sinfo(F.join(("n1", "idle", "none", "main*", resources)))
    assert node.num_gpus == num_gpus


@pytest.mark.parametrize(
    ("state", "is_available"), [("idle~", True), ("MIXED", True), ("drained*", False), ("x", False)]
)
def test_only_known_states_are_available(state: str, is_available: bool) -> None:
    assert NodeState("n1", state, "").is_available is is_available


def test_a_job_the_controller_has_forgotten_is_none(slurm: FakeSlurm) -> None:
    assert find_jobs("99") == ()
    assert find_old_jobs("99") == ()


def test_other_errors_keep_slurm_s_words(slurm: FakeSlurm) -> None:
    slurm.answer(
        "scontrol", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", code=1
    )
    with pytest.raises(SetupError, match=r"^scontrol: .*Unable to contact slurm controller \(connect failure\)$"):
        find_jobs("12")


def test_the_user_s_own_view_does_not_filter_ours(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    (tmp_path / "mine.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "mine.conf"))
    list_jobs("ada")
    (call,) = slurm.calls("squeue")
    assert {name for name in call["env"] if name.startswith(("SQUEUE", "SLURM"))} == {"SLURM_CONF"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name", UsageError),
        ("sbatch: unrecognized option '--foo=1'\nTry \"sbatch --help\" for more information", UsageError),
        ("sbatch: error: Invalid --time specification", UsageError),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", SetupError),
        ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: violates", SetupError),
    ],
)
def test_a_wrong_value_is_usage_and_a_refusal_is_not(slurm: FakeSlurm, words: str, error: type[Exception]) -> None:
    slurm.answer("sbatch", err=words, code=1)
    with pytest.raises(error) as caught:
        try_script("#!/bin/bash\n", env={"PATH": str(slurm.bin)})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("sbatch: ")


def test_a_missing_program_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SetupError, match=r"scontrol: not found on this machine; .*load the slurm module, or log in"):
        find_jobs("12")

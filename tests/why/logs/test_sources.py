"""Which files are logs, and whose: names that launchers give, and directories as jobs leave them behind."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.fake_slurm import FakeSlurm, fake_slurm, show_job  # noqa: F401

from allranks.host.slurm import JobState
from allranks.model.errors import SetupError, UsageError
from allranks.why.logs.job_files import expand_pattern, find_job_sources, find_outputs
from allranks.why.logs.log_path import read_path
from allranks.why.logs.read import ReadProblem, read_chunks
from allranks.why.logs.sources import find_sources, is_job_id, list_jobs

PATHS = [
    # path, node, rank, local rank, attempt
    ("runs/4711/attempt_0/node03/rank_1.err", "node03", 1, None, 0),
    ("runs/4711/attempt_2/odd-name/rank_12.out", "odd-name", 12, None, 2),
    ("runs/4711/attempt_2/verdict.json", None, None, None, 2),
    ("/tmp/logs/none_x1/attempt_0/3/stderr.log", None, None, 3, 0),
    ("/tmp/logs/none_x1/attempt_1/3/error.json", None, None, 3, 1),
    ("rank_3.err", None, 3, None, None),
    ("rank3.log.gz", None, 3, None, None),
    ("train-rank-3.log", None, 3, None, None),
    ("train_rank_3.log", None, 3, None, None),
    ("log.rank.3", None, 3, None, None),
    ("20231002083608_rank11.log", None, 11, None, None),
    ("out/rank.03/stdout", None, 3, None, None),
    ("global_rank_3.log", None, 3, None, None),
    ("GLOBALRANK3.log", None, 3, None, None),
    ("4711_3_log.out", None, 3, None, None),
    ("4711_2_0_log.err", None, 0, None, None),
    ("local_rank_3.log", None, None, 3, None),
    ("localrank3.log", None, None, 3, None),
    ("node03/local_rank_3.log", "node03", None, 3, None),
    ("node03.log", "node03", None, None, None),
    ("slurm-123_node03.out", "node03", None, None, None),
    ("slurm-123-node03-rank_5.out", "node03", 5, None, None),
    ("slurmd.node03.log", "node03", None, None, None),
    ("train_nid006900.out", "nid006900", None, None, None),
    ("a100-node-3.log", "a100-node-3", None, None, None),
    ("gpu-12.log", "gpu-12", None, None, None),
    ("ip-10-0-0-3.log", "ip-10-0-0-3", None, None, None),
    ("10.0.0.3.log", "10.0.0.3", None, None, None),
    ("bert-worker-3.log", "bert-worker-3", None, None, None),
    ("llm-worker-0_default_pytorch-12ab.log", "llm-worker-0", None, None, None),
    ("node_1/stderr.log", "node_1", None, None, None),
    # no rank, no node
    ("slurm-4711_3.out", None, None, None, None),
    ("slurm-4711.out", None, None, None, None),
    ("node_rank_1.log", None, None, None, None),
    ("tp_rank_1.log", None, None, None, None),
    ("mp_rank_00_model.log", None, None, None, None),
    ("frank_3.log", None, None, None, None),
    ("frank3.log", None, None, None, None),
    ("rank_99999999.log", None, None, None, None),
    ("gpu0.log", None, None, None, None),
    ("epoch3.log", None, None, None, None),
    ("compute-2024-01-01/train.log", None, None, None, None),
    ("worker-1f3a9b-01000000-24271.out", None, None, None, None),
    ("rank_3/a/b/c/train.log", None, None, None, None),
]


@pytest.mark.parametrize(("path", "node", "rank", "local_rank", "attempt"), PATHS, ids=[case[0] for case in PATHS])
def test_whose_a_file_is(
    path: str, node: str | None, rank: int | None, local_rank: int | None, attempt: int | None
) -> None:
    assert read_path(path) == (node, rank, local_rank, attempt)


@given(st.text(max_size=80))
def test_any_path_is_read(path: str) -> None:
    read_path(path)


def put(top: Path, *names: str, data: bytes = b"x\n") -> None:
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def shown(*targets: str | Path) -> list[str]:
    return [source.shown for source in find_sources([str(target) for target in targets])]


def test_a_directory_gives_its_logs_in_the_order_of_numbers(tmp_path: Path) -> None:
    put(tmp_path, "rank_10.err", "rank_2.err", "a/b/rank_1.log.gz", "empty.log")
    put(tmp_path, "empty.log", data=b"")
    assert shown(tmp_path) == ["empty.log", "rank_2.err", "rank_10.err", "a/b/rank_1.log.gz"]
    assert [source.rank for source in find_sources([str(tmp_path)])] == [None, 2, 10, 1]
    assert [source.size for source in find_sources([str(tmp_path)])] == [0, 2, 2, 2]


def test_what_is_no_log_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "model.pt", "a.png", "train.py", "config.yaml", ".hidden", ".git/x.log", "wandb/x.log", "job.sh")
    put(tmp_path, "events.out.tfevents.1.node03", data=b"\x18" + bytes(7) + b"brain.Event:2")
    put(tmp_path, "tokenizer.json", "data.jsonl", "secret", "leader.json", "env.json")
    put(tmp_path, "core.12", data=b"\x7fELF" + bytes(100))
    put(tmp_path, "blob.log", data=b"some\0thing")
    put(tmp_path, "nccl_trace_rank_3", data=pickle.dumps({"version": "2.10", "entries": []}))
    put(tmp_path, "trace_rank_4", data=b'{"version":"2.10","nccl_version":"2.27.3","pg_config":{}}')
    put(tmp_path, "old.tar.gz", data=gzip.compress(b"a" + bytes(600)))
    os.mkfifo(tmp_path / "pipe.log")
    put(tmp_path, "rank_1.error.json", "events.jsonl", "0/error.json", "app.log.jsonl", "verdict.json")
    assert shown(tmp_path) == ["app.log.jsonl", "events.jsonl", "rank_1.error.json", "verdict.json", "0/error.json"]


def test_utf16_and_a_hole_of_zeros_are_text(tmp_path: Path) -> None:
    put(tmp_path, "a.log", data="\ufeffx".encode("utf-16-le"))
    put(tmp_path, "b.log", data=bytes(100) + b"after the log was cut\n")
    put(tmp_path, "c.out", data=bytes(9000))
    put(tmp_path, "d.zst", data=zstandard.compress(b"x\n"))
    put(tmp_path, "e", data=bytes(9000))
    assert shown(tmp_path) == ["a.log", "b.log", "c.out", "d.zst"]


def test_the_same_file_counts_once_and_loops_end(tmp_path: Path) -> None:
    put(tmp_path, "4711/rank_0.err", "4711/rank_1.err")
    (tmp_path / "latest").symlink_to("4711")
    (tmp_path / "4711/loop").symlink_to("..")
    (tmp_path / "alias.log").symlink_to("4711/rank_0.err")
    (tmp_path / "broken.log").symlink_to("nowhere")
    (tmp_path / "itself.log").symlink_to("itself.log")
    os.link(tmp_path / "4711/rank_1.err", tmp_path / "4711/rank_1_copy.err")
    found = shown(tmp_path)
    assert len(found) == 2
    assert shown(tmp_path / "4711", tmp_path / "4711/rank_0.err") == [
        str(tmp_path / "4711/rank_0.err"), str(tmp_path / "4711/rank_1.err"),
    ]  # fmt: skip
    assert shown("-", "-") == ["-"]


def test_a_linked_directory_is_followed(tmp_path: Path) -> None:
    put(tmp_path, "far/rank_0.err", "here/train.log")
    (tmp_path / "here/far").symlink_to("../far")
    assert shown(tmp_path / "here") == ["train.log", "far/rank_0.err"]


def test_patterns_and_names_that_look_like_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "rank_10.err", "rank_2.err", "odd [1]\n.log", "x/y/rank_3.err", "model.pt")
    assert shown("rank_*.err") == ["rank_2.err", "rank_10.err"]
    assert shown("x/*/*.err") == ["x/y/rank_3.err"]
    assert shown("odd [1]\n.log") == ["odd [1]\n.log"]
    assert shown("x", "rank_2.err") == ["x/y/rank_3.err", "rank_2.err"]


def test_files_have_their_own_names_where_links_come_first(tmp_path: Path) -> None:
    put(tmp_path, "a/steps.log", "node01/rank_3.err", "node01/rank_4.err")
    (tmp_path / "a_node").symlink_to("node01")
    (tmp_path / "node01/latest.err").symlink_to("rank_4.err")
    assert shown(tmp_path) == ["a/steps.log", "node01/rank_3.err", "node01/rank_4.err"]


NO_LOG = "contains no log; expected text, plain or compressed with gzip or zstd"


def test_a_pipe_may_be_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    assert shown(tmp_path / "p") == [str(tmp_path / "p")]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("none.log", "none.log: no such file or directory; expected logs, a directory, a pattern, '-' or a job id"),
        ("*.log", "*.log: no file matches this pattern"),
        ("**/*.log", "**/*.log: ** is no pattern here; name a directory, all logs below it are read"),
        ("model.pt", f"model.pt: {NO_LOG}"),
        ("d", f"d: {NO_LOG}; in a directory, code and hidden files are skipped"),
        ("broken", "broken: No such file or directory"),
    ],
)
def test_a_target_without_logs_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "d/train.py")
    put(tmp_path, "model.pt", data=b"PK\3\4" + bytes(100))
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(UsageError) as info:
        find_sources([target])
    assert str(info.value) == message


def test_code_that_is_named_is_read(tmp_path: Path) -> None:
    put(tmp_path, "pasted.md")
    assert len(find_sources([str(tmp_path / "pasted.md")])) == 1


# --- SLURM ------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="home")
def home_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(job: str) -> list[str]:
    return [source.shown for source in find_job_sources(job)]


def test_a_job_s_files_and_run_directory_as_the_controller_knows_them(slurm: FakeSlurm, home: Path) -> None:
    slurm.answer("scontrol", "show job 12", out=show_job(work=home))
    put(home, "slurm-12.out", "slurm-13.out", "runs/12/attempt_0/node01/rank_0.err", "runs/12/secret")
    assert names("12") == ["slurm-12.out", "runs/12/attempt_0/node01/rank_0.err"]
    assert names("12.0") == names("12")


def test_files_of_steps_come_from_the_script(slurm: FakeSlurm, home: Path) -> None:
    slurm.answer("scontrol", "show job 12", out=show_job(work=home))
    put(
        home, "a.sh", data=b"#!/bin/sh\n#SBATCH --output=slurm-%j.out\nsrun --output='logs/%j_%t_log.out' python t.py\n"
    )
    put(home, "slurm-12.out", "logs/12_0_log.out", "logs/12_10_log.out", "logs/12_9_log.out", "logs/13_0_log.out")
    assert names("12") == ["slurm-12.out", "logs/12_0_log.out", "logs/12_9_log.out", "logs/12_10_log.out"]
    assert [source.rank for source in find_job_sources("12")] == [None, 0, 9, 10]


def row(*fields: str) -> str:
    return "\x1f".join(fields) + "\n"


def old_job(home: Path, job: str = "12") -> str:
    return row(job, "FAILED", "1:0", "2", "node[01-02]", "", "", "00:01:00", "", "main", "ada", str(home), "train")


def test_a_job_of_accounting_has_patterns(slurm: FakeSlurm, home: Path) -> None:
    slurm.answer("sacct", "-o JobID", out=old_job(home))
    slurm.answer("sacct", "StdOut", out=row("logs/%x-%j.out", "logs/%x-%j.%N.err") + row("", ""))
    put(home, "logs/train-12.out", "logs/train-12.node01.err", "logs/other-12.out", "logs/train-13.out")
    assert names("12") == ["logs/train-12.out", "logs/train-12.node01.err"]


def test_all_tasks_of_an_array(slurm: FakeSlurm, home: Path) -> None:
    slurm.answer("sacct", "-o JobID", out=old_job(home, "6_1") + old_job(home, "6_2"))
    slurm.answer("sacct", "StdOut", out=row("%A_%a.out", "%A_%a.out"))
    put(home, "6_1.out", "6_2.out", "6_3.out")
    assert names("6") == ["6_1.out", "6_2.out"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_job_that_slurm_has_forgotten_is_found_by_its_number(
    slurm: FakeSlurm, home: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    if not is_there:
        monkeypatch.setenv("PATH", str(home / "nothing"))
    put(home, "slurm-12.out", "train_12.err", "logs/12_3_log.out", "train_112.err", "runs/12/attempt_0/n/rank_0.err")
    assert set(names("12")) == {
        "slurm-12.out", "train_12.err", "logs/12_3_log.out", "runs/12/attempt_0/n/rank_0.err",
    }  # fmt: skip


def test_a_job_without_logs_is_one_line(slurm: FakeSlurm, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="job 12: it has no logs here: SLURM does not know it; give its log files"):
        find_job_sources("12")
    monkeypatch.setenv("PATH", str(home / "nothing"))
    with pytest.raises(SetupError, match="scontrol: not found on this machine"):
        find_job_sources("12")
    with pytest.raises(UsageError, match="expected a SLURM job id"):
        find_job_sources("train.log")


def test_what_is_a_job_id() -> None:
    assert all(map(is_job_id, ["123", "123_4", "123+1", "123.0", "123_4.batch"]))
    assert not any(map(is_job_id, ["", "job", "123 ", "1_2_3", "12*", "../12"]))


@pytest.mark.parametrize(
    ("pattern", "glob"),
    [
        ("slurm-%j.out", "slurm-12.out"), ("%8j", "00000012"), ("%j_%t_log.out", "12_*_log.out"), ("%%j", "%j"),
        ("%x-%N.%s", r"a[[]b]-*.*"), ("$HOME/%u.log", "*/ada.log"), ("${SLURM_JOB_ID}.log", "*.log"),
        ("a[1].%j", "a[[]1].12"),
    ],
)  # fmt: skip
def test_a_pattern_of_slurm_as_a_glob(pattern: str, glob: str) -> None:
    assert expand_pattern(pattern, JobState(id="12", name="a[b]", user="ada", state="")) == glob


def test_what_cannot_be_opened_is_a_source_whose_reading_says_why(tmp_path: Path) -> None:
    put(tmp_path, "a.log")
    found = find_sources([str(tmp_path / "a.log")])
    (tmp_path / "a.log").unlink()
    problems: list[ReadProblem] = []
    assert list(read_chunks(found[0], problems=problems)) == []
    assert problems[0].message.startswith("cannot be read")


def test_the_outputs_of_several_jobs_and_tasks_are_told_apart_by_name(tmp_path: Path) -> None:
    put(tmp_path, "slurm-9.out", "slurm-12_1.out", "slurm-12_1.err", "slurm-12_2.out", "dmesg.txt")
    assert list_jobs(find_sources([str(tmp_path)])) == ["12_1", "12_2", "9"]


def test_the_outputs_of_jobs_that_the_user_names_are_told_apart_by_long_numbers(tmp_path: Path) -> None:
    put(
        tmp_path, "train-104711.out", "train-104711.err", "llama-7b_lr1e-4_104712.err", "104713_2.out", "x.20261130.err"
    )
    assert list_jobs(find_sources([str(tmp_path)])) == ["104711", "104712", "104713_2"]
    put(tmp_path, "run_20261130_101500.out", "master_29500.out", "eval-20000.log")
    assert list_jobs(find_sources([str(tmp_path)])) == ["104711", "104712", "104713_2"]


def test_numbers_of_ranks_nodes_and_processes_are_no_jobs(tmp_path: Path) -> None:
    put(
        tmp_path,
        "train-127.out",
        "rank_10412.err",
        "node-10412.out",
        "nccl.10412.log",
        "worker.48213.out",
        "pid48213.log",
    )
    put(tmp_path, "nid000049.log", "n-000049.err")
    assert list_jobs(find_sources([str(tmp_path)])) == []


def test_outputs_that_a_script_names() -> None:
    script = (
        "#!/bin/bash\n#SBATCH -o logs/%x.out\n#SBATCH --error logs/%x.err\nset -e\necho -e 'x'\n"
        'srun --unbuffered \\\n  --output "my dir/%t.out" \\\n -e%t.err python train.py\n'
    )
    assert find_outputs(script) == ["logs/%x.out", "logs/%x.err", "my dir/%t.out", "%t.err"]

"""What does `allranks submit` hand to SLURM, and what does it never? SLURM's commands are faked and record it all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from allranks.launch.batch.batch_script import SbatchOptions
from allranks.launch.batch.submit import expand_pattern
from allranks.model.finding import Verdict
from conftest import Allranks, Tell, allranks_command, clean_env
from fake_slurm import FakeSlurm, assert_one_line, fake_slurm, show_job  # noqa: F401  (a fixture)

CANARY = "canary-4711-do-not-print"


@pytest.fixture
def allranks(allranks_here: Allranks) -> Allranks:
    return allranks_here


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")


def test_a_job_is_checked_submitted_recorded_and_told(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("submit", "--nodes", "2", "train.py", "--epochs", "3")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "job 12 submitted, expected to start 2026-11-21T03:16:17 on node[01-02]\n"
        "  allranks status 12\n"
        "  allranks logs -f 12\n"
        "  squeue -j 12\n"
        "  tail -F slurm-12.out\n"
        "  allranks cancel 12\n"
    )
    trial, real = slurm.calls("sbatch")
    assert trial["argv"] == ["--test-only", "--export=ALL"]
    assert real["argv"] == ["--parsable", "--export=ALL"]
    assert trial["stdin"] == real["stdin"] == (tmp_path / "runs/12/submission.sh").read_text()
    assert "-P -m allranks run --max-restarts 3 train.py --epochs 3 &\n" in str(real["stdin"])


def test_files_of_an_older_job_with_the_same_id_are_set_aside(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    """A cluster that was installed anew counts its jobs from 1 again."""
    (tmp_path / "runs/12/attempt_0").mkdir(parents=True)
    old = Verdict(job="12", attempt=0, exit_code=1)
    (tmp_path / "runs/12/attempt_0/verdict.json").write_bytes(old.to_json())
    (tmp_path / "slurm-12.out").write_text("ValueError: the older job's\n")
    (tmp_path / "all.err").write_text("a file of all jobs\n")
    result = allranks("submit", "--nodes", "2", "--error", "all.err", "train.py")
    (aside,) = (tmp_path / "runs").glob("12-until-*")
    assert result.stderr == (f"allranks: an older job also had the id 12; its files are now in runs/{aside.name}\n")
    assert sorted(path.name for path in (tmp_path / "runs/12").iterdir()) == ["submission.sh"]
    assert (tmp_path / "slurm-12.out").read_text() == ""
    assert (tmp_path / "all.err").read_text() == "a file of all jobs\n"
    assert (aside / "slurm-12.out").read_text() == "ValueError: the older job's\n"
    slurm.answer("scontrol", "show job 12", out=show_job(work=tmp_path))
    assert "FAILED" not in allranks("status", "12").stdout
    assert "FAILED" in allranks("status", f"runs/{aside.name}").stdout
    assert aside.name in allranks("list").stdout


def test_a_link_in_place_of_an_older_job_s_output_is_left_alone(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    """Who owns the directory could have root's submission cut a file of root's."""
    (tmp_path / "runs/12").mkdir(parents=True)
    (precious := tmp_path / "precious").write_text("root's own\n")
    (tmp_path / "slurm-12.out").symlink_to(precious)
    assert "an older job also had the id 12" in allranks("submit", "--nodes", "2", "train.py").stderr
    (aside,) = (tmp_path / "runs").glob("12-until-*")
    assert (precious.read_text(), list(aside.iterdir())) == ("root's own\n", [])


def test_the_job_s_key_is_handed_in_and_never_shown(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("submit", "--nodes", "2", "train.py", env={"ALLRANKS_SECRET": "an-older-one"})
    trial, real = slurm.calls("sbatch")
    key = real["env"]["ALLRANKS_SECRET"]  # type: ignore[index]
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert "ALLRANKS_SECRET" not in trial["env"]  # type: ignore[operator]
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(key in text for text in [result.stdout, result.stderr, str(real["argv"]), real["stdin"], *written])


@pytest.mark.parametrize("verb", [("submit",), ("submit", "--dry-run"), ("submit", "--json"), ("render",)])
@pytest.mark.parametrize(
    "arguments",
    [
        ("train.py",),
        ("--env", "HF_TOKEN", "train.py"),
        ("--env", f"HF_TOKEN={CANARY}", "train.py"),
        ("--env", f"OTHER={CANARY}", "train.py"),
        ("--comment", f"x{CANARY}", "train.py"),
        ("--sbatch-option", f"--wckey={CANARY}", "train.py"),
        ("train.py", "--token", CANARY),
        ("--log-dir", f"runs-{CANARY}", "train.py"),
    ],
)
def test_a_token_is_in_no_file_argument_or_output(
    verb: tuple[str, ...], arguments: tuple[str, ...], slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    result = allranks(*verb, *arguments, env={"HF_TOKEN": CANARY})
    assert CANARY not in result.stdout + result.stderr
    for call in slurm.calls():
        assert CANARY not in json.dumps([call["argv"], call["stdin"]])
        is_asked_for = "HF_TOKEN" in arguments
        assert (CANARY in json.dumps(call["env"])) == is_asked_for
    for path in tmp_path.rglob("*"):
        assert CANARY not in path.name
        assert not path.is_file() or CANARY not in path.read_text()


def test_a_script_with_a_secret_in_its_arguments_is_the_owners_alone(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    result = allranks("submit", "--nodes", "2", "train.py", "--hf-token", "swordfish", "--lr=3")
    assert "swordfish" not in result.stdout + result.stderr
    assert result.stderr == (
        "allranks: note: who can read the script can read the value of --hf-token; let the program read a variable, "
        "and pass it with --env NAME\n"
    )
    script = tmp_path / "runs/12/submission.sh"
    assert "swordfish" in script.read_text()  # the job needs it
    assert script.stat().st_mode & 0o777 == 0o600


def test_secrets_that_stay_behind_are_named(slurm: FakeSlurm, allranks: Allranks) -> None:
    result = allranks("submit", "train.py", env={"HF_TOKEN": CANARY})
    assert result.stderr == "allranks: not passed to the job: HF_TOKEN; to pass one, add --env NAME\n"


def test_a_dry_run_submits_nothing(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("submit", "--dry-run", "--nodes", "2", "train.py")
    assert result.returncode == 0
    assert result.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    assert "submit would run: sbatch --parsable --export=ALL" in result.stderr
    assert "SLURM would start it 2026-11-21T03:16:17 on node[01-02]" in result.stderr
    assert [call["argv"] for call in slurm.calls("sbatch")] == [["--test-only", "--export=ALL"]]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_dry_run_needs_no_slurm(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    result = allranks("submit", "--dry-run", "train.py", env={"PATH": str(tmp_path)})
    assert result.returncode == 0
    assert result.stderr.endswith("allranks: SLURM did not check the script: this machine has no sbatch\n")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
            2,
            "error: sbatch: invalid partition specified: nope; allocation failure: Invalid partition name specified\n",
        ),
        (
            "allocation failure: Unable to contact slurm controller (connect failure)\n",
            78,
            "error: sbatch: allocation failure: Unable to contact slurm controller (connect failure)\n",
        ),
    ],
)
def test_a_refusal_is_one_line_in_slurm_s_words(
    words: str, code: int, line: str, slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    slurm.answer("sbatch", "--test-only", err=words, code=1)
    result = allranks("submit", "train.py")
    assert (result.returncode, result.stdout, result.stderr) == (code, "", line)
    assert not (tmp_path / "runs").exists()


def test_without_slurm_it_says_where_there_is_one(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    result = allranks("submit", "train.py", env={"PATH": str(tmp_path)})
    assert result.returncode == 78
    assert_one_line(result.stderr)
    assert "sbatch: not found on this machine" in result.stderr


def test_a_node_that_is_down_is_told_with_slurm_s_reason(slurm: FakeSlurm, allranks: Allranks) -> None:
    words = "allocation failure: Requested node configuration is not available\n"
    slurm.answer("sbatch", "--test-only", err=words, code=1)
    slurm.answer("scontrol", out=show_job(state="PENDING", reason="ReqNodeNotAvail,_UnavailableNodes:node02", nodes=""))
    result = allranks("submit", "--nodes", "2", "train.py")
    assert result.returncode == 0
    assert result.stderr == (
        "allranks: job 12 waits: ReqNodeNotAvail, UnavailableNodes:node02; node02 down: bad NIC, see T-12\n"
    )


def test_a_job_that_will_never_start_is_told_so(slurm: FakeSlurm, allranks: Allranks) -> None:
    slurm.answer("sbatch", "--test-only", err="allocation failure: Requested nodes are busy\n", code=1)
    slurm.answer("scontrol", out=show_job(state="PENDING", reason="PartitionNodeLimit", nodes=""))
    result = allranks("submit", "--nodes", "2", "--wait", "train.py")
    assert result.returncode == 78
    assert result.stderr == (
        "allranks: job 12 cannot start: it requests more nodes than its partition allows or has in service "
        "(PartitionNodeLimit); to remove it: allranks cancel 12\n"
    )


NOT_AVAILABLE = "allocation failure: Requested node configuration is not available\n"
SIX = "".join(f"n{at}\x1fidle\x1fnone\x1f{name}\x1f(null)\n" for name in ("main*", "big") for at in range(6))
MORE = "".join(f"m{at}\x1fdown*\x1fnone\x1fbig\x1f(null)\n" for at in range(3))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--nodes", "9"), "--nodes 9: partition main has 6 nodes; nothing was submitted"),
        (("--nodes", "10-12", "--partition", "big"), "--nodes 10-12: partition big has 9 nodes; nothing was submitted"),
        (
            ("--nodes", "10", "--partition", "main,big"),
            "--nodes 10: partition main has 6 nodes, partition big has 9 nodes; nothing was submitted",
        ),
        (("--nodes", "6"), ""),
        (("--nodes", "4-12"), ""),
        (("--nodes", "9", "--partition", "main,big"), ""),  # three of them are down: it waits
        (("--nodes", "9", "--partition", "unknown"), ""),  # SLURM itself decides
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_more_nodes_than_a_partition_has_are_refused_before_the_submission(
    words: tuple[str, ...], error: str, dry: tuple[str, ...], slurm: FakeSlurm, tell: Tell, tmp_path: Path
) -> None:
    slurm.answer("sbatch", "--test-only", err=NOT_AVAILABLE, code=1)
    slurm.answer("sinfo", out=SIX + MORE)
    slurm.answer("scontrol", out=show_job(state="PENDING", reason="Resources", nodes=""))
    told = tell("submit", *dry, *words, "train.py")
    assert told.code == (2 if error else 0)
    assert not error or told.err.splitlines()[-1] == f"error: {error}"
    assert bool([call for call in slurm.calls("sbatch") if "--parsable" in str(call["argv"])]) is not (dry or error)


def test_follow_prints_the_output_until_the_job_ends_with_its_exit_code(
    slurm: FakeSlurm, tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.launch.batch.logs.LAST_WORDS_S", 0.0)
    (tmp_path / "slurm-12.out").write_text("[node01 r0] step 1\n[node01 r0] step 2")
    slurm.answer("scontrol", out=show_job(state="FAILED", code="75:0", work=tmp_path))
    told = tell("submit", "--nodes", "2", "--follow", "train.py")
    assert told.code == 75
    assert "\n[node01 r0] step 1\n[node01 r0] step 2" in told.out
    assert "job 12   train   FAILED, exit code 75" in told.out
    assert tell("submit", "--follow", "--json", "train.py").code == 2


def test_follow_of_a_job_without_output_ends_with_its_exit_code(
    slurm: FakeSlurm, tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.launch.batch.logs.LAST_WORDS_S", 0.0)
    slurm.answer("scontrol", out=show_job(state="CANCELLED", code="0:15", work=tmp_path))
    assert tell("submit", "--nodes", "2", "-f", "train.py").code == 143


def test_a_job_too_large_for_the_cluster_is_refused(slurm: FakeSlurm, allranks: Allranks) -> None:
    words = "Requested node configuration is not available\n"
    slurm.answer("sbatch", err=f"sbatch: error: Batch job submission failed: {words}", code=1)
    result = allranks("submit", "--gpus-per-node", "5", "train.py")
    assert result.returncode == 78
    assert result.stderr.startswith("error: sbatch: Batch job submission failed: Requested node configuration")


def test_partition_and_time_come_from_the_cluster_file(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[slurm]\npartition = "main"\ntime = "02:00:00"\n')
    text = allranks("render", "--time", "30", "train.py").stdout
    assert "#SBATCH --partition=main\n#SBATCH --time=30\n" in text


def test_an_other_working_directory_keeps_the_cluster_file(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[slurm]\n")
    text = allranks("render", "--chdir", "/data", "train.py").stdout
    assert f"allranks run --cluster {tmp_path}/cluster.toml --max-restarts 3 train.py &\n" in text


def test_flags_of_run_go_through_in_any_spelling(allranks: Allranks) -> None:
    result = allranks(
        "render", "--gpus_per_node", "4", "--nproc_per_node=4", "--backend", "nccl", "-m", "pkg.train", "-m"
    )
    flags = "--nproc-per-node 4 --backend nccl --max-restarts 3"
    assert f"allranks run {flags} --module pkg.train -m &\n" in result.stdout


def test_a_script_that_is_not_there_is_said_before_anything_is_submitted(slurm: FakeSlurm, allranks: Allranks) -> None:
    result = allranks("submit", "nope.py")
    assert result.returncode == 2
    assert_one_line(result.stderr)
    assert slurm.calls() == []


def test_an_array_has_a_file_a_task(slurm: FakeSlurm, allranks: Allranks) -> None:
    assert "  tail -F slurm-12_*.out\n" in allranks("submit", "--array", "0-2", "train.py").stdout
    assert "#SBATCH --output=slurm-%A_%a.out\n" in str(slurm.calls("sbatch")[-1]["stdin"])


def test_json_has_what_programs_need(slurm: FakeSlurm, allranks: Allranks) -> None:
    found = json.loads(allranks("submit", "--json", "train.py").stdout)
    assert (found["job"], found["run_dir"], found["output"]) == ("12", "runs/12", "slurm-12.out")


@pytest.mark.parametrize(
    ("pattern", "options", "file"),
    [
        ("gloo_%j.out", SbatchOptions(), "gloo_12.out"),
        ("%x-%5j%%.out", SbatchOptions(job_name="t"), "t-00012%.out"),
        ("%A_%a.out", SbatchOptions(array="0-2"), "12_*.out"),
        ("%N/%u", SbatchOptions(chdir="/data"), "/data/*/*"),
        ("x%", SbatchOptions(), "x*"),
    ],
)
def test_patterns_of_sbatch_are_filled_in(pattern: str, options: SbatchOptions, file: str) -> None:
    assert expand_pattern(pattern, "12", options) == file


def test_nodes_out_of_service_are_folded_by_reason(slurm: FakeSlurm, allranks: Allranks) -> None:
    nodes = [(f"n{i:02}", "down*", "Not responding") for i in (1, 2, 3)]
    nodes += [("n04", "drained", "disk"), ("n05", "idle", "none")]
    slurm.answer("sinfo", out="".join("\x1f".join((*node, "main*", "(null)")) + "\n" for node in nodes))
    slurm.answer("scontrol", out=show_job(state="PENDING", reason="Nodes_required_for_job_are_DOWN", nodes=""))
    assert "  nodes     n[01-03] down: Not responding; n04 drained: disk\n" in allranks("status", "12").stdout


def test_restarts_may_be_said_otherwise(allranks: Allranks) -> None:
    assert "allranks run --max-restarts 0 train.py" in allranks("render", "--max-restarts", "0", "train.py").stdout


def test_the_cluster_file_goes_through_beside_restarts(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[slurm]\n")
    text = allranks("render", "--cluster", "cluster.toml", "train.py").stdout
    assert "--max-restarts 3" in text
    assert "--cluster cluster.toml" in text


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("FAILED", "75:0", 75),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 1),
    ],
)
def test_wait_ends_with_the_job_s_exit_code(
    state: str, code: str, expected: int, slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    slurm.answer("scontrol", out=show_job(state=state, code=code, work=tmp_path))
    result = allranks("submit", "--nodes", "2", "--wait", "train.py")
    assert result.returncode == expected, result.stderr
    assert f"job 12   train   {state}" in result.stdout


def test_wait_waits_while_the_job_waits_and_runs(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    slurm.answer("scontrol", out=show_job(state="COMPLETED", code="0:0", work=tmp_path))
    slurm.answer_once("scontrol", "show job", out=show_job(work=tmp_path))
    slurm.answer_once("scontrol", "show job", out=show_job(state="PENDING", reason="Priority", nodes="", work=tmp_path))
    result = allranks("submit", "--nodes", "2", "-W", "train.py")
    assert result.returncode == 0
    assert result.stderr == "allranks: job 12 waits: Priority\nallranks: job 12 is RUNNING on node[01-02]\n"


def wait_for_running_job(slurm: FakeSlurm, tmp_path: Path) -> subprocess.Popen[str]:
    """Start a submit that waits, and return it once it has said that the job runs."""
    slurm.answer("scontrol", out=show_job(work=tmp_path))
    process = subprocess.Popen(
        allranks_command("submit", "--nodes", "2", "--wait", "train.py"), cwd=tmp_path, env=clean_env(os.environ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "allranks: job 12 is RUNNING on node[01-02]\n"
    return process


@pytest.mark.parametrize("exit_code", [75, None])
def test_a_job_that_slurm_forgot_has_its_verdict_s_code(
    exit_code: int | None, slurm: FakeSlurm, tmp_path: Path
) -> None:
    process = wait_for_running_job(slurm, tmp_path)
    if exit_code is not None:
        path = tmp_path / "runs/12/attempt_0/verdict.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(Verdict(job="12", attempt=0, exit_code=exit_code).to_json())
    slurm.answer("scontrol", out="", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    process.communicate(timeout=60)
    assert process.returncode == (3 if exit_code is None else exit_code)


def test_ctrl_c_ends_the_wait_and_not_the_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    process = wait_for_running_job(slurm, tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err == "allranks: stopped waiting; job 12 continues (allranks status 12; allranks cancel 12 ends it)\n"
    assert process.returncode == 130
    assert slurm.calls("scancel") == []


def test_what_the_nodes_would_refuse_is_refused_before_the_submission(slurm: FakeSlurm, allranks: Allranks) -> None:
    for words, said in {
        ("--nodes", "2", "--nnodes", "3"): "--nodes 2 and --nnodes 3 contradict each other; give one of them",
        ("--nnodes", "two"): "--nnodes 'two': expected a number of at least 1, or MIN:MAX, for example 6 or 4:6",
        ("--ignore", "AR999"): 'no cause "AR999": expected an id',
        ("-m", "--no-python"): "-m and --no-python contradict each other: a module is run by Python",
    }.items():
        result = allranks("submit", *words, "train.py")
        assert result.returncode == 2
        assert_one_line(result.stderr)
        assert said in result.stderr
    assert slurm.calls("sbatch") == []


def test_the_run_s_nodes_are_slurm_s_nodes(slurm: FakeSlurm, allranks: Allranks) -> None:
    allranks("submit", "--nnodes", "2:4", "--container", "torch.sif", "--ignore", "AR213", "train.py")
    script = str(slurm.calls("sbatch")[-1]["stdin"])
    assert "#SBATCH --nodes=2-4\n" in script
    words = "allranks run --nnodes 2:4 --max-restarts 3 --container torch.sif --ignore AR213 train.py &\n"
    assert words in script

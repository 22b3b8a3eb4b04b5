"""Is the batch script right, whatever stands in the values? Read by bash, shellcheck and sbatch's own parser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from allranks.cli.jobs import render
from allranks.launch.batch.batch_script import (
    SbatchOptions,
    parse_env,
    quote_for_sbatch,
    refuse_secret_values,
    render_sbatch,
    submission_env,
)
from allranks.model.errors import UsageError

SIX_NODE = Path(__file__).parents[2] / "examples" / "six-node"
COMMAND = ["allranks", "run", "train.py"]
NASTY = [
    "two words",
    "it's",
    'say "hi"',
    "$(touch pwned) `touch pwned` $HOME",
    "back\\slash\\",
    "# no comment",
    "a;b&c|d>e<f",
    "*?[x]",
    "ünïcode ☃",
    "{{ 7 * 7 }} {% if %}",
    "-n",
    "%j",
]


def example(backend: str) -> list[str]:
    """Arguments of `allranks render` that make run_<backend>.slurm, in examples/six-node."""
    return [
        "--job-name", backend, "--nodes", "6", "--gpus-per-node", "1", "--nodelist", "master-node,node[01-05]",
        "--output", f"{backend}_%j.out", "--error", f"{backend}_%j.err", "--env", "NCCL_DEBUG=INFO",
        "--env", "PYTHONUNBUFFERED=1", "--template", "owners.sh.j2", "--allranks-command", "allranks",
        "--backend", backend, "py_exe.py",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_example_s_scripts_are_what_render_prints(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SIX_NODE)
    result = CliRunner().invoke(render, example(backend))
    assert result.exit_code == 0, result.exception
    again = f"cd examples/six-node && allranks render {' '.join(map(repr, example(backend)))} > run_{backend}.slurm"
    assert (SIX_NODE / f"run_{backend}.slurm").read_text() == result.output, f"make it again: {again}"


def test_the_script_as_a_whole() -> None:
    options = SbatchOptions(job_name="train", nodes="2", cpus_per_task=8, requeue=False, exclusive=True)
    assert render_sbatch(options, COMMAND, more=["--licenses=a b"], env={"A": "b c"}) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --cpus-per-task=8\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --signal=USR1@120\n"
        "#SBATCH --no-requeue\n"
        "#SBATCH --output=slurm-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --no-kill\n"
        '#SBATCH --licenses="a b"\n'
        "\n"
        "ranks='' status=0\n"
        "trap : TERM INT # SLURM signals srun and the ranks, too; what follows here must still run\n"
        "trap 'kill -USR1 ${ranks:-$!}' USR1 # a warning that only this script gets; srun passes it to all ranks\n"
        "export ALLRANKS_STEP=0 # the step below counts as step 0, whatever number SLURM gives it after a requeue\n"
        "# srun starts one agent per node; the agent starts and watches the ranks of its node. "
        "With --no-kill and --wait=0, the\n"
        "# loss of a node or an agent does not end the job before allranks has reported it. "
        "The agents decide whether the job is\n"
        "# requeued, and without which node; this works even if this script is lost with its node.\n"
        "srun --no-kill --kill-on-bad-exit=0 --wait=0 --export=ALL \\\n"
        '    --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\\n'
        '    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \\\n'
        "    env A='b c' \\\n"
        "    allranks run train.py &\n"
        "ranks=$!\n"
        'while kill -0 "$ranks" 2>/dev/null; do\n'
        '    wait "$ranks" # a signal interrupts it\n'
        "done\n"
        'wait "$ranks" || status=$?\n'
        "# An agent that was killed counts as 128 + the signal, "
        "although the others may have gone on; they know the job's code.\n"
        "run=runs/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}\n"
        "run=$run/attempt_${SLURM_RESTART_COUNT:-0}/exit_code\n"
        'if [ "$status" -gt 128 ] && [ -s "$run" ] && read -r code < "$run" && [ "$code" -ge 0 ] 2>/dev/null; then\n'
        "    status=$code\n"
        "fi\n"
        'exit "$status"\n'
    )


def run_with_fake_srun(script: str, folder: Path) -> list[str]:
    """Run the script; what srun was given, as words."""
    (folder / "srun").write_text(f'#!{sys.executable}\nimport sys\nsys.stdout.write("\\0".join(sys.argv[1:]))\n')
    (folder / "srun").chmod(0o755)
    result = subprocess.run(
        ["bash"],
        input=script.encode(),
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert sorted(path.name for path in folder.iterdir()) == ["srun"]
    return result.stdout.decode().split("\0")


@pytest.mark.parametrize("value", [*NASTY, "new\nline", "\n\n\n\n", "tab\tand\rreturn", "", "=", "\x1b[31m"])
def test_any_argument_arrives_as_it_is(value: str, tmp_path: Path) -> None:
    words = run_with_fake_srun(render_sbatch(SbatchOptions(), [*COMMAND, value], env={"A": value}), tmp_path)
    assert words[-5:] == [f"A={value}", "allranks", "run", "train.py", value]
    assert words[:7] == [
        "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--nodes=2", "--ntasks=2",
        "--ntasks-per-node=1",
    ]  # fmt: skip
    assert words[7:9] == ["--cpus-per-task=4", "env"]


@pytest.mark.program("sbatch", "slurm-client")
@pytest.mark.parametrize("value", NASTY)
def test_sbatch_itself_reads_any_value_as_it_is(value: str, tmp_path: Path) -> None:
    conf = "ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=1\nNodeName=localhost\n"
    (tmp_path / "slurm.conf").write_text(conf + "PartitionName=main Nodes=localhost\n")
    result = subprocess.run(
        ["sbatch", "-vvv", "--test-only"],
        input=render_sbatch(SbatchOptions(comment=value, nodes="2"), COMMAND),
        env={"PATH": os.environ["PATH"], "SLURM_CONF": str(tmp_path / "slurm.conf"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f'argument "--comment={value}"\n' in result.stderr
    assert 'argument "--nodes=2"\n' in result.stderr


@pytest.mark.parametrize(
    "value", ["a\nb", "a\n#SBATCH --uid=0", "\x00", "a\rb", "\x1b[31m", "\u2028", "", "  ", "x" * 4001]
)
def test_what_would_end_the_line_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"^--comment"):
        quote_for_sbatch("--comment", value)


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("licenses=a", "expected an option of sbatch"),
        ("--foo=a\nb", "an #SBATCH line cannot contain"),
        ("--foo bar", "expected an option of sbatch"),
        ("--nodes=6", "give --nodes directly"),
        ("--export=NONE", "--env NAME"),
        ("--wrap=ls", "conflicts with"),
    ],
)
def test_the_escape_hatch_has_bounds(option: str, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        render_sbatch(SbatchOptions(), COMMAND, more=[option])


def test_two_agents_a_node_are_refused_with_the_right_flag() -> None:
    with pytest.raises(UsageError, match="use --nproc-per-node 4, and --cpus-per-task"):
        render_sbatch(SbatchOptions(ntasks_per_node=4), COMMAND)


def template(folder: Path, text: str) -> Path:
    path = folder / "mine.j2"
    path.write_text(text)
    return path


BLOCKS = """\
{% extends "allranks/job.sh.j2" %}
{% block setup %}
echo ready
{% endblock %}
{% block teardown %}
echo "ended with $status"
{% endblock %}
"""


def test_users_override_blocks(tmp_path: Path) -> None:
    script = render_sbatch(SbatchOptions(), COMMAND, template=template(tmp_path, BLOCKS))
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 75\n")
    srun.chmod(0o755)
    result = subprocess.run(
        ["bash"], input=script, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.returncode) == ("ready\nended with 75\n", 75)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{% extends "allranks/job.sh.j2" %}\n{% block setup %}{{ nope }}{% endblock %}', "'nope' is undefined"),
        ("a\n{% block %}", r"mine\.j2:2: "),
        ('{% extends "other.j2" %}', "no template 'other.j2'"),
    ],
)
def test_a_wrong_template_says_where(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=error):
        render_sbatch(SbatchOptions(), COMMAND, template=template(tmp_path, text))


def test_a_template_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match=r"no/such\.j2: cannot be read: No such file"):
        render_sbatch(SbatchOptions(), COMMAND, template=Path("no/such.j2"))


@pytest.mark.program("shellcheck", "shellcheck")
@pytest.mark.parametrize("is_overridden", [False, True])
def test_shellcheck_finds_nothing(is_overridden: bool, tmp_path: Path) -> None:
    # Left out: hints on single quotes, whether \' and $HOME in them are meant.
    options = SbatchOptions(nodes="2", comment="a b")
    chosen = template(tmp_path, BLOCKS) if is_overridden else None
    script = render_sbatch(options, [*COMMAND, *NASTY], env={"A": "b c"}, template=chosen)
    result = subprocess.run(
        ["shellcheck", "-e", "SC1003,SC2016", "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == ""
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=60, check=False).returncode == 0


# --- Environment ------------------------------------------------------------------------------------------------------


def test_secrets_go_in_by_name_only() -> None:
    values, names = parse_env(["A=b=c", "HF_TOKEN", "EMPTY="], {"HF_TOKEN": "hf_0123456789"})
    assert values == {"A": "b=c", "EMPTY": ""}
    assert names == ("HF_TOKEN",)
    with pytest.raises(UsageError, match="export HF_TOKEN and give --env HF_TOKEN") as caught:
        parse_env(["HF_TOKEN=hf_0123456789"], {})
    assert "0123456789" not in str(caught.value)


@pytest.mark.parametrize("word", ["1A=b", "A B=c", "=x", "", "A;B"])
def test_only_names_of_variables_are_names(word: str) -> None:
    with pytest.raises(UsageError, match="expected NAME=VALUE or NAME"):
        parse_env([word], {})


def test_an_expanded_secret_is_refused_without_showing_it() -> None:
    with pytest.raises(UsageError, match="contains the value of WANDB_API_KEY") as caught:
        refuse_secret_values(["train.py", "--key=0123456789abc"], {"WANDB_API_KEY": "0123456789abc"})
    assert "0123456789" not in str(caught.value)


def test_the_job_gets_a_short_environment() -> None:
    environ = {
        "PATH": "/bin", "HOME": "/home/ada", "LD_LIBRARY_PATH": "/l", "NCCL_DEBUG": "INFO", "HF_HOME": "/hf",
        "HF_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "MY_KEY": "s", "FOO": "1", "SLURM_NTASKS": "8", "RANK": "3",
        "MASTER_ADDR": "old", "TORCHELASTIC_RUN_ID": "x", "ALLRANKS_NODE": "old", "ALLRANKS_CLUSTER": "c.toml",
        "SLURM_CONF": "/c", "SBATCH_EXPORT": "NONE", "SBATCH_WAIT": "1", "SBATCH_PARTITION": "p", "SBATCH_QOS": "q",
    }  # fmt: skip
    env, withheld = submission_env(environ, ["MY_KEY", "FOO"], said=["partition"])
    assert sorted(env) == [
        "ALLRANKS_CLUSTER", "FOO", "HF_HOME", "HOME", "LD_LIBRARY_PATH", "MY_KEY", "NCCL_DEBUG", "PATH", "SBATCH_QOS",
        "SLURM_CONF",
    ]  # fmt: skip
    assert withheld == ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN"]


SRUN_THAT_LIVES = """\
#!/bin/bash
trap 'echo srun got USR1; exit 7' USR1
echo $$ > srun.pid
for _ in $(seq 100); do sleep 0.1; done
"""


@pytest.mark.parametrize("asked", ["B:USR1@60", "USR1@120"])
def test_a_warning_for_the_script_alone_is_handed_on_and_srun_s_own_exit_code_is_kept(
    asked: str, tmp_path: Path
) -> None:
    (tmp_path / "srun").write_text(SRUN_THAT_LIVES)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "job.sh").write_text(render_sbatch(SbatchOptions(signal=asked), COMMAND))
    process = subprocess.Popen(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NUM_NODES": "2"},
        stdout=subprocess.PIPE,
    )
    while not (tmp_path / "srun.pid").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=60)[0] == b"srun got USR1\n"
    assert process.returncode == 7


@pytest.mark.parametrize(
    ("srun_s", "jobs", "expected"),
    [
        pytest.param("kill -9 $$", "0", 0, id="an agent was killed, and the job succeeded"),
        pytest.param("kill -9 $$", "75", 75, id="nobody could go on"),
        pytest.param("kill -9 $$", "", 137, id="nobody could write the job's code"),
        pytest.param("kill -9 $$", "x y; touch z", 137, id="what stands there is no code"),
        pytest.param("exit 1", "0", 1, id="srun's own code"),
    ],
)
def test_the_script_ends_with_the_job_s_code_where_srun_knows_only_that_an_agent_was_killed(
    srun_s: str, jobs: str, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{srun_s}\n")
    (tmp_path / "srun").chmod(0o755)
    attempt = tmp_path / "my logs" / "12_3" / "attempt_1"
    attempt.mkdir(parents=True)
    (attempt / "exit_code").write_text(jobs and f"{jobs}\n")
    names = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}
    script = render_sbatch(SbatchOptions(), COMMAND, log_dir=tmp_path / "my logs")
    result = subprocess.run(
        ["bash"], input=script.encode(), env={"PATH": f"{tmp_path}:/usr/bin:/bin", **names}, timeout=60, check=False
    )
    assert result.returncode == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("USR1@120", ""), ("B:USR1@120", "USR1"), ("RB:12", "12"), ("R:USR2", ""), ("B:SIGTERM", "SIGTERM")],
)
def test_only_what_the_script_alone_gets_is_handed_on(given: str, expected: str) -> None:
    assert SbatchOptions(signal=given).handed_on == expected


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "time",
            ["90", "0", "1:30", "02:00:00", "1-12", "1-12:30:00", "-1", "UNLIMITED"],
            ["99x", "2h", "1-", "", "1 2"],
        ),
        ("nodes", ["1", "4-6", "1k", "1,3-5"], ["x", "0", "-1", "4-", "2.5"]),
        ("mem", ["0", "64G", "64000", "1.5T", "64GB"], ["10Q", "G", "-1", "64 G"]),
        ("gpus", ["4", "a100:4", "a100:2,v100:2"], ["a100:", "-1", "4 x"]),
        ("gpus_per_node", ["8"], ["h100=8"]),
        ("cpus_per_task", [1, 64], [0, -2]),
        ("array", ["0-9", "0-9%2", "1,3,5-9:2", "7"], ["1-", "a", "%2", "0-9%"]),
        ("signal", ["USR1@120", "B:USR1@60", "10@30", "TERM", "RB:USR2"], ["USR1@", "@60", "USR1@1m"]),
        ("open_mode", ["append", "truncate"], ["a+"]),
    ],
)
def test_values_that_sbatch_would_refuse_are_told_from_others_without_it(
    name: str, good: list[object], bad: list[object]
) -> None:
    for value in good:
        text = render_sbatch(SbatchOptions(**{name: value}), ["true"])  # type: ignore[arg-type]
        assert f"#SBATCH --{name.replace('_', '-')}={value}\n" in text
    for value in bad:
        with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')}.*: expected "):
            render_sbatch(SbatchOptions(**{name: value}), ["true"])  # type: ignore[arg-type]

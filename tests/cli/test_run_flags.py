"""Flags of `allranks run`: torchrun's, all of them, and what their values mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli.request import hidden_streams, make_request, parse_bucket_mb, parse_endpoint
from allranks.cli.request import parse_nnodes as nodes_of
from allranks.cli.run import UNUSED_WITH_VALUE, UNUSED_WITHOUT_VALUE, run
from allranks.launch.plan import Request
from allranks.model.errors import UsageError
from allranks.wire.leader_port import Hint
from conftest import Allranks, Tell, Told

COMMAND = ("train.py", "--lr", "3e-4")


def refusal(call, *args: object, **kwargs: object) -> str:
    with pytest.raises(UsageError) as refused:
        call(*args, **kwargs)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "nodes"), [("1", (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), ("3:3", (3, 3)), ("1024", (1024, 1024))]
)
def test_nnodes_is_a_number_or_a_range(text, nodes):
    assert nodes_of(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "0:4", "4:2", "-1", "2:", ":4", "1:2:3", "four", "2.5", "4\n", " 4"])
def test_nnodes_that_makes_no_sense_is_refused(text):
    assert refusal(nodes_of, text) == (
        f"--nnodes {text!r}: expected a number of at least 1, or MIN:MAX, for example 6 or 4:6"
    )


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node01", ("node01", None)),
        ("node01:29500", ("node01", 29500)),
        ("gpu01.cluster.example:1", ("gpu01.cluster.example", 1)),
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("localhost:0", ("localhost", 0)),
        ("[fd00::1]:29500", ("fd00::1", 29500)),
        ("[fd00::1]", ("fd00::1", None)),
        ("[::ffff:10.0.0.1]:65535", ("::ffff:10.0.0.1", 65535)),
    ],
)
def test_an_endpoint_is_a_host_and_maybe_a_port(text, endpoint):
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":29500",
        "node01:",
        "node01:65536",
        "node01:29k",
        "node01:-1",
        "fd00::1",
        "fd00::1:29500",
        "[node01]:1",
        "a b:1",
        "tcp://node01:29500",
        "node01:29500:1",
        "[]:1",
        "node01:29500\n",
    ],
)
def test_an_endpoint_that_cannot_be_read_is_refused(text):
    assert refusal(parse_endpoint, text) == (
        f"--rdzv-endpoint {text!r}: expected HOST or HOST:PORT, for example node01:29500"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {}),
        ({"nproc_per_node": "gpu"}, {"num_workers": "gpu"}),
        ({"nnodes": "2:4"}, {"min_nodes": 2, "max_nodes": 4}),
        ({"node_rank": 0}, {"node_rank": 0}),
        (
            {"rdzv_endpoint": "node01:29611"},
            {"endpoint": Hint("node01", 29611, "--rdzv-endpoint"), "port": 29611},
        ),
        ({"rdzv_endpoint": "node01"}, {"endpoint": Hint("node01", 29500, "--rdzv-endpoint"), "port": None}),
        (
            {"rdzv_endpoint": "node01", "master_port": 29777},
            {"endpoint": Hint("node01", 29777, "--rdzv-endpoint"), "port": 29777},
        ),
        (
            {"rdzv_endpoint": "node01:29611", "master_port": 29777},
            {"endpoint": Hint("node01", 29611, "--rdzv-endpoint"), "port": 29611},
        ),
        (
            {"rdzv_endpoint": "node01:0", "master_port": 29777},
            {"endpoint": Hint("node01", 0, "--rdzv-endpoint"), "port": 0},
        ),
        (
            {"rdzv_endpoint": "node01:29611", "master_addr": "node01"},
            {"endpoint": Hint("node01", 29611, "--rdzv-endpoint"), "port": 29611},
        ),
        ({"master_addr": "node01"}, {"endpoint": Hint("node01", 29500, "--master-addr"), "port": None}),
        (
            {"master_addr": "fd00::1", "master_port": 29777},
            {"endpoint": Hint("fd00::1", 29777, "--master-addr"), "port": 29777},
        ),
        ({"master_port": 0}, {"port": 0}),
        ({"rdzv_id": "exp 7"}, {"rdzv_id": "exp 7"}),
        ({"rdzv_id": "none"}, {"rdzv_id": None}),
        ({"rdzv_id": ""}, {"rdzv_id": None}),
        ({"standalone": True}, {"standalone": True}),
        ({"backend": "gloo"}, {"backend": "gloo"}),
        ({"role": "trainer"}, {"role": "trainer"}),
        ({"module": True}, {"is_module": True}),
        ({"no_python": True}, {"no_python": True, "has_standby": False}),
        ({"container": "torch.sif"}, {"container": "torch.sif", "has_standby": False}),
        ({"standby": False}, {"has_standby": False}),
        ({"local_addr": "10.0.0.3"}, {"local_address": "10.0.0.3"}),
    ],
)
def test_flags_become_one_request(flags, expected):
    assert make_request(COMMAND, **flags) == Request(command=COMMAND, **expected)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"module": True, "no_python": True},
            "-m and --no-python contradict each other: a module is run by Python",
        ),
        (
            {"rdzv_endpoint": "node01:29500", "master_addr": "node02"},
            "--rdzv-endpoint node01:29500 and --master-addr node02 contradict each other",
        ),
        ({"restart_on_error": True}, "--restart-on-error has no effect without --max-restarts N"),
        ({"nnodes": "0"}, "--nnodes '0': expected a number of at least 1, or MIN:MAX, for example 6 or 4:6"),
        ({"nnodes": ""}, "--nnodes '': expected a number of at least 1, or MIN:MAX, for example 6 or 4:6"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, text):
    assert refusal(make_request, COMMAND, **flags) == text


OUT, ERR = "out", "err"


@pytest.mark.parametrize(
    ("redirects", "tee", "ranks", "hidden"),
    [
        ("0", "0", "", set()),
        ("1", "0", "", {(0, OUT), (1, OUT), (2, OUT)}),
        ("2", "0", "", {(0, ERR), (1, ERR), (2, ERR)}),
        ("3", "0", "", {(0, OUT), (0, ERR), (1, OUT), (1, ERR), (2, OUT), (2, ERR)}),
        ("3", "3", "", set()),
        ("3", "1", "", {(0, ERR), (1, ERR), (2, ERR)}),
        ("0:3,2:1", "0", "", {(0, OUT), (0, ERR), (2, OUT)}),
        ("3", "0:3,1:3", "", {(2, OUT), (2, ERR)}),
        ("0", "0", "1", {(0, OUT), (0, ERR), (2, OUT), (2, ERR)}),
        ("2", "0", "0,1", {(0, ERR), (1, ERR), (2, OUT), (2, ERR)}),
        ("0", "3", "0,1,2", set()),
    ],
)
def test_streams_are_hidden_as_the_flags_say(redirects, tee, ranks, hidden):
    assert hidden_streams(redirects=redirects, tee=tee, local_ranks_filter=ranks, num_workers=3) == hidden


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"redirects": "4"},
            "--redirects '4': expected 0, 1, 2 or 3, for all local ranks or for each, for example 0:3,1:2",
        ),
        ({"tee": "0:4"}, "--tee '0:4': expected 0, 1, 2 or 3, for all local ranks or for each, for example 0:3,1:2"),
        ({"tee": ""}, "--tee '': expected 0, 1, 2 or 3, for all local ranks or for each, for example 0:3,1:2"),
        (
            {"redirects": "0:1,"},
            "--redirects '0:1,': expected 0, 1, 2 or 3, for all local ranks or for each, for example 0:3,1:2",
        ),
        ({"local_ranks_filter": "0,x"}, "--local-ranks-filter '0,x': expected local ranks, for example 0,1"),
        ({"local_ranks_filter": "0-2"}, "--local-ranks-filter '0-2': expected local ranks, for example 0,1"),
    ],
)
def test_streams_that_cannot_be_read_are_refused(flags, text):
    asked = {"redirects": "0", "tee": "0", "local_ranks_filter": ""} | flags
    assert refusal(hidden_streams, **asked, num_workers=3) == text


# The flags of torchrun 2.13, in torch's own order, and what 2.14 and 2.15 added.
TORCHRUN_FLAGS = [
    "--nnodes", "--nproc-per-node", "--nproc_per_node", "--rdzv-backend", "--rdzv_backend", "--rdzv-endpoint",
    "--rdzv_endpoint", "--rdzv-id", "--rdzv_id", "--rdzv-conf", "--rdzv_conf", "--standalone", "--max-restarts",
    "--max_restarts", "--monitor-interval", "--monitor_interval", "--start-method", "--start_method",
    "--event-log-handler", "--event_log_handler", "--role", "-m", "--module", "--no-python", "--no_python",
    "--run-path", "--run_path", "--log-dir", "--log_dir", "-r", "--redirects", "-t", "--tee", "--local-ranks-filter",
    "--local_ranks_filter", "--duplicate-stdout-filters", "--duplicate_stdout_filters", "--duplicate-stderr-filters",
    "--duplicate_stderr_filters", "--node-rank", "--node_rank", "--master-addr", "--master_addr", "--master-port",
    "--master_port", "--local-addr", "--local_addr", "--logs-specs", "--logs_specs", "--numa-binding",
    "--numa_binding", "--signals-to-handle", "--signals_to_handle", "--shutdown-timeout", "--shutdown_timeout",
    "--virtual-local-rank", "--virtual_local_rank", "--log-line-prefix-template", "--log_line_prefix_template",
    "--print-completion",
]  # fmt: skip
# Those of them that take no value.
TORCHRUN_SWITCHES = {
    "--standalone", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path", "--virtual-local-rank",
    "--virtual_local_rank",
}  # fmt: skip
OUR_FLAGS = {
    "--metrics-dir",
    "--backend", "--cluster", "--container", "--container-runtime", "--dry-run", "--plan", "--ignore", "--standby",
    "--restart-on-error", "--capacity-timeout", "--hang-timeout", "--checkpoint-dir", "--checkpoint-every",
    "--compress", "--bucket-mb", "--status",
}  # fmt: skip


def our_options() -> dict[str, bool]:
    """Every spelling of every flag, and whether it is a switch."""
    return {
        spelling: bool(getattr(parameter, "is_flag", False))
        for parameter in run.params
        for spelling in parameter.opts
        if spelling.startswith("-")
    }


def test_every_flag_of_torchrun_is_taken_and_few_more():
    assert set(our_options()) == set(TORCHRUN_FLAGS) | OUR_FLAGS


def test_a_flag_takes_a_value_where_torchruns_does():
    switches = {flag for flag, is_switch in our_options().items() if is_switch}
    assert switches == TORCHRUN_SWITCHES | {"--dry-run", "--plan", "--standby", "--restart-on-error"}


def test_every_unused_flag_says_why():
    assert all(UNUSED_WITH_VALUE.values())
    assert all(UNUSED_WITHOUT_VALUE.values())
    assert set(UNUSED_WITH_VALUE) | set(UNUSED_WITHOUT_VALUE) < set(TORCHRUN_FLAGS)


def test_the_completion_script_that_torchrun_prints_is_ours_and_needs_no_script(allranks: Allranks) -> None:
    result = allranks("run", "--print-completion", "bash")
    assert (result.returncode, result.stdout) == (0, allranks("completion", "bash").stdout)
    assert "_ALLRANKS_COMPLETE" in result.stdout


@pytest.mark.torch
def test_the_list_of_flags_is_that_of_the_torch_that_is_here():
    program = (
        "import json, torch.distributed.run as run\n"
        "print(json.dumps([(a.option_strings, a.nargs) for a in run.get_args_parser()._actions]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    actions = json.loads(done.stdout.splitlines()[-1])
    theirs = {spelling: nargs == 0 for spellings, nargs in actions for spelling in spellings}
    theirs = {spelling: is_switch for spelling, is_switch in theirs.items() if spelling not in ("-h", "--help")}
    assert set(theirs) <= set(our_options())
    assert {spelling for spelling in theirs if theirs[spelling]} == TORCHRUN_SWITCHES & set(theirs)


@pytest.mark.parametrize(
    ("text", "size"),
    [("auto", "auto"), ("4", "4"), ("4.0", "4"), ("025", "25"), ("1024.125", "1024.125")],
)
def test_the_size_of_a_bucket_is_spelled_alike_on_all_nodes(text: str, size: str):
    assert parse_bucket_mb(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.5", "-1", "4MB", "Auto", "1e3", "nan", "4097", "1,5", "4\n"])
def test_the_size_of_a_bucket_that_makes_no_sense_is_refused(text: str):
    assert (
        refusal(parse_bucket_mb, text) == f"--bucket-mb {text!r}: expected auto, or MiB from 1 to 4096, for example 4"
    )


def test_what_needs_the_hook_is_refused_without_it(tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("ALLRANKS_HOOK", "0")
    told = dry_run(tell, "--compress", "bf16", "train.py")
    assert (told.code, told.err) == (
        2, "error: --compress and --bucket-mb need the hook in the workers; unset ALLRANKS_HOOK\n"
    )  # fmt: skip


def dry_run(tell: Tell, *words: str) -> Told:
    """What `run` says before it would start; no roll call, no worker."""
    return tell("run", "--dry-run", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py", "--nproc-per-node", "2"), "--nproc-per-node"),
        (("train.py", "--lr", "1", "--nproc_per_node=2"), "--nproc_per_node"),
        (("train.py", "--hang-timeout", "5m"), "--hang-timeout"),
        (("train.py", "--no-standby"), "--no-standby"),
        (("--nproc-per-node", "1", "train.py", "--nproc-per-node", "2"), ""),  # meant for both
        (("train.py", "--backend", "nccl", "--log-dir", "x", "--lr", "1"), ""),  # the script's own, as it may be
    ],
)
def test_a_flag_behind_the_script_goes_to_the_script_and_that_is_said(
    words: tuple[str, ...], said: str, tell: Tell, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    told = dry_run(tell, *words)
    line = f"allranks: {said} stands behind the script, which gets it; for allranks run, write it before the script\n"
    assert (told.code, told.err) == (0, line if said else "")


def test_render_says_so_of_its_own_flags(tell: Tell) -> None:
    told = tell("render", "train.py", "--nodes", "2")
    assert told.err.startswith("allranks: --nodes stands behind the script, which gets it; for allranks render, ")
    assert "train.py --nodes 2 &\n" in told.out


@pytest.mark.parametrize(("words", "size"), [((), "1"), (("--nproc-per-node", "2"), "2")])
def test_the_plan_and_the_workers_environment_say_the_same_size(
    words: tuple[str, ...], size: str, tell: Tell, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    rows = [line.split() for line in dry_run(tell, *words, "train.py").out.splitlines()]
    assert [row[1] for row in rows if row[:1] in (["world_size"], ["WORLD_SIZE"])] == [size, size]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo hi\n", "x.sh: it has no #! line, so the kernel cannot start it; begin it with #!/bin/bash, or another "),
        ("", "x.sh: it is empty; begin it with #!/bin/bash, or another interpreter's path"),
        (
            "#!/bin/sh\r\necho hi\r\n",
            "x.sh: its lines end with CR LF, as on Windows, and so does the name in its #! line\n",
        ),
        ("#!/nope/bash\n", ""),  # other nodes may have it
        ("#! /usr/bin/env  bash\n", ""),
        ("\x7fELF\0", ""),
    ],
)
def test_a_program_that_the_kernel_cannot_start_is_a_usage_error(
    text: str, error: str, tell: Tell, tmp_path: Path
) -> None:
    path = tmp_path / "x.sh"
    path.write_text(text, newline="")
    path.chmod(0o755)
    told = dry_run(tell, "--no-python", "./x.sh")
    assert told.code == (2 if error else 0)
    assert told.err.startswith(f"error: {error}" if error else "")


def test_a_directory_that_python_cannot_run_is_a_usage_error(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    told = dry_run(tell, "pkg")
    words = "error: pkg: this directory has no __main__.py, which Python would run; name the script in it\n"
    assert (told.code, told.out, told.err) == (2, "", words)
    (tmp_path / "pkg/__main__.py").touch()
    assert dry_run(tell, "pkg").code == 0

"""Folding: who is in the same place, in which order a reader sees it, and how it looks."""

from __future__ import annotations

import json

import pytest

from allranks.host.slurm import JobState
from allranks.host.stacks import Frame, NodeStacks, Process, Thread
from allranks.launch.look.stack_groups import (
    StackReport,
    fold,
    name_enclosing,
    name_operation,
    render_stacks,
    stacks_to_json,
    waits_for_others,
)
from allranks.launch.look.stack_step import find_parts, srun_command
from allranks.model.errors import AllranksError, UsageError
from allranks.model.node_look import ProcessRole
from allranks.report.text import Style

ASCII = Style(is_unicode=False, has_colour=False, width=100)
UTF8 = Style(is_unicode=True, has_colour=False, width=100)

SITE = "/venv/lib/python3.11/site-packages/torch"
C10D = f"{SITE}/distributed/distributed_c10d.py"
LOADER = f"{SITE}/utils/data/dataloader.py"
LIB = "/usr/lib/python3.11"

MAIN = Frame("<module>", "/home/me/train.py", 120, "main()")
STEP = Frame("step", "/home/me/train.py", 88, "dist.all_reduce(grad)")
ALL_REDUCE = (
    Frame("all_reduce", C10D, 2810),
    Frame("wrapper", f"{SITE}/distributed/c10d_logger.py", 83),
    STEP,
    MAIN,
)
LOADING = (
    Frame("_PollLikeSelector.select", f"{LIB}/selectors.py", 415),
    Frame("wait", f"{LIB}/multiprocessing/connection.py", 947),
    Frame("Queue.get", f"{LIB}/multiprocessing/queues.py", 113),
    Frame("_MultiProcessingDataLoaderIter._next_data", LOADER, 1400),
    Frame("_BaseDataLoaderIter.__next__", LOADER, 701),
    Frame("epoch", "/home/me/train.py", 61, "for batch in loader:"),
    MAIN,
)
SLEEPING = (Frame("straggle", "/home/me/data.py", 9, "time.sleep(60)"), MAIN)


def process(rank: int | None, frames: tuple[Frame, ...] = ALL_REDUCE, **more: object) -> Process:
    facts: dict[str, object] = {
        "pid": 100 + (rank or 0),
        "role": ProcessRole.WORKER,
        "rank": rank,
        "local_rank": 0,
        "world_size": 3,
        "state": "S",
        "threads": (Thread("MainThread", True, frames),) if frames else (),
    }
    return Process(**{**facts, **more})  # type: ignore[arg-type]


def node(name: str, *processes: Process) -> NodeStacks:
    return NodeStacks(node=name, job="12", processes=processes)


def places(*documents: NodeStacks, all_threads: bool = False) -> list[tuple[list[int], str, str]]:
    return [
        (group.ranks, group.operation, group.thread or group.state or group.problem)
        for group in fold(documents, all_threads=all_threads)
    ]


def test_the_odd_one_out_comes_first_and_equal_stacks_fold_across_nodes() -> None:
    assert places(
        node("n0", process(0), process(1)),
        node("n1", process(2, SLEEPING)),
    ) == [([2], "sleep", ""), ([0, 1], "all_reduce", "")]


def test_of_two_ranks_the_one_in_no_collective_comes_first() -> None:
    assert places(node("n0", process(0), process(1, SLEEPING)))[0] == ([1], "sleep", "")


def test_many_that_load_data_come_before_few_that_wait_for_them() -> None:
    found = places(node("n0", process(0), process(1, LOADING), process(2, LOADING)))
    assert found == [([1, 2], "DataLoader next", ""), ([0], "all_reduce", "")]


@pytest.mark.parametrize("state", ["T", "t", "Z", "D"])
def test_who_is_stopped_or_dead_is_in_no_place_with_the_living(state: str) -> None:
    assert places(node("n0", process(0), process(1, state=state), process(2))) == [
        ([1], "all_reduce", state),
        ([0, 2], "all_reduce", ""),
    ]


def test_whether_it_runs_or_sleeps_makes_no_place_of_its_own() -> None:
    assert len(places(node("n0", process(0, state="R"), process(1, state="S")))) == 1


def test_the_line_within_a_library_makes_no_difference_the_user_s_line_does() -> None:
    polling = (Frame("all_reduce", C10D, 2999), *ALL_REDUCE[1:])
    elsewhere = (ALL_REDUCE[0], Frame("step", "/home/me/train.py", 90), MAIN)
    found = fold([node("n0", process(0), process(1, polling), process(2, elsewhere))])
    assert [group.ranks for group in found] == [[2], [0, 1]]


def test_stacks_without_a_user_s_frame_fold_by_their_functions() -> None:
    starting, ending = (
        (Frame("_find_spec", "<frozen importlib>", 3),),
        (Frame("_run_exitfuncs", f"{LIB}/atexit.py", 1),),
    )
    found = fold([node("n0", process(0, starting), process(1, starting), process(2, ending))])
    assert [group.ranks for group in found] == [[2], [0, 1]]


def test_what_could_not_be_read_says_why_and_folds_by_reason() -> None:
    found = places(node("n0", process(0), process(1, (), problem="may not be read"), process(2, (), problem="gone")))
    assert found == [([1], "", "may not be read"), ([2], "", "gone"), ([0], "all_reduce", "")]


def test_children_and_launchers_come_after_the_ranks() -> None:
    child = process(0, LOADING, role=ProcessRole.CHILD, pid=200)
    launcher = process(None, (Frame("main", f"{SITE}/distributed/run.py", 1),), role=ProcessRole.LAUNCHER, pid=50)
    assert [group.role for group in fold([node("n0", launcher, child, process(0))])] == ["worker", "child", "launcher"]


def test_other_threads_are_shown_on_demand_and_fold_without_their_numbers() -> None:
    threads = [(Thread("MainThread", True, ALL_REDUCE), Thread(f"Thread-{n} (log)", False, SLEEPING)) for n in (1, 2)]
    documents = node("n0", *(process(rank, threads=threads[rank]) for rank in (0, 1)))
    assert places(documents) == [([0, 1], "all_reduce", "")]
    assert places(documents, all_threads=True) == [([0, 1], "all_reduce", ""), ([0, 1], "sleep", "Thread (log)")]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (ALL_REDUCE, "all_reduce"),
        (LOADING, "DataLoader next"),
        (SLEEPING, "sleep"),
        ((Frame("all_gather", C10D, 1), Frame("all_gather_object", C10D, 2), MAIN), "all_gather_object"),
        ((Frame("_store_based_barrier", C10D, 1), Frame("init_process_group", C10D, 2), MAIN), "init_process_group"),
        ((Frame("backward", f"{SITE}/_tensor.py", 1), MAIN), "backward"),
        ((Frame("wait_tensor", f"{SITE}/distributed/_functional_collectives.py", 1), MAIN), "wait_tensor"),
        ((Frame("_sync_buffers", f"{SITE}/nn/parallel/distributed.py", 1), MAIN), "broadcast_buffers"),
        ((Frame("_sync_module_states", f"{SITE}/distributed/utils.py", 1), MAIN), "broadcast_parameters"),
        ((Frame("Popen._try_wait", f"{LIB}/subprocess.py", 1), MAIN), "wait for a subprocess"),
        ((Frame("load", f"{SITE}/serialization.py", 1), MAIN), "torch.load"),
        ((Frame("save", f"{SITE}/distributed/checkpoint/state_dict_saver.py", 1), MAIN), "checkpoint save"),
        ((Frame("init_process_group_with_names", "/x/allranks/join/group.py", 1), MAIN), "init_process_group"),
        ((Frame("forward", f"{SITE}/nn/modules/linear.py", 1), MAIN), ""),
        ((Frame("all_reduce", "/home/me/own.py", 1, "x = 1"), MAIN), ""),
        ((), ""),
    ],
)
def test_the_operation_is_the_known_call_below_the_user_s_line(frames: tuple[Frame, ...], expected: str) -> None:
    assert name_operation(frames) == expected


@pytest.mark.parametrize(
    ("operation", "waits"),
    [("all_reduce", True), ("broadcast_buffers", True), ("wait_tensor", True), ("sleep", False), ("", False)],
)
def test_what_ends_only_when_others_make_it_too_is_known(operation: str, waits: bool) -> None:
    assert waits_for_others(operation) == waits


def test_a_dataset_that_is_stuck_is_known_to_be_inside_the_data_loader() -> None:
    frames = (SLEEPING[0], Frame("fetch", f"{SITE}/utils/data/_utils/fetch.py", 54), *LOADING[3:])
    assert name_enclosing(frames) == "DataLoader next at train.py:61"
    assert name_enclosing(LOADING) == ""


def test_frames_that_allranks_adds_to_a_worker_are_not_shown_nor_counted() -> None:
    calls = "/x/allranks/guard/inside/calls.py"
    wrapped = (ALL_REDUCE[0], Frame("_Collective.wrapped.<locals>.call", calls, 118), *ALL_REDUCE[1:])
    documents = [[node("n0", process(0, frames))] for frames in (ALL_REDUCE, wrapped)]
    plain, mine = [render_stacks(StackReport(job="12", documents=each), fold(each), ASCII) for each in documents]
    assert mine == plain
    assert "all_reduce (torch/distributed/distributed_c10d.py:2810)" in mine


def test_of_a_rank_that_is_only_in_code_of_allranks_that_code_is_shown() -> None:
    documents = [node("n0", process(0, (Frame("_load_group", "/x/allranks/join/hook.py", 83),)))]
    assert "  _load_group (" in render_stacks(StackReport(job="12", documents=documents), fold(documents), ASCII)


GOLDEN = """\
job 12: 3 ranks on 3 of 4 nodes, 2 places

x n3   did not answer within 20 s
x rank 3   no process found: it never started, or has ended
x n2   no Python process of the job

rank 2   n1   pid 102   DataLoader next at train.py:61 epoch   0 % CPU
  /home/me/train.py:120  <module>  main()
  /home/me/train.py:61   epoch     for batch in loader:
    _BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py:701)
    _MultiProcessingDataLoaderIter._next_data (torch/utils/data/dataloader.py:1400)
    ... 3 more, down to _PollLikeSelector.select

2 ranks (0-1)   n0   all_reduce at train.py:88 step   0-100 % CPU
  /home/me/train.py:120  <module>  main()
  /home/me/train.py:88   step      dist.all_reduce(grad)
    all_reduce (torch/distributed/distributed_c10d.py:2810)"""


def report() -> StackReport:
    documents = [
        node("n0", process(0, world_size=4), process(1, world_size=4, cpu=1.0)),
        node("n1", process(2, LOADING, world_size=4)),
        node("n2"),
    ]
    return StackReport(job="12", documents=documents, silent={"n3": "did not answer within 20 s"})


def test_the_report_in_ascii() -> None:
    assert render_stacks(report(), fold(report().documents), ASCII) == GOLDEN


def test_the_report_in_utf8() -> None:
    expected = GOLDEN.replace("\nx ", "\n✗ ").replace("...", "…")
    assert render_stacks(report(), fold(report().documents), UTF8) == expected


def test_the_states_and_reasons_stand_in_the_headline() -> None:
    documents = [
        node(
            "n0",
            process(0, state="T"),
            process(1, state="D", kernel_wait="nfs_wait_bit_killable"),
            process(2, (), problem="has ended (zombie)", state="Z"),
        )
    ]
    text = render_stacks(StackReport(job="12", documents=documents), fold(documents), ASCII)
    heads = [line for line in text.splitlines() if line.startswith("rank")]
    assert heads == [
        "rank 2   n0   pid 102   has ended (zombie)   0 % CPU",
        "rank 0   n0   pid 100   stopped by a signal, all_reduce at train.py:88 step   0 % CPU",
        "rank 1   n0   pid 101   waits in the kernel (nfs_wait_bit_killable), all_reduce at train.py:88 step   0 % CPU",
    ]


def test_control_characters_of_a_source_line_do_not_reach_the_terminal() -> None:
    documents = [node("n0", process(0, (Frame("f", "/home/me/x.py", 1, "print('\x1b[2J')"),)))]
    assert "\x1b" not in render_stacks(StackReport(job="", documents=documents), fold(documents), UTF8)


def test_a_thousand_nodes_fold_into_one_line() -> None:
    documents = [node(f"n{index:04}", process(index, world_size=1024)) for index in range(1024)]
    text = render_stacks(StackReport(job="12", documents=documents), fold(documents), ASCII)
    assert "1024 ranks (0-1023)   n[0000-1023]   all_reduce at train.py:88 step" in text


def test_the_json_has_groups_and_everything_that_was_read() -> None:
    found = json.loads(stacks_to_json([(report(), fold(report().documents))]))
    assert found["silent"] == {"n3": "did not answer within 20 s"}
    assert found["missing_ranks"] == [3]
    assert [(group["ranks"], group["operation"]) for group in found["groups"]] == [
        ([2], "DataLoader next"),
        ([0, 1], "all_reduce"),
    ]
    assert found["groups"][1]["place"]["line"] == 88
    assert found["documents"][0]["processes"][0]["threads"][0]["frames"][0]["function"] == "all_reduce"


HET = (
    JobState(id="4+0", number="4", state="RUNNING", nodes="node01"),
    JobState(id="4+1", number="5", state="RUNNING", nodes="node[02-03]"),
)


@pytest.mark.parametrize(
    ("known", "reached"),
    [
        ([JobState(id="7", number="7", state="RUNNING", nodes="n[1-2]")], [("--jobid=7", "--nodes=2")]),
        ([JobState(id="3_1", number="9", state="RUNNING", nodes="n1")], [("--jobid=9", "--nodes=1")]),
        (
            [
                JobState(id="3_0", number="8", state="FAILED"),
                JobState(id="3_1", number="9", state="RUNNING", nodes="n1"),
            ],
            [("--jobid=9", "--nodes=1")],
        ),
        (HET, [("--jobid=4", "--nodes=1", "--het-group=0"), ("--jobid=4", "--nodes=2", "--het-group=1")]),
    ],
)
def test_what_slurm_knows_of_a_job_becomes_what_one_srun_reaches(
    known: list[JobState], reached: list[tuple[str, ...]]
) -> None:
    commands = [srun_command(part) for part in find_parts("7", known)]
    assert len(commands) == len(reached)
    for command, words in zip(commands, reached, strict=True):
        assert set(words) <= {*command}
        assert any(word.startswith("--het-group") for word in command) == (len(words) == 3)


@pytest.mark.parametrize(
    ("known", "error", "words"),
    [
        ([], UsageError, "job 7: SLURM knows no such job"),
        ([JobState(id="7", state="COMPLETED")], AllranksError, "job 7 has ended"),
        ([JobState(id="7", state="PENDING", reason="Resources")], AllranksError, "job 7 is PENDING (Resources)"),
        (
            [JobState(id="7_0", state="RUNNING", nodes="n1"), JobState(id="7_1", state="RUNNING", nodes="n2")],
            UsageError,
            "give one of its running jobs: 7_0, 7_1",
        ),
    ],
)
def test_a_job_without_one_place_to_look_is_refused(known: list[JobState], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        find_parts("7", known)
    assert words in str(caught.value)


def test_the_step_takes_nothing_from_the_job() -> None:
    command = srun_command(HET[1])
    assert {"--jobid=4", "--het-group=1", "--overlap", "--nodes=2", "--ntasks=2", "--gres=none", "--mem=0"} <= {
        *command
    }
    assert command[-6:] == ["-P", "-m", "allranks", "stack", "--here", "4"]


def test_a_source_line_is_shown_without_its_secret() -> None:
    frames = (Frame("login", "/home/me/train.py", 9, 'login(token="hf_abcdefghijklmnopqrst")'), MAIN)
    report = StackReport(job="12", documents=[node("node\x1b[2J01", process(0, frames))])
    shown = render_stacks(report, fold(report.documents), ASCII)
    assert "hf_abc" not in shown + stacks_to_json([(report, fold(report.documents))])
    assert 'login(token="(hidden)")' in shown
    assert "\x1b" not in shown

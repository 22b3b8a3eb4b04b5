"""Where does the output of another run begin, that was appended to a file?"""

from __future__ import annotations

from collections.abc import Callable

from allranks.why.appended import find_further_runs
from allranks.why.attempts import Attempts
from allranks.why.logs.log_events import Logs
from allranks.why.times import Times

Read = Callable[[str], Logs]
STEPS = "step 0 loss 3.0\nstep 1 loss 2.9\nstep 2 loss 2.8\n"
CRASH = 'Traceback (most recent call last):\n  File "/home/kim/train.py", line 27, in <module>\n{error}\n'


def summary(rank: int, pid: int, *, host: str = "n1") -> str:
    """Return torchrun's summary of one worker."""
    return f"""============
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_04:41:11
  host      : {host}
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: {pid})
  error_file: <N/A>
"""


def failed(agent: int, pid: int) -> str:
    """Return what torchrun's agent tells of a worker that failed."""
    where = f"E1130 05:28:06.315000 {agent} torch/distributed/elastic/multiprocessing/api.py:1002]"
    return f"{where} failed (exitcode: 1) local_rank: 1 (pid: {pid}) of binary: python\n"


def told_to_end(pid: int) -> str:
    """Return how torchrun's agent ends at a signal."""
    return f"torch.distributed.elastic.multiprocessing.api.SignalException: Process {pid} got signal: 15\n"


def runs(logs: Logs) -> list[str]:
    """Return the first lines of further runs."""
    return [run.first.text for run in find_further_runs(logs, Times(logs), ())]


def test_a_second_summary_of_one_rank_is_another_runs(read: Read) -> None:
    assert runs(read(summary(1, 14205) + "world_size=2\n" + summary(1, 15012))) == ["world_size=2"]


def test_the_same_summary_twice_is_one_runs(read: Read) -> None:
    assert runs(read(summary(1, 14205) + "world_size=2\n" + summary(1, 14205))) == []


def test_summaries_of_two_ranks_are_one_runs(read: Read) -> None:
    assert runs(read(summary(1, 14205) + "world_size=2\n" + summary(2, 15012))) == []


def test_steps_below_a_summary_are_another_runs(read: Read) -> None:
    assert runs(read(STEPS + summary(1, 14205) + STEPS)) == ["step 0 loss 3.0"]
    assert runs(read(summary(1, 14205) + STEPS)) == ["step 0 loss 3.0"]


def test_an_exception_in_a_summary_is_the_runs_above(read: Read) -> None:
    told = summary(1, 14205).replace("error_file: <N/A>", "traceback : Traceback (most recent call last):")
    told += '    File "/home/kim/train.py", line 3, in main\n  KeyError: 1\n'
    assert runs(read(told + STEPS)) == ["step 0 loss 3.0"]


def test_steps_below_a_summary_may_be_another_nodes(read: Read) -> None:
    assert runs(read(summary(1, 14205) + STEPS + summary(9, 14205, host="n2"))) == []


def test_an_agent_that_goes_on_has_started_its_workers_again(read: Read) -> None:
    log = failed(7771, 7799) + "world_size=2\n" + failed(7771, 7850) + summary(1, 7850)
    assert runs(read(log)) == ["world_size=2"]


def test_another_agent_is_another_nodes(read: Read) -> None:
    assert runs(read(failed(7771, 7799) + "world_size=2\n" + failed(8120, 7850))) == []


def test_an_agent_that_is_told_to_end_is_one(read: Read) -> None:
    assert runs(read(told_to_end(7771) + "world_size=2\n" + told_to_end(7771))) == []
    assert runs(read(told_to_end(7771) + "world_size=2\n" + told_to_end(8120))) == []
    assert runs(read(told_to_end(7771) + STEPS)) == ["step 0 loss 3.0"]


def test_a_lone_script_that_fails_again_is_another_run(read: Read) -> None:
    first, second = CRASH.format(error="KeyError: 'tokens'"), CRASH.format(error="ValueError: bad batch")
    assert runs(read(first + second)) == ["Traceback (most recent call last):"]
    assert runs(read(STEPS + first + STEPS + first)) == ["step 0 loss 3.0"]
    assert runs(read(first + STEPS)) == ["step 0 loss 3.0"]


def test_steps_that_go_on_below_a_summary_are_no_other_run(read: Read) -> None:
    assert runs(read(STEPS + summary(1, 14205) + STEPS.replace("step ", "step 1"))) == []


def test_steps_of_an_epilog_are_no_other_run(read: Read) -> None:
    assert runs(read(STEPS + summary(1, 14205) + "step 1: logs\nstep 2: upload\nstep 3: done\n")) == []


def test_another_script_that_fails_is_another_part_of_the_job(read: Read) -> None:
    assert runs(read(summary(1, 14205) + summary(1, 15012).replace("train.py", "eval.py"))) == []
    first, second = CRASH.format(error="KeyError: 'tokens'"), CRASH.format(error="ValueError: bad batch")
    assert runs(read(first + second.replace("train.py", "eval.py"))) == []


def test_where_a_line_tells_of_ranks_exceptions_are_not_one_after_the_other(read: Read) -> None:
    first, second = CRASH.format(error="KeyError: 'tokens'"), CRASH.format(error="ValueError: bad batch")
    told = "[W1130 04:41:11.1 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed\n"
    assert runs(read(first + second + told)) == []


def test_a_chain_of_exceptions_is_one_runs(read: Read) -> None:
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    first, second = CRASH.format(error="KeyError: 'tokens'"), CRASH.format(error="ValueError: bad batch")
    assert runs(read(first + chain + second)) == []


def test_an_exception_that_a_function_caught_ends_no_run(read: Read) -> None:
    caught = CRASH.format(error="KeyError: 'tokens'").replace("<module>", "load")
    assert runs(read(caught + CRASH.format(error="ValueError: bad batch"))) == []


def test_where_ranks_write_exceptions_are_not_one_after_the_other(read: Read) -> None:
    first, second = CRASH.format(error="KeyError: 'tokens'"), CRASH.format(error="ValueError: bad batch")
    assert runs(read(first + second + "[rank2]: KeyError: 'labels'\n")) == []


TASKS = "srun: error: n1: tasks 0-1: Exited with exit code 1\n"
KILLED = "srun: error: n1: tasks 0-1: Terminated\n"
REQUEUED = "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-30T04:41:11 DUE TO JOB REQUEUE ***\n"
FAILED = CRASH.format(error="KeyError: 'tokens'") + TASKS


def test_a_task_that_ends_twice_is_another_runs(read: Read) -> None:
    second = "again\n" + FAILED.replace("KeyError: 'tokens'", "ValueError: bad batch")
    assert runs(read(FAILED + second)) == ["again"]
    assert runs(read(FAILED + second.replace("train.py", "eval.py"))) == []


def test_steps_that_begin_anew_where_all_tasks_have_ended_are_another_runs(read: Read) -> None:
    assert runs(read(STEPS + TASKS + STEPS)) == ["step 0 loss 3.0"]
    assert runs(read(STEPS + TASKS.replace("tasks 0-1", "task 1") + STEPS)) == []
    assert runs(read(STEPS + TASKS.replace("tasks 0-1", "task 0") + STEPS)) == []
    assert runs(read(TASKS + STEPS)) == []  # what a task had in its buffer


def test_an_epoch_that_follows_is_no_other_run(read: Read) -> None:
    first, second = (STEPS.replace("step", f"epoch {epoch} step") for epoch in (1, 2))
    assert runs(read(first + TASKS + second)) == []
    assert runs(read(second + TASKS + first)) == ["epoch 1 step 0 loss 3.0"]


def test_steps_that_begin_anew_below_a_requeue_are_another_runs(read: Read) -> None:
    assert runs(read(STEPS + REQUEUED + KILLED + STEPS)) == ["step 0 loss 3.0"]
    saved = STEPS.replace("step ", "step 1")  # they go on to the end of the grace time
    assert runs(read(STEPS + REQUEUED + saved)) == []
    assert runs(read(REQUEUED + STEPS + KILLED)) == []
    assert runs(read(REQUEUED + STEPS + TASKS)) == []


def test_summaries_of_several_nodes_are_one_end(read: Read) -> None:
    both = summary(1, 14205) + summary(9, 14205, host="n2")
    assert runs(read(STEPS + both + STEPS)) == ["step 0 loss 3.0"]
    assert runs(read(both + "world_size=2\n" + both.replace("14205", "15012"))) == ["world_size=2"]


def test_the_file_of_another_node_below_is_no_further_run(read: Read) -> None:
    first, second = (STEPS.replace("step", f"2026-11-30 04:4{minute}:00 step") for minute in (3, 1))
    assert runs(read(first + CRASH.format(error="KeyError: 1") + second)) == []


def test_each_pod_begins_again_with_its_own_agents_words(read: Read) -> None:
    restart = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    told = [("a", restart), ("b", error), ("b", restart), ("b", error)]
    logs = read("".join(f"[pod/worker-{pod}/main] {word}\n" for pod, word in told))
    attempts = Attempts(logs, Times(logs))
    assert [attempts.attempt_of(event.line) for event in logs.of("cuda-oom")] == [0, 1]

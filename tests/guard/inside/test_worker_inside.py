"""Does the agent know how far a real worker is while it trains, waits, is stopped, holds its GIL, or is dead?"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from harness import Started, standing_by, workers

from allranks.guard.inside.pace_words import STEPS
from allranks.guard.node.worker import WatchedWorker
from allranks.model.beat import CallSeen, GroupSeen, ProcessState, RankBeat
from conftest import wait_until

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with standing_by(tmp_path_factory.mktemp("standby") / "train.py"):
        yield


def watch(started: Started, rank: int = 0) -> WatchedWorker:
    return WatchedWorker(rank=rank, pid=started.pid, cell=started.cell)


def group(beat: RankBeat, name: str = "0") -> GroupSeen:
    (found,) = (each for each in beat.groups if each.name == name)
    return found


def last_call(beat: RankBeat) -> CallSeen:
    return beat.calls[-1]


def look_at_call(view: WatchedWorker, seq: int) -> RankBeat | None:
    """Its beat, once this call is its last one."""
    found = view.look()
    is_told = found.groups and group(found).enqueued == seq
    return found if is_told and found.calls and found.calls[-1].seq == seq else None


def test_who_waits_in_a_collective_and_who_never_came_are_told_apart(tmp_path: Path):
    text = """
        dist.init_process_group("gloo")
        only_0 = dist.new_group([0])
        both = dist.new_group([0, 1])
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(2, 3), group=both)
        if RANK == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)

        def evaluate():
            if RANK == 1:
                time.sleep(60)

        evaluate()
        dist.broadcast(torch.ones(5, dtype=torch.float64), 0)
        """
    with workers(tmp_path, text) as (waiting, late):
        views = watch(waiting, 0), watch(late, 1)
        first = wait_until(lambda: (beat := views[0].look()).calls[1:] and beat, "rank 0 to wait for long")
        second = wait_until(lambda: group(beat := views[1].look()).completed == 3 and beat, "rank 1 to tell the same")
    assert [each.name for each in first.groups] == ["0", "1", "2"]
    assert [each.name for each in second.groups] == ["0", "2"]
    assert group(first).ranks == ()  # all
    assert group(first, "1").ranks == (0,)
    assert (group(first).enqueued, group(first).completed) == (4, 3)  # the send is not counted
    assert (group(second).enqueued, group(second).completed) == (3, 3)
    assert (group(first, "2").completed, group(second, "2").completed) == (1, 1)
    assert group(first).waiting_s > 0.3
    assert group(second).waiting_s == 0
    assert first.main_at == "train.py:23 in <module>"
    assert second.main_at == "train.py:20 in evaluate"
    call = last_call(first)
    assert (call.group, call.seq, call.op, call.sizes, call.dtypes, call.is_done, call.place) == (
        "0", 4, "broadcast", ((5,),), ("Double",), False, "train.py:23 in <module>",
    )  # fmt: skip
    call = last_call(second)
    assert (call.op, call.seq, call.peer, call.is_done) == ("recv", 1, 0, True)
    assert (first.phase, first.state, first.blind) == ("training", ProcessState.SLEEPING, ())
    assert first.silent_s is not None
    assert first.silent_s < 20


def test_a_stopped_worker_is_seen_stopped_and_its_ages_go_on(tmp_path: Path):
    with workers(tmp_path, "dist.init_process_group('gloo')\ntime.sleep(60)\n", num=1) as (worker,):
        view = watch(worker)
        wait_until(worker.told, "the first beat")
        worker.process.send_signal(signal.SIGSTOP)
        beat = wait_until(lambda: (b := view.look()).state_for_s > 1.2 and b, "the ages")
        assert beat.state is ProcessState.STOPPED
        assert beat.silent_s > 1.0
        worker.process.send_signal(signal.SIGCONT)
        stopped = ProcessState.STOPPED
        wait_until(lambda: (b := view.look()).silent_s < 0.5 and b.state is not stopped, "the beat to go on")
        wait_until(lambda: view.look().state_for_s < 1.2, "a new state")


def test_a_worker_that_holds_its_gil_is_silent_and_runs_and_its_place_is_known(tmp_path: Path):
    text = r"""
        import re
        dist.init_process_group("gloo")
        time.sleep(1)

        def parse():
            re.match(r"(a+)+$", "a" * 40 + "b")  # exponential, and never lets go of the GIL

        parse()
        """
    with workers(tmp_path, text, num=1) as (worker,):
        view = watch(worker)
        wait_until(worker.told, "the first beat")
        before = wait_until(lambda: (b := view.look()).silent_s > 1.1 and b, "silence")
        beat = wait_until(lambda: "parse" in (b := view.look()).main_at and b, "py-spy")
    assert before.state is ProcessState.RUNNING
    assert beat.cpu_s > before.cpu_s
    assert beat.main_at == "train.py:12 in parse"


def test_a_rank_that_gloo_aborts_has_left_what_it_called(tmp_path: Path):
    text = """
        dist.init_process_group("gloo")
        time.sleep(0.5)
        dist.all_reduce(torch.ones(4))

        def step():
            dist.all_reduce(torch.ones(1000000 if RANK == 0 else 10))

        step()
        """
    with workers(tmp_path, text) as started:
        views = [watch(each, rank) for rank, each in enumerate(started)]
        # Not for the survivor: now and then Gloo closes its connection and wakes nobody (torch 2.13, one in 15).
        wait_until(lambda: -signal.SIGABRT in [each.process.poll() for each in started], "the abort")
        beats = [wait_until(partial(look_at_call, view, 2), "the second call") for view in views]
        aborted = [each.process.poll() == -signal.SIGABRT for each in started]
    assert {beat.state for beat, is_aborted in zip(beats, aborted, strict=True) if is_aborted} == {ProcessState.GONE}
    calls = [last_call(beat) for beat in beats]
    assert [(call.seq, call.op, call.sizes) for call in calls] == [
        (2, "all_reduce", ((1000000,),)),
        (2, "all_reduce", ((10,),)),
    ]
    assert [call.place for call in calls] == ["train.py:12 in step"] * 2


def test_an_exception_in_a_backward_pass_leaves_the_recorders_last_calls(tmp_path: Path):
    text = """
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        for step in range(20):
            if RANK == 1 and step == 15:
                os._exit(3)
            model(torch.ones(1, 3)).sum().backward()
        """
    with workers(tmp_path, text) as started:
        views = [watch(each, rank) for rank, each in enumerate(started)]
        codes = [each.process.wait(120) for each in started]
        survivor = views[0].look()
        words = started[0].cell.read().words
    assert codes == [1, 3]
    assert words is not None
    assert [call.op for call in survivor.calls[-3:]] == ["all_reduce"] * 3
    assert last_call(survivor).sizes == ((8,),)  # weights and biases of the model, in one bucket
    assert survivor.phase == "leaving"


def test_the_last_calls_are_told_however_soon_the_end_comes_after_them(tmp_path: Path):
    text = """
        dist.init_process_group("gloo")
        for number in range(14):
            if number == 5:
                time.sleep(0.5)  # those before are told, and the next dump of the recorder is a second away
            dist.all_reduce(torch.ones(4))
        """
    with workers(tmp_path, text) as started:
        views = [watch(each, rank) for rank, each in enumerate(started)]
        assert [each.process.wait(120) for each in started] == [0, 0]
        beats = [view.look() for view in views]
    assert [(group(beat).enqueued, beat.phase) for beat in beats] == [(14, "leaving")] * 2
    # Where the beats were late, the last one has some that were made before the pause, too.
    assert [[seq for _, seq, _ in beat.lags][-9:] for beat in beats] == [[*range(6, 15)]] * 2


def test_lags_are_of_the_same_calls_on_all_ranks(tmp_path: Path):
    text = """
        dist.init_process_group("gloo")
        for step in range(150):
            if RANK == 1:
                time.sleep(0.02)
            dist.all_reduce(torch.ones(4))
        time.sleep(60)
        """
    lags: list[dict[int, int]] = [{}, {}]
    with workers(tmp_path, text) as started:
        views = [watch(each, rank) for rank, each in enumerate(started)]

        def collect() -> bool:
            for own, view in zip(lags, views, strict=True):
                new = view.look().lags
                assert len(new) <= 18
                own.update({seq: created_ns for _, seq, created_ns in new})
            return all(own and max(own) > 100 for own in lags)

        wait_until(collect, "lags of the last calls")
    common = sorted(set(lags[0]) & set(lags[1]))
    assert len(common) >= 5
    late_ns = [lags[1][seq] - lags[0][seq] for seq in common]
    assert sorted(late_ns)[len(late_ns) // 2] > 10e6


def test_children_of_a_worker_stay_silent_and_it_beats_on(tmp_path: Path):
    text = """
        from torch.utils.data import DataLoader
        class Data:
            def __len__(self): return 8
            def __getitem__(self, index):
                module = sys.modules.get("_allranks_inside.cell")
                cell = module and module.Cell.inherited()
                return int(cell is not None and cell.claim())
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            for context in ("fork", "spawn"):
                loader = DataLoader(Data(), num_workers=1, multiprocessing_context=context)
                print("claimed", sum(int(batch.sum()) for batch in loader), flush=True)
            time.sleep(60)
        """
    with workers(tmp_path, text, num=1) as (worker,):
        wait_until(lambda: worker.out.read_text().count("claimed 0") == 2, "both kinds of DataLoader workers")
        read = worker.cell.read()
        assert read.pid == worker.pid
        before = read.told
        wait_until(lambda: worker.cell.read().told != before, "another beat")


def test_without_the_hook_and_without_torch_nothing_is_told(tmp_path: Path):
    text = "dist.init_process_group('gloo')\ndist.barrier()\nprint(sorted(n for n in sys.modules if 'allranks' in n))\n"
    with workers(tmp_path, text, num=1, ALLRANKS_HOOK="0") as (worker,):
        assert worker.process.wait(120) == 0
        assert worker.cell.read() == (0, None, None, None, None, None, False, None, None, None, "", None, None)
        assert worker.out.read_text() == "[]\n"
    plain = tmp_path / "plain"
    (plain / "torch").mkdir(parents=True)
    for name in ("__init__.py", "distributed.py"):  # so that it never imports the real one
        (plain / "torch" / name).write_text("")
    with workers(plain, "time.sleep(60)\n", num=1, fresh=True) as (worker,):
        view = watch(worker)
        wait_until(lambda: view.look().cpu_s > 0, "the process")
        time.sleep(0.3)
        beat = view.look()
    assert beat.silent_s is None
    assert (beat.groups, beat.calls, beat.phase, beat.blind) == ((), (), "", ())


def test_the_functions_are_what_they_were(tmp_path: Path):
    text = """
        import inspect, pickle, traceback, warnings
        from torch.distributed import all_reduce
        from torch.distributed.distributed_c10d import all_reduce as same
        assert dist.all_reduce is all_reduce is same
        print(inspect.signature(dist.all_reduce), dist.all_reduce.__name__, dist.all_reduce.__module__)
        dist.init_process_group("gloo")
        assert pickle.loads(pickle.dumps(dist.broadcast)) is dist.broadcast
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        try:
            dist.all_reduce("no tensor")
        except TypeError as exc:
            print(exc, [(frame.name, frame.filename) for frame in traceback.extract_tb(exc.__traceback__)])
        print(dist.all_reduce(torch.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER))

        @torch.compile(fullgraph=True, backend="eager")
        def compiled(x):
            y = x * 2
            dist.all_reduce(y)
            return y + 1

        print(compiled(torch.ones(2)).tolist())

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)
        step = torch.compile(optimizer.step, backend="eager")

        @torch.compile(backend="eager")
        def between_graphs(x):
            batch = next(iter(loader))
            work = dist.all_reduce(y := model(batch) * 2, async_op=True)
            work.wait()
            torch.save(x, os.devnull)
            (y + x).sum().backward()
            return step()

        for batch in loader:
            between_graphs(batch[:, :1])
        dist.destroy_process_group()
        """
    with workers(tmp_path, text, num=1, fresh=True) as (with_us,):
        assert with_us.process.wait(100) == 0, with_us.out.read_text()
        read, ours = with_us.cell.read(), with_us.out.read_text()
    with workers(tmp_path, text, num=1, ALLRANKS_HOOK="0") as (without,):
        assert without.process.wait(100) == 0, without.out.read_text()
        theirs = without.out.read_text()
    # No warning of Dynamo about code of ours, that is; its own lines have a time.
    told, own = ([line for line in text.splitlines() if "torch/_logging" not in line] for text in (ours, theirs))
    assert [line for line in told if not line.startswith("allranks: all")] == own
    assert "[3.0, 3.0]" in own
    assert read.call is not None
    assert json.loads(read.call.data)["op"] == "all_reduce"
    assert read.pace is not None
    assert read.pace[STEPS] == 3


def test_the_traceback_of_an_import_that_fails_is_what_it_was(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import math\nraise RuntimeError('a library is missing')\n")
    told = []
    for hook in "10":
        with workers(tmp_path, "", num=1, ALLRANKS_HOOK=hook) as (worker,):
            assert worker.process.wait(60) == 1
            told.append(worker.out.read_text())
    assert told[0] == told[1]
    assert told[0].endswith("RuntimeError: a library is missing\n")


def test_a_group_that_is_formed_again_counts_anew(tmp_path: Path):
    text = """
        for number in range(2):
            dist.init_process_group("gloo")
            for _ in range(3 - number):
                dist.all_reduce(torch.ones(2))
            dist.destroy_process_group() if number == 0 else time.sleep(60)
        """
    with workers(tmp_path, text, num=1) as (started,):
        view = watch(started)

        def second() -> RankBeat | None:
            found = view.look()
            return found if [each.completed for each in found.groups] == [2] else None

        beat = wait_until(second, "the two collectives of the second group")
        call = started.cell.read().call
    assert [(each.name, each.enqueued, each.completed) for each in beat.groups] == [("0#2", 2, 2)]
    assert call is not None
    told = json.loads(call.data)
    assert (told["group"], told["seq"]) == ("0#2", 2)


@pytest.mark.torch
def test_the_threads_of_gloo_have_time_before_the_default_group_goes():
    script = """
        import time
        from torch.distributed import HashStore, distributed_c10d as c10d
        from allranks.guard.inside import entry

        entry.arm(c10d)
        waited = []
        entry.time.sleep = lambda seconds: waited.append((seconds, c10d.is_initialized()))
        c10d.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        c10d.destroy_process_group(c10d.new_group([0]))
        assert waited == []
        c10d.destroy_process_group()
        assert (waited, c10d.is_initialized()) == ([(entry.LET_GO_S, True)], False)
        """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr

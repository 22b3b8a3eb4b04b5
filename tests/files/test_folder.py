"""A directory held by its descriptor: nobody who owns its parent can lead what is written elsewhere."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks.files.folder import Folder, can_swap, why_not_ours, write_named
from allranks.launch.book_writer import BookWriter
from allranks.model.errors import UsageError
from allranks.model.finding import Verdict
from allranks.report.growth import GrowthRecorder
from allranks.report.rundir import RunDir

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def as_other(action: Callable[[], object], become: Callable[[int], object] = os.setuid) -> None:
    """Do it in a process of another user."""
    if (pid := os.fork()) == 0:
        try:
            os.chdir("/")
            become(NOBODY)
            action()
            os._exit(0)
        except BaseException as exc:
            os.write(2, f"{exc!r}\n".encode())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def runs(place: Path) -> Path:
    """The directory `runs` of another user in a sticky one, where this process runs jobs."""
    (sticky := place / "shared").mkdir()
    sticky.chmod(0o1777)
    as_other(lambda: (sticky / "runs").mkdir())
    return sticky / "runs"


@pytest.fixture
def victim(place: Path) -> Path:
    path = place / "victim"
    path.write_text("root's own\n")
    path.chmod(0o600)
    return path


def begin(runs: Path) -> RunDir:
    run_dir = RunDir(runs, "7")
    run_dir.create()
    run_dir.create_attempt(0)
    run_dir.create_node("n1")
    return run_dir


def write_all(run_dir: RunDir) -> None:
    """Write whatever a job writes."""
    node = run_dir.create_node("n1")
    recorder = GrowthRecorder(node)
    recorder.watch(["rank_0.out"])
    for name in ("rank_0.out", "rank_0.err"):
        with node.append(name) as file:
            file.write(b"output\n")
    recorder.end()
    writer = BookWriter()
    writer.write(node, b"book")
    writer.end()
    run_dir.write_settings("n1", [])
    run_dir.add_event("started")
    run_dir.touch_events()
    run_dir.write_roll_call({})
    run_dir.write_exit_code(0)
    run_dir.hold().write_whole("leader.json", b"{}")
    run_dir.write_verdict(Verdict(job="7", attempt=0, exit_code=0), node="n1")


OF_A_JOB = [
    "attempt_0/events.jsonl", "attempt_0/exit_code", "attempt_0/n1/book.bin", "attempt_0/n1/env.json",
    "attempt_0/n1/growth", "attempt_0/n1/rank_0.err", "attempt_0/n1/rank_0.out", "attempt_0/n1/verdict.json",
    "attempt_0/roll_call.json", "attempt_0/verdict.json", "leader.json",
]  # fmt: skip


def files_below(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file() or each.is_symlink())


def put_links(place: Path, target: Path) -> None:
    """Have links to a file of root where a job has its files."""
    for name in OF_A_JOB:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(target)


def swap(runs: Path, victim: Path) -> None:
    (runs / "7").rename(runs / "aside")
    put_links(runs / "7", victim)


@needs_root
@pytest.mark.parametrize("is_late", [False, True], ids=["before the attempt", "while it runs"])
def test_who_owns_the_parent_cannot_lead_output_into_another_file(runs: Path, victim: Path, is_late: bool) -> None:
    if is_late:
        run_dir = begin(runs)
        as_other(lambda: swap(runs, victim))
    else:
        run_dir = RunDir(runs, "7")
        run_dir.create()
        as_other(lambda: swap(runs, victim))
        run_dir.create_attempt(0)
    write_all(run_dir)
    assert victim.read_text() == "root's own\n"
    assert files_below(runs / "aside") == OF_A_JOB
    assert run_dir.read_events()[0]["event"] == "started"
    assert not run_dir.hold().is_in_place


@needs_root
@pytest.mark.parametrize(
    "make",
    [
        lambda place, victim: put_links(place, victim),
        lambda place, victim: place.mkdir(),
        lambda place, victim: place.symlink_to(victim.parent),
        lambda place, victim: place.symlink_to(place.parent),
    ],
    ids=["links", "empty", "a link to a directory of root", "a link to one's own"],
)
def test_a_run_directory_of_another_user_is_refused_in_a_line(runs: Path, victim: Path, make) -> None:
    as_other(lambda: make(runs / "7", victim))
    with pytest.raises(UsageError) as refused:
        RunDir(runs, "7").create()
    why = {
        True: "a link instead of a directory",
        False: "it belongs to user 65534, but this job's files belong to user 0",
    }[(runs / "7").is_symlink()]
    assert str(refused.value) == (
        f"{runs}/7: {why}; logs and verdicts go there; choose another directory with --log-dir"
    )
    follower = RunDir(runs, "7")
    with pytest.raises(UsageError, match=why):
        follower.create_node("n1")
    write_anyway(follower)
    assert victim.read_text() == "root's own\n"


def write_anyway(run_dir: RunDir) -> None:
    """What cannot be written stops no job."""
    run_dir.add_event("started")
    run_dir.write_exit_code(0)
    assert run_dir.write_verdict(Verdict(job="7", attempt=0, exit_code=0), node="n1") is True


@pytest.mark.parametrize("below", ["attempt_0", "attempt_0/n1"])
def test_a_link_in_place_of_an_attempt_or_a_node_is_refused(tmp_path: Path, below: str) -> None:
    RunDir(tmp_path, "7").create()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "7" / below).parent.mkdir(exist_ok=True)
    (tmp_path / "7" / below).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=rf"/{below}: a link instead of a directory; choose another directory"):
        RunDir(tmp_path, "7").create_node("n1")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@needs_root
def test_the_runs_of_a_colleague_may_be_the_parent(runs: Path) -> None:
    write_all(begin(runs))
    assert (files_below(runs / "7"), (runs / "7").stat().st_uid, runs.stat().st_uid) == (OF_A_JOB, 0, NOBODY)
    assert (runs / "latest").readlink() == Path("7")


@needs_root
def test_root_goes_on_where_the_file_server_makes_it_nobody(place: Path) -> None:
    place.chmod(0o777)
    set_file_user = ctypes.CDLL(None).setfsuid  # files are another user's, the process stays root's

    def work() -> None:
        for _ in range(2):  # again, as after a requeue
            write_all(begin(place))
        assert os.geteuid() == 0
        assert (place / "7").stat().st_uid == NOBODY

    as_other(work, set_file_user)
    assert files_below(place / "7") == OF_A_JOB


@pytest.mark.parametrize(
    ("owner", "own_uid", "is_refused"),
    [
        (0, 0, False),
        (1000, 1000, False),
        (65534, 65534, False),  # root, on a file server that squashes it
        (1000, 0, True),  # a colleague's, to root
        (65534, 0, True),
        (0, 65534, True),  # made by root on the file server itself
        (0, 1000, True),
    ],
)
def test_whose_directory_it_is_says_the_owner_of_what_is_made_there(owner: int, own_uid: int, is_refused: bool) -> None:
    assert (why_not_ours(owner, own_uid) is not None) is is_refused


@pytest.mark.parametrize(
    ("above", "is_possible"),
    [
        ([(0, 0o755), (1000, 0o700)], False),
        ([(0, 0o755), (0, 0o1777), (1000, 0o755)], False),  # below /tmp
        ([(0, 0o755), (0, 0o2775), (1000, 0o2770)], False),  # a project's directory: its group is trusted
        ([(0, 0o755), (1001, 0o755), (1000, 0o700)], True),  # a colleague's
        ([(0, 0o755), (0, 0o777), (1000, 0o700)], True),
    ],
)
def test_who_can_swap_a_directory_is_told_by_those_above_it(above: list[tuple[int, int]], is_possible: bool) -> None:
    assert can_swap(above, trusted={0, 1000}) is is_possible


@needs_root
def test_a_swap_is_possible_below_the_directory_of_another_user_only(place: Path, runs: Path) -> None:
    assert begin(runs).hold_node("n1").may_be_swapped(0)
    assert not begin(place).hold_node("n1").may_be_swapped(0)


def test_attempts_nodes_and_restarts_share_a_run_directory(tmp_path: Path) -> None:
    leader = begin(tmp_path)
    follower, requeued = RunDir(tmp_path, "7"), RunDir(tmp_path, "7")
    follower.create_node("n2")
    follower.create_node("n2")
    requeued.create()
    requeued.create_attempt(1)
    requeued.create_attempt(1)
    for run_dir, event in ((leader, "a"), (follower, "b"), (requeued, "c")):
        run_dir.add_event("node_lost", node=event)
    assert [event["node"] for event in leader.read_events()] == ["a", "b"]
    assert files_below(tmp_path / "7") == ["attempt_0/events.jsonl", "attempt_1/events.jsonl"]


# A directory that somebody deletes, renames or fills while the job runs


def test_a_run_directory_that_is_deleted_is_made_again_for_the_verdict(tmp_path: Path) -> None:
    run_dir = begin(tmp_path)
    held = run_dir.hold_node("n1")
    assert (held.is_deleted, held.is_in_place) == (False, True)
    os.system(f"rm -r {tmp_path}/7")
    assert (held.is_deleted, held.is_in_place) == (True, False)
    run_dir.add_event("ended")
    run_dir.write_exit_code(1)
    assert (run_dir.read_events(), (tmp_path / "7").exists()) == ([], False)
    assert run_dir.write_verdict(Verdict(job="7", attempt=0, exit_code=1), node="n1", is_of_all=False)
    assert files_below(tmp_path / "7") == ["attempt_0/n1/verdict.json", "attempt_0/verdict.json"]


def test_a_run_directory_that_is_renamed_keeps_its_files_together(tmp_path: Path) -> None:
    run_dir = begin(tmp_path)
    (tmp_path / "7").rename(tmp_path / "kept")
    write_all(run_dir)
    assert files_below(tmp_path / "kept") == OF_A_JOB
    assert not (tmp_path / "7").exists()
    assert (run_dir.hold().is_deleted, run_dir.hold().is_in_place) == (False, False)


def test_a_draft_has_a_name_that_nobody_can_guess_and_does_not_stay(tmp_path: Path) -> None:
    folder, names = Folder.at(tmp_path), set[str]()
    open_as_ever = folder.open

    def note(name: str, flags: int, mode: int = 0o666) -> int:
        names.add(name)
        return open_as_ever(name, flags, mode)

    folder.open = note  # type: ignore[method-assign]
    for _ in range(2):
        folder.write_whole("verdict.json", b"{}", mode=0o640)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        folder.write_whole("taken", b"{}")
    assert len(names) == 3
    assert all(len(name.rpartition(".")[2]) == 16 for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "verdict.json"]
    assert (tmp_path / "verdict.json").stat().st_mode & 0o777 == 0o640 & ~umask()


def umask() -> int:
    os.umask(now := os.umask(0))
    return now


@pytest.mark.timeout(5)
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_file_is_not_written_to(tmp_path: Path, kind: str) -> None:
    folder, victim = Folder.at(tmp_path), tmp_path / "victim"
    victim.write_text("as it was")
    make = {"link": lambda path: path.symlink_to(victim), "fifo": os.mkfifo, "directory": Path.mkdir}
    make[kind](tmp_path / "events.jsonl")
    for action in (folder.append, folder.open_read, folder.open_new):
        with pytest.raises(OSError, match=r".+"):
            action("events.jsonl")
    if kind != "directory":
        folder.write_whole("events.jsonl", b"new")  # takes its place
    assert victim.read_text() == "as it was"


def test_a_file_that_the_user_has_named_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    write_named(link, b"1")
    assert link.is_symlink()
    assert (tmp_path / "file").read_bytes() == b"1"
    reader, writer = os.pipe()
    write_named(Path(f"/dev/fd/{writer}"), b"2")
    assert os.read(reader, 2) == b"2"
    os.close(reader)
    os.close(writer)

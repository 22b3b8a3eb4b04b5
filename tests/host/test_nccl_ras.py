"""Answers of NCCL's RAS port, written after its documented format, and a server of those in place of NCCL."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allranks.host.nccl_ras import ask_ras, count_operations, read_operation_counts
from allranks.model.foreign import Unreadable

ANSWER = (Path(__file__).parent / "recorded/ras/2.30-missing.json").read_bytes()


def test_operations_of_this_machine_are_summed_over_communicators() -> None:
    assert count_operations(ANSWER, addresses={"172.16.64.245"}) == {1524344: 48}
    assert count_operations(ANSWER, addresses={"172.16.64.246"}) == {1524344: 42}


@pytest.mark.parametrize("answer", [b"", b"{", b'{"communicators": 3}', ANSWER[:-200], b"ERROR: Unknown command x"])
def test_what_cannot_be_read_is_said(answer: bytes) -> None:
    with pytest.raises(Unreadable):
        count_operations(answer, addresses={"172.16.64.245"})


@contextmanager
def server(last: bytes, *, of_format: str = "OK\n") -> Iterator[tuple[str, list[str]]]:
    """Answers each line as NCCL does, and closes after the last; yields its address and what it was asked."""
    asked: list[str] = []
    answers = {"CLIENT": "SERVER PROTOCOL 2\n", "SET": of_format}

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                asked.append(line.strip())
                if line == "VERBOSE STATUS\n":
                    lines.write(last.decode())
                    return
                lines.write(answers.get(line.partition(" ")[0], "OK\n"))
                lines.flush()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", asked
        thread.join(5)


def test_it_is_asked_in_lines() -> None:
    with server(ANSWER) as (address, asked):
        assert ask_ras({"NCCL_RAS_ADDR": address}) == ANSWER
    assert asked == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"]


def test_a_version_that_answers_with_text_is_not_asked_further() -> None:
    with (
        server(b"", of_format="ERROR: Unknown command SET FORMAT json\n") as (address, asked),
        pytest.raises(OSError, match=r"older than 2\.28\.7"),
    ):
        ask_ras({"NCCL_RAS_ADDR": address})
    assert asked[-1] == "SET FORMAT json"


def test_one_that_does_not_answer_costs_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        env = {"NCCL_RAS_ADDR": f"127.0.0.1:{listening.getsockname()[1]}"}
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            ask_ras(env, timeout_s=0.1)
        assert time.monotonic() - began_s < 30  # it never answers


@pytest.mark.parametrize(
    "env",
    [{"NCCL_RAS_ENABLE": "0"}, *({"NCCL_RAS_ADDR": text} for text in ("nonsense", "a:70000", "..:5", "\udcff:1"))],
)
def test_a_job_without_ras_is_not_asked(env: dict[str, str]) -> None:
    with pytest.raises((OSError, ValueError)):
        ask_ras(env)


MAPS_NCCL = """\
import mmap, sys, time
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(flush=True)
time.sleep(60)
"""


@contextmanager
def rank_that_maps(library: Path, address: str) -> Iterator[int]:
    library.write_bytes(b"x")
    command = [sys.executable, "-c", MAPS_NCCL, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"NCCL_RAS_ADDR": address}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_only_a_rank_with_nccl_is_asked_for(tmp_path: Path) -> None:
    here = ANSWER.replace(b"172.16.64.245", b"127.0.0.1")
    with server(here) as (address, _), rank_that_maps(tmp_path / "libnccl.so.2", address) as pid:
        assert read_operation_counts([1, pid]) == {1524344: 48}
    with rank_that_maps(tmp_path / "libother.so.2", "127.0.0.1:9") as pid:
        assert read_operation_counts([pid]) is None

"""One end of a pair of `allranks check --deep`: real processes, real Gloo, over loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import allranks.join
from allranks.join.pair import _agree_on_size
from conftest import clean_env

pytestmark = pytest.mark.torch

SCRIPT = Path(allranks.join.__path__[0]) / "pair.py"
IMPORT_S = 120.0


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(*pairs: dict[str, Any], start_s: float = IMPORT_S, pair_s: float = 60.0, timeout_s: float = 30.0, **env: str):  # type: ignore[no-untyped-def]
    order = json.dumps({"work": pairs, "start_s": start_s, "pair_s": pair_s, "timeout_s": timeout_s})
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), order],
        env=clean_env(os.environ, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def pair(peer: str, *, rank: int, port: int, step: int = 0, interface: str = "lo") -> dict[str, Any]:
    return {
        "step": step, "round": step, "backend": "gloo", "peer": peer, "rank": rank, "address": "127.0.0.1",
        "port": port, "interface": interface,
    }  # fmt: skip


def said_by(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    with process:
        lines = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    return lines


def test_two_ends_reduce_in_two_rounds(port: int) -> None:
    first = start(*(pair("n2", rank=0, port=port, step=step) for step in range(2)))
    second = start(*(pair("n1", rank=1, port=port, step=step) for step in range(2)))
    for process, peer in ((first, "n2"), (second, "n1")):
        lines = said_by(process)
        assert [(each["round"], each["peer"], each["status"]) for each in lines] == [(0, peer, "ok"), (1, peer, "ok")]
        assert all(0 < each["seconds"] < 10 for each in lines)
        assert [each["payload_bytes"] for each in lines] == [16 << 20] * 2
        assert all(0 < each["payload_s"] < 5 for each in lines)


@pytest.mark.parametrize(
    ("small_s", "size"), [(0.01, 16 << 20), (0.3, 8 << 20), (0.5, 0)], ids=["all of it", "less of it", "nothing more"]
)
def test_what_is_measured_fits_into_its_time(small_s: float, size: int) -> None:
    store = FakeStore()
    assert _agree_on_size({"rank": 0, "backend": "gloo"}, store, small_s) == size
    assert _agree_on_size({"rank": 1, "backend": "gloo"}, store, 0.0) == size


class FakeStore(dict[str, str]):
    """What two ends have in common."""

    def set(self, key: str, value: str) -> None:
        self[key] = value


@pytest.mark.parametrize("rank", [0, 1])
def test_a_partner_that_never_comes_is_said_at_the_deadline(port: int, rank: int) -> None:
    began_s = time.monotonic()
    (line,) = said_by(start(pair("n9", rank=rank, port=port), start_s=6.0))
    assert time.monotonic() - began_s < IMPORT_S
    assert line["status"] == "failed"
    assert line["what"].startswith(
        f"n9 did not connect to the store at 127.0.0.1:{port}" if rank == 0 else f"no store of n9 at 127.0.0.1:{port}: "
    )


@pytest.mark.parametrize(
    ("pair_s", "timeout_s", "what"),
    [
        (5.0, 90.0, "not finished within 5 s after both had joined"),
        (90.0, 5.0, "wait timeout after 5000ms, keys: /gloo0/0//cpu//0/0"),
    ],
    ids=["killed", "by its timeout"],
)
def test_a_partner_that_stops_half_way(port: int, pair_s: float, timeout_s: float, what: str) -> None:
    # It opens the store, says that it is here, and nothing more.
    code = (
        "import sys, time; from torch.distributed import PrefixStore, TCPStore\n"
        f"s = PrefixStore('gloo0', TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False))\n"
        "s.set('here/0', ''); time.sleep(300)"
    )
    partner = subprocess.Popen([sys.executable, "-c", code], env=clean_env(os.environ))
    try:
        (line,) = said_by(start(pair("n1", rank=1, port=port), pair_s=pair_s, timeout_s=timeout_s))
    finally:
        partner.send_signal(signal.SIGKILL)
        partner.wait()
    assert line["status"] == "failed"
    assert line["what"] == what


def test_an_interface_that_is_not_there_is_said(port: int) -> None:
    ends = [start(pair("n", rank=rank, port=port, interface="nope0"), timeout_s=3.0) for rank in range(2)]
    for process in ends:
        (line,) = said_by(process)
        assert line["status"] == "failed"
        assert "nope0" in line["what"]


def test_a_port_in_use_says_nothing_of_the_pair(port: int) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", port))
        listener.listen()
        (line,) = said_by(start(pair("n2", rank=0, port=port)))
    assert (line["status"], line["what"]) == ("unknown", f"port {port} is in use here")


def test_without_torch_it_says_so(port: int, tmp_path: Path) -> None:
    words = {
        "ModuleNotFoundError('No module named torch', name='torch')": "torch is not installed",
        "OSError('libcudart.so.12: no such file')": "torch cannot be imported: libcudart.so.12: no such file",
    }
    for number, (error, told) in enumerate(words.items()):
        path = tmp_path / str(number)  # of its own: two files of one second and size are one to Python's cache
        path.mkdir()
        (path / "torch.py").write_text(f"raise {error}\n")
        assert said_by(start(pair("n2", rank=0, port=port), PYTHONPATH=str(path))) == [{"no_torch": told}]

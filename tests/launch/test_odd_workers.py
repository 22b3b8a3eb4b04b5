"""A worker may write anything where its agent reads: the job still ends, with one verdict."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from conftest import Allranks, write

PREAMBLE = """
import json, os, sys, time
error, cell = os.environ["TORCHELASTIC_ERROR_FILE"], int(os.environ["ALLRANKS_CELL_FD"])
out, err, folder = error.replace(".error.json", ".out"), error.replace(".error.json", ".err"), os.path.dirname(error)
rank = int(os.environ["RANK"])

"""
ODD = {
    "fifos, and junk in a cell that cannot be cut": """
        try:
            os.ftruncate(cell, 0)
        except PermissionError:
            os.pwrite(cell, 300_000 * b"\\xff", 0)
        for path in (out, err):
            os.unlink(path)
        for path in (out, err, error, f"{folder}/recorder_rank_{rank}.json", f"{folder}/rank_{rank}.stack.txt"):
            os.mkfifo(path)
        time.sleep(0.3)
        """,
    "links to a device": """
        os.unlink(err)
        os.symlink("/dev/zero", err)
        os.symlink("/dev/zero", error)
        """,
    "an error file with a list": """
        json.dump({"message": {"message": "KeyError: 3", "extraInfo": [1]}}, open(error, "w"))
        """,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ODD)
def test_a_worker_that_leaves_odd_things_ends_like_any_other(allranks: Allranks, tmp_path: Path, name: str):
    write(tmp_path / "train.py", f"{PREAMBLE}{ODD[name].replace(8 * ' ', '')}\nos._exit(3)\n")
    began_s = time.monotonic()
    result = allranks("run", "--nproc-per-node", "2", "train.py")
    verdict = json.loads((tmp_path / "runs/latest/attempt_0/verdict.json").read_text())
    (finding,) = [each for each in verdict["findings"] if each["severity"] == "fail"]
    expected = "KeyError: 3" if "list" in name else "ended with exit code 3"
    assert (result.returncode, finding["ranks"], finding["message"]) == (1, [0, 1], expected)
    assert "Traceback" not in result.stderr
    assert time.monotonic() - began_s < 30


@pytest.mark.timeout(120)
def test_an_exception_of_50_mb_is_a_few_lines_on_the_terminal(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "raise ValueError('bad batch ' + 50_000_000 * 'x' + ' end')\n")
    result = allranks("run", "--nproc-per-node", "2", "train.py")
    shown = result.stderr.partition("AR590")[2].partition("allranks explain")[0]
    assert "ValueError: bad batch xxx" in shown
    assert len(shown) < 3000
    attempt = tmp_path / "runs/latest/attempt_0"
    sizes = [path.stat().st_size for path in attempt.rglob("*.json")]
    assert max(sizes) < 200_000
    recorded = json.loads(next(attempt.rglob("rank_0.error.json")).read_text())["message"]
    assert "\n... 49.9 MB cut ...\n" in recorded["message"]
    assert recorded["message"].endswith("x end")

"""Does `allranks run` keep two runs out of one directory of checkpoints, before any worker starts?"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from allranks.state.saved.owner import OWNER, identify, parse, to_bytes
from conftest import Allranks, write


def test_a_run_whose_directory_another_one_has_is_refused_before_its_workers_start(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py", "print(open(__import__('os').environ['ALLRANKS_CHECKPOINT_DIR'] + '/owner.json').read())"
    )
    taken, default = tmp_path / "taken", tmp_path / "runs/x/checkpoints"
    first = replace(identify({}), job="17", run_directory="/scratch/runs/17")
    for directory, flags, env in (
        (taken, [], {"ALLRANKS_CHECKPOINT_DIR": "taken"}),
        (default, ["--rdzv-id", "x"], {}),
    ):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / OWNER).write_bytes(to_bytes(first))
        refused = allranks("run", *flags, "train.py", env=env)
        lines = refused.stderr.splitlines()
        at = next(index for index, line in enumerate(lines) if line.startswith("  /"))
        who = f"job 17 (pid {os.getpid()} on {first.host}, since "
        assert refused.returncode == 78
        assert refused.stdout == ""
        assert "AR512 node-cannot-start" in lines[at - 1]
        assert lines[at].startswith(f"  {directory}: {who}")
        assert lines[at].endswith(", run directory /scratch/runs/17) writes its checkpoints there")
        assert lines[at + 1].startswith(
            "  fix  name another directory (--checkpoint-dir, ALLRANKS_CHECKPOINT_DIR), or end "
        )
        verdict = json.loads((tmp_path / "runs/latest/attempt_0/verdict.json").read_text())
        assert verdict["exit_code"] == 78
    # Nor where the directory cannot be made: the training would go on, and save nothing.
    no_place = allranks("run", "--checkpoint-dir", "train.py/x", "train.py")
    assert no_place.returncode == 2
    assert no_place.stdout == ""
    assert (
        f"  {tmp_path}/train.py/x cannot be made: Not a directory\n  fix  name another directory (" in no_place.stderr
    )
    # Another directory, as the line says, also where the variable still names the first one.
    (tmp_path / "mine").mkdir()
    own = allranks("run", "--checkpoint-dir", "mine", "train.py", env={"ALLRANKS_CHECKPOINT_DIR": "taken"})
    held = parse(own.stdout.encode())
    assert held is not None, own
    assert (held.host, held.run_directory) == (first.host, str((tmp_path / "runs/latest").resolve()))
    assert list((tmp_path / "mine").iterdir()) == []
    # The first has ended: a restart of the second needs nothing else.
    (default / OWNER).write_bytes(to_bytes(replace(first, started=1)))
    assert allranks("run", "--rdzv-id", "x", "train.py").returncode == 0
    assert list(default.iterdir()) == []

"""Two data interfaces a node, and nodes at two switches: what workers get in their environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from allranks.lab.hosts import SWITCH, find_inits, run_in

from .conftest import Make

pytestmark = pytest.mark.lab

NODES = ["a", "b", "c"]
CLUSTER = '[network]\ndata = "192.168.20.0/24"\nsecond = "192.168.21.0/24"\n' + "".join(
    f'[[node]]\nname = "{name}"\naddress = "192.168.20.{15 + number}"\n' for number, name in enumerate(NODES)
)
SHOW = 'echo "$RANK $SLURM_PROCID $SLURMD_NODENAME $GLOO_SOCKET_IFNAME"'
SCONTROL = """#!/bin/sh
[ "$1 $2" = "show topology" ] || exec /usr/bin/scontrol "$@"
echo "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a,c"
echo "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=b"
"""


def test_gloo_gets_both_interfaces_of_each_node_only_if_all_nodes_reach_each_other(make_lab: Make, tmp_path: Path):
    lab = make_lab("two")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    lab.run("up", "--cluster", tmp_path / "cluster.toml")

    def run() -> tuple[list[str], str]:
        command = [sys.executable, "-m", "allranks", "run", "--no-python", "sh", "-c", SHOW]
        path = f"PATH={tmp_path}:{os.environ['PATH']}"
        ran = lab.run("exec", "a", "--", "env", "-C", str(tmp_path), path, "srun", "-N3", *command)
        return sorted(line.partition("] ")[2] for line in ran.stdout.splitlines()), ran.stderr

    both = "ens1f1,ens2f1"
    shown, said = run()
    assert shown == [f"0 0 a {both}", f"1 1 c {both}", f"2 2 b {both}"], said
    assert "note: ranks are in the order a, c, b: this keeps the nodes of each switch together" in said

    run_in(find_inits(lab.lab.dir)[SWITCH], ["ip", "link", "set", "second1", "nomaster"])
    shown, said = run()
    assert shown == ["0 0 a ens1f1", "1 1 c ens1f1", "2 2 b ens1f1"], said
    assert (
        "note: Gloo uses one interface a node: b ens2f1 (192.168.21.16) did not get through to the other nodes" in said
    )

"""Do gradients sum to the same bits before and after a restart, whatever DDP is asked for?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import clean_env

pytestmark = pytest.mark.torch

SCRIPTS = Path(__file__).parents[1] / "scripts"

RESUME = """
import copy
import torch
import allranks
from allranks.state.resumed import buckets

def train(s, begin, end, saved, **arguments):
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(300, 300), torch.nn.ReLU())]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(300, 1))
    if saved:
        module.load_state_dict(saved[0])
    model = s.ddp(module, **arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if saved:
        optimizer.load_state_dict(saved[1])
    for step in range(begin, end):
        inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * step + s.rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())

KINDS = {
    "one bucket": {},
    "several buckets": {"bucket_cap_mb": 1},
    "static graph": {"static_graph": True, "bucket_cap_mb": 1},
    "unused parameters": {"find_unused_parameters": True, "bucket_cap_mb": 1},
    "both": {"static_graph": True, "find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "another torch": {},
}
with allranks.session(timeout_s=60) as s:
    for kind, arguments in KINDS.items():
        buckets.CAN_PIN = kind != "another torch"
        whole = train(s, 0, 8, None, **arguments)[0]
        cut = train(s, 3, 8, train(s, 0, 3, None, **arguments), **arguments)[0]
        if s.is_leader:
            print(kind, all(torch.equal(whole[name], cut[name]) for name in whole))
"""


def test_a_resumed_run_has_the_same_bits_for_all_kinds_of_ddp_at_three_ranks(tmp_path: Path):
    (tmp_path / "resume.py").write_text(RESUME)
    result = subprocess.run(
        [sys.executable, SCRIPTS / "fork_ranks.py", "3", tmp_path / "resume.py"],
        env=clean_env(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout.splitlines() == [
        "one bucket True",
        "several buckets True",
        "static graph True",
        "unused parameters True",
        "both True",
        "views True",
        "another torch True",
        "codes [0, 0, 0]",
    ], result.stderr

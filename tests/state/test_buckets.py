"""Do gradients sum to the same bits before and after a restart, whatever DDP is asked for?"""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import pytest
import torch

from allranks.model.errors import UsageError
from allranks.state.resumed import buckets
from allranks.state.resumed.buckets import Wrapped, asked_size
from forked import fork_ranks

pytestmark = pytest.mark.torch


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


@pytest.mark.parametrize("told", ["abc", "nan", "inf", "-1", "0", "5000"])
def test_a_size_that_somebody_set_by_hand_is_refused_in_one_line(told):
    with pytest.raises(UsageError, match=re.escape(f"ALLRANKS_BUCKET_MB is {told!r}: expected auto, or MiB from 1 to")):
        asked_size({"ALLRANKS_BUCKET_MB": told})
    assert [asked_size({"ALLRANKS_BUCKET_MB": text}) for text in ("4", "auto", "")] == [4.0, None, None]


def test_what_a_module_owes_goes_with_it(monkeypatch):
    class Owing:
        """A module in DDP, or its compressor."""

        def close(self):
            closed.append(self)

    closed, wrapped = [], Wrapped()
    monkeypatch.setattr(buckets, "PinnedBuckets", lambda module, **arguments: Owing())
    kept, gone = (
        wrapped.wrap(torch.nn.Linear(1, 1), {"bucket_cap_mb": 1}, lambda sizes: (None, ""), attach=lambda _: Owing())
        for _ in range(2)
    )
    left = weakref.ref(gone.compressor)
    del gone
    assert left() is None
    wrapped.close()
    assert closed == [kept.compressor]


def test_a_resumed_run_has_the_same_bits_for_all_kinds_of_ddp_at_three_ranks(tmp_path: Path):
    (tmp_path / "resume.py").write_text(RESUME)
    result = fork_ranks(tmp_path, "3", "resume.py")
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


KEPT = """
import hashlib
import os
import sys
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
import allranks
from allranks.state.saved.checkpoint import Checkpointer

kind, directory, link, until = sys.argv[1:][int(os.environ["EXACT_LIFE"])].split(",")
os.environ |= {"ALLRANKS_LINK_MBIT": link} if link else {}
if kind == "old":
    save = Checkpointer.save
    Checkpointer.save = lambda own, step, common, *rest, **more: save(
        own, step, {name: value for name, value in common.items() if name != "buckets"}, *rest, **more
    )
hooked = []
with allranks.session(timeout_s=60) as s:
    if s.rank:
        os.environ["ALLRANKS_LINK_MBIT"] = "1"  # rank 0 chooses for all
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (torch.nn.Linear(300, 300), torch.nn.ReLU())]
    model = s.ddp(torch.nn.Sequential(*layers, torch.nn.Linear(300, 1)), static_graph=kind == "static")
    second = s.ddp(torch.nn.Linear(2, 2), bucket_cap_mb=3)
    if kind == "hooked":
        model.register_comm_hook(None, lambda state, bucket: hooked.append(1) or allreduce_hook(None, bucket))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = s.track(model=model, second=second, optimizer=optimizer, checkpoint_dir=directory)
    begins = state.step
    for step in state.steps(torch.utils.data.DataLoader(torch.zeros(99)), total=int(until)):
        with step:
            inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * state.step + s.rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    bits = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    if s.is_leader:
        calls = f" {len(hooked)} calls" if hooked else ""
        shown = " ".join(f"{int(size) / 2**20:.1f}" for size in sizes)
        print(f"{kind} {begins}-{until}: {shown}{calls}", hashlib.md5(bits).hexdigest())
"""


def test_a_checkpoint_keeps_the_size_of_the_buckets(tmp_path: Path):
    (tmp_path / "kept.py").write_text(KEPT)
    lives = ["whole,a,500,6", "cut,b,500,3", "again,b,,6", "hooked,b,500,8", "old,c,,3", "old,c,500,5"]
    lives += ["static,d,500,2", "static,d,,4"]
    result = fork_ranks(tmp_path, "3,3,3,2,3,3,3,3", "kept.py", *lives)
    lines = [line.rpartition(" ") for line in result.stdout.splitlines() if not line.startswith("codes")]
    assert [said for said, _, _ in lines] == [
        "whole 0-6: 1.0 1.0 1.0 1.0 1.0 0.3",
        "cut 0-3: 1.0 1.0 1.0 1.0 1.0 0.3",
        "again 3-6: 1.0 1.0 1.0 1.0 1.0 0.3",
        "hooked 6-8: 1.0 1.0 1.0 1.0 1.0 0.3 12 calls",
        "old 0-3: 1.0 4.5",
        "old 3-5: 1.0 4.5",
        "static 0-2: 1.0 1.0 1.0 1.0 1.0 0.3",
        "static 2-4: 1.0 1.0 1.0 1.0 1.0 0.3",
    ], result.stderr
    assert lines[0][2] == lines[2][2]  # the same bits
    said = [line for line in result.stderr.splitlines() if "in buckets of" in line]
    assert said[0] == (
        "allranks: DDP sends gradients in buckets of 1 MiB: 5.78 MB of gradients take 0.123 s at 500 Mbit/s, and "
        "with torch's buckets (1 MiB, then 25 MiB) the network would start later"
    )
    kept = "as in the checkpoint, so that the sums stay the same"
    assert said[2] == f"allranks: DDP sends gradients in buckets of 1 MiB, {kept}"
    assert f"allranks: DDP sends gradients in buckets of torch's sizes, {kept}" in said

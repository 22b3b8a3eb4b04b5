"""What do --compress and --bucket-mb do to the DDPs of a script that knows nothing of them?

The tables run on a stand-in for torch's class, the other tests on torch.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conftest import Allranks, clean_env, write

SCRIPT = Path(__file__).parents[1] / "scripts" / "wire_formats.py"


def own_hook(state: object, bucket: object) -> None:
    """A script's own."""


def make_class(*, version: str = "2.13") -> type[Any]:
    """As torch's, as far as it is asked."""

    class Stand:
        ranks = 2

        def __init__(self, module: Any, device_ids: Any = None, bucket_cap_mb: float | None = None) -> None:
            self.module, self.process_group = module, SimpleNamespace(size=lambda: self.ranks)
            self.bucket_bytes_cap, self.require_backward_grad_sync = int((bucket_cap_mb or 25) * 2**20), True
            self._comm_hooks: list[Any] = []
            self.logged = ""

        def register_comm_hook(self, state: object, hook: Any) -> None:
            self._comm_hooks.append((hook, state))
            self.logged = hook.__qualname__

        def _get_ddp_logging_data(self) -> dict[str, str]:
            return {"comm_hook": self.logged} if self.logged else {}

        def forward(self, x: int) -> int:
            return x + 1

    if version == "old":
        del Stand._get_ddp_logging_data
    return Stand


class Surroundings(SimpleNamespace):
    """The module, torch's class, and what was attached."""

    ddp: ModuleType
    kind: Any
    attached: list[str]
    torch: Any


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    kind, attached = make_class(), list[str]()
    torch = SimpleNamespace(
        nn=SimpleNamespace(parallel=SimpleNamespace(DistributedDataParallel=kind)),
        compiler=SimpleNamespace(disable=lambda function: function),
        is_grad_enabled=lambda: True,
        __version__="2.13.0",
    )

    def attach(made: Any, wire_format: str) -> None:
        if wire_format == "sparse":
            raise ValueError("compress='sparse': gradients of embed are sparse")
        attached.append(wire_format)
        made.register_comm_hook(None, SimpleNamespace(__qualname__=f"allranks_{wire_format}"))

    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("RANK", "0")
    ddp = importlib.reload(importlib.import_module("allranks.join.ddp"))
    monkeypatch.setattr(ddp.atexit, "register", lambda *arguments: None)
    monkeypatch.setattr(ddp, "_load", lambda name: SimpleNamespace(attach=attach))
    return Surroundings(ddp=ddp, kind=kind, attached=attached, torch=torch)


NET = SimpleNamespace(
    parameters=lambda: [
        SimpleNamespace(
            requires_grad=True, numel=lambda: 3_000_000, element_size=lambda: 4, device=SimpleNamespace(type="cpu")
        ),
        SimpleNamespace(requires_grad=False, numel=lambda: 9_000_000, element_size=lambda: 4),
    ]
)


@pytest.mark.parametrize(
    ("wanted", "arguments", "mb", "said"),
    [
        ("4", {}, 4, "DDP with 12 MB of gradients: buckets of 4 MiB"),
        ("1.5", {"bucket_cap_mb": None}, 1.5, "DDP with 12 MB of gradients: buckets of 1.5 MiB"),
        ("4", {"bucket_cap_mb": 2}, 2, "DDP with 12 MB of gradients: buckets of 2 MiB: set by bucket_cap_mb"),
        ("auto", {"bucket_cap_mb": 2}, 2, "DDP with 12 MB of gradients: buckets of 2 MiB: set by bucket_cap_mb"),
    ],
)
def test_a_ddp_has_the_size_of_its_script_or_else_of_the_flag(
    wanted: str, arguments: dict[str, Any], mb: float, said: str, around: Surroundings,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("ALLRANKS_BUCKET_MB", wanted)
    around.ddp.change_classes("--bucket-mb 4")
    around.ddp.change_classes("--bucket-mb 4")  # another process group
    for _ in range(2):
        made = around.kind(NET, **arguments)
        assert (made.bucket_bytes_cap, made.forward(1), made._comm_hooks) == (mb * 2**20, 2, [])
    assert capsys.readouterr().err == f"allranks: {said}\n"


class Word(SimpleNamespace):
    """A tensor of one number."""

    value: float

    def item(self) -> float:
        return self.value


@pytest.mark.parametrize(
    ("chosen", "leaders", "wire_format", "mb", "reason"),
    [
        (4.0, None, None, 4, "the link is slow"),
        (None, None, None, 25, "the link is slow"),
        (4.0, 2.0, None, 2, "the link is slow"),  # the leader has fewer interfaces
        (1.0, None, "int8", 1, "the link is slow"),
        (None, None, "powersgd", 16, "the link is slow"),
    ],
)
def test_auto_is_what_the_leader_of_the_group_chooses(
    chosen: float | None, leaders: float | None, wire_format: str | None, mb: float, reason: str, around: Surroundings,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[Any] = []

    def broadcast(word: Word, source: int, *, group: str) -> None:
        asked.append((source, group))
        word.value = leaders or word.value

    def choose(env: object, gradients: list[int], **more: Any) -> tuple[float | None, str]:
        asked.append((gradients, more))
        return chosen, reason

    around.torch.tensor = lambda values, device: Word(value=values[0])
    around.torch.nn.parameter = SimpleNamespace(is_lazy=lambda own: False)
    around.torch.distributed = SimpleNamespace(
        group=SimpleNamespace(WORLD="world"), get_backend=lambda group: "undefined", get_world_size=lambda group: 6,
        get_global_rank=lambda group, rank: rank, broadcast=broadcast,
    )  # fmt: skip
    parts = {"choose_by_environment": choose, "preferred_bucket_mb": {"powersgd": 16.0}.get, "attach": lambda *_: None}
    monkeypatch.setattr(around.ddp, "_load", lambda name: SimpleNamespace(**parts))
    monkeypatch.setenv("ALLRANKS_BUCKET_MB", "auto")
    if wire_format:
        monkeypatch.setenv("ALLRANKS_COMPRESS", wire_format)
    around.ddp.change_classes("--bucket-mb auto")
    made = around.kind(NET)
    made.forward(1)
    assert made.bucket_bytes_cap == mb * 2**20
    assert asked == [([12_000_000], {"ranks": 6, "backend": "gloo", "compress": wire_format}), (0, "world")]
    assert capsys.readouterr().err.endswith(f"buckets of {mb:g} MiB: {reason}\n")


@pytest.mark.parametrize(
    ("before", "hooks", "said"),
    [
        (lambda made: None, ["int8"], "sent as int8"),
        (
            lambda made: made.register_comm_hook(None, own_hook), [],
            "it has a hook of its own (own_hook), so --compress int8 does not apply",
        ),
        (
            lambda made: setattr(made, "logged", "FP16"), [],
            "it has a hook of its own (FP16), so --compress int8 does not apply",
        ),
        (  # a copy of one with a hook of its own: it has none, as without us
            lambda made: made._comm_hooks.append((own_hook, None)), [],
            "it has a hook of its own (own_hook), so --compress int8 does not apply",
        ),
        (lambda made: made._comm_hooks.append((SimpleNamespace(__qualname__="allranks_int8"), None)), ["int8"],
         "sent as int8"),
        (lambda made: setattr(made, "logged", "allranks_bf16"), [], "sent as bf16"),  # of s.ddp(compress="bf16")
        (lambda made: setattr(made, "ranks", 1), [], "one rank sends nothing"),
    ],
)  # fmt: skip
def test_a_ddp_gets_a_hook_unless_it_has_one(
    before: Callable[[Any], None], hooks: list[str], said: str, around: Surroundings, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("ALLRANKS_COMPRESS", "int8")
    around.ddp.change_classes("--compress int8")
    made = around.kind(NET)
    before(made)
    for _ in range(2):
        made.forward(1)
    assert around.attached == hooks
    assert capsys.readouterr().err == f"allranks: DDP with 12 MB of gradients: {said}, buckets of 25 MiB\n"


def test_a_pass_without_a_synchronized_backward_pass_comes_too_early(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank may do it alone, to try its model."""
    monkeypatch.setenv("ALLRANKS_COMPRESS", "int8")
    around.ddp.change_classes("--compress int8")
    made = around.kind(NET)
    around.torch.is_grad_enabled = lambda: False
    made.forward(1)
    around.torch.is_grad_enabled, made.require_backward_grad_sync = (lambda: True), False  # no_sync()
    made.forward(1)
    assert around.attached == []
    around.ddp._say_if_unused("--compress int8")
    made.require_backward_grad_sync = True
    made.forward(1)
    assert around.attached == ["int8"]
    del made
    around.ddp._say_if_unused("--compress int8 and no DDP is left")
    unused = "--compress int8 had no effect: no DistributedDataParallel of this script computed gradients"
    said = "DDP with 12 MB of gradients: sent as int8, buckets of 25 MiB"
    assert capsys.readouterr().err == f"allranks: {unused}\nallranks: {said}\n"


def test_what_cannot_be_had_is_said_in_the_words_of_the_flag(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLRANKS_COMPRESS", "sparse")
    around.ddp.change_classes("--compress sparse")
    with pytest.raises(RuntimeError, match=r"^allranks: --compress sparse: gradients of embed are sparse$"):
        around.kind(NET).forward(1)


def test_a_torch_without_what_is_needed_is_refused(around: Surroundings) -> None:
    around.torch.nn.parallel.DistributedDataParallel = make_class(version="old")
    said = r"^allranks: --compress bf16: DistributedDataParallel of torch 2.13.0 lacks _get_ddp_logging_data; remove"
    with pytest.raises(RuntimeError, match=said):
        around.ddp.change_classes("--compress bf16")


REFUSED = """
import importlib.util, os, sys, torch
spec = importlib.util.spec_from_file_location("ddp", sys.argv[1])
ddp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ddp)
ddp.change_classes("--compress bf16")
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
for shard in (fully_shard, FullyShardedDataParallel):
    try:
        shard(torch.nn.Linear(2, 2))
    except RuntimeError as exc:
        print(exc)
"""


@pytest.mark.parametrize("is_before", [True, False])
def test_a_class_that_shards_is_refused_whenever_it_is_imported(
    is_before: bool, around: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "sharding_of_a_test.py", "class State:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sharding_of_a_test", raising=False)
    monkeypatch.setattr(around.ddp, "SHARDING", {"sharding_of_a_test": ("State", "shard()"), "not.there": ("A", "B")})
    kind = importlib.import_module("sharding_of_a_test").State if is_before else None
    around.ddp.change_classes("--compress bf16")
    kind = kind or importlib.import_module("sharding_of_a_test").State
    with pytest.raises(RuntimeError, match=r"--compress bf16: works .* this script uses shard\(\); remove the flag$"):
        kind()
    monkeypatch.delitem(sys.modules, "sharding_of_a_test")


@pytest.mark.torch
def test_fsdp_is_refused_and_a_script_without_ddp_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import allranks.join.ddp

    write(tmp_path / "refused.py", REFUSED)
    done = subprocess.run(
        [sys.executable, "refused.py", str(allranks.join.ddp.__file__)],
        cwd=tmp_path, env=clean_env(os.environ, RANK="0"), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    only = "allranks: --compress bf16: works with DistributedDataParallel only, and this script uses"
    assert done.stdout.splitlines() == [
        f"{only} fully_shard (FSDP2); remove the flag", f"{only} FullyShardedDataParallel; remove the flag",
    ]  # fmt: skip
    unused = "--compress bf16 had no effect: no DistributedDataParallel of this script computed gradients"
    assert done.stderr.splitlines()[-1] == f"allranks: {unused}"


@pytest.mark.parametrize("agent", [os.getpid(), 1], ids=["a worker", "its child"])
def test_a_worker_that_forms_no_group_says_so(agent: int) -> None:
    import allranks.join.ddp

    path = str(allranks.join.ddp.__file__)
    program = f"import runpy, types; runpy.run_path({path!r})['arm'](types.SimpleNamespace(init_process_group=print))"
    env = clean_env(os.environ, RANK="0", ALLRANKS_COMPRESS="int8", ALLRANKS_AGENT_PID=str(agent))
    done = subprocess.run([sys.executable, "-S", "-c", program], env=env, capture_output=True, text=True, timeout=60)
    unused = "allranks: --compress int8 had no effect: no DistributedDataParallel of this script computed gradients\n"
    assert done.stderr == (unused if agent == os.getpid() else "")


@pytest.mark.torch
def test_every_kind_of_ddp_of_an_unmodified_script(allranks: Allranks) -> None:
    done = allranks("run", "--nproc-per-node", "2", "--compress", "int8", "--bucket-mb", "1", SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, alone = "allranks_int8, 1 MiB, near", "1 MiB, exact"
    assert [line.partition("] ")[2] for line in done.stdout.splitlines()] == [
        f"plain: {ours}", f"copied: {ours}", f"pickled: {ours}", "own bucket: allranks_int8, 2 MiB, near",
        f"own hook: allreduce_hook, {alone}", f"copy of it: none, {alone}",
        f"built-in hook: BuiltinCommHookType.ALLREDUCE, {alone}", f"subclass: {ours}", f"unused: {ours}",
        f"static: {ours}", f"collectives of its own: {ours}", f"two at once: {ours}", f"compiled: {ours}",
    ]  # fmt: skip
    assert "had no effect" not in done.stderr
    said = [
        line.partition("allranks: DDP with ")[2] for line in done.stderr.splitlines() if "allranks: DDP with " in line
    ]
    leaves = "so --compress int8 does not apply, buckets of 1 MiB"
    assert said == [
        "4.2 MB of gradients: sent as int8, buckets of 1 MiB",
        "4.2 MB of gradients: sent as int8, buckets of 2 MiB: set by bucket_cap_mb",
        f"4.2 MB of gradients: it has a hook of its own (allreduce_hook), {leaves}",
        f"4.2 MB of gradients: it has a hook of its own (BuiltinCommHookType.ALLREDUCE), {leaves}",
        "3.15 MB of gradients: sent as int8, buckets of 1 MiB",
    ]


@pytest.mark.torch
def test_a_killed_rank_is_named_as_without_a_hook(allranks: Allranks, tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
        for step in range(9):
            loss = ddp(torch.ones(2, 256)).sum()
            if (step, dist.get_rank()) == (4, 1):
                os.kill(os.getpid(), 9)
            loss.backward()
        """,
    )
    ended = allranks("run", "--nproc-per-node", "3", "--compress", "int8", "train.py")
    assert "allranks: DDP with 1.05 MB of gradients: sent as int8, buckets of 25 MiB\n" in ended.stderr
    verdict = json.loads((tmp_path / "runs/latest/attempt_0/verdict.json").read_text())
    failed = [finding for finding in verdict["findings"] if finding["severity"] == "fail"]
    assert [(finding["cause"], finding["ranks"]) for finding in failed] == [("AR407 dead-rank", [1])]

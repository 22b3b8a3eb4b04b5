"""What do `--compress` and `--bucket-mb` of `allranks run` do to a script that knows nothing of them? They change DDP.

1. init_process_group. By now torch has DistributedDataParallel, and the script may have its name, so the class itself
   is changed, and only where one of the flags is set.
2. Each DDP that is made gets the bucket size, unless the script or its framework passes one.
3. Its first forward pass that a synchronized backward pass follows: it gets the hook of comm/hooks.py. Not before,
   because a reducer takes one hook, and the script's own one comes first. All ranks come here together; a forward pass
   that one rank does alone, to try its model, computes no gradients.
4. The end of the process: if no DDP has come to 3, rank 0 says so, also where the script forms no group.

FSDP has no reducer, so it is refused where a script makes one. Runs in the worker's Python: standard library and torch
only. comm/hooks.py and comm/sizing.py are loaded by path, as this file is (join/hook.py).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

FLAGS = {"ALLRANKS_COMPRESS": "--compress", "ALLRANKS_BUCKET_MB": "--bucket-mb"}
OURS = "allranks_"
"""How the names of the hooks of comm/hooks.py begin."""
SHARDING = {
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("FSDPState", "fully_shard (FSDP2)"),
    "torch.distributed._composable.fsdp._fsdp_state": ("FSDPState", "fully_shard (FSDP2)"),  # before torch 2.6
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel", "FullyShardedDataParallel"),
}
"""By module: a class that each use of it makes, and what users call it."""

_num_trained = 0
"""DDPs that have come to phase 3."""
_trained: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of them that are still there. A copy of one is not among them: torch copies no hook either."""
_reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Why a DDP has buckets of its size, where there is a word to say of it."""
_said: set[str] = set()


def arm(c10d: Any) -> None:
    """Have `init_process_group` change DDP, where the environment then has one of the flags.

    Args:
        c10d: torch.distributed.distributed_c10d.
    """
    form = c10d.init_process_group

    @functools.wraps(form)
    def form_and_change(*args: Any, **kwargs: Any) -> None:
        try:
            if given := flags_given(os.environ):
                change_classes(given)
            form(*args, **kwargs)
        except Exception as exc:
            exc.__traceback__ = exc.__traceback__ and exc.__traceback__.tb_next  # without this frame
            raise

    c10d.init_process_group = form_and_change
    atexit.register(_say_if_no_group)


def flags_given(env: Mapping[str, str]) -> str:
    """Return the flags that the environment stands for.

    >>> flags_given({"ALLRANKS_BUCKET_MB": "auto", "ALLRANKS_COMPRESS": "bf16"}), flags_given({"RANK": "0"})
    ('--compress bf16 --bucket-mb auto', '')
    """
    return " ".join(f"{flag} {env[name]}" for name, flag in FLAGS.items() if env.get(name))


def change_classes(given: str) -> None:
    """Change DDP, and refuse FSDP, once in a process.

    Args:
        given: the flags.
    Raises:
        RuntimeError: this torch lacks what is needed.
    """
    torch = sys.modules["torch"]
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    if hasattr(ddp.forward, "_allranks"):
        return
    make, forward = ddp.__init__, ddp.forward
    signature = inspect.signature(make)
    if lacks := lacking(ddp):
        raise RuntimeError(
            f"allranks: {given}: DistributedDataParallel of torch {torch.__version__} lacks {lacks}; remove the flag"
        )
    look = torch.compiler.disable(_look_at)  # DDP's own forward pass breaks the graph of torch.compile as well

    @functools.wraps(make)
    def make_with_size(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        size, reason = _choose_size(bound.arguments)
        if size is not None:
            bound.arguments["bucket_cap_mb"] = size
        make(*bound.args, **bound.kwargs)
        _reasons[args[0]] = "" if type(args[0]).__module__.startswith("allranks.") else reason  # s.ddp() says its own

    @functools.wraps(forward)
    def forward_with_look(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(self)
        return forward(self, *args, **kwargs)

    forward_with_look._allranks = True  # type: ignore[attr-defined]
    ddp.__init__, ddp.forward = make_with_size, forward_with_look
    finder = _ShardingFinder(given)
    for name in SHARDING.keys() & sys.modules.keys():
        finder.refuse(sys.modules[name])
    sys.meta_path.insert(0, finder)
    atexit.register(_say_if_unused, given)


def lacking(ddp: Any) -> str:
    """Return what this torch's DDP lacks of what is taken here; empty where it has all."""
    register = getattr(getattr(ddp, "register_comm_hook", None), "__code__", None)
    names = {
        "bucket_cap_mb": "bucket_cap_mb" in inspect.signature(ddp.__init__).parameters,
        "_comm_hooks": register is not None and "_comm_hooks" in register.co_names,
        "_get_ddp_logging_data": hasattr(ddp, "_get_ddp_logging_data"),
    }
    return ", ".join(name for name, has in names.items() if not has)


class _ShardingFinder(importlib.abc.MetaPathFinder):
    """Lets the modules of SHARDING be imported as ever, and then refuses what they make."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._left = SHARDING.keys() - sys.modules.keys()

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._left:
            return None
        self._left.remove(fullname)  # find_spec below must not meet us again
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute  # it may be the loader of other modules, too
            execute(module)
            self.refuse(module)

        loader.exec_module = exec_module
        return spec

    def refuse(self, module: ModuleType) -> None:
        name, called = SHARDING[module.__name__]
        given = self._given

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(
                f"allranks: {given}: works with DistributedDataParallel only, and this script uses {called}; "
                "remove the flag"
            )

        with contextlib.suppress(AttributeError):  # another torch; the end of the job then says that no DDP came
            getattr(module, name).__init__ = refuse


def _choose_size(arguments: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return MiB, None for torch's own or the script's, and the reason.

    Args:
        arguments: those that DDP gets.
    """
    wanted = os.environ.get("ALLRANKS_BUCKET_MB", "")
    if not wanted:
        return None, ""
    if arguments.get("bucket_cap_mb") is not None or arguments.get("bucket_cap_mb_list"):
        return None, "set by bucket_cap_mb"
    if wanted != "auto":
        return float(wanted), ""
    torch = sys.modules["torch"]
    dist, is_lazy = torch.distributed, torch.nn.parameter.is_lazy
    parameters = [
        parameter
        for parameter in arguments["module"].parameters()
        if parameter.requires_grad and not is_lazy(parameter)
    ]
    if not parameters:  # torch refuses it
        return None, ""
    mesh, device = arguments.get("device_mesh"), parameters[0].device
    group = arguments.get("process_group") or (dist.group.WORLD if mesh is None else mesh.get_group(mesh_dim=0))
    backend = dist.get_backend(group)
    if backend == "undefined":  # one for each kind of device
        backend = "nccl" if device.type == "cuda" else "gloo"
    wire_format = os.environ.get("ALLRANKS_COMPRESS")
    mb, reason = _load("sizing").choose_by_environment(
        os.environ,
        [parameter.numel() * parameter.element_size() for parameter in reversed(parameters)],
        ranks=dist.get_world_size(group),
        backend=backend,
        compress=wire_format,
    )
    if wire_format is not None:
        mb = _load("hooks").preferred_bucket_mb(wire_format) or mb
    # Nodes may have other numbers of interfaces, and all ranks need one size.
    size = torch.tensor([mb or 0.0], device=device)
    dist.broadcast(size, dist.get_global_rank(group, 0), group=group)
    return size.item() or None, reason


def _look_at(ddp: Any) -> None:
    """Give a DDP the hook at its first forward pass that a synchronized backward pass follows, and say so on rank 0."""
    global _num_trained
    if ddp in _trained or not ddp.require_backward_grad_sync or not sys.modules["torch"].is_grad_enabled():
        return
    _trained.add(ddp)
    _num_trained += 1
    wanted, reason = os.environ.get("ALLRANKS_COMPRESS", ""), _reasons.get(ddp, "")
    words = f"{_compress(ddp, wanted)}, " if wanted else ""
    words += f"buckets of {ddp.bucket_bytes_cap / 2**20:.3g} MiB{reason and f': {reason}'}"
    size = sum(
        parameter.numel() * parameter.element_size() for parameter in ddp.module.parameters() if parameter.requires_grad
    )
    _say(f"DDP with {size / 1e6:.3g} MB of gradients: {words}")


def _compress(ddp: Any, wanted: str) -> str:
    """Give a DDP the hook of a format, and return what there is to say of it."""
    if ddp.process_group.size() == 1:
        return "one rank sends nothing"
    own = ddp._get_ddp_logging_data().get("comm_hook", "")
    if own.startswith(OURS):  # of s.ddp()
        return f"sent as {own.removeprefix(OURS)}"
    listed = [hook.__qualname__ for hook, _ in ddp._comm_hooks if not hook.__qualname__.startswith(OURS)]
    if own or listed:
        return f"it has a hook of its own ({own or listed[0]}), so --compress {wanted} does not apply"
    ddp._comm_hooks.clear()  # it is a copy: its reducer has no hook
    try:
        _load("hooks").attach(ddp, wanted)
        ddp._comm_hooks.clear()  # a pickle could not have it
    except ValueError as exc:
        raise RuntimeError(f"allranks: --compress {wanted}: {str(exc).partition(': ')[2] or exc}") from None
    return f"sent as {wanted}"


def _say_if_unused(given: str) -> None:
    if not _num_trained and not hasattr(sys, "last_value"):  # set by an exception that ended the script
        _say(f"{given} had no effect: no DistributedDataParallel of this script computed gradients")


def _say_if_no_group() -> None:
    """Say so, too, where the script forms no group; but not in the processes that it starts."""
    if os.environ.get("ALLRANKS_AGENT_PID") == str(os.getppid()) and (given := flags_given(os.environ)):
        _say_if_unused(given)


@functools.cache
def _load(name: str) -> ModuleType:
    """Return a module of comm/, by path, see site/sitecustomize.py."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "comm", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_allranks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks for its module there
    spec.loader.exec_module(module)
    return module


def _say(text: str) -> None:
    """Say it once, on rank 0."""
    if text not in _said and os.environ.get("RANK") == "0":
        _said.add(text)
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            print(f"allranks: {text}", file=sys.stderr, flush=True)

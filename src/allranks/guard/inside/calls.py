"""Which collective did the script call just now? Written into the cell before torch is asked to do it.

A beat comes five times a second; where shapes differ, Gloo aborts a process within 30 ms of the call, and the recorder
dies with it. So each collective of torch.distributed that Python code calls is written down first: a few microseconds,
into memory that outlives the process. What C++ calls (the reducer of DDP) only the recorder knows.

The functions stay what they were: same signature, same result, same exceptions. torch.compile sees the originals.
Runs in the worker's Python.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from .cell import Cell
from .flight import Flight
from .places import place_of


class _Described(NamedTuple):
    op: str
    """As the recorder has it."""
    gloo_op: str
    """As Gloo's recorder has it, which says what Gloo makes of it."""
    tensors: str
    """Name of the argument with the inputs."""


COLLECTIVES = {
    "all_reduce": _Described("all_reduce", "all_reduce", "tensor"),
    "all_reduce_coalesced": _Described("all_reduce", "all_reduce", "tensors"),
    "broadcast": _Described("broadcast", "broadcast", "tensor"),
    "reduce": _Described("reduce", "reduce", "tensor"),
    "all_gather": _Described("all_gather", "all_gather", "tensor"),
    "all_gather_into_tensor": _Described("all_gather_into_tensor", "all_gather", "input_tensor"),
    "all_gather_single": _Described("all_gather_single", "all_gather", "input_tensor"),
    "all_gather_coalesced": _Described("all_gather", "all_gather", "input_tensor_list"),
    "reduce_scatter": _Described("reduce_scatter", "all_reduce", "input_list"),
    "reduce_scatter_tensor": _Described("reduce_scatter_tensor", "all_reduce", "input"),
    "reduce_scatter_single": _Described("reduce_scatter_single", "all_reduce", "input"),
    "all_to_all": _Described("all_to_all", "all_to_all", "input_tensor_list"),
    "all_to_all_single": _Described("all_to_all", "all_to_all", "input"),
    "gather": _Described("gather", "gather", "tensor"),
    "scatter": _Described("scatter", "scatter", "scatter_list"),
    "barrier": _Described("barrier", "barrier", ""),
    "send": _Described("send", "send", "tensor"),
    "recv": _Described("recv", "recv", "tensor"),
    "isend": _Described("isend", "isend", "tensor"),
    "irecv": _Described("irecv", "irecv", "tensor"),
}
_PEERS = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "uint8": "Byte", "int8": "Char",
    "int16": "Short", "int32": "Int", "int64": "Long", "bool": "Bool", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}  # fmt: skip
"""As torch's recorder writes them."""


class Teller:
    """Where calls are told; nothing is, as long as this process has no cell."""

    def __init__(self, c10d: Any) -> None:
        self.cell: Cell | None = None
        self.flight: Flight | None = None
        self.failed: Callable[[], None] = lambda: None
        """Called when a collective raised."""
        self.is_compiling: Callable[[], bool] = lambda: False
        """torch.compiler's, which is not there yet while torch is being imported."""
        self.world = c10d._world
        self.here = threading.local()
        self.dtypes: dict[Any, str] = {}


def wrap(c10d: Any, teller: Teller) -> None:
    """Replace the collectives of torch.distributed by ones that tell before they do; those that are missing stay so.

    Args:
        c10d: torch.distributed.distributed_c10d, before anything took the names from it.
        teller: where they tell.
    """
    for name, described in COLLECTIVES.items():
        original = getattr(c10d, name, None)
        if inspect.isfunction(original):
            setattr(c10d, name, _wrapped(name, described, original, teller))


def _wrapped(name: str, described: _Described, original: Callable[..., Any], teller: Teller) -> Callable[..., Any]:
    reader = _Arguments(name, described, original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if teller.cell is None or teller.is_compiling() or getattr(teller.here, "is_inside", False):
            return original(*args, **kwargs)
        return _tell_and_call(reader, teller, original, args, kwargs)

    return call


def _tell_and_call(
    reader: _Arguments, teller: Teller, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    teller.here.is_inside = True  # one collective may be made of others
    number, group, before = 0, None, -1
    try:
        try:
            group = reader.group(teller, args, kwargs)
            if group is not None:
                before = group._get_sequence_number_for_group()
                number = _enter(reader, teller, group, before, args, kwargs)
        except Exception as exc:
            # An argument that torch will refuse, or a torch whose inside we do not know: it has the say.
            _note(teller, exc)
        try:
            return original(*args, **kwargs)
        except Exception:
            teller.failed()
            raise
    finally:
        teller.here.is_inside = False
        if number and teller.cell is not None:
            teller.cell.leave_call(number)
        if reader.is_p2p and before >= 0 and group is not None:
            _count_p2p(teller, group, before)


def _enter(
    reader: _Arguments, teller: Teller, group: Any, before: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    assert teller.cell is not None
    name = str(teller.world.pg_names[group])
    num_p2p = teller.flight.num_p2p.get(name, 0) if teller.flight else 0
    is_gloo = "nccl" not in str(teller.world.pg_map[group][0])
    sizes, dtypes = reader.inputs(teller, args, kwargs)
    return teller.cell.enter_call(
        group=name,
        seq=1 + (num_p2p if reader.is_p2p else before - num_p2p),
        op=reader.described.gloo_op if is_gloo else reader.described.op,
        sizes=sizes,
        dtypes=dtypes,
        place=place_of(sys._getframe(3)),
        peer=reader.peer(teller, group, args, kwargs),
    )


def _count_p2p(teller: Teller, group: Any, before: int) -> None:
    try:
        after = group._get_sequence_number_for_group()
        if teller.flight is not None:
            for number in range(before + 1, after + 1):
                teller.flight.count_p2p(str(teller.world.pg_names[group]), number)
    except Exception as exc:
        _note(teller, exc)


def _note(teller: Teller, exc: Exception) -> None:
    if teller.flight is not None and len(teller.flight.blind) < 4:
        teller.flight.blind.append(f"a call could not be told: {exc!r}"[:200])


class _Arguments:
    """Finds what is told among a function's arguments."""

    def __init__(self, name: str, described: _Described, original: Callable[..., Any]) -> None:
        self.described = described
        self.is_p2p = name in _PEERS
        self._peer = _PEERS.get(name, "")
        self._is_list_of_one = described.gloo_op == "all_reduce" and described.tensors == "input_list"
        self._is_stacked = name == "scatter"
        self._at = {parameter: at for at, parameter in enumerate(inspect.signature(original).parameters)}

    def _get(self, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self._at.get(parameter, len(args))
        return args[at] if at < len(args) else kwargs.get(parameter)

    def group(self, teller: Teller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the process group, None where this rank is not in it."""
        group = self._get("group", args, kwargs)
        group = teller.world.default_pg if group is None else group
        return group if group in teller.world.pg_names else None

    def inputs(self, teller: Teller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
        """Return sizes and dtypes of the inputs, as the recorder has them."""
        given = self._get(self.described.tensors, args, kwargs)
        tensors = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        sizes = [list(tensor.shape) for tensor in tensors]
        dtypes = [self._dtype(teller, tensor.dtype) for tensor in tensors]
        if self._is_list_of_one:  # Gloo reduces them one after the other
            sizes, dtypes = sizes[:1], dtypes[:1]
        elif self._is_stacked and sizes:
            sizes, dtypes = [[len(sizes), *sizes[0]]], dtypes[:1]
        return json.dumps(sizes[:64]), ",".join(dtypes[:64])

    @staticmethod
    def _dtype(teller: Teller, dtype: Any) -> str:
        name = teller.dtypes.get(dtype)
        if name is None:
            word = str(dtype).rpartition(".")[2]
            name = teller.dtypes[dtype] = _DTYPES.get(word, word)
        return name

    def peer(self, teller: Teller, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the other side's rank in the group; -1: there is none, or it may be any."""
        if not self.is_p2p:
            return -1
        in_group = self._get(f"group_{self._peer}", args, kwargs)
        if in_group is None and (rank := self._get(self._peer, args, kwargs)) is not None:
            in_group = teller.world.pg_group_ranks[group][rank]
        return -1 if in_group is None else int(in_group)

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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .cell import Cell
from .flight import Flight
from .places import place_of

_Given = Mapping[str, Any]


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
    number, row, before = 0, None, -1
    try:
        try:
            given = reader.given(args, kwargs)
            group = reader.group(teller, given)
            if group is not None:
                row = _row_of(reader, teller, group, given)
                before = row.numbers._get_sequence_number_for_group()
                number = _enter(reader, teller, group, row, before, given)
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
        if reader.is_p2p and before >= 0 and row is not None:
            _count_p2p(teller, row, before)


class _Row(NamedTuple):
    """Where a call has its number: each backend of a group counts its own."""

    key: str
    """Of the group on this backend."""
    backend: str
    numbers: Any
    """Group or backend of torch's, which tells the last number."""


def _row_of(reader: _Arguments, teller: Teller, group: Any, given: _Given) -> _Row:
    assert teller.flight is not None
    known = teller.flight.group(group)
    backend, numbers = next(iter(known.backends.values())), group
    if len(set(known.backends.values())) > 1:
        device_type = reader.device_type(group, known.backends, given)
        backend, numbers = known.backends[device_type], group._get_backend(sys.modules["torch"].device(device_type))
    return _Row(known.key(backend), backend, numbers)


def _enter(reader: _Arguments, teller: Teller, group: Any, row: _Row, before: int, given: _Given) -> int:
    assert teller.cell is not None
    assert teller.flight is not None
    num_p2p = teller.flight.num_p2p.get(row.key, 0)
    sizes, dtypes = reader.inputs(teller, given)
    return teller.cell.enter_call(
        group=row.key,
        seq=1 + (num_p2p if reader.is_p2p else before - num_p2p),
        op=reader.described.op if row.backend == "nccl" else reader.described.gloo_op,
        sizes=sizes,
        dtypes=dtypes,
        place=place_of(sys._getframe(3)),
        peer=reader.peer(teller, group, given),
    )


def _count_p2p(teller: Teller, row: _Row, before: int) -> None:
    try:
        assert teller.flight is not None
        for number in range(before + 1, row.numbers._get_sequence_number_for_group() + 1):
            teller.flight.count_p2p(row.key, number)
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
        self._parameters = tuple(inspect.signature(original).parameters)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
        """Return what a call was given, by parameter."""
        return dict(zip(self._parameters, args, strict=False)) | kwargs

    def group(self, teller: Teller, given: _Given) -> Any:
        """Return the process group, None where this rank is not in it."""
        group = given.get("group")
        group = teller.world.default_pg if group is None else group
        return group if group in teller.world.pg_names else None

    def tensors(self, given: _Given) -> list[Any]:
        """Return the inputs."""
        tensors = given.get(self.described.tensors)
        return [] if tensors is None else list(tensors) if isinstance(tensors, list | tuple) else [tensors]

    def device_type(self, group: Any, backends: Mapping[str, str], given: _Given) -> str:
        """Return the type of device that the call is for, as torch chooses it."""
        tensors = self.tensors(given) or [given.get("tensor")]
        if tensors[0] is not None:
            return str(tensors[0].device.type)
        # A barrier. Source: torch 2.13, distributed_c10d.barrier.
        is_on_gpu = bool(given.get("device_ids")) or getattr(group, "bound_device_id", None) is not None
        return next((device for device in backends if (device != "cpu") is is_on_gpu), next(iter(backends)))

    def inputs(self, teller: Teller, given: _Given) -> tuple[str, str]:
        """Return sizes and dtypes of the inputs, as the recorder has them."""
        tensors = self.tensors(given)
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

    def peer(self, teller: Teller, group: Any, given: _Given) -> int:
        """Return the other side's rank in the group; -1: there is none, or it may be any."""
        if not self.is_p2p:
            return -1
        in_group = given.get(f"group_{self._peer}")
        if in_group is None and (rank := given.get(self._peer)) is not None:
            in_group = teller.world.pg_group_ranks[group][rank]
        return -1 if in_group is None else int(in_group)

"""Which collective did the script call just now? Written into the cell before torch is asked to do it.

A beat comes five times a second; where shapes differ, Gloo aborts a process within 30 ms of the call, and the recorder
dies with it. So each collective of torch.distributed that Python code calls is written down first: a few microseconds,
into memory that outlives the process. What C++ calls (the reducer of DDP) only the recorder knows.

The functions stay what they were: same signature, same result, same exceptions, in whose tracebacks no frame of ours
stands. torch.compile traces the originals, and runs these between its graphs as they are.
Runs in the worker's Python.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .cell import Cell
from .flight import Flight
from .thread_marks import BLOCKED, NOT_OURS, book
from .user_frames import drop_frame, hide_from_dynamo, place_of

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
    "gather_single": _Described("gather_single", "gather", "tensor"),
    "gather_into_tensor": _Described("gather_single", "gather", "tensor"),
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
        self.failed: Callable[[str], None] = lambda failed: None
        """Called when a collective raised, with what."""
        self.is_compiling: Callable[[], bool] = lambda: False
        """torch.compiler's, which is not there yet while torch is being imported."""
        self.c10d = c10d
        self.here = threading.local()


def wrap(c10d: Any, teller: Teller) -> None:
    """Replace the collectives of distributed_c10d, before anything takes them from it, by ones that tell first."""
    for name, described in COLLECTIVES.items():
        original = getattr(c10d, name, None)
        if inspect.isfunction(original):
            setattr(c10d, name, _Collective(name, described, original, teller).wrapped())


class _Collective:
    """One function of torch.distributed, and where among its arguments stands what is told."""

    def __init__(self, name: str, described: _Described, original: Callable[..., Any], teller: Teller) -> None:
        self._described = described
        self._original = original
        self._teller = teller
        self._is_p2p = name in _PEERS
        self._peer_name = _PEERS.get(name, "")
        self._parameters = tuple(inspect.signature(original).parameters)

    def wrapped(self) -> Callable[..., Any]:
        """Return the function that tells, and then calls the original."""
        teller, original = self._teller, self._original

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            cell, flight = teller.cell, teller.flight
            is_told = cell is not None and not teller.is_compiling() and not getattr(teller.here, "is_inside", False)
            try:
                if cell is None or flight is None or not is_told:
                    return original(*args, **kwargs)
                return self._tell_and_call(cell, flight, args, kwargs)
            except BaseException as exc:
                drop_frame(exc)
                raise

        hide_from_dynamo(call, with_calls=True)
        return call

    def _tell_and_call(self, cell: Cell, flight: Flight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._teller.here.is_inside = True  # one collective may be made of others
        number, key, before = 0, "", -1
        numbers: Any = None
        is_blocking = self._described.op not in ("isend", "irecv")
        try:
            try:
                given = dict(zip(self._parameters, args, strict=False)) | kwargs
                is_blocking = is_blocking and not given.get("async_op")
                group = given.get("group")
                group = self._teller.c10d._world.default_pg if group is None else group
                if group in self._teller.c10d._world.pg_names:  # else this rank is not in it
                    key, backend, numbers = self._row(flight, group, given)
                    before, num_p2p = numbers._get_sequence_number_for_group(), flight.num_p2p.get(key, 0)
                    seq = 1 + (num_p2p if self._is_p2p else before - num_p2p)
                    blocks = is_blocking and threading.current_thread() is threading.main_thread()
                    number = self._enter(cell, group, key, backend, seq, given, blocks=blocks)
            except Exception as exc:  # an argument that torch will refuse, or a torch whose inside we do not know
                flight.note(f"a call could not be told: {exc!r}")
            state = book.enter(BLOCKED) if is_blocking else NOT_OURS
            try:
                return self._original(*args, **kwargs)
            except BaseException as exc:
                drop_frame(exc)
                if isinstance(exc, Exception):
                    self._teller.failed(f"{type(exc).__name__}: {exc}")
                raise
            finally:
                book.leave(state)
        finally:
            self._teller.here.is_inside = False
            if number:
                cell.leave_call(number)
            if self._is_p2p and before >= 0:
                try:
                    for taken in range(before + 1, numbers._get_sequence_number_for_group() + 1):
                        flight.count_p2p(key, taken)
                except Exception as exc:
                    flight.note(f"a call could not be told: {exc!r}")

    def _row(self, flight: Flight, group: Any, given: _Given) -> tuple[str, str, Any]:
        """Return where a call has its number: the group's key, the backend, and what tells the last number of the two.

        Each backend of a group counts its own.
        """
        known = flight.group(group)
        backend, numbers = next(iter(known.backends.values())), group
        if len(set(known.backends.values())) > 1:
            device_type = self._device_type(group, known.backends, given)
            backend, numbers = known.backends[device_type], group._get_backend(sys.modules["torch"].device(device_type))
        return known.key(backend), backend, numbers

    def _enter(self, cell: Cell, group: Any, key: str, backend: str, seq: int, given: _Given, *, blocks: bool) -> int:
        sizes, dtypes = self._inputs(given)
        told = {  # with the fields of model.beat.CallSeen
            "group": key,
            "seq": seq,
            "op": self._described.op if backend.startswith("nccl") else self._described.gloo_op,
            "sizes": sizes,
            "dtypes": dtypes,
            "place": place_of(sys._getframe(3)),
            "peer": self._peer(group, given),
            "blocks": blocks,
            "created_ns": time.time_ns(),
        }
        return cell.enter_call(json.dumps(told).encode())

    def _tensors(self, given: _Given) -> list[Any]:
        tensors = given.get(self._described.tensors)
        return [] if tensors is None else list(tensors) if isinstance(tensors, list | tuple) else [tensors]

    def _device_type(self, group: Any, backends: Mapping[str, str], given: _Given) -> str:
        """Return the type of device that the call is for, as torch chooses it."""
        tensors = self._tensors(given) or [given.get("tensor")]
        if tensors[0] is not None:
            return str(tensors[0].device.type)
        # A barrier. Source: torch 2.13, distributed_c10d.barrier.
        is_on_gpu = bool(given.get("device_ids")) or getattr(group, "bound_device_id", None) is not None
        return next((device for device in backends if (device != "cpu") is is_on_gpu), next(iter(backends)))

    def _inputs(self, given: _Given) -> tuple[list[list[int]], list[str]]:
        """Return sizes and dtypes of the inputs, as the recorder has them."""
        tensors = self._tensors(given)
        sizes = [list(tensor.shape) for tensor in tensors]
        dtypes = [_dtype(tensor.dtype) for tensor in tensors]
        if (self._described.op, self._described.tensors) == ("reduce_scatter", "input_list"):
            sizes, dtypes = sizes[:1], dtypes[:1]  # Gloo reduces them one after the other
        elif self._described.op == "scatter" and sizes:
            sizes, dtypes = [[len(sizes), *sizes[0]]], dtypes[:1]
        return sizes[:64], dtypes[:64]

    def _peer(self, group: Any, given: _Given) -> int | None:
        """Return the other side's rank in the group; None: there is none, or it may be any."""
        if not self._is_p2p:
            return None
        in_group = given.get(f"group_{self._peer_name}")
        if in_group is None and (rank := given.get(self._peer_name)) is not None:
            in_group = self._teller.c10d._world.pg_group_ranks[group][rank]
        return None if in_group is None else int(in_group)


@functools.cache
def _dtype(dtype: Any) -> str:
    word = str(dtype).rpartition(".")[2]
    return _DTYPES.get(word, word)

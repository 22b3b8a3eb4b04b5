"""What does the state of a run look like as bytes?  Nested values in, the bytes of a part out, and back.

A part is a header, the bytes of all tensors and arrays (each at a multiple of 64), a tree in MessagePack, and a footer
that says where the tree is. In the tree, None, bool, int, float, str and bytes stand for themselves; everything else is
a list that begins with its kind: `["tuple", [...]]`, `["tensor", "float32", [2, 3], 64]`. So reading a part can make
nothing but these values: no pickle, no names of classes, nothing that runs.

Why not torch.save or DCP's files: both pickle, and both write from the training process's memory through the
interpreter that trains. Tensors here go straight to shared memory, one copy each; only the tree is encoded. Sharded
tensors take DCP's planners (`state/saved/sharded.py`).
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from allranks.model.errors import UsageError
from allranks.state.saved.manifest import Damaged
from allranks.state.saved.parts import PartReader

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed.tensor import DTensor

HEADER = b"allranks state 1\n".ljust(64, b"\0")
ALIGN_BYTES = 64
DEEPEST = 100
_FOOTER = struct.Struct("<QQ8s")
_END = b"ar-state"
_PLAIN = (bool, int, float, str, bytes, type(None))
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_ARRAY_KINDS = "biufcSUmM"
_MSGPACK_INTS = range(-(2**63), 2**64)


class StateError(UsageError):
    """The state holds something that a checkpoint cannot; the message names its path."""


class Piece(NamedTuple):
    """Bytes of one tensor in a part."""

    source: torch.Tensor
    offset: int


@dataclass(slots=True)
class Packer:
    """Lays out the values of one part."""

    pieces: list[Piece] = field(default_factory=list)
    sharded: dict[str, DTensor] = field(default_factory=dict)
    """DTensors by their path, for `state/saved/sharded.py`."""
    end: int = len(HEADER)
    """Where the next piece can lie."""

    def place(self, source: torch.Tensor) -> int:
        """Give a tensor its place, and return it."""
        offset = self.end
        if size_bytes := source.numel() * source.element_size():
            self.pieces.append(Piece(source, offset))
            self.end = -(-(offset + size_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        return offset

    def pack(self, value: object, path: str, depth: int = 0) -> Any:
        """Return the tree of a value, and give its tensors their places.

        Args:
            value: nested dicts, lists and tuples of what can be saved.
            path: how to reach it, for messages: `common["model"]`.
            depth: how deep it lies already.
        Raises:
            StateError: it holds something else.
        """
        kind = type(value)
        if kind in _PLAIN:
            return _pack_plain(value, path)
        if depth > DEEPEST:
            raise StateError(f"{path} is nested deeper than {DEEPEST}: does it contain itself?")
        if kind in _DICTS:
            assert isinstance(value, dict)
            items = [
                [self._pack_key(key, path), self.pack(item, f"{path}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ]
            return [_DICTS[kind], items]
        if kind is list or kind is tuple or kind is torch.Size:
            assert isinstance(value, list | tuple)
            items = [self.pack(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
            return ["size" if kind is torch.Size else kind.__name__, items]
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, path)
        if kind is torch.dtype:
            return ["dtype", str(value).removeprefix("torch.")]
        if kind is complex:
            assert isinstance(value, complex)
            return ["complex", value.real, value.imag]
        if kind.__module__ == "numpy":
            return self._pack_numpy(value, path)
        raise _refuse(value, path)

    def _pack_key(self, key: object, path: str) -> Any:
        if type(key) in _PLAIN:
            return _pack_plain(key, f"a key of {path}")
        if type(key) is tuple:
            return ["tuple", [self._pack_key(item, path) for item in key]]
        raise _refuse(key, f"a key of {path}")

    def _pack_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            if not _is_dtensor(tensor):
                raise _refuse(tensor, path)
            self.sharded[path] = tensor
            return ["sharded", path]
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            what = "quantized" if tensor.is_quantized else f"of layout {tensor.layout} on {tensor.device}"
            raise StateError(f"{path} is a tensor {what}; a checkpoint holds dense tensors with data")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(tensor.shape), self.place(tensor.detach())]

    def _pack_numpy(self, value: Any, path: str) -> Any:
        import numpy as np

        if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _ARRAY_KINDS:
            raise _refuse(value, path)
        if isinstance(value, np.generic):
            return ["scalar", value.dtype.str, value.tobytes()]
        data = bytearray(value.tobytes())
        source = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        return ["array", value.dtype.str, list(value.shape), self.place(source) if data else 0]


def finish(packer: Packer, tree: dict[str, Any]) -> tuple[bytes, int]:
    """Return what follows the pieces, from `packer.end` on, and the size of the part."""
    encoded = msgspec.msgpack.encode(tree)
    tail = encoded + _FOOTER.pack(packer.end, len(encoded), _END)
    return tail, packer.end + len(tail)


# And back


def read_tree(reader: PartReader, name: str) -> dict[str, Any]:
    """The tree of the part of this name.

    Raises:
        Damaged: the part has none.
    """
    footer_at = reader.size_bytes - _FOOTER.size
    offset, size_bytes, end = _FOOTER.unpack(reader.read(footer_at, _FOOTER.size))
    if end != _END or offset + size_bytes != footer_at or reader.read(0, len(HEADER)) != HEADER:
        raise Damaged(f"{name}: is no state of ours")
    try:
        tree = msgspec.msgpack.decode(reader.read(offset, size_bytes))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise Damaged(f"{name}: its tree cannot be read ({exc})") from exc
    if not isinstance(tree, dict):
        raise Damaged(f"{name}: has no tree")
    return tree


def unpack(node: Any, reader: PartReader, sharded: Callable[[str], torch.Tensor]) -> Any:
    """Make the values of a tree again; tensors on the CPU, each with memory of its own; `sharded` gives sharded ones.

    Raises:
        Damaged: it is none, or its bytes are not in the part.
    """
    if not isinstance(node, list):
        return node
    try:
        kind, *values = node
        return _UNPACK[kind](values, reader, sharded)
    except Damaged:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, RecursionError) as exc:
        raise Damaged(f"the tree holds what no state has: {str(node)[:80]} ({exc!r})") from exc


def _unpack_items(values: list[Any], reader: PartReader, sharded: Callable[[str], torch.Tensor]) -> list[Any]:
    return [unpack(item, reader, sharded) for item in values[0]]


def _unpack_dict(values: list[Any], reader: PartReader, sharded: Callable[[str], torch.Tensor]) -> dict[Any, Any]:
    return {unpack(key, reader, sharded): unpack(item, reader, sharded) for key, item in values[0]}


def _unpack_tensor(values: list[Any], reader: PartReader, _: object) -> torch.Tensor:
    dtype, shape, offset = values
    tensor = torch.empty(shape, dtype=dtype_of(dtype))
    read_tensor(reader, offset, tensor)
    return tensor


def _unpack_array(values: list[Any], reader: PartReader, _: object) -> np.ndarray[Any, Any]:
    import numpy as np

    dtype, shape, offset = values
    array: np.ndarray[Any, Any] = np.empty(shape, dtype=_numpy_dtype(dtype))
    if array.nbytes:
        reader.read_into(offset, array.reshape(-1).view(np.uint8).data)
    return array


def _unpack_scalar(values: list[Any], *_: object) -> Any:
    import numpy as np

    dtype, data = values
    return np.frombuffer(data, dtype=_numpy_dtype(dtype))[0]


_UNPACK: dict[str, Callable[[list[Any], PartReader, Callable[[str], torch.Tensor]], Any]] = {
    "dict": _unpack_dict,
    "ordered": lambda values, reader, sharded: OrderedDict(_unpack_dict(values, reader, sharded)),
    "counter": lambda values, reader, sharded: Counter(_unpack_dict(values, reader, sharded)),
    "list": _unpack_items,
    "tuple": lambda values, reader, sharded: tuple(_unpack_items(values, reader, sharded)),
    "size": lambda values, reader, sharded: torch.Size(_unpack_items(values, reader, sharded)),
    "int": lambda values, *_: int(values[0], 16),
    "complex": lambda values, *_: complex(values[0], values[1]),
    "dtype": lambda values, *_: dtype_of(values[0]),
    "tensor": _unpack_tensor,
    "array": _unpack_array,
    "scalar": _unpack_scalar,
    "sharded": lambda values, _, sharded: sharded(values[0]),
}


def read_tensor(reader: PartReader, offset: int, tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor on the CPU with its bytes in a part.

    Raises:
        Damaged: they are not there, or altered.
    """
    if tensor.numel():
        flat = tensor.reshape(-1).view(torch.uint8)
        reader.read_into(offset, memoryview(flat.numpy()))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name.

    Raises:
        Damaged: this torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"torch {torch.__version__} has no dtype {name}")
    return dtype


def _numpy_dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise Damaged(f"an array of {name} is nothing that a checkpoint holds")
    return dtype


def _pack_plain(value: Any, path: str) -> Any:
    if type(value) is int and value not in _MSGPACK_INTS:
        return ["int", hex(value)]
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise StateError(f"{path} is text that is no Unicode ({exc.reason}): save bytes instead") from exc
    return value


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing what is slow to import: who has a DTensor has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _refuse(value: object, path: str) -> StateError:
    kind = type(value)
    return StateError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: nested dicts, lists and "
        f"tuples of tensors, numbers, str, bytes, None, NumPy arrays and torch dtypes; save its state_dict(), or plain "
        f"values"
    )

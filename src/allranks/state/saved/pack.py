"""How does the state of a run become a safetensors file, and a state again? Nested values in, bytes out, and back.

A part is a safetensors file: 8 bytes with the length of a JSON header, the header, the bytes of all tensors. The tree
of the state is JSON, too, and lies in the header's `__metadata__`. In it None, bool, int, float, str and dicts with
text for keys stand for themselves; everything else is a list that begins with its kind: `["tuple", [...]]`, `["tensor",
NAME, "float32", [2, 3]]`. So reading a part can make nothing but these values: no pickle, no class names, no code.

We lay the file out ourselves, because tensors go straight to shared memory, one copy each. We read it ourselves, too:
the safetensors library maps the file, so it would read bytes again after their checksum was verified, and a file that
is deleted on a file server meanwhile would kill the process (SIGBUS).
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allranks.model.errors import UsageError
from allranks.state.saved.manifest import Damaged
from allranks.state.saved.parts import PartReader

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

with contextlib.suppress(ImportError):  # torch has imported it, if it is there
    import numpy as np

ALIGN_BYTES = 64
LARGEST_HEADER_BYTES = 100_000_000
"""The safetensors library reads no larger one."""
DEEPEST = 100
_TREE = "allranks"
"""Key of the tree in `__metadata__`."""
# Source: safetensors 0.8, safetensors/torch.py. Other dtypes are stored as U8.
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_LISTS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "size": torch.Size}
_KINDS = {kind: name for name, kind in (_DICTS | _LISTS).items()}
_ARRAY_KINDS = "biufcSUmM"
_LARGEST_INT = 2**63


class StateError(UsageError):
    """The state holds something that a checkpoint cannot; the message names its path."""


class Piece(NamedTuple):
    """Bytes of one tensor in a part."""

    source: torch.Tensor
    offset: int


@dataclass(slots=True)
class Packer:
    """Collects the values of one part."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By their names in the file. Tensors in the same memory are there once."""
    sharded: dict[str, DTensor] = field(default_factory=dict)
    """DTensors by their path, for `state/saved/sharded.py`."""
    offsets: dict[str, list[int]] = field(default_factory=dict)
    """Of tensors that are shards, by their names: the place of the first element in the whole."""
    _names: dict[object, str] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor, path: str) -> str:
        """Take a tensor in, and return the name under which its bytes are stored."""
        where: object = path
        if tensor.numel():
            look = None if is_plain(tensor) else (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg())
            where = (tensor.device, tensor.data_ptr(), tensor.nbytes, tensor.is_conj(), look)
        if where not in self._names:
            name = _dotted(path)
            while name in self.tensors:
                name += "'"  # other paths may be written alike
            self._names[where] = name
            self.tensors[name] = tensor
        return self._names[where]

    def pack(self, value: object, path: str, depth: int = 0) -> Any:
        """Return the tree of a value, and take its tensors in.

        Args:
            path: how to reach it, for messages: `common["model"]`.
            depth: how deep it lies already.
        Raises:
            StateError: it holds something that cannot be saved.
        """
        kind = type(value)
        if kind in (bool, str, type(None)):
            return value
        if depth > DEEPEST:
            raise StateError(f"{path} is nested deeper than {DEEPEST}: does it contain itself?")
        if isinstance(value, int) and kind is int:
            return value if abs(value) < _LARGEST_INT else ["int", hex(value)]
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if isinstance(value, complex) and kind is complex:
            return ["complex", repr(value.real), repr(value.imag)]
        if isinstance(value, bytes) and kind is bytes:
            return ["bytes", base64.b64encode(value).decode()]
        if isinstance(value, dict) and kind in _KINDS:
            items = [(key, self.pack(item, f"{path}[{key!r}]", depth + 1)) for key, item in value.items()]
            if kind is dict and all(type(key) is str for key in value):
                return dict(items)
            return [_KINDS[kind], [[self._pack_key(key, path), item] for key, item in items]]
        if isinstance(value, list | tuple) and kind in _KINDS:
            return [_KINDS[kind], [self.pack(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]]
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, path)
        if kind is torch.dtype:
            return ["dtype", name_of(value)]
        if kind.__module__ == "numpy":
            return self._pack_numpy(value, path)
        raise _refuse(value, path)

    def _pack_key(self, key: object, path: str) -> Any:
        if type(key) is tuple:
            return ["tuple", [self._pack_key(item, path) for item in key]]
        if isinstance(key, bool | int | float | str | bytes | None):
            return self.pack(key, f"a key of {path}")
        raise _refuse(key, f"a key of {path}")

    def _pack_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            if not is_dtensor(tensor):
                raise _refuse(tensor, path)
            self.sharded[path] = tensor
            return ["sharded", path]
        kinds = {"quantized": tensor.is_quantized, "nested": tensor.is_nested, "meta": tensor.is_meta}
        kinds[str(tensor.layout)] = tensor.layout is not torch.strided
        for kind in (name for name, is_one in kinds.items() if is_one):
            raise StateError(f"{path} is a {kind} tensor; a checkpoint holds dense tensors with data")
        return ["tensor", self.add(tensor.detach(), path), name_of(tensor.dtype), list(tensor.shape)]

    def _pack_numpy(self, value: Any, path: str) -> Any:
        if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _ARRAY_KINDS:
            raise _refuse(value, path)
        if isinstance(value, np.generic):
            return ["scalar", base64.b64encode(value.tobytes()).decode(), value.dtype.str]
        data = bytearray(value.tobytes())
        source = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return ["array", self.add(source, path), value.dtype.str, list(value.shape)]

    def lay_out(self, tree: dict[str, Any]) -> tuple[bytes, list[Piece], int]:
        """Return the file's header with this tree, the tensors with their places, and the file's size.

        Raises:
            StateError: the header is larger than safetensors allows.
        """
        offset, placed, begins = 0, [], {}
        header: dict[str, Any] = {"__metadata__": {_TREE: json.dumps(tree)}}
        # Gaps are not allowed: with the largest elements first, every tensor is aligned to its own elements.
        for name, source in sorted(self.tensors.items(), key=lambda item: -item[1].element_size()):
            code, end = CODES.get(name_of(source.dtype)), offset + source.nbytes
            shape = list(source.shape) if code else [source.nbytes]
            header[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [offset, end]}
            begins[name] = {"saved_offsets": self.offsets.get(name, [0] * len(shape))}
            placed.append((source, offset))
            offset = end
        if self.offsets:
            header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(begins)  # for its HuggingFaceStorageReader
        encoded = json.dumps(header).encode()
        encoded = encoded.ljust(-(-(8 + len(encoded)) // ALIGN_BYTES) * ALIGN_BYTES - 8)
        if len(encoded) > LARGEST_HEADER_BYTES:
            raise StateError(
                f"numbers and text take {len(encoded) / 1e6:.0f} MB of this checkpoint, at most "
                f"{LARGEST_HEADER_BYTES / 1e6:.0f} are possible: save long lists of numbers as tensors"
            )
        data = len(encoded).to_bytes(8, "little") + encoded
        return data, [Piece(source, len(data) + at) for source, at in placed], len(data) + offset


# And back


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of this name, or raise Damaged: this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"torch {torch.__version__} has no dtype {name}")
    return dtype


_VALUES: dict[str, Callable[..., Any]] = {
    "int": lambda value: int(value, 16),
    "float": float,
    "complex": lambda real, imag: complex(float(real), float(imag)),
    "bytes": lambda text: base64.b64decode(text),
    "dtype": dtype_of,
}


class StateFile:
    """One part, opened: its tree, and its tensors by name.

    Args:
        sharded: returns the DTensor of this path.
    Raises:
        Damaged: header, tree or tensors are not what a state has, or their bytes are altered.
    """

    def __init__(self, reader: PartReader, sharded: Callable[[str], torch.Tensor]) -> None:
        self.reader, self._unpack_sharded = reader, sharded
        self.is_read = True
        """False: `unpack` makes tensors of the right size, and reads no bytes into them."""
        self.loaded: dict[str, torch.Tensor] = {}
        """What `unpack` has made so far, by name."""
        try:
            self._data_at = 8 + int.from_bytes(reader.read(0, 8), "little")
            if self._data_at > reader.size_bytes:
                raise ValueError
            self._header = json.loads(reader.read(8, self._data_at - 8))
            self.tree: dict[str, Any] = json.loads(self._header["__metadata__"][_TREE])
            if not {"own", "shards"} <= self.tree.keys():
                raise KeyError("own")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            why = str(exc) if isinstance(exc, Damaged) else f"{reader.name}: is no state of ours"
            raise Damaged(why) from exc

    def unpack(self, node: Any) -> Any:
        """Make the values of a tree again, tensors on the CPU; those that lay in the same memory do again."""
        try:
            return self._unpack(node)
        except Damaged:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, RecursionError) as exc:
            raise Damaged(f"{self.reader.name}: its tree holds what no state has ({exc!r})") from exc

    def read(self, name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        """Return a new tensor with the bytes of this name."""
        tensor = torch.empty(shape, dtype=dtype_of(dtype))
        begin, end = self._header[name]["data_offsets"]
        if end - begin != tensor.nbytes:
            raise Damaged(f"{self.reader.name}: {name} has {end - begin} bytes instead of {tensor.nbytes}")
        if tensor.nbytes and self.is_read:
            self.reader.read_into(self._data_at + begin, memoryview(_bytes_of(tensor).numpy()))
        return tensor

    def _unpack(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {key: self._unpack(item) for key, item in node.items()}
        if not isinstance(node, list):
            return node
        kind, first, *rest = node
        if kind in _DICTS:
            return _DICTS[kind]({self._unpack(key): self._unpack(item) for key, item in first})
        if kind in _LISTS:
            return _LISTS[kind]([self._unpack(item) for item in first])
        if kind in _VALUES:
            return _VALUES[kind](first, *rest)
        return getattr(self, f"_unpack_{kind}")(first, *rest)

    def _unpack_tensor(self, name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        loaded = self.loaded[name] = self.loaded[name] if name in self.loaded else self.read(name, dtype, shape)
        if (name_of(loaded.dtype), list(loaded.shape)) == (dtype, shape):
            return loaded
        return _bytes_of(loaded).view(dtype_of(dtype)).view(shape)

    def _unpack_array(self, name: str, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        data = self._unpack_tensor(name, "uint8", self._header[name]["shape"]).numpy()
        return data.view(_numpy_dtype(dtype)).reshape(shape) if data.size else np.empty(shape, _numpy_dtype(dtype))

    def _unpack_scalar(self, data: str, dtype: str) -> Any:
        return np.frombuffer(base64.b64decode(data), dtype=_numpy_dtype(dtype))[0]


def name_of(dtype: object) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in memory as they are to be saved."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _dotted(path: str) -> str:
    """As DCP names what lies in nested dicts.

    >>> _dotted("common['parts']['model']['0.weight']"), _dotted("per_rank[3]['rng'][0]")
    ('parts.model.0.weight', 'per_rank.3.rng.0')
    """
    return re.sub(r"\['?(.*?)'?\]", r".\1", path).removeprefix("common.")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise Damaged(f"an array of {name} is nothing that a checkpoint holds")
    return dtype


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing what is slow to import: who has a DTensor has imported it."""
    modules = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "_tensor"))  # torch 2.4: the latter
    return any(isinstance(tensor, getattr(module, "DTensor", ())) for module in modules)


def _refuse(value: object, path: str) -> StateError:
    kind = type(value)
    return StateError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: nested dicts, lists and "
        f"tuples of tensors, numbers, str, bytes, None, NumPy arrays and torch dtypes; save its state_dict(), or plain "
        f"values"
    )

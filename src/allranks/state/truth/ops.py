"""Which operations does a step do, and on which bits? Recorded when `allranks diff --replay` runs a training again.

    recorder = OpRecorder(name_modules)
    recorder.begin(batches)
    with recorder:
        train_step(...)
    encode_ops(recorder.ops)

A TorchDispatchMode gets each operation below autograd, collectives included; compiled code runs eager meanwhile. A mode
belongs to one thread. Backward operations on a CPU run on the thread that calls `backward()`. Those on a GPU, and those
of deeply nested backward passes, run on threads of autograd, which take over the modes of the calling thread
(at::ThreadLocalState). A collective is waited for at once, since its result is read; sends and receives are not, since
the peer may not have begun.

What is written behind torch's back (NumPy in a tensor's memory, kernels of Triton) is an input of the next operation.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from allranks.model.safe_text import as_utf8
from allranks.state.truth.contents import Contents
from allranks.state.truth.fingerprint import bytes_of, can_watch, fingerprint, hash_bytes, hash_text
from allranks.state.truth.op_file import BATCH, COLLECTIVES, SETUP, Op, OpValue
from allranks.state.truth.trace import find_generators

_OVERWRITES = frozenset((
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "_foreach_copy_", "_foreach_zero_", "recv_", "recv_any_source_",
))  # fmt: skip
"""The old content of what they write to does not count; nor does that of `out=`."""
SMALL_BYTES = 64 << 10
"""The bytes of a tensor of at most this size are hashed as they are: a fingerprint takes 0.3 ms at least."""
_STDLIB, _OWN = f"{Path(os.__file__).resolve().parent}/", f"{Path(__file__).resolve().parents[2]}/"
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Form:
    """What the schema of an operation says of it."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name, self.short = str(func), schema.name.partition("::")[2]
        self.names = [argument.name for argument in schema.arguments]
        self.is_collective = func.namespace in COLLECTIVES
        is_view = self.short == "_wrap_tensor_autograd" or bool(getattr(func, "is_view", False))
        self.is_passed = func.namespace in ("profiler", "prim") or is_view
        """It computes nothing."""
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        written = {own.name for own in schema.arguments if own.alias_info is not None and own.alias_info.is_write}
        self.written = written or (set(self.names) if func.namespace == "c10d" else set())
        outputs = {own.name for own in schema.arguments if own.is_out or own.name.startswith("output")}
        if is_wait := self.short == "wait_tensor":  # what it waits for is being written until then
            self.written = set(self.names)
        self.overwritten = outputs | (self.written if self.short in _OVERWRITES or is_wait else set())
        is_late = func.namespace == "_c10d_functional" and not is_wait
        self.is_unread = is_late or "empty" in self.short or self.short in ("resize_", "send", "recv_")
        """Its outputs do not count, or are not there yet."""


_form_of = functools.cache(_Form)


class EagerMode(TorchDispatchMode):  # type: ignore[misc]
    """A mode that gets operations of compiled code, too, since that runs eager meanwhile.

    torch.compile gives up for good on code that is called in a mode, and raises if it may not.
    """

    can_run_eager = hasattr(torch.compiler, "set_stance")  # torch 2.6

    def __enter__(self) -> Any:
        self._until_exit = contextlib.ExitStack()
        if self.can_run_eager:
            self._until_exit.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._until_exit.close()


class OpRecorder(EagerMode):
    """Records the operations of one step, each with the name of the module that does it."""

    def __init__(self, name_modules: Callable[[], Mapping[str, torch.nn.Module]] = dict, step: int = SETUP) -> None:
        super().__init__()
        self._name_modules, self.step = name_modules, step
        self._names: dict[int, str] | None = None
        self._running = list[str]()
        self._forward = dict[int, tuple[str, str]]()
        """Line and module of a forward operation, by the number of its node."""
        self.ops = list[Op]()
        """In their order."""

    def __enter__(self) -> Any:
        entered, hooks = super().__enter__(), torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(lambda module, _: self._running.append(self._name_of(module))),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._until_exit.callback(handle.remove)
        return entered

    def begin(self, batches: Sequence[Any]) -> None:
        """Take in the batch of the step; called before this is entered."""
        inputs, settings = tuple[OpValue, ...](), ""
        with contextlib.suppress(Exception):  # as in the record: an object of the script that cannot be read
            found = Contents.of_batches(batches)
            inputs = tuple(value for own in found for one in own.tensors.values() for value in _number([one]))
            texts = (hash_text(*own) for one in found for own in one.texts.values())
            settings = ", ".join(f"Python values {number:x}" for number in texts)
        self.ops.append(Op(BATCH, "", "", inputs, (), settings, _generators(), self.step))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, form = kwargs or {}, _form_of(func)
        if form.is_passed:
            return func(*args, **kwargs)
        line, module = self._place()
        told = dict(zip(form.names, args, strict=False)) | kwargs
        overwritten = form.overwritten | ({"tensors"} if _only_receives(form, told) else set())
        read = [own for name, value in told.items() if name not in overwritten for own in _tensors(value)]
        inputs = _number(read)
        settings = ", ".join(text for name, value in told.items() if (text := _say_setting(name, value)))
        generator = _generators(told.get("generator")) if form.draws else ""
        result = func(*args, **kwargs)
        written = [own for name in form.names if name in form.written for own in _tensors(told.get(name))]
        if form.is_collective:
            _wait(form, result)
        outputs = () if form.is_unread else _number([*written, *_tensors(result)])
        self.ops.append(Op(form.name, as_utf8(line), module, inputs, outputs, settings, generator, self.step))
        return result

    def _place(self) -> tuple[str, str]:
        """Return the line of the script and the module, of a backward operation those of the forward one."""
        node = torch._C._current_autograd_node()
        if node is not None:
            line, module = self._forward.get(node._sequence_nr(), ("", ""))
            return f"backward of {line}" if line else _line_of(sys._getframe(2)), module
        here = _line_of(sys._getframe(2)), self._running[-1] if self._running else ""
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, here)
        return here

    def _name_of(self, module: torch.nn.Module) -> str:
        if self._names is None:
            self._names = {id(own): name for name, own in self._name_modules().items()}
        return self._names.get(id(module), type(module).__name__)

    def _leave_module(self, *_: object) -> None:
        if self._running:
            self._running.pop()


def _number(tensors: Iterable[Tensor]) -> tuple[OpValue, ...]:
    """Return form and fingerprint of each tensor; what shows the same bits, once."""
    views = {(own.data_ptr(), own.shape, own.stride(), own.dtype, own.is_conj(), own.is_neg()): own for own in tensors}
    large = iter(fingerprint([own for own in views.values() if own.nbytes > SMALL_BYTES]))
    numbers = (next(large) if own.nbytes > SMALL_BYTES else hash_bytes(bytes_of(own).cpu().numpy().tobytes())
               for own in views.values())  # fmt: skip
    forms = (f"{str(own.dtype)[6:]}{[*own.shape]}" for own in views.values())
    return tuple(map(OpValue, forms, numbers))


def _line_of(frame: FrameType | None) -> str:
    """Return the innermost line that is of no library."""
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"  # noqa: PTH119
        frame = frame.f_back
    return ""


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(("<", _STDLIB, _OWN)) or "/site-packages/" in file or "/dist-packages/" in file


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument whose bits can be read; of a sharded one this rank's shard."""
    if isinstance(value, Tensor):
        if wait := getattr(value, "trigger_wait", None):  # the result of a functional collective
            value = wait()
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        elif can_watch(value):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _say_setting(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        text = ", ".join(filter(None, (_say_setting("", item) for item in value)))
        return f"{name}=[{text}]" if text else ""
    return f"{name}{'=' * bool(name)}{value}" if isinstance(value, _PLAIN) else ""


def _only_receives(form: _Form, told: Mapping[str, Any]) -> bool:
    """Whether this rank gets a broadcast of another one."""
    if form.short != "broadcast_":
        return False
    with contextlib.suppress(AttributeError, RuntimeError):
        return bool(dist.ProcessGroup.unbox(told["process_group"]).rank() != told["root_rank"])
    return False


def _wait(form: _Form, result: Any) -> None:
    work = result[-1] if isinstance(result, tuple | list) and result else result
    if not isinstance(work, torch.ScriptObject) or form.short in ("send", "recv_", "recv_any_source_"):
        return
    with contextlib.suppress(AttributeError):  # a torch without `unbox`
        dist.Work.unbox(work).wait()


def _generators(own: torch.Generator | None = None) -> str:
    if own is not None:
        return f"{hash_bytes(own.get_state().cpu().numpy().tobytes()):x}"
    told = find_generators()
    return f"{told['torch']:x} {told.get('cuda', 0):x}"

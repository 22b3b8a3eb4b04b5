"""How do gradients cross the network in fewer bytes? Communication hooks for torch's DistributedDataParallel.

    compressor = attach(ddp, "int8")             # before the first backward pass, on all ranks
    state = compressor.state_dict()              # of this rank: what it still owes to the sums
    why = compressor.load_state_dict(state)      # None, or a line that says why it was dropped

bf16      torch's hook: gradients are summed as bfloat16; those of 2 bytes cross as they are.
int8      blocks of 256 numbers, each with a scale in fp32. A rank gets its slice of a bucket from all others, takes the
          mean in fp32 and gives it to all. What rounding loses is owed, and added to the next gradients.
powersgd  torch's hook, rank 4, after 10 plain steps. What the low rank loses is owed, too.

A number that is not finite makes its block (int8) or matrix (powersgd) not finite on all ranks. Nothing of it is owed.

On a GPU all happens in the order of NCCL's streams. On the CPU one thread calls the collectives that follow others, in
the order of the buckets, on a process group of its own (`_Lane`). On DDP's group they would race with those of DDP
(SIGABRT in Gloo); torch's callbacks would call them in another order on each rank.

Standard library and torch only: it is loaded by path into scripts that know nothing of allranks, too.
"""

from __future__ import annotations

import atexit
import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

FORMATS = ("bf16", "int8", "powersgd")
BLOCK = 256
"""Numbers that share a scale, which makes their bytes 1.6 % more."""
SCALE_BYTES = 4
POWERSGD_RANK = 4
POWERSGD_PLAIN_STEPS = 10
"""Summed as they are: the first gradients change most. torch needs at least 2, since it rebuilds buckets after 1."""
CLOSE_S = 1.0
"""How long `close` waits for the thread: it may hang in a collective whose other ranks are gone."""
_Begin = Callable[[Any], Future[Any]]
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


def preferred_bucket_mb(wire_format: str) -> float | None:
    """Return the MiB of DDP's buckets in this format, three small collectives each; None: what fits the network."""
    return 25.0 if wire_format == "powersgd" else None


def attach(ddp: DistributedDataParallel, wire_format: str) -> Compressor:
    """Have the gradients of this module cross the network in a format; all ranks call it together.

    With one rank nothing crosses, and nothing is changed.

    Raises:
        ValueError: there is no such format, or this module cannot have it; in one line.
    """
    if wire_format not in FORMATS:
        raise ValueError(f"compress={wire_format!r}: expected {', '.join(map(repr, FORMATS[:-1]))} or {FORMATS[-1]!r}")
    device = next(own.device for own in ddp.module.parameters() if own.requires_grad)
    backend: Any = ddp.process_group._get_backend(device)
    embeddings = torch.nn.Embedding | torch.nn.EmbeddingBag
    sparse = [name for name, module in ddp.module.named_modules() if isinstance(module, embeddings) and module.sparse]
    for is_so, why in (
        (sparse, f"gradients of {' '.join(sparse) or 'the module'} are sparse, only dense ones can be compressed"),
        (ddp._comm_hooks, "this DistributedDataParallel has a communication hook already, and takes only one"),
        (getattr(ddp, "_use_python_reducer", False), "torch.compile's optimize_ddp='python_reducer' has no buckets"),
        (backend.name() == "gloo" and device.type != "cpu", "gradients on a GPU need a process group of nccl"),
        (wire_format == "powersgd" and find_spec("numpy") is None, "torch's PowerSGD needs NumPy"),
    ):
        if is_so:
            raise ValueError(f"compress={wire_format!r}: {why}")
    has_lane = device.type == "cpu" and ddp.process_group.size() > 1
    compressor = Compressor(ddp, wire_format, backend, has_lane=has_lane)
    if compressor.world_size > 1:
        # DDP refuses wrong annotations, and on Gloo torch's own hook for bf16, by its name.
        hook = lambda _, bucket: compressor.reduce(bucket)  # noqa: E731
        hook.__qualname__ = f"allranks_{wire_format}"  # which DDP logs
        ddp.register_comm_hook(None, hook)
    return compressor


class Compressor:
    """What one DDP module sends, and what this rank still owes to the sums."""

    def __init__(self, ddp: DistributedDataParallel, wire_format: str, backend: Any, *, has_lane: bool) -> None:
        group: Any = ddp.process_group
        self.format, self.world_size = wire_format, int(group.size())
        self._lane = _Lane.beside(group, backend) if has_lane and wire_format != "bf16" else None
        for held in (group, self._lane and self._lane.group):  # never freed: see join/leave.py, _keep_groups
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        self._owed = _Owed({id(own): name for name, own in ddp.module.named_parameters()})
        formats: Mapping[str, type[_Format]] = {"bf16": _Format, "int8": _Int8, "powersgd": _PowerSGD}
        self._rule = formats[wire_format](group, self._lane, self._owed)
        self._ddp, self._unnumbered = weakref.proxy(ddp), list[Any]()  # the reducer, in C++, has this one
        self.look_at_buckets()

    def look_at_buckets(self) -> None:
        """Learn which buckets the first step has: in a static graph torch says of each that it is the first one.

        It holds a lock while it calls the hook, so this is asked before, and again where buckets are made again.
        """
        self._unnumbered = list(self._ddp.reducer._get_zeros_like_grad_buckets()) if self._ddp.static_graph else []

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to bring the mean over all ranks into a bucket; what DDP calls."""
        return self._rule.reduce(_Bucket(self._unnumbered.pop(0) if self._unnumbered else bucket, bucket.buffer()))

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank still owes to the sums, between two steps; empty in bf16. Each rank has its own."""
        if self.format == "bf16":
            return {}
        return {"format": self.format, "world_size": self.world_size, "owed": self._owed.state()} | self._rule.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go on from what `state_dict` returned; where that cannot be, owe nothing, and return why in a line."""
        was, size = state.get("format"), state.get("world_size")
        if self.format == "bf16" or (was, size) == (self.format, self.world_size):
            self._owed.load(state.get("owed", {}))
            self._rule.load(state)
            return None
        self._owed.load({})
        why = f"{size} ranks wrote it, {self.world_size} go on"
        if was != self.format:
            why = f"the checkpoint has that of {was}" if was else "the checkpoint has none"
        return f"error feedback of {self.format} starts at 0: {why}"

    def close(self) -> None:
        """End the thread, if no other module uses it."""
        if self._lane is not None:
            self._lane.leave()
            self._lane = None


class _Bucket:
    """Gradients that are reduced together, as torch's hooks ask for them; complex ones count as pairs of real ones."""

    def __init__(self, bucket: dist.GradBucket, whole: Tensor) -> None:
        self.whole = whole  # where DDP takes the mean from
        self.values = self.real = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole
        self.parameters: Sequence[Tensor] = bucket.parameters()
        self.index, self.is_last = bucket.index, bucket.is_last

    def buffer(self) -> Tensor:
        return self.values

    def gradients(self) -> list[Tensor]:
        parts = zip(self.parameters, self.values.split(self.sizes()), strict=True)
        return [part.view(own.shape[0] if own.dim() else 1, -1) for own, part in parts if part.numel()]

    def sizes(self) -> list[int]:
        return [own.numel() * (1 + own.is_complex()) for own in self.parameters]


class _Owed:
    """What could not be sent yet ("error feedback"), one flat tensor a bucket.

    A plain DDP rebuilds its buckets after the first step, so what is owed belongs to parameters.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names  # by the parameter's identity
        self.flat: dict[int, Tensor] = {}  # by the bucket's index, as the next one
        self._layouts: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # identities and sizes of its parameters
        self._waiting: dict[str, Tensor] = {}  # by name: what was loaded, or was in another bucket before

    def names(self, index: int) -> tuple[str, ...]:
        return tuple(self._names.get(key, "") for key in self._layouts[index][0])

    def lay_out(self, bucket: _Bucket, length: int, dtype: torch.dtype) -> bool:
        """Make the flat tensor of a bucket that is new or has other parameters than before; return whether it is."""
        layout, own = tuple(map(id, bucket.parameters)), bucket.index()
        if own in self._layouts and self._layouts[own][0] == layout:
            return False
        for index, (other, _) in list(self._layouts.items()):
            if index == own or not set(other).isdisjoint(layout):
                self._waiting |= self._split(index)
                self.drop(index)
        self.flat[own] = torch.zeros(length, dtype=dtype, device=bucket.whole.device)
        self._layouts[own] = layout, bucket.sizes()
        for name, part in self._split(own).items():
            kept = self._waiting.pop(name, None)
            if kept is not None and kept.numel() == part.numel():
                part.copy_(kept)
        return True

    def drop(self, index: int) -> None:
        self.flat.pop(index, None)
        self._layouts.pop(index, None)

    def state(self) -> dict[str, Tensor]:
        state = dict(self._waiting)
        for index in self._layouts:
            state |= self._split(index)
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.flat.clear()
        self._layouts.clear()
        self._waiting = dict(state)

    def _split(self, index: int) -> dict[str, Tensor]:
        sizes = self._layouts[index][1]
        return dict(zip(self.names(index), self.flat[index][: sum(sizes)].split(sizes), strict=True))


class _Lane:
    """One thread that calls collectives, bucket after bucket, on a process group of its own.

    All modules of a process group share it: their buckets come in the same order on all ranks.
    """

    _all: ClassVar[list[_Lane]] = []

    def __init__(self, group: Any, backend: Any) -> None:
        self._beside, self._num_users = group, 0
        ranks = dist.get_process_group_ranks(group)
        self.group: Any = dist.new_group(
            ranks,
            timeout=getattr(getattr(backend, "options", None), "_timeout", None),
            backend=backend.name(),
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        self._jobs: queue.SimpleQueue[tuple[_Begin, Callable[[Future[Any]], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @classmethod
    def beside(cls, group: Any, backend: Any) -> _Lane:
        """Return the lane of a process group; all its ranks call this together."""
        lane = next((lane for lane in cls._all if lane._beside == group), None)
        if lane is None:
            cls._all.append(lane := cls(group, backend))
        lane._num_users += 1
        return lane

    def run(self, begin: _Begin, end: Callable[[Future[Any]], Tensor]) -> Future[Tensor]:
        """Have the thread call collectives after all those that it was told of before.

        Args:
            begin: calls them on this group.
            end: makes the result of what comes of that. Errors of both come out where DDP waits for the result.
        """
        done: Future[Any] = Future()

        def finish(begun: Future[Any]) -> None:
            try:
                done.set_result(end(begun))
            except Exception as exc:
                done.set_result(exc)  # set_exception would come out as "Unable to cast ... to Tensor"

        def take(_: Future[Any]) -> Tensor:
            if isinstance(result := done.value(), Exception):
                raise result
            return result

        self._jobs.put((begin, finish))
        if self._thread is None:  # not before: a thread computes with as many cores as were set when it began
            self._thread = threading.Thread(target=self._work, name="allranks-compress", daemon=True)
            self._thread.start()
            atexit.register(self._end)
        return done.then(take)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            begin, finish = job
            try:
                begun = begin(self.group)
            except Exception as exc:
                begun = Future()
                begun.set_exception(exc)
            begun.add_done_callback(finish)

    def leave(self) -> None:
        """End the thread with its last user."""
        self._num_users -= 1
        if not self._num_users:
            self._all.remove(self)
            self._end()

    def _end(self) -> None:
        atexit.unregister(self._end)  # there, too, since a thread that the interpreter ends inside C++ would abort it
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)


class _Format:
    """How buckets are reduced: as bf16, or as a subclass does it."""

    def __init__(self, group: Any, lane: _Lane | None, owed: _Owed) -> None:
        self._group, self._lane, self._owed = group, lane, owed

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        """Begin to bring the mean over all ranks into the bucket's memory."""
        hook: Any = bf16_compress_hook if bucket.values.element_size() > 2 else allreduce_hook
        reduced: Future[Any] = hook(self._group, bucket)
        return reduced.then(lambda done: (done.value(), bucket.whole)[1]) if bucket.whole.is_complex() else reduced

    def state(self) -> dict[str, Any]:  # what goes into a checkpoint beside what is owed
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


class _Int8(_Format):
    """Codes of -127 to 127, with a scale for each block of them.

    What rounding the mean loses belongs to the slice's owner: added `ranks` times to what it owes, it counts once.
    """

    def __init__(self, group: Any, lane: _Lane | None, owed: _Owed) -> None:
        super().__init__(group, lane, owed)
        self._rank, self._ranks = group.rank(), group.size()
        self._wires: dict[int, tuple[Tensor, Tensor]] = {}  # by bucket: sent and received, uint8, a row for each rank

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        blocks = -(-bucket.values.numel() // (self._ranks * BLOCK))
        if self._owed.lay_out(bucket, self._ranks * blocks * BLOCK, torch.float32):
            wires = torch.empty(2, self._ranks, blocks * (BLOCK + SCALE_BYTES), dtype=torch.uint8)
            self._wires[bucket.index()] = tuple(wires.to(bucket.whole.device))
        (sent, received), owed = self._wires[bucket.index()], self._owed.flat[bucket.index()]
        owed[: bucket.values.numel()] += bucket.values
        slices = owed.view(self._ranks, blocks, BLOCK)
        encode(slices, sent)
        arriving: Any = dist.all_to_all_single(received, sent, group=self._group, async_op=True)

        def average(group: Any) -> Future[Any]:
            arriving.wait()
            mean, own = decode(received).mean(0), received[self._rank]
            encode(mean, own)
            slices[self._rank].add_(mean, alpha=self._ranks)
            return _all_gather(sent.view(-1), own, group=group, async_op=True).get_future()

        def write(gathered: Future[Any]) -> Tensor:
            gathered.wait()  # raises what went wrong
            bucket.values.copy_(decode(sent).view(-1)[: bucket.values.numel()])
            return bucket.whole

        if self._lane is None:
            return arriving.get_future().then(lambda _: write(average(self._group)))
        return self._lane.run(average, write)


class _PowerSGD(_Format):
    """torch's hook, in fp32 at least."""

    def __init__(self, group: Any, lane: _Lane | None, owed: _Owed) -> None:
        super().__init__(group, lane, owed)
        self._state = PowerSGDState(lane.group if lane else group, POWERSGD_RANK, POWERSGD_PLAIN_STEPS)
        self._state.error_dict = owed.flat
        self._p, self._q = self._state.p_memory_dict, self._state.q_memory_dict
        self._loaded: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}  # P and Q by names of a bucket's parameters

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        begin, end = partial(self._begin, bucket), partial(self._end, bucket)
        return self._lane.run(begin, end) if self._lane else begin(self._group).then(end)

    def _begin(self, bucket: _Bucket, _: Any) -> Future[Any]:
        if bucket.values.element_size() == 2:
            bucket.values = bucket.values.float()
        state, index, values = self._state, bucket.index(), bucket.values
        if state.iter >= state.start_powerSGD_iter and self._owed.lay_out(bucket, values.numel(), values.dtype):
            self._p.pop(index, None)
            self._q.pop(index, None)
            if factors := self._loaded.pop(self._owed.names(index), None):
                self._p[index], self._q[index] = (own.to(values.device) for own in factors)
        begun: Future[Any] = powerSGD_hook(state, bucket)
        if self._lane is not None:
            begun.wait()  # torch's callbacks call collectives, which must come before those of the next bucket
        return begun

    def _end(self, bucket: _Bucket, begun: Future[Any]) -> Tensor:
        values = begun.value()
        if not values.sum().isfinite():  # on all ranks alike
            self._owed.drop(bucket.index())
        if bucket.values is not bucket.real:
            bucket.real.copy_(values)
        return bucket.whole

    def state(self) -> dict[str, Any]:
        factors = {self._owed.names(index): (self._p[index], self._q[index]) for index in self._owed.flat}
        return {"iter": self._state.iter, "rng": self._state.rng.get_state(), "factors": self._loaded | factors}

    def load(self, state: Mapping[str, Any]) -> None:
        self._state.iter, self._loaded = state["iter"], dict(state["factors"])
        self._state.rng.set_state(state["rng"])
        self._p.clear()
        self._q.clear()


def encode(blocks: Tensor, wire: Tensor) -> None:
    """Write numbers, fp32 (..., blocks, BLOCK), as uint8 (..., bytes), and leave in their place what rounding loses."""
    codes, scales = _parts(wire)
    # The scale of a block with an inf or nan is none, and so the whole block comes out as inf and nan.
    torch.div(blocks.abs().amax(-1, keepdim=True), 127, out=scales).clamp_min_(torch.finfo(torch.float32).tiny)
    rounded = (blocks / scales).round_()
    codes.copy_(rounded)
    blocks.addcmul_(rounded, scales, value=-1).nan_to_num_(0.0, 0.0, 0.0)


def decode(wire: Tensor) -> Tensor:
    """Return the numbers, fp32 (..., blocks, BLOCK)."""
    codes, scales = _parts(wire)
    return codes.float().mul_(scales)


def _parts(wire: Tensor) -> tuple[Tensor, Tensor]:
    blocks = wire.shape[-1] // (BLOCK + SCALE_BYTES)
    codes, scales = wire.split((blocks * BLOCK, blocks * SCALE_BYTES), -1)
    return codes.view(torch.int8).unflatten(-1, (blocks, BLOCK)), scales.view(torch.float32).unsqueeze(-1)

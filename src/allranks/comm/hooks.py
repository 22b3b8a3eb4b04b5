"""How do gradients cross the network in fewer bytes? Communication hooks for torch's DistributedDataParallel.

    compressor = attach(ddp, "int8")             # before the first backward pass, on all ranks
    ...
    state = compressor.state_dict()              # what this rank still owes to the sum
    why = compressor.load_state_dict(state)      # None, or a line that says why it was dropped

bf16      torch's hook: gradients are summed as bfloat16. Gradients of 2 bytes cross as they are. No state.
int8      blocks of 256 numbers, each with a scale in fp32: every rank gets its slice of the bucket from all others,
          adds the slices up in fp32, and gives the mean to all. What rounding loses is added to the next gradients.
powersgd  torch's hook, rank 4, after 10 plain steps; what the low rank loses is added to the next gradients.

A number that is not finite makes its block (int8) or its matrix (powersgd) not finite on all ranks, and what is kept of
that block or bucket begins at zero again.

On a GPU all happens in the order of NCCL's streams. On the CPU, collectives that follow other collectives are called by
one thread, bucket after bucket, on a process group of its own (`_Lane`): on DDP's group they would race with DDP's own
ones (SIGABRT in Gloo), and torch's callbacks would call them in another order on each rank.

Uses the standard library and torch only: it is loaded by path into scripts that know nothing of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
"""Numbers that share a scale: 1.6 % more bytes than none."""
SCALE_BYTES = 4
POWERSGD_RANK = 4
POWERSGD_PLAIN_STEPS = 10
"""Summed as they are: the first gradients change most. torch needs at least 2, since it rebuilds buckets after 1."""
CLOSE_S = 5.0
"""How long `close` waits for the thread: it may hang in a collective whose other ranks are gone."""
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_BUCKET_MB = {"int8": 4.0, "powersgd": 25.0}


def preferred_bucket_mb(wire_format: str) -> float | None:
    """Size of DDP's buckets for this format; None: as without compression.

    A bucket takes two collectives in int8 and three in PowerSGD, so many small ones cost more than they hide.
    """
    return _BUCKET_MB.get(wire_format)


def attach(ddp: DistributedDataParallel, wire_format: str) -> Compressor:
    """Have the gradients of this module cross the network in a format; all ranks call it together.

    With one rank nothing crosses, and nothing is done.

    Raises:
        ValueError: there is no such format, or it cannot be had for this module; in one line.
    """
    if wire_format not in FORMATS:
        names = f"{', '.join(map(repr, FORMATS[:-1]))} or {FORMATS[-1]!r}"
        raise ValueError(f"compress={wire_format!r}: expected {names}")
    if why := _obstacle(ddp):
        raise ValueError(f"compress={wire_format!r}: {why}")
    compressor = Compressor(ddp, wire_format)
    if compressor.world_size > 1:
        # A function without annotations, and of a name that DDP does not know: it refuses torch's for bf16 on Gloo.
        hook = lambda _, bucket: compressor.reduce(bucket)  # noqa: E731
        hook.__qualname__ = f"allranks_{wire_format}"
        ddp.register_comm_hook(None, hook)
    return compressor


def _obstacle(ddp: DistributedDataParallel) -> str:
    embeddings = torch.nn.Embedding | torch.nn.EmbeddingBag
    sparse = [name for name, module in ddp.module.named_modules() if isinstance(module, embeddings) and module.sparse]
    if sparse:
        return f"the gradients of {sparse[0]} are sparse (sparse=True), and only dense ones can be compressed"
    if ddp._comm_hooks:
        return "this DistributedDataParallel has a communication hook already, and takes only one"
    device = _device_of(ddp)
    if device.type != "cpu" and _backend_of(ddp.process_group, device).name() == "gloo":
        return f"the gradients are on {device.type} and the process group is Gloo's: use the nccl backend"
    return ""


def _device_of(ddp: DistributedDataParallel) -> torch.device:
    return next(own.device for own in ddp.module.parameters() if own.requires_grad)


def _backend_of(group: Any, device: torch.device) -> Any:
    return group._get_backend(device)


class Compressor:
    """What one DDP module sends, and what this rank still owes to the sum."""

    def __init__(self, ddp: DistributedDataParallel, wire_format: str) -> None:
        group: Any = ddp.process_group
        self.format = wire_format
        self.world_size: int = group.size()
        device = _device_of(ddp)
        is_threaded = self.world_size > 1 and device.type == "cpu" and wire_format != "bf16"
        self._lane = _Lane.beside(group, device) if is_threaded else None
        self._owed = _Owed({id(own): name for name, own in ddp.module.named_parameters()})
        formats: dict[str, type[_Format]] = {"bf16": _Bf16, "int8": _Int8, "powersgd": _PowerSGD}
        self._reducer = formats[wire_format](group, self._lane, self._owed)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to bring a bucket's mean over all ranks into its buffer; what DDP calls."""
        return self._reducer.reduce(_Bucket(bucket))

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank still owes to the sum; between two steps. Each rank has its own."""
        return {
            "format": self.format,
            "world_size": self.world_size,
            "owed": self._owed.state(),
            **self._reducer.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go on from what `state_dict` returned; where that cannot be, begin at zero, and return why in a line."""
        was, size = state.get("format"), state.get("world_size")
        if was != self.format or size != self.world_size:
            why = f"the checkpoint has {was}'s" if was != self.format else f"{size} ranks wrote it"
            return f"error feedback of {self.format} starts at 0: {why}, {self.world_size} go on"
        self._owed.load(state["owed"])
        self._reducer.load(state)
        return None

    def close(self) -> None:
        """End the thread, where no other module uses it."""
        if self._lane is not None:
            self._lane.leave()
            self._lane = None


class _Bucket:
    """Gradients that are reduced together, as torch's hooks ask for them; complex ones count as pairs of real ones."""

    def __init__(self, bucket: dist.GradBucket) -> None:
        self.whole: Tensor = bucket.buffer()
        """Where DDP takes the mean from."""
        self.values = torch.view_as_real(self.whole).view(-1) if self.whole.is_complex() else self.whole
        """The same numbers, real and flat."""
        self.parameters: Sequence[Tensor] = bucket.parameters()
        self.layout = tuple(map(id, self.parameters))
        self._index: int = bucket.index()
        self._is_last: bool = bucket.is_last()

    def index(self) -> int:
        """Its number."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other one comes in this step."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return its values."""
        return self.values

    def gradients(self) -> list[Tensor]:
        """Return its values as matrices, one for each parameter."""
        parts = zip(self.parameters, self.values.split(self.sizes()), strict=True)
        return [part.view(own.shape[0] if own.dim() else 1, -1) for own, part in parts if part.numel()]

    def sizes(self) -> list[int]:
        """Return how many values each parameter has."""
        return [own.numel() * (1 + own.is_complex()) for own in self.parameters]


class _Owed:
    """What could not be sent yet ("error feedback"), one flat tensor a bucket.

    A plain DDP rebuilds its buckets after the first step, so what is kept belongs to parameters.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.flat: dict[int, Tensor] = {}
        """By the bucket's index."""
        self._names = names
        """By the parameter's identity."""
        self._layouts: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        """By the bucket's index: identities and sizes of its parameters."""
        self._waiting: dict[str, Tensor] = {}
        """By the parameter's name: what was loaded, or was in another bucket before."""

    def has(self, bucket: _Bucket) -> bool:
        """Whether the bucket has the parameters that it had before."""
        return bucket.index() in self._layouts and self._layouts[bucket.index()][0] == bucket.layout

    def names(self, index: int) -> list[str]:
        """Names of a bucket's parameters, in its order."""
        return [self._names.get(key, "") for key in self._layouts[index][0]]

    def lay_out(self, bucket: _Bucket, length: int, dtype: torch.dtype) -> None:
        """Make the flat tensor of a bucket that is new, or has other parameters than before."""
        for index, (layout, _) in list(self._layouts.items()):
            if index == bucket.index() or not set(layout).isdisjoint(bucket.layout):
                self._waiting |= self._split(index)
                self.drop(index)
        sizes = bucket.sizes()
        flat = torch.zeros(length, dtype=dtype, device=bucket.whole.device)
        self.flat[bucket.index()], self._layouts[bucket.index()] = flat, (bucket.layout, sizes)
        for name, part in self._split(bucket.index()).items():
            kept = self._waiting.pop(name, None)
            if kept is not None and kept.numel() == part.numel():
                part.copy_(kept)

    def drop(self, index: int) -> None:
        """Begin this bucket at zero."""
        self.flat.pop(index, None)
        self._layouts.pop(index, None)

    def state(self) -> dict[str, Tensor]:
        """By the parameter's name."""
        state = dict(self._waiting)
        for index in self._layouts:
            state |= self._split(index)
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take this in the place of all that is kept."""
        self.flat.clear()
        self._layouts.clear()
        self._waiting = dict(state)

    def _split(self, index: int) -> dict[str, Tensor]:
        sizes = self._layouts[index][1]
        parts = self.flat[index][: sum(sizes)].split(sizes)
        return dict(zip(self.names(index), parts, strict=True))


class _Lane:
    """One thread that calls collectives, bucket after bucket, on a process group of its own.

    All modules of a process group share it: their buckets come in the same order on all ranks.
    """

    _all: ClassVar[list[_Lane]] = []

    def __init__(self, group: Any, device: torch.device) -> None:
        self._beside = group
        backend, ranks = _backend_of(group, device), dist.get_process_group_ranks(group)
        self.group: Any = dist.new_group(
            ranks,
            timeout=getattr(getattr(backend, "options", None), "_timeout", None),
            backend=backend.name(),
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        self._num_users = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @classmethod
    def beside(cls, group: Any, device: torch.device) -> _Lane:
        """Return the lane of a process group; all its ranks call this together."""
        lane = next((lane for lane in cls._all if lane._beside == group), None)
        if lane is None:
            cls._all.append(lane := cls(group, device))
        lane._num_users += 1
        return lane

    def run(self, begin: Callable[[Any], Future[Any]], end: Callable[[Future[Any]], Tensor]) -> Future[Tensor]:
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

        def work() -> None:
            try:
                begin(self.group).add_done_callback(finish)
            except Exception as exc:
                done.set_result(exc)

        self._jobs.put(work)
        if self._thread is None:  # not before: a thread computes with as many cores as were set when it began
            self._thread = threading.Thread(target=self._work, name="allranks-compress", daemon=True)
            self._thread.start()
        return done.then(_value_of)

    def _work(self) -> None:
        while (work := self._jobs.get()) is not None:
            work()

    def leave(self) -> None:
        """End the thread with its last user."""
        self._num_users -= 1
        if self._num_users:
            return
        self._all.remove(self)
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)


def _value_of(done: Future[Any]) -> Any:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    return value


class _Format:
    """How a bucket is reduced."""

    def __init__(self, group: Any, lane: _Lane | None, owed: _Owed) -> None:
        self._group, self._lane, self._owed = group, lane, owed

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        """Begin to bring the mean into the bucket's memory."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what goes into a checkpoint beside what is owed."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""


class _Bf16(_Format):
    """torch's hook."""

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        hook: Any = bf16_compress_hook if bucket.values.element_size() > 2 else allreduce_hook
        reduced: Future[Any] = hook(self._group, bucket)
        return reduced.then(lambda done: (done.value(), bucket.whole)[1]) if bucket.whole.is_complex() else reduced


class _Int8(_Format):
    """Codes of -127 to 127, with a scale for each block of them.

    What rounding the mean loses belongs to the slice's owner: added `ranks` times to what it owes, it counts once.
    """

    def __init__(self, group: Any, lane: _Lane | None, owed: _Owed) -> None:
        super().__init__(group, lane, owed)
        self._rank, self._ranks = group.rank(), group.size()
        self._wires: dict[int, tuple[Tensor, Tensor]] = {}
        """By the bucket's index: what is sent and what is received, uint8, a row for each rank."""

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        blocks = -(-bucket.values.numel() // (self._ranks * BLOCK))
        if not self._owed.has(bucket):
            self._owed.lay_out(bucket, self._ranks * blocks * BLOCK, torch.float32)
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
            gathering: Any = _all_gather(sent.view(-1), own, group=group, async_op=True)
            future: Future[Any] = gathering.get_future()
            return future

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
        self._state = PowerSGDState(
            lane.group if lane else group,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_PLAIN_STEPS,
        )
        self._state.error_dict = owed.flat
        self._loaded: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        """By names of a bucket's parameters: P and Q of a checkpoint, until the bucket comes."""

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        if self._lane is None:
            return self._begin(bucket).then(partial(self._end, bucket))

        def begin(group: Any) -> Future[Any]:
            begun = self._begin(bucket)
            begun.wait()  # torch's callbacks call collectives, which must not mix with the next bucket's
            return begun

        return self._lane.run(begin, partial(self._end, bucket))

    def _begin(self, bucket: _Bucket) -> Future[Any]:
        if bucket.values.element_size() == 2:
            bucket.values = bucket.values.float()
        state, index = self._state, bucket.index()
        if state.iter >= state.start_powerSGD_iter and not self._owed.has(bucket):
            self._owed.lay_out(bucket, bucket.values.numel(), bucket.values.dtype)
            self._drop_factors(index)
            if factors := self._loaded.pop(tuple(self._owed.names(index)), None):
                state.p_memory_dict[index], state.q_memory_dict[index] = (
                    own.to(bucket.whole.device) for own in factors
                )
        begun: Future[Any] = powerSGD_hook(state, bucket)
        return begun

    def _end(self, bucket: _Bucket, begun: Future[Any]) -> Tensor:
        values = begun.value()
        if not values.sum().isfinite():  # on all ranks alike
            self._owed.drop(bucket.index())
            self._drop_factors(bucket.index())
        if bucket.whole.element_size() == 2:
            bucket.whole.copy_(values)
        return bucket.whole

    def _drop_factors(self, index: int) -> None:
        self._state.p_memory_dict.pop(index, None)
        self._state.q_memory_dict.pop(index, None)

    def state(self) -> dict[str, Any]:
        state = self._state
        factors = dict(self._loaded)
        for index, p in state.p_memory_dict.items():
            factors[tuple(self._owed.names(index))] = p, state.q_memory_dict[index]
        return {"iter": state.iter, "rng": state.rng.get_state(), "factors": factors}

    def load(self, state: Mapping[str, Any]) -> None:
        self._state.iter = state["iter"]
        self._state.rng.set_state(state["rng"])
        self._state.p_memory_dict.clear()
        self._state.q_memory_dict.clear()
        self._loaded = dict(state["factors"])


def encode(blocks: Tensor, wire: Tensor) -> None:
    """Write numbers as int8 with a scale for each block, and leave in their place what rounding has lost.

    Args:
        blocks: fp32, shape (..., blocks, BLOCK).
        wire: uint8, shape (..., blocks * (BLOCK + SCALE_BYTES)).
    """
    codes, scales = _parts(wire)
    # The scale of a block with an inf or nan is none, and so the whole block comes out as inf and nan.
    torch.div(blocks.abs().amax(-1, keepdim=True), 127, out=scales).clamp_min_(torch.finfo(torch.float32).tiny)
    rounded = (blocks / scales).round_()
    codes.copy_(rounded)
    blocks.addcmul_(rounded, scales, value=-1).nan_to_num_(0.0, 0.0, 0.0)


def decode(wire: Tensor) -> Tensor:
    """Return the numbers, fp32, shape (..., blocks, BLOCK)."""
    codes, scales = _parts(wire)
    return codes.float().mul_(scales)


def _parts(wire: Tensor) -> tuple[Tensor, Tensor]:
    blocks = wire.shape[-1] // (BLOCK + SCALE_BYTES)
    codes, scales = wire.split((blocks * BLOCK, blocks * SCALE_BYTES), -1)
    return codes.view(torch.int8).unflatten(-1, (blocks, BLOCK)), scales.view(torch.float32).unsqueeze(-1)

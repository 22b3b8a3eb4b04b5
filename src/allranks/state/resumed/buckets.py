"""How do gradients sum in the same order after a restart? DistributedDataParallel whose buckets never change.

torch's DDP begins with one bucket for all parameters and rebuilds the buckets after the first backward pass, in the
order in which gradients came. Gloo's ring adds in an order that depends on the place in the buffer, so at three ranks
and more the first step after every start differs in the last bits from what an uninterrupted run computed there:
measured on torch 2.13, three ranks, Adam, five steps, resumed. `find_unused_parameters=True` leaves the rebuild out,
and costs a walk through the graph and a collective a step (17.6 ms for 12.4 ms). Here the rebuild is done before the
first step, for gradients that come last parameter first: the same bits, and no cost. A torch without the methods that
this takes pays the price, but for a static graph, whose buckets it rebuilds all the same.

How large the buckets are fixes the sums, too. So a checkpoint holds the size of each DDP of the session, and where
another one was chosen before it was read, the buckets are made again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allranks.model.errors import UsageError
from allranks.model.membership import ALONE, Membership
from allranks.report.text import say

CAN_PIN = hasattr(DistributedDataParallel, "_build_params_for_reducer") and all(
    hasattr(dist.Reducer, name) for name in ("_push_all_rebuilt_params", "_rebuild_buckets")
)
"""Whether this torch has what is not public and taken here: 2.13 does."""
CAN_RESIZE = CAN_PIN and all(
    hasattr(DistributedDataParallel, name) for name in ("_ddp_init_helper", "_build_debug_param_to_name_mapping")
)
CHOSEN = frozenset({"bucket_cap_mb", "bucket_cap_mb_list", "device_mesh", "mixed_precision", "process_group"})
"""Arguments of DDP with which the size stays as it is: the caller's, or torch's."""
MOST_MB = 4096
TORCH_MB = 25
"""Torch's own `bucket_cap_mb`, which makes a first bucket of 1 MiB."""


def asked_size(env: Mapping[str, str]) -> float | None:
    """Return the MiB of a bucket that `allranks run --bucket-mb` asked for; None: it fits the network.

    Raises:
        UsageError: somebody else set the variable.
    """
    told = env.get("ALLRANKS_BUCKET_MB") or "auto"
    try:
        mb = None if told == "auto" else float(told)
    except ValueError:
        mb = 0.0
    if mb is not None and not 0 < mb <= MOST_MB:
        raise UsageError(f"ALLRANKS_BUCKET_MB is {told!r}: expected auto, or MiB from 1 to {MOST_MB}, for example 4")
    return mb


class SavedCompressor(Protocol):
    """What a communication hook has to do with checkpoints; see comm.hooks."""

    format: str

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank still owes to the sums."""

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Owe that, or nothing, and return why."""

    def look_at_buckets(self) -> None:
        """Learn which buckets there are now."""

    def close(self) -> None:
        """End what runs beside this thread."""


class PinnedBuckets(DistributedDataParallel):  # type: ignore[misc]
    """torch's DDP, with the buckets of every step made in advance. Takes DDP's arguments."""

    compressor: SavedCompressor | None = None
    """What its gradients cross the network as, if not as they are."""

    def __init__(self, module: torch.nn.Module, **arguments: Any) -> None:
        if not CAN_PIN and not arguments.get("static_graph"):
            arguments["find_unused_parameters"] = True
        super().__init__(module, **arguments)
        self._pin()

    def resize(self, mb: float | None) -> None:
        """Make the buckets again, between two steps; all ranks call it together.

        Args:
            mb: as `bucket_cap_mb` of DDP; None: torch's sizes.
        """
        self.bucket_bytes_cap, self.bucket_bytes_cap_default = int((mb or TORCH_MB) * (1 << 20)), mb is None
        if config := getattr(self, "_bucket_config", None):  # torch 2.13
            self._bucket_config = type(config).create(mb, None, self._use_python_reducer)
        parameters, is_sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, is_sparse, names, self.static_graph)
        if self.static_graph:
            self.reducer._set_static_graph()
            self.logger._set_static_graph()
        for hook, state in self._comm_hooks:
            self.logger._set_comm_hook_name(hook.__qualname__)
            dist._register_comm_hook(self.reducer, state, hook)
        self._pin()
        if self.compressor is not None:
            self.compressor.look_at_buckets()

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        state.pop("compressor", None)  # a copy of this module has a reducer without a hook
        return state

    def _pin(self) -> None:
        if CAN_PIN and (self.static_graph or not self.find_unused_parameters):  # else torch never rebuilds them
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> Any:
        # The rebuild takes parameters in the order of this list: the last ones first, as backward passes have it.
        parameters, is_sparse = super()._build_params_for_reducer()
        return (parameters, is_sparse) if self.find_unused_parameters else (parameters[::-1], is_sparse[::-1])


class Wrapped:
    """The modules that a session has wrapped, in their order, and how large their buckets are.

    Args:
        membership: of the session.
        device: of this rank; where the group has Gloo, it takes tensors on the CPU.
    """

    def __init__(self, membership: Membership = ALONE, device: torch.device | None = None) -> None:
        self._own = membership
        has_gloo = any(group.backend == "gloo" for group in membership.groups)
        self._device = torch.device("cpu") if has_gloo else device
        self._sizes: list[float | None] = []
        self._open: dict[int, weakref.ref[PinnedBuckets]] = {}
        """Those of which nobody has said the size, by number."""
        self._compressors: weakref.WeakSet[SavedCompressor] = weakref.WeakSet()
        """Of modules that are still there: each holds as many bytes as its gradients have."""

    def wrap(
        self,
        module: torch.nn.Module,
        arguments: Mapping[str, Any],
        choose: Callable[[Sequence[int]], tuple[float | None, str]],
        *,
        attach: Callable[[PinnedBuckets], SavedCompressor | None] | None = None,
    ) -> PinnedBuckets:
        """Return the module in DDP, with buckets of the size that rank 0 chooses where the caller does not.

        Args:
            arguments: of DDP.
            choose: returns size and reason, from the bytes of the gradients in the order in which they come.
            attach: registers a communication hook; None: DDP's own all-reduce.
        """
        number, mb = len(self._sizes), arguments.get("bucket_cap_mb")
        is_open = CAN_RESIZE and not CHOSEN & arguments.keys()
        if is_open:
            own = [
                parameter.numel() * parameter.element_size()
                for parameter in module.parameters()
                if parameter.requires_grad
            ]
            chosen, reason = choose(own[::-1])
            mb = self._of_leader(chosen)
            arguments = arguments if mb is None else {**arguments, "bucket_cap_mb": mb}
            if self._own.is_leader and mb is not None:
                say(f"DDP sends gradients in buckets of {mb:g} MiB: {reason}")
        made = PinnedBuckets(module, **arguments)
        if attach is not None:
            try:
                made.compressor = attach(made)
            except ValueError as exc:
                raise UsageError(f"s.ddp(): {exc}") from exc
        if made.compressor is not None:
            self._compressors.add(made.compressor)
        self._sizes.append(mb)
        if is_open:
            self._open[number] = weakref.ref(made)
        return made

    def _of_leader(self, mb: float | None) -> float | None:
        """Return rank 0's size: a collective, so that a rank that does not come is named as in any other."""
        if self._own.world_size == 1:
            return mb
        word = torch.tensor([mb or 0.0], dtype=torch.float64, device=self._device)
        dist.broadcast(word, 0)
        return word.item() or None

    def state(self) -> list[float | None]:
        """Return the size of each, for a checkpoint."""
        return list(self._sizes)

    def keep(self, kept: Sequence[float | None] | None) -> None:
        """Give each the size that it has in a checkpoint, unless the caller has said it; all ranks call it together.

        Args:
            kept: what `state` returned; None: a checkpoint of a version that had torch's sizes.
        """
        for number, seen in self._open.items():
            made, now = seen(), self._sizes[number]
            if kept is not None and number >= len(kept):
                continue  # the checkpoint knows none of it
            then = None if kept is None else kept[number]
            if made is None or then == now:
                continue
            made.resize(then)
            self._sizes[number] = then
            if self._own.is_leader:
                size = "torch's sizes" if then is None else f"{then:g} MiB"
                say(f"DDP sends gradients in buckets of {size}, as in the checkpoint, so that the sums stay the same")

    def close(self) -> None:
        """End what runs beside this thread."""
        for compressor in self._compressors:
            compressor.close()


class Compressors:
    """Those of the DDP modules in these parts, by the name of the part."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        modules = {name: part.modules() for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        found = {
            name: [own.compressor for own in inside if isinstance(own, PinnedBuckets)]
            for name, inside in modules.items()
        }
        self._named: dict[str, SavedCompressor] = {
            f"{name}{number or ''}": own
            for name, compressors in found.items()
            for number, own in enumerate(compressors)
            if own
        }

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what this rank still owes to the sums, for a checkpoint."""
        return {name: compressor.state_dict() for name, compressor in self._named.items()}

    def load(self, per_rank: Mapping[str, Any] | None, *, num_ranks: int) -> list[str]:
        """Owe what `state` returned, and return a line for each kind of error feedback where that cannot be.

        Args:
            per_rank: what a checkpoint has of this rank; None: other ranks wrote it.
            num_ranks: how many wrote it.
        """
        lines = list[str | None]()
        for name, own in self._named.items():
            other = {"format": own.format, "world_size": num_ranks}
            lines.append(own.load_state_dict(other if per_rank is None else per_rank.get("owed", {}).get(name, {})))
        return [line for line in dict.fromkeys(lines) if line]

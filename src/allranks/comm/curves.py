"""How long does a collective take, at a size and a number of ranks that nobody measured? Pure.

Between measured sizes, time is interpolated linearly. For another number of ranks, it is scaled as a ring's:

    time(size, ranks) = hops * (ranks - 1) / (measured - 1) + bytes * f(ranks) / f(measured)

`hops` and `bytes` are the parts of the measured time that do not and do grow with the size (a line through all sizes,
fitted to relative errors); f is the factor between algorithm and bus bandwidth, 2 (n - 1) / n for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from allranks.comm.bench_table import BenchTable, bus_factor

SMALL_BYTES = 256 << 10
"""An all-reduce below this size is mostly hops, which a line through the sizes of DDP's buckets does not show."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Times of one collective, as one number of ranks measured them."""

    points: tuple[tuple[int, float], ...]
    """Size in bytes and seconds, by ascending size."""
    fixed_s: float
    per_byte_s: float

    @classmethod
    def through(cls, points: Iterable[tuple[int, float]]) -> Curve:
        """Fit the line fixed + per_byte * size, with the least squares of relative errors; neither is negative.

        Args:
            points: at least one, of positive sizes and times.
        """
        points = tuple(sorted(points))
        ones, sizes = [1 / time_s for _, time_s in points], [size / time_s for size, time_s in points]
        a, b, c = (
            sum(x * y for x, y in zip(left, right, strict=True))
            for left, right in ((ones, ones), (ones, sizes), (sizes, sizes))
        )
        fixed_s, per_byte_s = 0.0, sum(sizes) / c
        if (determinant := a * c - b * b) > 1e-9 * a * c:
            fixed_s = (c * sum(ones) - b * sum(sizes)) / determinant
            per_byte_s = (a * sum(sizes) - b * sum(ones)) / determinant
            if fixed_s < 0:
                fixed_s, per_byte_s = 0.0, sum(sizes) / c
            elif per_byte_s < 0:
                fixed_s, per_byte_s = sum(ones) / a, 0.0
        return cls(points, fixed_s, per_byte_s)

    def time_s(self, size_bytes: float) -> float:
        """Return the time of one at this size; above the largest size, its bandwidth holds."""
        (_, first_s), (last, last_s) = self.points[0], self.points[-1]
        if size_bytes >= last:
            return last_s * size_bytes / last
        points = [(0, min(self.fixed_s, first_s)), *self.points]
        above = next(number for number, (size, _) in enumerate(points) if size > size_bytes)
        (below, below_s), (over, over_s) = points[above - 1], points[above]
        return below_s + (over_s - below_s) * (size_bytes - below) / (over - below)


@dataclass(frozen=True, slots=True)
class NetworkCurves:
    """What a table says about collectives among a number of ranks."""

    curves: Mapping[tuple[str, int], Curve]
    """By collective and number in flight."""
    measured: int
    """Ranks that measured."""
    ranks: int

    @classmethod
    def of(cls, table: BenchTable) -> NetworkCurves:
        """Return the network as it was measured.

        Raises:
            ValueError: the table cannot say anything about a step.
        """
        points = dict[tuple[str, int], list[tuple[int, float]]]()
        for row in table.rows:
            # A median of two is their mean, which one disturbance moves; nothing makes a collective faster than it is.
            time_s = row.best_s if row.repetitions == 2 and row.best_s > 0 else row.time_s
            if row.size_bytes > 0 and time_s > 0:
                points.setdefault((row.collective, row.in_flight), []).append((row.size_bytes, time_s))
        if table.ranks < 2 or not any(collective == "all_reduce" for collective, _ in points):
            raise ValueError("has no all-reduce between two ranks")
        curves = {key: Curve.through(measured) for key, measured in points.items()}
        return cls(curves, table.ranks, table.ranks)

    def among(self, ranks: int) -> NetworkCurves:
        """Return the same network with another number of ranks, scaled."""
        return NetworkCurves(self.curves, self.measured, ranks)

    def time_s(self, collective: str, size_bytes: float, *, in_flight: int = 1) -> float:
        """Return the seconds of one collective.

        Args:
            in_flight: how many share the network; of the measured numbers, the nearest is taken.
        """
        numbers = [number for name, number in self.curves if name == collective]
        if not numbers:  # it sends a part of what an all-reduce sends
            return self.time_s("all_reduce", size_bytes) * bus_factor(collective, 4) / bus_factor("all_reduce", 4)
        nearest = min(numbers, key=lambda number: abs(number - in_flight))
        curve = self.curves[collective, nearest]
        time_s = self._scaled(collective, curve, size_bytes)
        if nearest < in_flight and collective != "all_reduce":
            # Alone, it waits at its hops. Others fill these gaps: its bytes then pass as those of all-reduces do.
            factor = bus_factor(collective, self.ranks) / bus_factor("all_reduce", self.ranks)
            time_s = min(time_s, self.time_s("all_reduce", size_bytes * factor, in_flight=in_flight))
        gather = self.curves.get(("all_gather", 1))
        is_small = nearest == 1 and size_bytes < SMALL_BYTES <= curve.points[0][0]
        if collective == "all_reduce" and gather and is_small:
            # It is a reduce-scatter and an all-gather, whose small sizes were measured.
            time_s = max(time_s, 2 * self._scaled("all_gather", gather, size_bytes))
        return time_s

    def code_s(self, wire_format: str, size_bytes: float, sent_bytes: float) -> float | None:
        """Return the seconds of a bucket's code on all ranks at a time; None: nobody measured it.

        Args:
            size_bytes: of the bucket's gradients.
            sent_bytes: what it sends of them.
        """
        if whole := self.curves.get((f"reduce_{wire_format}", 1)):
            return max(0.0, whole.time_s(size_bytes) - self.among(self.measured).factors_s(sent_bytes))
        curve = self.curves.get((f"pack_{wire_format}", 1))
        return curve.time_s(size_bytes) if curve else None

    def factors_s(self, sent_bytes: float) -> float:
        """Return the seconds of the all-reduces of PowerSGD's P and Q, one after the other."""
        return 2 * self.time_s("all_reduce", sent_bytes / 2)

    @property
    def link_mbit_s(self) -> float:
        """What a link carries one way during the largest all-reduce, in 1e6 bits a second."""
        points = (curve.points[-1] for (name, _), curve in self.curves.items() if name == "all_reduce")
        size, time_s = max(points)
        return bus_factor("all_reduce", self.measured) * size * 8e-6 / time_s

    def _scaled(self, collective: str, curve: Curve, size_bytes: float) -> float:
        time_s, bytes_s = curve.time_s(size_bytes), curve.per_byte_s * size_bytes
        line_s = curve.fixed_s + bytes_s
        if self.ranks == self.measured or not line_s:
            return time_s
        factor = bus_factor(collective, self.ranks) / bus_factor(collective, self.measured)
        return time_s * (curve.fixed_s * (self.ranks - 1) / (self.measured - 1) + bytes_s * factor) / line_s

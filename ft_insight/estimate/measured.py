"""What a run, or several of the same kind, say of themselves that projections rest on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ft_insight.catalog import Gpu, gpu_for_device
from ft_insight.estimate.density import active_share
from ft_insight.estimate.peak_fit import PeakMemory, fit_peak
from ft_insight.estimate.run_points import micro_points
from ft_insight.estimate.step_time import NotIdentifiable, StepTime, fit_step_time
from ft_insight.records import Header
from ft_insight.run_view import RunView
from ft_insight.stats import median

if TYPE_CHECKING:
    from ft_insight.estimate.joint import Joint

MOST_POINTS = 1500
"""Micro-batches that are fitted, an even sample: more of them say the same, and an answer takes a second."""


class MixedRunsError(ValueError):
    """Runs that are not of the same thing; the message is one line."""


class Measured(msgspec.Struct, frozen=True):
    """What a run says of itself that projections rest on."""

    view: RunView
    step_time: StepTime | NotIdentifiable
    peak: PeakMemory | str
    rest_s: float | None
    """Median of what a step takes besides its micro-batches."""
    here: Gpu | None
    """The GPU that it ran on, where the catalogue has it."""
    length: float | None = None
    """Slots of a row that a micro-batch's slots lie in, on average over slots; None where queries were not counted."""
    density: float | None = None
    """Share of the experts that a token is to pass through, where that is another than in the run."""
    joint: Joint | None = None
    """The step time of several runs fitted together, where they tell of other densities or lengths what none does."""
    rest_per_micro_s: float = 0.0
    """What each micro-batch of a step adds to ``rest_s``, waiting for data aside, where accumulations differ."""

    @property
    def gpu_count(self) -> int:
        """Devices of all ranks."""
        header = self.view.header
        return max(1, len(header.devices)) * header.world_size if header else 1

    @property
    def on_gpu(self) -> bool:
        """The run computed on a GPU."""
        header = self.view.header
        return bool(header and header.devices and header.devices[0].kind == "cuda")

    @property
    def ranks(self) -> int:
        """Ranks that see different data."""
        header = self.view.header
        return (header.data_parallel_size or header.world_size) if header else 1

    @property
    def batch(self) -> int | None:
        """Queries of a micro-batch on one rank, as configured."""
        return self.view.header.train.batch if self.view.header else None

    @property
    def accumulation(self) -> float:
        """Micro-batches of a step."""
        return self.view.accumulation or 1.0

    @property
    def queries_per_step(self) -> float | None:
        """Queries of a step over all ranks, as counted."""
        totals = self.view.totals
        return totals.queries / totals.steps if totals.queries and totals.steps else None

    def phase_share(self, *names: str) -> float:
        """Return the share of these phases in the time of a step besides its micro-batches."""
        rest = {p.name: p.seconds for p in self.view.phases if p.name not in COMPUTE_PHASES}
        whole = sum(rest.values())
        return sum(rest.get(name, 0.0) for name in names) / whole if whole > 0 else 0.0


COMPUTE_PHASES = frozenset({"forward", "loss", "recompute", "backward"})


def measure(view: RunView, *others: RunView) -> Measured:
    """Fit all that the run has measured; with ``others``, of the same model on the same device, all of them jointly.

    The first run is the one that is projected. Raises :class:`MixedRunsError` where they differ in what a time
    depends on.
    """
    check_alike((view, *others))
    alike = [each for each in (view, *others) if active_share(each) == active_share(view)]
    every = [m for each in alike for m in each.micro if m.slots and m.compute_s]
    every = every[:: -(-len(every) // MOST_POINTS) or 1]
    if others:
        view = msgspec.structs.replace(view, filling=view.filling.joined(*(each.filling for each in others)))
    device = view.header.devices[0] if view.header and view.header.devices else None
    return Measured(
        view=view,
        step_time=fit_step_time([float(m.slots or 0) for m in every], [float(m.compute_s or 0) for m in every]),
        peak=fit_peak(view.filling),
        rest_s=_rest(view),
        here=gpu_for_device(device.name, device.memory_bytes) if device and device.kind == "cuda" else None,
        length=_length(view),
        joint=_jointly((view, *others)) if others else None,
        rest_per_micro_s=_rest_per_micro((view, *others)) if others else 0.0,
    )


def _jointly(views: tuple[RunView, ...]) -> Joint | None:
    """Fit runs together where their densities differ, or their lengths by themselves; None where slots say it all."""
    from ft_insight.estimate.joint import fit_joint

    points = [point for view in views for point in micro_points(view)]
    if any(point.length is None for point in points):
        points = [msgspec.structs.replace(point, length=None) for point in points]
    found = fit_joint(points)
    if isinstance(found, NotIdentifiable) or found.best.design.terms == ("per_unit_s",):
        return None
    return found


def _length(view: RunView) -> float | None:
    known = [(m.slots, m.slots / m.queries) for m in view.micro if m.slots and m.queries]
    return sum(slots * long for slots, long in known) / sum(slots for slots, _ in known) if known else None


def _rest(view: RunView) -> float | None:
    """Never below 0: a device that is ahead of the host's clock does not give time back."""
    rest = median(view.rest_s)
    return None if rest is None else max(0.0, rest)


def _rest_per_micro(views: tuple[RunView, ...]) -> float:
    """Return the slope of runs' ``rest_s`` over their accumulation, between 0 and what leaves none of them below 0."""
    points: list[tuple[float, float]] = []
    for each in views:
        rest, waits = _rest(each), sum(phase.seconds for phase in each.phases if phase.name == "data_wait")
        if rest is not None and each.accumulation and each.totals.steps:
            points.append((each.accumulation, max(0.0, rest - waits / each.totals.steps)))
    if len({count for count, _ in points}) < 2:
        return 0.0
    middle, typical = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    slope = sum((c - middle) * (s - typical) for c, s in points) / sum((c - middle) ** 2 for c, _ in points)
    return max(0.0, min(slope, *(s / c for c, s in points)))


_ALIKE: dict[str, Callable[[Header], object]] = {
    "models": lambda h: (h.model.kind, h.model.parameters, h.model.layers, h.model.experts),
    "methods": lambda h: h.train.method,
    "number formats": lambda h: (h.train.precision, h.model.dtype, h.model.quantization),
    "gradient checkpointing": lambda h: h.train.gradient_checkpointing or "none",
    "devices": lambda h: tuple(d.name for d in h.devices),
    "numbers of GPUs": lambda h: h.world_size,
}


def check_alike(views: tuple[RunView, ...]) -> None:
    """Raise :class:`MixedRunsError` where the runs differ in what the time of a micro-batch depends on."""
    headers = [view.header for view in views if view.header is not None]
    for what, of in _ALIKE.items():
        if len({of(header) for header in headers}) > 1:
            names = ", ".join(dict.fromkeys(header.run_id for header in headers))
            raise MixedRunsError(f"these runs are of different {what} and cannot be fitted together: {names}")

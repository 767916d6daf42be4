"""Memory over a run: the peak of each micro-batch, and on sampled steps what memory is filled with.

The allocator's statistics are never reset, for others read them too. It tells the highest sum so far: where that rose
during a micro-batch it is the micro-batch's own peak; else its peak was no higher, and no lower than what was read
within it. All reads are calls on the host, none waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ft_insight import records as r
from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.memory_look import AllocatorLook, Counted, CountedLook, as_parts, merged
from ft_insight.callbacks.modules import Part
from ft_insight.callbacks.sampling import HOOK_FACTOR, Sampling
from ft_insight.callbacks.storages import Inventory, add_gradients, take_inventory, tensors_in

FIRST_LOOK = 2
"""Step of the first look: from the second on the optimizer's state is there."""
THRIFT = 5.0
"""Looks at memory may take this much less than ``sampling.BUDGET``: memory changes little from step to step."""
CHANGED = 0.05
"""Change of what is allocated between steps, as a fraction, from which on it is counted anew."""


class Reading(NamedTuple):
    """The allocator's sum now, and the highest so far, in bytes."""

    allocated: int
    peak: int


def read_allocator(device: torch.device) -> Reading:
    """Read torch's statistics of a CUDA device."""
    stats = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
    return Reading(int(stats.get("current", 0)), int(stats.get("peak", 0)))


@dataclass
class _Micro:
    """A micro-batch that is being computed."""

    before: Reading | None
    slots: int | None
    began_s: float
    spent_s: float
    seen: int = 0
    look: AllocatorLook | CountedLook | None = None
    static: Inventory | None = None


class MemoryWatch:
    """Told by the observer of what a trainer does; all its methods run behind the guard, as ``memory``."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        guard: Guard,
        device: torch.device,
        optimizer: Callable[[], Any],
        *,
        counts: bool,
    ) -> None:
        self._model, self._parts, self._guard, self._optimizer = model, list(parts), guard, optimizer
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._looks = self.on_gpu or counts
        self._sampling = Sampling(first=FIRST_LOOK)
        self._due = False
        self._expected = 0
        self._micro: list[r.MicroMemory] = []
        self._now: _Micro | None = None
        self._base: int | None = None
        self._last_peak: int | None = None
        self._moments: list[tuple[str, int, Counted, int | None]] = []
        self._told_bytes: int | None = None
        self._failed = False
        self.slowed = False
        """This step took longer for having been looked at: on a CPU each operator of a micro-batch was."""
        self._usual_s = 0.0
        self._step_s = 0.0
        self._cost_s = 0.0

    # steps

    def step_begins(self, *, free: bool) -> None:
        """A step begins; with ``free``, no other close look is taken of it."""
        self.let_go()
        self._micro, self._moments, self._base, self._expected, self._failed = [], [], None, 0, False
        self._step_s, self._cost_s = perf_counter(), 0.0
        self.slowed = False
        self._due = self._looks and free and self._sampling.due()

    def expect(self, micro_batches: int) -> None:
        """So many micro-batches will come: the last one is looked at, when the gradients are there."""
        self._expected = micro_batches

    def step_ends(self, memory: r.Memory | None) -> r.Memory | None:
        """Add what was read within the step to what is read at its end."""
        self._give_up()
        if memory is None:
            return None
        optimizer = None
        if self.on_gpu and self._last_peak is not None:
            peak = read_allocator(self.device).peak
            optimizer = peak if peak > self._last_peak else None
            if optimizer and self._moments:
                self._note_optimizer(optimizer)
        known = any(m.peak_bytes is not None or m.seen_bytes is not None for m in self._micro)
        return msgspec.structs.replace(
            memory,
            base_bytes=self._base,
            micro=tuple(self._micro) if known else (),
            optimizer_peak_bytes=optimizer,
        )

    def take(self, step: int, t_s: float, memory: r.Memory | None) -> r.MemoryParts | None:
        """Return what memory is filled with, if this step tells something new of it."""
        allocated = memory.allocated_bytes if memory is not None else None
        looked = bool(self._moments)
        if not looked and self._told_bytes is not None and not self._changed(allocated):
            return None
        began_s = perf_counter()
        static = self._inventory()
        total = static.total if allocated is None else allocated
        self._moments.insert(0, ("between", total, dict(static.parts), None))
        self._told_bytes = total
        moments = tuple(self._as_record(step, *moment) for moment in self._moments)
        self._moments = []
        if looked:
            self._charge(perf_counter() - began_s)
        return r.MemoryParts(
            step=step,
            t_s=t_s,
            method="allocator" if self.on_gpu else "storages",
            moments=moments,
            reserved_bytes=memory.reserved_bytes if memory is not None else None,
            **device_memory(self.device),
        )

    def _changed(self, allocated: int | None) -> bool:
        if allocated is None or not self._told_bytes:
            return False
        return abs(allocated - self._told_bytes) > CHANGED * self._told_bytes

    def _charge(self, counting_s: float) -> None:
        """Let the sampling know what a look took, and what its step would have taken without it."""
        cost_s = self._cost_s + counting_s
        step_s = perf_counter() - self._step_s
        self._sampling.cost(cost_s * THRIFT / HOOK_FACTOR, max(step_s - cost_s, 1e-3))

    def _as_record(self, step: int, name: str, total: int, counted: Counted, slots: int | None) -> r.MemoryMoment:
        rest = total - sum(counted.values())
        parts = as_parts(merged(counted, {("other", ""): rest}))
        return r.MemoryMoment(name=name, step=step, allocated_bytes=total, parts=parts, slots=slots)

    def _inventory(self) -> Inventory:
        return take_inventory(self._model, self._optimizer(), self.device)

    # micro-batches

    def micro_begins(self, inputs: Any, slots: int | None) -> None:
        """A micro-batch is about to be computed."""
        self._give_up()
        reading = read_allocator(self.device) if self.on_gpu else None
        if self._base is None and reading is not None:
            self._base = reading.allocated
        now = self._now = _Micro(reading, slots, perf_counter(), self._guard.spent_s)
        if reading is not None:
            now.seen = reading.allocated
        if not self._due or len(self._micro) + 1 < self._expected:
            return
        self._due = False
        spent = perf_counter()
        now.static = self._inventory()
        for tensor in tensors_in(inputs):
            now.static.add("other", "batch", tensor)
        if self.on_gpu:
            now.look = AllocatorLook(self._parts, self._guard, lambda: read_allocator(self.device).allocated)
        else:
            now.look = CountedLook(self._parts, self._guard, now.static)
            self.slowed = True
        now.look.begin()
        self._cost_s += perf_counter() - spent

    def forward_begins(self) -> None:
        """The root of the model is called."""
        if self._now is not None and isinstance(self._now.look, AllocatorLook):
            self._now.look.forward_begins()

    def backward_begins(self) -> None:
        """All that backward waits for is there."""
        now = self._now
        if now is None:
            return
        if self.on_gpu:
            now.seen = max(now.seen, read_allocator(self.device).allocated)
        if now.look is None or now.static is None:
            return
        waiting = merged(now.static.parts, now.look.activations())
        total = now.seen if self.on_gpu else sum(waiting.values())
        if not self.on_gpu:
            now.seen = total
        self._moments.append(("forward", total, waiting, now.slots))

    def micro_ends(self) -> None:
        """A micro-batch was computed, its gradients added."""
        now, self._now = self._now, None
        if now is None:
            return
        took_s = perf_counter() - now.began_s
        if now.look is not None:
            now.look.end()
        told = self._tell_on_gpu(now) if self.on_gpu else self._tell_counted(now)
        self._micro.append(told)
        if now.look is None:
            self._usual_s = took_s
        else:
            self._slow_down(took_s, self._guard.spent_s - now.spent_s)

    def _slow_down(self, took_s: float, counted_s: float) -> None:
        """Charge what a look took: our own code, which the guard counts, and how much longer operators took for it."""
        longer = max(0.0, took_s - counted_s - self._usual_s) if self._usual_s and not self.on_gpu else 0.0
        self._cost_s += counted_s + longer
        self._guard.spent_s += longer

    def _tell_on_gpu(self, now: _Micro) -> r.MicroMemory:
        reading = read_allocator(self.device)
        before = now.before or reading
        self._last_peak = reading.peak
        exact = reading.peak > before.peak
        # somebody else has reset the statistics in the meantime: nobody knows what was before
        peak = reading.peak if reading.peak >= before.peak else None
        if isinstance(now.look, AllocatorLook):
            now.seen = max(now.seen, now.look.most)
        seen = max(now.seen, reading.allocated)
        if now.static is not None and self._moments:
            forward = self._moments[0]
            if exact:
                beyond = {("temporaries", ""): reading.peak - forward[1], ("other", ""): _rest(forward)}
                self._moments.append(("peak", reading.peak, merged(forward[2], beyond), now.slots))
            self._note_backward(now.static, reading.allocated, {}, now.slots)
        return r.MicroMemory(peak, exact, seen)

    def _tell_counted(self, now: _Micro) -> r.MicroMemory:
        if not isinstance(now.look, CountedLook) or now.static is None or not self._moments:
            return r.MicroMemory(None, False, None)
        base = now.static.total
        self._base = base if len(self._micro) == 0 else self._base
        most, at_peak, left = now.look.after_backward(list(self._model.parameters()))
        self._moments.append(("peak", base + most, merged(now.static.parts, at_peak), now.slots))
        self._note_backward(now.static, base + sum(left.values()), left, now.slots)
        return r.MicroMemory(base + most, True, now.seen)

    def _note_backward(self, static: Inventory, total: int, left: Counted, slots: int | None) -> None:
        """Note what is there when backward is over: the gradients of all micro-batches, which the optimizer takes."""
        if not left:
            add_gradients(static, self._model.parameters())
        self._moments.append(("backward", total, merged(static.parts, left), slots))

    def _note_optimizer(self, peak: int) -> None:
        _, total, counted, slots = self._moments[-1]
        beyond = {("temporaries", ""): peak - total, ("other", ""): total - sum(counted.values())}
        self._moments.append(("optimizer", peak, merged(counted, beyond), slots))

    # the end

    def _give_up(self) -> None:
        """A micro-batch that began and did not end has failed, and somebody went on: nothing is known of it."""
        if self._now is not None or self._failed:
            self.let_go()
            self._failed = False
            self._moments = []
            self._micro.append(r.MicroMemory(None, False, None))

    def let_go(self) -> None:
        """Take all hooks out, however it came to this; may be called at any time."""
        if self._now is not None and self._now.look is not None:
            self._now.look.end()
        self._failed = self._failed or self._now is not None
        self._now = None

    def filled(self) -> tuple[int | None, Counted]:
        """Return what is allocated now, in the middle of something, and what of it can be counted."""
        static = dict(self._inventory().parts)
        now = self._now
        if self.on_gpu:
            total = read_allocator(self.device).allocated
            return total, merged(static, {("temporaries", ""): max(0, total - sum(static.values()))})
        if now is not None and isinstance(now.look, CountedLook):
            counted = merged(static, now.look.so_far())
            return sum(counted.values()), counted
        return None, static


def _rest(moment: tuple[str, int, Counted, int | None]) -> int:
    return moment[1] - sum(moment[2].values())


def device_memory(device: torch.device) -> dict[str, int]:
    """Return what the driver says of a CUDA device: free and total bytes, and the allocator's split pieces."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    split = torch.cuda.memory_stats_as_nested_dict(device).get("inactive_split_bytes", {}).get("all", {})
    return {
        "device_free_bytes": int(free),
        "device_total_bytes": int(total),
        "split_bytes": int(split.get("current", 0)),
    }

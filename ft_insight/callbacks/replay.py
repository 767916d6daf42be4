"""From the marks of a step to seconds per part: who was at work between each two of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ft_insight import records as r
from ft_insight.callbacks.clock import HostClock
from ft_insight.callbacks.layers import Mark
from ft_insight.callbacks.modules import Part

HEAD_AND_LOSS = -1
AROUND = -2
"""Work of the model outside of its parts and before its last layer: masks, rotary tables, casts."""


@dataclass
class PartTimes:
    """Seconds of each part itself, inner parts apart; keys are indices of parts, ``HEAD_AND_LOSS``, ``AROUND``."""

    forward_s: dict[int, float] = field(default_factory=dict)
    recompute_s: dict[int, float] = field(default_factory=dict)
    backward_s: dict[int, float] = field(default_factory=dict)
    micro_batches: int = 0


@dataclass
class _State:
    """Where a micro-batch is: in forward a stack of open parts, in backward an owner and a stack being recomputed."""

    stack: list[int] = field(default_factory=list)
    owner: int | None = None
    backward: bool = False
    model: bool = False
    seen_last_layer: bool = False


def replay(marks: Sequence[Mark], parts: Sequence[Part], clock: HostClock) -> PartTimes | None:
    """Charge the time between each two marks to the part that was at work; None if it cannot be told.

    With a device's clock, all marks must carry events, and the device must have passed the last of them.
    """
    times = PartTimes()
    if clock.name != "host" and any(mark.event is None for mark in marks):
        return None
    layers = [i for i, part in enumerate(parts) if part.kind == "layer"]
    last_layer = layers[-1] if layers else None
    state = _State()
    for mark, following in itertools.pairwise(marks):
        if mark.what == "micro":
            state = _State()
        _step(state, mark, last_layer)
        if mark.what == "micro end":
            times.micro_batches += 1
            continue
        target = _target(state, mark, following, parts, times)
        if target is not None:
            seconds = _distance(mark, following, clock)
            bucket, part = target
            bucket[part] = bucket.get(part, 0.0) + seconds
    times.micro_batches += bool(marks) and marks[-1].what == "micro end"
    return times


def _distance(mark: Mark, following: Mark, clock: HostClock) -> float:
    if clock.name == "host" or mark.event is None or following.event is None:
        return following.host_s - mark.host_s
    return mark.event.elapsed_time(following.event) / 1e3


def _step(state: _State, mark: Mark, last_layer: int | None) -> None:
    """Move on by one mark."""
    what, part = mark.what, mark.part
    if what in ("enter", "recompute"):
        state.stack.append(part)
    elif what in ("leave", "recomputed"):
        if part in state.stack:
            del state.stack[state.stack.index(part) :]
        state.seen_last_layer |= part == last_layer
    elif what in ("begin", "parent"):
        # autograd came on to another part: a recomputation that was left early is over
        state.stack.clear()
        state.owner = part
    elif what == "backward":
        state.stack.clear()
        state.backward, state.owner, state.model = True, None, True
    elif what == "backward end":
        state.backward = state.model = False
    elif what == "forward":
        state.model, state.seen_last_layer = True, False


def _target(
    state: _State, mark: Mark, following: Mark, parts: Sequence[Part], times: PartTimes
) -> tuple[dict[int, float], int] | None:
    """Return whose time begins at this mark: a table of ``times``, and the part."""
    if not state.model:
        return None
    if not state.backward:
        if state.stack:
            return times.forward_s, state.stack[-1]
        return times.forward_s, HEAD_AND_LOSS if state.seen_last_layer else AROUND
    if state.stack:
        return times.recompute_s, state.stack[-1]
    if mark.what == "recomputed" and following.what == "recompute":
        # between two recomputed parts: what their layer does of its own
        return times.recompute_s, _layer_of(parts, mark.part)
    owner = state.owner
    if owner is None:
        return times.backward_s, HEAD_AND_LOSS
    return times.backward_s, AROUND if owner < 0 else owner


def _layer_of(parts: Sequence[Part], index: int) -> int:
    layer = parts[index].layer
    for i, part in enumerate(parts):
        if part.kind == "layer" and part.layer == layer:
            return i
    return AROUND


def layer_record(
    marks: Sequence[Mark], parts: Sequence[Part], clock: HostClock, step: int, t_s: float
) -> r.Layers | None:
    """Return the seconds of a sampled step by layer and kind; None if they cannot be told."""
    times = replay(marks, parts, clock)
    if times is None or not times.micro_batches:
        return None
    kinds = kinds_of(marks, parts)
    rows: dict[tuple[int | None, str], list[float]] = {}
    for column, table in enumerate((times.forward_s, times.recompute_s, times.backward_s)):
        for index, seconds in table.items():
            key = (None, OUTER[index]) if index < 0 else (parts[index].layer, kinds[index])
            rows.setdefault(key, [0.0, 0.0, 0.0])[column] += seconds
    order = sorted(rows, key=lambda key: (key[0] is not None, key[0] or 0))
    return r.Layers(
        step=step,
        t_s=t_s,
        clock=clock.name,
        micro_batches=times.micro_batches,
        layers=tuple(layer for layer, _ in order),
        kinds=tuple(kind for _, kind in order),
        forward_s=tuple(round(rows[key][0], 7) for key in order),
        recompute_s=tuple(round(rows[key][1], 7) for key in order),
        backward_s=tuple(round(rows[key][2], 7) for key in order),
    )


OUTER = {HEAD_AND_LOSS: "head_and_loss", AROUND: "around"}


def kinds_of(marks: Sequence[Mark], parts: Sequence[Part]) -> list[str]:
    """Return the kind of each part; a layer's norms are told apart by whether its mixer has run before them."""
    kinds = [part.kind for part in parts]
    mixed: set[int | None] = set()
    named: set[int] = set()
    for mark in marks:
        if mark.what != "enter" or mark.part in named:
            continue
        part = parts[mark.part]
        named.add(mark.part)
        if part.kind in ("attention", "mamba"):
            mixed.add(part.layer)
        elif part.kind == "norm":
            kinds[mark.part] = "post_attention_norm" if part.layer in mixed else "input_norm"
    return kinds

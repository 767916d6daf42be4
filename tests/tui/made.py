"""Logs for the dashboard, built from the real records."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable

import msgspec
from textual.app import App

from ft_insight import records as r

GIB = 1024**3
WALL_S = 2.0
PHASES = {
    "data_wait": 0.02,
    "forward": 0.5,
    "loss": 0.08,
    "backward": 1.2,
    "clip": 0.02,
    "optimizer": 0.1,
    "other": 0.08,
}


def header(**changes: object) -> r.Header:
    fields: dict[str, object] = {
        "schema": r.SCHEMA,
        "run_id": "test-run",
        "segment": 0,
        "wall_time_s": time.time(),
        "started_at": "2026-12-01T09:12:00+01:00",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "model": r.ModelFacts(name="tiny-moe", experts=4, experts_per_token=2),
        "train": r.TrainFacts(trainer="SFTTrainer", method="qlora", lora_rank=16, max_steps=1240),
        "dataset": r.DatasetFacts(queries=100),
        "devices": (r.Device(kind="cuda", name="NVIDIA A40", index=0, uuid="GPU-1"),),
        "price_usd_per_hour": 3.6,
    }
    return r.Header(**{**fields, **changes})  # type: ignore[arg-type]


def step(number: int, **changes: object) -> r.Step:
    micro = r.MicroBatch(4, 1000, 750, 400, 1.78)
    memory = r.Memory(
        allocated_bytes=10 * GIB, reserved_bytes=14 * GIB, peak_allocated_bytes=12 * GIB, rss_bytes=3 * GIB
    )
    fields: dict[str, object] = {
        "step": number,
        "t_s": (number - 1) * WALL_S,
        "wall_s": WALL_S,
        "phases_s": PHASES,
        "micro": (micro, micro),
        "memory": memory,
        "self_s": 0.002,
    }
    return r.Step(**{**fields, **changes})  # type: ignore[arg-type]


def logs(number: int, **values: float) -> r.Logs:
    safe, nonfinite = r.finite(values)
    return r.Logs(step=number, t_s=number * WALL_S, values=safe, nonfinite=nonfinite)


def gpu(t_s: float, **changes: object) -> r.Gpu:
    fields: dict[str, object] = {
        "uuid": "GPU-1",
        "gpu_percent": 91.0,
        "memory_used_bytes": 40 * GIB,
        "memory_total_bytes": 45 * GIB,
        "power_w": 271.0,
        "power_limit_w": 300.0,
        "temperature_c": 62.0,
    }
    return r.Gpu(t_s=t_s, samples=(r.GpuSample(**{**fields, **changes}),))  # type: ignore[arg-type]


def experts(*layers: tuple[int, ...], step: int = 10, queries: int | None = None) -> r.Experts:
    names = tuple(f"model.layers.{i}.mlp.gate" for i in range(len(layers)))
    return r.Experts(
        step=step,
        t_s=20.0,
        mode="train",
        layers=names,
        counts=layers,
        tokens=(100,) * len(layers),
        queries=queries,
    )


def role(kind: str, name: str, pass_name: str, seconds: float, **changes: object) -> r.KernelRole:
    """Build one role of one pass in a step whose roles take 1 s together."""
    fields: dict[str, object] = {"calls": 10, "share": seconds, **changes}
    return r.KernelRole(kind=kind, role=name, pass_name=pass_name, seconds=seconds, **fields)  # type: ignore[arg-type]


def kernels(clock: str, roles: Iterable[r.KernelRole], idle_s: float | None = None) -> r.Kernels:
    return r.Kernels(
        step=6,
        t_s=70.0,
        clock=clock,
        window_s=1.25,
        busy_s=1.0,
        idle_s=idle_s,
        roles=tuple(roles),
        trace="run.step6.trace.json",
    )


def layers(number: int, rows: dict[tuple[int | None, str], tuple[float, float, float]], micro: int = 2) -> r.Layers:
    """Build one sampled step from seconds of forward, recomputation and backward, summed over micro-batches."""
    forward, recompute, backward = zip(*rows.values(), strict=True)
    return r.Layers(
        step=number,
        t_s=number * WALL_S,
        clock="cuda",
        micro_batches=micro,
        layers=tuple(layer for layer, _ in rows),
        kinds=tuple(kind for _, kind in rows),
        forward_s=forward,
        recompute_s=recompute,
        backward_s=backward,
    )


# two micro-batches: 0.8 s of model each; MoE 0.4 s of them, in layer 1 three times as much as in layer 0
MOE_LAYERS: dict[tuple[int | None, str], tuple[float, float, float]] = {
    (None, "head_and_loss"): (0.1, 0.0, 0.22),
    (0, "attention"): (0.05, 0.05, 0.1),
    (0, "experts"): (0.05, 0.03, 0.1),
    (0, "router"): (0.005, 0.005, 0.01),
    (1, "attention"): (0.05, 0.05, 0.1),
    (1, "input_norm"): (0.01, 0.01, 0.02),
    (1, "post_attention_norm"): (0.01, 0.01, 0.02),
    (1, "experts"): (0.15, 0.13, 0.28),
    (1, "router"): (0.01, 0.01, 0.02),
}


def run(steps: int = 40, **changes: object) -> list[r.Record]:
    out: list[r.Record] = [header(**changes), r.Span(kind="startup", t_s=0, wall_s=1.0, step=0)]
    for number in range(1, steps + 1):
        out += [step(number), logs(number, loss=1.5, grad_norm=0.75, learning_rate=0.0002)]
    out += [logs(steps, eval_loss=1.25), gpu(steps * WALL_S), experts((50, 50, 50, 50), (140, 20, 20, 20))]
    return out


def encoded(records: Iterable[r.Record]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def screen_text(app: App[str]) -> str:
    """Return what the terminal shows, line by line."""
    strips = app.screen._compositor.render_strips(app.size)
    return "\n".join(strip.text.rstrip() for strip in strips)


async def wait_for(pilot: object, wanted: str | Callable[[str], bool], looks: int = 400) -> str:
    """Wait until the screen shows a text, and return the screen: for so many looks at it, however long they take."""
    for _ in range(looks):
        await pilot.pause(0.05)  # type: ignore[attr-defined]
        shown = screen_text(pilot.app)  # type: ignore[attr-defined]
        if wanted in shown if isinstance(wanted, str) else wanted(shown):
            return shown
    raise AssertionError(f"never saw {wanted!r} in\n{shown}")

"""Records and logs for tests, with as little said as the test at hand needs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ft_insight import records as r
from ft_insight.run import RunState
from ft_insight.run_view import RunView

GIB = 1024**3
A40 = r.Device(kind="cuda", name="NVIDIA A40", memory_bytes=int(44.42 * GIB))
CPU = r.Device(kind="cpu", name="a CPU")


def header(**said: Any) -> r.Header:
    train = {"trainer": "SFTTrainer", "method": "lora", "batch": 10, "accumulation": 1, **said.pop("train", {})}
    data = said.pop("dataset", {})
    model = {"name": "mixtral", "kind": "moe", "parameters": 46_700_000_000, "layers": 32, **said.pop("model", {})}
    given: dict[str, Any] = {
        "schema": r.SCHEMA,
        "run_id": "run-1",
        "segment": 0,
        "wall_time_s": 1.75e9,
        "started_at": "2026-11-30T06:00:00+00:00",
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    return r.Header(
        **{**given, **said}, model=r.ModelFacts(**model), train=r.TrainFacts(**train), dataset=r.DatasetFacts(**data)
    )


def micro(queries: int | None = 10, slots: int | None = 1000, real: int | None = 800, **more: Any) -> r.MicroBatch:
    return r.MicroBatch(queries, slots, real, more.get("loss", real), more.get("compute_s", 0.5))


def step(number: int, t_s: float, wall_s: float = 1.0, **said: Any) -> r.Step:
    phases = said.pop("phases_s", {"data_wait": 0.1 * wall_s, "forward": 0.3 * wall_s, "backward": 0.6 * wall_s})
    return r.Step(step=number, t_s=t_s, wall_s=wall_s, phases_s=phases, **{"micro": (micro(),), **said})


def steps(count: int, wall_s: float = 1.0, first: int = 1, t_s: float = 0.0, **said: Any) -> list[r.Record]:
    return [step(first + i, t_s + i * wall_s, wall_s, **said) for i in range(count)]


def end(t_s: float, status: str = "completed", number: int = 0, **said: Any) -> r.End:
    return r.End(t_s=t_s, status=status, step=number, **said)


def line(record: Any) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def log(path: Path, items: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(item if isinstance(item, bytes) else line(item) for item in items))
    return path


def view(items: Iterable[Any]) -> RunView:
    return RunState().replay(items)

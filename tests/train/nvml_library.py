"""The stand-in for NVIDIA's library, compiled, and a process in which the sampler meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parent.parent / "fakes"
FIRST, SECOND, CUT = (f"{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}" for n in "123")
SLICE = "44444444-4444-4444-4444-444444444444"


def compiled(folder: Path, *options: str) -> Path:
    """Compile the stand-in under the name that pynvml looks for. A missing compiler is a failure."""
    target = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *options, "-o", str(target)]
    subprocess.run([*command, str(FAKES / "nvml.c")], check=True)
    return target


class Cases:
    """Runs cases, each in a fork of one process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.driver_case"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=FAKES.parent.parent,
            env={k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(
        self,
        library: Path | None,
        *uuids: str,
        devices: Sequence[dict[str, Any]] = (),
        records: int = 3,
        interval_s: float = 0.01,
        limit_s: float = 5.0,
        release_after: int | None = None,
        until_hanging: Path | None = None,
        path: Sequence[Path] = (),
        rocm: bool = False,
        **environment: str,
    ) -> dict[str, Any]:
        """Sample some GPUs until there are so many records; return what came of it."""
        case = {
            "library": str(library) if library else None,
            "devices": [*devices, *({"uuid": uuid} for uuid in uuids)],
            "records": records,
            "interval_s": interval_s,
            "limit_s": limit_s,
            "release_after": release_after,
            "until_hanging": str(until_hanging) if until_hanging else None,
            "path": [str(p) for p in path],
            "rocm": rocm,
            "environment": environment,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in result, result
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="session")
def cases() -> Iterator[Cases]:
    running = Cases()
    yield running
    running.close()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


def samples_of(result: dict[str, Any], place: int = 0) -> list[dict[str, Any]]:
    """Return one GPU's samples, of the records that have any."""
    return [record[0][place] for record in result["records"] if len(record[0]) > place]

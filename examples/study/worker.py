"""Runs examples as their users would, one after the other in this process, and notes how each ended.

``runs.py`` starts it with a JSON list of title, script, words and folder. A run that fails, for lack of memory or
anything else, does not keep the next ones from running.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OUT_OF_MEMORY = "out of memory"
_SIGNS = (OUT_OF_MEMORY, "cublas_status_alloc_failed")
"""What the error of a device without memory says, in lower case."""


def run(script: Path, words: list[str], folder: Path) -> str:
    """Run an example, whose words go to ``output.txt``; return ``completed``, ``out of memory``, or the reason."""
    output = folder / "output.txt"
    sys.argv = [str(script), *words]
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))  # as Python does for a script
    with _output_to(output):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                sys.stderr.flush()
                return (output.read_text(encoding="utf-8").strip().splitlines() or [f"exit code {end.code}"])[-1]
        except Exception as error:  # noqa: BLE001 - whatever it is, the next run is to have its turn
            traceback.print_exc()
            return OUT_OF_MEMORY if _out_of_memory(error) else f"{type(error).__name__}: {error}".splitlines()[0]
    return "completed"


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Send all output there, that of libraries in C too."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with file.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for place, before in zip((1, 2), kept, strict=True):
            os.dup2(before, place)
            os.close(before)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _SIGNS)


def main() -> None:
    for asked in json.loads(sys.argv[1]):
        folder = Path(asked["folder"])
        began = time.perf_counter()
        outcome = run(Path(asked["script"]), asked["words"], folder)
        (folder / "outcome.json").write_text(json.dumps({"outcome": outcome}), encoding="utf-8")
        print(f"{asked['title']}: {outcome} after {time.perf_counter() - began:.1f} s", flush=True)
        _clean_up()


def _clean_up() -> None:
    """Give back what the last run took on the device, so that the next one's peak is its own."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()

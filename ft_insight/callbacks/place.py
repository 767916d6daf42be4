"""Where a run's log goes: a new name for a new run, the old file for the same run resumed, one file per rank."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ft_insight.records import Header
from ft_insight.runlog import LOG_NAME, LOG_VARIABLE, RUNS_FOLDER, LogWriter, rank_path, read_header

RENDEZVOUS_S = 5.0


@dataclass(frozen=True)
class Place:
    """A path to write to, and whose run it is."""

    path: Path
    run_id: str
    segment: int
    append: bool


@dataclass(frozen=True)
class Identity:
    """What must agree for a resumed run to be the same run as the one in a log."""

    model: str
    parameters: int | None
    output_dir: str | None
    resumed_from: int

    def continues(self, header: Header) -> bool:
        """Tell whether this training carries on the run of that header."""
        return (
            self.resumed_from > 0
            and header.model.name == self.model
            and header.model.parameters == self.parameters
            and header.train.output_dir == self.output_dir
        )


def choose(path: str | os.PathLike[str] | None, identity: Identity) -> Place:
    """Choose where rank 0 writes: ``path``, else ``FT_INSIGHT_LOG``, else a new folder under ``ft_insight_runs/``.

    An existing file is only ever appended to, and only by the run that wrote it; else the new log gets a new name.
    """
    named = path or os.environ.get(LOG_VARIABLE)
    stamp = time.strftime("%Y-%m-%dT%H%M")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", identity.model).strip("-.")[:60] or "model"
    run_id = f"{stamp}-{slug}"
    if named:
        wanted = Path(named)
        wanted = wanted / LOG_NAME if wanted.is_dir() else wanted
        earlier = wanted if wanted.exists() else None
    else:
        wanted = Path(RUNS_FOLDER) / run_id / LOG_NAME
        earlier = _newest_of(identity) if identity.resumed_from else None
    header = read_header(earlier) if earlier is not None else None
    if earlier is not None and header is not None and identity.continues(header):
        return Place(earlier.resolve(), header.run_id, count_segments(earlier), append=True)
    fresh = _free_name(wanted, by_folder=not named)
    return Place(fresh.resolve(), fresh.parent.name if not named else run_id, 0, append=False)


def count_segments(path: Path) -> int:
    """Count the headers of a log."""
    with path.open("rb") as file:
        return sum(line.startswith(b'{"type":"header"') for line in file)


def _newest_of(identity: Identity) -> Path | None:
    found = []
    for log in Path(RUNS_FOLDER).glob(f"*/{LOG_NAME}"):
        header = read_header(log)
        if header is not None and identity.continues(header):
            found.append((log.stat().st_mtime, log))
    return max(found)[1] if found else None


def _free_name(wanted: Path, *, by_folder: bool) -> Path:
    name, number = wanted, 1
    while name.exists():
        number += 1
        if by_folder:
            name = wanted.parent.with_name(f"{wanted.parent.name}-{number}") / wanted.name
        else:
            name = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return name


def open_writer(place: Place, clock: Callable[[], float]) -> tuple[Place, LogWriter]:
    """Open the log; if another process took the name in the meantime, take the next one."""
    for _ in range(100):
        try:
            return place, LogWriter(place.path, clock, append=place.append)
        except FileExistsError:
            place = Place(_free_name(place.path, by_folder=False), place.run_id, place.segment, append=False)
    raise OSError(f"no free name for a log beside {place.path}")


def for_rank(place: Place, rank: int) -> Place:
    """Return the place of another rank's log beside rank 0's."""
    path = rank_path(place.path, rank)
    return Place(path, place.run_id, place.segment, append=path.exists() and place.append)


def share(place: Place | None, rank: int, key: str) -> Place | None:
    """Tell the other ranks where rank 0 writes, through the job's key-value store.

    Not a collective: a rank without the callback is not waited for, and a rank that hears nothing within
    ``RENDEZVOUS_S`` returns None.
    """
    store = _store()
    if store is None:
        return place
    name = f"ft_insight/{key}"
    if rank == 0 and place is not None:
        store.set(name, f"{place.path}\n{place.run_id}\n{place.segment}\n{int(place.append)}")
        return place
    with contextlib.suppress(Exception):
        store.wait([name], timedelta(seconds=RENDEZVOUS_S))
        path, run_id, segment, append = store.get(name).decode().split("\n")
        return Place(Path(path), run_id, int(segment), bool(int(append)))
    return None


def _store() -> Any:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a run's log is, or will be."""
    return tmp_path / "run.jsonl"

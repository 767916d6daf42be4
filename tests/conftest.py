"""What all tests share."""

from __future__ import annotations

import os

# before torch is loaded, and for the processes that tests start: threads that wait for each other by spinning make
# tests that run side by side many times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import settings

# the same examples on each run of CI: a find of chance belongs to whoever explores, not to an unrelated change
settings.register_profile("ci", derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

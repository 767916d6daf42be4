"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# the same examples on each run of CI: a find of chance belongs to whoever explores, not to an unrelated change
settings.register_profile("ci", derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

"""Draw the dashboard's pages of a run into SVG files, as they stand in the README.

python docs/screenshots.py RUN.jsonl docs
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ft_insight.tui.app import WatchApp

SHOTS = {
    "overview": ("1", (120, 40)),
    "time": ("2", (120, 30)),
    "experts": ("4", (120, 30)),
    "kernels": ("3", (120, 30)),
    "memory": ("6", (120, 40)),
    "cost": ("7", (120, 30)),
}


async def draw(run: Path, folder: Path) -> None:
    for name, (key, size) in SHOTS.items():
        app = WatchApp(run)
        async with app.run_test(size=size) as pilot:
            await pilot.press(key)
            await pilot.pause(1.5)
            (folder / f"{name}.svg").write_text(app.export_screenshot(title=f"ft-insight watch {run.parent.name}"))


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1]), Path(sys.argv[2])))

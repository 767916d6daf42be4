"""ft-insight: where a fine-tune's time, memory and money go, from one Trainer callback.

The public names are imported on first use (PEP 562), so that ``import ft_insight`` costs nothing and loads
neither torch nor textual: a laptop that only watches or projects does not need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_insight.callbacks import FtInsightCallback as FtInsightCallback
    from ft_insight.estimate.plan import plan as plan
    from ft_insight.records import SCHEMA as SCHEMA
    from ft_insight.run import RunState as RunState
    from ft_insight.run_view import RunView as RunView
    from ft_insight.sweeping.run import sweep as sweep

__version__ = "0.1.0"

_HOME = {
    "FtInsightCallback": "ft_insight.callbacks",
    "RunState": "ft_insight.run",
    "RunView": "ft_insight.run_view",
    "SCHEMA": "ft_insight.records",
    "plan": "ft_insight.estimate.plan",
    "sweep": "ft_insight.sweeping.run",
}

__all__ = ["SCHEMA", "FtInsightCallback", "RunState", "RunView", "__version__", "plan", "sweep"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ft_insight' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))

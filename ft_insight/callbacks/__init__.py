"""Everything that runs inside the training process. Imports torch and transformers."""

from __future__ import annotations

from ft_insight.callbacks.guard import FtInsightWarning
from ft_insight.callbacks.insight import FtInsightCallback

__all__ = ["FtInsightCallback", "FtInsightWarning"]

"""What GPUs are and what they cost: published figures and dated cloud prices, bundled and offline.

Everything is read on first use and kept, so importing this package costs nothing; nothing here needs torch.
"""

from __future__ import annotations

from ft_insight.catalog.gpus import Gpu, UnknownGpuError, find_gpu, find_gpus, gpu_for_device, load_gpus
from ft_insight.catalog.price_books import PriceBook, PriceFileError, books, quote_from
from ft_insight.catalog.prices import SNAPSHOT_DATE, Price, PriceQuote, load_prices, quote

__all__ = [
    "SNAPSHOT_DATE",
    "Gpu",
    "Price",
    "PriceBook",
    "PriceFileError",
    "PriceQuote",
    "UnknownGpuError",
    "books",
    "find_gpu",
    "find_gpus",
    "gpu_for_device",
    "load_gpus",
    "load_prices",
    "quote",
    "quote_from",
]

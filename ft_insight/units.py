"""The only formatter of bytes, seconds, rates, shares and money: every reader shows the same figure alike.

None means unmeasured and becomes ``n/a``; it never becomes 0.
"""

from __future__ import annotations

import math

NA = "n/a"

GIB = 1024**3


def duration(seconds: float | None) -> str:
    """Format seconds: ``340 us``, ``12.4 ms``, ``1.84 s``, ``3m 20s``, ``41.3 h``, ``12.1 d``."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{significant(seconds * 1e6)} us"
    if seconds < 0.9995:
        return f"{significant(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{significant(seconds)} s"
    if seconds < 3599.5:
        whole = round(seconds)
        return f"{whole // 60}m {whole % 60:02d}s"
    return _long(seconds / 3600)


def hours(value: float | None) -> str:
    """Format hours: short jobs in minutes or seconds, long ones in hours, very long ones in days."""
    if value is None or not math.isfinite(value):
        return NA
    return duration(value * 3600)


def _long(value: float) -> str:
    return f"{value:.1f} h" if value < 239.95 else f"{value / 24:,.1f} d"


def clock(seconds: float | None) -> str:
    """Format seconds as a running clock: ``12:41``, ``1:02:33``."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def size(count: float | None) -> str:
    """Format bytes in binary units: ``512 B``, ``44.1 GiB``."""
    if count is None or not math.isfinite(count):
        return NA
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 999.5:
            return f"{significant(value)} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


def count(value: float | None) -> str:
    """Format a count with thousands separators: ``15,000``."""
    if value is None or not math.isfinite(value):
        return NA
    return f"{value:,.0f}"


def big(value: float | None) -> str:
    """Format a large count shortly: ``46.7B``, ``13.6M``, ``2,048``."""
    if value is None or not math.isfinite(value):
        return NA
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{significant(value / limit)}{unit}"
    return f"{value:,.0f}"


def significant(value: float) -> str:
    """Format a number with three significant digits, without an exponent down to a millionth."""
    if not math.isfinite(value):
        return NA
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    if abs(value) < 1e-6:
        return f"{value:.2e}"
    rounded = round(value, digits)
    if abs(rounded) >= 100:
        return f"{rounded:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{min(digits, 9)}f}"


def rate(per_second: float | None, what: str = "") -> str:
    """Format a rate: ``1.01 queries/s``."""
    if per_second is None or not math.isfinite(per_second):
        return NA
    text = significant(per_second)
    return f"{text} {what}/s" if what else f"{text}/s"


def share(fraction: float | None) -> str:
    """Format a fraction of 1 as percent: ``0.4%``, ``22%``."""
    if fraction is None or not math.isfinite(fraction):
        return NA
    value = fraction * 100
    if value == 0:
        return "0%"
    if abs(value) < 0.05:
        return "<0.1%"
    if abs(value) < 9.95:
        return f"{value:.1f}%"
    return f"{value:.0f}%"


def money(usd: float | None) -> str:
    """Format dollars: cents up to 100, whole dollars above; tiny sums keep two digits."""
    if usd is None or not math.isfinite(usd):
        return NA
    if usd != 0 and abs(usd) < 0.01:
        return f"${usd:.2g}" if abs(usd) >= 1e-4 else "<$0.0001"
    return f"${usd:,.2f}" if abs(usd) < 100 else f"${usd:,.0f}"


def interval(low: float | None, high: float | None) -> str:
    """Format an interval with as many digits as it deserves: ``[7.6-9.6]``."""
    if low is None or high is None:
        return ""
    return f"[{significant(low)}-{significant(high)}]"

"""The paper's own published figures, in the terms of ``measured.py``. Their source stands in ``published.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
LAYERS = {
    "moe": "MoE",
    "attention": "attention",
    "mamba": "Mamba",
    "input_norm": "norms",
    "post_attention_norm": "norms",
    "rms_norm": "norms",
}
EXPERT_KERNELS = {
    "matmul_w1": "w1 and w3",
    "matmul_w3": "w1 and w3",
    "matmul_w2": "w2",
    "w1_dequant": "dequantise",
    "w2_dequant": "dequantise",
    "w3_dequant": "dequantise",
}
"""Those that run once per expert: of router, softmax and top-k there is one per layer, so that the artifact's
microseconds of a call cannot be added to these."""


def title(model: str, kind: str, name: str) -> str:
    """Return the paper's row that a run compares with; its ``largest`` is that of a 48 GB card."""
    batch = 1 if name == "batch1" else PUBLISHED[model]["largest"][kind]
    return f"paper: {kind}, batch {batch}"


def phases(model: str, kind: str, name: str) -> dict[str, float]:
    """Return shares of forward, backward and optimizer (Fig. 4)."""
    return _shares(_row(model, "phases_s", kind, name), {n: n for n in ("forward", "backward", "optimizer")})


def layers(model: str, kind: str, name: str) -> dict[str, float]:
    """Return shares of the kinds of layers (Fig. 5)."""
    return _shares(_row(model, "layers_s", kind, name), LAYERS)


def expert_forward(model: str, kind: str, name: str) -> dict[str, float]:
    """Return shares of the experts' matrices and their dequantisation, forward (Fig. 6)."""
    return _shares(_row(model, "kernels_us", kind, name), EXPERT_KERNELS)


def use(model: str, kind: str, name: str) -> tuple[float, float]:
    """Return SM and memory use in percent, of the MoE kernels, weighted by time (Fig. 9 and 10)."""
    return _row(model, "sm_percent", kind, name), _row(model, "memory_percent", kind, name)


def _row(model: str, what: str, kind: str, name: str) -> Any:
    return PUBLISHED[model][what][kind]["1" if name == "batch1" else "largest"]


def _shares(parts: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part, value in parts.items():
        if part in names:
            sums[names[part]] = sums.get(names[part], 0.0) + value
    whole = sum(sums.values())
    return {name: value / whole for name, value in sums.items()}

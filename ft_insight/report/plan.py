"""``ft-insight plan``: what a fine-tune would take, as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ft_insight import units
from ft_insight.catalog import find_gpus
from ft_insight.estimate import DEFAULT_GPUS
from ft_insight.report import to_json
from ft_insight.report.layout import Section, to_text
from ft_insight.words import clean

if TYPE_CHECKING:
    from ft_insight.estimate.plan import Fit, Plan


def plan_text(model: str, question: Mapping[str, Any], *, as_json: bool) -> str:
    """Plan a fine-tune and lay it out. ``question`` holds the arguments of `ft_insight.plan`, with GPUs by name.

    Raises ``ValueError`` with one line for whatever cannot be planned.
    """
    gpus = find_gpus(question.get("gpus") or DEFAULT_GPUS)
    try:
        from ft_insight.estimate.plan import plan

        result = plan(model, **{**question, "gpus": gpus})
    except ModuleNotFoundError as error:
        raise ValueError(f"a plan needs {error.name}: pip install 'ft-insight[train]'") from error
    if as_json:
        return to_json(plan_data(result))
    return to_text(headline(result), plan_sections(result))


def plan_data(result: Plan) -> dict[str, Any]:
    """Return a plan as plain data."""
    data: dict[str, Any] = msgspec.to_builtins(result)
    return data


def plan_sections(result: Plan) -> list[Section]:
    """Return the sections of a plan."""
    return [
        _memory(result),
        _work(result),
        _gpus(result),
        Section("Notices", tuple(clean(n, 400) for n in result.notices)),
    ]


def headline(result: Plan) -> str:
    """Say in one line what is planned."""
    kind = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}[result.method]
    trainer = {"sft": "SFTTrainer", "trainer": "Trainer"}[result.trainer]
    return (
        f"{clean(result.model)} · {kind} · batch {result.batch} x {result.seq_len:,} tokens · {trainer} · "
        f"{result.optimizer} · checkpointing {'on' if result.checkpointing else 'off'} · an estimate, nothing was run"
    )


def _memory(result: Plan) -> Section:
    lines = [f"Peak {units.size(result.peak_bytes)} {_around(result.peak_bytes, result)}, allocated by torch"]
    lines.append(
        f"{units.size(result.reserved_bytes)} reserved by its allocator, "
        f"{units.size(result.device_bytes)} on the card with the CUDA context"
    )
    table = [("at the peak", "bytes", "share")]
    table += [(name, units.size(part), units.share(part / result.peak_bytes)) for name, part in result.parts.items()]
    return Section("Memory", tuple(lines), tuple(table))


def _around(nbytes: float, result: Plan) -> str:
    low, high = ((nbytes * (1 + sign * result.error)) / units.GIB for sign in (-1, 1))
    return units.interval(low, high)


def _work(result: Plan) -> Section:
    lines = [
        f"{units.big(result.trainable)} of {units.big(result.parameters)} parameters trained "
        f"({units.share(result.trainable / result.parameters)})"
    ]
    if result.quantised:
        lines.append(
            f"{units.big(result.quantised)} held in 4 bits ({units.share(result.quantised / result.parameters)})"
        )
    lines.append(f"{result.flops_per_token / 1e9:,.1f} GFLOPs a token, forward and backward")
    lines.append(f"architecture: {clean(result.source)}")
    return Section("Work", tuple(lines))


def _gpus(result: Plan) -> Section:
    table: list[tuple[str, ...]] = [("GPU", "memory", f"batch {result.batch}", "largest batch", "80%")]
    table += [_gpu(fit) for fit in result.fits]
    basis = (
        f"the interval holds 80% of {result.error_runs} published runs (within {units.share(result.error)}); "
        "start at its lower end"
    )
    return Section("GPUs", table=tuple(table), after=(basis,))


def _gpu(fit: Fit) -> tuple[str, ...]:
    return (
        fit.gpu,
        units.size(fit.usable_bytes),
        "fits" if fit.fits else "does not fit",
        units.count(fit.largest_batch),
        "" if fit.low is None or fit.high is None else f"[{fit.low:,}-{fit.high:,}]",
    )

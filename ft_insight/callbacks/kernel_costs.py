"""FLOPs and bytes of an operator, from the shapes that the trace states.

FLOPs are told of matrix products, convolutions and attention only: nothing else computes enough to matter. Bytes
are the least that must move, each operand once; caches may save some of it, and bad access costs more.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ft_insight.callbacks.kernel_trace import Op

_SIZES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2, "short int": 2}
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "linear", "_grouped_mm", "_int_mm", "_scaled_mm")
_MOVES_ONLY_ITS_OPERANDS = frozenset(
    {"copy_", "fill_", "zero_", "add_", "mul_", "sub_", "div_", "addcmul_", "addcdiv_"}
)


def charge(ops: list[Op], streaming: set[str]) -> None:
    """Fill in what each operator costs, once: at the innermost one whose shapes tell it.

    ``streaming`` are the names of operators that read their operands and write one result of the largest's size.
    """
    for op in reversed(ops):  # what lies within comes first
        if op.name.startswith("aten::") and not op.annotation:
            _charge(op, op.name.removeprefix("aten::"), streaming)
        if op.parent is not None:
            op.parent.flops_below |= op.flops_below or op.flops is not None
            op.parent.bytes_below |= op.bytes_below or op.bytes is not None


def _charge(op: Op, name: str, streaming: set[str]) -> None:
    shapes = [s for s in op.dims if _is_shape(s)]
    try:
        flops, moved = _flops(name, shapes)
    except (IndexError, TypeError, ValueError):
        return  # a form of it that is not known
    if flops is not None and not op.flops_below:
        op.flops, op.bytes = flops, moved * item_size(op)
    elif flops is None and name in streaming and not op.bytes_below:
        operands = [prod(s) * _SIZES.get(str(t), 1) for s, t in zip(op.dims, op.types, strict=False) if _is_shape(s)]
        if operands:
            op.bytes = sum(operands) + (0 if name in _MOVES_ONLY_ITS_OPERANDS else max(operands))


def item_size(op: Op) -> int:
    """Bytes of one element of its first operand."""
    return _SIZES.get(str(op.types[0]) if op.types else "", 4)


def is_half(op: Op) -> bool:
    """It computes in 16 bits."""
    return any(str(t) in ("c10::Half", "c10::BFloat16") for t in op.types)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(n, int) for n in value)


def _flops(name: str, shapes: list[Any]) -> tuple[float | None, float]:
    """Return FLOPs, and how many elements they read and write."""
    plain = name.rstrip("_")
    if plain in _PRODUCTS:
        return _product(plain, shapes[1:] if plain in ("addmm", "baddbmm") else shapes)
    if name in ("convolution", "_convolution", "conv1d", "mkldnn_convolution", "cudnn_convolution"):
        inputs, kernel = shapes[:2]
        # same length in as out: what a causal convolution pads and cuts is not seen
        positions = inputs[0] * prod(inputs[2:])
        return 2.0 * positions * prod(kernel), prod(inputs) + prod(kernel) + positions * kernel[0]
    if "scaled_dot_product" in name and "math" not in name:
        backward = name.endswith("_backward")
        query, key, value = shapes[1:4] if backward else shapes[:3]
        pairs = prod(query[:-1]) * key[-2]
        # two products forward; backward repeats the first and makes four gradients
        flops = pairs * (6 * query[-1] + 4 * value[-1]) if backward else 2.0 * pairs * (query[-1] + value[-1])
        once = prod(query) * 2 + prod(key) + prod(value)
        return float(flops), once * (2 if backward else 1)
    return None, 0.0


def _product(name: str, shapes: list[Any]) -> tuple[float, float]:
    left, right = shapes[:2]
    elements = prod(left) + prod(right)
    if name == "linear":
        return 2.0 * prod(left) * right[0], elements + prod(left[:-1]) * right[0]
    if name == "mv":
        return 2.0 * prod(left), elements + left[0]
    if name == "_grouped_mm" and len(left) == 2 and len(right) == 2:
        # groups along the summed dimension: each has a result of its own, how many is not in the shapes
        return 2.0 * prod(left) * right[1], elements
    return 2.0 * prod(left) * right[-1], elements + prod(left[:-1]) * right[-1]

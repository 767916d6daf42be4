"""Assigning every operator of a trace to a kind of part, a role and a pass, by who launched it.

A forward operator belongs to the innermost scope around it, a backward one to the scope of the operator whose
gradient it computes, and what a scope opens within backward is recomputation. Within a part, the role follows from
what the operator does; which weight a matmul multiplies with is stated by the scope, never told by order.
"""

from __future__ import annotations

import re

from ft_insight.callbacks.kernel_costs import charge
from ft_insight.callbacks.kernel_names import STREAMING, class_of
from ft_insight.callbacks.kernel_scopes import PREFIX, Scope
from ft_insight.callbacks.kernel_trace import EVALUATE, Op, Trace

_GRAD_OF_SELECTION = re.compile(r"(Select|Slice|Index|Unbind|Gather|Narrow)\w*Backward")


def assign(trace: Trace, scopes: list[Scope]) -> None:
    """Fill in kind, role, pass and cost of all operators."""
    names = {op.name for op in trace.ops}
    classes = {name: class_of(name) for name in names}
    charge(trace.ops, STREAMING)
    judge = _Judge(scopes, classes, trace)
    for op in trace.ops:
        judge.forward(op)
    for op in trace.ops:
        judge.backward(op)


class _Judge:
    def __init__(self, scopes: list[Scope], classes: dict[str, str | None], trace: Trace) -> None:
        self._scopes = scopes
        self._classes = classes
        self._last_made: dict[object, tuple[str, str]] = {}
        self._body_ends = self._ends_of_body(trace)

    def _scope(self, op: Op) -> Scope | None:
        if not op.name.startswith(PREFIX):
            return None
        index = int(op.name.removeprefix(PREFIX))
        return self._scopes[index] if index < len(self._scopes) else None

    def _ends_of_body(self, trace: Trace) -> dict[int, float]:
        """Root scope -> when its last layer or final norm closed: what it computes after that is head and loss."""
        ends: dict[int, float] = {}
        for op in trace.ops:
            scope = self._scope(op)
            if scope is None or scope.kind not in ("layer", "final_norm"):
                continue
            above = op.parent
            while above is not None:
                outer = self._scope(above)
                if outer is not None and outer.kind == "model":
                    ends[id(above)] = max(ends.get(id(above), 0.0), op.end)
                above = above.parent
        return ends

    def forward(self, op: Op) -> None:
        """Judge an operator by the scopes around it; leaves those of backward for later."""
        chain, top = _chain(op)
        if top is not None and top.name.startswith("Optimizer."):
            op.kind, op.role, op.phase = "optimizer", "optimizer", "optimizer"
            op.counted = bool(chain) and chain[-1] is op
            return
        if top is not None and top.name.startswith(EVALUATE):
            # gradients are computed without a graph of their own: what has a number is forward code run again
            if not any(each.seq is not None and each.forward_thread == 0 for each in chain):
                op.phase = "backward"
                return
            op.phase, scope = "recompute", Scope("layer")
            _mark_hosts(op)
        elif top is None:
            op.phase, scope = "outside", Scope("outside")
        else:
            op.phase = "recompute" if _mark_hosts(top) else "forward"
            scope = self._scope(top) or Scope("outside")
            if scope.kind == "model" and op.begin >= self._body_ends.get(id(top), float("inf")):
                scope = Scope("head", matmul="head_matmul")
        op.kind = scope.kind
        if op is top:  # what a scope launches itself
            op.role = scope.forced or scope.matmul or "other"
            return
        cls, counted = self._class(op, chain)
        op.role = scope.forced if scope.forced and cls not in _STRONG else role_of(op, cls, scope)
        op.counted = counted and (cls != "view" or op.role == "view")

    def _class(self, op: Op, chain: list[Op]) -> tuple[str | None, bool]:
        """Return what an operator takes part in, and whether it is the one to count.

        ``chain`` are the operators around it, itself first. A linear layer transposes, multiplies and adds; all of
        it is the layer's matmul. Casting and dequantisation within it are told apart.
        """
        known = [(each, self._classes[each.name]) for each in chain if not each.annotation]
        strong = next(((each, cls) for each, cls in known if cls in _STRONG), None)
        if strong is not None:
            return strong[1], strong[0] is op
        named = [(each, cls) for each, cls in known if cls is not None and "::" in each.name]
        if not named:
            outermost = known[-1] if known else (None, None)
            return outermost[1], outermost[0] is op
        cast = next((each for each, cls in known if cls == "cast"), None)
        if cast is not None and named[-1][1] == "matmul" and named[-1][0] is not cast:
            return "cast", cast is op
        # reshaping may have to copy: then it is the copy that counts
        doing = [each for each in named if each[1] != "view"] or named
        outer, cls = doing[-1]
        if outer.name == "aten::where" and len(outer.dims) == 1:
            cls = "gather"  # of a condition alone: which elements, not a choice between two
        return cls, outer is op

    def backward(self, op: Op) -> None:
        """Judge an operator of backward by the operator whose gradient it computes."""
        if op.phase != "backward":
            return
        chain, node = _chain(op)
        assert node is not None  # noqa: S101 - that made it backward
        cls, counted = self._class(op, [each for each in chain if "::" in each.name] or chain)
        # its node is no call of its own, nor is a reshaping on the way
        op.counted = counted and "::" in op.name and cls not in (None, "view")
        if "AccumulateGrad" in node.name:
            # it runs as soon as its gradient is there: right after the node that made it
            op.kind, op.role = self._last_made.get(op.tid, ("outside", ""))[0], "accumulate"
            return
        maker = node.forward_op
        if maker is None:
            op.kind, op.role = "outside", role_of(op, cls, Scope("outside"))
        else:
            op.kind, op.role = maker.kind, self._gradient_role(op, cls, chain, node, maker)
            op.counted = op.counted and (cls == "matmul" or "matmul" not in op.role)
        if maker is not None:
            self._last_made[op.tid] = op.kind, op.role

    def _gradient_role(self, op: Op, cls: str | None, chain: list[Op], node: Op, maker: Op) -> str:
        if cls in _STRONG:
            return role_of(op, cls, Scope(maker.kind))
        if len(chain) and chain[-1].name in ("aten::add", "aten::add_") and chain[-1].parent is node:
            return "accumulate"  # several users of one tensor: their gradients are summed
        if maker.kind == "outside":
            return "loss"  # computed between model and backward, and part of its graph
        if maker.role == "view":
            if _GRAD_OF_SELECTION.search(node.name):
                return "gather_scatter"
            return "view" if cls in (None, "view") else role_of(op, cls, Scope(maker.kind))
        return maker.role


_STRONG = frozenset({"dequantise", "communication"})


def _chain(op: Op) -> tuple[list[Op], Op | None]:
    """Return the operators from this one outwards, and what they run in: a scope, a node of backward, an optimizer."""
    chain: list[Op] = []
    each: Op | None = op
    while each is not None:
        if each.name.startswith((PREFIX, EVALUATE, "Optimizer.")):
            return chain, each
        chain.append(each)
        each = each.parent
    return chain, None


def _mark_hosts(op: Op) -> bool:
    """Tell whether this runs within backward; what is left of the operators around it is then Python's time."""
    around: list[Op] = []
    each: Op | None = op
    while each is not None:
        if each.name.startswith(EVALUATE):
            for outer in (*around, each):
                outer.hosts = outer.hosts or not outer.name.startswith("aten::")
            return True
        around.append(each)
        each = each.parent
    return False


_GENERAL = {
    "activation": "activation",
    "gather": "gather_scatter",
    "norm": "norm",
    "attention": "attention",
    "softmax": "softmax_topk",
    "embedding": "embedding",
    "loss": "loss",
    "elementwise": "elementwise",
    "optimizer": "optimizer",
    "scan": "mamba_scan",
    "conv": "mamba_convolution",
    "cast": "copy",
    "copy": "copy",
    "view": "view",
    "dequantise": "dequantise",
    "communication": "communication",
}
_OF_KIND = {
    "norm": {"": "norm"},
    "final_norm": {"": "norm"},
    "embedding": {"": "embedding"},
    "router": {"": "softmax_topk", "matmul": "matmul_router"},
    "head": {"": "loss", "matmul": "head_matmul"},
    "mamba": {"elementwise": "mamba_scan", "gather": "mamba_scan", "matmul": "mamba_scan", "": "mamba_scan"},
    "attention": {"matmul": "attention", "softmax": "attention", "gather": "attention"},
    "outside": {"matmul": "other"},
}
_KEPT = frozenset({"view", "copy", "cast", "dequantise", "communication", "conv", "scan"})


def role_of(op: Op, cls: str | None, scope: Scope) -> str:
    """Return the role of an operator that does this within a scope."""
    if cls == "matmul" and scope.matmul:
        return scope.matmul
    if scope.kind == "attention" and cls == "elementwise":
        return "rotary" if _is_rotary(op) else "attention"
    special = _OF_KIND.get(scope.kind, {})
    if cls in special:
        return special[cls]
    if cls in _KEPT or not special.get(""):
        if cls == "matmul":
            return "matmul_experts" if scope.kind in ("experts", "shared_expert", "mlp") else "other"
        return _GENERAL.get(cls or "", "other")
    return special[""]


def _is_rotary(op: Op) -> bool:
    """Tell rotating queries and keys from what is done to scores: cos and sin are the same for all heads."""
    base = op.name.removeprefix("aten::").rstrip("_")
    shapes = [s for s in op.dims if isinstance(s, list) and len(s) == 4]
    if base == "neg":
        return len(shapes) == 1
    if len(shapes) != 2:
        return False
    return shapes[1][1] == 1 if base == "mul" else base in ("add", "sub") and shapes[0] == shapes[1]

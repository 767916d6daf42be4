"""The routers of a model, found from what transformers tells of its classes, or else from their structure.

A router is looked for in this order: a class with an adapter; a class that the model names as the source of its router
logits; beside a module that takes the chosen experts as an argument; beside a list of experts, which are then counted
one by one; beside anything called experts. The last is approximate unless the router turns out to hand over indices.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ft_insight.callbacks.facts import bare_model
from ft_insight.callbacks.router_adapters import INDEX_ARGUMENTS, Choice, Tap, adapter_of, lookup_of

COUNTS = ("num_routed_experts", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "k")
ROUTERS = ("router", "gate", "gating", "wg")
WRAPPERS = frozenset({"base_model", "base_layer", "original_module"})


@dataclass(slots=True)
class Router:
    """One router of the model, by its name in it, and how many experts it chooses from."""

    name: str
    module: nn.Module
    experts: int
    tap: Tap
    choice: Choice
    masked: bool = True
    """Whether the attention mask of the model's input is that of the tokens it routes."""

    @property
    def method(self) -> str:
        """Return ``exact`` or ``approximate``, which may be known only once it was called."""
        return self.choice.method


def plain_name(name: str) -> str:
    """Return the name that the module has in the bare model: without what PEFT wraps around it."""
    parts = [p for p in name.split(".") if p not in WRAPPERS]
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        del parts[at : at + 2]  # and the name of the adapter
    while len(parts) > 1 and parts[0] == "model" and parts[1] == "model":
        parts = parts[1:]
    return ".".join(parts)


def find_routers(model: nn.Module) -> list[Router]:
    """Find all routers, in the order in which the model defines them. Nothing is changed in the model."""
    return _Search(model).run()


class _Search:
    def __init__(self, model: nn.Module) -> None:
        bare = bare_model(model)
        self._config = _text_config(bare)
        self._modules = [(plain_name(name), module) for name, module in bare.named_modules()]
        self._outer = dict(reversed(self._modules))
        """By name: the outermost of what PEFT wraps around a module, which is called whatever is active within."""
        self._order = {id(module): place for place, (_, module) in enumerate(self._modules)}
        self._blocks: dict[str, dict[str, nn.Module]] = {}
        for name, module in self._modules:
            block, _, child = name.rpartition(".")
            # the outermost of what PEFT wraps around a child comes first
            self._blocks.setdefault(block, {}).setdefault(child, module)
        self._registry = tuple(_registry(model))
        self._encoder_decoder = bool(getattr(getattr(bare, "config", None), "is_encoder_decoder", False))
        self._arguments = {
            name: (module, argument)
            for name, module in self._modules
            if (argument := _index_argument(module)) is not None and not adapter_of(module)
        }
        self._found: dict[str, list[Router]] = {}

    def run(self) -> list[Router]:
        for name, module in self._modules:
            block = name.rpartition(".")[0]
            self._by_class(block, name, module)
        claimed = set(self._found)
        for name, (module, argument) in self._arguments.items():
            block = name.rpartition(".")[0]
            nested = any(name.startswith(f"{other}.") for other in self._arguments)
            if block not in claimed and not nested:
                self._by_argument(block, name, module, argument)
        for block in self._blocks:
            if block not in self._found:
                self._by_structure(block)
        routers = [router for found in self._found.values() for router in found]
        return sorted(routers, key=lambda router: self._order[id(router.module)])

    def _experts(self, block: str) -> tuple[str, nn.Module | None]:
        """Return what holds the experts of a block, the outermost where it is wrapped."""
        for child, module in self._blocks.get(block, {}).items():
            if "expert" in child and "shared" not in child:
                return f"{block}.{child}" if block else child, module
        return "", None

    def _add(self, block: str, name: str, module: nn.Module, experts: int, tap: Tap, choice: Choice) -> None:
        # the mask that a model of two parts is called with is that of its encoder
        masked = not (self._encoder_decoder and "decoder" in name.split("."))
        found = self._found.setdefault(block, [])
        if all(router.name != name for router in found):
            found.append(Router(name, module, experts, tap, choice, masked))

    def _by_class(self, block: str, name: str, module: nn.Module) -> None:
        reader, lookup = adapter_of(module), lookup_of(module)
        holder, holding = self._experts(block)
        if lookup is not None:
            router, table = (getattr(module, child) for child in lookup)
            count = _count(None, module, self._config)
            if count:
                choice = Choice(count, argument=("input", 0))
                self._add(name, f"{name}.{lookup[0]}", router, count, Tap(argument=table), choice)
            return
        if reader is None and not (isinstance(module, self._registry) and not self._contains_experts(name)):
            return
        count = _count(holding, module, self._config)
        if not count:
            return
        inner, argument = self._arguments.get(holder, (None, None)) if reader is None else (None, None)
        k = _chosen(module, self._config) if inner is None else None
        choice = Choice(count, reader=reader, argument=argument, k=k)
        outer = self._outer[name]
        self._add(block, name, outer, count, Tap(output=outer, argument=inner), choice)

    def _contains_experts(self, name: str) -> bool:
        """Tell whether this is a whole block, its router being somewhere in it."""
        return any(other.startswith(f"{name}.") for other in self._arguments)

    def _by_argument(self, block: str, name: str, module: nn.Module, argument: tuple[str, int]) -> None:
        count = _count(module, None, self._config)
        if not count:
            return
        label, router = self._router(block)
        if router is None:  # the block itself stands for the router that it does not have
            label, router = block, self._outer.get(block, module)
        self._add(block, label, router, count, Tap(argument=module), Choice(count, argument=argument))

    def _router(self, block: str) -> tuple[str, nn.Module | None]:
        children = self._blocks.get(block, {})
        child = next((n for n in ROUTERS if n in children), None)
        return (f"{block}.{child}" if block else child, children[child]) if child is not None else ("", None)

    def _by_structure(self, block: str) -> None:
        label, router = self._router(block)
        _, holding = self._experts(block)
        if router is None or holding is None:
            return
        listed = _listed(holding)
        count = len(listed) or _count(holding, router, self._config)
        if not count:
            return
        home = self._outer.get(block)
        k = (_chosen(home, None) if home is not None else None) or _chosen(router, self._config)
        if listed:
            self._add(block, label, router, count, Tap(output=router, experts=listed), Choice(count, elsewhere=True))
        elif k is not None and _weights(holding):
            self._add(block, label, router, count, Tap(output=router), Choice(count, k=min(k, count)))


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    read = getattr(config, "get_text_config", None)
    return read() if callable(read) else config


def _registry(model: nn.Module) -> Iterator[type[nn.Module]]:
    for module in model.modules():
        registry = getattr(type(module), "_can_record_outputs", None)
        entry = registry.get("router_logits") if isinstance(registry, Mapping) else None
        for item in entry if isinstance(entry, list | tuple) else [entry]:
            target = getattr(item, "target_class", item)
            if isinstance(target, type) and issubclass(target, nn.Module):
                yield target


def _index_argument(module: nn.Module) -> tuple[str, int] | None:
    """Return name and place of the argument that tells a module which experts were chosen."""
    names = _parameters(type(module))
    return next(((name, names.index(name)) for name in INDEX_ARGUMENTS if name in names), None)


_SIGNATURES: dict[type, tuple[str, ...]] = {}


def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    if kind not in _SIGNATURES:
        try:
            names = tuple(inspect.signature(kind.forward).parameters)[1:]
        except (TypeError, ValueError):
            names = ()
        _SIGNATURES[kind] = names
    return _SIGNATURES[kind]


def _integer(owner: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _chosen(module: nn.Module, config: Any) -> int | None:
    return _integer(module, CHOSEN) or _integer(config, CHOSEN)


def _count(holding: nn.Module | None, router: nn.Module | None, config: Any) -> int | None:
    """Count the experts that compute. A router may choose from more: some that do nothing, or shared ones."""
    for module in holding.modules() if holding is not None else ():
        stacks = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
        count = _integer(module, COUNTS) or (min(stacks) if stacks else None) or len(_listed(module))
        if count:
            return count
    weight = getattr(router, "weight", None)
    rows = int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
    return _integer(router, COUNTS) or rows or _integer(config, COUNTS)


def _listed(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the experts of a list of two or more of the same class."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return ()
    experts = tuple(module.children())
    same = len(experts) > 1 and len({type(e) for e in experts}) == 1
    return experts if same and _weights(experts[0]) else ()


def _weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())

"""How a router's choice is read from what it hands over: at which modules to listen, and what to make of it.

Nearly all families of transformers hand over the indices of the chosen experts. The few that do not have an adapter
here, by class name, so that none of them need be imported. A choice is always an integer tensor (tokens, choices);
what is below 0, or not below the number of experts, stands for a choice that no expert computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ft_insight.callbacks.guard import inert

Hook = Callable[..., None]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)

EXACT, APPROXIMATE = "exact", "approximate"
OUTPUT, ARGUMENT = "output", "argument"


class UnreadableError(TypeError):
    """A router of an unknown kind, which hands over nothing that tells its choice."""


class Heard(NamedTuple):
    """What was heard at one of several modules: which one (or the number of an expert), and its arguments or output."""

    source: str | int
    value: Any


def _inert() -> Hook:
    return inert


class Relay:
    """A module hook that tells the real one where it heard what. A copy of the model gets a hook that does nothing."""

    def __init__(self, hook: Hook, source: str | int) -> None:
        self._hook = hook
        self._source = source

    def __call__(self, module: nn.Module, args: Any, value: Any) -> None:
        """Pass on; ``value`` is the output, or the named arguments where this is a hook before the call."""
        self._hook(module, (), Heard(self._source, value if self._source == OUTPUT else (args, value)))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _inert, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return inert


class Handles:
    """Several hooks to be removed as one."""

    def __init__(self) -> None:
        self.by_source: dict[str | int, Any] = {}

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self.by_source.values():
            handle.remove()


@dataclass(slots=True)
class Tap:
    """All places where one router is listened to."""

    output: nn.Module | None = None
    """Module whose output tells."""
    argument: nn.Module | None = None
    """Module whose arguments tell."""
    experts: tuple[nn.Module, ...] = ()
    """Modules that are each called with the tokens of one expert."""
    _handles: list[Handles] = field(default_factory=list)

    def listen(self, hook: Hook) -> Handles:
        """Call ``hook(module, (), heard)`` for all that is heard, at each of the places."""
        handles = Handles()
        if self.output is not None:
            handles.by_source[OUTPUT] = self.output.register_forward_hook(Relay(hook, OUTPUT))
        places: dict[str | int, nn.Module] = dict(enumerate(self.experts))
        if self.argument is not None:
            places[ARGUMENT] = self.argument
        for source, module in places.items():
            relay = Relay(hook, source)
            handles.by_source[source] = module.register_forward_pre_hook(relay, with_kwargs=True)
        self._handles.append(handles)
        return handles

    def keep(self, source: str | int) -> None:
        """Listen only there from now on. Said again, it takes away what somebody has put back since."""
        for handles in self._handles:
            for other, handle in handles.by_source.items():
                if other != source:
                    handle.remove()


Reader = Callable[[Any, int], torch.Tensor]
"""Reads a choice from the output of a router with so many experts."""


def read_mask(mask: torch.Tensor) -> torch.Tensor:
    """Read a mask (..., experts): one column for each expert, -1 where it is not chosen."""
    mask = mask.reshape(-1, mask.shape[-1]).ne(0)
    numbers = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, numbers, -1)


def _llama4(output: Any, experts: int) -> torch.Tensor:
    # all experts multiply all tokens, those that are not theirs having been scaled to zero by these scores
    return read_mask(output[0])


def _switch(output: Any, experts: int) -> torch.Tensor:
    return read_mask(output[0])  # a row of zeros is a token beyond its expert's capacity


def _nllb(output: Any, experts: int) -> torch.Tensor:
    # its experts (transformers 5.24) take the entries of the one-hot mask for indices, so that only two of them ever
    # compute; what they compute is what counts here
    mask: torch.Tensor = output[0]
    return mask


def _jetmoe(output: Any, experts: int) -> torch.Tensor:
    # slots sorted by expert, and how many each expert takes of them
    slots, _, _, sizes, logits = output
    numbers = torch.repeat_interleave(torch.arange(experts), torch.tensor(sizes), output_size=slots.numel())
    chosen = torch.empty_like(slots).scatter_(0, slots, numbers.to(slots.device, non_blocking=True))
    return chosen.view(logits.shape[0], -1)


def _zaya(output: Any, experts: int) -> torch.Tensor:
    # a token that skips the experts has been rewritten to expert 0 with weight 0
    _, weights, chosen, *_ = output
    return torch.where(weights.eq(0), -1, chosen)


ADAPTERS: dict[str, Reader] = {
    "JetMoeTopKGating": _jetmoe,
    "Llama4Router": _llama4,
    "NllbMoeTop2Router": _nllb,
    "SwitchTransformersTop1Router": _switch,
    "ZayaRouter": _zaya,
}
"""By class of the router: how to read its output."""

LOOKUPS = {"DogeCDMoE": ("router_gate", "down_embed")}
"""By class of the block whose experts are rows of a table: its router, and the table that is asked for the chosen."""

INDEX_ARGUMENTS = (
    "top_k_index",
    "top_k_indices",
    "topk_indices",
    "topk_idx",
    "topk_ids",
    "selected_experts",
    "expert_indices",
    "expert_index",
    "router_indices",
    "routing_indices",
)
"""What modules that hold all experts call the argument with the chosen ones."""


def adapter_of(module: nn.Module) -> Reader | None:
    """Return the adapter for a router of this class."""
    return next((ADAPTERS[c.__name__] for c in type(module).__mro__ if c.__name__ in ADAPTERS), None)


def lookup_of(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of router and table in a block whose experts are rows of a table."""
    return next((LOOKUPS[c.__name__] for c in type(module).__mro__ if c.__name__ in LOOKUPS), None)


class Choice:
    """Reads the choice of one router from whatever is heard of it. Where it stands is decided at the first call."""

    def __init__(
        self,
        experts: int,
        *,
        reader: Reader | None = None,
        argument: tuple[str, int] | None = None,
        k: int | None = None,
        elsewhere: bool = False,
    ) -> None:
        """With ``k`` the best scores may be taken for the choice; ``elsewhere``: the output need not hold any."""
        self.method = EXACT
        self._experts = experts
        self._reader = reader
        self._argument = argument
        self._k = k
        self._elsewhere = elsewhere or argument is not None
        self._place: tuple[int, bool] | None = None
        self._source: str | int | None = OUTPUT if reader is not None else None

    @property
    def source(self) -> str | int | None:
        """Where the choice is read; None until that is known."""
        return self._source

    def read(self, heard: Heard) -> torch.Tensor | None:
        """Return the choice, or None if it is told elsewhere."""
        if self._source is not None and heard.source != self._source:
            return None
        parts = self._parts(heard)
        if self._source is None:
            self._decide(heard.source, parts)
            if self._source is None:
                return None
        if self._reader is not None:
            return self._reader(heard.value, self._experts)
        return self._take(parts)

    def _parts(self, heard: Heard) -> tuple[Any, ...]:
        if heard.source == OUTPUT:
            return tuple(heard.value) if isinstance(heard.value, tuple | list) else (heard.value,)
        args, named = heard.value
        name, position = self._argument or ("", 0)
        return (named[name] if name in named else args[position],)

    def _decide(self, source: str | int, parts: tuple[Any, ...]) -> None:
        place = next(iter(_places(parts, self._experts)), None)
        if place is not None:
            self._place = place, _is_mask(parts[place], self._experts)
        elif source == OUTPUT and self._elsewhere:
            return
        elif self._k is not None:
            place = next((i for i, p in enumerate(parts) if _is_scores(p, self._experts)), None)
            self.method = APPROXIMATE
        if place is None:
            raise UnreadableError("a router hands over no expert indices")
        if self._place is None:
            self._place = place, False
        self._source = source

    def _take(self, parts: tuple[Any, ...]) -> torch.Tensor:
        assert self._place is not None  # noqa: S101 - decided before
        place, is_mask = self._place
        part: torch.Tensor = parts[place].detach()
        if self.method == APPROXIMATE and self._k is not None:
            return part.reshape(-1, part.shape[-1]).topk(self._k, dim=-1).indices
        if is_mask:
            return read_mask(part)
        return part if part.dim() > 1 else part.unsqueeze(-1)


def _places(parts: tuple[Any, ...], experts: int) -> Iterator[int]:
    """Yield where expert indices may stand, the likeliest first: where nearly all families have them."""
    for place in sorted(range(len(parts)), key=lambda i: (i != 2, i)):
        part = parts[place]
        if not isinstance(part, torch.Tensor):
            continue
        width = part.shape[-1] if part.dim() >= 2 else 1 if len(parts) == 1 and part.dim() == 1 else experts + 1
        if width == experts if part.dtype == torch.bool else part.dtype in INTEGERS and width <= experts:
            yield place


def _is_mask(part: torch.Tensor, experts: int) -> bool:
    """Tell a mask over the experts from their indices, by value: the one time that anything waits for the device."""
    if part.dtype == torch.bool:
        return True
    if part.dim() < 2 or part.shape[-1] != experts:
        return False
    if experts <= 2:
        return bool((part.sum(-1) != experts - 1).any())  # 0 or, in either order, 0 and 1: all of them as indices
    return bool((part <= 1).all())


def _is_scores(part: Any, experts: int) -> bool:
    return isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1] == experts

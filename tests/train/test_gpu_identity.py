"""Which GPUs a run has: what CUDA makes of its environment, as torch passes it on, decides; never a number.

Without a GPU, CUDA is modelled here: it numbers what ``CUDA_VISIBLE_DEVICES`` names in that order, by PCI address or
fastest first, and torch hands on the identity of each. ``tests/fakes/nvml.c`` has the same cards.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ft_insight.callbacks import facts
from tests.train.nvml_library import FIRST, SECOND, Cases, samples_of

BUSY = {FIRST: 5, SECOND: 71}
"""What the stand-in says of each one's utilisation."""
# by PCI address; CUDA's own order has the faster one, the second, first
CARDS = [(FIRST, 0x01, "a slow GPU"), (SECOND, 0x41, "a fast GPU")]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make torch see what CUDA would make of an environment."""

    def see(visible: str | None, order: str = "FASTEST_FIRST", *, uuids: bool = True, pci: bool = True) -> list[str]:
        cards = CARDS if order == "PCI_BUS_ID" else CARDS[::-1]
        seen = cards if visible is None else [_named(cards, name) for name in visible.split(",") if name]

        def properties(index: int) -> Any:
            uuid, bus, name = seen[index]
            known: dict[str, Any] = {"name": name, "total_memory": 48 << 30, "multi_processor_count": 84}
            known |= {"major": 8, "minor": 6}
            known |= {"uuid": uuid} if uuids else {}
            known |= {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0} if pci else {}
            return SimpleNamespace(**known)

        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return [uuid for uuid, _, _ in seen]

    return see


def _named(cards: list[tuple[str, int, str]], name: str) -> tuple[str, int, str]:
    if name.isdigit():
        return cards[int(name)]
    return next(card for card in cards if f"GPU-{card[0]}".startswith(name))


def run_devices(model: nn.Module | None = None, index: int | None = 0, **args: Any) -> tuple[Any, ...]:
    device = torch.device("cuda", index) if index is not None else torch.device("cuda")
    return facts.devices(SimpleNamespace(device=device, **args), model or nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("visible", "order", "wanted"),
    [
        (None, "FASTEST_FIRST", SECOND),
        (None, "PCI_BUS_ID", FIRST),
        ("0", "PCI_BUS_ID", FIRST),
        ("1", "PCI_BUS_ID", SECOND),
        ("1,0", "PCI_BUS_ID", SECOND),
        ("1", "FASTEST_FIRST", FIRST),
        (f"GPU-{SECOND}", "PCI_BUS_ID", SECOND),
        ("GPU-1111,GPU-2222", "FASTEST_FIRST", FIRST),
    ],
)
def test_the_gpu_that_cuda_computes_on_is_sampled(
    cases: Cases, library: Path, cuda: Any, visible: str | None, order: str, wanted: str
) -> None:
    cuda(visible, order)
    devices = run_devices()
    assert [d.uuid for d in devices] == [wanted]
    result = cases.run(library, devices=[{"uuid": d.uuid, "pci": d.pci} for d in devices])
    assert samples_of(result)[0]["gpu_percent"] == BUSY[wanted]


@pytest.mark.parametrize(("uuids", "pci"), [(True, False), (False, True)])
def test_a_torch_that_knows_one_identity_only(cases: Cases, library: Path, cuda: Any, uuids: bool, pci: bool) -> None:
    cuda("1", "PCI_BUS_ID", uuids=uuids, pci=pci)
    (device,) = run_devices()
    assert (device.uuid is None, device.pci is None) == (not uuids, not pci)
    assert device.pci in (None, "0000:41:00.0")
    result = cases.run(library, devices=[{"uuid": device.uuid, "pci": device.pci}])
    assert samples_of(result)[0]["gpu_percent"] == BUSY[SECOND]


def test_without_any_identity_none_is_guessed(cases: Cases, library: Path, cuda: Any) -> None:
    cuda("1", uuids=False, pci=False)
    (device,) = run_devices()
    assert device.uuid is None
    assert device.pci is None
    result = cases.run(library, devices=[{}])
    assert all(not record[0] for record in result["records"])
    assert "NVML does not know GPU a GPU" in result["told"][0][0]


def test_an_empty_list_of_gpus_is_a_run_on_the_cpu() -> None:
    device = facts.devices(SimpleNamespace(device=torch.device("cpu")), nn.Linear(1, 1))
    assert [d.kind for d in device] == ["cpu"]


def test_a_device_map_over_several_gpus(cuda: Any) -> None:
    cuda(None)
    model = nn.Linear(1, 1)
    model.hf_device_map = {
        "layers.0": 0,
        "layers.1": "cuda:1",
        "head": torch.device("cuda", 0),
        "rest": "cpu",
        "d": "disk",
    }
    assert [d.uuid for d in run_devices(model)] == [SECOND, FIRST]


def test_replicas_but_not_of_a_quantised_model(cuda: Any) -> None:
    cuda(None)
    model = nn.Linear(1, 1)
    assert len(run_devices(model, n_gpu=2)) == 2
    model.is_loaded_in_4bit = True
    assert len(run_devices(model, n_gpu=2)) == 1


def test_the_second_process_of_a_node_has_the_second_gpu(cuda: Any) -> None:
    cuda(None, "PCI_BUS_ID")
    assert [d.uuid for d in run_devices(index=1)] == [SECOND]
    assert [d.uuid for d in run_devices(index=None)] == [FIRST]


def test_the_header_says_which(cuda: Any) -> None:
    cuda("1", "PCI_BUS_ID")
    (device,) = run_devices()
    assert msgspec.to_builtins(device) == {
        "kind": "cuda",
        "name": "a fast GPU",
        "index": 0,
        "uuid": SECOND,
        "pci": "0000:41:00.0",
        "memory_bytes": 48 << 30,
        "sm_count": 84,
        "capability": "8.6",
    }

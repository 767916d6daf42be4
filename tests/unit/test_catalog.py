"""The bundled GPU figures and prices: right values, right names, and refusals instead of guesses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ft_insight.catalog import (
    SNAPSHOT_DATE,
    Gpu,
    Price,
    UnknownGpuError,
    find_gpu,
    gpu_for_device,
    load_gpus,
    load_prices,
    prices,
    quote,
)
from ft_insight.catalog.gpus import USABLE_GIB_PER_MARKETING_GB, _device_key, _key

MIB = 1024**2
GIB = 1024**3
SHARED_GPUS = Path(__file__).resolve().parents[2].parent / "shared" / "field" / "gpus.json"

# name -> GB/s, dense bf16 TFLOPS, marketing GB; typed from the makers' data sheets, not from the catalogue
PUBLISHED = {
    "A100-80GB-SXM": (2039, 312, 80),
    "A100-80GB-PCIe": (1935, 312, 80),
    "A100-40GB-SXM": (1555, 312, 40),
    "H100-80GB-SXM": (3350, 989, 80),
    "H100-80GB-PCIe": (2000, 756, 80),
    "H200-SXM": (4800, 989, 141),
    "A40": (696, 149.7, 48),
    "L40S": (864, 362, 48),
    "L4": (300, 121, 24),
    "RTX 4090": (1008, 165, 24),
    "MI300X": (5300, 1307, 192),
}

RESOLVES = {
    "h100": "H100-80GB-SXM",
    "H100-SXM": "H100-80GB-SXM",
    "h100_sxm5": "H100-80GB-SXM",
    "h100 pcie": "H100-80GB-PCIe",
    "H100 NVL": "H100-NVL",
    "NVIDIA H100 80GB HBM3": "H100-80GB-SXM",
    "a100": "A100-80GB-SXM",
    "a100-80": "A100-80GB-SXM",
    "a100 80gb": "A100-80GB-SXM",
    "A100 (80GB)": "A100-80GB-SXM",
    "A100-80G": "A100-80GB-SXM",
    "A100 40G": "A100-40GB-SXM",
    "1xA100": "A100-80GB-SXM",
    "1x RTX 4090": "RTX 4090",
    "a100-40": "A100-40GB-SXM",
    "A100-40GB": "A100-40GB-SXM",
    "a100 pcie": "A100-80GB-PCIe",
    "A100 PCIe 40GB": "A100-40GB-PCIe",
    "NVIDIA A100-SXM4-80GB": "A100-80GB-SXM",
    "NVIDIA A100-SXM4-40GB": "A100-40GB-SXM",
    "a10": "A10",
    "a10g": "A10G",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "a40": "A40",
    "h200": "H200-SXM",
    "b200": "B200-SXM",
    "gb200": "GB200",
    "gh200": "GH200-96GB",
    "mi300x": "MI300X",
    "AMD Instinct MI300X": "MI300X",
    "4090": "RTX 4090",
    "rtx4090": "RTX 4090",
    "  GeForce RTX-4090 ": "RTX 4090",
    "v100": "V100-SXM2-16GB",
    "V100 32GB": "V100-SXM2-32GB",
    "t4": "T4",
    "a6000": "RTX A6000",
    "rtx 6000 ada": "RTX 6000 Ada",
    "RTX PRO 6000": "RTX PRO 6000 Blackwell",
}

# what the driver says, total memory in MiB as NVML or torch gives it -> catalogue name
DEVICES = [
    ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB-SXM"),
    ("NVIDIA A100-SXM4-40GB", None, "A100-40GB-SXM"),
    ("A100-SXM4-40GB", 40537, "A100-40GB-SXM"),
    ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB-PCIe"),
    ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB-SXM"),
    ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB-PCIe"),
    ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB-SXM"),
    ("NVIDIA H100 PCIe", 81559, "H100-80GB-PCIe"),
    ("NVIDIA H100 NVL", 95830, "H100-NVL"),
    ("NVIDIA H200", 143771, "H200-SXM"),
    ("NVIDIA H200 NVL", 143771, "H200-NVL"),
    ("NVIDIA GH200 480GB", 97871, "GH200-96GB"),
    ("NVIDIA B200", 183359, "B200-SXM"),
    ("Tesla T4", 14930, "T4"),
    ("Tesla T4", 15360, "T4"),
    ("Tesla V100-SXM2-16GB", 16160, "V100-SXM2-16GB"),
    ("Tesla V100-SXM2-32GB", 32510, "V100-SXM2-32GB"),
    ("Tesla V100-PCIE-16GB", 16384, "V100-PCIe-16GB"),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090"),
    ("NVIDIA GeForce RTX 3090", 24576, "RTX 3090"),
    ("NVIDIA RTX A6000", 49140, "RTX A6000"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX 6000 Ada"),
    ("NVIDIA L4", 23034, "L4"),
    ("NVIDIA L40S", 45466, "L40S"),
    ("NVIDIA A40", 45466, "A40"),
    ("NVIDIA A10G", 22528, "A10G"),
    ("NVIDIA A10", 23028, "A10"),
    ("AMD Instinct MI300X", 196592, "MI300X"),
    # slices, laptops, other variants, memory that contradicts the name, and what is not known
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, None),
    ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 81000, None),
    ("NVIDIA A100-SXM4-40GB", 4864, None),
    ("NVIDIA A100-SXM4-40GB", 81920, None),
    ("NVIDIA H100 80GB HBM3", 40000, None),
    ("NVIDIA H100 PCIe", 0, None),
    ("Tesla V100-SXM2-16GB", 32510, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
    ("RTX 4090 Laptop GPU", None, None),
    ("NVIDIA GeForce RTX 4090 D", 24564, None),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, None),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, None),
    ("Quadro RTX 8000 with Max-Q Design", 49152, None),
    ("NVIDIA A40-48Q", 49152, None),
    ("GRID A100-40C", 40960, None),
    ("NVIDIA A100", 81920, None),
    ("NVIDIA H800", 81559, None),
    ("AMD Instinct MI250X", 65520, None),
    ("AMD Instinct MI250X", None, None),
    ("h100", None, None),
    ("", None, None),
    ("cpu", None, None),
]


def test_catalogue_is_complete_and_each_gpu_is_sound() -> None:
    gpus = load_gpus()
    assert len(gpus) >= 25
    assert len({gpu.name for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert gpu.source.strip(), gpu.name
        assert gpu.vendor in {"NVIDIA", "AMD"}
        assert gpu.architecture
        assert gpu.compute_capability
        always = (gpu.memory_gb, gpu.bandwidth_gbs, gpu.fp16_tflops, gpu.fp32_tflops, gpu.sm_count, gpu.tdp_w)
        where_known = (gpu.usable_memory_gib, gpu.bf16_tflops, gpu.tf32_tflops, gpu.fp8_tflops)
        assert all(figure > 0 for figure in always), gpu.name
        assert all(figure is None or figure > 0 for figure in where_known), gpu.name
        assert gpu.nvlink_gbs is None or gpu.nvlink_gbs >= 0  # 0: the card has no NVLink
        assert gpu.matmul_tflops > gpu.fp32_tflops * 0.99
        if gpu.measured_bf16_tflops is not None:
            assert 0 < gpu.measured_bf16_tflops < gpu.matmul_tflops, gpu.name


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_published_figures(name: str, published: tuple[float, float, float]) -> None:
    gpu = find_gpu(name)
    assert gpu.bf16_tflops is not None
    assert gpu.bandwidth_gbs == published[0]
    assert int(gpu.bf16_tflops) == int(published[1])
    assert gpu.memory_gb == published[2]


@pytest.mark.parametrize(("name", "fp16"), [("T4", 65), ("V100-SXM2-16GB", 125), ("V100-PCIe-32GB", 112)])
def test_cards_without_bf16_train_in_fp16(name: str, fp16: float) -> None:
    gpu = find_gpu(name)
    assert gpu.bf16_tflops is None
    assert gpu.matmul_tflops == fp16


def test_usable_memory_is_the_noted_figure_or_below_every_noted_share() -> None:
    assert find_gpu("A100-80GB-SXM").usable_memory_bytes == int(79.1 * 1024**3)
    assert find_gpu("A40").usable_memory_bytes == int(44.4 * 1024**3)
    a6000 = find_gpu("RTX A6000")
    assert a6000.usable_memory_gib is None
    assert a6000.usable_memory_bytes == pytest.approx(43.68 * GIB)  # 48 x 0.91
    noted = {gpu.name: gpu.usable_memory_gib / gpu.memory_gb for gpu in load_gpus() if gpu.usable_memory_gib}
    assert set(noted) == {
        "T4",
        "A10G",
        "A40",
        "L40S",
        "RTX 4090",
        "A100-80GB-PCIe",
        "A100-80GB-SXM",
        "H100-80GB-PCIe",
        "H100-80GB-SXM",
    }
    assert 0 <= min(noted.values()) - USABLE_GIB_PER_MARKETING_GB < 0.01


@pytest.mark.parametrize(("typed", "name"), RESOLVES.items())
def test_typed_names_resolve(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


def test_every_name_and_alias_resolves_to_its_own_gpu() -> None:
    owner: dict[str, str] = {}
    for gpu in load_gpus():
        for each in (gpu.name, gpu.name.lower(), gpu.name.upper(), *gpu.device_names, *gpu.aliases):
            assert find_gpu(each) is gpu
            assert owner.setdefault(_key(each), gpu.name) == gpu.name, f"{each} stands for two GPUs"


@pytest.mark.parametrize(
    "typed",
    [
        "h10", "h1000", "a1", "a1000", "l", "v10", "409", "rtx", "rtx 6000", "6000", "a100 64gb", "a100x",
        "8x h100", "h100 16gb", "b100", "h800", "mi300", "mi250", "rtx 4090 laptop gpu", "4090 d", "80gb",
        "sxm", "cpu", "nvidia", "geforce", "", "   ", "-", "a100;", "A100\n8", "x" * 10_000,
    ],
)  # fmt: skip
def test_unsure_names_are_refused_in_one_line(typed: str) -> None:
    with pytest.raises(UnknownGpuError) as caught:
        find_gpu(typed)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in message
    assert len(message) < 250
    assert "`ft-insight prices` names all" in message


def test_refusal_suggests_at_most_three_known_names() -> None:
    with pytest.raises(UnknownGpuError, match="unknown GPU 'h10': did you mean ") as caught:
        find_gpu("h10")
    suggested = str(caught.value).split("did you mean ")[1].split("?")[0].split(", ")
    assert 1 <= len(suggested) <= 3
    assert len(set(suggested)) == len(suggested)
    assert "H100-80GB-SXM" in suggested
    assert all(find_gpu(name).name == name for name in suggested)
    with pytest.raises(UnknownGpuError) as caught:
        find_gpu("zzzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(("reported", "mib", "name"), DEVICES)
def test_reported_devices(reported: str, mib: int | None, name: str | None) -> None:
    gpu = gpu_for_device(reported, None if mib is None else mib * MIB)
    assert (None if gpu is None else gpu.name) == name


def test_no_reported_name_stands_for_two_gpus() -> None:
    owner: dict[str, str] = {}
    for gpu in load_gpus():
        for reported in gpu.device_names:
            assert owner.setdefault(_device_key(reported), gpu.name) == gpu.name
            assert gpu_for_device(reported, None) is gpu
            assert gpu_for_device(reported, gpu.usable_memory_bytes) is gpu


def test_memory_tells_variants_of_one_reported_name_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = find_gpu("V100-SXM2-16GB"), find_gpu("V100-SXM2-32GB")
    monkeypatch.setattr("ft_insight.catalog.gpus._by_device_name", lambda: {"v100": (small, large)})
    assert gpu_for_device("NVIDIA V100", 16160 * MIB) is small
    assert gpu_for_device("NVIDIA V100", 32510 * MIB) is large
    assert gpu_for_device("NVIDIA V100", 24 * GIB) is None
    assert gpu_for_device("NVIDIA V100", None) is None


def test_every_price_is_positive_dated_sourced_and_of_a_known_gpu() -> None:
    offers = load_prices()
    assert len(offers) >= 190
    assert SNAPSHOT_DATE == "2026-11-30"
    for offer in offers:
        assert offer.usd_per_gpu_hour > 0
        assert offer.gpu_count >= 1
        assert offer.usd_per_gpu_hour_spot is None or 0 < offer.usd_per_gpu_hour_spot < offer.usd_per_gpu_hour
        assert offer.date.strip()
        assert offer.source.strip()
        assert offer.provider.strip()
        assert find_gpu(offer.gpu).name == offer.gpu


def test_prices_are_per_gpu() -> None:
    """AWS p5.48xlarge: eight H100 at 55.04 an hour, spot 11.2543."""
    [offer] = [each for each in load_prices() if each.instance == "p5.48xlarge"]
    assert (offer.provider, offer.gpu, offer.gpu_count) == ("AWS", "H100-80GB-SXM", 8)
    assert offer.usd_per_gpu_hour == pytest.approx(55.04 / 8)
    assert offer.usd_per_gpu_hour_spot == pytest.approx(11.2543 / 8, abs=1e-5)
    assert "undated" in offer.date


def test_snapshot_keeps_memory_and_form_apart() -> None:
    by_instance = {offer.instance: offer.gpu for offer in load_prices()}
    assert by_instance["p4d.24xlarge"] == "A100-40GB-SXM"
    assert by_instance["p4de.24xlarge"] == "A100-80GB-SXM"
    assert by_instance["n3-A100x1"] == "A100-80GB-PCIe"
    assert by_instance["Standard_NC40ads_H100_v5"] == "H100-NVL"
    assert by_instance["p3.2xlarge"] == "V100-SXM2-16GB"
    assert by_instance["p3dn.24xlarge"] == "V100-SXM2-32GB"
    assert by_instance["Standard_NC6s_v3"] == "V100-PCIe-16GB"


@pytest.mark.parametrize("gpu", load_gpus(), ids=lambda gpu: gpu.name)
def test_quote_is_a_real_sound_offer_inside_its_range(gpu: Gpu) -> None:
    quoted = quote(gpu.name)
    sound = [each for each in load_prices() if each.gpu == gpu.name and not each.doubtful]
    if quoted is None:
        assert sound == []
        return
    assert quoted.offer in sound
    cheapest = {}
    for each in sorted(sound, key=lambda each: -each.usd_per_gpu_hour):
        cheapest[each.provider] = each
    sound = list(cheapest.values())
    assert quoted.usd_per_hour == quoted.offer.usd_per_gpu_hour
    assert quoted.low <= quoted.usd_per_hour <= quoted.high
    assert quoted.providers == len(sound)
    assert quoted.as_of == quoted.offer.date
    cheaper = sum(each.usd_per_gpu_hour < quoted.usd_per_hour for each in sound)
    dearer = sum(each.usd_per_gpu_hour > quoted.usd_per_hour for each in sound)
    assert cheaper <= (len(sound) - 1) / 2
    assert dearer <= len(sound) / 2


def test_quotes_worked_by_hand() -> None:
    """AWS alone has the A10G, at 1.006 in its smallest instance; V100 32 GB is 2.34 and 3.9015 (lower middle)."""
    a10g, v100 = quote("a10g"), quote("v100 32gb")
    assert a10g is not None
    assert (a10g.low, a10g.usd_per_hour, a10g.high, a10g.providers) == (1.006, 1.006, 1.006, 1)
    assert v100 is not None
    assert (v100.usd_per_hour, v100.providers, v100.offer.provider) == (2.34, 2, "Paperspace")
    h100 = quote("h100")
    assert h100 is not None
    assert h100.low == 1.29
    assert 1.29 < h100.usd_per_hour < h100.high <= 6.88  # not the 12.29 of a 2024 catalogue


def test_quote_without_offers_and_with_an_unknown_name() -> None:
    assert quote("GB300") is None
    with pytest.raises(UnknownGpuError):
        quote("h10")


@pytest.mark.parametrize(
    ("flag", "doubtful"),
    [
        ("", False),
        ("marketplace minimum", True),
        ("up-front reservation", True),
        ("old", True),
        ("32 GB; old: check before use; spot very old", True),
        ("aggregator price; CUDO own catalog rows are lower", True),
        ("host 0 + GPU 90.216. UNCERTAIN: us-east4 lists 64.44", True),
        ("smallest host shape for this count (1x2v4gb): a usable host costs a little more", True),
        ("host shape 8x64v128gb", False),
        ("spot = lowest US zone seen in this copy; moves hourly", False),
        ("undated", False),
        ("Secure Cloud; catalog spot = on-demand (not a price), left empty", False),
    ],
)
def test_doubtful_flags(flag: str, doubtful: bool) -> None:
    offer = Price("p", "i", "r", "T4", 1, 1.0, None, "2025", "s", flag)
    assert offer.doubtful is doubtful


def test_median_of_one_two_and_three_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [Price(p, "i", "r", "T4", 1, usd, None, p, "s", "") for p, usd in [("c", 9.0), ("a", 1.0), ("b", 2.0)]]
    for count, expected in [(1, 9.0), (2, 1.0), (3, 2.0)]:
        monkeypatch.setattr(prices, "load_prices", lambda count=count: tuple(offers[:count]))
        quoted = quote("t4")
        assert quoted is not None
        assert (quoted.usd_per_hour, quoted.providers) == (expected, count)


def test_loading_is_light() -> None:
    """Neither torch nor textual comes in, rapidfuzz only for a refusal, and files are read once."""
    code = (
        "import sys, ft_insight.catalog as c; c.quote('h100')\n"
        "heavy = {'torch', 'textual', 'rapidfuzz', 'numpy', 'scipy'} & set(sys.modules); print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
    assert load_gpus() is load_gpus()  # read once
    assert load_prices() is load_prices()


def test_bundled_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_prices.cache_clear()
    assert load_prices()


FIGURES = {
    "mem_bw_gbs": "bandwidth_gbs",
    "bf16_tflops": "bf16_tflops",
    "fp16_tflops": "fp16_tflops",
    "tf32_tflops": "tf32_tflops",
    "fp32_tflops": "fp32_tflops",
    "fp8_tflops": "fp8_tflops",
    "measured_max_matmul_bf16_tflops": "measured_bf16_tflops",
    "sm_count": "sm_count",
    "nvlink_gbs": "nvlink_gbs",
    "tdp_w": "tdp_w",
    "cc": "compute_capability",
    "arch": "architecture",
    "source": "source",
}


@pytest.mark.skipif(not SHARED_GPUS.is_file(), reason="the collected figures are not beside this checkout")
def test_catalogue_equals_the_collected_figures() -> None:
    collected: dict[str, dict[str, Any]] = json.loads(SHARED_GPUS.read_text(encoding="utf-8"))["gpus"]
    seen = set()
    for name, row in collected.items():
        sizes = {name.replace("16/32GB", f"{gb}GB"): gb for gb in (16, 32)} if "16/32GB" in name else {}
        for split, memory_gb in (sizes or {name: row["memory_gb"]}).items():
            gpu = find_gpu(split)
            seen.add(gpu.name)
            assert gpu.name == split
            assert gpu.memory_gb == memory_gb
            for theirs, ours in FIGURES.items():
                assert getattr(gpu, ours) == row.get(theirs), (split, ours)
            if memory_gb == row["memory_gb"]:
                assert gpu.note == row.get("flag", "")
        for alias in row["aliases"]:
            assert find_gpu(alias).name in (sizes or {name})
    assert seen == {gpu.name for gpu in load_gpus()}

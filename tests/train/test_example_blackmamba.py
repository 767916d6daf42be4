"""examples/blackmamba: its arithmetic against a forward written out here, its scan, its training, its record."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.utils import import_utils

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks.modules import find_parts
from ft_insight.callbacks.routers import find_routers
from tests.train.conftest import VOCABULARY, Log, MakeTrainer, token_rows

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"

sys.path.insert(0, str(EXAMPLES))
from blackmamba import finetune  # noqa: E402
from blackmamba.checkpoint import CheckpointError, load  # noqa: E402
from blackmamba.configuration import BlackMambaConfig  # noqa: E402
from blackmamba.modeling import BlackMambaForCausalLM, active_parameters  # noqa: E402
from blackmamba.scan import LinearMambaMixer, choose_scan  # noqa: E402

Tensors = dict[str, torch.Tensor]

HIDDEN, INNER, STATES, RANK, CONV, FFN, EXPERTS, BLOCKS = 16, 32, 4, 3, 4, 24, 8, 4
KINDS = ["r", "8", "r", "8"]


def tiny(seed: int = 0, **options: Any) -> BlackMambaForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 48,
        "num_experts_per_tok": 2,
        "initializer_range": 32**-0.5,
        **options,
    }
    return BlackMambaForCausalLM(BlackMambaConfig(**sizes))


# the arithmetic


def zyphra_tensors(seed: int = 0, vocabulary: int = 50) -> Tensors:
    """Random tensors under the names and with the shapes of Zyphra's checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {"embedding.word_embeddings.weight": random(vocabulary, HIDDEN, scale=1.0)}
    for i in range(BLOCKS):
        layer, mixer = f"decoder.layers.{i}", f"decoder.layers.{i}.mixer"
        tensors[f"{layer}.norm.weight"] = 1 + random(HIDDEN)
        if i % 2 == 0:
            tensors[f"{mixer}.in_proj.weight"] = random(2 * INNER, HIDDEN)
            tensors[f"{mixer}.conv1d.weight"] = random(INNER, 1, CONV)
            tensors[f"{mixer}.conv1d.bias"] = random(INNER)
            tensors[f"{mixer}.x_proj.weight"] = random(RANK + 2 * STATES, INNER)
            tensors[f"{mixer}.dt_proj.weight"] = random(INNER, RANK)
            tensors[f"{mixer}.dt_proj.bias"] = random(INNER)
            tensors[f"{mixer}.A_log"] = random(INNER, STATES)
            tensors[f"{mixer}.D"] = random(INNER)
            tensors[f"{mixer}.out_proj.weight"] = random(HIDDEN, INNER)
        else:
            tensors[f"{mixer}.router.weight"] = random(EXPERTS, HIDDEN)
            tensors[f"{mixer}.router.bias"] = random(EXPERTS)
            for e in range(EXPERTS):
                tensors[f"{mixer}.local_experts.{e}.linear_fc1.weight"] = random(2 * FFN, HIDDEN)
                tensors[f"{mixer}.local_experts.{e}.linear_fc2.weight"] = random(HIDDEN, FFN)
    tensors["decoder.final_layernorm.weight"] = 1 + random(HIDDEN)
    tensors["decoder.final_layernorm.bias"] = random(HIDDEN)
    return tensors


def write_zyphra(folder: Path, tensors: Tensors) -> Path:
    torch.save({"model": tensors}, folder / "pytorch_model.bin")
    settings = {
        "num_layers": BLOCKS,
        "hidden_size": HIDDEN,
        "state_size": STATES,
        "conv_dimension": CONV,
        "expansion_factor": INNER // HIDDEN,
        "ffn_hidden_size": FFN,
        "padded_vocab_size": len(tensors["embedding.word_embeddings.weight"]),
        "mamba_moe_layers": KINDS,
        "add_bias_linear": False,
        "swiglu": True,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def reference_mamba(t: Tensors, name: str, tokens: torch.Tensor) -> torch.Tensor:
    length = len(tokens)
    projected = tokens @ t[f"{name}.in_proj.weight"].T
    x, gate = projected[:, :INNER], projected[:, INNER:]
    convolved = torch.zeros(length, INNER)
    for position in range(length):
        total = t[f"{name}.conv1d.bias"].clone()
        for tap in range(CONV):
            at = position - (CONV - 1) + tap
            if at >= 0:
                total = total + t[f"{name}.conv1d.weight"][:, 0, tap] * x[at]
        convolved[position] = silu(total)
    a = -torch.exp(t[f"{name}.A_log"])
    state = torch.zeros(INNER, STATES)
    outputs = []
    for position in range(length):
        u = convolved[position]
        selected = t[f"{name}.x_proj.weight"] @ u
        dt, b, c = selected[:RANK], selected[RANK : RANK + STATES], selected[RANK + STATES :]
        dt = torch.log1p(torch.exp(t[f"{name}.dt_proj.weight"] @ dt + t[f"{name}.dt_proj.bias"]))
        state = torch.exp(dt[:, None] * a) * state + (dt * u)[:, None] * b[None, :]
        y = (state * c[None, :]).sum(1) + t[f"{name}.D"] * u
        outputs.append(t[f"{name}.out_proj.weight"] @ (y * silu(gate[position])))
    return torch.stack(outputs)


def reference_moe(t: Tensors, name: str, tokens: torch.Tensor, k: int) -> torch.Tensor:
    rows = []
    for token in tokens:
        probabilities = 1 / (1 + torch.exp(-(t[f"{name}.router.weight"] @ token + t[f"{name}.router.bias"])))
        best = sorted(range(EXPERTS), key=lambda e: -float(probabilities[e]))[:k]
        total = torch.zeros(HIDDEN)
        for e in best:
            both = t[f"{name}.local_experts.{e}.linear_fc1.weight"] @ token
            gate, up = both[:FFN], both[FFN:]
            activated = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
            total = total + probabilities[e] * (t[f"{name}.local_experts.{e}.linear_fc2.weight"] @ (activated * up))
        rows.append(total)
    return torch.stack(rows)


def reference_logits(t: Tensors, ids: torch.Tensor, k: int) -> torch.Tensor:
    """One sequence, one token at a time."""
    embedding = t["embedding.word_embeddings.weight"]
    residual = embedding[ids]
    for i in range(BLOCKS):
        scale = (residual.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
        normed = residual / scale * t[f"decoder.layers.{i}.norm.weight"]
        name = f"decoder.layers.{i}.mixer"
        mixed = reference_mamba(t, name, normed) if KINDS[i] == "r" else reference_moe(t, name, normed, k)
        residual = residual + mixed
    centred = residual - residual.mean(1, keepdim=True)
    normed = centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
    return (normed * t["decoder.final_layernorm.weight"] + t["decoder.final_layernorm.bias"]) @ embedding.T


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_a_checkpoint_in_zyphras_layout_gives_the_logits_of_a_forward_written_out(tmp_path: Path, top_k: int) -> None:
    tensors = zyphra_tensors(top_k)
    model = load(write_zyphra(tmp_path, tensors), top_k=top_k)
    assert all(p.requires_grad for p in model.parameters())
    ids = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    expected = torch.stack([reference_logits(tensors, row, top_k) for row in ids])
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing_for_the_tokens_beside_it(tmp_path: Path, side: str) -> None:
    tensors = zyphra_tensors()
    model = load(write_zyphra(tmp_path, tensors), top_k=2)
    ids = torch.arange(5, 14)
    padding = torch.full((4,), 7)
    real = slice(0, 9) if side == "right" else slice(4, 13)
    padded = torch.cat([ids, padding] if side == "right" else [padding, ids])[None]
    mask = torch.zeros_like(padded)
    mask[:, real] = 1
    with torch.no_grad():
        logits = model(input_ids=padded, attention_mask=mask).logits[0, real]
    torch.testing.assert_close(logits, reference_logits(tensors, ids, 2), rtol=1e-4, atol=1e-4)


def test_top_8_of_8_is_the_dense_sum_of_all_experts() -> None:
    block = tiny(num_experts_per_tok=8).model.layers[1].mixer
    tokens = torch.randn(2, 5, 32)
    probabilities = torch.sigmoid(tokens @ block.router.weight.T + block.router.bias)
    dense = sum(probabilities[..., e, None] * expert(tokens) for e, expert in enumerate(block.local_experts))
    torch.testing.assert_close(block(tokens), dense, rtol=1e-5, atol=1e-6)


def test_an_expert_without_tokens_gets_a_gradient_of_zero_and_disturbs_no_other() -> None:
    block = tiny(num_experts_per_tok=1).model.layers[1].mixer
    with torch.no_grad():
        block.router.weight.zero_()
        block.router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0]))
    tokens = torch.randn(3, 4, 32)
    result = block(tokens)
    torch.testing.assert_close(result, torch.sigmoid(torch.tensor(5.0)) * block.local_experts[3](tokens))
    result.square().sum().backward()
    for e, expert in enumerate(block.local_experts):
        assert bool(expert.linear_fc1.weight.grad.ne(0).any()) == (e == 3)


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    tensors = zyphra_tensors()
    del tensors["decoder.layers.2.norm.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.2\.norm"):
        load(write_zyphra(tmp_path, tensors))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not in Zyphra's layout"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_loaded_back_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    (tmp_path / "theirs").mkdir()
    model = load(write_zyphra(tmp_path / "theirs", zyphra_tensors()), top_k=2, dtype=dtype)
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours", dtype=dtype)
    assert again.config.num_experts_per_tok == 2
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert load(tmp_path / "ours", top_k=8).model.layers[1].mixer.router.top_k == 8
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == dtype for name in before)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        assert torch.equal(logits, again(input_ids=ids).logits)
    assert logits.dtype == dtype


def test_gradients_in_bfloat16_are_near_those_in_float32() -> None:
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(num_experts_per_tok=8).to(dtype)
        ids = torch.arange(40)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    for name, exact in gradients[0].items():
        assert (gradients[1][name] - exact).norm() < 0.1 * exact.norm(), name


@pytest.mark.parametrize(
    ("name", "total", "active"), [("2.8b", 2.783e9, (629e6, 937e6)), ("1.5b", 1.458e9, (344e6, 503e6))]
)
def test_the_presets_have_the_sizes_of_the_released_models(name: str, total: float, active: tuple[float, ...]) -> None:
    for top_k, expected in zip((1, 2), active, strict=True):
        with torch.device("meta"):
            model = BlackMambaForCausalLM(BlackMambaConfig.preset(name, num_experts_per_tok=top_k))
        model.tie_weights()
        assert model.num_parameters() == pytest.approx(total, abs=0.5e6)
        assert active_parameters(model) == pytest.approx(expected, abs=0.5e6)


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="packed"):
        tiny()(input_ids=torch.arange(6)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


# the scan


def mixers(length: int, batch: int = 2) -> tuple[MambaMixer, LinearMambaMixer, torch.Tensor]:
    """transformers' mixer and ours with the same weights, and an input."""
    config = tiny().config
    torch.manual_seed(5)
    theirs, ours = MambaMixer(config, 0), LinearMambaMixer(config, 0)
    ours.load_state_dict(theirs.state_dict())
    return theirs.train(), ours.train(), torch.randn(batch, length, config.hidden_size)


@pytest.mark.parametrize("masked", [False, True])
def test_the_scan_and_its_gradients_equal_those_of_transformers(masked: bool) -> None:
    theirs, ours, x = mixers(length=37)
    mask = None
    if masked:
        mask = torch.ones(2, 37, dtype=torch.int64)
        mask[0, 30:], mask[1, :4] = 0, 0
    results = []
    for mixer in (theirs, ours):
        inputs = x.clone().requires_grad_()
        output = mixer(inputs, attention_mask=mask)
        output.square().sum().backward()
        results.append([output, inputs.grad, *(p.grad for p in mixer.parameters())])
    for expected, found in zip(*results, strict=True):
        scale = expected.abs().max().item()
        assert scale > 0
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(scale, 1))


class Written(TorchDispatchMode):
    """Counts the numbers that operations write: what they cost, were the machine free of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.numbers += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def backward_work(mixer: torch.nn.Module, x: torch.Tensor) -> int:
    output = mixer(x.requires_grad_()).sum()
    with Written() as written:
        output.backward()
    return written.numbers


def test_the_backward_of_the_scan_grows_linearly_with_the_length() -> None:
    work = {}
    for length in (64, 128):
        theirs, ours, x = mixers(length, batch=1)
        work[length] = [backward_work(theirs, x.clone()), backward_work(ours, x.clone())]
    theirs_grew, ours_grew = (long / short for short, long in zip(work[64], work[128], strict=True))
    assert 1.8 < ours_grew < 2.1
    assert work[128][1] < work[128][0] / 5
    if theirs_grew < 2.5:
        pytest.fail(f"transformers' own scan grew only {theirs_grew:.1f}-fold: ours may no longer be needed")


def test_without_a_gpu_the_plain_scan_is_chosen_and_named() -> None:
    model = tiny()
    assert "plain torch" in choose_scan(model)
    assert not any(m.fast for m in model.modules() if isinstance(m, LinearMambaMixer))


class OnGpu:
    """As much of a model as ``choose_scan`` asks for, on a GPU that is not there."""

    device = torch.device("cuda")

    def __init__(self, fault: Exception | None = None) -> None:
        self.mixer = LinearMambaMixer(tiny().config, 0)
        self.fault = fault

    def modules(self) -> list[torch.nn.Module]:
        return [self.mixer]

    def set_use_kernels(self, use: bool) -> None:
        if self.fault:
            raise self.fault


@pytest.mark.parametrize(
    ("present", "fault", "fast", "words"),
    [
        ({"mamba_ssm", "causal_conv1d"}, None, True, "of mamba-ssm and causal-conv1d"),
        ({"mamba_ssm", "kernels"}, None, True, "kernels package"),
        ({"kernels"}, OSError("no network"), False, "no network"),
        (set(), None, False, "install mamba-ssm"),
    ],
)
def test_on_a_gpu_the_fastest_scan_there_is_gets_chosen_and_named(
    monkeypatch: pytest.MonkeyPatch, present: set[str], fault: Exception | None, fast: bool, words: str
) -> None:
    for name in ("mamba_ssm", "causal_conv1d", "kernels"):
        monkeypatch.setattr(import_utils, f"is_{name}_available", lambda name=name: name in present)
    model = OnGpu(fault)
    assert words in choose_scan(model)
    assert model.mixer.fast == fast


# training


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_checkpointing_changes_no_loss(make_trainer: MakeTrainer) -> None:
    plain = losses(make_trainer(model=tiny(), max_steps=6, learning_rate=1e-2))
    recomputed = losses(make_trainer(model=tiny(), max_steps=6, learning_rate=1e-2, checkpointing=True))
    assert len(plain) == 6
    assert plain == recomputed


@pytest.mark.parametrize("top_k", [2, 8])
def test_the_loss_falls_sparse_and_dense(make_trainer: MakeTrainer, top_k: int) -> None:
    model = tiny(num_experts_per_tok=top_k)
    found = losses(make_trainer(model=model, max_steps=25, learning_rate=1e-2))
    assert sum(found[-3:]) < 0.5 * sum(found[:3])


# what ft-insight sees of it


def test_each_part_is_found_by_its_kind() -> None:
    found = [(p.layer, p.kind, p.name) for p in find_parts(tiny(num_hidden_layers=2))]
    experts = [(1, "experts", f"model.layers.1.mixer.local_experts.{e}") for e in range(8)]
    assert found == [
        (None, "embedding", "model.embed_tokens"),
        (0, "layer", "model.layers.0"),
        (0, "norm", "model.layers.0.norm"),
        (0, "mamba", "model.layers.0.mixer"),
        (1, "layer", "model.layers.1"),
        (1, "norm", "model.layers.1.norm"),
        (1, "moe", "model.layers.1.mixer"),
        (1, "router", "model.layers.1.mixer.router"),
        *experts,
        (None, "final_norm", "model.final_layernorm"),
        (None, "head", "lm_head"),
    ]
    assert [(x.name, x.experts) for x in find_routers(tiny())] == [
        ("model.layers.1.mixer.router", 8),
        ("model.layers.3.mixer.router", 8),
    ]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_are_timed_and_sum_to_the_step(make_trainer: MakeTrainer, tmp_path: Path, checkpointing: bool) -> None:
    callback = FtInsightCallback(path=tmp_path / "log", layers_every=1)
    make_trainer([callback], model=tiny(hidden_size=64), max_steps=6, checkpointing=checkpointing).train()
    log = Log(tmp_path / "log")
    phases = {step.step: step.phases_s for step in log.steps}
    layers = log.of(r.Layers)
    assert len(layers) >= 5
    for record in layers:
        assert {"mamba", "moe", "router", "experts", "input_norm"} <= set(record.kinds)
    for name, *others in (("forward", "loss"), ("backward",), ("recompute",)):
        found = sum(sum(getattr(record, f"{name}_s")) for record in layers)
        expected = sum(phases[record.step].get(phase, 0.0) for record in layers for phase in (name, *others))
        assert bool(expected) == (checkpointing or name != "recompute")
        assert found == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_are_counted_exactly_and_padding_is_not(
    make_trainer: MakeTrainer, tmp_path: Path, checkpointing: bool
) -> None:
    """Against routing each row alone, unpadded, in a model whose weights do not move."""
    model = tiny()
    rows = token_rows([12, 3, 9, 5])
    expected = torch.zeros(2, 8, dtype=torch.int64)
    chosen: list[torch.Tensor] = []
    handles = [
        model.model.layers[i].mixer.router.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
        for i in (1, 3)
    ]
    for row in rows:
        with torch.no_grad():
            model(input_ids=torch.tensor([row["input_ids"]]))
        expected += torch.stack([c.flatten().bincount(minlength=8) for c in chosen])
        chosen.clear()
    for handle in handles:
        handle.remove()
    callback = FtInsightCallback(path=tmp_path / "log")
    settings: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.0, "checkpointing": checkpointing}
    make_trainer([callback], model=model, rows=rows, **settings).train()
    counted = torch.zeros(2, 8, dtype=torch.int64)
    for record in Log(tmp_path / "log").of(r.Experts):
        assert (record.method, record.padding_counted) == ("exact", False)
        assert record.layers == ("model.layers.1.mixer.router", "model.layers.3.mixer.router")
        counted += torch.tensor([list(row)[:8] for row in record.counts])
    assert counted.tolist() == expected.tolist()
    assert counted.sum() == 2 * 2 * (12 + 3 + 9 + 5)


def run_example(monkeypatch: pytest.MonkeyPatch, *options: object) -> int:
    monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, options)])
    return finetune.main()


def test_the_example_trains_a_checkpoint_in_zyphras_layout(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "BlackMamba-tiny"
    folder.mkdir()
    write_zyphra(folder, zyphra_tensors(vocabulary=VOCABULARY))
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"{i} and one make", "completion": f" {i + 1}, as one knows."} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--dataset", tmp_path / "rows.jsonl", "--batch", 4, "--epochs", 2, "--log", tmp_path / "log"]
    assert run_example(monkeypatch, "--model", folder, *options, "--checkpointing", "--lr", 1e-2) == 0
    assert "with 2 of 8 experts" in capsys.readouterr().out
    log = Log(tmp_path / "log")
    assert log.header.model.name == "BlackMamba-tiny"
    assert len(log.steps) == 8
    assert log.steps[-1].phases_s["recompute"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--tiny", "--top-k", "9"], "1 to 8 experts"), (["--model", "tests", "--dataset", "{rows}"], "has neither")],
)
def test_bad_input_ends_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        run_example(monkeypatch, *[o.format(rows=tmp_path / "rows.jsonl") for o in options])
    assert end.value.code == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_example_runs_with_one_command(tmp_path: Path) -> None:
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not there")
    command = [sys.executable, str(EXAMPLES / "blackmamba" / "finetune.py"), "--tiny", "--steps", "6"]
    options = ["--dataset", str(GSM8K), "--limit", "40", "--eval-rows", "2", "--log", str(tmp_path / "log")]
    output = ["--output", str(tmp_path / "out"), "--top-k", "8"]
    done = subprocess.run([*command, *options, *output], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "scan: plain torch" in done.stdout
    assert "with 8 of 8 experts" in done.stdout
    assert "accuracy" in done.stdout
    log = Log(tmp_path / "log")
    assert len(log.steps) == 6
    trained = [record for record in log.of(r.Experts) if record.mode == "train"]
    assert trained
    for record in trained:
        assert all(set(row) == {tokens} for row, tokens in zip(record.counts, record.tokens, strict=True))
    assert load(tmp_path / "out").config.num_experts_per_tok == 8

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")

from datasets import Dataset
from peft import PeftModel, get_peft_model
from transformers import MixtralForCausalLM
from trl import SFTConfig, SFTTrainer

from ft_insight import records as r
from ft_insight.callbacks.facts import model_facts
from ft_insight.callbacks.modules import find_parts
from ft_insight.callbacks.routers import find_routers
from ft_insight.demo.tiny import build_tiny_mixtral
from tests.train.conftest import Log
from tests.train.test_example_common import EXAMPLES, load

x4: Any = load("experts4bit", EXAMPLES / "mixtral" / "experts4bit.py")
DATA = Path(__file__).parents[3] / "shared" / "data"
LAYERS, HIDDEN, INNER, EXPERTS, VOCABULARY = 2, 64, 128, 8, 320


def tiny(top_k: int = 2) -> MixtralForCausalLM:
    return build_tiny_mixtral(
        VOCABULARY, layers=LAYERS, hidden=HIDDEN, intermediate=INNER, experts=EXPERTS, top_k=top_k, pad_token_id=1
    )


def quantised(top_k: int = 2) -> Any:
    return x4.quantise(tiny(top_k), compute_dtype=torch.float32)


def bytes_by_hand(weights: int, *, double: bool) -> int:
    blocks = weights // 64
    if not double:
        return weights // 2 + 4 * blocks + 4 * 16  # two weights a byte, a float a block, the 16 levels
    # a byte a block, a float per 256 of them, their offset, and the tables of both
    return weights // 2 + blocks + 4 * math.ceil(blocks / 256) + 4 + 4 * 256 + 4 * 16


@pytest.mark.parametrize("double", [True, False])
def test_memory_falls_as_computed_by_hand(double: bool) -> None:
    model = tiny().to(torch.bfloat16)
    before = x4.storage_bytes(model)
    fused = sum(x4.storage_bytes(layer.mlp.experts) for layer in model.model.layers)
    assert fused == LAYERS * EXPERTS * 3 * HIDDEN * INNER * 2
    assert x4.quantise_experts(model, double_quant=double) == LAYERS
    each = 3 * bytes_by_hand(INNER * HIDDEN, double=double)
    experts = sum(x4.storage_bytes(layer.mlp.experts) for layer in model.model.layers)
    assert experts == pytest.approx(LAYERS * EXPERTS * each, rel=0.001)
    assert x4.storage_bytes(model) == pytest.approx(before - fused + experts, rel=0.001)
    assert not any(p.dim() == 3 for p in model.parameters())


def test_forward_is_close_to_bf16() -> None:
    model = tiny().to(torch.bfloat16).eval()
    inputs = torch.randn(60, HIDDEN, dtype=torch.bfloat16)
    block = model.model.layers[0].mlp
    with torch.no_grad():
        _, weights, index = block.gate(inputs)
        expected = block.experts(inputs, index, weights).float()
        x4.quantise_experts(model)
        found = model.model.layers[0].mlp.experts(inputs, index, weights).float()
    error = float((found - expected).norm() / expected.norm())
    assert 0.01 < error < 0.2  # NF4 loses about a tenth, and a difference of 0 would mean it is no NF4


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_experts_are_exactly_those_of_their_dequantised_weights(top_k: int) -> None:
    from bitsandbytes.functional import dequantize_4bit

    model = tiny(top_k)
    fused = copy.deepcopy(model.model.layers[0].mlp.experts)
    x4.quantise_experts(model, compute_dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for e in range(EXPERTS):
            w1, w2, w3 = (
                dequantize_4bit(kind[e].weight.data, kind[e].weight.quant_state)
                for kind in (experts.w1, experts.w2, experts.w3)
            )
            fused.gate_up_proj[e], fused.down_proj[e] = torch.cat([w1, w3]), w2
    inputs = torch.randn(50, HIDDEN)
    _, weights, index = model.model.layers[0].mlp.gate(inputs)
    torch.testing.assert_close(experts(inputs, index, weights), fused(inputs, index, weights), atol=1e-5, rtol=1e-4)


def test_a_checkpoint_read_tensor_by_tensor_is_the_model_quantised_in_memory(tmp_path: Path) -> None:
    original = tiny()
    original.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    read = x4.load_quantised(tmp_path, device="cpu", compute_dtype=torch.float32, top_k=8).eval()
    expected = x4.quantise(original, compute_dtype=torch.float32).eval()
    for layer in expected.model.layers:
        layer.mlp.gate.top_k = 8
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(read(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert x4.storage_bytes(read) == x4.storage_bytes(expected)
    assert not any(t.is_meta for t in [*read.parameters(), *read.buffers()])


def test_what_is_no_mixtral_is_refused(tmp_path: Path) -> None:
    from tests.train.conftest import dense_model

    dense_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no Mixtral"):
        x4.load_quantised(tmp_path, device="cpu")
    tiny().config.save_pretrained(tmp_path / "empty")
    with pytest.raises(ValueError, match="holds no"):
        x4.load_quantised(tmp_path / "empty", device="cpu")


def adapters(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_on_all_experts_and_the_router_and_nowhere_else() -> None:
    model = get_peft_model(quantised(), x4.lora_config())
    names = set(adapters(model))
    start = "base_model.model.model.layers"
    expected = {
        f"{start}.{layer}.mlp.{place}.lora_{half}.default.weight"
        for layer in range(LAYERS)
        for place in [f"experts.{kind}.{e}" for kind in ("w1", "w2", "w3") for e in range(EXPERTS)] + ["gate"]
        for half in "AB"
    }
    assert names == expected
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (16, 32)
    # A is 16 x in, B is out x 16: 16 * (64 + 128) for each of w1, w2, w3, and 16 * (64 + 8) for the router
    assert sum(p.numel() for p in adapters(model).values()) == 2 * (8 * 3 * 3_072 + 1_152) == 149_760


def test_w1_and_w3_have_an_a_and_a_b_of_their_own() -> None:
    model = get_peft_model(quantised(), x4.lora_config())
    parameters = adapters(model)
    assert len({p.data_ptr() for p in parameters.values()}) == len(parameters)
    experts = model.base_model.model.model.layers[0].mlp.experts
    inputs = torch.randn(5, HIDDEN)

    def outputs() -> list[torch.Tensor]:
        return [kind[3](inputs) for kind in (experts.w1, experts.w3)]

    before = outputs()
    with torch.no_grad():
        for half in ("lora_A", "lora_B"):
            getattr(experts.w1[3], half)["default"].weight.normal_()
    gate, up = outputs()
    assert (gate - before[0]).abs().max() > 1
    assert torch.equal(up, before[1])
    # by the definition of LoRA, with alpha / rank = 2
    layer = experts.w1[3]
    expected = before[0] + 2 * inputs @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
    torch.testing.assert_close(gate, expected, rtol=1e-4, atol=1e-4)


def test_adapters_saved_and_loaded_again_give_the_same_logits(tmp_path: Path) -> None:
    model = get_peft_model(quantised(), x4.lora_config()).eval()
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        untrained = model(input_ids=ids).logits
        for parameter in adapters(model).values():
            parameter.normal_(std=0.1)
        trained = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(quantised(), tmp_path).eval()
        reloaded = again(input_ids=ids).logits
    assert (trained - untrained).abs().max() > 0.1
    assert torch.equal(reloaded, trained)


def test_ft_insight_finds_routers_and_experts() -> None:
    model = get_peft_model(quantised(), x4.lora_config())
    assert [router.name for router in find_routers(model)] == [f"model.layers.{i}.mlp.gate" for i in range(LAYERS)]
    assert {router.experts for router in find_routers(model)} == {EXPERTS}
    kinds = [part.kind for part in find_parts(model)]
    assert kinds.count("router") == kinds.count("experts") == kinds.count("moe") == LAYERS
    facts = model_facts(model)
    assert facts.quantization == "nf4"
    assert facts.experts == EXPERTS
    assert facts.expert_parameters is not None
    assert facts.expert_parameters > LAYERS * EXPERTS * 3 * HIDDEN * INNER


@pytest.mark.parametrize("top_k", [2, 8])
def test_every_adapter_learns_and_the_loss_falls(top_k: int, tmp_path: Path) -> None:
    trainer = SFTTrainer(
        model=quantised(top_k),
        args=SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=25,
            learning_rate=5e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        ),
        train_dataset=Dataset.from_list(
            [{"input_ids": ids, "labels": ids} for ids in torch.randint(5, VOCABULARY, (8, 48)).tolist()]
        ),
        processing_class=_tokenizer(),
        peft_config=x4.lora_config(),
    )
    model = trainer.model
    for parameter in adapters(model).values():
        parameter.data = parameter.data.float()
    before = {name: p.detach().clone() for name, p in adapters(model).items()}
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    seen: set[str] = set()
    for name, parameter in adapters(model).items():
        parameter.register_hook(lambda g, name=name: seen.add(name) if g.abs().sum() > 0 else None)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert seen == set(before)
    assert all(not torch.equal(p, before[name]) for name, p in adapters(model).items())
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if not p.requires_grad)
    assert len(losses) == 25
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.3


def _tokenizer() -> Any:
    from ft_insight.demo.tiny import build_tokenizer

    return build_tokenizer(["one two"], vocab_size=300)


def run_example(*words: str, log: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "mixtral" / "finetune.py"), *words, "--log", str(log)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=log.parent)


@pytest.mark.slow
def test_tiny_example_runs_end_to_end(tmp_path: Path) -> None:
    dataset = DATA / "gsm8k_train.jsonl"
    if not dataset.exists():
        pytest.skip(f"{dataset} is not here")
    options = ["--dataset", str(dataset), "--limit", "16", "--steps", "5", "--eval-rows", "2", "--max-length", "96"]
    done = run_example("--tiny", *options, log=tmp_path / "run.jsonl")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "in 4 bits" in done.stdout
    log = Log(tmp_path / "run.jsonl")
    assert log.header.train.method == "qlora"
    assert log.header.model.experts_per_token == 2
    assert len(log.steps) == 5
    assert log.end.status == "completed"
    assert not [n for n in log.of(r.Notice) if n.off]
    accuracy = [x.step for x in log.of(r.Logs) if "eval_accuracy" in x.values]
    assert accuracy[0] == 0
    assert accuracy[-1] == 5
    experts = [record for record in log.of(r.Experts) if record.mode == "train"]
    assert sum(record.tokens[0] for record in experts) == sum(m.real_tokens for s in log.steps for m in s.micro)
    losses = [x.values["loss"] for x in log.of(r.Logs) if "loss" in x.values]
    assert losses[-1] < losses[0]


def call_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    finetune: Any = load("finetune", EXAMPLES / "mixtral" / "finetune.py")
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words])
    result: int = finetune.main()
    return result


@pytest.mark.slow
def test_weights_from_a_folder_are_trained_and_the_adapters_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join('{"prompt": "one %d", "completion": "#### %d"}' % (i, i) for i in range(12)))  # noqa: UP031
    tiny().save_pretrained(tmp_path / "model")
    _tokenizer().save_pretrained(tmp_path / "model")
    options = ["--dataset", str(rows), "--steps", "2", "--batch", "2", "--eval-rows", "1", "--lr", "1e-3"]
    paths = [
        "--model",
        str(tmp_path / "model"),
        "--log",
        str(tmp_path / "log.jsonl"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert call_main(monkeypatch, *options, *paths) == 0
    assert "loss" in capsys.readouterr().out
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(saved) == LAYERS * 2 * (3 * EXPERTS + 1)
    assert Log(tmp_path / "log.jsonl").header.model.name == "model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tiny", "--dataset", "missing.jsonl"], "finetune.py: missing.jsonl: there is no such file"),
        (["--tiny", "--top-k", "9"], "finetune.py: --top-k 9: the model has 8 experts"),
        (["--model", "/nowhere/at/all", "--dataset", "ROWS"], "finetune.py: cannot load /nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": "b"}')
    with pytest.raises(SystemExit) as caught:
        call_main(monkeypatch, *[str(rows) if word == "ROWS" else word for word in words])
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith(said)
    assert error.count("\n") == 1

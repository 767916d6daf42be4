"""``ft-insight project``: several runs, numbers of GPUs, other data sets and top-k, as a user asks for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from makers import A40, CPU, GIB, header, log, step, view

from ft_insight import cli
from ft_insight import records as r
from ft_insight.estimate.workload import Lengths, workload_of
from ft_insight.token_lengths import TokenizerError, lengths_of

DATA = {"queries": 1000, "length_values": (100, 200, 400), "length_counts": (5, 3, 2)}
MOE = {"experts": 8, "experts_per_token": 2, "trainable_parameters": 10**7}


def items(sizes: tuple[int, ...], device: r.Device = A40, batch: int = 4, **said: Any) -> list[r.Record]:
    """A run of 0.1 s + 1 ms a slot, 60% of the latter in the experts, who are timed in every step."""
    said = {"dataset": DATA, "model": MOE, **said, "train": {"epochs": 2.0, "batch": batch, **said.get("train", {})}}
    found: list[r.Record] = [header(devices=(device,), **said)]
    for n in range(1, 25):
        slots = batch * sizes[n % len(sizes)]
        one = r.MicroBatch(batch, slots, slots, slots, 0.1 + 1e-3 * slots)
        memory = r.Memory(allocated_bytes=9 * GIB, peak_allocated_bytes=10 * GIB + (slots << 20))
        found.append(step(n, 2.0 * n, 0.15 + 1e-3 * slots, micro=(one,), memory=memory))
        parts = (0.1 + 0.4e-3 * slots, 0.6e-3 * slots)
        zero = (0.0, 0.0)
        found.append(
            r.Layers(
                step=n,
                t_s=2.0 * n,
                clock="cuda",
                micro_batches=1,
                layers=(0, 0),
                kinds=("attention", "experts"),
                forward_s=parts,
                recompute_s=zero,
                backward_s=zero,
            )
        )
    return found


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.main(["project", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code: Any = cli.main(["project", *words])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def test_two_runs_tell_what_one_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (str(log(tmp_path / f"{n}.jsonl", items((n,)))) for n in (100, 400))
    assert not asked(capsys, short, "--gpu", "h100")["fit"]["identifiable"]
    both = asked(capsys, short, long, "--gpu", "h100")
    assert both["fit"]["identifiable"]
    assert both["fit"]["points"] == 46
    assert both["runs"] == [short, long]
    assert both["run"] == short
    # whichever option stands before the runs
    assert asked(capsys, "--gpu", "h100", short, long)["runs"] == [short, long]
    assert asked(capsys, "--gpu", "h100", "--gpus", "1", short, long)["runs"] == [short, long]


def test_a_sparse_and_a_dense_run_tell_of_what_lies_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At top-k 4 the experts' 0.6 ms a slot are 1.2: 800 slots take 0.1 + 0.32 + 0.96 s, and a step 0.05 s more."""
    runs = []
    for top_k in (2, 8):
        found = items((100, 200, 400), model={**MOE, "experts_per_token": top_k})
        per_slot = 0.4e-3 + 0.3e-3 * top_k
        runs.append(
            log(
                tmp_path / f"{top_k}.jsonl",
                [
                    step(
                        x.step,
                        x.t_s,
                        0.15 + per_slot * (x.micro[0].slots or 0),
                        micro=(r.MicroBatch(4, x.micro[0].slots, 800, 800, 0.1 + per_slot * (x.micro[0].slots or 0)),),
                    )
                    if isinstance(x, r.Step)
                    else x
                    for x in found
                    if not isinstance(x, r.Layers)  # what one run alone would tell it by
                ],
            )
        )
    words = [*map(str, runs), "--top-k", "4", "--seq-len", "200", "--batch", "4", "--gpu", "h100"]
    row = asked(capsys, *words)["projection"]["rows"][0]
    assert row["queries_per_s"][0] == pytest.approx(4 / (0.1 + 0.32 + 0.96 + 0.05), rel=0.02)
    assert row["basis"].startswith("by its fitted step time")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"model": {"layers": 16}}, "models"),
        ({"model": {**MOE, "experts": 16}}, "models"),
        ({"train": {"method": "full"}}, "methods"),
        ({"train": {"precision": "fp16"}}, "number formats"),
        ({"train": {"gradient_checkpointing": "reentrant"}}, "gradient checkpointing"),
        ({"device": CPU}, "devices"),
        ({"world_size": 2}, "numbers of GPUs"),
    ],
)
def test_runs_that_do_not_belong_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, Any], what: str
) -> None:
    one = str(log(tmp_path / "one.jsonl", items((100,))))
    two = str(log(tmp_path / "two.jsonl", items((400,), **other)))
    assert f"of different {what}" in refused(capsys, one, two)


def test_numbers_of_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(log(tmp_path / "run.jsonl", items((100, 200, 400))))
    rows = asked(capsys, path, "--gpu", "h100", "l40s", "--gpus", "1", "2", "4", "8")["projection"]["rows"]
    assert [(x["gpu"], x["gpus"]) for x in rows[1:]] == [
        (g, n) for g in ("H100-80GB-SXM", "L40S") for n in (1, 2, 4, 8)
    ]
    assert all(x["bound_by"] for x in rows)
    assert cli.main(["project", path, "--gpu", "h100", "--gpus", "2", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("## ")
    assert "| 2x H100-80GB-SXM |" in text
    for wrong in ("0", "9", "two", "-1", "1.5", "1,", "1,9"):
        assert "--gpus" in refused(capsys, path, "--gpus", wrong)
    rows = asked(capsys, path, "--gpu", "h100,l40s", "--gpus", "1,4")["projection"]["rows"]
    assert [(x["gpu"], x["gpus"]) for x in rows[1:]] == [(g, n) for g in ("H100-80GB-SXM", "L40S") for n in (1, 4)]


def test_each_number_of_gpus_has_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(log(tmp_path / "run.jsonl", items((100, 200, 400), price_usd_per_hour=0.5)))
    assert cli.main(["project", path, "--gpu", "a40", "--gpus", "1", "2"]) == 0
    text = capsys.readouterr().out
    assert "prices, of all GPUs of a row together: " in text
    assert "  A40: as given to the callback\n  A40: as given for 1\n" in text
    assert cli.main(["project", path, "--gpu", "h100"]) == 0
    assert "intervals 80%, of the largest batch 90%; prices: " in capsys.readouterr().out
    assert "--price needs one number" in refused(capsys, path, "--gpu", "h100", "--price", "2", "--gpus", "1", "2")
    assert "--batch must be above 0" in refused(capsys, path, "--batch", "0")


def test_another_top_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(log(tmp_path / "run.jsonl", items((100, 200, 400))))
    # twice the experts of a token: 0.6 ms a slot more, and 2.6 times as long where all 8 are
    question = ["--seq-len", "200", "--gpu", "a40"]
    two, four = (asked(capsys, path, *question, "--top-k", k)["projection"]["rows"][0] for k in ("2", "4"))
    assert two["queries_per_s"][0] == pytest.approx(4 / (0.1 + 0.8 + 0.05), rel=5e-3)
    assert four["queries_per_s"][0] == pytest.approx(4 / (0.1 + 0.8 + 0.48 + 0.05), rel=5e-3)
    assert "not measured" in four["unknown"]["largest_batch"]
    assert "1 to 8 experts, not 9" in refused(capsys, path, "--top-k", "9")
    dense = str(log(tmp_path / "dense.jsonl", items((100, 200), model={"trainable_parameters": 5})))
    assert "no experts" in refused(capsys, dense, "--top-k", "4")


def test_a_probe_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(log(tmp_path / "run.jsonl", items((100, 200, 400))))
    card = r.Device(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=int(79.1 * GIB))
    probe = str(log(tmp_path / "probe.jsonl", items((100, 200, 400), card)))
    row = asked(capsys, run, "--gpu", "h100", "--probe", probe)["projection"]["rows"][1]
    assert "probe of" in row["basis"]
    assert "--gpu 'H100-80GB-SXM'" in refused(capsys, run, "--gpu", "l40s", "--probe", probe)
    cpu = str(log(tmp_path / "cpu.jsonl", items((100,), CPU)))
    assert "no GPU of the catalogue" in refused(capsys, run, "--gpu", "h100", "--probe", cpu)


# another data set


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of one token a word, in a folder as saved ones are."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def rows_of(path: Path, *sizes: int) -> Path:
    path.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in sizes), encoding="utf-8")
    return path


def test_lengths_of_a_file_by_hand(tmp_path: Path, tokenizer: Path) -> None:
    data = rows_of(tmp_path / "data.jsonl", 3, 3, 9, 49)
    found = lengths_of(data, str(tokenizer))
    # each row has its end-of-sequence token besides
    assert (found.queries, found.values, found.counts) == (4, (4, 10, 50), (2, 1, 1))
    assert lengths_of(data, str(tokenizer / "tokenizer.json")) == found
    cut = lengths_of(data, str(tokenizer), 10)
    assert (cut.values, cut.counts) == ((4, 10), (2, 2))
    assert "1 rows cut off at 10 tokens" in cut.notes
    packed = lengths_of(data, str(tokenizer), 10, "wrapped")
    assert (packed.queries, packed.values, packed.counts) == (7, (10,), (7,))  # 68 tokens in pieces of 10
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a b ", "completion": "c d e"}) + "\n", encoding="utf-8")
    assert lengths_of(pairs, str(tokenizer)).values == (6,)


def test_many_lengths_share_bins(tmp_path: Path, tokenizer: Path) -> None:
    sizes = range(1, 2001)
    found = lengths_of(rows_of(tmp_path / "data.jsonl", *sizes), str(tokenizer))
    assert sum(found.counts) == 2000
    assert len(found.values) <= 512
    assert found.values[-1] == 2001
    assert list(found.values) == sorted(set(found.values))


def test_tokenizers_that_cannot_be_had(tmp_path: Path, tokenizer: Path) -> None:
    data = rows_of(tmp_path / "data.jsonl", 3)
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        lengths_of(data, str(tmp_path))
    (tmp_path / "odd.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match="is no tokenizer"):
        lengths_of(data, str(tmp_path / "odd.json"))


def test_the_hub_is_asked_quietly(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    lengths_of(rows_of(tmp_path / "data.jsonl", 3), str(tokenizer))
    assert os.environ["HF_HUB_VERBOSITY"] == "error"


def test_rows_of_messages_need_the_template_beside_the_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    with pytest.raises(TokenizerError, match=r"need the folder of .*tokenizer\.json"):
        lengths_of(data, str(tokenizer / "tokenizer.json"))


def test_another_data_set_is_priced(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(log(tmp_path / "run.jsonl", items((100, 200, 400), train={"max_length": 301})))
    data = str(rows_of(tmp_path / "data.jsonl", *[299] * 50, *[900] * 10))
    words = [path, "--gpu", "a40", "--dataset", data, "--tokenizer", str(tokenizer)]
    job = asked(capsys, *words)["projection"]
    assert (job["queries"], job["epochs"]) == (60, 2.0)
    assert "10 rows cut off at 301 tokens" in job["job"]
    # 4 rows of 300, or one of 301 among them: the mean of the longest of four
    longest = 301 - (50 / 60) ** 4
    rate = job["rows"][0]["queries_per_s"][0]
    assert rate == pytest.approx(4 / (0.1 + 4e-3 * longest + 0.05), rel=5e-3)
    assert job["rows"][0]["hours"][0] == pytest.approx(120 / rate / 3600, rel=1e-6)
    assert "200 tokens" in asked(capsys, *words, "--seq-len", "200")["projection"]["job"]
    assert "go together" in refused(capsys, path, "--dataset", data)
    assert "missing.jsonl" in refused(capsys, path, "--dataset", "missing.jsonl", "--tokenizer", str(tokenizer))


def test_lengths_stand_above_the_run_s() -> None:
    job = workload_of(view(items((100,))), lengths=Lengths(7, (10, 20), (3, 4), ("a file",)), queries=9)
    assert (job.queries, job.longest, job.epochs) == (9, 20, 2.0)
    assert job.basis.endswith("a file")

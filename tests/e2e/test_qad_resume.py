"""Quantisation end to end on a tiny Super 3, and QAD that is killed: it ends with the bytes of an unbroken run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nemo_runspec.artifacts import Registry
from nemotron.data_prep.chat.pack import write_rows
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model, SFTPack
from nemotron.stack.models import NemotronH, NemotronHConfig

from .house import RECIPES, House

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STAGE = RECIPES / "super3" / "stage3_quantize"
STEPS, LENGTH = 12, 64
QUANTIZE = [
    STAGE / "quantize.py", "--config", "smoke", "run.model=start:1", "run.data=pack:1", "evaluation.tasks_per_family=2",
    "evaluation.families=[math]",
]  # fmt: skip
QAD = [
    STAGE / "qad.py", "--config", "smoke", "run.model=super3-quantize-model-smoke:1", "run.data=pack:1",
    f"train.train_iters={STEPS}", "train.eval_interval=3", "checkpoint.save_interval=3",
    "optimizer.lr=1e-4", "optimizer.min_lr=0", "evaluation.tasks_per_family=0",
]  # fmt: skip
OUTPUT = "super3-qad-model-smoke"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A registry with a model, packed rows, the quantised model, and the one of an uninterrupted QAD."""
    house = House(tmp_path_factory.mktemp("house"))
    start, pack = house.root / "start", house.root / "pack"
    tokenizer = train_tokenizer(["Is 12 odd? yes no perhaps"], 400)
    save_tokenizer(tokenizer, start, model_max_length=LENGTH, template="super3")
    torch.manual_seed(0)
    config = NemotronHConfig(
        "MEM*E", vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, mamba_num_heads=2, mamba_head_dim=16, ssm_state_size=16, n_groups=1, chunk_size=16,
        n_routed_experts=4, moe_intermediate_size=16, moe_shared_expert_intermediate_size=32, moe_latent_size=16,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    model = NemotronH(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # opinions that rounding changes
    model.save_pretrained(start, others={"max_position_embeddings": LENGTH, "eos_token_id": 2})
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("valid", 16)):
        rows = [
            (rng.integers(20, tokenizer.get_vocab_size(), n).astype(np.int32), np.ones(n, np.uint8))
            for n in rng.integers(9, 30, count)
        ]
        for _, mask in rows:
            mask[: len(mask) // 2], mask[-1] = 0, 0
        write_rows(pack / split / "rows.parquet", rows, LENGTH, concatenate=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(house.root / "artifacts"))
        Model(path=start, num_steps=0, tokenizer_path=start, chat_template="super3", reasoning=True).save("start")
        SFTPack(
            path=pack, num_examples=1, train_path=pack / "train", valid_path=pack / "valid", tokenizer_path=start,
            seq_len=LENGTH, chat_template="super3",
        ).save("pack")  # fmt: skip
    house.run(QUANTIZE, "quantize")
    house.run(QAD, "unbroken")
    return house


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("number", "exit_code", "steps"),
    [pytest.param(signal.SIGKILL, -9, 5, id="kill"), pytest.param(signal.SIGTERM, 143, 2, id="term")],
)
def test_stopped_and_started_again_ends_with_the_same_bytes(
    house: House, number: signal.Signals, exit_code: int, steps: int, request: pytest.FixtureRequest
) -> None:
    output = request.node.callspec.id
    assert house.run_and_stop(QAD, output, steps, number) == exit_code
    assert len(house.steps(output)) < STEPS
    house.run(QAD, output)
    assert house.digest(OUTPUT) == house.digest(f"{OUTPUT}:1")
    assert house.records(output) == house.records("unbroken")


def test_distillation_keeps_the_scales_and_moves_the_model_towards_the_full_one(house: House) -> None:
    before, after = (load(house.registry, name) for name in ("super3-quantize-model-smoke", OUTPUT))
    assert before.keys() == after.keys()
    scales = [name for name in before if name.rpartition(".")[2].endswith(("scale", "scale_2"))]
    assert scales and all(torch.equal(before[name].float(), after[name].float()) for name in scales)
    codes = [name for name in before if before[name].dtype in (torch.uint8, torch.float8_e4m3fn) and name not in scales]
    assert any(not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in codes)
    mtp = [name for name in before if name.startswith("mtp.")]
    assert mtp and all(torch.equal(before[name], after[name]) for name in mtp)
    results = house.registry.resolve("super3-qad-results-smoke").record["metrics"]
    assert results["recovery"]["kl"] < results["ptq"]["kl"]
    assert results["ptq"]["kl"] == house.records("unbroken")[0]["valid_kl"]


def test_the_record_says_what_was_quantised(house: House) -> None:
    version = house.registry.resolve("super3-quantize-model-smoke")
    assert version.record["type"] == "QuantizedModel" and version.record["fields"]["quant_algo"] == "MIXED_PRECISION"
    assert version.record["inputs"]["model"].startswith("start:1@")
    metrics = house.registry.resolve("super3-quantize-results-smoke").record["metrics"]
    in_file = sum(tensor.nbytes for tensor in load(house.registry, version.ref).values())
    assert metrics["bytes"]["quantized"] == in_file - 2 * 4  # scales of keys and values
    assert metrics["comparison"]["mean"].keys() >= {"difference", "difference_95"}
    config = json.loads((version.path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"


def test_engines_read_window_and_ends_of_the_full_model(house: House) -> None:
    for name in ("super3-quantize-model-smoke", OUTPUT):
        folder = house.registry.resolve(name).path
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == LENGTH
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert set(ends) == {tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>")}


def load(registry: Registry, ref: str) -> dict[str, torch.Tensor]:
    path: Path = registry.resolve(ref).path
    return load_file(path / "model.safetensors")

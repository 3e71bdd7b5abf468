"""The way for a person with one GPU and a published model, done: your chats, adapters on it, both published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from nemo_runspec.artifacts import Registry
from nemo_runspec.config.loader import load_config
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.recipes.nano3.stage1_sft.schema import SFTConfig
from nemotron.recipes.tools.model_files import check_manifest
from nemotron.stack.models import NemotronH

from ..scripts import RECIPES

ROOT = Path(__file__).resolve().parents[4]
SHORT = (
    "train.train_iters=6 train.eval_interval=3 scheduler.lr_warmup_iters=1 scheduler.lr_wsd_decay_iters=2 "
    "optimizer.lr=0.05"
)
OF_NO_ARCHITECTURE = {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' else '' }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
)
PUBLISHED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]


def test_the_published_recipe() -> None:
    """Modules and rate of Super's recipe (tech report 3.1); dim and alpha of Megatron-Bridge."""
    for recipe in ("nano3", "super3"):
        values = load_config(RECIPES / recipe / "stage1_sft" / "config", "lora", ()).data
        values["run"] = {key: values["run"][key] for key in ("model", "data")}
        cfg = SFTConfig.model_validate(values)
        assert (cfg.peft.target_modules, cfg.peft.dim, cfg.peft.alpha) == (PUBLISHED, 32, 32)
        assert cfg.optimizer.lr == 1e-4
        with pytest.raises(ValidationError, match=r"moe_router_bias_update_rate 0\.001: 0 expected"):
            SFTConfig.model_validate(values | {"model": {"moe_router_bias_update_rate": 1e-3}})


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.slow
def test_a_published_model_is_tuned_by_adapters_and_goes_out_again(
    tmp_path: Path, small_model: Callable[..., NemotronH]
) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"Who is {n}?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
        for n in range(60)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    base = small_model("MEM*E-", 0, vocab_size=400, moe_latent_size=10, num_nextn_predict_layers=1)
    base.save_pretrained(tmp_path / "my-model", torch.bfloat16)
    tokenizer = train_tokenizer([json.dumps(chat) for chat in chats], 400)
    save_tokenizer(tokenizer, tmp_path / "my-model", model_max_length=512, template="nano3")
    # As a published folder has it: a template of its own, in a file; and in the config what is no architecture.
    (tmp_path / "my-model/chat_template.jinja").write_text(TEMPLATE)
    edit_json(tmp_path / "my-model/tokenizer_config.json", chat_template=None)
    edit_json(tmp_path / "my-model/config.json", **OF_NO_ARCHITECTURE)

    environment = {key: value for key, value in os.environ.items() if not key.startswith("RUNSPEC_")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for command in (
        "nano3 data prep sft -c lora tokenizer=./my-model sources=[chats.jsonl] packing.seq_length=128",
        f"nano3 sft -c lora run.model=./my-model peft.dim=4 {SHORT}",
        "nano3 model export nano3-sft-model-lora -o tuned",
        "artifacts add tuned",
    ):
        words = ["-c", "from nemotron.cli.main import main; main()", *command.split()]
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    registry = Registry(tmp_path / "output" / "artifacts")
    tuned = registry.resolve("nano3-sft-model-lora")
    # Once on disk; with the window, the token ids and the template of the model that was tuned.
    assert not list((tmp_path / "output/nano3/sft").glob("*/out-payload"))
    for folder in (tuned.path, tmp_path / "tuned"):
        config = json.loads((folder / "config.json").read_text())
        assert {key: config.get(key) for key in OF_NO_ARCHITECTURE} == OF_NO_ARCHITECTURE
    assert json.loads((tmp_path / "tuned/tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    weights = load_file(tuned.path / "model.safetensors")
    adapters = load_file(tuned.path / "adapter/adapter_model.safetensors")
    frozen = load_file(tmp_path / "my-model/model.safetensors")
    assert weights.keys() == frozen.keys()
    # As it was stored, where there is no adapter; with one, B A of the files on top, rounded once.
    moved = {name for name in frozen if not torch.equal(weights[name], frozen[name])}
    for name in moved:
        stored = f"base_model.model.{name.removesuffix('.weight').replace('backbone.', 'model.')}"
        if f"{stored}.weight" in adapters:  # out_proj is whole there
            assert torch.equal(adapters[f"{stored}.weight"], weights[name])
            continue
        delta = 32 / 4 * adapters[f"{stored}.lora_B.weight"] @ adapters[f"{stored}.lora_A.weight"]
        assert torch.equal((frozen[name].float() + delta).bfloat16(), weights[name])
    assert {name.split(".")[-2] for name in moved} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj", "out_proj"
    }  # fmt: skip
    # The export has both, and so has what is imported from it.
    assert check_manifest(tmp_path / "tuned")
    assert "by adapters on `my-model:1`" in (tmp_path / "tuned/README.md").read_text()
    for folder in (tmp_path / "tuned", registry.resolve("tuned").path):
        exported = load_file(folder / "adapter/adapter_model.safetensors")
        assert all(torch.equal(exported[name], tensor) for name, tensor in adapters.items())
        config = json.loads((folder / "adapter/adapter_config.json").read_text())
        assert (config["r"], config["base_model_name_or_path"]) == (4, "my-model:1")

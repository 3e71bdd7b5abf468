#!/usr/bin/env python
# /// script
# dependencies = ["nvidia-modelopt", "transformers", "accelerate"]
#
# [tool.runspec]
# docs = "Quantise Nemotron 3 Nano or Super at the published size with ModelOpt 0.47.0 (PTQ), by a table of formats."
# name = "super3/quantize/modelopt"
# image = "nvcr.io/nvidia/nemo:26.08"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "modelopt_schema.py:QuantizeConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 8
# ///
"""The same step as `quantize.py` at the published size, done by ModelOpt on the model of transformers.

    nemotron super3 quantize --run slurm                # NVFP4 as the released checkpoint has it, config/default.yaml
    nemotron nano3 quantize --run slurm                 # FP8 as the report has it
    nemotron nano3 quantize --run slurm run.model=hf://nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16

One process, whose model lies over the GPUs of a node, block after block: 120.6 B parameters in bf16 are 241 GB.
Publishes a directory that vLLM, SGLang and TensorRT-LLM read; `nemotron super3 eval` measures it.

It is checked against ModelOpt 0.47.0; the image may have another version. The sweep of NVFP4 scales needs a GPU; all
else here runs on a CPU as well.

Simplified against the papers: a row of the pack is one text, whose conversations see each other. The state of Mamba is
no matter of ModelOpt: its format is noted in config.json, as vLLM reads it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.kit import Checkpoint, QuantizedModel, SFTPack, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.modelopt import algorithm, note_ssm_state, quant_cfg, without_sentinels
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters
from nemotron.stack.training.loaders import PackedLoader

if TYPE_CHECKING:
    from nemotron.recipes.super3.stage3_quantize.modelopt_schema import QuantizeConfig


def main() -> None:
    """Config, then calibrate and quantise, then export and publish."""
    cfg: QuantizeConfig = load_script_config(__file__, inputs=read_pipe)
    with open_run(cfg, script=__file__) as run:
        full = Checkpoint.load(path=cfg.checkpoint.pretrained_checkpoint)
        pack = SFTPack.load(path=cfg.dataset.path)
        if pack.train_path is None:
            raise UserError(f"{pack.ref} has no training rows")
        architecture = load_config(full.path)
        rows_BL = PackedLoader(pack.train_path, pack.seq_len, seed=0).next_batch(cfg.dataset.calib_size).input_ids_BL
        rows_BL = rows_BL[:, : cfg.dataset.seq_length]

        # ---- the library's model; the table's rows become names of its quantizers, the last one that fits decides
        placement: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
        model: Any = AutoModelForCausalLM.from_pretrained(full.path, dtype=torch.bfloat16, **placement).eval()
        rules = quant_cfg(cfg.precision, architecture.hybrid_override_pattern, cfg.algorithm.method)
        config = {"quant_cfg": rules, "algorithm": algorithm(cfg.algorithm)}

        # ---- calibrate: the library counts what passes its quantizers, in one forward pass a row
        def forward_loop(model: torch.nn.Module) -> None:
            with torch.no_grad():
                for row_L in rows_BL:
                    model(input_ids=row_L[None].to(next(model.parameters()).device))

        with run.phase("quantize"):
            model = mtq.quantize(model, config, forward_loop)
            mtq.print_quant_summary(model)

        # ---- export: codes and scales in the layout of engines
        with run.phase("export"):
            if mtp := mtp_tensors(full.path):  # in bf16: an engine would look for its scales, were it not excluded
                model._mtp_layer_prefixes = ["mtp"]  # where the export looks, of modules that the model does not have
            export_hf_checkpoint(model, export_dir=run.output_dir, extra_state_dict=mtp)
            without_sentinels(run.output_dir)
            note_ssm_state(run.output_dir, cfg.precision.ssm_state)
            AutoTokenizer.from_pretrained(full.tokenizer_path or full.path).save_pretrained(run.output_dir)
            template = full.chat_template
            if isinstance(template, Path):  # it lies in the model's folder; the new one has its own copy
                template = shutil.copytree(template, run.output_dir / template.name, dirs_exist_ok=True)
            written = json.loads((run.output_dir / "hf_quant_config.json").read_text(encoding="utf-8"))
        # The library's model has packed weights now, two values a number, and never had multi-token prediction.
        total = count_parameters(architecture).total + count_mtp_parameters(architecture).total
        quantized = QuantizedModel(
            path=run.output_dir, tokenizer_path=run.output_dir, num_parameters=total,
            num_steps=full.num_steps, tokens=full.tokens, dataset_path=pack.path, chat_template=template,
            reasoning=full.reasoning, quant_algo=written["quantization"]["quant_algo"], full_path=full.path,
        ).save()  # fmt: skip
    print_complete({"model": quantized})


def mtp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Multi-token prediction, which transformers does not load, and which no table quantises."""
    tensors = dict[str, torch.Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith("mtp.")]  # noqa: SIM118
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))

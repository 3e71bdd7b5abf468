#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "The distillation mixture: 70 % rows of SFT, 30 % of the last pretraining phase, and rows to calibrate on."
# name = "nano2/compressed"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/data_curation", default = "tiny", schema = "data_curation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 3, step 1 of 3: what the small model learns from the large one on.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python data_curation.py --teacher-path MODEL > dataset.json

Rows of L tokens, as stage 1 packed them: 70 % are its rows, 30 % windows of the pretraining blend as its last phase
mixes it (arXiv 2508.14444, section on compression). Rows to calibrate on are the same mixture without padding.

Simplified against the paper: 0.22 M tokens in place of 136 B, 64 calibration rows in place of 1,024, one length.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.encoding import PACKED_SCHEMA
from nemotron.kit import Checkpoint, Dataset, PretrainBlend, Scale, Seed, SFTPack, UserPath, apply_scale
from nemotron.kit.dataclass_script import first_published, output_folder, run_step, step
from nemotron.stack.training.blend import Blend, read_blend
from nemotron.stack.training.loaders import BlendLoader, validation_batches


@dataclass
class Config:
    """What to mix, and how much of it."""

    teacher_path: UserPath | None = None  # default: the latest nano2-rl-model, or nano2-sft-model where there is none
    sft_path: UserPath | None = None  # default: nano2-sft-data, its latest version
    pretrain_path: UserPath | None = None  # default: nano2-pretrain-data, its latest version
    scale: Scale = "tiny"  # 1, 10, 30 or 100 % of the rows, tiny at most 10,000
    num_rows: Annotated[int, Field(ge=100)] = 60_000  # at full scale; fewer where SFT has fewer
    sft_share: Annotated[float, Field(gt=0, lt=1)] = 0.7  # of the rows
    valid_rows: Annotated[int, Field(ge=4)] = 16  # held out, whatever the scale
    calibration_rows: Annotated[int, Field(ge=1)] = 64  # the paper's are 1,024 samples
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the files there


@step
def main(config: Config) -> Dataset:
    """Draw rows of both kinds, mix them, cut the calibration rows."""
    sft = SFTPack.load(config.sft_path or "nano2-sft-data")
    blend = PretrainBlend.load(config.pretrain_path or "nano2-pretrain-data")
    teacher = Checkpoint.load(config.teacher_path or first_published("nano2-rl-model", "nano2-sft-model"))
    check_tokenizers(teacher, sft, blend)
    if teacher.template is None:
        raise UserError(f"{teacher.ref} is a base model: it has no chat template", "what is compressed answers tasks")
    rng = np.random.default_rng(config.seed)

    # --- Rows of SFT, and windows of pretraining text for their share of the tokens
    tables = dict[str, pa.Table]()
    for split, wanted in (("train", apply_scale(config.num_rows, config.scale)), ("valid", config.valid_rows)):
        answers = read_rows(sft.path / split, rng)[: max(1, round(config.sft_share * wanted))]
        num_tokens = pc.sum(pc.list_value_length(answers["input_ids"])).as_py() * (1 / config.sft_share - 1)
        draw = draw_text if split == "train" else held_out_text
        text = text_rows(draw(blend.path, sft.seq_len, max(1, round(num_tokens / sft.seq_len)), config.seed))
        table = pa.concat_tables([answers, text])
        tables[split] = table.take(rng.permutation(table.num_rows))
        print(f"{split}: {answers.num_rows:,} rows of SFT, {text.num_rows:,} of text", file=sys.stderr)
    # Calibration: whole rows of the mixture
    joined = pc.list_flatten(tables["train"]["input_ids"]).to_numpy()
    whole = joined[: len(joined) // sft.seq_len * sft.seq_len].reshape(-1, sft.seq_len)
    tables["calibration"] = text_rows(whole[: config.calibration_rows])

    with output_folder(config.output_dir) as folder:
        for name, table in tables.items():
            pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
        dataset = SFTPack(
            path=folder,
            num_examples=tables["train"].num_rows,
            num_tokens=len(joined),
            num_loss_tokens=pc.sum(pc.list_flatten(tables["train"]["loss_mask"])).as_py(),
            train_path=folder / "train.parquet",
            valid_path=folder / "valid.parquet",
            tokenizer_path=teacher.path,
            seq_len=sft.seq_len,
            chat_template=sft.chat_template,
            reasoning=sft.reasoning,
            metrics={"scale": config.scale},
        )
        return dataset.save()


def check_tokenizers(teacher: Checkpoint, sft: Dataset, blend: Dataset) -> None:
    """Token ids mean the same to the model and in both data sets, or UserError."""
    own = (teacher.tokenizer_path or teacher.path) / "tokenizer.json"
    for data in (sft, blend):
        if data.tokenizer_path is None or (data.tokenizer_path / own.name).read_bytes() != own.read_bytes():
            raise UserError(f"{data.ref} has not the tokenizer of {teacher.ref}", "name what belongs together")


def read_rows(folder: Path, rng: np.random.Generator) -> pa.Table:
    """The rows of all three stages of SFT, shuffled."""
    table = pa.concat_tables(pq.read_table(file, schema=PACKED_SCHEMA) for file in sorted(folder.glob("*.parquet")))
    return table.take(rng.permutation(table.num_rows))


def draw_text(folder: Path, seq_length: int, count: int, seed: int) -> NDArray[np.int64]:
    """Windows of training text, in the mixture of the last phase."""
    loader = BlendLoader(folder, seq_length, count, seed)
    loader.blend = Blend(read_blend(folder).phases[-1:], count)
    return loader.next_batch(count).input_ids_BL.numpy()


def held_out_text(folder: Path, seq_length: int, count: int, seed: int) -> NDArray[np.int64]:
    """Windows of held-out text, of each source by turns; always the same."""
    windows = [batch.input_ids_BL.numpy() for _, batch in validation_batches(folder, seq_length, count, 1)]
    if not windows:
        raise UserError(f"{folder}: no source has {seq_length + 1} tokens held out", "stage 0 with a larger --held-out")
    by_turns = [window for turn in zip_longest(*windows) for window in turn if window is not None]
    return np.stack(by_turns[:count])


def text_rows(tokens_NL: Iterable[NDArray[np.int64]]) -> pa.Table:
    """Rows of one document each; all is trained but the last token, whose label is outside."""
    rows = [{"input_ids": r, "loss_mask": [1] * (len(r) - 1) + [0], "seq_start_id": [0]} for r in tokens_NL]
    return pa.Table.from_pylist(rows, schema=PACKED_SCHEMA)


if __name__ == "__main__":
    run_step(main, Config)

"""What data preparation writes, read by Megatron-Bridge's own reader of packed rows, imported from its wheel."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from forked import OF_DATA, run_forked
from sources import imported, unpacked

import nemotron.recipes
from nemo_runspec.artifacts import Registry
from nemotron.data_prep.tokens.tokenizer import find_tokenizer, save_tokenizer, tokenizer_from, train_tokenizer
from nemotron.kit import SFTPack
from nemotron.kit.megatron import megatron_pack
from nemotron.recipes.data.pack.example import example_conversations, write_example
from nemotron.stack.training.loaders import PackedLoader

pytestmark = pytest.mark.usefixtures("libraries")

RECIPES = Path(nemotron.recipes.__file__).parent
SEQ_LENGTH = 1024
SCRIPT = RECIPES / "nano3/stage1_sft/train_megatron.py"
BRIDGE = "megatron.bridge"
REALLY_IMPORTED = [
    "megatron.core.msc_utils",
    f"{BRIDGE}.utils.safe_pickle",
    f"{BRIDGE}.data.sft_processing",
    f"{BRIDGE}.data.datasets.gpt_sft",
    f"{BRIDGE}.data.packing",
    f"{BRIDGE}.data.builders.gpt_sft",
]
# What these import beside rows that are packed already: it needs transformers, a GPU or the Hub.
STAND_INS: dict[str, dict[str, Any]] = {
    "datasets": {"load_dataset": None, "builder": SimpleNamespace()},
    "megatron.core.process_groups_config": {"ProcessGroupCollection": object},
    "megatron.core.tokenizers.text.libraries": {"HuggingFaceTokenizer": object},
    f"{BRIDGE}.training.tokenizers.tokenizer": {"MegatronTokenizer": object},
    f"{BRIDGE}.utils.common_utils": {"get_rank_safe": lambda: 0, "print_rank_0": lambda *_: None},
    f"{BRIDGE}.data.token_utils": {"extract_skipped_token_ids": None},
    f"{BRIDGE}.data.conversation_processing": dict.fromkeys(
        ["get_processor_tokenizer", "normalize_chat_conversation"]
    ),
    f"{BRIDGE}.data.datasets.utils": dict.fromkeys(
        ["_chat_preprocess", "_get_samples_mapping", "_JSONLMemMapDataset", "_OnlineSampleMapping", "_preprocess",
         "_tokenize"]
    ),
    f"{BRIDGE}.data.sources.hf": {"HFDatasetSourceConfig": object} | dict.fromkeys(
        ["hf_dataset_supports_split", "load_and_adapt_hf_dataset", "resolve_hf_dataset_source"]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Iterator[SimpleNamespace]:
    """Its config of packed rows, and what builds their reader from it."""
    with imported(unpacked("megatron-bridge", "megatron-core"), REALLY_IMPORTED, STAND_INS) as modules:
        yield SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def config_of_script(library: SimpleNamespace, **names: Any) -> Any:
    """What the script makes `recipe.dataset`: its own expression, under these names."""
    tree = ast.parse(SCRIPT.read_bytes())
    expression = next(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "recipe.dataset"
    )
    code = compile(ast.Expression(expression), str(SCRIPT), "eval")
    return eval(code, {**vars(library), **names})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [json.dumps(record) for record in example_conversations(50, 0)]
    save_tokenizer(train_tokenizer(texts, 500), folder, model_max_length=4096, template="nano3")
    return folder


def packed(folder: Path, tokenizer: Path, *words: str) -> SFTPack:
    """What `nemotron data pack` makes of some conversations."""
    write_example(folder / "chats.jsonl", 40, 1)
    words = ("own", f"tokenizer={tokenizer}", f"sources=[{folder}/chats.jsonl]", "splits.valid=0.2",
             f"packing.seq_length={SEQ_LENGTH}", "packing.file_tokens=4000", *words)  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(RECIPES.parents[1])}
    result = run_forked(OF_DATA, [str(RECIPES / "data/pack/pack.py"), "--config", *words], folder, environment)
    assert result.returncode == 0, result.stderr
    version = Registry(folder / "output/artifacts").resolve(json.loads(result.stdout.splitlines()[-1])["data"])
    return SFTPack.load(path=version.path)


@pytest.mark.parametrize("multiple", [1, 16])  # without CP, and lcm(2 CP, CP TP) for CP 8 and TP 2
def test_the_library_trains_the_same_tokens_as_the_embedded_loader(
    multiple: int, library: SimpleNamespace, tokenizer: Path, tmp_path: Path
) -> None:
    pack = packed(tmp_path, tokenizer, f"packing.pad_seq_to_mult={multiple}")
    rows = megatron_pack(pack, SEQ_LENGTH, multiple, 1)
    config = config_of_script(
        library, cfg=SimpleNamespace(dataset=SimpleNamespace(seq_length=SEQ_LENGTH, num_workers=0)), rows=rows,
        multiple=multiple, saves=tmp_path / "run/checkpoints",
    )  # fmt: skip
    config.finalize()
    end = tokenizer_from(find_tokenizer(str(tokenizer)).json_text()).token_to_id("</s>")
    before = sorted(pack.path.rglob("*"))
    reader, valid, _ = library.GPTSFTDatasetBuilder(
        config, SimpleNamespace(eos_id=end, path="t", _tokenizer=None)
    ).build()
    assert sorted(pack.path.rglob("*")) == before  # artifacts do not change
    assert len(valid) == sum(pq.read_metadata(file).num_rows for file in Path(rows.valid).iterdir())
    theirs = reader.collate_fn([reader[i] for i in range(len(reader))])
    assert pack.train_path is not None
    ours = next(PackedLoader(pack.train_path, SEQ_LENGTH, seed=0).all_batches(len(reader)))
    assert theirs["tokens"].shape == (len(ours.input_ids_BL), SEQ_LENGTH)
    trained = 0
    for row in range(len(reader)):
        item = reader[row]
        reader.validate_row(row, item["input_ids"], item["loss_mask"], item["seq_boundaries"][:-1])
        mine, other = ours.loss_mask_BL[row] > 0, theirs["loss_mask"][row] > 0
        assert torch.equal(theirs["tokens"][row][other], ours.input_ids_BL[row][mine])
        assert torch.equal(theirs["labels"][row][other], ours.labels_BL[row][mine])
        trained += int(other.sum())
        # Where a conversation ends, so does attention; each begins at position 0.
        ends = theirs["cu_seqlens_q" if multiple == 1 else "cu_seqlens_q_padded"][row]
        lengths = np.diff(item["seq_boundaries"]) - 1
        assert ends[1 : len(lengths) + 1].tolist() == np.cumsum(lengths).tolist()
        assert not (ends % multiple).any()
        assert not theirs["position_ids"][row][ends[: len(lengths)].long()].any()
    assert trained == pack.num_loss_tokens

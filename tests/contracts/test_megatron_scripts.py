"""The scripts over Megatron-Bridge, from config to artifact, with a stand-in that has the fields of its classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sources import FOLDER, Sources, pins
from test_megatron_bridge import CLASSES, CONFIG, GROUPS

import nemotron.recipes
from nemo_runspec.artifacts import Registry
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model, PretrainBlend, SFTPack
from nemotron.kit.megatron import FP32, MegatronCheckpoint
from nemotron.stack.models import NemotronH, NemotronHConfig

pytestmark = pytest.mark.usefixtures("libraries")

RECIPES = Path(nemotron.recipes.__file__).parent
KEYWORDS = "class {name}:\n    def __init__(self, **values):\n        self.__dict__.update(values)\n"
# Megatron's loop: notes what it was given, saves each iteration up to the last one, or up to LEAVE_AT.
LOOP = """
import json, os
from pathlib import Path

def pretrain(recipe, forward_step, callbacks=None):
    saves = Path(recipe.checkpoint.save)
    recipe.read = callbacks and callbacks.read(recipe, int(os.environ["STEP"]))
    as_json = json.dumps(vars(recipe), default=lambda value: getattr(value, "__dict__", str(value)))
    Path("given.json").write_text(as_json)
    for iteration in range(1, recipe.train.train_iters + 1):
        folder = saves / f"iter_{iteration:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("__0_0.distcp", ".metadata"):
            (folder / name).write_text(f"{name} of {iteration}")
        if str(iteration) == os.environ.get("LEAVE_AT"):
            raise SystemExit(0)
finetune = pretrain
"""
BRIDGE = """
from pathlib import Path

class AutoBridge:
    @classmethod
    def from_hf_pretrained(cls, path):
        assert path == "someone/their-model"
        return cls()

    @classmethod
    def import_ckpt(cls, hf_model_id, megatron_path):
        folder = Path(megatron_path, "iter_0000000")
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", ".metadata"):
            (folder / name).write_bytes(Path(hf_model_id, "config.json").read_bytes())

    def export_ckpt(self, megatron_path, hf_path):
        Path(hf_path).mkdir(parents=True, exist_ok=True)
        if Path("disk-is-full").exists():
            Path(hf_path, "config.json").touch()
            raise OSError("no space left")
        for name in ("config.json", "tokenizer.json"):
            Path(hf_path, name).write_bytes(Path(megatron_path, "__0_0.distcp").read_bytes())
"""
# The library's order: weights and counters are loaded, then data is built, then training begins.
CALLBACKS = """
from types import SimpleNamespace

CallbackContext = None

class CallbackManager(dict):
    def register(self, event_name, fn):
        self[event_name] = fn

    def read(self, recipe, step):
        state = SimpleNamespace(
            cfg=recipe, train_state=SimpleNamespace(step=step, consumed_train_samples=step * 4)
        )
        context = SimpleNamespace(state=state, user_state={})
        self["on_data_init_start"](context)
        asked = (recipe.train.train_samples, state.train_state.consumed_train_samples)
        self["on_train_start"](context)
        return asked, (recipe.train.train_samples, state.train_state.consumed_train_samples)
"""
PRECISION = """
from types import SimpleNamespace

def get_mixed_precision_config(name):
    return SimpleNamespace(name=name, grad_reduce_in_fp32=None)
"""
RECIPE = """
import json
from pathlib import Path
from types import SimpleNamespace
FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text())

class Optimizer(SimpleNamespace):
    main_grads_dtype = main_params_dtype = exp_avg_dtype = exp_avg_sq_dtype = "fp32"

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    groups = {group: SimpleNamespace(**dict.fromkeys(keys)) for group, keys in FIELDS.items()}
    groups["optimizer"] = Optimizer(**vars(groups["optimizer"]) | {"exp_avg_sq_dtype": "bf16"})
    return lambda: SimpleNamespace(**groups)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package `megatron`, whose classes have the fields of the real ones."""
    root = tmp_path_factory.mktemp("library")
    sources = Sources([FOLDER / pin for pin in pins() if pin.startswith("megatron-")])
    fields = {group: sorted(sources.fields(*place)) for group, place in (GROUPS | CLASSES).items()}
    config = "".join(
        KEYWORDS.format(name=name)
        for name in (
            "ConfigContainer",
            "FaultToleranceConfig",
            "InProcessRestartConfig",
            "NVRxStragglerDetectionConfig",
        )
    )
    assert all(sources.definition(CONFIG, line[6:-1]) for line in config.splitlines() if line.startswith("class "))
    files = {
        "bridge/recipes/nemotronh.py": RECIPE,
        "bridge/recipes/fields.json": json.dumps(fields),
        "bridge/training/config.py": config,
        "bridge/training/callbacks.py": CALLBACKS,
        "bridge/training/gpt_step.py": "forward_step = None",
        "bridge/training/mixed_precision.py": PRECISION,
        "bridge/training/finetune.py": LOOP,
        "bridge/training/pretrain.py": LOOP,
        "bridge/data/builders/gpt_sft.py": KEYWORDS.format(name="GPTSFTDatasetConfig"),
        "bridge/data/packing.py": KEYWORDS.format(name="PackedSequenceSpecs"),
        "core/quantization/quant_config.py": "class RecipeConfig:\n    from_config_dict = staticmethod(dict)\n",
    }
    for name, text in files.items():
        file = root / "megatron" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for folder in {root / "megatron", *(root / "megatron").rglob("*/")}:
        (folder / "__init__.py").touch()
    (root / "megatron/bridge/__init__.py").write_text(BRIDGE)
    return root


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """A base model, rows of 64 tokens, and a blend of one stream."""
    registry = Registry(tmp_path / "output/artifacts")
    base, data = tmp_path / "base", tmp_path / "data"
    base.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (base / name).write_text(name)
    MegatronCheckpoint(path=base, num_steps=7, sources=["made up"]).save("base", registry=registry)
    for split in ("train", "valid"):
        (data / split).mkdir(parents=True)
        rows = {"input_ids": [list(range(64))] * 4, "loss_mask": [[1] * 63 + [0]] * 4, "seq_start_id": [[0]] * 4}
        types = {"input_ids": pa.int32(), "loss_mask": pa.uint8(), "seq_start_id": pa.int32()}
        arrays = {name: pa.array(values, pa.list_(types[name])) for name, values in rows.items()}
        pq.write_table(pa.table(arrays), data / split / "00000.parquet")
    (data / "tokenizer").mkdir()
    (data / "tokenizer/tokenizer.json").write_text("{}")
    SFTPack(
        path=data, num_examples=4, train_path=data / "train", valid_path=data / "valid", seq_len=64,
        tokenizer_path=data / "tokenizer", chat_template="nano3", reasoning=True, sources=["made up"],
    ).save("rows", registry=registry)  # fmt: skip
    blend = tmp_path / "blend"
    (blend / "tokenizer").mkdir(parents=True)
    (blend / "tokenizer/tokenizer.json").write_text("{}")
    for name in ("web-train.bin", "web-train.idx", "web-valid.bin", "web-valid.idx"):
        (blend / name).write_bytes(bytes(64))
    phases = [{"name": "all", "until": 1.0, "weights": {"web": 1.0}}]
    sources = {"web": {"train": ["web-train"], "valid": ["web-valid"]}}
    (blend / "blend.json").write_text(json.dumps({"phases": phases, "sources": sources}))
    PretrainBlend(
        path=blend, num_examples=1, tokenizer_path=blend / "tokenizer", blend_path=blend / "blend.json",
        sources=["made up"],
    ).save("blend", registry=registry)  # fmt: skip
    return registry


SMALL = (
    "model.seq_length=64", "dataset.seq_length=64",
    "model.tensor_model_parallel_size=1", "model.pipeline_model_parallel_size=1", "model.context_parallel_size=1",
    "model.expert_model_parallel_size=1", "model.sequence_parallel=false", "train.train_iters=2",
    "train.global_batch_size=4", "train.train_tokens=512", "scheduler.lr_warmup_iters=0", "scheduler.lr_decay_iters=2",
)  # fmt: skip


def start(folder: Path, library: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script and its words, as one process."""
    paths = {"PYTHONPATH": f"{library}:{RECIPES.parents[1]}", "WORLD_SIZE": "1", "RANK": "0"}
    return subprocess.run(
        [sys.executable, str(RECIPES / words[0]), *words[1:]], cwd=folder, capture_output=True, text=True,
        env=os.environ | paths | environment, timeout=200, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_fine_tuning_hands_on_what_the_config_says_and_publishes_the_last_iteration(
    library: Path, registry: Registry, tmp_path: Path
) -> None:
    words = ("nano3/stage1_sft/train_megatron.py", "--config", "default", "run.data=rows", "run.model=base", *SMALL)
    left = start(tmp_path, library, *words, LEAVE_AT="1")  # a signal came, and it has saved
    assert left.returncode == 143, left.stderr
    done = start(tmp_path, library, *words)
    assert done.returncode == 0, done.stderr
    published = registry.resolve("nano3-sft-model-default")
    fields = published.record["fields"]
    assert published.record["type"].endswith("MegatronCheckpoint")
    assert (fields["num_steps"], fields["tokens"], fields["chat_template"]) == (2, 2 * 4 * 64, "nano3")
    assert (published.path / "__0_0.distcp").read_text() == "__0_0.distcp of 2"
    assert sorted(published.record["inputs"]) == ["data", "model"]

    given = json.loads((tmp_path / "given.json").read_text())
    rows = registry.resolve("rows").path
    packing = given["dataset"]["offline_packing_specs"]
    assert packing["packed_train_data_path"] == str(rows / "train")
    assert (packing["packed_sequence_size"], packing["pad_seq_to_mult"]) == (64, 1)
    assert given["tokenizer"]["tokenizer_model"] == str(rows / "tokenizer")
    assert given["checkpoint"]["pretrained_checkpoint"] == str(registry.resolve("base").path)
    assert given["checkpoint"]["load"] == given["checkpoint"]["save"]
    assert given["optimizer"]["lr"] == 5e-5 and given["model"]["calculate_per_token_loss"] is True
    assert given["model"]["mtp_num_layers"] is None and given["train"]["exit_signal_handler"] is True
    # The library's scheduler sets the optimiser's weight decay in every step, by default to 0.033.
    assert given["scheduler"]["start_weight_decay"] == given["scheduler"]["end_weight_decay"] == 0.1
    assert given["mixed_precision"]["grad_reduce_in_fp32"] is True  # ddp's is overwritten with this one
    assert given["optimizer"]["use_precision_aware_optimizer"] is False
    assert {given["optimizer"][key] for key in FP32} == {"fp32"}
    assert "train_tokens" not in given["train"]


def test_pretraining_of_another_family_hands_on_its_blend_its_precisions_and_what_it_goes_on_from(
    library: Path, registry: Registry, tmp_path: Path
) -> None:
    config = RECIPES / "super3/stage0_pretrain/config/phase2.yaml"
    words = ("--config", str(config), *SMALL, "scheduler.lr_wsd_decay_iters=1", "run.data=blend", "run.model=base")
    done = start(tmp_path, library, "nano3/stage0_pretrain/train_megatron.py", *words, STEP="7")
    assert done.returncode == 0, done.stderr
    published, data = registry.resolve("super3-pretrain-model-phase2"), registry.resolve("blend").path
    assert published.record["fields"]["num_steps"] == 2
    assert published.record["fields"]["tokenizer_path"] == str(data / "tokenizer")
    given = json.loads((tmp_path / "given.json").read_text())
    assert given["dataset"]["blend_per_split"] == [
        [[str(data / f"web-{split}")], [1.0]] for split in ("train", "valid")
    ] + [None]
    run_dir = Path(given["checkpoint"]["save"]).parent
    assert Path(given["dataset"]["path_to_cache"]).parent == run_dir  # and not the artifact
    assert given["checkpoint"]["load"] == str(registry.resolve("base").path)
    assert given["model"]["quant_recipe"]["configs"]["bf16"]["training_recipe"] == {}
    assert given["model"]["mtp_num_layers"] == 2
    assert given["mixed_precision"] == {
        "name": "nemotron_3_super_bf16_with_nvfp4_mixed", "grad_reduce_in_fp32": False,
    }  # fmt: skip


@pytest.mark.parametrize(("step", "consumed"), [("7", 0), ("8", 4)])  # at the beginning of the phase, and requeued
def test_a_later_phase_reads_its_blend_from_the_beginning(
    step: str, consumed: int, library: Path, registry: Registry, tmp_path: Path
) -> None:
    """`base` has seven iterations of other data, and a batch here is four sequences."""
    config = RECIPES / "super3/stage0_pretrain/config/phase2.yaml"
    length = ("train.train_iters=9", "train.train_tokens=2304", "scheduler.lr_decay_iters=9")
    words = ("--config", str(config), *SMALL, *length, "scheduler.lr_wsd_decay_iters=1", "run.data=blend")
    script = "nano3/stage0_pretrain/train_megatron.py"
    done = start(tmp_path, library, script, *words, "run.model=base", STEP=step)
    assert done.returncode == 0, done.stderr
    given = json.loads((tmp_path / "given.json").read_text())
    assert given["read"] == [[2 * 4, consumed], [None, int(step) * 4]]

    going_on = ("run.model=super3-pretrain-model-phase2", "scheduler.lr_warmup_iters=1")  # the same data
    done = start(tmp_path, library, script, *words, *going_on)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "given.json").read_text())["read"] is None
    other = ("run.model=super3-pretrain-model-phase2", "dataset.phase=all")  # its only one, but another name
    done = start(tmp_path, library, script, *words, *other, STEP="9")
    assert json.loads((tmp_path / "given.json").read_text())["read"] == [[0, 0], [None, 36]]


def test_a_model_becomes_a_checkpoint_and_a_model_again(library: Path, registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer = train_tokenizer([f"What is {i} + {i}? It is {2 * i}." for i in range(50)], 300)
    save_tokenizer(tokenizer, folder, model_max_length=128, template="nano3")
    config = NemotronHConfig(
        hybrid_override_pattern="M*", vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, mamba_num_heads=2, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
    )  # fmt: skip
    NemotronH(config).save_pretrained(folder)
    Model(
        path=folder, num_steps=3, tokenizer_path=folder, chat_template="nano3", reasoning=True, sources=["made up"]
    ).save("mine", registry=registry)
    store = {"RUNSPEC_ARTIFACTS_ROOT": str(registry.root)}
    options = {"model": "mine:1", "name": "mine-megatron"}
    done = start(tmp_path, library, "tools/megatron_import.py", json.dumps(options), **store)
    assert (done.returncode, done.stdout) == (0, "mine-megatron:1\n"), done.stderr
    fields = registry.resolve("mine-megatron").record["fields"]
    assert (fields["num_steps"], fields["chat_template"], fields["reasoning"]) == (3, "nano3", True)

    options = {"model": "mine-megatron:1", "output": "out", "like": "hf://someone/their-model"}
    (tmp_path / "out.part").mkdir()  # the user's own
    (tmp_path / "out.part/note").touch()
    (tmp_path / "disk-is-full").touch()
    present = sorted(tmp_path.iterdir())
    assert start(tmp_path, library, "tools/megatron_export.py", json.dumps(options), **store).returncode != 0
    assert sorted(tmp_path.iterdir()) == present
    (tmp_path / "disk-is-full").unlink()
    done = start(tmp_path, library, "tools/megatron_export.py", json.dumps(options), **store)
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()  # not theirs
    assert (tmp_path / "out.part/note").exists()
    again = start(tmp_path, library, "tools/megatron_export.py", json.dumps(options), **store)
    assert again.returncode == 2 and "out exists" in again.stderr

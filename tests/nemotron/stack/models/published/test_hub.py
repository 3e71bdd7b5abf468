"""Model directories: exact round trips, what transformers writes and reads, refusals, damage, memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import UserError
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.decoding.speculative import generate_speculative
from nemotron.stack.models.published.config_json import FIXED, config_from_dict, load_config, unknown_keys
from nemotron.stack.models.published.hub import Written, parse_size, save_model, write_directory
from nemotron.stack.models.published.presets import PRESETS

Make = Callable[..., NemotronH]
MTP = {"num_nextn_predict_layers": 1}
LATENT = {"moe_latent_size": 12}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

# config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, as published.
PUBLISHED_NANO_3: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "bos_token_id": 1, "chunk_size": 128,
    "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
    "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None,
    "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4",
    "use_bias": False, "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip


def assert_same(ours: NemotronH, other: NemotronH) -> None:
    """Equal config, and equal tensors to the bit and the dtype; buffers that are not saved as in a new model."""
    assert ours.config == other.config
    state, again = ours.state_dict(), other.state_dict()
    assert state.keys() == again.keys()
    for name, tensor in state.items():
        assert tensor.dtype == again[name].dtype and torch.equal(tensor, again[name]), name
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in other.parameters()]
    fresh = dict(NemotronH(ours.config).named_buffers())
    for name, buffer in other.named_buffers():
        assert buffer.dtype == fresh[name].dtype or name in state
        assert name in state or torch.equal(buffer, fresh[name]), name


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "dimensions"),
    [
        ("M", {}), ("*", {}), ("E", {}), ("-", {}), ("E", LATENT), ("MEM*-E", {}), ("M*", MTP), ("ME*", LATENT | MTP),
        ("M", MTP | {"mtp_hybrid_override_pattern": "ME-*"}), ("M", MTP | {"mtp_hybrid_override_pattern": "E"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("max_shard_size", [10**9, 3000])
def test_import_of_export_is_equal_to_the_bit(
    make_model: Make, tmp_path: Path, pattern: str, dimensions: dict[str, Any], max_shard_size: int
) -> None:
    model = make_model(pattern, **dimensions)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == 3000)
    assert_same(model, NemotronH.from_pretrained(tmp_path))


def test_a_latent_moe_and_its_drafts_lie_under_the_published_names(make_model: Make, tmp_path: Path) -> None:
    """One tensor an expert, in trunk and block alike, at the latent width; what is read again drafts the same."""
    model = make_model("E*", n_routed_experts=3, **LATENT, **MTP)
    model.save_pretrained(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / SINGLE).items()}
    for mixer in ("backbone.layers.0.mixer", "mtp.layers.1.mixer"):
        expected = {
            "gate.weight": (3, 24), "gate.e_score_correction_bias": (3,),
            "fc1_latent_proj.weight": (12, 24), "fc2_latent_proj.weight": (24, 12),
            "shared_experts.up_proj.weight": (18, 24), "shared_experts.down_proj.weight": (24, 18),
        } | {f"experts.{e}.up_proj.weight": (14, 12) for e in range(3)} | {
            f"experts.{e}.down_proj.weight": (12, 14) for e in range(3)
        }  # fmt: skip
        assert {name.removeprefix(f"{mixer}."): s for name, s in shapes.items() if name.startswith(mixer)} == expected
    around = ("0.enorm", "0.hnorm", "0.eh_proj", "0.norm", "1.norm", "1.final_layernorm")
    assert {f"mtp.layers.{name}.weight" for name in around} <= shapes.keys()

    prompts = [[1, 2, 3], [4, 5]]
    _, drafted = generate_speculative(model, prompts, 12, 3, stop_token_ids=())
    _, again = generate_speculative(NemotronH.from_pretrained(tmp_path).eval(), prompts, 12, 3, stop_token_ids=())
    assert again == drafted and drafted.rounds > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(make_model: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model("ME*-")
    model.save_pretrained(tmp_path / "cast", dtype=dtype)
    cast = model.to(dtype)
    bias = [name for name in cast.state_dict() if name.endswith("e_score_correction_bias")]
    as_stored = NemotronH.from_pretrained(tmp_path / "cast", dtype=None)
    for name, tensor in as_stored.state_dict().items():
        wide = name in bias and dtype != torch.float64
        assert tensor.dtype == (torch.float32 if wide else dtype)
        assert torch.equal(tensor, cast.state_dict()[name]), name
    for name, tensor in NemotronH.from_pretrained(tmp_path / "cast").state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, as_stored.state_dict()[name].float())
    written = json.loads((tmp_path / "cast" / "config.json").read_text())
    said = written["torch_dtype"]
    assert written["mamba_ssm_cache_dtype"] == PUBLISHED_NANO_3["mamba_ssm_cache_dtype"]
    assert f"torch.{said}" == str(dtype)


def test_keys_beside_the_architecture_may_be_given(make_model: Make, tmp_path: Path) -> None:
    model = make_model("M*")
    model.save_pretrained(tmp_path, others={"max_position_embeddings": 99, "vocab_size": 1})
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["max_position_embeddings"], config["vocab_size"]) == (99, model.config.vocab_size)


def test_a_gpu_without_room_for_the_weights_is_said_before_they_are_read(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PyTorch keeps for the next tensors, those of a model before this one, counts as room."""
    make_model("ME").save_pretrained(tmp_path, dtype="bfloat16")
    needed = sum(tensor.nbytes for tensor in NemotronH.from_pretrained(tmp_path).state_dict().values())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 5000, 2 * needed))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12_000)
    sizes = f"{human_size(needed)} of a GPU's memory, and {human_size(needed - 3000)} are free"
    with pytest.raises(UserError, match=f"its weights take {sizes}") as refused:
        NemotronH.from_pretrained(tmp_path, device="cuda")
    assert refused.value.hint == "dtype=bfloat16 takes half"


def test_a_dtype_may_be_a_word(make_model: Make, tmp_path: Path) -> None:
    model = make_model("M*")
    model.save_pretrained(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in NemotronH.from_pretrained(tmp_path, "auto").parameters()} == {torch.bfloat16}
    with pytest.raises(UserError, match="unknown dtype 'bf16x'"):
        NemotronH.from_pretrained(tmp_path, "bf16x")
    with pytest.raises(UserError, match=r"not written as torch\.float8_e4m3fn"):
        model.save_pretrained(tmp_path, dtype=torch.float8_e4m3fn)


def test_the_files_are_what_the_format_says(make_model: Make, tmp_path: Path) -> None:
    """Read with the safetensors library, not with our own reader."""
    model = make_model("ME*-", dtype=torch.bfloat16)
    model.moe_blocks()[0].gate.e_score_correction_bias = model.moe_blocks()[0].gate.e_score_correction_bias.float()
    model.save_pretrained(tmp_path, max_shard_size=4000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    total = 0
    for file in files:
        tensors = load_file(tmp_path / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 4000 or len(tensors) == 1
        total += size
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        header_size = int.from_bytes((tmp_path / file).read_bytes()[:8], "little")
        header = json.loads((tmp_path / file).read_bytes()[8 : 8 + header_size])
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == file
            assert (
                index["metadata"]["sha256"][name]
                == hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy()).hexdigest()
            )
            assert (8 + header_size + header[name]["data_offsets"][0]) % tensor.element_size() == 0
    assert index["metadata"]["total_size"] == total


def test_a_new_model_takes_the_place_of_an_old_one(make_model: Make, tmp_path: Path) -> None:
    make_model("ME").save_pretrained(tmp_path, max_shard_size=3000)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = make_model("M*", seed=5)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", SINGLE, INDEX, "tokenizer.json"}
    assert_same(model, NemotronH.from_pretrained(tmp_path))


def test_a_writer_that_fails_leaves_the_old_model(make_model: Make, tmp_path: Path) -> None:
    model = make_model("ME")
    model.save_pretrained(tmp_path)

    class Broken(Written):
        def fetch(self) -> torch.Tensor:
            raise KeyboardInterrupt

    tensors = {"a": Written(torch.ones(4), torch.float32), "b": Broken(torch.ones(4), torch.float32)}
    with pytest.raises(KeyboardInterrupt):
        write_directory(tmp_path, {}, tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", SINGLE, INDEX}
    assert_same(model, NemotronH.from_pretrained(tmp_path))


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "dimensions"), [("MEM*-E", {}), ("ME*", LATENT | MTP), ("M-M*-", {})])
def test_transformers_loads_it_plainly_and_generates_the_same(
    make_model: Make, tmp_path: Path, pattern: str, dimensions: dict[str, Any]
) -> None:
    """Nothing is set by hand, and half of the heads have dt far below the 1e-3 at which transformers would clamp it."""
    transformers = pytest.importorskip("transformers")
    # 16: transformers' grouped matmul wants rows of a multiple of 16 bytes on the CPU.
    model = make_model(pattern, seed=4, moe_intermediate_size=16, **dimensions)
    for block in model.blocks():
        if hasattr(block.mixer, "dt_bias"):
            block.mixer.dt_bias.data[::2] = -11.0
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    ours = torch.tensor(generate(model, ids.tolist(), 20, temperature=0, stop_token_ids=(61,)).tokens)
    with torch.no_grad():
        first, second = model(torch.cat([ids, ours], dim=1)).logits[:, 16:-1].topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-4, "too close to call: another seed"
    out = theirs.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(out[:, 17:], ours)
    # The clamp that config.json avoids would have shown.
    for layer in theirs.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (1e-3, math.inf)
    with torch.no_grad():
        assert (model(ids).logits - theirs(ids).logits).abs().max() > 1e-4


@pytest.mark.parametrize(("pattern", "dimensions"), [("MEM*-E", {}), ("ME*", LATENT)])
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves_comes_in_to_the_bit(
    make_model: Make, tmp_path: Path, pattern: str, dimensions: dict[str, Any], max_shard_size: str, dtype: torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = make_model(pattern, **dimensions)
    config = transformers.NemotronHConfig(**ours.config.to_dict())
    torch.manual_seed(3)
    theirs = transformers.NemotronHForCausalLM(config).to(dtype)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert "layers_block_type" in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / INDEX).exists() == (max_shard_size == "20KB")
    loaded = NemotronH.from_pretrained(tmp_path, dtype=None)
    assert loaded.config == ours.config
    state = {name.replace("model.", "backbone."): tensor for name, tensor in theirs.state_dict().items()}
    found = loaded.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
        assert found[name].dtype == dtype or name.endswith("e_score_correction_bias")


def test_mtp_weights_that_transformers_dropped_are_missed(make_model: Make, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_model("M*", **MTP).save_pretrained(tmp_path / "ours")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"mtp\.layers\.0\..* is missing") as refused:
        NemotronH.from_pretrained(tmp_path / "theirs")
    assert "num_nextn_predict_layers 0" in str(refused.value.hint)


def test_mtp_weights_without_a_place_are_left_out(make_model: Make, tmp_path: Path) -> None:
    model = make_model("M*", **MTP)
    model.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", num_nextn_predict_layers=0)
    loaded = NemotronH.from_pretrained(tmp_path)
    state = model.state_dict()
    assert {name for name in state if not name.startswith("mtp.")} == loaded.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


# ---- config.json -----------------------------------------------------------------------------------------------------


def edit(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; `...` removes one."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_the_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_NANO_3))
    config = load_config(tmp_path)
    assert (config.mamba_inner_size, config.n_routed_experts, config.moe_latent_size) == (4096, 128, None)
    with torch.device("meta"):
        total, active = NemotronH(config).num_parameters()
    assert (round(total / 1e9, 3), round(active / 1e9, 3)) == (31.578, 3.580)
    # Of the preset only what this file does not say differs: how training began, and a width that no block here has.
    assert replace(config, initializer_range=0.0173, intermediate_size=512) == PRESETS["nano3-30b"]
    assert unknown_keys(PUBLISHED_NANO_3) == []
    assert unknown_keys(PUBLISHED_NANO_3 | {"flux_capacitor": 1}) == ["flux_capacitor"]


OTHER = {
    bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value + 0.1,
    str: lambda value: "gelu", type(None): lambda value: 4096,
}  # fmt: skip


@pytest.mark.parametrize("key", FIXED)
def test_features_that_this_model_does_not_have_are_refused_by_name(tmp_path: Path, key: str) -> None:
    value = OTHER[type(FIXED[key])](FIXED[key])
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_NANO_3 | {key: value}))
    with pytest.raises(UserError, match=rf"config\.json: {key} {json.dumps(value)}: this model has"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "llama"}, 'model_type is "llama", "nemotron_h" expected'),
        ({"model_type": ...}, "model_type is null"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"mamba_head_dim": ...}, "mamba_head_dim is missing"),
        ({"routed_scaling_factor": ...}, "routed_scaling_factor is missing"),
        ({"hybrid_override_pattern": ...}, "hybrid_override_pattern is missing"),
        ({"hidden_size": "2688"}, "hidden_size '2688': int expected"),
        ({"hidden_size": 2688.5}, "hidden_size 2688.5: int expected"),
        ({"vocab_size": -1}, "vocab_size must be positive"),
        ({"num_hidden_layers": 51}, "num_hidden_layers 51, but there are 52 blocks"),
        ({"layers_block_type": ["linear_attention"]}, "layers_block_type says M, hybrid_override_pattern says MEMEM"),
        ({"hybrid_override_pattern": ..., "layers_block_type": ["swa"]}, 'layers_block_type: "swa" is not one of'),
        ({"hybrid_override_pattern": ..., "layers_block_type": "M"}, 'layers_block_type: "M" is not one of'),
        ({"time_step_limit": [0.001, math.inf]}, "time_step_limit"),
        ({"time_step_limit": 3}, "time_step_limit 3: two numbers expected"),
        ({"quantization_config": {"quant_method": "gptq"}}, 'quantization_config: quant_method "gptq": of quantised'),
    ],
)
def test_configs_that_cannot_be_are_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_NANO_3))
    edit(tmp_path / "config.json", **values)
    with pytest.raises(UserError) as refused:
        load_config(tmp_path)
    assert said in refused.value.message and "config.json" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0.0, {"__float__": "Infinity"}]])
def test_a_limit_that_limits_nothing_is_fine(limit: list[Any]) -> None:
    config_from_dict(PUBLISHED_NANO_3 | {"time_step_limit": limit})


def test_other_names_of_the_same_fields() -> None:
    old = {key: value for key, value in PUBLISHED_NANO_3.items() if key not in ("head_dim", "hybrid_override_pattern")}
    blocks = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    names = [blocks[symbol] for symbol in PUBLISHED_NANO_3["hybrid_override_pattern"]]
    other = config_from_dict(old | {"attention_head_dim": 128, "layers_block_type": names})
    assert other == config_from_dict(PUBLISHED_NANO_3)


# ---- damage ----------------------------------------------------------------------------------------------------------


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors, in a file without any fault of its own; the index with its digests stays."""
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def plant(path: Path) -> None:
    """A pickle that would tell on whoever loads it."""
    witness = str(path.parent / "LOADED")

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (witness, "w"))

    path.write_bytes(pickle.dumps(Payload()))


def torch_save(path: Path) -> None:
    torch.save({"lm_head.weight": torch.ones(3)}, path)


def first(folder: Path) -> Path:
    return shards_of(folder)[0]


def last(folder: Path) -> Path:
    return shards_of(folder)[-1]


LAST = "lm_head.weight"
DAMAGES: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("truncated in the data", lambda d: truncate(last(d), last(d).stat().st_size - 1), ["truncated at byte", LAST]),
    ("truncated in the header", lambda d: truncate(first(d), 100), ["truncated: its header is"]),
    ("empty", lambda d: truncate(first(d), 0), ["not a safetensors file"]),
    ("a bit of the last tensor", lambda d: flip(last(d), -1), [LAST, "damaged: its content differs from its sha256"]),
    ("a bit of the header's length", lambda d: flip(first(d), 1), ["00001-of-"]),
    ("a bit of the header", lambda d: flip(first(d), 60), ["00001-of-"]),
    ("a byte too many", lambda d: last(d).write_bytes(last(d).read_bytes() + b"0"), ["safetensors: "]),
    ("a shard is missing", lambda d: last(d).unlink(), [INDEX, "but there is no such file"]),
    ("another shard's content", lambda d: shutil.copyfile(first(d), last(d)), ["embeddings", INDEX]),
    ("a tensor is missing", lambda d: rewrite(last(d), lambda s: s.pop(LAST)), [INDEX, LAST, "not in it"]),
    ("a tensor too many", lambda d: rewrite(last(d), lambda s: s.update(more=torch.ones(1))), ["more", "no file"]),
    (
        "another shape", lambda d: rewrite(last(d), lambda s: s.update({LAST: s[LAST][:-1].clone()})),
        ["model-0", f"{LAST} is 60x24, 61x24 expected"],
    ),
    ("integers", lambda d: rewrite(last(d), lambda s: s.update({LAST: s[LAST].int()})), [LAST, "dtype I32"]),
    (
        "another float dtype", lambda d: rewrite(last(d), lambda s: s.update({LAST: s[LAST].bfloat16()})),
        [LAST, "damaged: its content differs from its sha256"],
    ),
    ("the index is no JSON", lambda d: truncate(d / INDEX, 200), [INDEX, "damaged"]),
    ("the index is a list", lambda d: (d / INDEX).write_text("[]"), [INDEX, "damaged"]),
    (
        "the index leads elsewhere", lambda d: edit(d / INDEX, weight_map={LAST: "../model.safetensors"}, metadata={}),
        [INDEX, "'../model.safetensors' for lm_head.weight"],
    ),
    ("the index names a pickle", lambda d: edit(d / INDEX, weight_map={LAST: "w.bin"}, metadata={}), ["'w.bin'"]),
    (
        "a digest is missing", lambda d: edit(d / INDEX, metadata={"sha256": {LAST: "0"}}),
        [INDEX, "not of the same tensors"],
    ),
    ("no index", lambda d: (d / INDEX).unlink(), ["no weights: neither model.safetensors nor"]),
    ("a pickle beside", lambda d: plant(d / "pytorch_model.bin"), ["pytorch_model.bin: a pickle"]),
    ("a pickle under the name of a shard", lambda d: plant(last(d)), ["not safetensors but a pickle"]),
    ("torch.save under the name of a shard", lambda d: torch_save(last(d)), ["not safetensors but a pickle"]),
    ("a web page under the name of a shard", lambda d: last(d).write_text("<html>404"), ["not a safetensors file"]),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), [each[1:] for each in DAMAGES], ids=[each[0] for each in DAMAGES])
def test_damage_is_told_in_a_line(
    make_model: Make, tmp_path: Path, damage: Callable[[Path], object], said: list[str]
) -> None:
    make_model("ME*").save_pretrained(tmp_path, max_shard_size=30_000)
    assert len(shards_of(tmp_path)) == 2
    damage(tmp_path)
    with pytest.raises(UserError) as refused:
        NemotronH.from_pretrained(tmp_path)
    message = refused.value.message
    assert all(part in message for part in said), message
    assert "\n" not in message and str(tmp_path) in message
    assert not (tmp_path / "LOADED").exists()


def test_every_bit_of_a_file_counts(make_model: Make, tmp_path: Path) -> None:
    """Any flipped bit of header or data is either refused or changes nothing (as in `__metadata__` and blanks)."""
    make_model("M").save_pretrained(tmp_path)
    path = tmp_path / SINGLE
    whole = path.read_bytes()
    expected = NemotronH.from_pretrained(tmp_path).state_dict()
    unseen = 0
    for position in [*range(0, 1200, 11), *range(1200, len(whole), 601)]:
        flip(path, position, bit=position % 8)
        try:
            found = NemotronH.from_pretrained(tmp_path).state_dict()
        except UserError:
            pass
        else:
            unseen += 1
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        path.write_bytes(whole)
    assert unseen < 5


def test_experts_of_different_dtypes_are_refused(make_model: Make, tmp_path: Path) -> None:
    make_model("E").save_pretrained(tmp_path)
    (tmp_path / INDEX).unlink()
    name = "backbone.layers.0.mixer.experts.2.up_proj.weight"
    rewrite(tmp_path / SINGLE, lambda state: state.update({name: state[name].bfloat16()}))
    with pytest.raises(UserError, match=r"experts\.up_proj have different dtypes: BF16, F32"):
        NemotronH.from_pretrained(tmp_path)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("50kb", 50_000), ("1.5 MB", 1_500_000), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "5 potatoes", "-1MB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UserError, match="bad size"):
        parse_size(text)


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_growth(code: str, *words: str) -> float:
    """MiB by which `code` raises the peak memory of a fresh process, over what it has after the imports.

    glibc's malloc keeps freed tensors in its heap, from 0 to 5 MiB of them by chance, unless they are mapped memory.
    """
    program = (
        "import sys, torch\nfrom pathlib import Path\nfrom nemotron.stack.models import NemotronH\n"
        "def status(key):\n"
        "    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith(key))\n"
        "def start():\n"
        "    open('/proc/self/clear_refs', 'w').write('5')  # forget the peak so far\n"
        "    return status('VmRSS')\n"
        f"before = start()\n{code}\nprint((status('VmHWM') - before) / 1024)"
    )
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from Linux's /proc")
def test_neither_way_holds_the_model_twice(tmp_path: Path) -> None:
    """One file of 94 MiB; its largest tensor, an embedding, has 8. Beyond the model, that and some slack is allowed."""
    config = NemotronHConfig(
        "ME*E", vocab_size=8192, hidden_size=256, n_routed_experts=32, moe_intermediate_size=640,
        moe_shared_expert_intermediate_size=640,
    )  # fmt: skip
    torch.manual_seed(0)
    model = NemotronH(config)
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    assert 90 < size < 110
    save_model(tmp_path, config, model.state_dict())
    load = "model = NemotronH.from_pretrained(Path(sys.argv[1]), dtype=torch.{})"
    assert 0.9 * size < peak_growth(load.format("float32"), str(tmp_path)) < size + 16
    assert 0.45 * size < peak_growth(load.format("bfloat16"), str(tmp_path)) < size / 2 + 16
    save = "\nbefore = start()\nmodel.save_pretrained(Path(sys.argv[2]), dtype=torch.bfloat16)"
    assert peak_growth(load.format("float32") + save, str(tmp_path), str(tmp_path / "again")) < 16

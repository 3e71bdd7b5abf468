"""What goes to NeMo-RL and comes back: configs that cannot work, prompts, pairs, folders of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_runspec.config.loader import load_config
from nemo_runspec.config.schema import load_schema
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.kit import Preferences, RLPrompts
from nemotron.kit.nemo_rl import check_gym_prompts, last_step, master_values, write_pairs
from nemotron.kit.schemas.megatron import dimensions_of
from nemotron.recipes.nano3 import __file__ as nano3
from nemotron.recipes.nano3.stage2_rl.nemo_rl_schema import DPOConfig, RLConfig

STAGE = Path(nano3).parent / "stage2_rl"
SUPER = STAGE.parents[1] / "super3/stage2_rl/config"
EXPERTS, BLOCKS = {"nano3": 128, "super3": 512}, {"nano3": 52, "super3": 88}


def values_of(file: Path, script: str = "train_nemo_rl.py") -> dict[str, Any]:
    """A shipped config with what its interpolations stand for, and the schema's defaults."""
    text = json.dumps(load_config(file.parent, str(file)).data)
    length = json.loads(text)["policy"]["max_total_sequence_length"]
    for old, new in {
        '"${policy.max_total_sequence_length}"': str(length),
        '"${policy.max_grad_norm}"': "1.0",
        '"${policy.megatron_cfg.optimizer.lr}"': "1e-6",
        '"${grpo.num_generations_per_prompt}"': "16",
    }.items():
        text = text.replace(old, new)
    schema = load_schema(parse(STAGE / script))
    assert schema is not None
    return schema.model_validate(json.loads(text)).model_dump()


def config_with(path: str, value: Any, file: Path = STAGE / "config/default.yaml") -> RLConfig:
    """A shipped config with another value."""
    values = values_of(file)
    group: Any = values
    *groups, key = path.split(".")
    for name in groups:
        group = group[name]
    group[key] = value
    return RLConfig.model_validate({**values, "run": {"data": "d"}})


@pytest.mark.parametrize(
    ("path", "value", "refusal"),
    [
        ("policy.train_global_batch_size", 1024, "makes one update a step"),
        ("policy.make_sequence_length_divisible_by", 8, "is no multiple of 16: 2 x CP with CP above 1, times TP"),
        ("policy.megatron_cfg.tensor_model_parallel_size", 16, "does not divide the 8 groups of Mamba"),
        ("policy.megatron_cfg.tensor_model_parallel_size", 3, "size 3 does not divide the 32 attention heads"),
        ("policy.megatron_cfg.pipeline_model_parallel_size", 3, "size 3 does not divide the 52 blocks"),
        ("policy.megatron_cfg.expert_model_parallel_size", 48, "size 48 does not divide the 128 experts"),
        ("policy.megatron_cfg.context_parallel_size", 3, "size 3 does not divide the 32 heads of Mamba in a TP part"),
        ("policy.megatron_cfg.num_layers_in_first_pipeline_stage", 53, "-1 blocks are left for the 1 other stages"),
        ("policy.megatron_cfg.mtp_use_repeated_layer", True, "builds a block, mtp_num_layers 0 never applies it"),
        ("policy.max_total_sequence_length", 49_150, r"no multiple of lcm\(2 CP, CP TP\) = 8"),
        ("policy.sequence_packing.enabled", False, "context_parallel_size above 1 needs sequence_packing"),
        ("policy.generation.max_new_tokens", 50_000, "exceeds max_total_sequence_length 49,152"),
        ("policy.generation.vllm_cfg.max_model_len", 65_536, "exceeds max_total_sequence_length 49,152"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", 3, "that generate are no multiple of vLLM's TP x PP = 3"),
        ("grpo.async_grpo.enabled", True, "needs nodes for generation"),
        ("cluster.num_nodes", 33, "264 GPUs that train are no multiple of TP x PP x CP = 16"),
        ("cluster.num_nodes", 3, "no multiple of TP x PP x CP = 16"),
        ("env.nemo_gym.num_gpu_node", 7, "num_gpu_node is neither a key nor a server.*did you mean num_gpu_nodes"),
        ("checkpointing.checkpoint_must_save_by", "03:40:00", "pattern"),
        ("checkpointing.metric_name", "val_reward", "pattern"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_work_is_refused(path: str, value: Any, refusal: str) -> None:
    with pytest.raises(ValidationError, match=refusal):
        config_with(path, value)


def test_stages_of_other_lengths_and_models_of_other_names() -> None:
    """Of 52 blocks 20 on the first of two stages leave 32 for the other. Of a model that is not known only the groups
    of Mamba are, and that SP needs TP."""
    config_with("policy.megatron_cfg.num_layers_in_first_pipeline_stage", 20)
    values = values_of(STAGE / "config/default.yaml")
    values["policy"]["model_name"] = "/models/mine"
    RLConfig.model_validate({**values, "run": {"data": "d"}})
    values["policy"]["megatron_cfg"]["tensor_model_parallel_size"] = 16
    with pytest.raises(ValidationError, match="does not divide the 8 groups of Mamba"):
        RLConfig.model_validate({**values, "run": {"data": "d"}})


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 88), ("/hf/NVIDIA-Nemotron-Nano-9B-v2", 56)],
)
def test_the_dimensions_of_a_model_by_its_name(name: str, blocks: int) -> None:
    found = dimensions_of(name)
    assert found is not None and found.blocks == blocks


def test_a_judge_that_waits_for_other_responses_than_are_drawn_is_refused() -> None:
    """Gym's genrm_compare gives every response of an incomplete group its default score: no signal."""
    values = values_of(STAGE / "config/rlhf/default.yaml")
    values["grpo"]["num_generations_per_prompt"], values["policy"]["train_global_batch_size"] = 8, 1024
    with pytest.raises(ValidationError, match=r"num_rollouts_per_prompt 16 is not grpo.num_generations_per_prompt 8"):
        RLConfig.model_validate({**values, "run": {"data": "d"}})


def test_generation_on_nodes_of_its_own_leaves_some_for_the_trainer() -> None:
    resources = {"gpus_per_node": 8, "num_nodes": 176}
    with pytest.raises(ValidationError, match="leave some for the trainer"):
        config_with("policy.generation.colocated.resources", resources, SUPER / "rlvr1.yaml")
    with pytest.raises(ValidationError, match=r"resources.gpus_per_node 8 is not cluster.gpus_per_node 4"):
        config_with("cluster.gpus_per_node", 4, SUPER / "rlvr1.yaml")


def test_passes_that_generation_ahead_would_not_make_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"passes through the prompts once.*data.train.repeat to 100"):
        config_with("grpo.max_num_epochs", 100, SUPER / "swe1.yaml")


def test_dpo_has_no_context_parallelism() -> None:
    values = values_of(STAGE / "config/dpo/default.yaml", "dpo_nemo_rl.py")
    values["policy"]["megatron_cfg"]["context_parallel_size"] = 2
    values["policy"]["make_sequence_length_divisible_by"] = 8
    with pytest.raises(ValidationError, match="packed sequences, which DPO cannot have"):
        DPOConfig.model_validate({**values, "run": {"data": "d"}})


@pytest.mark.parametrize(
    "file",
    [
        STAGE / "config/default.yaml", STAGE / "config/final.yaml", STAGE / "config/rlhf/default.yaml",
        SUPER / "rlvr1.yaml", SUPER / "rlvr3.yaml", SUPER / "swe1.yaml", SUPER / "swe2.yaml",
        SUPER / "rlhf/default.yaml",
    ],
    ids=lambda file: "-".join(file.parts[-4:]),
)  # fmt: skip
def test_layouts_divide_the_models_and_the_job_has_the_nodes_of_all(file: Path) -> None:
    values, family = values_of(file), "super3" if "super3" in file.parts else "nano3"
    layout = values["policy"]["megatron_cfg"]
    assert EXPERTS[family] % layout["expert_model_parallel_size"] == 0
    assert BLOCKS[family] % layout["pipeline_model_parallel_size"] == 0
    nodes = values["cluster"]["num_nodes"] + values["env"]["nemo_gym"]["num_gpu_nodes"]
    assert load_config(file.parent, str(file)).data["run"]["env"]["nodes"] == nodes


def test_the_nodes_of_the_judges_hold_the_engines_that_gym_starts() -> None:
    """8 GPUs a node: data_parallel_size engines of tensor_parallel_size GPUs, each judge on nodes of its own."""
    for file in (SUPER / "rlvr1.yaml", SUPER / "rlhf/default.yaml", STAGE / "config/rlhf/default.yaml"):
        gym = values_of(file)["env"]["nemo_gym"]
        engines = [
            app["vllm_serve_kwargs"]
            for instance in gym.values() if isinstance(instance, dict)
            for app in instance.get("responses_api_models", {}).values() if "vllm_serve_kwargs" in app
        ]  # fmt: skip
        gpus = sum(engine["data_parallel_size"] * engine["tensor_parallel_size"] for engine in engines)
        assert gpus == 8 * gym["num_gpu_nodes"] > 0


def test_what_is_handed_on_has_the_folders_of_the_run_and_no_key_that_is_left_out() -> None:
    values = master_values(config_with("checkpointing.pretrained_checkpoint", None), Path("/run"))
    assert "pretrained_checkpoint" not in values["checkpointing"] and "effort_levels" not in values["env"]["nemo_gym"]
    assert (
        values["checkpointing"]["checkpoint_dir"] == "/run/checkpoints" and values["logger"]["log_dir"] == "/run/logs"
    )
    assert "run" not in values and values["policy"]["generation"]["top_k"] is None
    rlhf = master_values(
        RLConfig.model_validate({**values_of(STAGE / "config/rlhf/default.yaml"), "run": {"data": "d"}}), Path()
    )
    assert not {"math_with_judge", "code_gen"} & set(rlhf["env"]["nemo_gym"])


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    for name, whole in (("step_9", True), ("step_10", True), ("tmp_step_12", True), ("step_11", False)):
        weights = tmp_path / name / "policy/weights/iter_0000000"
        weights.mkdir(parents=True)
        if whole:
            (weights / ".metadata").touch()
    last = last_step(tmp_path)
    assert last is not None
    assert (last.number, last.weights) == (10, tmp_path / "step_10/policy/weights/iter_0000000")


def test_prompts_that_are_no_records_of_gym_are_refused_before_gpus_are_taken(tmp_path: Path) -> None:
    train, valid = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    prompts = RLPrompts.model_construct(path=tmp_path, train_path=train, valid_path=valid)
    record = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "math_with_judge_simple_agent"}}
    train.write_text(json.dumps(record) + "\n")
    valid.write_text(json.dumps({"task": {}, "agent_ref": {}}) + "\n")
    with pytest.raises(UserError, match=r"valid.jsonl: no records of NeMo Gym: responses_create_params missing"):
        check_gym_prompts(prompts)
    valid.write_text("{'task': 1}\n")
    with pytest.raises(UserError, match=r"valid.jsonl:1: no JSON"):
        check_gym_prompts(prompts)
    valid.write_text(json.dumps(record) + "\n")
    check_gym_prompts(prompts)


def test_pairs_are_written_as_the_library_reads_them(tmp_path: Path) -> None:
    """Its PreferenceDataset: `context`, and `completions` of which the one of the lower rank is preferred."""
    prompt = [{"role": "user", "content": "2 + 2?"}]
    right, wrong = [{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]
    train, valid = tmp_path / "t.jsonl", tmp_path / "v.jsonl"
    pairs = Preferences.model_construct(path=tmp_path, train_path=train, valid_path=valid)
    for file in (train, valid):
        file.write_text(
            json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong, "category": "no_tools"}) + "\n"
        )
    write_pairs(pairs, tmp_path / "pairs")
    written = json.loads((tmp_path / "pairs/valid.jsonl").read_text())
    assert written["context"] == prompt
    assert sorted((each["rank"], each["completion"]) for each in written["completions"]) == [(0, right), (1, wrong)]
    valid.write_text(json.dumps({"prompt": prompt, "tools": [{}], "chosen": right, "rejected": wrong}) + "\n")
    with pytest.raises(UserError, match=r"v.jsonl:1: the prompt declares tools"):
        write_pairs(pairs, tmp_path / "pairs")

"""Real programs of the ecosystem on a CPU, as far as they go: what our scripts and examples hand over is taken.

Each lives in an environment of its own, which `make test-ecosystem` makes, and is skipped without.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from chat_server import Body, chat_server

import nemotron.recipes
from nemo_runspec.artifacts import Registry
from nemo_runspec.config.loader import load_config
from nemotron.cli.main import _run
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.recipes.nano3.stage3_eval.evaluate_nemo import gym_command, launcher_config
from nemotron.recipes.nano3.stage3_eval.nemo_schema import NemoEvalConfig

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/ecosystem"
RECIPES = Path(nemotron.recipes.__file__).parent
FOLDERS = {"nano3": RECIPES / "nano3/stage3_eval/config", "super3": RECIPES / "super3/stage4_eval/config"}

pytestmark = pytest.mark.slow


def program(environment: str, name: str) -> Path:
    """A program of an environment; the test is skipped where there is none."""
    path = ROOT / f".venv-{environment}" / "bin" / name
    if not path.exists():
        pytest.skip(f".venv-{environment} is not here: `make test-ecosystem`")
    return path


def call(*words: object, **environment: str) -> str:
    result = subprocess.run(
        [str(word) for word in words], env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return result.stdout


def config_of(family: str, name: str) -> NemoEvalConfig:
    values = load_config(FOLDERS[family], name, ()).data
    for key in ("env", "family"):
        values["run"].pop(key, None)
    values["deployment"]["checkpoint_path"] = "/models/base"
    return NemoEvalConfig.model_validate(values)


@pytest.mark.parametrize("family", FOLDERS)
def test_the_launcher_makes_a_job_of_each_task(family: str, tmp_path: Path) -> None:
    launcher = program("evaluator", "nemo-evaluator-launcher")
    cfg = config_of(family, "base")
    file = tmp_path / "launcher.yaml"
    file.write_text(yaml.safe_dump(launcher_config(cfg, tmp_path)))
    printed = call(
        launcher, "run", "--config", file, "--dry-run", USER="me", HF_TOKEN="hf_0123456789", HOME=str(tmp_path)
    )
    assert cfg.nemo_evaluator is not None
    jobs = [line for line in printed.splitlines() if line.startswith("#SBATCH --job-name")]
    names = [task.name.rpartition(".")[2] for task in cfg.nemo_evaluator.tasks]
    assert [job.rsplit(".", 2)[1] for job in jobs] == names
    served = [line for line in printed.splitlines() if line.startswith("# vllm serve /checkpoint")]
    assert len(served) == len(names) and all("--mamba-ssm-cache-dtype float32" in line for line in served)
    assert "/models/base:/checkpoint:ro" in printed and "hf_0123456789" not in printed


GYM = """
import json, sys
from nemo_gym.cli import main as gym
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.rollout_collection import E2ERolloutCollectionConfig
words = json.loads(sys.argv[1])
def collected(target, overrides):
    sys.argv = ["gym", *overrides]
    config = get_global_config_dict()
    E2ERolloutCollectionConfig.model_validate(config)
    model = config.policy_model.responses_api_models.local_vllm_model
    print(json.dumps([target, config.num_repeats, model.model, dict(model.vllm_serve_kwargs)]))
gym.dispatch = collected
sys.argv = ["gym", *words]
gym.main()
"""


@pytest.mark.parametrize("family", FOLDERS)
def test_gym_takes_every_command_and_merges_its_config(family: str, tmp_path: Path) -> None:
    python = program("gym", "python")
    cfg = config_of(family, "default")
    assert cfg.gym is not None
    for benchmark in cfg.gym.benchmarks:
        words = gym_command(cfg, benchmark, tmp_path / "rollouts.jsonl")
        printed = call("env", "-C", tmp_path, python, "-c", GYM, json.dumps(words))
        target, num_repeats, model, kwargs = json.loads(printed.splitlines()[-1])
        assert target == "nemo_gym.cli.eval:e2e_rollout_collection"
        assert (num_repeats, model) == (benchmark.num_repeats, "/models/base")
        assert kwargs["tensor_parallel_size"] == 8 and kwargs["tool_call_parser"] == "qwen3_coder"


AUTOMODEL = """
import json, sys
from nemo_automodel.cli.utils import load_yaml, resolve_recipe_name
from nemo_automodel.components.config.loader import load_yaml_config
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from nemo_automodel.recipes._typed_config import RecipeConfig
cfg = RecipeConfig(load_yaml_config(sys.argv[1]))
data, steps, rate = cfg.dataloader, cfg.step_scheduler, cfg.lr_scheduler
layout = parse_distributed_section(cfg.get("distributed").to_dict())
read = {
    "recipe": resolve_recipe_name(load_yaml(sys.argv[1])["recipe"]), "dataset": type(data.dataset_config).__name__,
    "length": data.dataset_config.seq_length, "batch": steps.global_batch_size, "warmup": rate.lr_warmup_steps,
    "lr": cfg.optimizer.kwargs["lr"], "loss": type(cfg.loss_fn).__name__, "ep": layout["ep_size"],
    "saved": cfg.checkpoint.save_consolidated.value,
}
print(json.dumps(read))
"""


def test_automodel_parses_the_example() -> None:
    printed = call(program("automodel", "python"), "-c", AUTOMODEL, EXAMPLES / "automodel_nano3_sft.yaml")
    assert json.loads(printed.splitlines()[-1]) == {
        "recipe": "nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction",
        "dataset": "ChatDatasetConfig", "length": 8192, "batch": 64, "warmup": 800, "lr": 5e-5,
        "loss": "MaskedCrossEntropyConfig", "ep": 8, "saved": "final",
    }  # fmt: skip


def answer(body: Body) -> str | Body:
    """A question where one is to be written, else an answer with reasoning."""
    content = body["messages"][-1]["content"]  # parts of text, or text
    text = content if isinstance(content, str) else content[0]["text"]
    if text.startswith("Write one"):
        return f"What is asked in {sum(text.encode())}?"
    return {"content": "It is 42.", "reasoning_content": f"I am asked: {text}"}


def test_what_data_designer_writes_is_read_by_data_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    designer = program("designer", "data-designer")
    home = tmp_path / "designer"
    home.mkdir()
    with chat_server() as server:
        server.answer = answer
        provider = {"name": "nvidia", "endpoint": server.url, "provider_type": "openai", "api_key": "none"}
        (home / "model_providers.yaml").write_text(yaml.safe_dump({"providers": [provider], "default": "nvidia"}))
        call(
            designer, "create", EXAMPLES / "data_designer_chats.yaml", "--num-records", 12, "--dataset-name", "chats",
            "--artifact-path", tmp_path / "made", "--output-format", "jsonl", "--no-tui", DATA_DESIGNER_HOME=str(home),
            HOME=str(tmp_path), NEMO_TELEMETRY_ENABLED="false",
        )  # fmt: skip
    (written,) = (tmp_path / "made").rglob("*.jsonl")
    records = [json.loads(line) for line in written.read_text().splitlines()]
    assert len(records) == 12 and all(record["answer__reasoning_content"] for record in records)

    # ---- the command of the example's head, for this file and a small tokenizer
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    tokenizer = train_tokenizer(["What is asked in 42? It is."], 400)
    save_tokenizer(tokenizer, tmp_path / "tokenizer", model_max_length=4096, template="nano3")
    columns = "columns: {reasoning: answer__reasoning_content}"
    words = ["nano3", "data", "prep", "sft", "-c", "tiny", "run.tokenizer=null", "run.output=chats", "text.path=null"]
    words += [f"sources=[{{name: chats, paths: [{written}], {columns}, valid_fraction: 0}}]", "tasks.families=[]"]
    words += [f"tokenizer={tmp_path / 'tokenizer'}", "reasoning.off_share=0", "reasoning.truncated_share=0"]
    monkeypatch.setattr("sys.argv", ["nemotron", *words, "packing.seq_length=2048"])
    assert _run() == 0
    (file,) = Registry(tmp_path / "artifacts").resolve("chats").path.rglob("*.parquet")
    (row,) = pq.read_table(file).to_pylist()
    questions = {record["question"] for record in records}  # the same topic twice is the same question: one is left out
    text = tokenizer.decode(row["input_ids"], skip_special_tokens=False)
    assert len(row["seq_start_id"]) == len(questions) and all(f"I am asked: {each}" in text for each in questions)

#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Score a model on the published benchmarks with NeMo Evaluator (base models) or NeMo-Gym (post-trained ones)."
# name = "nano3/eval/nemo"
# image = "nvcr.io/nvidia/nemo-rl:v0.7.0"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "nemo_schema.py:NemoEvalConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 8
# ///
"""Stage 3 at the published size: the benchmarks of the reports, asked by the programs that score them.

    nemotron nano3 eval --run slurm             # the post-trained model, config/default.yaml: gym eval run
    nemotron nano3 eval -c judged --run slurm   # benchmarks whose answers a model judges: yours, in judges.yaml
    nemotron nano3 eval -c base                 # the base model, on a login node: nemo-evaluator-launcher run

Both are programs in environments of their own, on the PATH: `nemo-gym==0.4.0` (Python 3.12) and
`nemo-evaluator-launcher==0.2.6`. Gym starts vLLM on this node's GPUs and asks a benchmark after another. The launcher
submits a job a task, which serves the model and asks it in the container of the task's harness.

Publishes what each of them reports, beside the published score; the same command after a stop goes on with what is
missing. The image has vLLM; put nemo-gym into it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.kit import Model, Results, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.nemo_programs import GYM, LAUNCHER, call, find, launched_scores
from nemotron.kit.stop import stop_at_once

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage3_eval.nemo_schema import BenchmarkConfig, NemoEvalConfig


def main() -> None:
    """Config, then ask, then publish."""
    cfg: NemoEvalConfig = load_script_config(__file__, inputs=read_pipe)
    find(LAUNCHER if cfg.nemo_evaluator else GYM)
    stop_at_once()
    with open_run(cfg, script=__file__) as run:
        model = Model.load(path=cfg.deployment.checkpoint_path)
        with run.phase("evaluate"):
            if cfg.nemo_evaluator is None:
                scores = gym_scores(cfg, run.dir)
            else:
                reported = launched_scores(launcher_config(cfg, run.dir), run.dir)
                pairs = zip(cfg.nemo_evaluator.tasks, reported, strict=True)
                scores = {task.name: {"published": task.published, "reported": each} for task, each in pairs}
        results = Results(metrics={"model": model.ref, "benchmarks": scores}).save()
    print_complete({"results": results})


# ---- a base model


def launcher_config(cfg: NemoEvalConfig, folder: Path) -> dict[str, Any]:
    """The launcher's own config: where jobs go, how vLLM serves the model, what it is asked."""
    settings, path = cfg.nemo_evaluator, str(cfg.deployment.checkpoint_path)
    assert settings is not None
    tokenizer = {"tokenizer": path, "tokenizer_backend": "huggingface"}
    return {
        "defaults": [{"execution": "slurm/default"}, {"deployment": "vllm"}, "_self_"],
        "execution": {
            **settings.execution.model_dump(), "output_dir": str(folder / "jobs"),
            "mounts": {"evaluation": {path: path}},  # for its tokenizer
        },
        "deployment": {
            "checkpoint_path": path, "served_model_name": cfg.run.model,
            "tensor_parallel_size": cfg.deployment.tensor_parallel_size,
            "extra_args": f"--mamba-ssm-cache-dtype {cfg.deployment.mamba_ssm_cache_dtype}",
        },
        "evaluation": {
            "env_vars": {"HF_TOKEN": "host:HF_TOKEN"},
            "nemo_evaluator_config": {"config": {"params": {**settings.params.model_dump(), "extra": tokenizer}}},
            "tasks": [{"name": task.name} for task in settings.tasks],
        },
    }  # fmt: skip


# ---- a post-trained model


def gym_scores(cfg: NemoEvalConfig, folder: Path) -> dict[str, Any]:
    """Ask one benchmark after another; one whose scores are there already is not asked again."""
    settings, scores = cfg.gym, {}
    assert settings is not None
    for benchmark in settings.benchmarks:
        name = benchmark.config.removeprefix("benchmarks/").removesuffix(".yaml").replace("/", "-")
        rollouts = folder / name / "rollouts.jsonl"
        summary = rollouts.with_name("rollouts_aggregate_metrics.json")
        if not summary.is_file():
            call(folder, GYM, "eval", "prepare", "--config", benchmark.config)
            call(folder, GYM, *gym_command(cfg, benchmark, rollouts))
        agents = json.loads(summary.read_text(encoding="utf-8"))
        reward = sum(agent["agent_metrics"]["mean/reward"] for agent in agents) / len(agents)
        scores[name] = {"score": 100 * reward, "published": benchmark.published, "num_repeats": benchmark.num_repeats}
        print(f"{name}: {100 * reward:.2f} %, published: {benchmark.published}", file=sys.stderr)
    return scores


def gym_command(cfg: NemoEvalConfig, benchmark: BenchmarkConfig, rollouts: Path) -> list[str]:
    """`gym eval run`: the benchmark's servers, vLLM for the model, and what is drawn from it."""
    settings, served = cfg.gym, "++policy_model.responses_api_models.local_vllm_model"
    assert settings is not None
    kwargs = cfg.deployment.model_dump(exclude={"checkpoint_path"}) | settings.vllm_serve_kwargs.model_dump()
    configs = [word for path in (benchmark.config, *settings.config_paths) for word in ("--config", str(path))]
    limit = [] if settings.max_output_tokens is None else ["--max-output-tokens", str(settings.max_output_tokens)]
    return [
        "eval", "run", *configs, "--model-type", "local_vllm_model", "--model", str(cfg.deployment.checkpoint_path),
        "--split", "benchmark", "--num-repeats", str(benchmark.num_repeats), "--output", str(rollouts), "--resume",
        "--temperature", str(settings.temperature), "--top-p", str(settings.top_p), *limit,
        "--concurrency", str(settings.concurrency), f"{served}.uses_reasoning_parser=true",
        *[f"{served}.vllm_serve_kwargs.{key}={value}" for key, value in kwargs.items()],
        f"{served}.vllm_serve_kwargs.enable_auto_tool_choice=true",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))

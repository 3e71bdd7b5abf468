"""Every knob of `evaluate_nemo.py`. Names are those of nemo-evaluator-launcher 0.2.6, NeMo-Gym 0.4.0 and vLLM.

A base model is scored by the launcher's harnesses, a post-trained one by Gym's benchmarks: a config has one of the two
groups. Published scores stand beside the benchmark that they belong to; none of them decides whether a run succeeds.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import MODEL, Group, ModelPath, RunConfig, UserPath

Published = Annotated[float | None, Field(description="published score in %, beside which the measured one is put")]


class NemoRunConfig(RunConfig):
    """Identity, the model that is read, the results that are written."""

    model: Annotated[str, MODEL] = Field(description="model to score: name, name:version, directory or hf://ORG/NAME")
    results: str | None = Field(None, description="name under which the scores are published")


class DeploymentConfig(Group):
    """The model as vLLM serves it."""

    checkpoint_path: ModelPath
    tensor_parallel_size: int = Field(ge=1, description="GPUs that share each matrix")
    mamba_ssm_cache_dtype: Literal["float32", "float16", "auto"] = Field(description="state of Mamba-2 while decoding")


class SlurmExecution(Group):
    """`execution` of the launcher on Slurm: it submits a job a task over SSH, here or from elsewhere."""

    hostname: str = Field(description="login node; localhost on one")
    account: str = Field(description="the account that pays")
    partition: str = Field(description="where jobs go")
    walltime: str = Field(pattern=r"^\d+:\d\d:\d\d$", description="time limit of a job, after which it is resumed")


class RequestParams(Group):
    """`params` of every task: how it is asked. What is asked, and how answers are drawn, is the task's own."""

    parallelism: int = Field(ge=1, description="requests at once")
    request_timeout: int = Field(ge=1, description="seconds until a request counts as failed")


class TaskConfig(Group):
    """A task by the name that `nemo-evaluator-launcher ls tasks` has for it."""

    name: str = Field(
        description="TASK, or HARNESS.TASK where several harnesses have it; it fixes shots, prompt and sampling"
    )
    published: Published = None


class NemoEvaluatorConfig(Group):
    """A base model through `nemo-evaluator-launcher run`."""

    execution: SlurmExecution
    params: RequestParams
    tasks: list[TaskConfig] = Field(min_length=1, description="what is scored, a job each")


class BenchmarkConfig(Group):
    """A benchmark of NeMo-Gym."""

    config: str = Field(
        pattern=r"^benchmarks/\S+\.yaml$", description="its config, below the folder where nemo-gym is installed"
    )
    num_repeats: int = Field(ge=1, description="answers a task; the score is their mean, pass@1[avg-of-k]")
    published: Published = None


class VllmServeKwargs(Group):
    """Options of `vllm serve` that decide what the model answers."""

    reasoning_parser: str = Field(description="what takes the reasoning out of an answer")
    tool_call_parser: str = Field(description="what reads tool calls")
    max_model_len: int = Field(ge=1, description="tokens of prompt and answer together")


class GymConfig(Group):
    """A post-trained model through `gym eval run`."""

    vllm_serve_kwargs: VllmServeKwargs
    temperature: float = Field(ge=0, description="of sampling")
    top_p: float = Field(gt=0, le=1, description="share of the probability that is sampled from")
    max_output_tokens: int | None = Field(
        None, ge=1, description="tokens an answer, reasoning included; null: what max_model_len leaves"
    )
    concurrency: int = Field(ge=1, description="answers at once")
    config_paths: list[UserPath] = Field(
        [], description="YAML files of yours for Gym beside the benchmark's: servers of judges and their keys"
    )
    benchmarks: list[BenchmarkConfig] = Field(min_length=1, description="what is scored, one after another")


class NemoEvalConfig(Group):
    """`nemotron nano3 eval` and `nemotron super3 eval` at the published size."""

    run: NemoRunConfig
    deployment: DeploymentConfig
    nemo_evaluator: NemoEvaluatorConfig | None = Field(None, description="for a base model")
    gym: GymConfig | None = Field(None, description="for a post-trained model")

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if (self.nemo_evaluator is None) == (self.gym is None):
            raise ValueError("state either nemo_evaluator, for a base model, or gym, for a post-trained one")
        names = [task.name for task in self.nemo_evaluator.tasks] if self.nemo_evaluator else []
        names += [benchmark.config for benchmark in self.gym.benchmarks] if self.gym else []
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"listed twice: {', '.join(sorted(twice))}")
        return self

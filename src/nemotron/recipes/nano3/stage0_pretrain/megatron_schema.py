"""Every knob of `train_megatron.py`, for any family whose recipe the library has. The fields are Megatron-Bridge's."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nemo_runspec.errors import did_you_mean
from nemotron.kit.schemas import megatron
from nemotron.kit.schemas.group import Group


class TrainingRecipe(Group):
    """Fields of `TEQuantizationRecipe`: one of them, or neither, which is BF16."""

    fp8_quantization_recipe: Literal["tensorwise", "blockwise", "mxfp8"] | None = Field(None, description="of FP8")
    fp4_quantization_recipe: Literal["nvfp4"] | None = Field(None, description="of FP4")


class MatrixPrecision(Group):
    """How some matrices are multiplied."""

    transformer_engine_config_type: Literal["TEQuantizationParams"] = Field(description="what the rest is")
    training_recipe: TrainingRecipe


class Matcher(Group):
    """Which matrices these are; the first matcher counts."""

    type: Literal["glob"] = Field(description="kind of pattern")
    enabled: bool = Field(description="whether it counts")
    pattern: str = Field(description="of names of modules, as in decoder.layers.0.mixer.out_proj")
    config: str = Field(description="one of `configs`")


class QuantRecipe(Group):
    """Fields of Megatron-Core's `RecipeConfig`."""

    configs: dict[str, MatrixPrecision] = Field(description="precisions by name")
    matchers: dict[str, Matcher] = Field(description="in order")

    @model_validator(mode="after")
    def _configs_exist(self) -> Self:
        for name, matcher in self.matchers.items():
            if matcher.config not in self.configs:
                raise ValueError(
                    f"matchers.{name}.config {matcher.config!r}: {did_you_mean(matcher.config, self.configs)}"
                )
        return self


class ModelConfig(megatron.ModelConfig):
    """Fields of `HybridModelProvider`."""

    init_method_std: float = Field(gt=0, description="standard deviation of the initial weights")
    quant_recipe: QuantRecipe | None = Field(
        None, description="matrices that are multiplied in another precision than `mixed_precision` says of their block"
    )

    def fields(self) -> dict[str, Any]:
        """Without the recipe, of which the script makes an object."""
        return {key: value for key, value in super().fields().items() if key != "quant_recipe"}


class PretrainConfig(megatron.MegatronPretrainConfig):
    """`pretrain` at the published size: nothing has a default that a family's paper would state."""

    model: ModelConfig

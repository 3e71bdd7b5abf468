"""A model small enough for any test, a chat template that knows of no reasoning, a system of few open files."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nemotron.stack.models import NemotronH, NemotronHConfig

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "moe_shared_expert_intermediate_size": 18,
    "intermediate_size": 32,
}


@pytest.fixture
def few_open_files() -> Iterator[None]:
    """The soft limit of open files is 24 above what is open; the hard limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = Path("/proc/self/fd")
    in_use = len(list(open_files.iterdir())) if open_files.is_dir() else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 24, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="session")
def plain_chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """ChatML without a word of reasoning, as many public models have it: the path of a template."""
    path = tmp_path_factory.mktemp("template") / "chatml.jinja"
    path.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    return str(path)


@pytest.fixture(scope="session")
def small_config() -> Callable[..., NemotronHConfig]:
    """`small_config(pattern, **dimensions)`: dimensions that differ from each other, a vocabulary of 61."""
    from nemotron.stack.models import NemotronHConfig  # tests of the command line run without torch

    return lambda pattern, **dimensions: NemotronHConfig(pattern, **(_SMALL | dimensions))


@pytest.fixture(scope="session")
def small_model(small_config: Callable[..., NemotronHConfig]) -> Callable[..., NemotronH]:
    """`small_model(pattern, seed=0, **dimensions)`: initial weights large enough that the prompt decides."""
    import torch

    from nemotron.stack.models import NemotronH

    def make(pattern: str, seed: int = 0, **dimensions: Any) -> NemotronH:
        torch.manual_seed(seed)
        return NemotronH(small_config(pattern, **({"initializer_range": 0.2} | dimensions)))

    return make

"""What divides and what is refused; bubbles; the smallest layout that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.layout import Layout, check, with_parallel
from nemotron.stack.planning.memory import training_memory
from nemotron.stack.planning.search import smallest, usable_bytes
from nemotron.stack.planning.speed import find_gpu, gpus

NANO = Layout(PRESETS["nano3-30b"], 256, 8192, 3072)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size 3 does not divide the 32 attention heads"),
        ({"tensor_model_parallel_size": 16, "sequence_parallel": True}, "16 does not divide the 8 groups of Mamba"),
        ({"pipeline_model_parallel_size": 8}, "pipeline_model_parallel_size 8 does not divide the 52 blocks"),
        ({"expert_model_parallel_size": 48}, "expert_model_parallel_size 48 does not divide the 128 experts"),
        ({"expert_tensor_parallel_size": 3}, "expert_tensor_parallel_size 3 does not divide the 1,856 columns"),
        ({"context_parallel_size": 128}, "context_parallel_size 128 does not divide the 64 heads of Mamba"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size 2 with experts: .* sequence_parallel: true"),
        ({"sequence_parallel": True}, "sequence_parallel shares tokens among the GPUs of TP, and TP is 1"),
        ({"pipeline_model_parallel_size": 13}, "256 GPUs that train are no multiple of TP x PP x CP = 13"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_reason(sizes: dict[str, int | bool], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check(with_parallel(NANO, **sizes))


def test_a_batch_or_a_length_that_does_not_divide() -> None:
    with pytest.raises(UserError, match="3000 is no multiple of 256 replicas"):
        check(Layout(PRESETS["nano3-30b"], 256, 8192, 3000))
    odd = with_parallel(Layout(PRESETS["nano3-30b"], 256, 8190, 3072), context_parallel_size=2)
    with pytest.raises(UserError, match=r"8,190 tokens of a sequence are no multiple of lcm\(2 CP, CP TP\) = 4"):
        check(odd)


def test_the_published_layouts_divide() -> None:
    check(with_parallel(NANO, expert_model_parallel_size=8))
    long = Layout(PRESETS["nano3-30b"], 256, 524_288, 48)
    check(
        with_parallel(
            long, tensor_model_parallel_size=8, context_parallel_size=8, expert_model_parallel_size=8,
            pipeline_model_parallel_size=4, sequence_parallel=True,
        )
    )  # fmt: skip


def test_the_bubble_is_that_of_narayanan() -> None:
    layout = with_parallel(Layout(PRESETS["nano3-30b"], 8, 8192, 16), pipeline_model_parallel_size=4)
    assert (layout.data, layout.micro_batches, layout.bubble) == (2, 8, 3 / 8)
    halved = Layout(PRESETS["nano3-30b"], 8, 8192, 16, parallel=layout.parallel, virtual=2)
    assert halved.bubble == 3 / 16


def test_stages_are_the_pattern_in_equal_parts() -> None:
    stages = with_parallel(NANO, pipeline_model_parallel_size=4).stages
    assert "".join(stages) == NANO.model.hybrid_override_pattern and {len(stage) for stage in stages} == {13}


@pytest.mark.parametrize("name", ["h100", "gb200"])
def test_the_smallest_layout_fits_and_a_node_less_does_not(name: str) -> None:
    gpu = gpus()[name]
    found = smallest(NANO, gpu)
    assert found is not None
    check(found)
    assert training_memory(found).total <= usable_bytes(gpu)
    # 16 bytes a parameter alone need more than half of the nodes
    assert usable_bytes(gpu) * found.gpus / 2 < 31.578e9 * 16


def test_what_no_gpu_holds_has_no_smallest_layout() -> None:
    assert smallest(Layout(PRESETS["super3-120b"], 8, 8192, 512), gpus()["h100"], most_nodes=2) is None


def test_a_gpu_without_that_precision_and_one_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="h100 has no nvfp4"):
        find_gpu("h100", "nvfp4")
    with pytest.raises(UserError, match="h200 has no mxfp8"):  # its blocks of 32 want Blackwell
        find_gpu("h200", "mxfp8")
    with pytest.raises(UserError) as error:
        find_gpu("gb20", "bf16")
    assert error.value.hint == "did you mean gb200?"


def test_a_teacher_is_divided_as_its_student() -> None:
    """The 9B has 56 blocks, the 12B that teaches it 62."""
    student = with_parallel(Layout(PRESETS["nano2-9b"], 8, 8192, 64), pipeline_model_parallel_size=4)
    check(student)
    with pytest.raises(UserError, match="pipeline_model_parallel_size 4 does not divide the 62 blocks"):
        check(replace(student, teacher=PRESETS["nano2-12b"]))

"""Multi-token prediction against Megatron-Core's own layer, and what it promises about packing, gradients and names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.mtp import shift_left
from nemotron.stack.training.losses import IGNORED, mtp_loss, mtp_loss_sums, next_token_loss

WITH_MTP: dict[str, Any] = {"num_nextn_predict_layers": 1}
PATTERNS = ["*E", "*-", "ME", "-"]
DOCUMENTS = [5, 1, 9, 2, 3, 1, 12, 1]  # some too short for depth 1, some for depth 2


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ against Megatron-Core


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """megatron.core in a world of one process on the CPU.

    Replaced there: the device of its scratch buffers, and the random-number tracker around a dropout of 0.
    """
    pytest.importorskip("megatron.core")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core as core
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.tensor_parallel.random
        import megatron.core.transformer.moe.moe_utils
        import megatron.core.transformer.multi_token_prediction  # noqa: F401 (reached as core.transformer.…)

        store = tmp_path_factory.mktemp("megatron") / "store"
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        core.parallel_state.initialize_model_parallel()
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(
            core.utils.GlobalMemoryBuffer,
            "get_tensor",
            lambda self, shape, dtype, name, mem_alloc_context=None: torch.empty(shape, dtype=dtype),
        )
        tracker = core.tensor_parallel.random.CudaRNGStatesTracker
        patch.setattr(tracker, "fork", lambda self, name="": nullcontext())
        patch.setattr(core.transformer.moe.moe_utils, "te_general_gemm", None, raising=False)
        yield core
        core.parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def megatron_layer(core: Any, model: NemotronH) -> nn.Module:
    """Megatron's MultiTokenPredictionLayer, its transformer layer holding the weights of our `*E` or `*-`."""
    config, mtp = model.config, model.mtp
    assert mtp is not None
    experts = {}
    if config.mtp_hybrid_override_pattern == "*E":
        experts = {
            "num_moe_experts": config.n_routed_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_dtype": "fp64",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    settings = core.transformer.transformer_config.TransformerConfig(
        num_layers=1, mtp_num_layers=2, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads, kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size, activation_func=lambda x: F.relu(x).square(),
        normalization="RMSNorm", layernorm_epsilon=config.layer_norm_epsilon, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, attention_softmax_in_fp32=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, use_cpu_initialization=True,
        params_dtype=torch.float64, **experts,
    )  # fmt: skip
    specs = core.models.gpt.gpt_layer_specs
    spec = specs.get_gpt_layer_local_spec(
        num_experts=experts.get("num_moe_experts"), moe_grouped_gemm=False, normalization="RMSNorm"
    )
    mtp_module = core.transformer.multi_token_prediction
    layer: nn.Module = core.transformer.spec_utils.build_module(
        mtp_module.get_mtp_layer_spec(spec, use_transformer_engine=False),
        config=settings, layer_number=1,
        pg_collection=core.process_groups_config.ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip
    layer = layer.double()
    state = {name: layer.state_dict()[name] for name in layer.state_dict() if not name.endswith("_extra_state")}
    for name, tensor in as_megatron({n: p.detach() for n, p in mtp.state_dict().items()}, config).items():
        state[name].copy_(tensor)
    return layer


def as_megatron(ours: dict[str, Tensor], config: NemotronHConfig) -> dict[str, Tensor]:
    """Tensors named `layers.{0,1}.…` (weights or gradients) under Megatron's names and in its layout."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (ours[f"layers.0.mixer.{x}_proj.weight"] for x in "qkv")
    per_group = [q.view(groups, heads // groups * size, -1), k.view(groups, size, -1), v.view(groups, size, -1)]
    inner = "transformer_layer."
    out = {
        **{f"{name}.weight": ours[f"layers.0.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")},
        "final_layernorm.weight": ours["layers.1.final_layernorm.weight"],
        f"{inner}input_layernorm.weight": ours["layers.0.norm.weight"],
        f"{inner}self_attention.linear_qkv.weight": torch.cat(per_group, dim=1).flatten(0, 1),
        f"{inner}self_attention.linear_proj.weight": ours["layers.0.mixer.o_proj.weight"],
        f"{inner}pre_mlp_layernorm.weight": ours["layers.1.norm.weight"],
    }
    for name, tensor in ours.items():
        name = name.replace("up_proj", "linear_fc1").replace("down_proj", "linear_fc2")
        if name.startswith("layers.1.mixer.gate"):
            which = "weight" if name.endswith("weight") else "expert_bias"
            out[f"{inner}mlp.router.{which}"] = tensor
        elif name.startswith("layers.1.mixer.experts"):
            for e, expert in enumerate(tensor):
                out[f"{inner}mlp.experts.local_experts.{e}.{name.split('.')[-1]}.weight"] = expert
        elif name.startswith("layers.1.mixer."):
            out[f"{inner}mlp.{name.removeprefix('layers.1.mixer.')}"] = tensor
    return out


@pytest.mark.slow  # to import Megatron-Core
@pytest.mark.parametrize("pattern", ["*E", "*-"])
def test_hidden_states_losses_and_gradients_equal_megatron_core(
    make_model: Callable[..., NemotronH], megatron: Any, pattern: str
) -> None:
    """Two applications of one layer, the loss as Megatron's GPT model takes it: labels and mask rolled a depth."""
    model = make_model("-", seed=1, dtype=torch.float64, mtp_hybrid_override_pattern=pattern, **WITH_MTP)
    assert model.mtp is not None
    layer = megatron_layer(megatron, model)
    ids, labels = tokens(2, 13), tokens(2, 13, seed=1)
    embedding, head = model.backbone.embeddings, model.lm_head
    hidden = torch.randn(2, 13, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)

    hiddens, _ = model.mtp(ids, hidden, embedding, 2)
    loss = mtp_loss([head(h) for h in hiddens], labels)

    roll = megatron.transformer.multi_token_prediction.roll_tensor
    state, rolled, positions = hidden.transpose(0, 1), ids, torch.arange(13).expand(2, 13)
    causal = torch.ones(13, 13, dtype=torch.bool).triu(1)[None, None]
    rolled_labels, loss_mask, expected_loss = labels, torch.ones(2, 13, dtype=torch.float64), torch.zeros(())
    for depth in range(2):
        state, rolled, positions = layer(
            input_ids=rolled, position_ids=positions, hidden_states=state, attention_mask=causal,
            embedding=lambda input_ids, position_ids: embedding(input_ids).transpose(0, 1),
        )  # fmt: skip
        expected = state.transpose(0, 1)
        valid = slice(0, 13 - depth - 1)
        torch.testing.assert_close(hiddens[depth], expected, atol=1e-6, rtol=1e-6)
        assert (hiddens[depth] - hidden).norm() > 1
        rolled_labels, _ = roll(rolled_labels)
        loss_mask, count = roll(loss_mask)
        nats = F.cross_entropy(head(expected).flatten(0, 1), rolled_labels.flatten(), reduction="none").view(2, 13)
        expected_loss = expected_loss + (nats * loss_mask).sum() / count / 2
        assert loss_mask[:, valid].all() and loss_mask.sum() == count == 2 * (12 - depth)
    torch.testing.assert_close(loss, expected_loss, atol=1e-7, rtol=1e-7)

    shared = [hidden, embedding.weight, head.weight]
    ours = dict(model.mtp.named_parameters())
    grads = torch.autograd.grad(loss, shared + list(ours.values()))
    theirs = dict(layer.named_parameters())
    expected_grads = torch.autograd.grad(expected_loss, shared + list(theirs.values()))
    for one, other in zip(grads[:3], expected_grads[:3], strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() and other.norm() > 0
    by_name = as_megatron(dict(zip(ours, grads[3:], strict=True)), model.config)
    assert by_name.keys() == theirs.keys()
    for name, grad in zip(theirs, expected_grads[3:], strict=True):
        assert (by_name[name] - grad).norm() <= 1e-5 * grad.norm() and grad.norm() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_shifting_equals_megatron_rolls_within_documents(megatron: Any, depth: int) -> None:
    ends = torch.tensor(DOCUMENTS).cumsum(0)
    packed = megatron.packed_seq_params.PackedSeqParams(cu_seqlens_q=F.pad(ends, (1, 0)))
    values = torch.arange(1, int(ends[-1]) + 1)[None]
    expected = values
    for _ in range(depth):
        expected, _ = megatron.transformer.multi_token_prediction.roll_tensor(expected, packed_seq_params=packed)
    assert shift_left(values, depth, packing(), fill=0).tolist() == expected.tolist()


# ---------------------------------------------------------------------------------------------------- packed = separate


def packing() -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(DOCUMENTS)])[None]


@pytest.mark.parametrize("mtp_pattern", PATTERNS)
def test_packed_documents_equal_separate_ones(make_model: Callable[..., NemotronH], mtp_pattern: str) -> None:
    model = make_model("M*E", dtype=torch.float64, mtp_hybrid_override_pattern=mtp_pattern, **WITH_MTP)
    ids = tokens(1, sum(DOCUMENTS) + 1)
    ids, labels = ids[:, :-1], ids[:, 1:]
    select = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < 0.6
    select[:, torch.tensor(DOCUMENTS).cumsum(0) - 1] = False  # the label there is another document's first token

    out = model(ids, packing(), select, mtp_depths=3)
    sums, counts = mtp_loss_sums(out.mtp_logits, labels, packing(), select)
    parts = [
        (part, mtp_loss_sums(part.mtp_logits, label, None, sel))
        for document, label, sel in zip(
            ids.split(DOCUMENTS, dim=1), labels.split(DOCUMENTS, dim=1), select.split(DOCUMENTS, dim=1), strict=True
        )
        for part in [model(document, None, sel, mtp_depths=3)]
    ]
    for depth in range(3):
        alone = torch.cat([part.mtp_logits[depth] for part, _ in parts])
        torch.testing.assert_close(out.mtp_logits[depth], alone, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(sums, sum(s for _, (s, _) in parts), atol=1e-11, rtol=1e-12)
    assert counts.tolist() == sum(c for _, (_, c) in parts).tolist() and (counts > 0).all()
    parameters = dict(model.named_parameters())
    packed_grads = torch.autograd.grad(sums.sum(), list(parameters.values()))
    alone_grads = torch.autograd.grad(sum(s.sum() for _, (s, _) in parts), list(parameters.values()))
    for name, one, other in zip(parameters, packed_grads, alone_grads, strict=True):
        assert other.norm() > 0, name
        assert (one - other).norm() <= 1e-11 * other.norm().clamp(min=1), name


@pytest.mark.parametrize("mtp_pattern", PATTERNS)
def test_depth_k_reads_the_tokens_up_to_t_plus_k_of_its_document(
    make_model: Callable[..., NemotronH], mtp_pattern: str
) -> None:
    """d logits_k[t] / d embedding[s] is not 0 exactly for s <= t + k in the same document."""
    model = make_model("M", dtype=torch.float64, mtp_hybrid_override_pattern=mtp_pattern, **WITH_MTP)
    seq_idx = torch.tensor([[0] * 4 + [1] * 7 + [2] * 2])
    ids = torch.arange(1, 14)[None]  # each token once: the gradient of an embedding row is that of a position
    logits = model(ids, seq_idx, mtp_depths=2).mtp_logits
    weight = model.backbone.embeddings.weight
    for depth in (1, 2):
        has_token = shift_left(torch.ones_like(ids), depth, seq_idx, fill=0)[0].bool()
        for t in has_token.nonzero().flatten().tolist():
            (grad,) = torch.autograd.grad(logits[depth - 1][0, t, 0], weight, retain_graph=True)
            reach = (grad[1:14].norm(dim=-1) > 1e-13).tolist()
            same = [bool(seq_idx[0, s] == seq_idx[0, t]) for s in range(13)]
            assert reach == [same[s] and s <= t + depth for s in range(13)], (depth, t)


# ------------------------------------------------------------------------------------------------------------- the loss


def test_loss_is_the_mean_over_depths_of_means_over_trained_tokens() -> None:
    source = torch.Generator().manual_seed(0)
    logits = [torch.randn(2, 7, 5, generator=source) for _ in range(3)]
    labels = torch.randint(5, (2, 7), generator=source)
    seq_idx = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
    select = torch.tensor([[1, 0, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1, 1]]).bool()
    for masked in (False, True):
        means, sums, counts = [], [], []
        for depth, logits_BLV in enumerate(logits, start=1):
            nats = [
                -torch.log_softmax(logits_BLV[b, t].double(), -1)[labels[b, t + depth]].item()
                for b in range(2)
                for t in range(7 - depth)
                if seq_idx[b, t] == seq_idx[b, t + depth] and (select[b, t + depth] or not masked)
            ]
            means.append(sum(nats) / len(nats))
            sums.append(sum(nats))
            counts.append(len(nats))
        given = logits
        if masked:
            given = [x[shift_left(select, k, seq_idx, fill=False)] for k, x in enumerate(logits, start=1)]
        arguments = (given, labels, seq_idx, select if masked else None)
        assert mtp_loss(*arguments).item() == pytest.approx(sum(means) / 3, rel=1e-5)
        assert mtp_loss_sums(*arguments)[0].tolist() == pytest.approx(sums, rel=1e-5)
        assert mtp_loss_sums(*arguments)[1].tolist() == counts


def test_depths_without_any_token_cost_nothing(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("M", **WITH_MTP).train()
    for length in (1, 2):
        ids, labels = tokens(3, length), tokens(3, length, seed=1)
        out = model(ids)
        loss = mtp_loss(out.mtp_logits, labels)
        sums, counts = mtp_loss_sums(out.mtp_logits, labels)
        assert counts.tolist() == [3 * (length - 1), 0] and sums[1] == 0
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert IGNORED not in range(61)


# ------------------------------------------------------------------------------------------------------------ gradients


def grads_of(model: NemotronH, detach: bool) -> dict[str, Tensor]:
    ids, labels = tokens(3, 10), tokens(3, 10, seed=1)
    model.zero_grad()
    mtp_loss(model(ids, mtp_depths=2, detach_mtp=detach).mtp_logits, labels).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_reach_trunk_embedding_and_head_unless_detached(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("M*E-", dtype=torch.float64, **WITH_MTP)
    through, detached = grads_of(model, False), grads_of(model, True)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, grad in through.items() if grad.norm() > 0} == names
    assert set(detached) == {name for name in names if name.startswith("mtp.")}
    for name, grad in detached.items():
        torch.testing.assert_close(grad, through[name], atol=1e-14, rtol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


# ---------------------------------------------------------------------------------------- names, and the rest as before


def test_names_and_shapes_are_the_published_ones() -> None:
    with torch.device("meta"):
        model = NemotronH(NemotronHConfig(hybrid_override_pattern="M", moe_latent_size=48, **WITH_MTP))
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name.startswith("mtp.")}
    assert shapes == {
        "mtp.layers.0.enorm.weight": (128,),
        "mtp.layers.0.hnorm.weight": (128,),
        "mtp.layers.0.eh_proj.weight": (128, 256),
        "mtp.layers.0.norm.weight": (128,),
        "mtp.layers.0.mixer.q_proj.weight": (128, 128),
        "mtp.layers.0.mixer.k_proj.weight": (64, 128),
        "mtp.layers.0.mixer.v_proj.weight": (64, 128),
        "mtp.layers.0.mixer.o_proj.weight": (128, 128),
        "mtp.layers.1.norm.weight": (128,),
        "mtp.layers.1.mixer.gate.weight": (16, 128),
        "mtp.layers.1.mixer.gate.e_score_correction_bias": (16,),
        "mtp.layers.1.mixer.experts.up_proj": (16, 128, 48),
        "mtp.layers.1.mixer.experts.down_proj": (16, 48, 128),
        "mtp.layers.1.mixer.shared_experts.up_proj.weight": (256, 128),
        "mtp.layers.1.mixer.shared_experts.down_proj.weight": (128, 256),
        "mtp.layers.1.mixer.fc1_latent_proj.weight": (48, 128),
        "mtp.layers.1.mixer.fc2_latent_proj.weight": (128, 48),
        "mtp.layers.1.final_layernorm.weight": (128,),
    }


def test_the_next_token_path_is_bit_identical_with_and_without(make_model: Callable[..., NemotronH]) -> None:
    plain, model = make_model("MEM*E-", seed=4).train(), make_model("MEM*E-", seed=4, **WITH_MTP).train()
    model.load_state_dict(plain.state_dict(), strict=False)
    assert plain.mtp is None and not [name for name in plain.state_dict() if "mtp" in name]
    ids, labels = tokens(3, 17), tokens(3, 17, seed=1)
    expected = plain(ids)
    out = model(ids, mtp_depths=0)
    assert torch.equal(out.logits, expected.logits) and out.mtp_logits == expected.mtp_logits == []
    assert torch.equal(out.load_balancing_loss, expected.load_balancing_loss)
    assert torch.equal(model(ids).logits, expected.logits)  # the depths read the trunk and do not touch it
    next_token_loss(expected.logits, labels).backward()
    next_token_loss(out.logits, labels).backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, dict(model.named_parameters())[name].grad), name


def test_depths_run_in_training_or_when_asked(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("M", mtp_num_layers=3, **WITH_MTP)
    ids = tokens(2, 9)
    assert [len(model(ids, mtp_depths=n).mtp_logits) for n in (None, 0, 1, 5)] == [0, 0, 1, 5]
    assert len(model.train()(ids).mtp_logits) == 3
    assert make_model("M").train()(ids, mtp_depths=2).mtp_logits == []


def test_expert_loads_and_balance_count_every_application(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("E-E", **WITH_MTP).train()
    seen: list[Tensor] = []
    trunk_first, trunk_second, shared = model.moe_blocks()
    for moe in model.moe_blocks():
        moe.register_forward_hook(lambda module, args, out: seen.append(out[1]))
    out = model(tokens(2, 9))
    assert len(seen) == 4  # two blocks of the trunk, one shared block at two depths
    torch.testing.assert_close(out.load_balancing_loss, seen[0] + seen[1] + (seen[2] + seen[3]) / 2)
    per_pass = 2 * 9 * model.config.num_experts_per_tok
    assert [moe.gate.expert_load.sum() for moe in (trunk_first, trunk_second, shared)] == [
        per_pass, per_pass, 2 * per_pass,
    ]  # fmt: skip
    before = shared.gate.e_score_correction_bias.clone()
    model.update_expert_bias(1e-3)
    assert not torch.equal(shared.gate.e_score_correction_bias, before) and shared.gate.expert_load.sum() == 0


def test_padding_behind_a_shared_prompt_is_no_load_of_an_expert(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("E", **WITH_MTP).train()
    documents = torch.tensor([[0] * 4 + [1] * 3 + [2] * 6 + [-1] * 2, [0] * 5 + [1] * 2 + [-1] * 8])
    model(tokens(2, 15), documents, select_BL=documents > 0, shared_prompt=True)
    trunk, shared = (int(moe.gate.expert_load.sum()) for moe in model.moe_blocks())
    per_pass = (4 + 3 + 4 + 6 + 5 + 2) * model.config.num_experts_per_tok  # a prompt once for each continuation
    assert (trunk, shared) == (per_pass, 2 * per_pass)


def test_a_stored_block_that_training_leaves_alone(make_model: Callable[..., NemotronH]) -> None:
    """`mtp_num_layers: 0`, which Super's RL sets."""
    model = make_model("M", **(WITH_MTP | {"mtp_num_layers": 0})).train()
    assert model.mtp is not None
    out = model(torch.arange(12).view(2, 6))
    assert out.mtp_logits == []
    with pytest.raises(ValueError, match="no mtp_logits"):
        mtp_loss(out.mtp_logits, torch.zeros(2, 6, dtype=torch.int64))

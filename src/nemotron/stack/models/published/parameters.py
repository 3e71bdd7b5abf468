"""Number of parameters of a model, by part, in closed form from its config alone.

Counted are the parameters that the optimiser trains; the experts' correction bias (E numbers an `E` block) is a buffer.
"Active" are the parameters that take part in predicting one token: of the routed experts, those that it visits.
Published figures differ in whether the input embedding is active (3.6 B against 3.2 B of Nemotron 3 Nano) and leave
out the MTP block; hence the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemotron.stack.models.config import NemotronHConfig


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a model, or of its MTP block, by part. Each is summed over all blocks."""

    embedding: int = 0
    mamba: int = 0
    attention: int = 0
    mlp: int = 0
    router: int = 0
    routed_experts: int = 0
    latent_projections: int = 0
    shared_experts: int = 0
    mtp_projection: int = 0  # eh_proj, which joins the hidden state and the next token's embedding
    norms: int = 0  # of the residual stream; Mamba-2's own norm counts as `mamba`
    head: int = 0
    visited_experts: int = 0  # how much of `routed_experts` one token uses

    @property
    def total(self) -> int:
        """All parameters."""
        return (
            self.embedding + self.mamba + self.attention + self.mlp + self.router + self.routed_experts
            + self.latent_projections + self.shared_experts + self.mtp_projection + self.norms + self.head
        )  # fmt: skip

    @property
    def active(self) -> int:
        """Those that one token uses, input embedding included."""
        return self.total - self.routed_experts + self.visited_experts

    @property
    def active_without_embedding(self) -> int:
        """Those that one token uses; a look-up in the input embedding is not a use, the output head is."""
        return self.active - self.embedding


def count_parameters(config: NemotronHConfig) -> Parameters:
    """Parameters of the model without its MTP block, which plain decoding does not run."""
    vocabulary = config.vocab_size * config.hidden_size
    final_norm = config.hidden_size
    return _count(config, config.hybrid_override_pattern, final_norm, embedding=vocabulary, head=vocabulary)


def count_mtp_parameters(config: NemotronHConfig) -> Parameters:
    """Parameters of the stored MTP block, all 0 for a model without it; embedding and head are the model's own.

    However often training or decoding applies the block, it is stored once; `active` is that of one application.
    """
    if config.num_nextn_predict_layers == 0:
        return Parameters()
    norms = 3 * config.hidden_size  # enorm, hnorm, final_layernorm
    return _count(config, config.mtp_hybrid_override_pattern, norms, mtp_projection=2 * config.hidden_size**2)


def _count(
    config: NemotronHConfig, pattern: str, norms: int, *, embedding: int = 0, head: int = 0, mtp_projection: int = 0
) -> Parameters:
    """The blocks of `pattern`, each with its norm, and what stands beside them."""
    hidden = config.hidden_size
    mamba, attention, moe, mlp = (pattern.count(symbol) for symbol in "M*E-")

    inner, conv, heads = config.mamba_inner_size, config.mamba_conv_size, config.mamba_num_heads
    in_proj = hidden * (inner + conv + heads)  # z | x B C | dt
    conv1d = conv * (config.conv_kernel + 1)  # the one linear map with a bias
    per_mamba = in_proj + conv1d + 3 * heads + inner + inner * hidden  # A_log, D, dt_bias; norm; out_proj

    query_and_output = 2 * config.num_attention_heads * config.head_dim
    key_and_value = 2 * config.num_key_value_heads * config.head_dim

    per_expert = 2 * config.routed_size * config.moe_intermediate_size
    latent = 2 * hidden * config.moe_latent_size if config.moe_latent_size is not None else 0
    return Parameters(
        embedding=embedding,
        mamba=mamba * per_mamba,
        attention=attention * hidden * (query_and_output + key_and_value),
        mlp=mlp * 2 * hidden * config.intermediate_size,
        router=moe * hidden * config.n_routed_experts,
        routed_experts=moe * config.n_routed_experts * per_expert,
        visited_experts=moe * config.num_experts_per_tok * per_expert,
        latent_projections=moe * latent,
        shared_experts=moe * 2 * hidden * config.moe_shared_expert_intermediate_size,
        mtp_projection=mtp_projection,
        norms=len(pattern) * hidden + norms,
        head=head,
    )

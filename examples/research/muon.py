"""`bf16.py` with Muon for the matrices of all blocks (Jordan et al. 2024): a momentum whose singular values are all 1.

Embedding, head, convolutions and vectors stay with AdamW. Shapes: B sequences, L = SEQ_LEN; a matrix is [O, I].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemotron.data_prep.tokens.tokenizer import EOS_ID, train_tokenizer
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.recipes.tools.bench_research_entry import Task, Trained
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.optim import build_optimizer, set_lr

SEQ_LEN, BATCH_SIZE = 256, 8
LR, MIN_SCALE, WARMUP_STEPS, DECAY_SHARE = 5.6e-3, 0.01, 50, 0.2
MUON_LR, MOMENTUM, WEIGHT_DECAY, ITERATIONS = 0.01, 0.95, 0.1, 4
RESERVE = 1.5  # seconds for the last step, and for writing the model
CONFIG = NemotronHConfig(
    hybrid_override_pattern="M-M*-",
    vocab_size=2048,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    mamba_num_heads=4,
    mamba_head_dim=64,
    ssm_state_size=32,
    n_groups=1,
    chunk_size=32,
    intermediate_size=512,
)


class Muon:
    """Momentum of matrices, orthogonalised by a Newton-Schulz iteration, whose coefficients are Jordan's."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self.matrices = matrices
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """An update that is as large in every direction; a tall matrix gets a larger one."""
        for matrix_OI, momentum_OI in zip(self.matrices, self.momenta, strict=True):
            assert matrix_OI.grad is not None
            momentum_OI.lerp_(matrix_OI.grad, 1 - MOMENTUM)
            update_OI = orthogonal(matrix_OI.grad.lerp(momentum_OI, MOMENTUM))
            scale = max(1.0, len(matrix_OI) / matrix_OI.shape[1]) ** 0.5
            matrix_OI.mul_(1 - lr * WEIGHT_DECAY).add_(update_OI, alpha=-lr * scale)
            matrix_OI.grad = None


def orthogonal(matrix_OI: Tensor) -> Tensor:
    """About the nearest matrix of which all singular values are 1, in bf16."""
    is_tall = len(matrix_OI) > matrix_OI.shape[1]
    x = (matrix_OI / (matrix_OI.norm() + 1e-7)).bfloat16()
    x = x.mT if is_tall else x
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


def train(task: Task) -> Trained:
    """Tokenizer, token stream, model, loop."""
    torch.manual_seed(task.seed)
    tokenizer = train_tokenizer(task.documents, CONFIG.vocab_size)
    encoded = tokenizer.encode_batch_fast(task.documents, add_special_tokens=False)
    stream_T = torch.tensor([token for document in encoded for token in (*document.ids, EOS_ID)])
    del encoded

    model = NemotronH(CONFIG)
    muon = Muon([weight for weight in model.backbone.layers.parameters() if weight.ndim == 2])
    optimizer = build_optimizer(model, AdamWConfig(lr=LR, adam_beta2=0.95, weight_decay=WEIGHT_DECAY))
    for group in optimizer.param_groups:
        group["params"] = [weight for weight in group["params"] if all(weight is not other for other in muon.matrices)]
    begin, end = task.used(), task.budget - RESERVE
    starts = torch.empty(0, dtype=torch.int64)
    step = 0
    while (now := task.used()) < end:
        # Linear warm-up; the peak; linear decay over the last share of the time.
        left = (end - now) / (end - begin)
        scale = (MIN_SCALE + (1 - MIN_SCALE) * min(1.0, left / DECAY_SHARE)) * min(1.0, (step + 1) / WARMUP_STEPS)
        set_lr(optimizer, LR * scale)
        # Every epoch cuts the stream at another place, and has its windows in another order.
        if len(starts) < BATCH_SIZE:
            first = int(torch.randint(SEQ_LEN, ()))
            starts = torch.arange(first, len(stream_T) - SEQ_LEN, SEQ_LEN)
            starts = starts[torch.randperm(len(starts))]
        rows, starts = starts[:BATCH_SIZE], starts[BATCH_SIZE:]
        ids_BL = stream_T[rows[:, None] + torch.arange(SEQ_LEN + 1)]
        # The loss is the mean over all tokens of the batch.
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids_BL[:, :-1])
        loss = next_token_loss(out.logits, ids_BL[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        muon.step(MUON_LR * scale)
        optimizer.zero_grad()
        step += 1
        task.show(step, loss.item())
    return Trained(model, tokenizer, SEQ_LEN, step, step * BATCH_SIZE * SEQ_LEN)

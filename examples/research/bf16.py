"""`dense.py` with matrices multiplied in bf16, 8 windows of 256 tokens, and a learning rate for the larger batch.

Shapes: B sequences, L = SEQ_LEN.
"""

from __future__ import annotations

import torch

from nemotron.data_prep.tokens.tokenizer import EOS_ID, train_tokenizer
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.recipes.tools.bench_research_entry import Task, Trained
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.optim import build_optimizer, set_lr

SEQ_LEN, BATCH_SIZE = 256, 8
LR, MIN_LR, WARMUP_STEPS, DECAY_SHARE = 5.6e-3, 5.6e-5, 50, 0.2
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


def train(task: Task) -> Trained:
    """Tokenizer, token stream, model, loop."""
    torch.manual_seed(task.seed)
    tokenizer = train_tokenizer(task.documents, CONFIG.vocab_size)
    encoded = tokenizer.encode_batch_fast(task.documents, add_special_tokens=False)
    stream_T = torch.tensor([token for document in encoded for token in (*document.ids, EOS_ID)])
    del encoded

    model = NemotronH(CONFIG)
    optimizer = build_optimizer(model, AdamWConfig(lr=LR, adam_beta2=0.95, weight_decay=0.1))
    begin, end = task.used(), task.budget - RESERVE
    starts = torch.empty(0, dtype=torch.int64)
    step = 0
    while (now := task.used()) < end:
        # Linear warm-up; the peak; linear decay over the last share of the time.
        left = (end - now) / (end - begin)
        lr = MIN_LR + (LR - MIN_LR) * min(1.0, left / DECAY_SHARE)
        set_lr(optimizer, lr * min(1.0, (step + 1) / WARMUP_STEPS))
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
        optimizer.zero_grad()
        step += 1
        task.show(step, loss.item())
    return Trained(model, tokenizer, SEQ_LEN, step, step * BATCH_SIZE * SEQ_LEN)

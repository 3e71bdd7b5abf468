"""Pieces of a training loop. The loop itself stands in the recipe script, where it can be read and changed.

Beside such a script read `session.py` (ranks, records, checkpoints, signals), `losses.py`, `optim.py` (AdamW and its
learning rate) and `distributed.py` (sums over ranks). `loaders.py` says which sequence comes when, from `blend.py`
(mixture) and `indexed_tokens.py` (token files), `phases.py` how one run goes on from another; `checkpoint.py` what is
on disk; `sharding.py` how a model lies on several ranks; `flops.py` and `matmul_peak.py` give the progress line its
share of the machine's peak.

Not needed to understand a loop: `memory.py` (whether a run fits), `precision.py` (where bf16 pays), `threads.py` and
`lanes.py` (speed on a CPU), `lora.py` (adapters), `merging.py` (a decay from checkpoints), `publish.py`.
"""

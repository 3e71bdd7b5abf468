"""Reinforcement learning: rollouts, advantages and the GRPO loss; a judge, preference pairs, a reward model.

What a step of `rlvr.py` does, in reading order:

    prompts.py        which prompts it draws; curriculum.py: by pass rate
    calls.py          its rollouts, cut into calls that anybody may draw
    dialogue.py       one attempt at a task, between a model's tokens and an environment's text
    rollouts.py       completions with their rewards, and their packing into micro-batches
    shaping.py        what the form of a response does to reward and advantage
    advantages.py     how much better a completion is than the others of its prompt
    losses.py         the GRPO loss, with importance weights and KL
    grpo.py           one update, and its records; policy.py: the optimiser's step; loss_metrics.py: what is measured

Ways to draw the rollouts: `rollout_buffer.py` (ahead of the trainer), `ray_workers.py` (elsewhere). RLHF: `genrm.py`
(what verdicts earn), `comparisons.py` (what a judge is shown), `judging.py` (the judge at work), `imitation.py` (how it
learns the form). DPO: `pairs.py`, `preferences.py`. `reward_model.py` scores answers by their likelihood, `boosting.py`
trains multi-token prediction on a model's own responses.
"""

"""Asynchronous GRPO: a thread draws the batches of coming steps while the trainer updates. Names are NeMo-RL's.

Which weights sample which prompts is a function of the step alone: those after max(0, k - max_trajectory_age_steps)
updates sample the batch of step k. So no group is older than the bound, however long generation takes, and a run that
is repeated or resumed ends with the same weights. NeMo-RL takes the newest weights that there are when generation
begins, which depends on who was faster. For the same reason a completion keeps the weights that began it: there is
nothing like `in_flight_weight_updates`, and so nothing for `recompute_kv_cache_after_weight_updates` to decide.

The thread has a model of its own and shares the processor, or the GPU, with the trainer. It gains what either of them
alone leaves idle: cores that small operations cannot use, and the time of sandboxes and of servers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from nemotron.stack.environments import Task
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.grpo import Batch, StepConfig
from nemotron.stack.rl.loss_metrics import MISMATCH_FACTOR
from nemotron.stack.rl.rollouts import Rollout, pack_rollouts
from nemotron.stack.rl.shaping import Message
from nemotron.stack.training.distributed import gather_bytes, least_of_ranks, sum_metrics
from nemotron.stack.training.session import Session


@dataclass
class _Drawn:
    """A batch, and exp|log p - log g| of its tokens, g as sampled and p recomputed by the same weights: the sum, and
    how many are above `MISMATCH_FACTOR`."""

    batch: Batch
    mult_prob_error: float
    num_mismatched: int


@dataclass
class _Pending:
    """A batch that is drawn or being drawn by the weights after `weight_version` updates.

    weights: these, so that a checkpoint can hold them as long as the batch is not drawn; empty for a batch that was
    itself read from a checkpoint.
    """

    weight_version: int
    weights: Mapping[str, Tensor]
    future: Future[_Drawn]

    @property
    def is_drawn(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


class RolloutBuffer:
    """This rank's batches of the coming steps; a context manager, at whose end the thread leaves what it is drawing.

    Args:
        tasks: of this rank, by step.
        draw: (model, step, poll) -> batch. It is called in the thread.
        max_age: the updates between the weights that sample a batch and those that it updates, at least 1.
    """

    def __init__(
        self, cfg: StepConfig, session: Session, max_age: int, tasks: Callable[[int], list[Task]],
        draw: Callable[[NemotronH, int, Callable[[], None]], Batch],
    ) -> None:  # fmt: skip
        self.cfg, self.session, self.max_age, self.tasks, self.draw = cfg, session, max_age, tasks, draw
        self.pending: dict[int, _Pending] = {}  # by step, in the order in which the thread draws them
        self._generator = copy.deepcopy(session.model).requires_grad_(False).eval()
        self._thread = ThreadPoolExecutor(1, "generation", self._begin_thread)
        self._is_closed = False

    def take(self, step: int) -> Batch:
        """The batch of `step`, once it is drawn.

        The weights as they are now begin to draw the batch of `step + max_age`; in the first step all up to it.
        Raises what `draw` raised, StopRequested among it.
        """
        self.pending = {target: pending for target, pending in self.pending.items() if target >= step}
        weights: dict[str, Tensor] = {}
        for target in range(step, min(step + self.max_age + 1, self.session.last_step)):
            if target not in self.pending:
                weights = weights or {name: t.detach().clone() for name, t in self.session.model.state_dict().items()}
                self._begin(target, weights)
        return self.pending[step].future.result().batch

    def metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the batch of `step`, some in place of `metrics`, its update's; all ranks call it together.

        token_mult_prob_error, num_mismatched_tokens: of generation recomputed by the weights that sampled it, over all
        its tokens. What the update measured under the first name is by the trainer's weights: policy_lag.
        avg_trajectory_age: updates between the two.
        """
        drawn = self.pending[step].future.result()
        num_tokens = sum(len(rollout.logprobs) for rollout in drawn.batch.rollouts)
        counts = {"error": drawn.mult_prob_error, "mismatched": drawn.num_mismatched, "tokens": num_tokens}
        sums = sum_metrics(counts, self.session.ranks)
        return {
            "token_mult_prob_error": sums["error"] / max(sums["tokens"], 1),
            "num_mismatched_tokens": sums["mismatched"],
            "policy_lag": metrics["token_mult_prob_error"],
            "avg_trajectory_age": step - self.pending[step].weight_version,
        }

    def tensors(self, step: int) -> dict[str, Tensor]:
        """What a checkpoint at the head of `step` has to hold; all ranks call it together.

        Of the batches ahead those that all ranks have drawn, `batch.STEP.RANK`, JSON as bytes. Of the others the
        weights that draw them, `weights.VERSION.NAME`, but for those of the checkpoint itself.
        """
        ahead = {target: pending for target, pending in self.pending.items() if target >= step}
        num_drawn = least_of_ranks(sum(pending.is_drawn for pending in ahead.values()))
        saved: dict[str, Tensor] = {}
        for index, (target, pending) in enumerate(ahead.items()):
            if index < num_drawn:
                text = json.dumps(_to_json(pending.future.result(), pending.weight_version))
                for rank, part in enumerate(gather_bytes(text.encode())):
                    saved[f"batch.{target}.{rank}"] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            elif pending.weight_version < step:
                prefix = f"weights.{pending.weight_version}."
                saved |= {prefix + name: tensor.cpu() for name, tensor in pending.weights.items()}
        return saved

    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the `tensors` of a checkpoint at the head of `step`, also of another number of ranks."""
        for target in range(step, min(step + self.max_age, self.session.last_step)):
            version = max(0, target - self.max_age)
            prefix = f"weights.{version}."
            weights = {k.removeprefix(prefix): tensor for k, tensor in tensors.items() if k.startswith(prefix)}
            ranks = sum(name.startswith(f"batch.{target}.") for name in tensors)
            if ranks:
                parts = [json.loads(tensors[f"batch.{target}.{rank}"].numpy().tobytes()) for rank in range(ranks)]
                future: Future[_Drawn] = Future()
                future.set_result(self._from_json(target, parts))
                self.pending[target] = _Pending(parts[0]["weight_version"], weights, future)
            elif weights:
                self._begin(target, weights)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    def _begin_thread(self) -> None:
        """What no thread inherits: the GPU, and the precision, which is never left.

        Who leaves autocast empties PyTorch's cache of rounded weights, that of all threads. Then the trainer would
        round a weight that it reads twice, as those of multi-token prediction, twice, and add up its gradients in
        another precision: the weights of the run would depend on who is faster.
        """
        if self.session.ranks.device.type == "cuda":
            torch.cuda.set_device(self.session.ranks.device)
        self.session.autocast.__enter__()

    def _poll(self) -> None:
        if self._is_closed:
            raise CancelledError
        self.session.stop.poll()

    def _begin(self, target: int, weights: Mapping[str, Tensor]) -> None:
        future = self._thread.submit(self._draw, target, weights)
        self.pending[target] = _Pending(max(0, target - self.max_age), weights, future)

    def _draw(self, target: int, weights: Mapping[str, Tensor]) -> _Drawn:
        self._poll()
        self._generator.load_state_dict(weights)
        batch = self.draw(self._generator, target, self._poll)
        return _Drawn(batch, *self._recomputed_error(batch.rollouts))

    @torch.no_grad()
    def _recomputed_error(self, rollouts: list[Rollout]) -> tuple[float, int]:
        """Read whole completions with the weights that sampled them token by token, as the trainer would."""
        everywhere = [[1.0] * len(rollout.completion_ids) for rollout in rollouts]
        policy, total, num_mismatched = self.cfg.policy, 0.0, 0
        for micro in pack_rollouts(
            rollouts, everywhere, policy.max_total_sequence_length, policy.train_micro_batch_size
        ):
            self._poll()
            micro = micro.to(self.session.ranks.device)
            logp_T = micro.logprobs(self._generator)
            error_T = (logp_T - micro.logp_generator_T).abs().exp()
            total += error_T.sum(dtype=torch.float64).item()
            num_mismatched += int((error_T > MISMATCH_FACTOR).sum())
        return total, num_mismatched

    def _from_json(self, target: int, parts: list[dict[str, Any]]) -> _Drawn:
        """This rank's share of a batch that was saved in `parts`, one a rank: groups go round, as tasks do."""
        ranks, size = self.session.ranks, self.cfg.grpo.num_generations_per_prompt
        num_groups = sum(len(part["rollouts"]) for part in parts) // size
        rollouts: list[Rollout] = []
        for prompt_index, group in enumerate(range(ranks.rank, num_groups, ranks.world_size)):
            first = group // len(parts) * size
            for record in parts[group % len(parts)]["rollouts"][first : first + size]:
                messages = [Message(**message) for message in record["messages"]]
                rollouts.append(Rollout(**{**record, "prompt_index": prompt_index, "messages": messages}))
        own = parts[ranks.rank :: ranks.world_size]
        errors = [error for part in own for error in part["errors"]]
        batch = Batch(self.tasks(target), rollouts, errors, parts[0]["families"])
        error, mismatched = (sum(part[name] for part in own) for name in ("mult_prob_error", "num_mismatched"))
        return _Drawn(batch, error, mismatched)


def _to_json(drawn: _Drawn, weight_version: int) -> dict[str, Any]:
    rollouts = [{**vars(r), "messages": [vars(message) for message in r.messages]} for r in drawn.batch.rollouts]
    return {
        "weight_version": weight_version, "families": drawn.batch.families, "errors": drawn.batch.errors,
        "mult_prob_error": drawn.mult_prob_error, "num_mismatched": drawn.num_mismatched, "rollouts": rollouts,
    }  # fmt: skip

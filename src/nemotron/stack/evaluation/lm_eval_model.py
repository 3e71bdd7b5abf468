"""A model of ours as one of lm-eval's (EleutherAI's lm-evaluation-harness), answered by the embedded decoder.

lm-eval's own `hf` runs what `nemotron FAMILY model export` writes, through transformers; this one reads any model of a
recipe as it is, decodes a batch at once on a CPU, and shows lm-eval what follows the reasoning alone, as a server does.
N rows, L tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.chat_template import load_template, special_token
from nemotron.stack.environments import answer_of
from nemotron.stack.evaluation.model import load_tokenizer, model_generate_fn
from nemotron.stack.models import NemotronH
from nemotron.stack.training.losses import token_losses

_UNDERSTOOD = {"do_sample", "temperature", "until", "max_gen_toks"}
_NO_CHANGE = {"top_p": 1.0, "top_k": (0, 50), "num_beams": 1}  # what tasks state that ask for nothing special


class NemotronLM(TemplateLM):
    """What lm-eval asks, answered as our own evaluation asks it: the same prompts, tokens and decoder.

    Args:
        folder: of the tokenizer.
        template: the chat template that `--apply_chat_template` means; None: a model that completes text.
        thinking: reasoning on, or off where the template has the switch. Reasoning is never part of an answer; one that
            does not end leaves an empty answer.
        max_length: tokens of a window in which log-likelihoods are computed; longer contexts lose their beginning.
        max_gen_toks: tokens of a response, reasoning included, where the task states none.
        batch_size: rows computed at once.
    """

    def __init__(
        self,
        model: NemotronH,
        folder: Path,
        template: str | None,
        *,
        thinking: bool = True,
        max_length: int = 2048,
        max_gen_toks: int = 256,
        batch_size: int = 64,
    ) -> None:
        super().__init__()
        self.model, self.folder, self.template, self.thinking = model, folder, template, thinking
        self.max_length, self.max_gen_toks, self.batch_size = max_length, max_gen_toks, batch_size
        self._tokenizer = load_tokenizer(folder)
        files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
        end = special_token(files, "eos_token") or "</s>"
        begin = special_token(files, "bos_token") or end
        ids = [self._tokenizer.token_to_id(token) for token in (end, begin)]
        if ids[0] is None or ids[1] is None:
            raise UserError(f"the tokenizer in {folder} has no token {begin} or {end}")
        self._eot, self._prefix = ids[0], ids[1]

    @property
    def eot_token_id(self) -> int:
        """What ends a document."""
        return self._eot

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the token that begins a document, else the one that ends it."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Part of the key under which lm-eval keeps requests."""
        return str(self.folder.absolute()).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Its source, for lm-eval's record. UserError where it is to be applied to a model that has none."""
        return load_template(self._required()).source if chat_template else ""

    def _required(self) -> str:
        if self.template is None:
            raise UserError("this model completes text and has no chat template", "leave --apply_chat_template out")
        return self.template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; without a generation prompt, its last message is what the answer begins with,
        after reasoning that is empty."""
        template = self._required()
        if add_generation_prompt:
            return chat.answer_prompt(chat_history, thinking=self.thinking, template=template)
        *history, begun = chat_history
        prompt = chat.answer_prompt(history, thinking=False, template=template)
        if chat.opens_reasoning(prompt):
            prompt += chat.end_of_reasoning(template)
        return prompt + begun["content"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, of special tokens in the text as well; none is put before it."""
        return list(self._tokenizer.encode(string, add_special_tokens=False).ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities (nats) of each continuation, and whether it is what greedy decoding would write."""
        # Rows of like length together, padded on the right: no position looks ahead.
        order = sorted(range(len(requests)), key=lambda row: -len(requests[row][1]) - len(requests[row][2]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        device = self.model.lm_head.weight.device
        self.model.eval()
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            tokens = [(requests[row][1] + requests[row][2])[-self.max_length - 1 :] for row in rows]
            ids_NL = torch.full((len(rows), max(map(len, tokens))), self.eot_token_id)
            asked_NL = torch.zeros(ids_NL.shape, dtype=torch.bool)
            for i, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
                ids_NL[i, : len(ids)] = torch.tensor(ids)
                asked_NL[i, max(1, len(ids) - len(requests[row][2])) : len(ids)] = True
            ids_NL, asked_NL = ids_NL.to(device), asked_NL.to(device)
            with torch.inference_mode():
                logits_TV = self.model(ids_NL[:, :-1], None, asked_NL[:, 1:]).logits
                labels_T = ids_NL[:, 1:][asked_NL[:, 1:]]
                losses_T = token_losses(logits_TV[None], labels_T[None])[0].double().cpu()
                likeliest_T = (logits_TV.argmax(-1) == labels_T).cpu()
            counts = asked_NL.sum(1).tolist()
            for row, losses, likeliest in zip(rows, losses_T.split(counts), likeliest_T.split(counts), strict=True):
                results[row] = (-float(losses.sum()), bool(likeliest.all()))
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood (nats) of whole texts, each in windows of its own that begin where the one before ended."""
        windows = [
            (text, *make_disjoint_window(pair))
            for text, request in enumerate(requests)
            for pair in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
        ]
        totals = [0.0] * len(requests)
        for (text, _, _), (loglikelihood, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[text] += loglikelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, cut before what a task says to stop at: a response is decoded to its end of turn first."""
        answers = [""] * len(requests)
        kinds: dict[tuple[float, int], list[int]] = {}
        for row, request in enumerate(requests):
            settings = _settings(request.args[1], self.max_gen_toks)
            kinds.setdefault((settings["temperature"], settings["max_gen_toks"]), []).append(row)
        for (temperature, max_new_tokens), rows in kinds.items():
            generate = model_generate_fn(
                self.model, self.folder, self.template, max_new_tokens=max_new_tokens, batch_size=self.batch_size,
                show_progress=not disable_tqdm, label="lm-eval",
            )  # fmt: skip
            prompts = [requests[row].args[0] for row in rows]
            # lm-eval has seeded torch with what its --seed says.
            completions = generate(prompts, temperature=temperature, seed=torch.initial_seed())
            for row, prompt, completion in zip(rows, prompts, completions, strict=True):
                answer = completion.text
                if self.template is not None:
                    answer = answer_of(answer, chat.opens_reasoning(prompt))
                until = _settings(requests[row].args[1], self.max_gen_toks)["until"]
                answers[row] = postprocess_generated_text(answer, until, None)
        return answers


def _settings(kwargs: dict[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """The generation settings of a task. UserError for one that the decoder does not have."""
    settings = dict(normalize_gen_kwargs(kwargs, max_gen_toks))
    settings.setdefault("temperature", 0.0)
    for name, value in settings.items():
        if name not in _UNDERSTOOD and value not in (None, *_unchanging(name)):
            raise UserError(f"the task asks for {name}={value}, which this model does not have", "use --model hf")
    return settings


def _unchanging(name: str) -> tuple[Any, ...]:
    values = _NO_CHANGE.get(name, ())
    return values if isinstance(values, tuple) else (values,)

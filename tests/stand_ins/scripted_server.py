"""A server of a scripted engine: OpenAI's client on the application itself, without a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from openai import OpenAI
from scripted_engine import Script, ScriptedEngine
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.stack.evaluation.model import reasoning_budget, stop_token_ids
from nemotron.stack.serving.app import create_app
from nemotron.stack.serving.engine import Sampling
from nemotron.stack.serving.prompt import ServedModel
from nemotron.stack.serving.work import Server


class Served:
    """`client`: of OpenAI; `http`: of the same server, for what that one cannot say. `engine` answers by its script."""

    def __init__(self, folder: Path, template: str | None, timeout: float = 60.0, **of_app: object) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.decode: Callable[[Sequence[int]], str] = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
        self.engine = ScriptedEngine(lambda prompt, sampling: [])
        budget = None
        with suppress(UserError):  # of a template that opens no reasoning
            budget = reasoning_budget(folder, template, 0, 100) if template else None
        model = ServedModel(
            name="tiny", folder=folder, tokenizer=tokenizer, template=template, thinking=True,
            stop_token_ids=tuple(stop_token_ids(folder, template)), reasoning=budget, max_length=1000, created=1,
        )  # fmt: skip
        app = create_app(Server(self.engine, model, timeout), **({"api_key": None, "is_local": False} | of_app))
        self.app = app
        self.http = TestClient(app, raise_server_exceptions=False)
        self.client = OpenAI(base_url="http://testserver/v1", api_key="none", http_client=self.http, max_retries=0)

    def says(self, *texts: str, end: str = "<|im_end|>") -> None:
        """The engine's answers, one after another and from the first again; all of them end with `end`."""
        number = iter(range(10**9))

        def script(prompt: Sequence[int], sampling: Sampling) -> list[int]:
            return self.encode(texts[next(number) % len(texts)] + end)

        self.engine.script = script

    def follows(self, script: Script) -> None:
        self.engine.script = script

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return self.decode(self.engine.asked[-1][0])

    @property
    def sampling(self) -> Sampling:
        """How the last answer was to be drawn."""
        return self.engine.asked[-1][1]

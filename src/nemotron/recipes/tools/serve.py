"""Serve a model over HTTP, for `nemotron serve`, which finds it and starts this script.

SIGTERM and Ctrl-C: no new requests, those at work get `drain` seconds, then they are cancelled; exit code 143 or 130.
A second Ctrl-C ends it at once. The model runs on the GPU if there is one. This is a tool and no step of a recipe: it
reads no config and publishes nothing, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import asyncio
import errno
import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn

from nemo_runspec.errors import UserError
from nemotron.kit.chat_template import load_template
from nemotron.kit.model_folder import CONFIG_FILE, GENERATION_FILE
from nemotron.recipes.tools.chat import load_model
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.model import load_tokenizer, reasoning_budget, stop_token_ids
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.generation_config import read_generation_config
from nemotron.stack.serving.app import create_app
from nemotron.stack.serving.engine import Engine, Limits
from nemotron.stack.serving.prompt import ServedModel
from nemotron.stack.serving.sampling import Sampling
from nemotron.stack.serving.work import Server

# Seconds for which the interpreter leaves a thread alone: every operation of torch gives the lock up, and a thread that
# answers HTTP would hold the model for 5 ms each time.
SWITCH_INTERVAL = 0.0005
# Seconds in which answers that the engine has ended reach their clients.
LAST_WORDS = 5


@dataclass(frozen=True)
class Options:
    """Of `nemotron serve`, and what the command knows of the model.

    `model` is the folder of its config and weights, `tokenizer` that of its tokenizer. `template`: its chat template,
    by name or path; None: it completes text alone. `name`: what clients call it. `api_key_env`: the variable that holds
    the key which clients have to bring.
    `max_length`: tokens of a prompt and its answer; `timeout`, `drain`: seconds; `prompt_cache`: bytes.
    """

    model: str
    tokenizer: str
    template: str | None
    thinking: bool
    name: str
    host: str
    port: int
    api_key_env: str | None
    max_length: int
    max_rows: int
    max_waiting: int
    num_drafts: int
    prompt_cache: int
    timeout: float
    drain: int


class DrainingServer(uvicorn.Server):
    """Where a signal asks to leave, the engine takes nothing more and ends what is left after `drain` seconds.

    The answers are ended by the engine and not by uvicorn, which would cancel them: a client reads why.
    `greeting` is said once requests are accepted, so that who waits for it may send one.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: float, greeting: str) -> None:
        super().__init__(config)
        self.engine, self.drain, self.greeting = engine, drain, greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        print(self.greeting, file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for what is at work."""
        threading.Thread(target=self.engine.stop, args=(self.drain,), name="drain").start()
        await super().shutdown(sockets)


def unless_cancelled(record: logging.LogRecord) -> bool:
    """Whether to log: not what a second Ctrl-C cancelled, which is no error of the application."""
    error = record.exc_info[1] if record.exc_info else None
    is_cancelled = (
        isinstance(error, asyncio.CancelledError) or "asyncio.exceptions.CancelledError" in record.getMessage()
    )
    return not is_cancelled and "timeout graceful shutdown exceeded" not in record.getMessage()


def bind(host: str, port: int) -> socket.socket:
    """A socket with the address taken, whose clients wait until they are served. UserError: it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen()  # before, another process could bind the same
    except OSError as failure:
        is_of_port = failure.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "--port 0 takes any that is free" if is_of_port else "--host is an address of this machine, or its name"
        raise UserError(f"cannot listen on {host}:{port}: {failure.strerror}", hint) from failure
    return taken


def served_model(options: Options) -> ServedModel:
    """The model as clients know it. UserError: its tokenizer, its template or its generation_config.json cannot be
    read, or that says what no request may."""
    folder, template, budget = Path(options.tokenizer), options.template, None
    tokenizer = load_tokenizer(folder)
    if template is not None:
        load_template(template)
        with suppress(UserError):  # one that opens no reasoning
            budget = reasoning_budget(folder, template, 0, options.max_length)
    settings = read_generation_config(Path(options.model))
    sampling = {key: settings[key] for key in ("temperature", "top_p") if settings.get(key) is not None}
    try:
        Sampling(1, (), **sampling)
    except (TypeError, ValueError) as error:
        raise UserError(f"{Path(options.model) / GENERATION_FILE}: {error}") from error
    if settings.get("top_k"):
        print(f"note: {GENERATION_FILE}: top_k = {settings['top_k']} is not served: all tokens", file=sys.stderr)
    return ServedModel(
        name=options.name,
        folder=folder,
        tokenizer=tokenizer,
        template=template,
        thinking=options.thinking,
        stop_token_ids=tuple(stop_token_ids(folder, template)),
        reasoning=budget,
        max_length=options.max_length,
        created=int((Path(options.model) / CONFIG_FILE).stat().st_mtime),
        **sampling,
    )


def listen(engine: Engine, served: ServedModel, options: Options, taken: socket.socket) -> None:
    """Answer until a signal asks to leave; the signal then has the effect that `errors.end_on_signals` gives it."""
    api_key = os.environ[options.api_key_env] if options.api_key_env else None
    # Without a key it is for this machine alone: the command asks for one where the address is another.
    app = create_app(Server(engine, served, options.timeout), api_key, is_local=api_key is None)
    config = uvicorn.Config(
        app, log_level=logging.WARNING, access_log=False, timeout_graceful_shutdown=options.drain + LAST_WORDS,
        ws="none", server_header=False,
    )  # fmt: skip
    logging.getLogger("uvicorn.error").addFilter(unless_cancelled)
    host, port = taken.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    what = "to complete text (the model has no chat template)" if served.template is None else "to chat in"
    greeting = f"{served.name} at {where}/v1, a page {what} at {where}/"
    engine.start()
    try:
        DrainingServer(config, engine, options.drain, greeting).run(sockets=[taken])
    finally:
        engine.stop(drain_seconds=0)  # requests at work have had their time, or a second signal takes it


def main(options: Options) -> None:
    """Load the model, serve."""
    if options.api_key_env and not os.environ.get(options.api_key_env):
        raise UserError(f"--api-key-env {options.api_key_env}: there is no such variable, or it is empty", None)
    taken = bind(options.host, options.port)  # before seconds of loading
    served = served_model(options)
    begin = time.monotonic()
    model: NemotronH = load_model(Path(options.model), served.tokenizer)
    model.eval()
    where = "GPU" if torch.cuda.is_available() else "CPU"
    print(f"loaded {options.model} to the {where} in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    limits = Limits(
        max_length=options.max_length,
        max_rows=options.max_rows,
        max_waiting=options.max_waiting,
        num_drafts=options.num_drafts,
        prompt_cache_bytes=options.prompt_cache,
    )
    engine = Engine(model, limits)
    sys.setswitchinterval(SWITCH_INTERVAL)
    listen(engine, served, options, taken)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))

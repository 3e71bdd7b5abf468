"""nemotron serve: a model over HTTP, by the embedded engine or by another one that is given the command for it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.installation import check_imports
from nemotron.cli.recipe_dir import recipe_dir
from nemotron.cli.tool import become_tool

ENGINES = ("embedded", "vllm", "trtllm", "nim")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Where a model's config does not say how long a text may be: what the recipes' tiny models are asked for is shorter.
DEFAULT_LENGTH = 4096
# What of ours, beside address and key, the command of another engine has, and how it is called there.
THEIR_NAMES = {
    "vllm": {"name": "--served-model-name", "max_length": "--max-model-len", "max_rows": "--max-num-seqs"},
    "trtllm": {"max_length": "--max_seq_len", "max_rows": "--max_batch_size"},
}
THEIR_NAMES["nim"] = THEIR_NAMES["vllm"]  # which it passes its options on to


def serve(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="NAME or NAME:VERSION of an artifact, a directory, hf://ORG/NAME.")
    ],
    host: Annotated[
        str, typer.Option(help="Address; any other than this machine's own needs --api-key-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment variable with the key that clients have to bring."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model (default: the artifact's name).")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Chat template, by name or path (default: the model's own).")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a prompt and its answer (default: the model's, else 4096).")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Requests that are decoded at once.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; one more is refused.")] = 256,
    drafts: Annotated[
        int, typer.Option(min=0, help="Tokens that the multi-token prediction block drafts for each step; 0: none.")
    ] = 0,
    prompt_cache: Annotated[
        int, typer.Option(min=0, metavar="MIB", help="Memory for states of prompts that come again; 0: none.")
    ] = 1024,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 600,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that requests have left after SIGTERM or Ctrl-C.")] = 30,
    engine: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(ENGINES)}; those but the first serve a model that was exported, and take --name, "
            "--max-length and --max-rows where they have them, and no other option of the embedded one."
        ),
    ] = "embedded",
) -> None:
    """Serve a model to clients of the OpenAI API, with a page to chat in.

    /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /metrics.

    With --engine the command of another engine is printed; vLLM is started where it is installed.

    \b
    Examples:
      nemotron serve nano3-final-model-tiny
      nemotron serve super3-rlhf-model-tiny --drafts 3 --port 8001
      nemotron serve ./my-model --host 0.0.0.0 --api-key-env MY_KEY
      nemotron serve ./my-export --engine vllm
    """
    if engine not in ENGINES:
        raise UserError(f"unknown engine '{engine}'", did_you_mean(engine, ENGINES))
    if host not in LOOPBACK and api_key_env is None:
        hint = "--api-key-env NAME: the environment variable with the key that clients have to bring"
        raise UserError(f"--host {host} lets others in, and there is no key", hint)
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise UserError(f"--api-key-env {api_key_env}: there is no such variable, or it is empty")
    if engine != "embedded":
        options = engine_options(engine, given_options(ctx))
        command = engine_command(engine, exported_folder(model), host, port, options, has_key=api_key_env is not None)
        run_or_print(engine, command, api_key_env)
        return
    from nemotron.kit.found_model import find_model

    check_imports(recipe_dir("tools") / "serve.py")  # before a model is downloaded
    found = find_model(model)
    config = read_config(found.folder)
    if drafts and not config.get("num_nextn_predict_layers"):
        raise UserError(
            f"--drafts {drafts}: {model} has no multi-token prediction block that could draft", "leave it out"
        )
    become_tool(
        "serve.py",
        model=found.folder,
        tokenizer=found.tokenizer,
        template=None if found.is_base and template is None else template or found.template,
        thinking=found.reasons,
        name=name or found.name,
        host=host,
        port=port,
        api_key_env=api_key_env,
        max_length=max_length or declared_length(config) or DEFAULT_LENGTH,
        max_rows=max_rows,
        max_waiting=max_waiting,
        num_drafts=drafts,
        prompt_cache=prompt_cache << 20,
        timeout=timeout,
        drain=drain,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config. UserError: it is no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object")
    return config


def declared_length(config: dict[str, Any]) -> int | None:
    """`max_position_embeddings` of a model's config; None where it has none."""
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 1 else None


# ------------------------------------------------------------------------------------------------------- other engines


def exported_folder(model: str) -> Path:
    """The directory of an exported model. UserError: it is none that `nemotron FAMILY model export` wrote."""
    from nemo_runspec.config.inputs import is_place
    from nemotron.kit.model_folder import check_model_folder, model_folder, read_origin

    export = f"nemotron FAMILY model export {model} -o DIRECTORY"
    if not is_place(model):
        raise UserError(f"{model}: another engine reads a directory that was exported", export)
    folder, _ = model_folder(model)
    check_model_folder(folder)
    if read_origin(folder) is None:
        raise UserError(f"{folder} is no export of this project: it has no nemotron.json", export)
    return folder


def given_options(ctx: typer.Context) -> dict[str, tuple[str, object]]:
    """The options on the command line: parameter -> how it is written there, and its value."""
    given = {}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name and source is not None and source.name == "COMMANDLINE":
            given[parameter.name] = parameter.opts[0], ctx.params[parameter.name]
    return given


def engine_options(engine: str, given: dict[str, tuple[str, object]]) -> list[str]:
    """Our options in another engine's words. UserError: it has none for one of them."""
    words: list[str] = []
    for name, (option, value) in given.items():
        if name in ("model", "host", "port", "api_key_env", "engine"):
            continue
        if name not in THEIR_NAMES[engine]:
            ours = ", ".join(f"--{known.replace('_', '-')}" for known in THEIR_NAMES[engine])
            raise UserError(f"{option} {value}: not an option of {engine}", f"beside the address it takes {ours}")
        words += [THEIR_NAMES[engine][name], str(value)]
    return words


def engine_command(
    engine: str, folder: Path, host: str, port: int, ours: list[str], *, has_key: bool = False
) -> list[str]:
    """The words that serve an exported model with another engine; `ours`: as `engine_options` gives them.

    Options and names of parsers are those of vLLM 0.33.0, of TensorRT-LLM's `trtllm-serve`, and of the model-free image
    of NIM 2, which passes on what stands behind the image to vLLM; tests hold them against those programs' own lists.
    The states of Mamba stay in fp32, as the published models are served. The calls of Nano v2 have no parser in them.
    """
    from nemotron.kit.chat_template import has_template, load_template

    source = load_template(str(folder)).source if has_template(folder) else ""
    reasons, calls = "<think>" in source, "<tool_call>" in source
    if engine == "trtllm":
        words = ["trtllm-serve", str(folder), "--host", host, "--port", str(port), "--backend", "pytorch"]
        words += ["--reasoning_parser", "nano-v3"] if reasons else []
        return words + (["--tool_parser", "qwen3_coder"] if calls else []) + ours
    options = [*ours, "--mamba-ssm-cache-dtype", "float32"]
    options += [] if "--served-model-name" in ours else ["--served-model-name", folder.name]
    options += ["--reasoning-parser", "nemotron_v3"] if reasons else []
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"] if calls else []
    if engine == "vllm":
        return ["vllm", "serve", str(folder), "--host", host, "--port", str(port), *options]
    address = f"[{host}]" if ":" in host else "127.0.0.1" if host == "localhost" else host
    words = ["docker", "run", "--rm", "--gpus", "all", "-v", f"{folder}:/model:ro", "-p", f"{address}:{port}:8000"]
    key = ["-e", "VLLM_API_KEY"] if has_key else []
    return [*words, *key, "-e", "NIM_MODEL_PATH=/model", "$NIM_LLM_IMAGE", *options]


def run_or_print(engine: str, command: list[str], api_key_env: str | None) -> None:
    """Let vLLM take this process's place where it is installed; else show the command.

    vLLM reads its key from VLLM_API_KEY, and so it stands in no command.
    """
    if engine == "trtllm" and api_key_env is not None:
        raise UserError("--api-key-env: trtllm-serve asks for no key", "put a proxy that does before it")
    if engine == "vllm" and (program := shutil.which("vllm")):
        if api_key_env is not None:
            os.environ["VLLM_API_KEY"] = os.environ[api_key_env]
        print(shlex.join(command), file=sys.stderr, flush=True)
        os.execvp(program, command)
    shown = " ".join(word if word.startswith("$") else shlex.quote(word) for word in command)
    print(f'VLLM_API_KEY="${api_key_env}" {shown}' if api_key_env else shown)
    if engine == "vllm":
        print("vllm is not installed here: run this where it is (pip install vllm)", file=sys.stderr)

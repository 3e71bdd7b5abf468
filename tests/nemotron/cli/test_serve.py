"""`nemotron serve` finds the model and lets the script take its place; other engines get a command that they know."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.cli.commands import serve as command
from nemotron.kit.chat_template import load_template
from nemotron.kit.model_folder import Origin

Nemotron = Callable[..., subprocess.CompletedProcess[str]]
Tool = Callable[..., tuple[str, dict[str, Any], dict[str, str]]]
KNOWN = json.loads(Path(__file__).with_name("serving_engines.json").read_text())


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    return Registry(tmp_path / "artifacts")


def model(folder: Path, **config: object) -> Path:
    """A directory as far as it is looked at."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(json.dumps(config))
    return folder


def publish(registry: Registry, folder: Path, **fields: object) -> Path:
    """A model of a recipe in the registry; its payload."""
    model(folder, max_position_embeddings=1234, num_nextn_predict_layers=1)
    record = {"type": "Model", "fields": {"num_steps": 3, **fields}, "producer": {"name": "super3/sft"}}
    return registry.publish("super3-sft-model-tiny", folder, record).path


def test_the_script_gets_the_model_and_the_options(registry: Registry, tool: Tool, tmp_path: Path) -> None:
    path = publish(registry, tmp_path / "payload", chat_template="super3", reasoning=True)
    script, options, _ = tool(
        "serve", "super3-sft-model-tiny", "--port", "8001", "--drafts", "2", "--prompt-cache", "16"
    )
    assert script == "serve.py" and options == {
        "model": str(path), "tokenizer": str(path), "template": "super3", "thinking": True,
        "name": "super3-sft-model-tiny",
        "host": "127.0.0.1", "port": 8001, "api_key_env": None, "max_length": 1234, "max_rows": 64,
        "max_waiting": 256, "num_drafts": 2, "prompt_cache": 16 * 2**20, "timeout": 600, "drain": 30,
    }  # fmt: skip
    _, options, _ = tool("serve", "art://super3-sft-model-tiny:1", "--max-length", "99", "--name", "mine")
    assert (options["model"], options["max_length"], options["name"]) == (str(path), 99, "mine")


def test_a_base_model_completes_and_one_without_reasoning_does_not_reason(
    registry: Registry, tool: Tool, tmp_path: Path
) -> None:
    publish(registry, tmp_path / "base", chat_template=None)
    assert tool("serve", "super3-sft-model-tiny")[1]["template"] is None
    assert tool("serve", "super3-sft-model-tiny", "--template", "nano3")[1]["template"] == "nano3"
    publish(registry, tmp_path / "answers", chat_template="super3", reasoning=False)
    assert not tool("serve", "super3-sft-model-tiny")[1]["thinking"]


def test_a_directory_and_the_hub(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "my-model")
    _, options, _ = tool("serve", str(folder))
    assert (options["model"], options["name"], options["template"]) == (str(folder), "my-model", None)
    assert options["max_length"] == 4096  # no config says another
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    _, options, _ = tool("serve", "hf://me/model", "--host", "0.0.0.0", "--api-key-env", "PATH")
    assert (options["model"], options["name"], options["api_key_env"]) == (str(folder), "model", "PATH")
    assert asked == ["me/model"]


def test_nothing_is_downloaded_where_a_library_is_missing(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("downloaded"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    with pytest.raises(UserError, match=r"serve\.py needs uvicorn, which is not installed"):
        tool("serve", "hf://me/model")


def test_drafts_are_refused_where_nothing_can_draft(here: Nemotron, tmp_path: Path) -> None:
    model(tmp_path / "without", num_nextn_predict_layers=0)
    result = here("serve ./without --drafts 2")
    assert result.returncode == 2 and "--drafts 2: ./without has no multi-token prediction block" in result.stderr
    (tmp_path / "without/config.json").write_text("[]")
    assert "config.json: not a JSON object" in here("serve ./without").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("m --host 0.0.0.0", "--host 0.0.0.0 lets others in, and there is no key\n--api-key-env NAME"),
        ("m --api-key-env NO_SUCH_KEY", "--api-key-env NO_SUCH_KEY: there is no such variable"),
        ("m --engine vlm", "unknown engine 'vlm'\ndid you mean vllm?"),
        ("m --engine vllm", "m: another engine reads a directory that was exported\nnemotron FAMILY model export m"),
        ("./m --engine nim", "no directory ./m"),
        ("super3-sft-model-tiny", "no artifact 'super3-sft-model-tiny'"),
    ],
)
def test_what_is_refused(here: Nemotron, words: str, message: str) -> None:
    result = here(f"serve {words}")
    assert result.returncode == 2 and message in result.stderr


@pytest.fixture
def exported(tmp_path: Path) -> Callable[[str], Path]:
    """A directory as an export of a family leaves it, as far as it is looked at."""

    def export(template: str) -> Path:
        folder = model(tmp_path / template)
        (folder / "chat_template.jinja").write_text(load_template(template).source)
        artifact = f"{template}-sft-model-tiny:1@{'0' * 64}"
        Origin(artifact=artifact, is_base=False, num_steps=1, tokens=None, reasoning=True, sources=[]).write(folder)
        return folder

    return export


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "nim"])
@pytest.mark.parametrize("template", ["super3", "nano2"])
def test_another_engine_knows_every_option(exported: Callable[[str], Path], engine: str, template: str) -> None:
    folder = exported(template)
    ours = {"max_length": ("--max-length", 99), "max_rows": ("--max-rows", 4)}
    if engine != "trtllm":  # which has no word for it
        ours["name"] = ("--name", "mine")
    theirs = command.engine_options(engine, ours)
    words = command.engine_command(
        engine, command.exported_folder(str(folder)), "127.0.0.1", 8000, theirs, has_key=True
    )
    assert {"99", "4"} <= set(words) and ("mine" in words) == (engine != "trtllm")
    known, options = KNOWN[engine], words
    if engine == "nim":
        image = words.index("$NIM_LLM_IMAGE")
        variables = [words[i + 1].partition("=")[0] for i in range(image) if words[i] == "-e"]
        assert set(variables) <= set(known["variables"]) and f"{folder}:/model:ro" in words
        assert words[words.index("-p") + 1] == "127.0.0.1:8000:8000"
        known, options = KNOWN["vllm"], words[image:]
    else:
        assert str(folder) in words
    for option, value in zip(options, [*options[1:], ""], strict=True):
        if option.startswith("--"):
            assert option in known["options"], option
            choices = known["options"][option]
            assert choices is None or value in choices or (choices == [] and value.startswith("--"))
    # The format of Nano v2's calls is known to none of them.
    assert any("qwen3_coder" in word for word in words) == (template == "super3")
    assert any(word in ("nemotron_v3", "nano-v3") for word in words)
    assert "KEY" not in " ".join(words).replace("VLLM_API_KEY", "")


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "nim"])
def test_an_option_that_another_engine_has_not_is_refused(
    exported: Callable[[str], Path], here: Nemotron, engine: str
) -> None:
    others = ["template", "drafts", "max_waiting", "prompt_cache", "timeout", "drain", *["name"] * (engine == "trtllm")]
    for name in others:
        with pytest.raises(UserError, match=rf"^--x 9: not an option of {engine}\n.*--max-length, --max-rows"):
            command.engine_options(engine, {"port": ("--port", 8000), name: ("--x", 9)})
    # A default that is given is given.
    result = here(f"serve {exported('super3')} --engine {engine} --drafts 0 --port 9")
    assert result.returncode == 2 and f"--drafts 0: not an option of {engine}" in result.stderr and not result.stdout


def test_the_command_is_printed_where_the_engine_is_not(
    exported: Callable[[str], Path], nemotron: Nemotron, tmp_path: Path
) -> None:
    folder = exported("super3")
    (tmp_path / "empty").mkdir()
    done = nemotron(f"serve {folder} --engine vllm --api-key-env MY_KEY", PATH=str(tmp_path / "empty"), MY_KEY="sesame")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f'VLLM_API_KEY="$MY_KEY" vllm serve {folder} ') and "sesame" not in done.stdout
    assert "vllm is not installed here" in done.stderr
    other = nemotron(f"serve {folder} --engine trtllm --api-key-env MY_KEY", MY_KEY="sesame")
    assert other.returncode == 2 and "asks for no key" in other.stderr
    (folder / "nemotron.json").unlink()
    other = nemotron(f"serve {folder} --engine nim")
    assert other.returncode == 2 and "is no export of this project" in other.stderr


def test_vllm_is_started_where_it_is_installed(
    exported: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MY_KEY", "sesame")
    monkeypatch.setenv("VLLM_API_KEY", "")
    started: list[Any] = []

    def replace_process(path: str, words: list[str]) -> None:
        started.extend([path, words, os.environ["VLLM_API_KEY"]])
        raise UserError("started")

    monkeypatch.setattr(os, "execvp", replace_process)
    words = command.engine_command("vllm", exported("super3"), "127.0.0.1", 8000, [], has_key=True)
    with pytest.raises(UserError, match="started"):
        command.run_or_print("vllm", words, "MY_KEY")
    assert started == [str(program), words, "sesame"]
    assert capfd.readouterr().err == f"{shlex.join(words)}\n"

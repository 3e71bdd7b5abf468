"""From a loaded config to a validated one: strict keys and types, interpolation, pinned artifacts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import ResolvedConfig, load_config, resolve_config
from nemo_runspec.config.explain import allowed
from nemo_runspec.errors import ArtifactError, UserError
from nemo_runspec.runspec import parse

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def here(project: Path) -> Path:
    return project


def resolve(*overrides: str, config: str = "tiny", **how: object) -> ResolvedConfig:
    spec = parse("train.py")
    return resolve_config(load_config(spec.config_dir, config, overrides), spec, **how)  # type: ignore[arg-type]


def publish(name: str, text: str = "x") -> None:
    payload = Path(f"payload-{name}")
    payload.mkdir(exist_ok=True)
    (payload / "data.txt").write_text(text, encoding="utf-8")
    Registry.default().publish(name, payload, {"type": "Dataset", "fields": {"num_examples": 12, "train_path": "t"}})


def test_the_result_is_an_instance_of_the_schema_class_with_every_default_visible() -> None:
    resolved = resolve("train.train_iters=5")
    model = resolved.model
    assert model is not None
    assert [cls.__name__ for cls in type(model).__mro__[:2]] == ["Cfg", "Cfg"]  # a subclass of the script's own
    assert model.train.train_iters == 5  # type: ignore[attr-defined]
    assert resolved.data["optimizer"] == {"lr": 1e-4}
    assert resolved.data["style"] == "WSD"
    assert resolved.data["run"] == {
        "script": "train.py",
        "name": "demo-train-tiny",
        "config": "tiny",
        "output": "demo-train-model-tiny",
        "results": None,
        "family": "demo",
        "stage": "train",
        "root": None,
        "env": None,
        "files": None,
        "processes": None,
        "data": None,
    }
    assert resolved.outputs == ("demo-train-model-tiny",)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("train.train_iter=5", "unknown key train.train_iter = 5", "did you mean train.train_iters?"),
        ("lr=0.1", "unknown key lr = 0.1", "did you mean optimizer.lr?"),
        ("run.daat=x", "unknown key run.daat = 'x'", "did you mean run.data?"),
        ("run.outptu=x", "unknown key run.outptu = 'x'", "did you mean run.output?"),
        ("sources=[{name: a, wieght: 2}]", "unknown key sources.0.wieght = 2", "did you mean sources.0.weight?"),
        ("train.api_key=canary", "unknown key train.api_key = (hidden)", None),
        ("tags=https://me:canary@host/a", "tags = 'https://***@host/a': must be a list, each item a string", None),
        ("qqqqq=1", "unknown key qqqqq = 1", "known keys: run, train, optimizer"),
        ("train.train_iters=abc", "train.train_iters = 'abc': must be an integer from 1 to 1000", "optimiser steps"),
        ("train.train_iters=0", "train.train_iters = 0: must be an integer from 1 to 1000", "optimiser steps"),
        ("train.train_iters=true", "train.train_iters = True: must be an integer", None),
        ("train.train_iters=null", "train.train_iters = None: must be an integer", None),
        ("optimizer.lr=-1", "optimizer.lr = -1: must be a number > 0 and <= 1", None),
        ("style=WDS", "style = 'WDS': must be one of 'WSD', 'cosine'", None),
        ("shuffle=yes", "shuffle = 'yes': must be true or false", None),
        ("tags=a", "tags = 'a': must be a list, each item a string", "a list of one: tags=[a]"),
        ("tags=[a,1]", "tags.1 = 1: must be a string", None),
        ("sources=[{weight: 2}]", "sources.0.name is missing; it must be a string", None),
        ("train=5", "train = 5: must be a group of keys", None),
        ("path=1", "path = 1: must be a path or null", None),
        ("train.train_iters=???", "train.train_iters has no value", None),
    ],
)
def test_a_bad_key_or_value_names_what_is_allowed(override: str, message: str, hint: str | None) -> None:
    with pytest.raises(UserError) as caught:
        resolve(override)
    assert caught.value.message.startswith("command line: ")
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")
    assert "canary" not in str(caught.value)
    assert "\n" not in caught.value.message + (caught.value.hint or "")


@pytest.mark.parametrize("override", ["sources=a", "tags='a, b'"])
def test_a_list_of_one_is_proposed_only_where_it_would_be_right(override: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(override)
    assert "must be a list" in caught.value.message and "a list of one" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Callable[[int], int], "a Callable"),
        (type | None, "a type or null"),
        (complex, "a complex"),
        (timedelta, "a duration"),
        (timedelta | None, "a duration or null"),
    ],
)
def test_a_type_that_json_does_not_have_is_named_all_the_same(annotation: Any, words: str) -> None:
    schema = create_model("Cfg", value=(annotation, ...))
    assert allowed(schema, ("value",)).text == words


def test_a_fault_in_a_file_names_file_and_line_and_how_many_more(write: Write) -> None:
    write("config/bad.yaml", "train:\n  train_iters: 10\n  global_batch_size: x\nstyle: z\n")
    with pytest.raises(UserError) as caught:
        resolve(config="bad")
    assert caught.value.message == (
        "config/bad.yaml:3: train.global_batch_size = 'x': must be an integer > 0 (and 1 more)"
    )
    write("config/bad.yaml", "style: WSD\ntrain:\n  micro_batch_size: 3\n")
    with pytest.raises(UserError) as caught:
        resolve(config="bad")
    said = "train.micro_batch_size must divide train.global_batch_size"
    assert caught.value.message == f"config/bad.yaml:2: train: {said}"
    write("config/bad.yaml", "train:\n\n  trin_iters: 10\n")
    with pytest.raises(UserError, match=r"config/bad\.yaml:3: unknown key train\.trin_iters = 10"):
        resolve(config="bad")
    write("config/bad.yaml", "train.train_iters: 10\n")
    with pytest.raises(UserError, match=r"unknown key train\.train_iters = 10") as caught:
        resolve(config="bad")
    assert caught.value.hint == "in YAML a group stands around its keys: train: {train_iters: …}"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("share: float = Field(2.0, le=1)", "wrong default: schema.py: share = 2.0: must be a number <= 1"),
        ("share: float = None", "wrong default: schema.py: share = None: must be a number"),
        ("share: Flot = 1.0", "schema.py: Cfg names a type Flot that is not defined or imported"),
    ],
)
def test_a_schema_that_refuses_its_own_default_is_found_before_the_job(
    field: str, message: str, write: Write, recwarn: pytest.WarningsRecorder
) -> None:
    schema = Path("schema.py").read_text(encoding="utf-8")
    write("schema.py", f"from __future__ import annotations\n{schema}    {field}\n")
    with pytest.raises(UserError) as caught:
        resolve()
    assert caught.value.message == message and not recwarn.list


def test_whole_floats_are_integers_and_interpolated_text_is_what_it_spells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    resolved = resolve("train.train_iters=1e2", "train.global_batch_size=${oc.env:STEPS}", "train.micro_batch_size=7")
    assert resolved.data["train"] == {"train_iters": 100, "global_batch_size": 7, "micro_batch_size": 7}
    assert type(resolved.data["train"]["train_iters"]) is int


def test_interpolations() -> None:
    resolved = resolve(
        "train.global_batch_size=${mul:2,${train.train_iters},2}",
        "optimizer.lr=${mul:0.5,0.5}",
        "tags=['${run.family}/${run.stage}', '${oc.env:NOT_SET_ANYWHERE,fallback}']",
    )
    assert resolved.data["train"]["global_batch_size"] == 80
    assert resolved.data["optimizer"]["lr"] == 0.25
    assert resolved.data["tags"] == ["demo/train", "fallback"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tags=['${train.foo}']", "tags[0]: Interpolation key 'train.foo' not found"),
        ("style=${oc.env:NOT_SET_ANYWHERE}", "style: Environment variable 'NOT_SET_ANYWHERE' not found"),
        ("style=${mul:2,x}", "style: ${mul:…}: 'x' is not a number"),
        ("style=${nope:2}", "style: Unsupported interpolation type nope"),
        ("style=${mul:2", "style: bad interpolation: "),
        ("style=${style}", "style: Recursive interpolation"),
        ("style=${art:dta,path}", "style: ${art:dta,path}: run.dta names no artifact"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(override)
    assert caught.value.message.startswith(f"command line: {message}")
    assert "\n" not in caught.value.message


def test_artifacts_are_pinned_and_their_fields_can_be_used() -> None:
    publish("demo-train-data-tiny", "one")
    publish("demo-train-data-tiny", "two")
    first, second = (Registry.default().resolve(f"demo-train-data-tiny:{n}") for n in (1, 2))
    resolved = resolve(
        "run.data=demo-train-data-tiny", "path=${art:data,path}", "train.train_iters=${art:data,num_examples}"
    )
    assert resolved.inputs == {"data": second}
    assert resolved.data["run"]["data"] == "demo-train-data-tiny:2"
    assert resolved.data["path"] == str(second.path)
    assert resolved.data["train"]["train_iters"] == 12
    for reference in ("demo-train-data-tiny:1", "art://demo-train-data-tiny:1", first.pinned):
        assert resolve(f"run.data={reference}").inputs == {"data": first}
    assert resolve("run.data=demo-train-data-tiny:latest").data["run"]["data"] == "demo-train-data-tiny:2"
    # A pipeline pins what its own earlier step made, also if another version is the latest by then.
    produced = {"demo-train-data-tiny": "demo-train-data-tiny:1"}
    assert resolve("run.data=demo-train-data-tiny", produced=produced).inputs == {"data": first}
    assert resolve("run.data=demo-train-data-tiny:2", produced=produced).inputs == {"data": second}


def test_an_artifact_s_field_may_stand_in_text_and_in_other_interpolations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    payload = Path("it's, {here}")
    payload.write_text("x", encoding="utf-8")
    version = Registry.default().publish("d", payload, {"fields": {"note": "it's ${a}, {b}", "sizes": [1, 2]}})
    texts = {
        "${art:d}": str(version.path),
        "a } ${art:d,ref}-${art: d , version}": "a } d:1-1",
        "${oc.env:NOT_SET_ANYWHERE,${art:d,note}}": "it's ${a}, {b}",
        "${art:d,note} ${run.config}": "it's ${a}, {b} tiny",
        r"\${art:d,ref}": "${art:d,ref}",
        "${mul:2,${art:d,version}}": 2,
        "${art:d,sizes}": [1, 2],
    }
    config = Path("config/free.yaml")
    for text, value in texts.items():
        config.write_text(json.dumps({"run": {"d": "d", "config": "tiny"}, "value": text}), encoding="utf-8")
        Path("free.py").write_text('# /// script\n# [tool.runspec]\n# name = "free"\n# ///\n', encoding="utf-8")
        spec = parse("free.py")
        assert resolve_config(load_config(spec.config_dir, "free"), spec).data["value"] == value
    with pytest.raises(UserError, match=r"run group"):
        resolve("run.data=d", "run.name=x-${art:data,ref}")


def test_a_missing_artifact_is_named_with_its_key_after_the_faults_of_the_config() -> None:
    with pytest.raises(ArtifactError, match=r"^run\.data = demo-train-data-tiny: no artifact 'demo-tr") as caught:
        resolve("run.data=demo-train-data-tiny", "path=${art:data,path}")
    assert caught.value.name == "demo-train-data-tiny"
    # A fault of the config itself is named first, before somebody goes and makes the artifact.
    with pytest.raises(UserError, match="style = 'x': must be one of"):
        resolve("run.data=demo-train-data-tiny", "style=x")


def test_an_artifact_field_that_is_not_there_is_answered_with_the_nearest() -> None:
    publish("d")
    with pytest.raises(UserError, match=r"d:1 has no field 'trian_path'") as caught:
        resolve("run.data=d", "style=${art:data,trian_path}")
    assert caught.value.hint == "did you mean train_path?"
    with pytest.raises(UserError, match=r"run\.data = 3: must be the name of an artifact"):
        resolve("run.data=3")


def test_several_processes_are_for_scripts_that_torchrun_starts(write: Write, project: Path) -> None:
    assert resolve("run.processes=2").run["processes"] == 2
    for count in ("0", "two", "1.5"):
        with pytest.raises(UserError, match=r"run\.processes = .*: must be an integer from 1 on"):
            resolve(f"run.processes={count}")
    text = (project / "train.py").read_text(encoding="utf-8")
    write("train.py", text.replace('launch = "torchrun"', 'launch = "direct"'))
    with pytest.raises(UserError, match=r"run\.processes = 2: train\.py is started as one process"):
        resolve("run.processes=2")


def test_an_input_that_only_the_schema_names_is_pinned_too(write: Write, project: Path) -> None:
    publish("always")
    text = (project / "schema.py").read_text(encoding="utf-8")
    write("schema.py", text.replace("data: str | None = None", 'data: str | None = "always"'))
    assert resolve().data["run"]["data"] == "always:1"


def test_what_an_earlier_step_will_make_is_left_open() -> None:
    resolved = resolve("run.data=d", "train.train_iters=${art:data,num_examples}", produced={"d": None})
    assert resolved.inputs == {"data": None}
    assert resolved.data["run"]["data"] == "d:latest"
    assert "resolved at start" in resolved.data["train"]["train_iters"]
    # Everything else is checked all the same.
    with pytest.raises(UserError, match="style = 'x'"):
        resolve("run.data=d", "train.train_iters=${art:data,num_examples}", "style=x", produced={"d": None})
    assert resolve("run.data=nowhere", look_up=False).inputs == {"data": None}


def test_a_run_has_the_number_of_processes_that_it_was_started_in(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("nemo_runspec.config.resolve.visible_gpus", lambda: 0)

    def processes(*overrides: str) -> int | None:
        model = resolve(*overrides, at_start=True).model
        assert model is not None
        return model.run.processes  # type: ignore[attr-defined, no-any-return]

    assert (processes(), processes("run.processes=2")) == (None, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (processes(), processes("run.processes=2")) == (None, 2)
    monkeypatch.setenv(
        "WORLD_SIZE", "8"
    )  # the profile's number on a cluster, and a process a GPU, are not the config's
    monkeypatch.setenv("RUNSPEC_JOB_DIR", str(project))
    assert processes("run.processes=2") == 2
    monkeypatch.delenv("RUNSPEC_JOB_DIR")
    monkeypatch.setattr("nemo_runspec.config.resolve.visible_gpus", lambda: 8)
    assert processes("run.processes=2") == 2


def test_a_config_of_another_script_is_refused() -> None:
    with pytest.raises(UserError, match=r"run\.script = 'other\.py': this config is not for train\.py"):
        resolve("run.script=other.py")
    for value in ("5", "0", "[train.py]"):
        with pytest.raises(UserError, match=r"^command line: run\.script = .*: must be text$"):
            resolve(f"run.script={value}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from .x import y\n", "fails to load: ImportError: attempted relative import"),
        ("class Cfg(:\n", r"schema\.py:1: "),
        ("x = 1\n", "has no pydantic class 'Cfg'"),
        ("raise ValueError('boom')\n", "fails to load: ValueError: boom"),
    ],
)
def test_a_bad_schema_file_is_refused(write: Write, text: str, message: str) -> None:
    write("schema.py", text)
    with pytest.raises(UserError, match=message):
        resolve()


def test_a_schema_whose_imports_are_slow_to_load_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("modules/jax.py", "")  # a stand-in: the check goes by the name
    write("modules/numbers_of_mine.py", "import jax\n")
    monkeypatch.syspath_prepend("modules")
    write("schema.py", "import numbers_of_mine\n")
    try:
        with pytest.raises(UserError, match=r"schema\.py: it, or a module that it imports, imports jax"):
            resolve()
    finally:
        sys.modules.pop("jax", None)
        sys.modules.pop("numbers_of_mine", None)


@pytest.mark.parametrize("name", ["HF_TOKEN", "wandb_api_key", "AWS_SECRET", "DB_PASSWORD", "MY_CREDENTIALS"])
@pytest.mark.parametrize("value", ["${oc.env:NAME}", "${oc.env:NAME,none}", "a ${oc.decode:${oc.env:NAME}}"])
def test_an_environment_variable_that_looks_secret_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "s3cret")
    with pytest.raises(UserError) as caught:
        resolve(f"path={value.replace('NAME', name)}")
    assert caught.value.message.startswith(f"command line: path: ${{oc.env:{name}}}: configs are written to files")
    assert "under secrets in a profile of env.toml" in caught.value.message
    assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_fault_of_the_command_line_is_never_laid_on_the_file(write: Write) -> None:
    more = "class Deep(Group):\n    train: Train = Train()\n\n\nclass Outer(Group):\n    deep: Deep = Deep()\n\n\n"
    more += "class Deeper(Cfg):\n    outer: Outer = Outer()\n"
    write("schema.py", f"{Path('schema.py').read_text()}\n\n{more}")
    write("train.py", Path("train.py").read_text().replace("schema.py:Cfg", "schema.py:Deeper"))
    tiny = write("config/tiny.yaml", Path("config/tiny.yaml").read_text())
    tiny.write_text(tiny.read_text() + "outer:\n  deep:\n    train:\n      train_iters: 3\n")
    for override in ("outer={deep: {train: {trian_iters: 4}}}", "outer.deep={train: {trian_iters: 4}}"):
        with pytest.raises(UserError) as caught:
            resolve(override)
        assert caught.value.message == "command line: unknown key outer.deep.train.trian_iters = 4"
        assert caught.value.hint == "did you mean outer.deep.train.train_iters?"
    # A check between keys of a group: the file set one of them, the command line the other.
    with pytest.raises(UserError, match=r"^command line: train: train.micro_batch_size must divide"):
        resolve("train.micro_batch_size=3")
    tiny.write_text(tiny.read_text().replace("global_batch_size: 8", "global_batch_size: 7"))
    with pytest.raises(UserError, match=r"^config/tiny.yaml:\d+: train: train.micro_batch_size must divide"):
        resolve("train.train_iters=5", config="tiny")


@pytest.mark.parametrize("key", ["output", "results"])
def test_a_name_that_cannot_be_published_is_refused_before_the_run(key: str) -> None:
    with pytest.raises(UserError, match=f"^command line: run.{key}: bad artifact name 'art://r:1'"):
        resolve(f"run.{key}=art://r:1")


@pytest.mark.parametrize("key", ["run.env.address", "tags.0"])
def test_an_address_with_a_password_gets_into_no_record(key: str) -> None:
    with pytest.raises(UserError, match=f"^command line: {key}: an address with a password") as caught:
        resolve("tags=[x]", f"{key}=http://me:pw@head:8265")
    assert "pw@" not in str(caught.value)

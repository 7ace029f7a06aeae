"""`luspo config`: values with their sources, differences, and a schema that agrees with what the loader takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from luspo_megatron import cli
from luspo_megatron.config import Config, SftConfig
from luspo_megatron.config_help import flat, schema, schema_text
from luspo_megatron.config_io import load_config
from luspo_megatron.errors import UserError

ROOT = Path(__file__).parents[2]


class Yaml12(yaml.SafeLoader):
    """Numbers as editors and YAML 1.2 read them (PyYAML takes 1e-6 for text)."""


Yaml12.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(
    r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|nan)$", re.IGNORECASE), list("-+0123456789."))


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=Yaml12)  # noqa: S506 - a SafeLoader


def recipes() -> list[tuple[str, Path]]:
    """(command, file) of every recipe in examples; those of cold starts name it."""
    files = sorted((ROOT / "examples").rglob("*.yaml"))
    return [("sft" if path.stem.endswith("_sft") else "train", path) for path in files]


CLASSES = {"train": Config, "sft": SftConfig}


@pytest.mark.parametrize(("command", "path"), recipes(), ids=lambda item: getattr(item, "stem", item))
def test_the_examples_fit_the_schema_and_load(command: str, path: Path) -> None:
    jsonschema.validate(read(path), schema(CLASSES[command], command))
    assert load_config(CLASSES[command], ["--config", str(path)])
    first = path.read_text().splitlines()[0]
    [name] = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", first)
    assert (path.parent / name).resolve() == ROOT / f"docs/schema/{command}.json"


@pytest.mark.parametrize("command", CLASSES)
def test_the_schema_in_docs_is_the_present_one(command: str) -> None:
    path = ROOT / f"docs/schema/{command}.json"
    assert path.read_text() == schema_text(CLASSES[command], f"luspo {command}"), (
        f"luspo config {command} --schema > {path.relative_to(ROOT)}")


@pytest.mark.parametrize("text", ["optimizer: {lrr: 1e-6}", "optimizer: {lr: fast}", "parallel: {tp: 1.5}",
                                  "model: {dtype: float64}", "run: {resume: perhaps}", "nosuch: {a: 1}",
                                  "optimizer: 3"])
def test_mistakes_are_mistakes_to_both(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(read(path), schema(Config, "train"))
    with pytest.raises(UserError):
        load_config(Config, ["--config", str(path)])


def test_the_schema_says_what_the_help_says() -> None:
    lr = schema(Config, "train")["properties"]["optimizer"]["properties"]["lr"]
    assert lr["type"] == "number" and lr["default"] == Config().optimizer.lr and "earning rate" in lr["description"]
    assert schema(Config, "train")["properties"]["model"]["properties"]["dtype"]["enum"] == ["float32", "bfloat16"]


def test_every_value_has_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("optimizer: {lr: 1e-6, beta1: 0.8}\nrun: {dir: 'a: #b'}\n")
    second.write_text("optimizer: {lr: 2e-6}\n")
    flags = ["--config", str(first), "--config", str(second), "--parallel.tp", "2", "--run.no_resume",
             "--optimizer.beta1=0.7"]
    assert cli.main(["config", "train", *flags]) == 0
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    assert load_config(Config, ["--config", str(tmp_path / "shown.yaml")]) == load_config(Config, flags)

    def line(name: str) -> str:
        [found] = [one for one in text.splitlines() if one.strip().startswith(f"{name}: ")]
        return found

    assert line("lr").endswith(f"# <- {second}") and line("tp").endswith("# <- command line")
    assert line("beta1").endswith("# <- command line") and line("resume").endswith("# <- command line")
    assert line("pp").endswith("# default") and line("dir").endswith(f"# <- {first}")
    assert cli.main(["config", "--parallel.tp", "2"]) == 0  # train is what is meant without a command
    assert "tp: 2" in capsys.readouterr().out


def test_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("optimizer: {lr: 1e-6}\n")
    other = tmp_path / "b.yaml"
    other.write_text("optimizer: {lr: 0.000002}\nparallel: {tp: 2}\n")
    assert cli.main(["config", "--diff", str(tmp_path / "run"), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["parallel.tp", "1", "->", "2"],
                                                ["optimizer.lr", "1.0e-06", "->", "2.0e-06"]]
    assert cli.main(["config", "--diff", str(other), str(other)]) == 0
    assert capsys.readouterr().out == "equal\n"


@pytest.mark.parametrize(("words", "says"), [
    (["trainn"], "takes the configuration of train, sft"), (["--diff", "a.yaml"], "takes two YAML files"),
    (["--diff", "no/such.yaml", "other.yaml"], "no/such.yaml"), (["train", "--optimizer.lrr", "1"], "optimizer.lr"),
    (["sft", "--schema", "x"], "takes nothing more")])
def test_mistakes(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", *words]) == 2
    assert says in capsys.readouterr().err


def test_flat_has_every_setting_once() -> None:
    assert len(flat(Config())) > 80 and flat(Config())["parallel.tp"] == 1
    assert json.loads(schema_text(SftConfig, "x"))["properties"]

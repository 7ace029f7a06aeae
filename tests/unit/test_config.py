"""Settings from flags and YAML, the way back, the frozen list of flags, and the checks of whole configurations."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from luspo_megatron.config import Config, EvalCommandConfig, ExportConfig, OptimizerConfig, RunConfig, SftConfig
from luspo_megatron.config_checks import (
    require,
    resolve_layout,
    validate,
    validate_eval,
    validate_export,
    validate_sft,
    warnings,
)
from luspo_megatron.config_io import field_types, load_config, save_config
from luspo_megatron.config_tools import LengthBiasConfig, ModelStudyConfig, ReportConfig
from luspo_megatron.errors import UserError
from luspo_megatron.weights.architecture import Architecture, parse_architecture, read_architecture

FLAGS = Path(__file__).with_name("flags.txt")
COMMANDS = {
    "train": Config, "sft": SftConfig, "eval": EvalCommandConfig, "export": ExportConfig,
    "study length-bias": LengthBiasConfig, "study model": ModelStudyConfig, "report": ReportConfig,
}  # fmt: skip
MOE = Architecture(
    family="qwen3_moe", num_layers=4, hidden=64, num_heads=8, num_kv_heads=2, head_dim=24, ffn=96, vocab_size=128,
    norm_eps=1e-6, rope_theta=1e6, max_positions=8192, tied=False, num_experts=8, top_k=2, moe_ffn=48, qk_norm=True,
)  # fmt: skip
DENSE = dataclasses.replace(MOE, family="qwen3", num_experts=0, top_k=0, moe_ffn=0)
SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 24, "intermediate_size": 96, "vocab_size": 128,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": True,
}  # fmt: skip


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def problem(cls: type, argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        load_config(cls, argv)
    return str(caught.value)


# --- flags and files ------------------------------------------------------------------------------------------------


def test_without_arguments_the_defaults_of_the_dataclass():
    assert load_config(Config, []) == Config()
    assert load_config(SftConfig, []) == SftConfig()  # has its own run and optimizer defaults


def test_flags_win_over_files_and_later_files_over_earlier_ones(tmp_path):
    one = write(tmp_path / "one.yaml", "run: {steps: 1, seed: 1}\noptimizer:\n  lr: 1e-5\n")
    two = write(tmp_path / "two.yaml", "run: {seed: 2}\nbatch: {max_tokens_per_micro_batch: 99}\n")
    config = load_config(Config, ["--run.steps", "3", "--config", one, f"--config={two}"])
    assert (config.run.steps, config.run.seed, config.optimizer.lr) == (3, 2, 1e-5)
    assert config.batch.max_tokens_per_micro_batch == 99
    assert load_config(Config, ["--run.steps", "3", "--run.steps=4"]).run.steps == 4


@pytest.mark.parametrize("section", ["run:\n", "run: {}\n", "# nothing\n", ""])
def test_empty_files_and_sections_are_no_mistake(tmp_path, section):
    assert load_config(Config, ["--config", write(tmp_path / "c.yaml", section)]) == Config()


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--run.resume"], True),
        (["--run.no_resume"], False),
        (["--run.no-resume"], False),
        (["--no-run.resume"], False),
        (["--run.resume", "false"], False),
        (["--run.resume=False"], False),
        (["--run.resume", "true"], True),
        (["--run.no_resume", "--run.resume"], True),
        (["--run.resume", "false", "--run.steps", "5"], False),
    ],
)
def test_switches_in_every_spelling(flags, value):
    assert load_config(Config, flags).run.resume is value


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False), ("no", False), ("On", True)])
def test_switches_in_yaml(tmp_path, word, value):
    path = write(tmp_path / "c.yaml", f"reward: {{binary: {word}}}\nrun: {{resume: {word}}}\n")
    config = load_config(Config, ["--config", path])
    assert config.reward.binary is value and config.run.resume is value


def test_words_of_yaml_stay_words(tmp_path):
    # YAML 1.1 reads a bare `on` as true and `1e-6` as text; a saved flag is what is written.
    path = write(tmp_path / "c.yaml", "model: {transformer_engine: on, hf: 0123}\noptimizer: {eps: 1e-6}\n")
    config = load_config(Config, ["--config", path])
    assert config.model.transformer_engine == "on" and config.model.hf == "0123" and config.optimizer.eps == 1e-6


def test_lists_both_ways(tmp_path):
    path = write(tmp_path / "c.yaml", "rollout:\n  urls: [http://a, http://b]\nreward: {terms: math:1}\n")
    config = load_config(Config, ["--config", path])
    assert config.rollout.urls == ("http://a", "http://b") and config.reward.terms == ("math:1",)
    assert load_config(Config, ["--config", path, "--rollout.urls", "http://c"]).rollout.urls == ("http://c",)
    assert load_config(Config, ["--config", path, "--rollout.urls="]).rollout.urls == ()
    many = load_config(Config, ["--reward.terms", "math:1", "format:0.5", "--run.seed", "3"])
    assert many.reward.terms == ("math:1", "format:0.5") and many.run.seed == 3


def test_values_that_look_like_something_else():
    config = load_config(Config, ["--optimizer.lr", "-1", "--data.task_args", '{"a": -1}', "--data.prompts=--x"])
    assert config.optimizer.lr == -1 and config.data.task_args == '{"a": -1}' and config.data.prompts == "--x"
    assert load_config(Config, ["--data.task-args", "{}"]).data.task_args == "{}"  # dashes as underscores


def test_relative_paths_stay_as_given():
    assert load_config(Config, ["--model.hf", "../m", "--run.dir", "r"]).model.hf == "../m"


def test_every_mistake_on_the_command_line_is_named_with_a_suggestion():
    flags = "--run.stepz 3 --lr=1 --run.steps x --model.dtype fp16 --run.resume maybe --run.seed"
    text = problem(Config, flags.split())
    assert "unknown flag --run.stepz; did you mean --run.steps?" in text
    assert "unknown flag --lr; did you mean --optimizer.lr?" in text
    assert "--run.steps takes a whole number, not 'x'" in text
    assert "--model.dtype takes one of float32, bfloat16; not 'fp16'" in text
    assert "--run.resume is a switch and takes true or false, not 'maybe'" in text
    assert "--run.seed needs a value" in text
    assert len(text.splitlines()) == 6


def test_a_file_without_the_flag():
    assert "--config recipe.yaml" in problem(Config, ["recipe.yaml"])
    assert "--config needs a YAML file" in problem(Config, ["--config"])


def test_every_mistake_in_a_file_is_named_by_file_and_key(tmp_path):
    path = write(
        tmp_path / "bad.yaml",
        "run: {stepz: 3, steps: [1]}\noptimiser: {lr: 3}\nmodel: 3\nqq: {zz: 1}\ndata: {prompts: {a: 1}}\n",
    )
    lines = problem(Config, ["--config", path]).splitlines()
    assert lines == [
        f"{path}: unknown key run.stepz; did you mean run.steps?",
        f"{path}: run.steps takes one value, not a list; quote it if it is meant as text",
        f"{path}: unknown key optimiser; did you mean optimizer?",
        f"{path}: model is a section; write its settings indented below it",
        f"{path}: unknown key qq",
        f"{path}: data.prompts takes one value, not a mapping; quote it if it is meant as text",
    ]
    path = write(tmp_path / "type.yaml", "run: {steps: 1.5, seed: a}\n")
    assert problem(Config, ["--config", path]).count(path) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"run: {steps: 1}\nrun: {seed: 1}\n", "the key 'run' is given twice (line 2"),
        (b"run: {steps: 1, steps: 2}\n", "the key 'steps' is given twice"),
        (b"run: {steps: 1\n", "is not valid YAML"),
        (b"- a\n", "holds no mapping"),
        (b"run: \xff\xfe\n", "is not UTF-8 text"),
        (b"run: \x01\n", "is not valid YAML"),
    ],
)
def test_unreadable_files(tmp_path, content, says):
    (tmp_path / "c.yaml").write_bytes(content)
    text = problem(Config, ["--config", str(tmp_path / "c.yaml")])
    assert says in text and str(tmp_path / "c.yaml") in text and len(text.splitlines()) == 1


def test_a_missing_file_and_a_folder(tmp_path):
    assert "none.yaml: cannot be read (No such file" in problem(Config, ["--config", str(tmp_path / "none.yaml")])
    assert "cannot be read (Is a directory)" in problem(Config, ["--config", str(tmp_path)])


# --- saving ---------------------------------------------------------------------------------------------------------


WORDS = ["", "on", "null", "~", "1e-6", "--x", "-1", "a: b", "'", '"', "{}", "# c", "a\nb", " x ", "é", "\x85", "["]


@dataclasses.dataclass(frozen=True)
class Inner:
    text: str = "a"
    """Text."""
    number: float = 1.0
    """A number."""
    names: tuple[str, ...] = ("a",)
    """A list."""


@dataclasses.dataclass(frozen=True)
class Outer:
    """One field of every kind that the configuration has."""

    inner: Inner = dataclasses.field(default_factory=Inner)
    count: int = 1
    """A whole number."""
    flag: bool = True
    """A switch."""
    kind: Literal["", "on", "off"] = "on"
    """A choice."""


TEXT = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NAMES = st.lists(st.sampled_from([word for word in WORDS if not word.startswith("-")]), max_size=3).map(tuple)
INNER = st.builds(Inner, text=TEXT, number=st.floats(allow_nan=False), names=NAMES.filter(lambda names: names != ("",)))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=st.builds(Outer, inner=INNER, count=st.integers(), flag=st.booleans(), kind=st.sampled_from(["", "on"])))
@example(config=Outer(inner=Inner(text="\x85", number=float("inf"), names=("", "true", "1e3"))))
def test_what_is_saved_is_loaded_again(tmp_path, config):
    save_config(config, tmp_path / "c.yaml")
    assert load_config(Outer, ["--config", str(tmp_path / "c.yaml")]) == config


@pytest.mark.parametrize("cls", COMMANDS.values())
def test_a_whole_configuration_with_every_field_changed(tmp_path, cls):
    def changed(value: Any, hint: Any) -> Any:
        if get_origin(hint) is Literal:
            return next(choice for choice in get_args(hint) if choice != value)
        if hint is bool:
            return not value
        more = {int: 7, float: 1e-9 / 3, str: "x"}.get(hint, ("more",))
        return value + more

    def build(default: Any) -> Any:
        hints = get_type_hints(type(default))
        new = {}
        for item in dataclasses.fields(default):
            value = getattr(default, item.name)
            new[item.name] = build(value) if dataclasses.is_dataclass(value) else changed(value, hints[item.name])
        return type(default)(**new)

    config = build(cls())
    save_config(config, tmp_path / "c.yaml")
    assert load_config(cls, ["--config", str(tmp_path / "c.yaml")]) == config


def test_saving_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "c.yaml"
    for steps in (1, 2):
        save_config(Config(run=RunConfig(steps=steps)), path)
    assert load_config(Config, ["--config", str(path)]).run.steps == 2 and os.listdir(tmp_path) == ["c.yaml"]


# --- the flags ------------------------------------------------------------------------------------------------------


def test_the_list_of_flags_is_frozen():
    """Flags are what people's scripts are made of. ``LUSPO_UPDATE_FLAGS=1`` writes the list anew."""

    def name(hint: Any) -> str:
        return getattr(hint, "__name__", "") if get_origin(hint) is None else str(hint).replace("typing.", "")

    lines = [f"{cmd} --{flag} {name(hint)}" for cmd, cls in COMMANDS.items() for flag, hint in field_types(cls).items()]
    if os.environ.get("LUSPO_UPDATE_FLAGS"):
        FLAGS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == FLAGS.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete(command, capsys):
    """Every flag, and for every flag a text beyond tyro's own remarks."""
    with pytest.raises(SystemExit) as stop:
        load_config(COMMANDS[command], ["--help"], prog=f"luspo {command}")
    assert not stop.value.code
    shown = capsys.readouterr().out
    plain = " ".join("".join(c for c in shown if c not in "│╭╮╰╯─").split())
    for flag in field_types(COMMANDS[command]):
        assert f"--{flag} " in plain or f"--{flag}," in plain, flag
    for cls in _dataclasses(COMMANDS[command]):
        for text in _docstrings(cls):
            assert " ".join(text.split()) in plain, text
    assert "--config FILE.yaml" in plain


def _dataclasses(cls: type) -> list[type]:
    hints = get_type_hints(cls)
    return [cls, *(h for f in dataclasses.fields(cls) for h in [hints[f.name]] if dataclasses.is_dataclass(h))]


def _docstrings(cls: type) -> list[str]:
    """The texts below the fields, from the source; every field must have one."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    texts = []
    for here, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and not ast.unparse(here.annotation).endswith("Config"):
            assert isinstance(after, ast.Expr), f"{cls.__name__}.{ast.unparse(here.target)} has no docstring"
            texts.append(after.value.value)
    return texts


def test_configuration_and_help_need_no_torch(tmp_path):
    """A child process in which importing torch, numpy, transformers or megatron raises."""
    path = write(tmp_path / "c.yaml", "run: {steps: 3}\n")
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "transformers", "megatron"):
            raise RuntimeError(f"imports {{name}}")
sys.meta_path.insert(0, Block())
from luspo_megatron import config_checks
from luspo_megatron.cli import main
from luspo_megatron.config import Config
from luspo_megatron.config_io import load_config, save_config
config = load_config(Config, ["--config", {path!r}])
assert config_checks.validate(config) and config.run.steps == 3
assert all(main([command, "--help"]) == 0 for command in ("train", "sft", "eval", "export"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--weight_sync.bucket_bytes" in done.stdout


# --- checks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path):
    """A configuration without violations, as flags that a test adds to."""
    model = tmp_path / "model"
    model.mkdir()
    write(model / "config.json", json.dumps(SIZES))
    prompts = write(tmp_path / "p.jsonl", "{}\n")
    return ["--model.hf", str(model), "--data.prompts", prompts]


def violations(flags: list[str], facts: Architecture | None = None) -> dict[str, str]:
    return {item.flag.removeprefix("--"): item.mend for item in validate(load_config(Config, flags), facts)}


def test_a_good_configuration_passes(good):
    assert violations(good) == {}
    layout = ["--parallel.world_size", "4", "--parallel.tp", "2", "--parallel.ep", "2"]
    assert violations(good + layout) == {}
    require([])


def test_the_defaults_lack_only_what_has_no_default():
    assert set(violations([])) == {"model.hf", "data.prompts"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--parallel.tp 2", {"parallel.world_size"}),
        ("--parallel.world_size 6 --parallel.tp 4", {"parallel.world_size"}),
        ("--parallel.world_size 3 --parallel.pp 3", {"parallel.pp"}),
        ("--parallel.world_size 3 --parallel.ep 3", {"parallel.ep"}),
        ("--parallel.world_size 16 --parallel.tp 16", {"parallel.tp"}),
        ("--parallel.world_size 5 --parallel.tp 5 --parallel.etp 1", {"parallel.tp"}),
        ("--parallel.world_size 5 --parallel.etp 5", {"parallel.etp"}),
        ("--parallel.world_size 2 --parallel.cp 2", {"parallel.cp"}),
        ("--parallel.world_size 2 --parallel.tp 2 --parallel.sequence_parallel false", {"parallel.sequence_parallel"}),
        ("--parallel.tp 0 --parallel.ep -1", {"parallel.tp", "parallel.ep"}),
        ("--parallel.etp -1", {"parallel.etp"}),
        ("--algorithm.prompts_per_mini_batch 48", {"algorithm.prompts_per_mini_batch"}),
        ("--algorithm.prompts_per_mini_batch 0", {"algorithm.prompts_per_mini_batch"}),
        ("--rollout.group_size 1", {"rollout.group_size"}),
        ("--rollout.group_size 2 --algorithm.advantage_ddof 2", {"algorithm.advantage_ddof"}),
        ("--rollout.temperature 0", {"rollout.temperature"}),
        ("--rollout.temperature nan", {"rollout.temperature"}),
        ("--rollout.top_p 0", {"rollout.top_p"}),
        ("--rollout.top_p 1.5", {"rollout.top_p"}),
        ("--rollout.engine vlm", {"rollout.engine"}),
        ("--rollout.urls node1:8000", {"rollout.urls"}),
        ("--algorithm.clip_low 0 --algorithm.clip_high inf", {"algorithm.clip_low", "algorithm.clip_high"}),
        ("--algorithm.objective ppo", {"algorithm.objective"}),
        ("--optimizer.lr 0", {"optimizer.lr"}),
        ("--optimizer.lr nan --optimizer.beta2 1", {"optimizer.lr", "optimizer.beta2"}),
        ("--reward.terms math", {"reward.terms"}),
        ("--reward.terms math:x", {"reward.terms"}),
        ("--reward.terms maths:1", {"reward.terms"}),
        ("--reward.terms math:1 math:2", {"reward.terms"}),
        ("--reward.terms=", {"reward.terms"}),
        ("--reward.correct_term format", {"reward.correct_term"}),
        ("--reward.answer_pattern a(", {"reward.answer_pattern"}),
        ("--reward.answer_pattern a", {"reward.answer_pattern"}),
        ("--reward.terms math:1 overlong:1", {"reward.overlong_buffer"}),
        ("--reward.terms math:1 overlong:1 --reward.overlong_buffer 1024", {"reward.overlong_buffer"}),
        ("--weight_sync.bucket_bytes 0", {"weight_sync.bucket_bytes"}),
        ("--batch.max_tokens_per_micro_batch 2047", {"batch.max_tokens_per_micro_batch"}),
        ("--data.prompts no.jsonl", {"data.prompts"}),
        ("--data.prompts train.csv", {"data.prompts"}),
        ("--data.eval_prompts no.parquet", {"data.eval_prompts"}),
        ("--data.task_args [1]", {"data.task_args"}),
        ("--model.hf no/such", {"model.hf"}),
        ("--model.tokenizer no/such", {"model.tokenizer"}),
        ("--algorithm.kl_coef 0.1 --model.ref_hf no/such", {"model.ref_hf"}),
        ("--eval.samples 0 --checkpoint.keep 0 --run.steps 0", {"eval.samples", "checkpoint.keep", "run.steps"}),
    ],
)
def test_each_rule_names_the_flag(good, flags, expected):
    assert set(violations(good + flags.split(" "))) == expected


@pytest.mark.parametrize(
    "flags",
    [
        "--data.prompts reasoning_gym:chain_sum",
        "--data.prompts my.module:source",
        "--reward.terms my.module:score:0.5 format:-1",
        "--rollout.engine my.module:Engine",
        "--algorithm.objective my.module:objective",
        "--reward.terms math:1 overlong:1 --reward.overlong_buffer 128",
        "--batch.max_tokens_per_micro_batch 2048",
        "--parallel.world_size 4 --parallel.tp 4",  # tp is a multiple of the 2 key-value heads
        "--parallel.world_size 8 --parallel.tp 2 --parallel.pp 2 --parallel.ep 2 --parallel.etp 2",
        "--model.ref_hf no/such",  # without a KL term it is not read
    ],
)
def test_allowed(good, flags):
    assert violations(good + flags.split()) == {}


def test_a_dense_model(good):
    experts = ["--parallel.world_size", "2", "--parallel.ep", "2"]
    assert set(violations(good + experts, DENSE)) == {"parallel.ep"}
    experts_tp = [*experts, "--parallel.etp", "2"]
    assert set(violations(good + experts_tp, DENSE)) == {"parallel.ep", "parallel.etp", "parallel.world_size"}
    unsharded = ["--parallel.world_size", "2", "--parallel.tp", "2", "--parallel.no_sequence_parallel"]
    assert violations(good + unsharded, DENSE) == {}


def test_mends_say_what_to_take(good):
    found = violations(good + ["--parallel.world_size", "3", "--parallel.pp", "3"])
    assert found["parallel.pp"] == "does not divide the model's 4 layers; take one of 1, 2, 4"
    found = violations(good + ["--parallel.world_size", "3", "--parallel.tp", "2", "--parallel.etp", "1"])
    assert "tp*cp*pp=2" in found["parallel.world_size"]


def test_all_violations_in_one_message(good):
    config = load_config(Config, [*good, "--optimizer.lr", "0", "--rollout.group_size", "1", "--data.prompts", ""])
    with pytest.raises(UserError) as caught:
        require(validate(config))
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 settings need mending:" and len(lines) == 4
    assert any(line.startswith("  --optimizer.lr 0.0: ") for line in lines)
    assert any(line.startswith("  --data.prompts '': ") for line in lines)


def test_etp_zero():
    parallel = dataclasses.replace(Config().parallel, world_size=4, tp=2)
    assert resolve_layout(parallel, MOE).etp == 2
    assert resolve_layout(dataclasses.replace(parallel, ep=2), MOE).etp == 1
    assert resolve_layout(dataclasses.replace(parallel, ep=2, etp=2), MOE).etp == 2


def test_warnings():
    algorithm = Config().algorithm

    def of(**changes: Any) -> list[str]:
        return warnings(dataclasses.replace(Config(), algorithm=dataclasses.replace(algorithm, **changes)), MOE)

    assert of() == []
    assert "sequence ratio" in of(clip_low=0.2, clip_high=0.2)[0]
    assert "token ratios" in of(objective="grpo")[0]
    assert of(objective="grpo", clip_low=0.2, clip_high=0.2) == []
    assert "max_position_embeddings = 2047" in warnings(Config(), dataclasses.replace(MOE, max_positions=2047))[0]


def test_sft(good):
    assert {item.flag for item in validate_sft(SftConfig())} == {"--model.hf", "--data.path"}
    config = load_config(SftConfig, [*good[:2], "--data.path", good[3], "--data.max_tokens", "99999"])
    assert [item.flag for item in validate_sft(config)] == ["--batch.max_tokens_per_micro_batch"]
    config = load_config(SftConfig, [*good[:2], "--data.path", "no.jsonl", "--batch_size", "0"])
    assert {item.flag for item in validate_sft(config)} == {"--data.path", "--batch_size"}
    assert config.optimizer == OptimizerConfig(lr=2e-5, decay="linear")


def test_eval_and_export(good, tmp_path):
    assert {item.flag for item in validate_eval(EvalCommandConfig())} == {"--model.hf", "--data.eval_prompts"}
    config = load_config(EvalCommandConfig, ["--checkpoint", str(tmp_path), "--data.eval_prompts", good[3]])
    assert validate_eval(config) == []
    config = load_config(EvalCommandConfig, ["--checkpoint", "no/such", "--data.eval_prompts", good[3]])
    assert [item.flag for item in validate_eval(config)] == ["--checkpoint"]
    assert {item.flag for item in validate_export(ExportConfig())} == {"--checkpoint", "--out"}
    taken = ExportConfig(checkpoint=str(tmp_path), out=str(tmp_path))
    assert "not an empty folder" in validate_export(taken)[0].mend
    assert validate_export(ExportConfig(checkpoint=str(tmp_path), out=str(tmp_path / "new"))) == []


# --- the model's sizes ----------------------------------------------------------------------------------------------


def test_the_architecture_of_a_folder(good):
    assert read_architecture(good[1]) == MOE and MOE.is_moe and not DENSE.is_moe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "architecture (none) is not supported; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2"),
        (json.dumps(SIZES | {"architectures": ["GPT2LMHeadModel"]}), "GPT2LMHeadModel is not supported"),
        (json.dumps(SIZES | {"num_hidden_layers": "4", "vocab_size": None}), "num_hidden_layers (found '4'), vocab"),
        (json.dumps(SIZES | {"hidden_act": "gelu"}), "hidden_act=gelu is not supported"),
        (json.dumps(SIZES | {"mlp_only_layers": [0]}), "every layer must be MoE"),
    ],
)
def test_a_bad_config_json(good, text, says):
    write(Path(good[1]) / "config.json", text)
    assert says in violations(good)["model.hf"]


def test_a_folder_without_config_json(good):
    (Path(good[1]) / "config.json").unlink()
    assert violations(good) == {"model.hf": "the folder holds no config.json; name a Hugging Face model folder"}


def test_a_model_without_grouped_heads_and_with_the_newer_name_of_its_experts():
    left_out = ("num_key_value_heads", "head_dim", "num_experts")
    sizes = {key: value for key, value in SIZES.items() if key not in left_out}
    found = parse_architecture(sizes | {"num_local_experts": 4})
    assert (found.num_kv_heads, found.head_dim, found.num_experts) == (8, 8, 4)
    dense = parse_architecture(sizes | {"architectures": ["Qwen3ForCausalLM"]})
    assert not dense.is_moe and (dense.num_experts, dense.top_k, dense.moe_ffn) == (0, 0, 0)


def test_the_rope_base_is_read_where_either_version_of_transformers_puts_it_and_never_assumed():
    without = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    assert parse_architecture(without | {"rope_theta": 5e5}).rope_theta == 5e5
    new = without | {"rope_parameters": {"rope_type": "default", "rope_theta": 4e5}}
    assert parse_architecture(new).rope_theta == 4e5
    for bad, says in ((without, "no rope base"), (without | {"rope_theta": "1e6"}, "is not a positive number"),
                      (SIZES | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type yarn is not supported")):
        with pytest.raises(UserError, match=says):
            parse_architecture(bad)

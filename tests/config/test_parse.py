"""Options from flags, YAML and dicts: one meaning, and an error that helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.config import spelling
from hvdtrain.config.options import list_options
from hvdtrain.config.parse import list_changes, make_parser, parse_argv, parse_object, task_spec
from hvdtrain.config.schema import LEARNING_RATES, Config, OptimizerConfig
from hvdtrain.errors import ConfigError
from hvdtrain.task.base import NAMED, load_task_function
from hvdtrain.task.language_model import language_model
from hvdtrain.yaml_file import flatten, read_yaml, yaml_text


def build(hidden: int = 64, act: str = "relu") -> None:
    """Build.

    Args:
        hidden: units of the middle layer
        act: activation of 100% of them
    """


@pytest.mark.parametrize("function", [*map(load_task_function, NAMED), build])
def test_help_describes_every_option_and_shows_its_default_once(function: Callable[..., Any]) -> None:
    parser = make_parser(function)
    for option in list_options(parser):
        assert option.effect and (option.default is not None or "(default: " in option.effect), option.name
    shown = re.split(r"\n  (?=--)", parser.format_help().partition("--task TASK   ")[2])
    assert len(shown) > 30 and {option.count("(default:") + option.count("(required)") for option in shown} == {1}


def test_flags_yaml_and_dicts_mean_the_same(tmp_path: Path) -> None:
    options = {"train": {"steps": 7, "micro_batch": 2}, "optimizer": {"lr": 0.5}, "hidden": 3, "precision": "bf16"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(options))
    flags = [f"--{key}={value}" for key, value in flatten(options).items()]
    parsed = [parse_argv(flags, build), parse_argv(["--config", str(file)], build), parse_object(options, build)]
    for run in parsed:
        assert (run.config.train.steps, run.config.train.micro_batch, run.config.optimizer.lr) == (7, 2, 0.5)
        assert run.config.precision == "bf16"
        assert run.task_args == {"hidden": 3, "act": "relu"}
    assert parsed[0] == parsed[1] == parsed[2] == parse_object(parsed[0].resolved, build)
    assert parse_argv(["--config", str(file), "--train.steps", "9"], build).config.train.steps == 9, "flags win"
    assert parse_argv(["--optimizer", '{"lr": 0.5}'], build).config.optimizer.lr == 0.5, "help omits it"


@pytest.mark.parametrize(
    "text", ["1e3", "+12e03", "1.5e3", "1_0E-2", "1e400", ".5e1", "0x10", "12:30", "2001-01-01", "null", "yes", "~", ""]
)
@pytest.mark.parametrize("option", ["act", "run_dir"])
def test_text_that_looks_like_a_number_is_read_back_as_text(option: str, text: str, tmp_path: Path) -> None:
    if not text and option == "run_dir":
        return
    run = parse_argv([f"--{option}={text}"], build)
    (tmp_path / "run.yaml").write_text(yaml_text(run.resolved))
    assert parse_argv(["--config", str(tmp_path / "run.yaml")], build).resolved == run.resolved
    assert read_yaml(tmp_path / "run.yaml") == run.resolved


def test_defaults_are_those_of_the_schema() -> None:
    found = parse_argv([], build)
    lr = LEARNING_RATES["adamw"]
    assert found.config == Config(optimizer=OptimizerConfig(lr=lr)) and found.resolved["optimizer"]["lr"] == lr


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_each_optimizer_has_a_learning_rate_of_its_own(name: str) -> None:
    """To give it changes nothing; another one is another run. The help names it."""
    default, given, other = (
        parse_argv([f"--optimizer.name={name}", *lr], build)
        for lr in ([], [f"--optimizer.lr={LEARNING_RATES[name]}"], ["--optimizer.lr=0.7"])
    )
    assert default.config.optimizer.lr == LEARNING_RATES[name] == OptimizerConfig(name=name).peak_lr  # type: ignore[arg-type]
    assert given == default and given.identity() == default.identity() != other.identity()
    assert f"{LEARNING_RATES[name]} for {name}" in " ".join(str(OptimizerConfig.__doc__).split())


@pytest.mark.parametrize("ours", spelling.elsewhere()["names"])
def test_options_of_other_trainers_are_answered_with_ours(ours: str) -> None:
    """A key of a file, too. The option exists, and takes the value."""
    name, _, value = ours.partition(" ")
    if value:
        parse_argv([name, value], language_model)
    other = spelling.elsewhere()["names"][ours][-1].replace("_", "-")
    with pytest.raises(ConfigError) as caught:
        parse_argv([f"--{other}=1"], language_model)
    assert (caught.value.next_step or "").startswith(f"did you mean {ours}?")


def test_options_of_other_trainers_mean_one_of_ours() -> None:
    names = [name for theirs in spelling.elsewhere()["names"].values() for name in theirs]
    assert len(names) == len(set(names))
    for read, wanted in (
        (lambda: parse_object({"lr": 0.1}, build), "did you mean --optimizer.lr?"),
        (lambda: parse_argv(["--lora=8"], build), None),  # a task without this option
    ):
        with pytest.raises(ConfigError, match="no option --l") as caught:
            read()
        assert caught.value.next_step == wanted or (wanted is None and "lora" not in str(caught.value.next_step))


def test_one_name_or_a_list_of_them() -> None:
    assert parse_argv(["--callbacks=a.py:A"], build).config.callbacks == "a.py:A"
    assert parse_argv(["--observe.sinks=[a.py:A, b:B]"], build).config.observe.sinks == ["a.py:A", "b:B"]
    with pytest.raises(ConfigError, match=r"invalid --callbacks"):
        parse_object({"callbacks": 5}, build)


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("observe.timelin=3:4", "observe.timeline"),  # nor the beginning of one
        ("train.stpes=5", "train.steps"),
        ("hiden=5", "hidden"),
        ("train.betas=5", "optimizer.beta1"),
        ("train.engine=5", "parallel.engine"),
        ("optimiser.lr=5", "optimizer.lr"),
    ],
)
def test_a_misspelt_option_names_the_nearest_and_the_file(given: str, near: str, tmp_path: Path) -> None:
    name, _, value = given.partition("=")
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: '{value}'")
    for read in (
        lambda: parse_argv([f"--{given}"], build),
        lambda: parse_object({name: value}, build),
        lambda: parse_argv(["--config", str(file)], build),
    ):
        with pytest.raises(ConfigError, match=f"no option --{re.escape(name)}") as caught:
            read()
        assert caught.value.next_step == f"did you mean --{near}?"
    assert str(file) in caught.value.what


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--train.steps=five", "a whole number"),
        ("--optimizer.lr=fast", "a number or null"),
        ("--precision=fp8", "one of fp32, bf16, fp16, bf16-weights"),
        ("--train.eval_every=x", "a whole number or null"),
        ("--train.micro_batch=auto", "a whole number"),
        ("--train.micro_batch=auto", "hvdtrain fit --largest"),
        ("--train.micro_batch=99", "1 to train.global_batch (16)"),
        ("--train.steps=0", "1 to 2^31 - 1"),
        ("--observe.stall_timeout_s=-1", "0 (never) or more"),
        ("--optimizer.weight_decay=-3", "0 (off) or more"),
        ("--elastic.loss_s=-1", "0 (lose nothing) or more"),
        ("--observe.line_every_s=-1", "0 (each step) or more"),
        ("--parallel.bucket_mib=0 --optimizer.lr=-1 --optimizer.eps=-1", "more than 0"),
        ("--optimizer.lr=.inf --optimizer.lr=1.0e+400 --train.clip=.nan", "a finite number"),
        ("--optimizer.beta1=1.5 --optimizer.beta2=1 --optimizer.momentum=-1", "0 or more, and less than 1"),
        ("--optimizer.min_lr=-5", "0 to 1, a fraction of optimizer.lr"),
        ("--optimizer.decay=2", "0 to 1, a fraction of all steps"),
        ("--run_dir=", "a folder"),
        ("--run_dir=s3://bucket/run", "of this machine"),
        ("--run_dir=file:/tmp/run", "of this machine"),
        ("--observe.timeline=0:5", "FIRST:LAST"),
    ],
)
def test_a_wrong_value_names_the_expected_one(flags: str, expected: str) -> None:
    for flag in flags.split():
        name, _, value = flag.partition("=")
        with pytest.raises(ConfigError, match=name) as caught:
            parse_argv([flag], build)
        assert expected in f"{caught.value.expected} {caught.value.next_step}" and (
            value.strip(".") in str(caught.value) or "e+" in value
        )


@pytest.mark.parametrize(
    ("options", "wrong", "words"),
    [
        (["--train.epochs=2"], "--train.steps=400", "both set the length of training"),
        ([], "--train.steps=99999999999", "--train.steps is "),
        ([], "--train.global_batch=99999999999", "--train.global_batch is "),
        ([], "--loader.workers=99999999999", "--loader.workers is "),
        ([], "--loader.prefetch=99999999999", "--loader.prefetch is "),
    ],
)
def test_options_that_do_not_go_together_and_counts_that_no_machine_holds_are_refused(
    options: list[str], wrong: str, words: str
) -> None:
    parse_argv(options, build)
    with pytest.raises(ConfigError, match=words):
        parse_argv([*options, wrong], build)


def test_null_takes_an_option_back() -> None:
    assert parse_argv(["--train.epochs=2", "--train.steps=400", "--train.epochs=null"], build).config.train.steps == 400


@pytest.mark.parametrize("window", ["off", "auto", "all", "10:20"])
def test_a_window_of_steps_means_the_same_from_a_flag_and_from_quoted_yaml(window: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"observe: {{timeline: '{window}'}}")
    for argv in ([f"--observe.timeline={window}"], ["--config", str(file)]):
        run = parse_argv(argv, build)
        assert run.config.observe.timeline == window
        assert parse_object(run.resolved, build) == run


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("seed: 017", {"seed": 17}),
        ("seed: 0o17", {"seed": 15}),
        ("seed: 0x1F", {"seed": 31}),
        ("train: {clip: 1e1}", {"train.clip": 10.0}),
        ("optimizer: {lr: .5e-3}", {"optimizer.lr": 0.0005}),
        ("observe: {timeline: off}", {"observe.timeline": "off"}),
        ("observe: {timeline: 1:30}", {"observe.timeline": "1:30"}),
        ("run_dir: 2026-11-28", {"run_dir": "2026-11-28"}),
        ("# nothing yet", {"seed": 0}),
        ("", {"seed": 0}),
    ],
)
def test_yaml_is_that_of_version_1_2(content: str, expected: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    run = parse_argv(["--config", str(file)], build)
    assert expected.items() <= flatten(run.resolved).items()
    assert parse_object(run.resolved, build) == run == parse_object(read_yaml(file), build)
    file.write_text(yaml_text(run.resolved))
    assert read_yaml(file) == run.resolved


@pytest.mark.parametrize("text", ["0o17", "1e3", ".5e3", "+.5", "017", "1:30", "off", "true", "2026-11-28", "null"])
def test_text_that_looks_like_something_else_stays_text(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml_text({"run_dir": text}))
    assert read_yaml(file) == yaml.safe_load(file.read_text()) == {"run_dir": text}


@pytest.mark.parametrize("content", ["seed: 1:30", "train: {steps: '1:30'}", "train: {clip: 1:30.5}", "seed: null"])
def test_a_time_or_nothing_is_no_number(content: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    name = "--" + "".join(flatten(read_yaml(file)))
    for parse in (lambda: parse_argv(["--config", str(file)], build), lambda: parse_object(read_yaml(file), build)):
        with pytest.raises(ConfigError, match=f"invalid {name}") as caught:
            parse()
        assert "number" in str(caught.value.expected)
    with pytest.raises(ConfigError, match=r"invalid --train\.micro_batch"):
        parse_argv(["--train.micro-batch=1:30"], build)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("seed: 1\ntrain: {steps: 4}\nseed: 2", "has the key seed twice"),
        ("train:\n  steps: 4\n  steps: 5", "has the key train.steps twice"),
        ("train.steps: 4\ntrain: {steps: 5}", "has the key train.steps twice"),
        ("train: {steps: 4}\ntrain: {clip: 5}", "has the key train twice"),
        ("train: &t {again: *t}", "nested"),
        ("train: " + "[" * 1000 + "]" * 1000, "nested"),
        ("a: &a [1]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 20}]\n" for a, b in ("ab", "bc", "cd", "de")), "nested"),
    ],
)
def test_yaml_with_duplicate_keys_or_endless_nesting_is_refused(content: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    for read in (lambda: task_spec(["--config", str(file)]), lambda: parse_argv([f"--config={file}"], build)):
        with pytest.raises(ConfigError, match=what):
            read()
    file.write_text("train: &t {steps: 4}\nnotes: {<<: *t}")
    assert read_yaml(file)["notes"] == {"steps": 4}, "a mapping may be used twice"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- a\n- b", "not a mapping"),
        ("a: [", "not YAML"),
        (None, "cannot read"),
        ("config: other.yaml", "refers to another config file"),
        ("train: 5", "train is a section"),
        ("train: []", "train is a section"),
    ],
)
def test_files_that_are_no_config(content: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        parse_argv(["--config", str(file)], build)


def test_a_section_of_an_object_is_not_empty() -> None:
    with pytest.raises(ConfigError, match="train is a section"):
        parse_object({"train": None}, build)


def test_a_parameter_named_like_an_option_is_refused() -> None:
    def clash(seed: int = 0) -> None: ...

    with pytest.raises(ConfigError, match="a parameter 'seed', which is an option"):
        parse_argv([], clash)


def test_the_last_task_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("task: a.py:f")
    assert task_spec([]) == "language_model"
    assert task_spec(["--config", str(file)]) == "a.py:f"
    assert task_spec(["--config", str(file), "--task=b.py:g"]) == "b.py:g"
    assert task_spec(["--task", "b.py:g", f"--config={file}"]) == "a.py:f"


@pytest.mark.parametrize(
    "other", ["run_dir=a", "resume=never", "train.stop_at=3", "observe.timeline=2:3", "memory.offload=optimizer"]
)
def test_identity_ignores_only_options_that_may_change(other: str) -> None:
    run = parse_argv(["--train.steps=7"], build)
    assert parse_argv(["--train.steps=7", f"--{other}"], build).identity() == run.identity()
    for changed in ("seed=1", "hidden=65", "train.steps=8", "train.clip=0.5"):
        assert parse_argv(["--train.steps=7", f"--{changed}"], build).identity() != run.identity(), changed


@pytest.mark.parametrize(("section", "name"), [("train", "clip"), ("optimizer", "lr")])
def test_a_run_is_found_by_a_version_with_more_options(section: str, name: str) -> None:
    """Also by one that has a default learning rate."""
    run = parse_argv(["--train.steps=7"], build)
    known = {key: value for key, value in run.resolved[section].items() if key != name}
    assert replace(run, resolved={**run.resolved, section: known}).identity() == run.identity()


def test_changes_are_reported_by_option() -> None:
    old, new = parse_argv(["--hidden=3"], build), parse_argv(["--hidden=4", "--run_dir=x"], build)
    assert list_changes(old.resolved, new.resolved) == ["hidden: 3 -> 4"]

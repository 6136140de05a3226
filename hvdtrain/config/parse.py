"""Parse a command line, YAML files or a dict into a `RunConfig`, by jsonargparse. Does not import torch.

The parameters of the task's function become top-level keys next to those of `Config`. A parameter that is a
dataclass becomes a section.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from keyword import iskeyword
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_loader

from hvdtrain.config.checks import check_values
from hvdtrain.config.options import list_options, plain_parser
from hvdtrain.config.schema import LEARNING_RATES, Config
from hvdtrain.config.spelling import EitherSpelling, declared_spelling, known_elsewhere, option_name
from hvdtrain.errors import ConfigError
from hvdtrain.run_layout import RunLayout
from hvdtrain.yaml_file import Loader, flatten, read_yaml

NOT_IDENTITY = (
    *("run_dir", "resume", "log_level", "train.stop_at", "observe.", "memory.", "parallel.device", "parallel.bind"),
    *("parallel.balance", "checkpoint.to", "checkpoint.lease"),
)
"""Prefixes of options that may change when a run resumes."""

_TYPE_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null",
               "NoneType": "null", "list": "a list such as '[A, B]'"}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """A config and the arguments of its task."""

    config: Config  # the options that every run has
    task_args: Mapping[str, Any]  # arguments for the task's function, by parameter name
    resolved: Mapping[str, Any]  # all options as plain values, as in `config.yaml`

    def identity(self) -> str:
        """Return a hash. Two configs with the same hash may continue the same run.

        Options with their default values do not count, so a version with further options finds the run.
        """
        default = flatten(asdict(Config()))
        default["optimizer.lr"] = LEARNING_RATES[self.config.optimizer.name]
        chosen = {k: v for k, v in flatten(self.resolved).items() if k not in default or v != default[k]}
        flat = {k: v for k, v in chosen.items() if not k.startswith(NOT_IDENTITY)}
        return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]


def task_spec(argv: Sequence[str]) -> str:
    """Return the task that `argv` or a config file names. The last one counts, as for other options."""
    spec = Config.task
    for name, value in _name_value_pairs(argv):
        if name == "--task":
            spec = value
        elif name == "--config":
            spec = str(read_yaml(Path(value)).get("task", spec))
    return spec


def _name_value_pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Read each argument as an option, with the value after "=" or in the next argument."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        yield name, value if equals else following


def _values(option: str, argv: Sequence[str]) -> list[str]:
    return [value for name, value in _name_value_pairs(argv) if declared_spelling(name, (option,)) == option]


def _load(text: str) -> Any:
    """Return what YAML text says; a mapping without keys for none, or nothing but comments."""
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        return {} if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


_MODE = "yaml 1.2"
set_loader(_MODE, _load, (yaml.YAMLError,))


class _Parser(EitherSpelling, ArgumentParser):
    """The parser of training. Its help omits options such as ``--train CONFIG``, which set a whole section."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        return super().add_argument(*map(option_name, args), **kwargs)

    def set_defaults(self, *args: Any, **kwargs: Any) -> None:
        super().set_defaults(*({option_name(name): value for name, value in each.items()} for each in args), **kwargs)

    def format_help(self, formatter: Any = None) -> str:
        return plain_parser(list_options(self)).format_help()


def make_parser(task_function: Callable[..., Any] | None) -> ArgumentParser:
    """Make a parser of the options of `Config` and of the parameters of `task_function`."""
    parser = _Parser(allow_abbrev=False, prog="hvdtrain train", exit_on_error=False, parser_mode=_MODE)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_class_arguments(Config, as_group=False)
    if task_function is not None:
        reserved = {field.name for field in fields(Config)} | {"config"}
        if clash := sorted(reserved & inspect.signature(task_function).parameters.keys()):
            raise ConfigError(
                f"the task function has a parameter {clash[0]!r}, which is an option of every run",
                next_step="rename the parameter (--seed already seeds torch's random state);"
                f" reserved names: {', '.join(sorted(reserved))}",
            )
        try:
            parser.add_function_arguments(task_function, as_group=False, fail_untyped=False)
        except ValueError as error:  # such as a **more that it passes on
            what = "the parameters of the task function cannot be options"
            raise ConfigError(what, found=str(error), next_step="rename or remove them") from None
    return parser


def parse_argv(argv: Sequence[str], task_function: Callable[..., Any] | None) -> RunConfig:
    """Parse a command line.

    Errors: ConfigError if an option is unknown (the message names the nearest), or a value is invalid.
    """
    parser = make_parser(task_function)
    paths = _values("--config", argv)
    files = {path: read_yaml(Path(path)) for path in paths}
    for path, content in files.items():
        if "config" in content:  # the parser would accept it
            raise ConfigError(
                f"the config file {str(Path(path))!r} refers to another config file",
                next_step="pass both on the command line: --config A --config B; options in B override those in A",
            )
    try:
        namespace = parser.parse_args(list(argv))
    except ArgumentError as error:
        raise _convert_error(error, parser, argv) from None
    in_files = [pair for content in files.values() for pair in flatten(content).items()]
    _refuse_times([*in_files, *((name.lstrip("-"), value) for name, value in _name_value_pairs(argv))], namespace)
    if paths and not _values("--run_dir", argv):
        namespace.run_dir = run_folder_of_config(Path(paths[-1]), namespace.resume) or namespace.run_dir
    return _resolve(parser, namespace)


def run_folder_of_config(path: Path, resume: str) -> str | None:
    """Return the run folder that contains a config file, so that training resumes that run.

    None if the file is not in a run folder, or if the option `resume` is never.
    """
    layout = RunLayout(path.parent)
    is_of_run = resume != "never" and path.name == layout.config.name and layout.identity.exists()
    return str(path.parent) if is_of_run else None


def parse_object(options: Mapping[str, Any], task_function: Callable[..., Any] | None) -> RunConfig:
    """Parse a nested dict, as YAML would give it. Errors as in `parse_argv`."""
    parser = make_parser(task_function)
    try:
        namespace = parser.parse_object(dict(options))
    except ArgumentError as error:
        raise _convert_error(error, parser, [f"--{key}" for key in flatten(options)]) from None
    _refuse_times(flatten(options).items(), namespace)
    return _resolve(parser, namespace)


def _refuse_times(given: Iterable[tuple[str, Any]], namespace: Namespace) -> None:
    """Refuse text such as 1:30 for a number: jsonargparse makes 90 of it, as YAML 1.1 does. Errors: ConfigError."""
    for name, value in given:
        key = option_name(name.replace("-", "_"))
        if isinstance(value, str) and ":" in value and isinstance(namespace.get(key), int | float):
            raise ConfigError(f"invalid --{key}", expected="a number", found=value)


def list_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per option in which two resolved configs differ, except those in `NOT_IDENTITY`."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(NOT_IDENTITY)
    ]


def _resolve(parser: ArgumentParser, namespace: Namespace) -> RunConfig:
    for section in parser.groups or ():
        if not isinstance(found := namespace.get(section), Namespace):
            raise ConfigError(
                f"{section} is a section, but has a single value",
                expected=f"options in the section, such as {section}: {{...}}",
                found=str(found),
                next_step=f"omit {section} to use the defaults",
            )
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is not None and namespace.get(action.dest) is None and type(None) not in get_args(hint):
            raise ConfigError(f"invalid --{action.dest}", expected=_in_words(str(hint)), found="null")
    if namespace.optimizer.lr is None:  # so that `config.yaml` names it
        namespace.optimizer.lr = LEARNING_RATES[namespace.optimizer.name]
    resolved = yaml.safe_load(parser.dump(namespace))

    def make_section(section: type, *args: Any, **options: Any) -> Any:
        return section(*args, **{f"{name}_" if iskeyword(name) else name: value for name, value in options.items()})

    values = vars(parser.instantiate(namespace, instantiators=[(make_section, object, True)]))
    names = {field.name for field in fields(Config)}
    config = Config(**{name: values[name] for name in names})
    check_values(flatten(asdict(config)), config)
    task_args = {k: v for k, v in values.items() if k not in names and k != "config"}
    return RunConfig(config, task_args, resolved)


def _convert_error(error: ArgumentError, parser: ArgumentParser, argv: Sequence[str]) -> ConfigError:
    """Convert the parser's error into ours. For an unknown option it names the nearest one."""
    known = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    used = [(argument.partition("=")[0], "") for argument in argv if argument.startswith("--")]
    for path in map(Path, _values("--config", argv)):
        used += [(f"--{key}", f" (in {path})") for key in flatten(read_yaml(path))]
    for option, place in used:
        if declared_spelling(option, known) not in known and f"--{option}" not in known:
            return ConfigError(f"there is no option {option}{place}", next_step=_instead(option, known))
    text = " ".join(str(error.message).split())
    wrong = re.match(r'Parser key "(?P<key>.+?)": Expected an? (?P<type>.+?)\. Got value: (?P<found>.*)', text)
    if wrong:
        expected = _in_words(wrong["type"])
        step = "in a YAML file, put text into quotes: '10', 'true'" if expected == "text" else None
        if wrong["key"] == "train.micro_batch":
            step = "hvdtrain fit --largest --gib GIB, with the options of the run, finds the largest one that fits"
        return ConfigError(f"invalid --{wrong['key']}", expected=expected, found=wrong["found"], next_step=step)
    union = re.match(r'Parser key "([^"]+)": Does not .*? Subtypes: \[(.*?)\] Errors: .* Given value: (.*)', text)
    if union:
        expected = " or ".join(map(_in_words, re.findall(r"(?:typing\.)?Literal\[[^]]*\]|[^, ][^,]*", union[2])))
        return ConfigError(f"invalid --{union[1]}", expected=expected, found=union[3])
    stray = re.match(r"[Uu]nrecognized arguments: -?([\w.]+)", text)
    if stray:
        near = difflib.get_close_matches(f"--{stray[1]}", sorted(known), n=1, cutoff=0.8)
        return ConfigError(
            f"invalid options: {text}",
            expected="names of options begin with --, and values with spaces or * are in quotes",
            next_step=f"did you mean {near[0]}?" if near else None,
        )
    return ConfigError(f"invalid options: {text}", next_step="see all options: hvdtrain train --help")


def _instead(option: str, known: Set[str]) -> str:
    """Return what to use instead of an unknown option."""
    last = option.lstrip("-").rpartition(".")[2]
    same = sorted(each for each in known if each.lstrip("-").rpartition(".")[2] == last.replace("-", "_"))
    ours, remark = known_elsewhere(option) or (not same and known_elsewhere(last)) or ("", "")
    if ours.partition(" ")[0] not in known:
        sections = {each.partition(".")[0] for each in known if "." in each}
        near = difflib.get_close_matches(option, same or sorted(known - sections), n=1, cutoff=0.0 if same else 0.7)
        return f"did you mean {near[0]}?" if near else "see all options: hvdtrain train --help"
    return f"did you mean {ours}?" + (f" ({remark})" if remark else "")


def _in_words(hint: str) -> str:
    """Describe a type that jsonargparse names, such as ``<class 'int'>``, ``Literal['a', 'b']`` or ``int | None``."""
    text = re.sub(r"<class '(\w+)'>|typing\.", r"\1", hint)
    text = re.sub(r"[Ll]ist\[\w+\]", "list", text)
    text = re.sub(r"(?:Optional|Union)\[(.*)\]", r"\1", text)
    text = re.sub(r"Literal\['(\w+)'\]", r"\1", text)
    text = re.sub(r"Literal\[(.*?)\]", lambda found: f"one of {found[1].replace(chr(39), '')}", text)
    return re.sub(r"\b(int|float|bool|str|list|NoneType|None)\b", lambda found: _TYPE_WORDS[found[1]], text)

"""Reads keys and values from YAML files, the environment and the command line, each value with where it came from.

Text keys take what is written literally: `prompt=yes`, `prompt=12` and `prompt=a: b` are prompts. All other values are
YAML, in the reading of YAML 1.2 ("yes" is no boolean, 010 is ten, 1e-6 is a number), because the older rules surprise.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from MaxText import config_types
from MaxText.config_types import ConfigError

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "configs"
WEIGHTS = REPOSITORY / "weights"  # a folder for each model whose weights come with the project
COMMAND_LINE = "command line"
ENVIRONMENT = "environment"
ENVIRONMENT_PREFIX = "M_"


@dataclasses.dataclass(frozen=True)
class Link:
  """One link of the chain: a file, the weights folder, the environment or the command line, and what it sets."""

  name: str
  values: Mapping[str, Any]


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):
  """Plain YAML with the scalars of YAML 1.2."""

  yaml_implicit_resolvers: dict = {}


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.?(?:inf|Inf|INF))$|^\.?(?:nan|NaN|NAN)$"),
    list("-+.0123456789iInN"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(
    loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan")))


def _tuples(value: Any) -> Any:
  """Lists become tuples, so that a config is hashable and cannot be changed in place."""
  return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def variable_name(key: str) -> str:
  """The environment variable that sets a key: M_HEIGHT."""
  return ENVIRONMENT_PREFIX + key.upper()


def shown(path: pathlib.Path) -> str:
  """A path as messages show it: relative to the repository when it lies inside."""
  path = path.resolve()
  return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)


def user_path(path: str) -> pathlib.Path:
  """A path as a user writes it, ~ expanded; where there is no such home, it stays as it is, as in a shell."""
  return pathlib.Path(os.path.expanduser(path))


def nearest(word: str, known: Iterable[str]) -> str:
  """", did you mean a or b?" or nothing."""
  close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
  return f"; did you mean {' or '.join(close)}?" if close else ""


def unknown_key(key: str, source: str) -> str:
  near = nearest(key.lower(), config_types.KEYS)
  return f"{source}: unknown key {key!r}{near or '; --help lists the keys'}"


def parse_value(key: str, text: str, source: str) -> Any:
  """The value of a known key written as `text` on the command line or in the environment.

  Raises:
    ConfigError: the text is not YAML (where the key is no text).
  """
  if config_types.is_text(key) and not (text.startswith("[") and config_types.may_be_list(key)):
    unset = key not in config_types.FREE_TEXT and config_types.may_be_none(key) and text in ("", "null", "~")
    return None if unset else text
  try:
    return _tuples(yaml.load(text, Loader=_Loader))
  except (yaml.YAMLError, ValueError, RecursionError):
    raise ConfigError(f"{key}={text} ({source}): must be {config_types.expected(key)}") from None


def read_yaml(path: pathlib.Path, extra_keys: Sequence[str] = ()) -> dict[str, Any]:
  """Reads a YAML mapping of known keys (and `extra_keys`, as text).

  Raises:
    ConfigError: missing or unreadable file, bad syntax, not a mapping, duplicate or unknown key.
  """
  name = shown(path)
  try:
    text = path.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError:
    raise ConfigError(f"{name}: is not UTF-8 text") from None
  except OSError as error:
    raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
  try:
    return _read_mapping(_Loader(text), name, extra_keys)
  except ConfigError:
    raise
  except yaml.reader.ReaderError:
    raise ConfigError(f"{name}: holds control characters; is it a YAML file?") from None
  except yaml.YAMLError as error:
    raise ConfigError(_syntax_message(name, text, error)) from None
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{name}: holds a value that cannot be read: {error}") from None


def _syntax_message(name: str, text: str, error: yaml.YAMLError) -> str:
  mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
  if mark is None:
    return f"{name}: is not valid YAML: {error}"
  line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
  if "\t" in line[:mark.column + 1]:
    return f"{name} line {mark.line + 1}: YAML does not allow tabs; use spaces"
  return f"{name} line {mark.line + 1}: is not valid YAML: {error.problem or error.context}"


def _read_mapping(loader: _Loader, name: str, extra_keys: Sequence[str]) -> dict[str, Any]:
  root = loader.get_single_node()
  if not isinstance(root, yaml.MappingNode):
    what = "is empty" if root is None else f"is a {'list' if isinstance(root, yaml.SequenceNode) else 'single value'}"
    raise ConfigError(f"{name}: {what}, but a config file is a mapping of lines `key: value`")
  values: dict[str, Any] = {}
  problems = []
  for key_node, value_node in root.value:
    key, where = str(key_node.value), f"{name} line {key_node.start_mark.line + 1}"
    if not isinstance(key_node, yaml.ScalarNode) or (key not in config_types.KEYS and key not in extra_keys):
      problems.append(unknown_key(key, where))
    elif key in values:
      problems.append(f"{where}: key {key!r} stands twice in this file; keep one")
    else:
      text = isinstance(value_node, yaml.ScalarNode) and (key in extra_keys or config_types.is_text(key))
      is_null = value_node.tag == "tag:yaml.org,2002:null"
      values[key] = value_node.value if text and not is_null else _tuples(loader.construct_object(value_node, deep=True))
  raise_all(problems)
  return values


def joined(problems: Sequence[str]) -> str:
  """One message of one or several problems."""
  return problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} problems:", *problems])


def raise_all(problems: Sequence[str]) -> None:
  """Raises one ConfigError that lists the problems, if there are any."""
  if problems:
    raise ConfigError(joined(problems))


def find_config(path: str, beside: pathlib.Path | None = None) -> pathlib.Path:
  """Finds a config file: as given, beside the file that names it, or among the repository's own.

  Raises:
    ConfigError: no such file; says where it was looked for and what there is.
  """
  given = user_path(path)
  places = [given] if beside is None else [beside.parent / given, given]
  if not given.is_absolute():
    places += [REPOSITORY / given, CONFIGS / given]
  for place in places:
    if place.is_file():
      return place
  if given.is_dir():
    raise ConfigError(f"{path}: is a folder, but a YAML config file is needed, such as configs/video.yml")
  there = sorted(p.name for p in CONFIGS.glob("*.yml"))
  raise ConfigError(f"{path}: no such config file; the repository has {', '.join('configs/' + name for name in there)}")


def read_chain(path: str) -> list[Link]:
  """Reads a config file and, before it, the file its `base_config` names, and so on; base.yml always comes first."""
  links: list[Link] = []
  seen: list[pathlib.Path] = []
  file: pathlib.Path | None = find_config(path)
  while file is not None:
    if file.resolve() in seen:
      raise ConfigError(f"{shown(file)}: base_config leads back to a file already read; the chain must end at base.yml")
    seen.append(file.resolve())
    values = read_yaml(file, extra_keys=("base_config",))
    base = values.pop("base_config", None)
    links.insert(0, Link(shown(file), values))
    if base:
      file = find_config(base, beside=file)
    else:
      file = CONFIGS / "base.yml" if seen[-1] != (CONFIGS / "base.yml").resolve() else None
  return links


def read_environment(environ: Mapping[str, str]) -> Link:
  """Values of the variables M_KEY.

  Raises:
    ConfigError: a variable that names no key.
  """
  values: dict[str, Any] = {}
  problems = []
  for name, text in sorted(environ.items()):
    if not name.startswith(ENVIRONMENT_PREFIX):
      continue
    key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
    if key not in config_types.KEYS:
      advice = nearest(name, map(variable_name, config_types.KEYS)) or "; unset it"
      problems.append(f"{ENVIRONMENT} {name}: unknown key {key!r} (variables {ENVIRONMENT_PREFIX}KEY set keys){advice}")
    elif key in values:
      problems.append(f"{ENVIRONMENT} {name}: another variable sets {key} too; keep one")
    else:
      values[key] = parse_value(key, text, f"{ENVIRONMENT} {name}")
  raise_all(problems)
  return Link(ENVIRONMENT, values)


def read_command_line(arguments: Sequence[str]) -> Link:
  """Values of the arguments key=value.

  Raises:
    ConfigError: an argument without '=', an unknown key, a key given twice.
  """
  values: dict[str, Any] = {}
  problems = []
  for argument in arguments:
    key, equals, text = argument.partition("=")
    if not equals:
      problems.append(f"{COMMAND_LINE}: {argument!r} is not key=value" + (
          "; give one YAML file, first" if argument.endswith((".yml", ".yaml")) else
          f"; write {argument}=VALUE" if argument in config_types.KEYS else "; put values with spaces in quotes"))
    elif key.startswith("-") and key.lstrip("-") in config_types.KEYS:
      problems.append(f"{COMMAND_LINE}: keys are written without dashes: {key.lstrip('-')}={text}")
    elif key not in config_types.KEYS:
      problems.append(unknown_key(key, COMMAND_LINE))
    elif key in values:
      problems.append(f"{COMMAND_LINE}: {key} is given twice; keep one")
    else:
      try:
        values[key] = parse_value(key, text, COMMAND_LINE)
      except ConfigError as error:
        problems.append(str(error))
  raise_all(problems)
  return Link(COMMAND_LINE, values)

"""Configuration: base.yml ← given YAML ← configs/models/<model_name>.yml ← weights folder ← environment ← key=value.

`initialize(argv, command)` reads the chain, checks it and returns a frozen `Config` with one attribute a key and, in
`sources`, where each value came from. `run_main` wraps a command's main: exit status 0 on success, 2 with one message on
a bad config or input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pydantic

from MaxText import config_checks, config_reader, config_types
from MaxText.config_help import help_text
from MaxText.config_reader import COMMAND_LINE, ENVIRONMENT, Link, raise_all, variable_name
from MaxText.config_types import ARCHITECTURE, ConfigError, RunError, Settings

if TYPE_CHECKING:
  from MaxText.checkpoints.folder import Folder
  from MaxText.models.umt5 import Umt5Config
  from MaxText.models.vae import VaeConfig
  from MaxText.models.wan import WanConfig

__all__ = ["Config", "ConfigError", "initialize", "input_errors", "run_main"]


class Config(Settings):
  """The settings of a run, frozen, with what follows from them and where each value came from."""

  _sources: Mapping[str, str] = pydantic.PrivateAttr(default_factory=dict)
  _folder: Any = pydantic.PrivateAttr(default=None)

  @property
  def sources(self) -> Mapping[str, str]:
    """Key → the file, weights folder, variable or command line that its value came from."""
    return self._sources

  @property
  def folder(self) -> Folder | None:
    """The opened weights folder, or None for random weights."""
    return self._folder

  def set_by_user(self, key: str) -> bool:
    """Whether the command line or the environment set the key."""
    return self._sources.get(key, "").startswith((COMMAND_LINE, ENVIRONMENT))

  @property
  def vae_strides(self) -> tuple[int, int]:
    """Frames and pixels of the video for each latent one: (4, 8) for Wan 2.1."""
    return 2 ** sum(self.vae_temporal_downsample), 2 ** (len(self.vae_dim_mult) - 1)

  @property
  def latent_grid(self) -> tuple[int, int, int]:
    """(frames, rows, columns) of the latents."""
    frame_step, pixel_step = self.vae_strides
    return 1 + (self.num_frames - 1) // frame_step, self.height // pixel_step, self.width // pixel_step

  @property
  def topology_chip(self) -> str:
    """Chip of compile_topology, such as 'v6e'; empty where the devices here are meant."""
    return "" if self.compile_topology is None else self.compile_topology.split(":")[0]

  @property
  def token_grid(self) -> tuple[int, int, int]:
    """(F, H, W) of the transformer's tokens, frame-major."""
    frames, rows, columns = (n // p for n, p in zip(self.latent_grid, self.patch_size, strict=True))
    return frames, rows, columns

  @property
  def num_tokens(self) -> int:
    """S = F·H·W."""
    frames, rows, columns = self.token_grid
    return frames * rows * columns

  @property
  def text_length(self) -> int:
    """T, tokens of a prompt that the transformer reads, padding included."""
    from MaxText.models.tokenizer import MAX_LENGTH, text_length

    return MAX_LENGTH if self._folder is None else text_length(os.path.dirname(self._folder.tokenizer_path))

  @property
  def guidance_scales(self) -> tuple[float, ...]:
    """Guidance of each expert, high noise first."""
    scale = self.guidance_scale
    return scale if isinstance(scale, tuple) else (scale,) * self.num_experts

  @property
  def loras(self) -> tuple[tuple[str, float, str], ...]:
    """(path, weight, expert) of each LoRA; the expert is 'both', 'high_noise' or 'low_noise'."""
    paths = (self.lora_path,) if isinstance(self.lora_path, str) else self.lora_path or ()
    weights = self.lora_weight if isinstance(self.lora_weight, tuple) else (self.lora_weight,) * len(paths)
    experts = self.lora_expert if isinstance(self.lora_expert, tuple) else (self.lora_expert,) * len(paths)
    return tuple(zip(paths, weights, experts, strict=True))

  def prompts(self) -> tuple[str, ...]:
    """The prompts to run, from `prompt` or `prompts_file`."""
    if self.prompts_file is not None:
      with input_errors():
        return config_checks.read_prompts_file(self.prompts_file)
    return () if self.prompt is None else (self.prompt,)

  def unknown_words(self) -> list[str]:
    """Words of the prompts that the weights never met, where their folder lists those that they did (words.txt)."""
    file = os.path.join(self._folder.path, "words.txt") if self._folder is not None else ""
    if not os.path.isfile(file):
      return []
    with open(file, encoding="utf-8") as f:
      known = set(f.read().split())
    words = re.findall(r"\w+", " ".join(self.prompts()).lower())
    return [word for word in dict.fromkeys(words) if word not in known]

  def wan(self) -> WanConfig:
    """Architecture of the video transformer."""
    from MaxText.models.wan import WanConfig

    base = self._folder.wan if self._folder is not None else WanConfig()
    fields = {field: getattr(self, key) for key, field in _WAN_FIELDS.items()}
    return dataclasses.replace(base, **fields, rope_stretch=self.rope_stretch)

  def vae(self) -> VaeConfig:
    """Architecture of the VAE; the latents' mean and deviation come from the weights folder, or are Wan 2.1's."""
    from MaxText.models.vae import VaeConfig

    base = self._folder.vae if self._folder is not None else VaeConfig()
    values = {field: getattr(self, key) for key, field in _VAE_FIELDS.items()}
    if len(base.latents_mean) != self.vae_z_dim:  # random weights of another size: nothing to normalise
      values |= {"latents_mean": (0.0,) * self.vae_z_dim, "latents_std": (1.0,) * self.vae_z_dim}
    return dataclasses.replace(base, **values)

  def umt5(self) -> Umt5Config:
    """Architecture of the text encoder."""
    from MaxText.models.umt5 import Umt5Config

    base = self._folder.umt5 if self._folder is not None else Umt5Config()
    return dataclasses.replace(base, **{field: getattr(self, key) for key, field in _UMT5_FIELDS.items()})

  def as_record(self) -> dict[str, dict[str, Any]]:
    """Key → {"value", "source"}, ready for JSON."""
    values = self.model_dump(mode="json")
    return {key: {"value": values[key], "source": self._sources[key]} for key in values}

  def print_config(self, file: Any = None) -> None:
    """Prints each source and the keys it set; of base.yml, which sets the rest, only how many.

    All values are in the run's folder: run.json of decode, config.json of train.
    """
    set_by: dict[str, list[str]] = {}
    for key in config_types.KEYS:
      set_by.setdefault(self._sources[key], []).append(f"{key}={config_types.as_yaml(getattr(self, key))}")
    rest = set_by.pop(_BASE, [])
    print("configuration", file=file)
    for source, values in set_by.items():
      text = f"{source}: {', '.join(values)}"
      wrapped = textwrap.wrap(text, 120, initial_indent="  ", subsequent_indent="    ",
                              break_long_words=False, break_on_hyphens=False)
      print("\n".join(wrapped), file=file)
    print(f"  {_BASE}: the other {len(rest)} keys (--help explains them)", file=file)


_BASE = "configs/base.yml"
TAKES_WEIGHTS = frozenset({"decode", "train", "encode_dataset", "convert_checkpoint"})  # commands that read them
# key → field of the model's dataclass
_VAE_FIELDS = {key: key.removeprefix("vae_") for key in ARCHITECTURE if key.startswith("vae_")}
_UMT5_FIELDS = {key: key.removeprefix("text_") for key in ARCHITECTURE if key.startswith("text_") and key != "text_dim"}
_WAN_FIELDS = {key: key.removeprefix("norm_") for key in ARCHITECTURE - {"num_experts", *_VAE_FIELDS, *_UMT5_FIELDS}}


def initialize(argv: Sequence[str], command: str = "decode", environ: Mapping[str, str] | None = None) -> Config:
  """Reads and checks the configuration of a command.

  Args:
    argv: the YAML file, then key=value overrides, as on the command line without the program's name.
    command: name of the command, for the help and for the rules that only it has.
    environ: environment variables; default os.environ.
  Returns:
    The frozen config.
  Raises:
    ConfigError: anything wrong that can be known without reading weights; says what to do.
    SystemExit: after --help.
  """
  if {"--help", "-h", "help"} & set(argv):
    file, values = next((a for a in argv if a.endswith((".yml", ".yaml")) and "=" not in a), ""), {}
    if file:
      with contextlib.suppress(ConfigError):  # whoever asks for help is not helped by an error
        values = _resolve(config_reader.read_chain(file), [], command)[0]
    print(help_text(command, values, file if values else ""))
    raise SystemExit(0)
  if not argv or "=" in argv[0] or argv[0].startswith("-"):
    got = f", not {argv[0]!r}" if argv else ""
    raise ConfigError(f"the first argument must be a config file, such as configs/video.yml{got}; --help explains")
  files = config_reader.read_chain(argv[0])
  environment = config_reader.read_environment(os.environ if environ is None else environ)
  arguments = config_reader.read_command_line(argv[1:])
  raise_all([f"{key}: set by the {ENVIRONMENT} ({variable_name(key)}={environment.values[key]}) and by the "
             f"{COMMAND_LINE} ({key}={value}); keep one" for key, value in arguments.values.items()
             if key in environment.values])
  values, sources, folder = _resolve(files, [environment, arguments], command)
  _derive(values, sources, command)
  config = _typed(values, sources)
  config._sources = MappingProxyType(sources)
  config._folder = folder
  user_keys = frozenset(environment.values) | frozenset(arguments.values)
  raise_all(config_checks.check(config, command, user_keys))
  if folder is not None and config.override_model_config:
    _check_fits(config, folder)
  return config


def _lookup(links: Sequence[Link], key: str, default: Any = None) -> Any:
  return next((link.values[key] for link in reversed(links) if key in link.values), default)


def _model_link(name: str) -> Link:
  """The model file of this name.

  Raises:
    ConfigError: there is none; lists those that there are.
  """
  path = config_reader.CONFIGS / "models" / f"{name}.yml"
  known = _model_names()
  if name not in known:
    raise ConfigError(f"model_name={name}: there is no {config_reader.shown(path)}{config_reader.nearest(name, known)}"
                      f" (models: {', '.join(known)})")
  link = Link(config_reader.shown(path), config_reader.read_yaml(path))
  outside = sorted(key for key in link.values if config_types.group_of(key) in ("run", "mesh"))
  if outside:
    raise ConfigError(f"{link.name}: a model file may not set {', '.join(outside)}")
  return link


def _model_names() -> list[str]:
  return sorted(path.stem for path in (config_reader.CONFIGS / "models").glob("*.yml"))


def _folder_link(path: str, folder: Folder) -> Link:
  """What a weights folder says about the model."""
  values = {key: getattr(folder.wan, field) for key, field in _WAN_FIELDS.items()}
  values |= {key: getattr(folder.vae, field) for key, field in _VAE_FIELDS.items()}
  values |= {key: getattr(folder.umt5, field) for key, field in _UMT5_FIELDS.items()}
  values |= {"num_experts": folder.num_experts, "boundary_ratio": folder.boundary_ratio, "flow_shift": folder.flow_shift}
  return Link(f"weights folder {path}", {key: value for key, value in values.items() if value is not None})


def _matching_model(base: Link, folder: Link) -> Link | None:
  """The model file whose architecture is the folder's, if there is one: its sampling values fit these weights."""
  for name in _model_names():
    model = _model_link(name)
    if all(_lookup([base, model], key) == value for key, value in folder.values.items() if key in ARCHITECTURE):
      return Link(model.name, model.values | {"model_name": name})
  return None


def _shipped_weights(files: Sequence[Link], user: Sequence[Link], command: str) -> Link | None:
  """The weights that the project ships for the model, where a command takes weights and none are named.

  What decode would show with them, if it is not told, is in the folder's prompt.txt.
  """
  links, name = [*files, *user], _lookup([*files, *user], "model_name")
  asked = any(_lookup(links, key) for key in ("load_parameters_path", "load_full_state_path", "init_random_weights"))
  folder = config_reader.WEIGHTS / str(name)
  if asked or command not in TAKES_WEIGHTS or name not in _model_names() or not folder.is_dir():
    return None
  values, prompt = {"load_parameters_path": str(folder)}, folder / "prompt.txt"
  told = any(_lookup(links, key) is not None for key in ("prompt", "prompts_file", "latents_path"))
  if command == "decode" and not told and prompt.is_file():
    values["prompt"] = prompt.read_text(encoding="utf-8").strip()
  return Link("shipped with the project", values)


def _resolve(files: list[Link], user: list[Link], command: str) -> tuple[dict[str, Any], dict[str, str], Folder | None]:
  """Joins the chain; returns values, their sources and the opened weights folder."""
  base, *given = files
  shipped = _shipped_weights(files, user, command)
  given += [shipped] if shipped else []
  path = _lookup([base, *given, *user], "load_parameters_path")
  name = _lookup(files + user, "model_name")
  folder, chain = None, []
  if isinstance(path, str):
    from MaxText.checkpoints.folder import open_folder

    with input_errors(f"load_parameters_path={path}"):
      folder = open_folder(str(config_reader.user_path(path)))
    named = _lookup(user, "model_name")
    link = _folder_link(path, folder)
    model = _model_link(named) if named else _matching_model(base, link)
    chain = [*([model] if model else []), link]
    if not model:
      chain.append(Link(link.name, {"model_name": ""}))
  elif name:
    chain = [_model_link(name)]
  override = _lookup(files + user, "override_model_config") is True
  if chain:
    authority = [link for link in chain if folder is None or link.name.startswith("weights folder")]
    _check_contradictions([base, *authority], [*given, *(chain if folder else []), *user], override)
  forced = [Link(link.name, {k: v for k, v in link.values.items() if k in ARCHITECTURE}) for link in given if override]
  values: dict[str, Any] = {}
  sources: dict[str, str] = {}
  for link in [base, *given, *chain, *forced, *user]:
    for key, value in link.values.items():
      over = f" (over {sources[key]}: {config_types.as_yaml(values[key])})" if (
          link in chain and sources.get(key, base.name) != base.name and values[key] != value) else ""
      variable = f" {variable_name(key)}" if link.name == ENVIRONMENT else ""
      values[key], sources[key] = value, f"{link.name}{variable}{over}"
  return values, sources, folder


def _check_contradictions(authority: Sequence[Link], others: Sequence[Link], override: bool) -> None:
  """Refuses architecture keys that differ from what the model file or the weights folder says.

  Raises:
    ConfigError: names both values and both places.
  """
  if override:
    return
  problems = []
  for key in (k for k in config_types.KEYS if k in ARCHITECTURE):
    truth, where = next((link.values[key], link.name) for link in reversed(authority) if key in link.values)
    for link in others:
      if key in link.values and link.values[key] != truth:
        problems.append(f"{key}={config_types.as_yaml(link.values[key])} ({link.name}) contradicts "
                        f"{key}={config_types.as_yaml(truth)} ({where}); leave it out, or set override_model_config=true")
  raise_all(problems)


def _check_fits(config: Config, folder: Folder) -> None:
  """Refuses overridden architecture keys under which a weight of the folder would need another shape.

  Raises:
    ConfigError: names the keys, their values and the folder's.
  """
  from MaxText.checkpoints import names

  path = config.load_parameters_path
  said = _folder_link(path, folder).values
  parts = (("transformer", _WAN_FIELDS, config.wan(), folder.wan), ("vae", _VAE_FIELDS, config.vae(), folder.vae),
           ("text_encoder", _UMT5_FIELDS, config.umt5(), folder.umt5))
  problems = []
  for component, fields, wanted, stored in parts:
    changed = [key for key in fields if getattr(config, key) != said[key]]
    if changed and _shapes(names, component, wanted) != _shapes(names, component, stored):
      problems += [f"{key}={config_types.as_yaml(getattr(config, key))}: the weights in {path} fit only "
                   f"{key}={config_types.as_yaml(said[key])}; leave it out" for key in changed]
  if config.num_experts > folder.num_experts:
    problems.append(f"num_experts={config.num_experts}: {path} holds only {folder.num_experts}; leave it out")
  raise_all(problems)


def _shapes(names: Any, component: str, architecture: Any) -> dict[str, tuple[int, ...]]:
  return names.leaf_shapes(names.tensors(component, architecture))


def _derive(values: dict[str, Any], sources: dict[str, str], command: str) -> None:
  """Fills what follows from other keys: the size from saved latents, the one inferred mesh size, a fresh run name."""
  _take_latents_size(values, sources)
  for link in ("ici", "dcn"):
    keys = [key for key in config_types.KEYS if key.startswith(f"{link}_") and values[key] == -1]
    for key in keys:
      chosen = [other for other in keys if sources[other] != _BASE]
      if chosen and sources[key] == _BASE:
        values[key], sources[key] = 1, f"gives way to {chosen[0]}=-1"
  if values["run_name"] == "" and values["resume"] is False:
    model = values["model_name"] or pathlib.Path(str(values["load_parameters_path"] or "model")).resolve().name
    what = "benchmark" if command == "benchmark_attention" else values["attention"]  # a benchmark runs every kind
    values["run_name"] = _fresh_name(str(values["base_output_directory"]), f"{model}_{what}"[:100])
    sources["run_name"] = f"made from model, {'command' if what == 'benchmark' else 'attention'} and time"


def _fresh_name(directory: str, stem: str) -> str:
  name = f"{stem}_{time.strftime('%Y%m%d-%H%M%S')}"
  taken, number = config_reader.user_path(directory), 1
  candidate = name
  while os.path.lexists(taken / candidate):
    number += 1
    candidate = f"{name}_{number}"
  return candidate


def _take_latents_size(values: dict[str, Any], sources: dict[str, str]) -> None:
  """Saved latents say how large their video is, unless the user does."""
  path = values["latents_path"]
  shape = config_checks.read_latents_shape(path) if isinstance(path, str) else None
  stages, halvings = values["vae_dim_mult"], values["vae_temporal_downsample"]
  if shape is None or not isinstance(stages, tuple) or not isinstance(halvings, tuple):
    return
  pixel_step, frame_step = 2 ** (len(stages) - 1), 2 ** halvings.count(True)
  size = {"num_frames": 1 + (shape[1] - 1) * frame_step, "height": shape[2] * pixel_step, "width": shape[3] * pixel_step}
  for key, value in size.items():
    if not sources[key].startswith((COMMAND_LINE, ENVIRONMENT)):
      values[key], sources[key] = value, f"latents {path}"


def _typed(values: Mapping[str, Any], sources: Mapping[str, str]) -> Config:
  """Checks every value's type and range.

  Raises:
    ConfigError: lists every wrong value, where it came from and what is allowed.
  """
  try:
    return Config(**values)
  except pydantic.ValidationError as error:
    wrong = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
  problems = []
  for key in wrong:
    names = [choice for choice in config_types.choices(key) if isinstance(choice, str)]
    problems.append(f"{key}={config_types.as_yaml(values[key])} ({sources[key]}): must be {config_types.expected(key)}"
                    f"{config_reader.nearest(str(values[key]).lower(), names)}")
  raise ConfigError(config_reader.joined(problems))


@contextlib.contextmanager
def input_errors(about: str = "") -> Iterator[None]:
  """Turns a ValueError or OSError caused by the user's input into a ConfigError; `about` is its key=value."""
  try:
    yield
  except ConfigError:
    raise
  except (ValueError, OSError) as error:
    text = str(error)
    raise ConfigError(text if not about or about.partition("=")[0] in text else f"{about}: {text}") from error


def run_main(main: Callable[[list[str]], None]) -> Callable[..., int]:
  """Decorates a command's main(argv): it returns 0 on success, and 2 with one message on stderr for a ConfigError.

  Other exceptions pass through, so that Python prints their traceback and exits with 1. Ctrl-C gives 1 and no traceback.
  """

  @functools.wraps(main)
  def command(argv: Sequence[str] | None = None) -> int:
    try:
      main(list(sys.argv[1:] if argv is None else argv))
      sys.stdout.flush()
    except BrokenPipeError:  # as in `--help | head`: the reader has seen enough
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
      return 1
    except ConfigError as error:
      print(f"error: {error}", file=sys.stderr)
      return 2
    except RunError as error:
      print(f"error: {error}", file=sys.stderr)
      return 1
    except KeyboardInterrupt:
      print("interrupted", file=sys.stderr)
      return 1
    return 0

  return command

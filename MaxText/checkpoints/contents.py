"""What an opened weights folder is, and the checks that all formats share. Nothing here imports JAX or reads a weight."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from MaxText.checkpoints import names
from MaxText.checkpoints.tensor_files import StoredTensor

if TYPE_CHECKING:
  from MaxText.models.umt5 import Umt5Config
  from MaxText.models.vae import VaeConfig
  from MaxText.models.wan import WanConfig

SUPPORTED = "this framework runs the text-to-video (T2V) models of Wan 2.1 and 2.2: give the folder of one"

TOKENIZER = "the sentencepiece vocabulary of the text encoder"

_MAX_LISTED = 20
MOST_LAYERS = 1000  # a config that claims more is damaged; the largest published model has 40


@dataclasses.dataclass(frozen=True)
class Folder:
  """A checked folder of Wan weights.

  Attributes:
    path: the folder.
    format: 'diffusers', 'original', 'orbax' or 'training' (one checkpoint of a training run).
    wan, vae, umt5: architectures. Both experts share `wan`.
    num_experts: 1, or 2 (Wan 2.2).
    boundary_ratio: timestep / 1000 at which the low-noise expert takes over; None for one expert.
    flow_shift: shift of the sigmas that the folder asks for, None if it says nothing.
    tokenizer_path: the sentencepiece model.
    stored: component -> table row -> where its numbers lie; empty for Orbax, which keeps its own index.
    configs: the folder's own JSON files for export: 'model_index', 'transformer', 'vae', 'text_encoder', 'scheduler'.
    base, trained: of a training checkpoint: the folder that training started from, and the components that were trained;
      the others are read from `base`.
  """

  path: str
  format: str
  wan: WanConfig
  vae: VaeConfig
  umt5: Umt5Config
  num_experts: int
  boundary_ratio: float | None
  flow_shift: float | None
  tokenizer_path: str
  stored: Mapping[str, Mapping[names.Tensor, StoredTensor]] = dataclasses.field(repr=False)
  configs: Mapping[str, Mapping[str, Any]] = dataclasses.field(repr=False)
  base: Folder | None = None
  trained: tuple[str, ...] = ()

  @property
  def components(self) -> tuple[str, ...]:
    """The parts that have weights, in the order decode uses them."""
    return ("text_encoder", *names.COMPONENTS[: self.num_experts], "vae")

  def architecture(self, component: str) -> WanConfig | VaeConfig | Umt5Config:
    return {"vae": self.vae, "text_encoder": self.umt5}.get(component, self.wan)


def read_json(path: str) -> dict[str, Any]:
  """The object in a JSON file; ValueError names the file when it is absent or broken."""
  try:
    with open(path, encoding="utf-8") as f:
      value = json.load(f)
  except FileNotFoundError:
    raise ValueError(f"{path} is missing") from None
  except (OSError, ValueError, RecursionError) as e:  # bad JSON and bad UTF-8 are ValueErrors
    raise ValueError(f"{path} cannot be read as JSON ({e}); download it again") from e
  if not isinstance(value, dict):
    raise ValueError(f"{path} should hold a JSON object, it holds a {type(value).__name__}")
  return value


def required_file(path: str, why: str) -> str:
  if not os.path.isfile(path):
    raise ValueError(f"{path} is missing ({why})")
  return path


class Fields:
  """Typed access to a JSON config; every complaint names file, key and value."""

  def __init__(self, values: Mapping[str, Any], path: str):
    self.values, self.path = values, path

  def _get(self, key: str, kind: str, ok) -> Any:
    if key not in self.values:
      raise ValueError(f"{self.path} has no {key!r}; it should be {kind}")
    value = self.values[key]
    if not ok(value):
      raise ValueError(f"{self.path}: {key} = {value!r} should be {kind}")
    return value

  def count(self, key: str) -> int:
    return self._get(key, "a positive whole number", _is_count)

  def layers(self, key: str) -> int:
    """How often a part is repeated, which names its tensors one by one."""
    return self._get(key, f"a whole number from 1 to {MOST_LAYERS:,}", lambda v: _is_count(v) and v <= MOST_LAYERS)

  def number(self, key: str) -> float:
    return float(self._get(key, "a positive number", lambda v: _is_number(v) and v > 0))

  def counts(self, key: str) -> tuple[int, ...]:
    return tuple(self._get(key, "a list of positive whole numbers", functools.partial(_is_list_of, _is_count)))

  def numbers(self, key: str) -> tuple[float, ...]:
    return tuple(map(float, self._get(key, "a list of numbers", functools.partial(_is_list_of, _is_number))))

  def flags(self, key: str) -> tuple[bool, ...]:
    return tuple(self._get(key, "a list of true/false", functools.partial(_is_list_of, lambda v: isinstance(v, bool))))

  def expect(self, key: str, allowed: tuple, meaning: str):
    """Refuses a key whose value, if given, is not one of those this implementation computes."""
    value = self.values.get(key, allowed[0])
    if value not in allowed:
      raise ValueError(f"{self.path}: {key} = {value!r} means {meaning}; only {allowed[0]!r} is supported")


def build(kind, path: str, **values):
  """An architecture dataclass; its own complaints get the name of the file that the values came from."""
  try:
    return kind(**values)
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from e


def _is_list_of(ok, value) -> bool:
  return isinstance(value, list) and bool(value) and all(map(ok, value))


def _is_number(value) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value > 0


def match(
  rows: Iterable[names.Tensor], found: Mapping[str, StoredTensor], where: str, *, original: bool = False
) -> dict[names.Tensor, StoredTensor]:
  """Pairs the rows of the table with the tensors of a folder.

  Args:
    rows: the table of the component.
    found: the tensors of its files by name.
    where: the folder, for messages.
    original: look for the original release's names rather than the Diffusers names.

  Raises:
    ValueError: lists every missing, unexpected and wrongly shaped name.
  """
  matched, missing, misshapen, known = {}, [], [], set()
  for row in rows:
    candidates = (row.original,) if original else (row.name, *row.aliases)
    known.update(candidates)
    tensor = next((found[name] for name in candidates if name in found), None)
    if tensor is None:
      missing.append(candidates[0])
    elif tensor.shape != row.shape:
      misshapen.append(f"{tensor.name}: {list(tensor.shape)}, the folder's config asks for {list(row.shape)}")
    else:
      matched[row] = tensor
  problems = (("missing", missing), ("unexpected", sorted(found.keys() - known)), ("wrongly shaped", misshapen))
  if any(items for _, items in problems):
    raise ValueError(f"the weights in {where} do not fit its config:\n" + "\n".join(
      listed(f"{len(items)} {kind}", items) for kind, items in problems if items))
  return matched


def listed(title: str, items: list[str]) -> str:
  """`title:` and the items one a line, cut after a screenful."""
  lines = [f"  {item}" for item in items[:_MAX_LISTED]]
  if len(items) > _MAX_LISTED:
    lines.append(f"  … and {len(items) - _MAX_LISTED} more")
  return "\n".join([f"{title}:", *lines])


def check_together(wan: WanConfig, vae: VaeConfig, umt5: Umt5Config, path: str):
  """Raises ValueError if the parts of a folder cannot work together, or are another kind of Wan model."""
  if wan.in_channels == 36:
    raise ValueError(f"{path} is an image-to-video model (in_channels = 36); {SUPPORTED}")
  if wan.in_channels == 48:
    raise ValueError(f"{path} is the TI2V-5B model (in_channels = 48); {SUPPORTED}")
  if wan.in_channels != wan.out_channels:
    raise ValueError(f"{path}: the transformer reads {wan.in_channels} channels, writes {wan.out_channels}; {SUPPORTED}")
  if vae.z_dim != wan.in_channels:
    raise ValueError(f"{path}: the VAE has {vae.z_dim} latent channels (z_dim), the transformer {wan.in_channels} "
                     "(in_channels); they belong to different models")
  if wan.text_dim != umt5.d_model:
    raise ValueError(f"{path}: the transformer expects text of width {wan.text_dim} (text_dim), the text encoder gives "
                     f"{umt5.d_model} (d_model); they belong to different models")

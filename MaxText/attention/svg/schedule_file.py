"""Reading a sparsity schedule: a preset of configs/svg/ or a YAML file of the same form."""

import dataclasses
import pathlib
from typing import Any

import yaml

from MaxText.config_reader import user_path

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "configs" / "svg"
INTERVAL_KEYS = ("steps", "layers", "density", "density_per_expert")
FORM = "num_steps, num_layers, and intervals: a list of {steps: [start, end], layers: [start, end], density: 0.3}"


@dataclasses.dataclass(frozen=True)
class Interval:
  """Steps [start, end) in which layers [start, end) are sparse, with one density, or one an expert, or both forms."""

  steps: tuple[int, int]
  layers: tuple[int, int]
  density: float | None
  density_per_expert: tuple[float, ...] | None

  def density_of(self, expert: int, num_experts: int) -> float | None:
    if self.density_per_expert is not None and len(self.density_per_expert) == num_experts:
      return self.density_per_expert[expert]
    return self.density


def read_schedule(name: str) -> tuple[int, int, list[Interval]]:
  """(reference number of steps, of layers, intervals) of a preset or a YAML file.

  Raises:
    ValueError: no such file, or not of the form that configs/svg/ shows.
  """
  preset = FOLDER / f"{name}.yml"
  path = preset if preset.is_file() else user_path(name)
  if not path.is_file():
    known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yml")))
    raise ValueError(f"svg_schedule={name}: no such preset or file. Presets are {known}; a path leads to a YAML file.")
  try:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
  except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or no such date
    raise ValueError(f"svg_schedule={name}: is not YAML ({str(error).splitlines()[0]}). "
                     "See configs/svg/moderate.yml.") from error

  def refuse(problem: str):
    raise ValueError(f"svg_schedule={name}: {problem}. The file holds {FORM}; see configs/svg/moderate.yml.")

  if not isinstance(content, dict):
    refuse(f"is no mapping but {type(content).__name__}")
  if unknown := sorted(str(key) for key in set(content) - {"num_steps", "num_layers", "intervals"}):
    refuse(f"has the unknown key {unknown[0]}")
  for key in ("num_steps", "num_layers"):
    if not _is_count(content.get(key)) or content[key] < 1:
      refuse(f"{key}={content.get(key)} must be a whole number of at least 1")
  if not isinstance(content.get("intervals"), list) or not content["intervals"]:
    refuse(f"intervals={content.get('intervals')} must be a list with at least one entry")
  intervals = [_interval(entry, content, refuse) for entry in content["intervals"]]
  ordered = sorted(intervals, key=lambda i: i.steps)
  for before, after in zip(ordered, ordered[1:], strict=False):
    if after.steps[0] < before.steps[1]:
      refuse(f"the intervals steps={list(before.steps)} and steps={list(after.steps)} overlap, but a step has one "
             "density: let one end where the next starts")
  return content["num_steps"], content["num_layers"], ordered


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_density(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _interval(entry: Any, content: dict, refuse) -> Interval:
  if not isinstance(entry, dict):
    refuse(f"the interval {entry!r} is no mapping")
  if unknown := sorted(str(key) for key in set(entry) - set(INTERVAL_KEYS)):
    refuse(f"an interval has the unknown key {unknown[0]} (allowed: {', '.join(INTERVAL_KEYS)})")
  for key, total in (("steps", "num_steps"), ("layers", "num_layers")):
    bounds = entry.get(key)
    if not (isinstance(bounds, list) and len(bounds) == 2 and all(map(_is_count, bounds))
            and bounds[0] < bounds[1] <= content[total]):
      refuse(f"{key}={bounds} must be [start, end] with 0 <= start < end <= {total}={content[total]}")
  density, per_expert = entry.get("density"), entry.get("density_per_expert")
  if density is None and per_expert is None:
    refuse(f"the interval steps={entry['steps']} needs density or density_per_expert")
  if density is not None and not _is_density(density):
    refuse(f"density={density} must be a number in (0, 1]")
  if per_expert is not None:
    if not (isinstance(per_expert, list) and per_expert and all(map(_is_density, per_expert))):
      refuse(f"density_per_expert={per_expert} must be a list of numbers in (0, 1], high noise first")
    per_expert = tuple(per_expert)
  return Interval(tuple(entry["steps"]), tuple(entry["layers"]), density, per_expert)

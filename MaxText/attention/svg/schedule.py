"""When attention is sparse: a schedule of step and layer intervals with densities, read from YAML, scaled and overridden.

A schedule is specified by step index, never by a noise level: a shifted schedule of timesteps would turn a small share of
noise levels into half of the steps. Presets lie in configs/svg/; a path to a YAML file of the same form works as well.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from MaxText.attention.svg.masks import half_width
from MaxText.attention.svg.schedule_file import Interval, read_schedule


@dataclasses.dataclass(frozen=True)
class StepPlan:
  """One denoising step: dense where half_width is None, else layers [layer_start, layer_end) are sparse.

  density is None if svg_band_width gave the half-width.
  """

  step: int
  density: float | None = None
  half_width: int | None = None
  layer_start: int = 0
  layer_end: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A plan for every step of a run, and what to tell the user about how it came about."""

  name: str
  steps: tuple[StepPlan, ...]
  notes: tuple[str, ...]

  def describe(self) -> list[str]:
    """Lines to print: the sparse steps and layers as they will run, then what was scaled or overridden."""
    runs: list[list[StepPlan]] = []
    for plan in self.steps:
      if plan.half_width is None:
        continue
      if runs and runs[-1][-1] == dataclasses.replace(plan, step=plan.step - 1):
        runs[-1].append(plan)
      else:
        runs.append([plan])
    lines = [
      f"steps [{run[0].step}, {run[-1].step + 1}), layers [{run[0].layer_start}, {run[0].layer_end}): "
      + ("" if run[0].density is None else f"density {run[0].density:g}, ") + f"half-width {run[0].half_width:,} tokens"
      for run in runs
    ]
    head = f"svg_schedule={self.name}: " + ("; ".join(lines) if lines else "no sparse step")
    return [head, *self.notes]


def resolve(config, expert_of_steps: Sequence[int]) -> Schedule:
  """The plan of every step of a run.

  Args:
    config: svg_schedule, svg_density, svg_band_width, svg_start_step, svg_end_step, svg_start_layer, svg_end_layer,
      num_layers, num_experts and token_grid are read. Keys other than svg_schedule override it where they are not None.
    expert_of_steps: which expert each of the run's steps uses, 0 (high noise, or the only one) or 1.

  Raises:
    ValueError: a schedule that cannot be read or does not fit the run, with key, value, what is allowed and the fix.
  """
  num_steps, (F, H, W), name = len(expert_of_steps), config.token_grid, config.svg_schedule
  reference_steps, reference_layers, intervals = read_schedule(name)
  notes: list[str] = []

  intervals = _scaled(intervals, "steps", reference_steps, num_steps, notes, f"num_inference_steps={num_steps}")
  intervals = _scaled(intervals, "layers", reference_layers, config.num_layers, notes, f"num_layers={config.num_layers}")
  intervals = _moved(intervals, config.svg_start_step, config.svg_end_step)
  layers = config.svg_start_layer, config.svg_end_layer
  intervals = [dataclasses.replace(i, layers=_with_bounds(i.layers, *layers)) for i in intervals]
  density = None if config.svg_band_width is not None else config.svg_density
  overriding = {
    "steps": (("svg_start_step", config.svg_start_step), ("svg_end_step", config.svg_end_step)),
    "layers": (("svg_start_layer", config.svg_start_layer), ("svg_end_layer", config.svg_end_layer)),
    "densities": (("svg_band_width", config.svg_band_width), ("svg_density", density)),
  }
  for what, values in overriding.items():
    given = [f"{key}={_text(value)}" for key, value in values if value is not None]
    if given:
      notes.append(f"{' and '.join(given)}: instead of the {what} of svg_schedule={name}")

  def plan(step: int, expert: int) -> StepPlan:
    found = [i for i in intervals if i.steps[0] <= step < i.steps[1] and i.layers[0] < i.layers[1]]
    if not found:
      return StepPlan(step)
    if config.svg_band_width is not None:
      return StepPlan(step, None, min(config.svg_band_width, F * H * W - 1), *found[0].layers)
    kept = density if density is not None else found[0].density_of(expert, config.num_experts)
    kept = kept[expert] if isinstance(kept, tuple | list) else kept
    if kept is None:
      raise ValueError(
        f"svg_schedule={name}: has densities for {len(found[0].density_per_expert)} experts only, but the "
        f"model has {config.num_experts}. Add `density:` to the interval, or set svg_density.")
    return StepPlan(step, float(kept), half_width(kept, F * H * W), *found[0].layers)

  return Schedule(name, tuple(plan(*entry) for entry in enumerate(expert_of_steps)), tuple(dict.fromkeys(notes)))


def _text(value: Any) -> str:
  return str(list(value)) if isinstance(value, tuple | list) else f"{value:g}" if isinstance(value, float) else str(value)


def _scaled(
  intervals: list[Interval], unit: str, reference: int, actual: int, notes: list[str], because: str
) -> list[Interval]:
  """Bounds for `actual` steps or layers, rounded. A dense start stays at least one long, however few there are."""
  if reference == actual:
    return intervals
  scaled = []
  for interval in intervals:
    old_start, old_end = getattr(interval, unit)
    start, end = (math.floor(bound * actual / reference + 0.5) for bound in (old_start, old_end))
    start = max(start, 1) if old_start else 0
    end = max(start, end)
    scaled.append(dataclasses.replace(interval, **{unit: (start, end)}))
    notes.append(f"{because}: {unit} [{old_start}, {old_end}) of {reference} became [{start}, {end})")
  return scaled


def _with_bounds(span: tuple[int, int], start: int | None, end: int | None) -> tuple[int, int]:
  return span[0] if start is None else start, span[1] if end is None else end


def _moved(intervals: list[Interval], start: int | None, end: int | None) -> list[Interval]:
  """The first interval begins at `start`, the last ends at `end`, the others are cut to fit."""
  spans = [i.steps for i in intervals]
  if start is not None:
    spans = [(start, spans[0][1]), *((max(a, start), b) for a, b in spans[1:])]
  if end is not None:
    spans = [*((a, min(b, end)) for a, b in spans[:-1]), (spans[-1][0], end)]
  return [dataclasses.replace(i, steps=span) for i, span in zip(intervals, spans, strict=True)]

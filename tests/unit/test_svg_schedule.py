"""Schedules: presets, scaling, overrides, refusals, and the FLOPs they save."""

import types

import pytest

from MaxText.attention.svg.accounting import flops_saved, layer_flops
from MaxText.attention.svg.schedule import resolve

A14B_EXPERTS = [0] * 26 + [1] * 14  # 40 steps, shift 12, boundary 0.875
GRID_720P = (21, 45, 80)


def config(**values):
  defaults = dict(
    svg_schedule="moderate", svg_density=None, svg_band_width=None, svg_start_step=None, svg_end_step=None,
    svg_start_layer=None, svg_end_layer=None, num_layers=40, num_experts=2, token_grid=GRID_720P)
  return types.SimpleNamespace(**(defaults | values))


def spans(schedule):
  """{(density, layers): steps} of the sparse steps."""
  found = {}
  for plan in schedule.steps:
    if plan.half_width is not None:
      found.setdefault((plan.density, (plan.layer_start, plan.layer_end)), []).append(plan.step)
  return {key: (steps[0], steps[-1] + 1) for key, steps in found.items()}


@pytest.mark.parametrize("name,percent", [("conservative", 26.0), ("moderate", 30.8), ("aggressive", 35.7)])
def test_presets_save_the_published_share_of_flops(name, percent):
  plans = resolve(config(svg_schedule=name), A14B_EXPERTS).steps
  for temporal_share in (0.0, 0.5):
    saved = flops_saved(
      plans, GRID_720P, num_layers=40, text_tokens=512, width=5120, ffn_width=13824, temporal_share=temporal_share)
    assert abs(100 * saved - percent) < 0.3


def test_self_attention_is_72_percent_of_a_720p_layer():
  attention, other = layer_flops(75_600, 512, 5120, 13824)
  assert round(100 * attention / (attention + other), 1) == 71.8


def test_moderate_has_the_published_steps_and_densities():
  schedule = resolve(config(), A14B_EXPERTS)
  assert spans(schedule) == {(0.5, (1, 40)): (11, 26), (0.2, (1, 40)): (26, 40)}
  assert {plan.half_width for plan in schedule.steps} == {None, 22_144, 8_064}
  assert schedule.notes == ()


def test_bounds_scale_and_the_dense_start_stays():
  schedule = resolve(config(num_experts=1, num_layers=4), [0] * 12)
  assert spans(schedule) == {(0.3, (1, 4)): (3, 12)}
  lines = "\n".join(schedule.describe())
  assert "num_inference_steps=12: steps [11, 40) of 40 became [3, 12)" in lines
  assert "num_layers=4: layers [1, 40) of 40 became [1, 4)" in lines
  assert spans(resolve(config(num_experts=1), [0, 0])) == {(0.3, (1, 40)): (1, 2)}
  assert "no sparse step" in resolve(config(num_experts=1), [0]).describe()[0]


@pytest.mark.parametrize("values,expected,note", [
  ({"svg_density": 0.25}, {(0.25, (1, 40)): (11, 40)}, "svg_density=0.25: instead of the densities"),
  ({"svg_density": (0.5, 0.1)}, {(0.5, (1, 40)): (11, 26), (0.1, (1, 40)): (26, 40)}, "svg_density=[0.5, 0.1]"),
  ({"svg_start_step": 30}, {(0.2, (1, 40)): (30, 40)}, "svg_start_step=30: instead of the steps"),
  ({"svg_start_step": 0, "svg_end_step": 2}, {(0.5, (1, 40)): (0, 2)}, "svg_start_step=0 and svg_end_step=2"),
  ({"svg_start_layer": 0, "svg_end_step": 26}, {(0.5, (0, 40)): (11, 26)}, "svg_start_layer=0: instead of the layers"),
  ({"svg_start_layer": 40}, {}, "svg_start_layer=40"),
  ({"svg_band_width": 100}, {(None, (1, 40)): (11, 40)}, "svg_band_width=100: instead of the densities"),
])
def test_explicit_keys_override_and_say_so(values, expected, note):
  schedule = resolve(config(**values), A14B_EXPERTS)
  assert spans(schedule) == expected
  assert note in "\n".join(schedule.describe())


def test_band_width_is_capped_at_everything():
  assert resolve(config(svg_band_width=10**9), A14B_EXPERTS).steps[-1].half_width == 75_599


GOOD = "num_steps: 10\nnum_layers: 2\nintervals:\n"


def test_a_file_with_several_intervals(tmp_path):
  path = tmp_path / "mine.yml"
  path.write_text(
    GOOD + "- {steps: [6, 9], layers: [1, 2], density: 0.2}\n- {steps: [2, 6], layers: [0, 2], density: 0.5}\n")
  mine = dict(svg_schedule=str(path), num_layers=2, num_experts=1)
  schedule = resolve(config(**mine), [0] * 10)
  assert spans(schedule) == {(0.5, (0, 2)): (2, 6), (0.2, (1, 2)): (6, 9)}
  moved = resolve(config(**mine, svg_start_step=7, svg_end_step=10), [0] * 10)
  assert spans(moved) == {(0.2, (1, 2)): (7, 10)}


@pytest.mark.parametrize("text,message", [
  ("- {steps: [2, 6], layers: [0, 2], density: 0.5}\n- {steps: [5, 9], layers: [0, 1], density: 0.2}",
   r"steps=\[2, 6\] and steps=\[5, 9\] overlap"),
  ("- {steps: [6, 2], layers: [0, 2], density: 0.5}", r"steps=\[6, 2\] must be \[start, end\] with 0 <= start < end"),
  ("- {steps: [2, 11], layers: [0, 2], density: 0.5}", "end <= num_steps=10"),
  ("- {steps: [2, 6], layers: [0, 3], density: 0.5}", "end <= num_layers=2"),
  ("- {steps: [2, 6], layers: [0, 2], density: 1.5}", r"density=1.5 must be a number in \(0, 1\]"),
  ("- {steps: [2, 6], layers: [0, 2], density_per_expert: 0.5}", "must be a list of numbers"),
  ("- {steps: [2, 6], layers: [0, 2]}", "needs density or density_per_expert"),
  ("- {steps: [2, 6], layers: [0, 2], densty: 0.5}", "unknown key densty"),
  ("- nonsense", "is no mapping"),
  ("  {", "is not YAML"),
])
def test_refused_files(tmp_path, text, message):
  path = tmp_path / "bad.yml"
  path.write_text(GOOD + text)
  with pytest.raises(ValueError, match=message) as error:
    resolve(config(svg_schedule=str(path)), A14B_EXPERTS)
  assert str(error.value).startswith(f"svg_schedule={path}: ")


def test_refused_names_and_experts(tmp_path):
  with pytest.raises(ValueError, match="Presets are aggressive, conservative, moderate"):
    resolve(config(svg_schedule="modest"), A14B_EXPERTS)
  path = tmp_path / "two.yml"
  path.write_text(GOOD + "- {steps: [2, 6], layers: [0, 2], density_per_expert: [0.5, 0.2]}")
  with pytest.raises(ValueError, match="densities for 2 experts only, but the model has 1"):
    resolve(config(svg_schedule=str(path), num_experts=1), [0] * 10)

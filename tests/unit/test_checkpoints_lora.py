"""LoRA files: names and sums against the reference's conversion, and refusal of what does not fit."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from MaxText.checkpoints import lora, names
from MaxText.models.wan import WanConfig, WanTransformer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = WanConfig(num_heads=2, head_dim=6, text_dim=10, freq_dim=8, ffn_dim=20, num_layers=2)
ROWS = {row.name: row for row in names.tensors("transformer", TINY)}
STYLES = ("lora_unet", "diffusion_model", "diffusion_model_alpha")


@pytest.fixture(scope="module")
def weights():
  """Random float32 weights by Diffusers name."""
  rng = np.random.default_rng(0)
  return {row.name: rng.standard_normal(row.shape, np.float32) for row in ROWS.values()}


def make_state(weights, weight_dtype=jnp.float32):
  model = nnx.eval_shape(lambda: WanTransformer(TINY, dtype=jnp.float32, weight_dtype=weight_dtype, rngs=nnx.Rngs(0)))
  flat = []
  for path, variable in nnx.to_flat_state(nnx.state(model)):
    target, dotted = variable.get_value(), ".".join(map(str, path))
    layers = [row.to_ours(weights[row.name]) for row in ROWS.values() if row.path == dotted]
    flat.append((path, variable.replace(jnp.asarray(np.reshape(layers, target.shape), target.dtype))))
  return nnx.from_flat_state(flat)


def by_name(state):
  leaves = {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(state)}
  return {name: row.to_theirs(leaves[row.path] if row.layer is None else leaves[row.path][row.layer])
          for name, row in ROWS.items()}


def golden(style):
  stored = load_file(GOLDEN / f"lora_{style}.safetensors")
  return ({k.removeprefix("in."): v for k, v in stored.items() if k.startswith("in.")},
          {k.removeprefix("out."): v for k, v in stored.items() if k.startswith("out.")})


def merged(weights, *files, num_experts=1, component="transformer", weight_dtype=jnp.float32):
  loras = [(str(file), weight, expert) for file, weight, expert in files]
  changes = lora.open_loras(loras, TINY, num_experts)[component]
  return by_name(lora.merge(make_state(weights, weight_dtype), changes))


def assert_added(result, weights, added, scale=1.0):
  for name, weight in weights.items():
    np.testing.assert_allclose(result[name], weight + scale * added.get(name, 0), rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("style", STYLES)
def test_each_style_adds_what_the_reference_adds(style, weights, tmp_path):
  tensors, added = golden(style)
  save_file(tensors, tmp_path / "a.safetensors")
  assert len(added) >= 20
  assert_added(merged(weights, (tmp_path / "a.safetensors", 1.0, "both")), weights, added)


def test_diffusers_names_are_the_same_lora(weights, tmp_path):
  tensors, added = golden("diffusion_model_alpha")
  renamed = {}
  for row in ROWS.values():
    module = f"diffusion_model.{row.original.removesuffix('.weight')}"
    if f"{module}.alpha" in tensors:
      ours = f"transformer.{row.name.removesuffix('.weight')}"
      renamed[f"{ours}.lora_A.weight"] = tensors[f"{module}.lora_down.weight"]
      renamed[f"{ours}.lora_B.weight"] = tensors[f"{module}.lora_up.weight"]
  record = json.dumps({"transformer.lora_alpha": 2.0, "transformer.r": 3})
  save_file(renamed, tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": record})
  assert_added(merged(weights, (tmp_path / "a.safetensors", 1.0, "both")), weights, added)
  save_file(renamed, tmp_path / "b.safetensors")  # without a record the matrices are taken as they are: alpha = rank
  assert_added(merged(weights, (tmp_path / "b.safetensors", 1.0, "both")), weights, added, 3.0 / 2.0)


def test_several_with_weights_are_summed_before_rounding(weights, tmp_path):
  expected = dict(weights)
  for style, weight in (("lora_unet", 0.5), ("diffusion_model", -0.25)):
    tensors, added = golden(style)
    save_file(tensors, tmp_path / f"{style}.safetensors")
    expected = {name: value + np.float32(weight) * added.get(name, 0) for name, value in expected.items()}
  files = [(tmp_path / "lora_unet.safetensors", 0.5, "both"), (tmp_path / "diffusion_model.safetensors", -0.25, "both")]
  result = merged(weights, *files)
  for name, value in expected.items():
    np.testing.assert_allclose(result[name], value, rtol=0, atol=4e-6, err_msg=name)
  # bfloat16 weights that are exact: the sum is rounded once, so it lies within half a step of the exact one.
  exact = {name: value.astype(jnp.bfloat16).astype(np.float32) for name, value in weights.items()}
  rounded = merged(exact, *files, weight_dtype=jnp.bfloat16)["blocks.1.ffn.net.2.weight"]
  assert rounded.dtype == jnp.bfloat16
  name = "blocks.1.ffn.net.2.weight"
  target = exact[name] + expected[name] - weights[name]
  assert np.abs(rounded.astype(np.float32) - target).max() <= np.abs(target).max() * 2.0**-8


def test_differences_of_any_parameter(weights, tmp_path):
  rng = np.random.default_rng(1)
  tensors = {
    "diffusion_model.head.head.diff": rng.standard_normal((64, 12), np.float32),
    "diffusion_model.blocks.1.norm3.diff": rng.standard_normal(12, np.float32),
    "diffusion_model.blocks.1.norm3.diff_b": rng.standard_normal(12, np.float32),
    "diffusion_model.blocks.0.self_attn.norm_q.diff": rng.standard_normal(12, np.float32),
    "diffusion_model.blocks.0.modulation.diff": rng.standard_normal((1, 6, 12), np.float32),
    "diffusion_model.patch_embedding.diff": rng.standard_normal((12, 16, 1, 2, 2), np.float32),
  }
  save_file(tensors, tmp_path / "a.safetensors")
  targets = ("proj_out.weight", "blocks.1.norm2.weight", "blocks.1.norm2.bias", "blocks.0.attn1.norm_q.weight",
             "blocks.0.scale_shift_table", "patch_embedding.weight")
  added = dict(zip(targets, tensors.values(), strict=True))
  assert_added(merged(weights, (tmp_path / "a.safetensors", 2.0, "both")), weights, added, 2.0)


def test_convolution_with_its_kernel_written_out(weights, tmp_path):
  rng = np.random.default_rng(1)
  down, up = rng.standard_normal((3, 16, 1, 2, 2), np.float32), rng.standard_normal((12, 3, 1, 1, 1), np.float32)
  module = "diffusion_model.patch_embedding"
  save_file({f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}, tmp_path / "a.safetensors")
  added = {"patch_embedding.weight": np.einsum("or,rcthw->octhw", up[:, :, 0, 0, 0], down)}
  assert_added(merged(weights, (tmp_path / "a.safetensors", 1.0, "both")), weights, added)


def test_experts_get_their_own(weights, tmp_path):
  tensors, added = golden("lora_unet")
  save_file(tensors, tmp_path / "a.safetensors")
  low = lora.open_loras([(str(tmp_path / "a.safetensors"), 1.0, "low_noise")], TINY, 2)
  assert low["transformer"] == () and len(low["transformer_2"]) == len(added)
  both = lora.open_loras([(str(tmp_path / "a.safetensors"), 1.0, "both")], TINY, 2)
  assert len(both["transformer"]) == len(both["transformer_2"]) == len(added)
  assert list(lora.open_loras([], TINY, 1)) == ["transformer"]


def test_sharding_is_kept(weights, tmp_path):
  tensors, _ = golden("diffusion_model")
  save_file(tensors, tmp_path / "a.safetensors")
  state = make_state(weights)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
  state = jax.device_put(state, device)
  result = lora.merge(state, lora.open_loras([(str(tmp_path / "a.safetensors"), 1.0, "both")], TINY, 1)["transformer"])
  assert {leaf.sharding for leaf in jax.tree.leaves(result)} == {device}


def rename(tensors, old, new):
  return {name.replace(old, new): value for name, value in tensors.items()}


BAD = {
  "unknown layer": (lambda t: rename(t, "blocks_1_", "blocks_7_"), "30 of its 60 names match no weight"),
  "image keys": (lambda t: t | {"lora_unet_blocks_0_cross_attn_k_img.lora_down.weight": np.zeros((3, 12), np.float32)},
                 "lora_unet_blocks_0_cross_attn_k_img.lora_down.weight"),
  "text encoder": (lambda t: t | {"lora_te_layers_0_q.lora_down.weight": np.zeros((3, 12), np.float32)}, "lora_te_"),
  "DoRA": (lambda t: t | {"lora_unet_blocks_0_ffn_0.dora_scale": np.zeros((20, 1), np.float32)}, "dora_scale"),
  "half a pair": (lambda t: {k: v for k, v in t.items() if k != "lora_unet_blocks_0_ffn_0.lora_up.weight"}, "other half"),
  "another width": (lambda t: {k: np.zeros([2 * n if n > 3 else n for n in v.shape], np.float32) for k, v in t.items()},
                    "20 of its weights have another shape"),
  "ranks differ": (lambda t: t | {"lora_unet_blocks_0_ffn_0.lora_up.weight": np.zeros((20, 4), np.float32)},
                   "[20, 4] @ [3, 12]"),
  "empty alpha": (lambda t: t | {"lora_unet_blocks_0_ffn_0.alpha": np.zeros(0, np.float32)}, "one number is expected"),
  "alpha that is NaN": (lambda t: t | {"lora_unet_blocks_0_ffn_0.alpha": np.float32(np.nan)[None]}, "one number"),
  "rank of zero": (lambda t: {k: v[:0] if "down" in k else v[:, :0] if "up" in k else v for k, v in t.items()},
                   "@ [0, 12]"),
  "no LoRA": (lambda t: {"blocks.0.ffn.0.weight": np.zeros((20, 12), np.float32)}, "match no weight"),
  "empty": (lambda t: {}, "it holds no weights"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_listed_and_refused(case, tmp_path):
  change, words = BAD[case]
  save_file(change(golden("lora_unet")[0]), tmp_path / "a.safetensors")
  with pytest.raises(ValueError, match="is not a LoRA of this model") as error:
    lora.open_loras([(str(tmp_path / "a.safetensors"), 1.0, "both")], TINY, 1)
  assert words in str(error.value) and "a.safetensors" in str(error.value)
  assert len(str(error.value).splitlines()) < 30


@pytest.mark.parametrize("record", ["{", "[]", "5", '{"lora_alpha": "4"}', '{"alpha_pattern": [1]}'])
def test_a_record_that_cannot_be_read_is_refused(record, tmp_path):
  save_file(golden("diffusion_model")[0], tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": record})
  with pytest.raises(ValueError, match="lora_adapter_metadata of the LoRA file cannot be read"):
    lora.open_loras([(str(tmp_path / "a.safetensors"), 1.0, "both")], TINY, 1)

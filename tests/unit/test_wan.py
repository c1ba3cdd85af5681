"""The transformer against golden outputs of the Diffusers implementation, and its shapes at full size."""

import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from MaxText.checkpoints import loading, names, tensor_files
from MaxText.models import wan

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


def golden(name):
  path = GOLDEN / f"dit_{name}.safetensors"
  with safe_open(path, "np") as f:
    config, tensors = json.loads(f.metadata()["config"]), {key: f.get_tensor(key) for key in f.keys()}
  cfg = wan.WanConfig(
    tuple(config["patch_size"]),
    config["num_attention_heads"],
    config["attention_head_dim"],
    config["in_channels"],
    config["out_channels"],
    config["text_dim"],
    config["freq_dim"],
    config["ffn_dim"],
    config["num_layers"],
    config["eps"],
  )
  return cfg, path, tensors


@pytest.mark.parametrize("name", ["2_heads", "3_heads", "5_heads"])
def test_equals_the_reference(name):
  cfg, path, tensors = golden(name)
  graphdef, abstract = nnx.split(nnx.eval_shape(lambda: wan.WanTransformer(cfg, rngs=nnx.Rngs(0))))
  rows = names.tensors("transformer", cfg)
  header = tensor_files.read_header(str(path))[0]
  targets = {".".join(path): leaf.get_value() for path, leaf in nnx.to_flat_state(abstract)}
  arrays = loading.read_into(rows, {row: header[row.name] for row in rows}, targets)
  state = nnx.from_flat_state(
    [(path, leaf.replace(arrays[".".join(path)])) for path, leaf in nnx.to_flat_state(abstract)]
  )
  model = nnx.merge(graphdef, state)
  latents = jnp.asarray(tensors["in.latents"].transpose(0, 2, 3, 4, 1))

  @jax.jit
  def predict(latents, timestep, text):
    return model(latents, timestep, model.text_keys_values(text))

  velocity, routes = predict(latents, tensors["in.timestep"], tensors["in.text"])
  expected = tensors["out"].transpose(0, 2, 3, 4, 1)
  assert np.linalg.norm(velocity - expected) <= 1e-5 * np.linalg.norm(expected)
  assert routes.shape == (cfg.num_layers, latents.shape[0], cfg.num_heads) and not routes.any()


def test_patches_round_trip():
  x = np.arange(2 * 3 * 4 * 6 * 5, dtype=np.float32).reshape(2, 3, 4, 6, 5)
  tokens = wan.patchify(x, (1, 2, 2))
  assert tokens.shape == (2, 3 * 2 * 3, 20)
  np.testing.assert_array_equal(tokens[0, 1, :5], x[0, 0, 0, 2])  # second token: first row, third column
  np.testing.assert_array_equal(wan.unpatchify(tokens, (3, 2, 3), (1, 2, 2)), x)


@pytest.mark.parametrize("head_dim", [12, 20, 24, 64, 128])
def test_rotary_dimensions_split_as_published(head_dim):
  cos, sin = wan.rotary_tables((2, 2, 2), head_dim)
  dim_hw = 2 * (head_dim // 6)
  dim_t = head_dim - 2 * dim_hw
  assert cos.shape == sin.shape == (8, head_dim)
  np.testing.assert_allclose(
    np.abs(sin[1, dim_t + dim_hw]), np.sin(1.0), rtol=1e-6
  )  # token 1: w = 1, first pair of w turns by 1
  np.testing.assert_allclose(cos[1, : dim_t + dim_hw], 1.0)
  if head_dim == 128:
    assert (dim_t, dim_hw) == (44, 42)


def test_stretched_positions_are_the_middles_of_the_larger_picture_s_tokens():
  cos, sin = (table.reshape(2, 2, 3, 24) for table in wan.rotary_tables((2, 2, 3), 24, stretch=3))
  large_cos, large_sin = (table.reshape(2, 6, 9, 24) for table in wan.rotary_tables((2, 6, 9), 24))
  np.testing.assert_allclose(cos, large_cos[:, 1::3, 1::3], atol=1e-6)
  np.testing.assert_allclose(sin, large_sin[:, 1::3, 1::3], atol=1e-6)
  even, _ = wan.rotary_tables((1, 1, 2), 24, stretch=2)  # tokens at 0.5 and 2.5: halfway between two
  assert even[1, 16] == pytest.approx(np.cos(2.5))


def test_rotary_of_some_frames_of_a_clip():
  tables = wan.rotary_tables((5, 2, 3), 24)
  frames = np.array([[0, 4], [2, 3]])
  for mine, whole in zip(wan.rotary_of_frames(tables, frames, (5, 2, 3)), tables, strict=True):
    whole = whole.reshape(5, 6, 24)
    np.testing.assert_array_equal(mine[0], np.concatenate([whole[0], whole[4]]))
    np.testing.assert_array_equal(mine[1], np.concatenate([whole[2], whole[3]]))


@pytest.mark.parametrize(
  "cfg, parameters",
  [
    (wan.WanConfig(num_heads=12, ffn_dim=8960, num_layers=30), 1_418_996_800),
    (wan.WanConfig(), 14_288_491_584),
  ],
)
def test_full_size_step_is_traced_in_seconds(cfg, parameters):
  start = time.perf_counter()
  make = functools.partial(wan.WanTransformer, cfg, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  graphdef, abstract = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
  assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == parameters
  latents = jax.ShapeDtypeStruct((2, 21, 90, 160, 16), jnp.float32)
  text = jax.ShapeDtypeStruct((2, 512, cfg.text_dim), jnp.float32)

  def predict(weights, latents, timestep, text):
    model = nnx.merge(graphdef, weights)
    return model(latents, timestep, model.text_keys_values(text))

  velocity, routes = jax.eval_shape(predict, abstract, latents, jax.ShapeDtypeStruct((2,), jnp.float32), text)
  assert velocity.shape == latents.shape and routes.shape == (cfg.num_layers, 2, cfg.num_heads)
  assert time.perf_counter() - start < 30

"""The table of names against the reference's models at full size, and against our own modules."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.checkpoints import names
from MaxText.models.umt5 import Umt5Config, Umt5Encoder
from MaxText.models.vae import VaeConfig, WanVae
from MaxText.models.wan import WanConfig, WanTransformer

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "names.json").read_text())
MODELS = {
  "wan2.1-t2v-1.3b": ("transformer", WanConfig(num_heads=12, ffn_dim=8960, num_layers=30), WanTransformer),
  "wan2.1-t2v-14b": ("transformer_2", WanConfig(), WanTransformer),
  "vae": ("vae", VaeConfig(), WanVae),
  "umt5-xxl": ("text_encoder", Umt5Config(), Umt5Encoder),
}


@pytest.mark.parametrize("model", MODELS)
def test_names_and_shapes_are_the_references_at_full_size(model):
  component, config, _ = MODELS[model]
  golden = {name: (tuple(shape), original) for name, (shape, original) in GOLDEN[model]["tensors"].items()}
  ours = {}
  for tensor in names.tensors(component, config):
    for name in (tensor.name, *tensor.aliases):
      ours[name] = (tensor.shape, None if model == "umt5-xxl" else tensor.original)
  assert ours == golden
  count = sum(int(np.prod(t.shape)) for t in names.tensors(component, config))
  assert count == GOLDEN[model]["parameters"]


def test_published_totals():
  assert (GOLDEN["wan2.1-t2v-1.3b"]["parameters"], len(GOLDEN["wan2.1-t2v-1.3b"]["tensors"])) == (1_418_996_800, 825)
  assert (GOLDEN["wan2.1-t2v-14b"]["parameters"], len(GOLDEN["wan2.1-t2v-14b"]["tensors"])) == (14_288_491_584, 1095)


@pytest.mark.parametrize("model", MODELS)
def test_the_table_covers_our_modules_exactly(model):
  component, config, module = MODELS[model]
  abstract = nnx.eval_shape(lambda: module(config, dtype=jnp.float32, weight_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(abstract, nnx.Param))}
  slots = {}
  for tensor in names.tensors(component, config):
    slots.setdefault(tensor.path, []).append(tensor)
  assert set(slots) == set(leaves)
  for path, rows in slots.items():
    shape = rows[0].our_shape if rows[0].layer is None else (len(rows), *rows[0].our_shape)
    assert shape == leaves[path].shape, path
    assert [row.layer for row in rows] == ([None] if rows[0].layer is None else list(range(len(rows)))), path


def test_layouts_written_out():
  config = WanConfig(num_heads=1, head_dim=4, in_channels=3, num_layers=1)
  rows = {t.name: t for t in names.tensors("transformer", config)}
  weight = np.arange(4 * 3 * 1 * 2 * 2).reshape(4, 3, 1, 2, 2)
  ours = rows["patch_embedding.weight"].to_ours(weight)
  for e, c, h, w in np.ndindex(4, 3, 2, 2):
    assert ours[(h * 2 + w) * 3 + c, e] == weight[e, c, 0, h, w]
  linear = np.arange(24 * 4).reshape(24, 4)
  assert np.array_equal(rows["condition_embedder.time_proj.weight"].to_ours(linear), linear.T)
  table = np.arange(24).reshape(1, 6, 4)
  assert np.array_equal(rows["blocks.0.scale_shift_table"].to_ours(table), table[0])
  conv = {t.name: t for t in names.tensors("vae", VaeConfig(base_dim=2))}["encoder.down_blocks.3.conv1.weight"]
  kernel = np.arange(4 * 2 * 27).reshape(4, 2, 3, 3, 3)
  assert conv.to_ours(kernel)[2, 1, 0, 1, 3] == kernel[3, 1, 2, 1, 0]


@pytest.mark.parametrize("component, config", [
  ("transformer", WanConfig(num_heads=2, head_dim=6, ffn_dim=5, text_dim=7, freq_dim=4, num_layers=2)),
  ("vae", VaeConfig(base_dim=2)),
  ("text_encoder", Umt5Config(vocab_size=9, d_model=6, d_kv=2, d_ff=5, num_heads=3, num_layers=2)),
])
def test_every_layout_reads_back_what_it_wrote(component, config):
  for tensor in names.tensors(component, config):
    array = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
    assert np.array_equal(tensor.to_theirs(tensor.to_ours(array)), array), tensor.name
  assert jax.eval_shape(tensor.to_ours, jax.ShapeDtypeStruct(tensor.shape, jnp.float32)).shape == tensor.our_shape

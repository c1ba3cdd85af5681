"""The transformer on a mesh of eight fake devices: the same velocity and routes as on one, and what the program sends."""

import functools
import types

import jax
import numpy as np
import pytest
from flax import nnx

from MaxText.attention import dot_product_attention
from MaxText.attention.svg import SvgAttention
from MaxText.attention.ulysses import on_mesh
from MaxText.config_types import DEFAULT_AXIS_RULES
from MaxText.models.wan import WanConfig, WanTransformer
from MaxText.parallel import hlo, mesh, sharding

CFG = WanConfig(num_heads=8, head_dim=16, text_dim=32, freq_dim=32, ffn_dim=320, num_layers=3, in_channels=4,
                out_channels=4)
B, GRID = 2, (3, 8, 10)
S, E = 240, CFG.width
SPARSE_LAYERS = np.array([False, True, True])
SVG = SvgAttention(half_width=40, num_sampled_queries=16, kernel="exact")
FAST = {"xla_backend_optimization_level": 0}  # compiles sooner; the collectives are the same
MESHES = [{"context": 2, "fsdp": 4}, {"context": 4, "fsdp": 2}, {"context": 8}, {"data": 2, "context": 4}, {"fsdp": 8},
          {"context": 4, "tensor": 2}]


def placement(devices, **axes):
  sizes = {mesh.key(link, axis): 1 for link in ("ici", "dcn") for axis in mesh.AXES}
  sizes |= {mesh.key("ici", axis): size for axis, size in axes.items()}
  rules = sharding.parse_rules(DEFAULT_AXIS_RULES)
  return sharding.Placement(mesh.make_mesh(types.SimpleNamespace(**sizes), devices), rules)


@functools.cache
def weights():
  """Fixed values for all parameters, on the host, large enough that the layers matter and heads of both kinds exist."""
  draw = np.random.default_rng(0)
  _, state = nnx.split(nnx.eval_shape(lambda: WanTransformer(CFG, rngs=nnx.Rngs(0))))
  return jax.tree.map(lambda leaf: draw.standard_normal(leaf.shape, np.float32) * 0.1, state)


def inputs():
  draw = np.random.default_rng(1)
  shape = (B, *(n * p for n, p in zip(GRID, CFG.patch_size, strict=True)), CFG.in_channels)
  latents, text = (draw.standard_normal(s, np.float32) for s in (shape, (B, 7, CFG.text_dim)))
  return latents, np.full(B, 500, np.float32), text


def run(place, wrap=lambda attention: attention, svg=SVG):
  """Velocity, routes and the text of the compiled program."""
  graphdef, abstract = nnx.split(nnx.eval_shape(lambda: WanTransformer(CFG, rngs=nnx.Rngs(0))))
  state = jax.tree.map(lambda leaf, value: jax.device_put(value, leaf.sharding),
                       sharding.sharded_abstract(abstract, place), weights())
  dense, sparse = wrap(on_mesh(dot_product_attention, place)), on_mesh(svg, place)

  def velocity(state, latents, timestep, text):
    model = nnx.merge(graphdef, state)
    return model(latents, timestep, model.text_keys_values(text), attention=dense, cross_attention=on_mesh(
      dot_product_attention, place), sparse_attention=sparse, sparse_layers_L=SPARSE_LAYERS)

  with sharding.mesh_rules(place):
    program = jax.jit(velocity, out_shardings=(place.replicated, None)).lower(state, *inputs()).compile(FAST)
  out, temporal_LBN = program(state, *inputs())
  return out, temporal_LBN, program.as_text()


@functools.cache
def alone():
  out, temporal_LBN, text = run(placement(jax.devices()[:1]))
  assert not hlo.collectives(text)
  temporal_LBN = np.asarray(temporal_LBN)
  assert temporal_LBN[1:].any() and not temporal_LBN[1:].all() and not temporal_LBN[0].any()
  return np.asarray(out), temporal_LBN


def ids(axes):
  return " ".join(f"{axis}{size}" for axis, size in axes.items())


@pytest.mark.parametrize("axes", MESHES, ids=ids)
def test_same_result_and_only_the_meant_collectives(axes):
  out, temporal_LBN, text = run(placement(jax.devices(), **axes))
  expected, expected_routes = alone()
  np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
  for shard in temporal_LBN.addressable_shards:
    np.testing.assert_array_equal(shard.data, expected_routes[shard.index])

  found = hlo.collectives(text)
  share = B // axes.get("data", 1) * S * E // axes.get("tensor", 1)
  assert not hlo.token_gathers(found, S, share)
  # A dense and a sparse branch, each with one exchange in and one out; and nothing of the routes.
  assert hlo.count(found).get("all-to-all", 0) == (4 if "context" in axes else 0)
  gathers = [c for c in found if c.kind == "all-gather"]
  tensor = axes.get("tensor", 1)
  assert sum(c.elements == E * CFG.ffn_dim // tensor for c in gathers) == 2, "the MLP of a layer is gathered"
  assert max(c.elements for c in gathers) == E * CFG.ffn_dim // tensor, "more than a layer is gathered at once"
  reductions = [c for c in found if c.kind == "all-reduce"]
  assert bool(reductions) == ("tensor" in axes), [str(c) for c in reductions]


def test_a_gather_of_keys_on_purpose_is_seen():
  place = placement(jax.devices(), context=8)

  def careless(attention):
    def attend(q, k, v, grid):
      k = jax.lax.with_sharding_constraint(k, place.replicated)
      return attention(q, k, v, grid) + 0 * k.sum(1, keepdims=True)
    return attend

  found = hlo.collectives(run(place, careless, svg=None)[2])
  assert hlo.token_gathers(found, S, B * S * E)

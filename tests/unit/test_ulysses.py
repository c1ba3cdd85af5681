"""Attention on a mesh of eight fake devices: the values, the routes, and what the compiled program sends."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.attention.ulysses import Ulysses, check_heads, check_parallel, on_mesh
from MaxText.parallel import hlo, mesh, sharding

RULES = sharding.parse_rules([["batch", ["data", "fsdp"]], ["tokens", "context"], ["heads", "tensor"]])
GRID = (4, 6, 10)
B, S, N, D = 2, 240, 8, 16
MESHES = [{"context": 2, "fsdp": 4}, {"context": 4, "fsdp": 2}, {"context": 8}, {"data": 2, "context": 4},
          {"fsdp": 8}, {"context": 4, "tensor": 2}]


def placement(**axes):
  sizes = {mesh.key(link, axis): 1 for link in ("ici", "dcn") for axis in mesh.AXES}
  sizes |= {mesh.key("ici", axis): size for axis, size in axes.items()}
  return sharding.Placement(mesh.make_mesh(types.SimpleNamespace(**sizes), jax.devices()), RULES)


def ids(axes):
  return " ".join(f"{axis}{size}" for axis, size in axes.items())


@dataclasses.dataclass(frozen=True)
class Routed:
  """Softmax attention whose heads choose between two temperatures by a statistic of the whole sequence."""

  layout: str = "head_local"

  def route(self, q, k):
    q, k = jnp.asarray(q), jnp.asarray(k)
    return jnp.mean(jnp.sum(q, 1) * jnp.sum(k, 1), -1) > 0

  def with_routes(self, q, k, v, grid):
    assert grid == GRID and q.shape[1] == S
    temporal_BN = self.route(q, k)
    return self.attend(q, k, v, jnp.where(temporal_BN, 2.0, 0.5)), temporal_BN

  def attend(self, q, k, v, temperature_BN):
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) * temperature_BN[:, :, None, None]
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1), v)

  def __call__(self, q, k, v, grid):
    return self.attend(q, k, v, jnp.full((q.shape[0], q.shape[2]), D**-0.5))


def qkv(T=S):
  draw = np.random.default_rng(0)
  return [draw.standard_normal((B, n, N, D), np.float32) for n in (S, T, T)]


def placed(place, arrays):
  return [jax.device_put(a, place.sharding(("batch", "tokens", "heads", None), a.shape)) for a in arrays]


@pytest.mark.parametrize("axes", MESHES, ids=ids)
def test_values_and_routes_do_not_depend_on_the_mesh(axes):
  place, arrays = placement(**axes), qkv()
  wrapped = Ulysses(Routed(), place)
  out, temporal = jax.jit(lambda *a: wrapped.with_routes(*a, GRID))(*placed(place, arrays))
  expected, expected_temporal = Routed().with_routes(*arrays, GRID)
  assert 0 < expected_temporal.sum() < B * N, "the test needs heads of both kinds"
  np.testing.assert_array_equal(temporal, expected_temporal)
  np.testing.assert_allclose(out, expected, atol=1e-5)
  assert out.sharding.is_equivalent_to(place.sharding(("batch", "tokens", "heads", None), out.shape), 4)


@pytest.mark.parametrize("axes", [{"context": 8}, {"data": 2, "context": 4}, {"context": 4, "tensor": 2}], ids=ids)
def test_two_exchanges_and_nothing_else(axes):
  place = placement(**axes)
  wrapped = Ulysses(Routed(), place)
  text = jax.jit(lambda *a: wrapped.with_routes(*a, GRID)).lower(*placed(place, qkv())).compile().as_text()
  found = hlo.collectives(text)
  assert hlo.count(found) == {"all-to-all": 2}
  share = B * S * N * D // 8
  assert sorted(c.elements for c in found) == [share, 3 * share]


def test_a_gather_of_keys_is_seen():
  """The same program, with the keys gathered on purpose."""
  place = placement(context=8)
  wrapped = Ulysses(Routed(), place)

  def careless(q, k, v):
    k = jax.lax.with_sharding_constraint(k, place.replicated)
    return wrapped(q, k, v, GRID) + jnp.sum(k * k, 1, keepdims=True)

  text = jax.jit(careless).lower(*placed(place, qkv())).compile().as_text()
  assert hlo.token_gathers(hlo.collectives(text), S, B * S * N * D)


@pytest.mark.parametrize("axes", [{"context": 8}, {"context": 4, "tensor": 2}, {"fsdp": 8}], ids=ids)
def test_cross_attention_sends_nothing(axes):
  place, (q, k, v) = placement(**axes), qkv(T=7)
  wrapped = Ulysses(Routed(), place)
  program = jax.jit(lambda q, k, v: wrapped(q, k, v, None))
  spec = place.sharding(("batch", None, "heads"), k.shape[:3])
  inputs = [*placed(place, [q]), jax.device_put(k, spec), jax.device_put(v, spec)]
  assert not hlo.collectives(program.lower(*inputs).compile().as_text())
  np.testing.assert_allclose(program(*inputs), Routed()(q, k, v, None), atol=1e-5)


def test_what_does_not_divide_is_refused():
  wrapped = Ulysses(Routed(), placement(context=8))
  q = jnp.zeros((1, 12, 8, 4))
  with pytest.raises(ValueError, match="12 tokens cannot be split over context=8"):
    wrapped(q, q, q, (1, 3, 4))
  q = jnp.zeros((1, 16, 12, 4))
  with pytest.raises(ValueError, match="ici_context_parallelism=8 does not divide num_heads=12"):
    wrapped(q, q, q, (1, 4, 4))


def test_heads_that_do_not_divide_name_the_nearest():
  check_heads(40, 8)
  check_heads(12, 2, 6)
  with pytest.raises(ValueError) as error:
    check_heads(12, 8)
  assert "ici_context_parallelism=8 does not divide num_heads=12" in str(error.value)
  assert "nearest: ici_context_parallelism=4, 6 or 12" in str(error.value)
  assert "context 4 × data 2" in str(error.value)
  with pytest.raises(ValueError, match="ici_tensor_parallelism=5 does not divide num_heads=12.*4 or 6"):
    check_heads(12, 2, 5)
  with pytest.raises(ValueError, match="num_heads=12 / tensor 2.*ici_context_parallelism=2, 3 or 6"):
    check_heads(12, 4, 2)


VIDEO = {"num_heads": 40, "num_frames": 81, "height": 480, "width": 832}


@pytest.mark.parametrize("change, words", [
  ({"strategy": "none"}, ["context_parallel_strategy=none", "context=8", "context_parallel_strategy=ulysses"]),
  ({"num_heads": 12}, ["num_heads=12"]),
  ({"num_frames": 1, "height": 16, "width": 16}, ["1 tokens", "context=8", "num_frames=29", "height=128", "m=1"]),
  ({"num_frames": 5, "height": 48, "width": 80}, ["30 tokens", "num_frames=29", "height=64", "width=64", "m=1 or 2"]),
])
def test_what_attention_could_not_split_is_refused_early(change, words):
  place = placement(context=8)
  check_parallel(**{**VIDEO, "strategy": "ulysses"}, placement=place)
  with pytest.raises(ValueError) as error:
    check_parallel(**{**VIDEO, "strategy": "ulysses", **change}, placement=place)
  for word in words:
    assert word in str(error.value), str(error.value)


def test_nearest_sizes_are_valid_themselves():
  place = placement(context=8)
  for name, values in (("num_frames", (29,)), ("height", (64, 128))):
    for value in values:
      video = {"num_frames": 5, "height": 48, "width": 80, name: value}
      check_parallel(num_heads=40, strategy="ulysses", placement=place, **video)


def test_one_device_needs_no_wrapper():
  one = sharding.Placement(mesh.make_mesh(types.SimpleNamespace(
    **{mesh.key(link, axis): 1 for link in ("ici", "dcn") for axis in mesh.AXES}), jax.devices()[:1]), RULES)
  attention = Routed()
  assert on_mesh(attention, one) is attention
  assert on_mesh(None, placement(context=8)) is None
  assert isinstance(on_mesh(attention, placement(context=8)), Ulysses)


HLO = '''
  %all-gather.7 = f32[64,64]{1,0} all-gather(%slice), metadata={op_name="jit(f)/while/body/gather"}
  %ag = (bf16[8,64]{1,0:T(8,128)(2,1)}, bf16[64,64]{1,0:T(8,128)(2,1)S(1)}) all-gather-start(%p), dimensions={0}
  %ag.done = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} all-gather-done(%ag)
  ROOT %all-to-all.1 = (f32[1,4]{1,0}, f32[1,4]{1,0}) all-to-all(%a, %b), replica_groups={{0,1}}
  %fusion.3 = f32[4]{0} fusion(%all-gather.7), kind=kLoop
'''


def test_collectives_are_read_from_the_text():
  found = hlo.collectives(HLO)
  assert [(c.kind, c.elements) for c in found] == [("all-gather", 4096), ("all-gather", 4096), ("all-to-all", 8)]
  assert found[0].op_name == "jit(f)/while/body/gather"
  assert str(found[1]) == "all-gather bf16[64, 64] ()"

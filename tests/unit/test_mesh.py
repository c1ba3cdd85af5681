"""Mesh sizes, logical axis rules, and weights that are created in shards."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from MaxText.models.layers import Linear, ParamMaker
from MaxText.parallel import hlo, mesh, sharding

RULES = sharding.parse_rules([
  ["batch", ["data", "fsdp"]], ["tokens", "context"], ["heads", "tensor"], ["mlp", "tensor"],
  ["embed", ["fsdp", "context"]], ["vocab", ["fsdp", "tensor"]], ["norm", None],
])


def config(**sizes):
  keys = {mesh.key(link, axis): 1 for link in ("ici", "dcn") for axis in mesh.AXES}
  return types.SimpleNamespace(**{**keys, **sizes})


def placement(**axes):
  keys = {mesh.key("ici", axis): size for axis, size in axes.items()}
  return sharding.Placement(mesh.make_mesh(config(**keys), jax.devices()), RULES)


@pytest.mark.parametrize("sizes, expected", [
  ({"ici_fsdp_parallelism": -1}, (1, 8, 1, 1)),
  ({"ici_fsdp_parallelism": -1, "ici_context_parallelism": 2}, (1, 4, 2, 1)),
  ({"ici_data_parallelism": 2, "ici_context_parallelism": 4}, (2, 1, 4, 1)),
  ({"ici_tensor_parallelism": 2, "ici_context_parallelism": -1}, (1, 1, 4, 2)),
  ({"ici_context_parallelism": 8, "dcn_data_parallelism": -1}, (1, 1, 8, 1)),
])
def test_mesh_sizes(sizes, expected):
  made = mesh.make_mesh(config(**sizes), jax.devices())
  assert tuple(made.shape.values()) == expected
  assert tuple(made.shape) == mesh.AXES
  assert sorted(d.id for d in made.devices.flat) == list(range(8))


@pytest.mark.parametrize("sizes, words", [
  ({"ici_context_parallelism": 3, "ici_fsdp_parallelism": -1}, ["ici_context_parallelism=3", "8 devices", "2, 4"]),
  ({"ici_context_parallelism": 16}, ["ici_context_parallelism=16", "8 devices", "ici_context_parallelism=8"]),
  ({"ici_context_parallelism": 2}, ["ici_context_parallelism=2", "8 devices", "=-1"]),
  ({"ici_context_parallelism": 4, "ici_data_parallelism": 4}, ["ici_data_parallelism=4", "= 16", "data_parallelism=2"]),
  ({"ici_context_parallelism": -1, "ici_fsdp_parallelism": -1}, ["fsdp_parallelism and ici_context_par", "only one"]),
  ({"ici_tensor_parallelism": 0}, ["ici_tensor_parallelism=0", "at least 1"]),
  ({"ici_fsdp_parallelism": -1, "dcn_data_parallelism": 2}, ["dcn_data_parallelism=2", "1 slices"]),
])
def test_mesh_sizes_that_do_not_fit(sizes, words):
  with pytest.raises(ValueError) as error:
    mesh.make_mesh(config(**sizes), jax.devices())
  for word in words:
    assert word in str(error.value)


@dataclasses.dataclass(frozen=True)
class SliceDevice:
  """A device of a machine with two slices of four."""

  id: int
  platform: str = "gpu"
  device_kind: str = "fake"
  process_index: int = 0

  @property
  def slice_index(self):
    return self.id // 4


def test_slices_go_to_the_dcn_axis(monkeypatch):
  made = {}
  monkeypatch.setattr(mesh, "Mesh", lambda array, axes, axis_types: made.update(array=array))
  mesh.make_mesh(config(ici_context_parallelism=-1, dcn_data_parallelism=-1), [SliceDevice(i) for i in range(8)])
  assert made["array"].shape == (2, 1, 4, 1)
  for half in range(2):
    assert {d.slice_index for d in made["array"][half].flat} == {half}
  with pytest.raises(ValueError, match="dcn_data_parallelism=1 .*2 slices"):
    mesh.make_mesh(config(ici_context_parallelism=-1), [SliceDevice(i) for i in range(8)])


def test_hosts_of_one_slice_are_no_slices():
  host = types.SimpleNamespace(platform="tpu", process_index=1)
  assert mesh.slice_of(host) == 0
  assert mesh.slice_of(types.SimpleNamespace(platform="cpu", process_index=1)) == 1
  assert mesh.slice_of(SliceDevice(7)) == 1


@pytest.mark.parametrize("rule, word", [
  ("embed", "is no rule"), (["embd", "fsdp"], "did you mean 'embed'"), (["embed", "fdsp"], "did you mean 'fsdp'"),
  (["embed", ["fsdp", "fsdp"]], "twice"),
])
def test_rules_are_checked(rule, word):
  with pytest.raises(ValueError, match=word):
    sharding.parse_rules([["mlp", "tensor"], rule])
  with pytest.raises(ValueError, match="two rules"):
    sharding.parse_rules([["mlp", "tensor"], ["mlp", None]])


def test_specs():
  place = placement(data=2, fsdp=1, context=2, tensor=2)
  assert place.spec(("layers", "embed", "heads"), (3, 8, 8)) == P(None, "context", "tensor")
  assert place.spec(("heads", "embed"), (8, 8), place.gathered_axes) == P("tensor")
  assert place.spec(("batch", "tokens", None), (2, 6, 5)) == P("data", "context")
  spec, fallbacks = place.resolve(("batch", "tokens"), (3, 6))
  assert spec == P(None, "context")
  assert str(fallbacks[0]) == "batch of size 3 is not split over data=2: it does not divide"


def test_batch_uses_data_alone_where_fsdp_does_not_divide():
  place = placement(data=2, fsdp=4)
  assert place.spec(("batch",), (8,)) == P(("data", "fsdp"))
  assert place.spec(("batch",), (2,)) == P("data")
  halves = jax.device_put(np.array(["cond", "uncond"]) == "cond", place.sharding(("batch",), (2,)))
  for shard in halves.addressable_shards:
    assert bool(shard.data[0]) == (shard.device in place.mesh.devices[0].flat)


def test_devices_that_repeat_work_are_reported():
  assert sharding.repeated_work(placement(data=2, context=4), 2) is None
  assert "a batch of 2 cannot be split over fsdp=8" in sharding.repeated_work(placement(fsdp=8), 2)


class Tower(nnx.Module):
  """Four stacked layers x ← x + x·kernel."""

  def __init__(self, rngs):
    make = ParamMaker(rngs)
    self.inner = Linear(make.stacked(4), 64, 64, ("embed", "heads"), bias=False)
    self.last = Linear(make, 64, 24, ("embed", None))

  def __call__(self, x, gather=sharding.gather):
    x = sharding.constrain(x, ("batch", "tokens", None))
    graphdef, stacked = nnx.split(self.inner)

    def layer(x, state):
      y = x + gather(nnx.merge(graphdef, state))(x)
      return sharding.constrain(y, ("batch", "tokens", None)), None

    return gather(self.last)(jax.lax.scan(layer, x, stacked)[0])


def tower():
  return Tower(nnx.Rngs(0))


def compiled(place, x, **kwargs):
  graphdef, state = nnx.split(nnx.eval_shape(tower))
  state = sharding.sharded_abstract(state, place)
  with sharding.mesh_rules(place):
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, **kwargs))
    return run.lower(state, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place.replicated)).compile().as_text()


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"context": 4, "tensor": 2}])
def test_weights_are_created_in_shards_with_the_same_values(axes):
  place = placement(**axes)
  sharded = sharding.init_sharded(tower, place)
  alone = sharding.init_sharded(tower, sharding.Placement(mesh.make_mesh(config(), jax.devices()[:1]), RULES))
  kernel = sharded.inner.kernel.get_value()
  assert kernel.sharding == place.sharding(("layers", "embed", "heads"), (4, 64, 64))
  assert kernel.addressable_shards[0].data.size == kernel.size // (8 // axes.get("data", 1))
  np.testing.assert_array_equal(kernel, alone.inner.kernel.get_value())
  x = jax.random.normal(jax.random.key(1), (2, 40, 64))
  with sharding.mesh_rules(place):
    y = jax.jit(lambda module, x: module(x))(sharded, x)
  np.testing.assert_allclose(y, alone(x), rtol=1e-5, atol=1e-5)


def test_a_weight_is_gathered_layer_by_layer():
  x = jnp.zeros((8, 40, 64))
  found = hlo.collectives(compiled(placement(fsdp=8), x))
  layers = [c for c in found if "while/body" in c.op_name]
  assert [(c.kind, c.elements) for c in layers] == [("all-gather", 64 * 64)]
  assert not any(c.elements == 4 * 64 * 64 for c in found), "the whole stack is gathered"
  assert not hlo.token_gathers(found, 40, 40 * 64)


def test_the_check_sees_activations_that_move_instead():
  """Without `gather` the compiler sums partial products of the activations; the check must not be blind."""
  found = hlo.collectives(compiled(placement(fsdp=8), jnp.zeros((2, 40, 64)), gather=lambda module: module))
  assert hlo.token_gathers(found, 40, 40 * 64)


def test_debug_sharding_and_fallbacks():
  place = placement(fsdp=8)
  text = sharding.debug_sharding(sharding.sharded_abstract(nnx.state(nnx.eval_shape(tower)), place))
  assert "inner.kernel  float32[4, 64, 64]  ('layers', 'embed', 'heads')  P(None, 'fsdp')  0.008 MiB" in text
  assert text.splitlines()[-1].startswith("total")
  odd = nnx.state(Linear(ParamMaker(nnx.Rngs(0)), 12, 4, ("embed", None)))
  assert "embed of size 12 is not split over fsdp=8" in str(sharding.fallbacks(odd, place)["kernel"][0])


def test_sharded_enough():
  place = placement(fsdp=4, tensor=2)
  good = sharding.sharded_abstract(nnx.state(nnx.eval_shape(tower)), place)
  sharding.check_sharded_enough(good, place, 0.1, slack_bytes=0)
  whole = sharding.Placement(place.mesh, sharding.parse_rules([["heads", "tensor"], ["mlp", "fsdp"]]))
  bad = sharding.sharded_abstract(nnx.state(nnx.eval_shape(tower)), whole)
  with pytest.raises(ValueError) as error:
    sharding.check_sharded_enough(bad, whole, 0.1, slack_bytes=0)
  sharding.check_sharded_enough(bad, whole, 0.1)  # A few KiB too many: not worth a refusal.
  for word in ("inner.kernel (4, 64, 64)", "P(None, None, 'tensor')", "free: fsdp=4", "sharding_tolerance=0.1"):
    assert word in str(error.value)


def test_without_a_placement_nothing_changes():
  x, module = jnp.zeros((2, 4, 64)), tower()
  assert sharding.constrain(x, ("batch", "tokens", None)) is x
  assert sharding.gather(module) is module

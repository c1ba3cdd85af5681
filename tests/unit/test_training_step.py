"""The training step: noise levels, the loss against its formula, accumulation, remat, meshes, optimizer, LoRA."""

import functools
import types

import jax
import numpy as np
import pytest

from MaxText import config_types
from MaxText.attention import dot_product_attention
from MaxText.attention.ulysses import on_mesh
from MaxText.models.wan import WanConfig
from MaxText.parallel import mesh, sharding
from MaxText.training import metrics, objectives, step
from MaxText.training import state as state_lib

CFG = WanConfig(num_heads=2, head_dim=12, text_dim=8, freq_dim=8, ffn_dim=24, num_layers=2, in_channels=2, out_channels=2)
B, LATENTS, TEXT = 8, (1, 4, 4, 2), (3, 8)


@pytest.fixture(autouse=True)
def quick_compilation():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def config(**values):
  return types.SimpleNamespace(
    **{**config_types.Settings().model_dump(), "dtype": "float32", "weight_dtype": "float32", "learning_rate": 0.01,
       "wan": lambda: CFG, **values})


def placement(count=1, **axes):
  sizes = {mesh.key(link, axis): 1 for link in ("ici", "dcn") for axis in mesh.AXES}
  sizes |= {mesh.key("ici", axis): size for axis, size in axes.items()}
  devices = jax.devices()[:count]
  return sharding.Placement(
    mesh.make_mesh(types.SimpleNamespace(**sizes), devices), sharding.parse_rules(config_types.DEFAULT_AXIS_RULES))


def recipe(place, accumulation=1, ema_decay=0.0, **values):
  defaults = dict(transformer="transformer", levels=objectives.NoiseLevels(shift=3.0), text_dropout=0.3, remat="none",
                  attention=on_mesh(dot_product_attention, place))
  return step.Recipe(objectives.FlowMatching(**{**defaults, **values}), accumulation, ema_decay, seed=2**40 + 5)


def batch():
  draw = np.random.default_rng(0)
  return {key: draw.standard_normal((B, *shape), np.float32) for key, shape in (("latents", LATENTS), ("text", TEXT))}


def weights(template, names):
  """Numbers large enough that every weight matters."""
  values = {}
  for i, name in enumerate(names):
    leaf = template.variables[name][1].get_value()
    values[name] = jax.device_put(np.random.default_rng(i).standard_normal(leaf.shape, np.float32) * 0.2, leaf.sharding)
  return values


def run(place=None, steps=2, settings=None, **values):
  """State and metrics after `steps` steps from fixed weights."""
  place, settings = place or placement(), settings or config()
  template, optimizer = state_lib.make_template(settings, place), state_lib.make_optimizer(settings)
  abstract = state_lib.abstract_state(template, optimizer, place, ema=values.get("ema_decay", 0) > 0)
  state = state_lib.init_state(abstract, weights(template, template.trained), optimizer)
  kept = weights(template, template.kept)
  train_step = step.jit_train_step(template, optimizer, recipe(place, **values), abstract, place)
  everything = []
  with jax.set_mesh(place.mesh):
    for _ in range(steps):
      sharded = {key: jax.device_put(value, place.sharding(("batch",) + (None,) * (value.ndim - 1), value.shape))
                 for key, value in batch().items()}
      state, metrics = train_step(state, kept, sharded, {"text": np.zeros((1, 8), np.float32)})
      everything.append({key: float(value) for key, value in metrics.items()})
  return state, everything


@functools.cache
def alone():
  state, metrics = run()
  return {name: np.asarray(value) for name, value in state.weights.items()}, metrics


def assert_same(result, rtol):
  """Losses and weights of a run against those of one device and one part.

  Adam turns a gradient that is 0 but for rounding into a step of the whole learning rate: such biases are left out.
  """
  state, metrics = result
  expected, expected_metrics = alone()
  for mine, theirs in zip(metrics, expected_metrics, strict=True):
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=rtol)
    assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=10 * rtol)
  for name, value in expected.items():
    if not name.endswith("to_k.bias"):
      np.testing.assert_allclose(np.asarray(state.weights[name]), value, rtol=1e-3, atol=2e-4, err_msg=name)


# --- noise levels


@pytest.mark.parametrize("normal", [None, (0.5, 1.5)])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_noise_levels_follow_the_distribution(normal, shift):
  uniform = (np.arange(20_000) + 0.5) / 20_000
  sigma = np.asarray(objectives.NoiseLevels(shift, normal).sigma(uniform.astype(np.float32)))
  if normal is None:
    unshifted = uniform
  else:
    unshifted = 1 / (1 + np.exp(-np.random.default_rng(0).normal(*normal, 200_000)))
  drawn = shift * unshifted / (1 + (shift - 1) * unshifted)
  quantiles = [0.05, 0.25, 0.5, 0.75, 0.95]
  np.testing.assert_allclose(np.quantile(sigma, quantiles), np.quantile(drawn, quantiles), atol=0.01)


@pytest.mark.parametrize("normal", [None, (0.5, 1.5)])
def test_an_expert_sees_its_own_levels_in_the_same_proportions(normal):
  uniform = ((np.arange(4000) + 0.5) / 4000).astype(np.float32)
  every = np.asarray(objectives.NoiseLevels(12.0, normal).sigma(uniform))
  for low, high in ((0.875, 1.0), (0.0, 0.875)):
    mine = np.asarray(objectives.NoiseLevels(12.0, normal, low, high).sigma(uniform))
    assert mine.min() >= low - 1e-6 and mine.max() <= high + 1e-6
    inside = every[(every >= low) & (every <= high)]
    np.testing.assert_allclose(np.quantile(mine, [0.1, 0.5, 0.9]), np.quantile(inside, [0.1, 0.5, 0.9]), atol=0.01)


def test_the_loss_is_that_of_the_velocity():
  seen = {}

  class Model:
    def text_keys_values(self, text_BTE):
      return text_BTE

    def __call__(self, latents, timestep_B, text_kv, **_):
      seen.update(latents=np.asarray(latents), timestep=np.asarray(timestep_B))
      return latents * 2, None

  values = batch()
  sigma = np.linspace(0, 1, B).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), B)
  objective = recipe(placement()).objective
  losses = objective.losses(types.SimpleNamespace(transformer=Model()), values["latents"], values, sigma, keys)
  clean = values["latents"]
  np.testing.assert_array_equal(seen["timestep"], sigma * 1000)
  np.testing.assert_array_equal(seen["latents"][0], clean[0])  # sigma 0: no noise
  noise = np.stack([np.asarray(jax.random.normal(key, LATENTS)) for key in keys])
  np.testing.assert_allclose(seen["latents"][-1], noise[-1], atol=1e-6)  # sigma 1: nothing else
  expected = np.square(2 * seen["latents"] - (noise - clean)).reshape(B, -1).mean(1)
  np.testing.assert_allclose(np.asarray(losses), expected, rtol=1e-5)


def test_some_latent_frames_at_their_own_places():
  clean = np.random.default_rng(1).standard_normal((B, 5, 4, 4, 2), np.float32)
  seen = {}

  class Model:
    def text_keys_values(self, text_BTE):
      return text_BTE

    def __call__(self, latents, timestep_B, text_kv, *, frames_BF, clip_frames, **_):
      seen.update(latents=latents, sigma=timestep_B / 1000, frames=frames_BF, clip_frames=clip_frames)
      return latents, None

  objective = recipe(placement(), latent_frames=3, text_dropout=0.0).objective
  keys = jax.random.split(jax.random.key(0), B)
  objective.loss(types.SimpleNamespace(transformer=Model()), {"latents": clean, "text": batch()["text"]}, keys, {})
  frames = np.asarray(seen["frames"])
  assert seen["clip_frames"] == 5 and frames.shape == (B, 3) and (frames[:, 0] == 0).all() and frames.max() == 4
  assert (np.diff(frames, axis=1) > 0).all() and len({tuple(row) for row in frames}) > 2
  # What is left of the clean latents once the noise is subtracted tells which frames they are.
  noise = np.stack([np.asarray(jax.random.normal(jax.random.split(key, 3)[1], (3, 4, 4, 2))) for key in keys])
  sigma = np.asarray(seen["sigma"]).reshape(-1, 1, 1, 1, 1)
  kept = np.stack([sample[row] for sample, row in zip(clean, frames, strict=True)])
  np.testing.assert_allclose(np.asarray(seen["latents"]) - sigma * noise, (1 - sigma) * kept, atol=1e-5)


def test_flops_count_the_frames_that_are_trained_on():
  def clips(frames):
    return {"latents": np.zeros((B, frames, 4, 4, 2)), "text": np.zeros((B, *TEXT))}

  some = metrics.batch_flops(config(train_latent_frames=2), clips(4))
  assert some == metrics.batch_flops(config(), clips(2)) < metrics.batch_flops(config(), clips(4))


# --- the same numbers in another order


@pytest.mark.parametrize("parts", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_accumulation_equals_the_large_batch(parts):
  assert_same(run(accumulation=parts), 1e-5)


@pytest.mark.parametrize("remat", ["minimal", pytest.param("full", marks=pytest.mark.slow)])
def test_remat_changes_no_number(remat):
  assert_same(run(remat=remat), 1e-6)


@pytest.mark.devices(8)
@pytest.mark.parametrize("axes", [pytest.param({"fsdp": 8}, marks=pytest.mark.slow), {"fsdp": 4, "context": 2},
                                  pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)],
                         ids=lambda axes: " ".join(f"{axis}{size}" for axis, size in axes.items()))
def test_eight_devices_equal_one(axes):
  assert_same(run(placement(8, **axes), accumulation=1 if axes == {"fsdp": 8} else 2), 1e-5)


# --- optimizer, average, adapters


def test_learning_rate():
  warm = state_lib.learning_rate(config(warmup_steps=3))
  np.testing.assert_allclose([float(warm(n)) for n in range(5)], [0.0025, 0.005, 0.0075, 0.01, 0.01], rtol=1e-6)
  cosine = state_lib.learning_rate(config(learning_rate_schedule="cosine", steps=10, warmup_steps=2))
  np.testing.assert_allclose([float(cosine(n)) for n in (2, 6, 10)], [0.01, 0.0055, 0.001], rtol=1e-5)


def test_clipping_and_decay():
  settings = config(adam_weight_decay=0.5, gradient_clipping_threshold=1.0)
  optimizer = state_lib.make_optimizer(settings)
  values = {"a.kernel": np.full(2, 3.0, np.float32), "a.bias": np.full(2, 3.0, np.float32)}
  zero = {name: np.zeros(2, np.float32) for name in values}
  updates, _ = optimizer.update(zero, optimizer.init(values), values)
  np.testing.assert_allclose(updates["a.kernel"], -0.01 * 0.5 * 3.0, rtol=1e-6)
  np.testing.assert_array_equal(updates["a.bias"], 0)
  huge = {name: np.full(2, 1e6, np.float32) for name in values}
  _, after = optimizer.update(huge, optimizer.init(values), values)
  mean = next(s for s in jax.tree.leaves(after, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")).mu
  assert np.linalg.norm(np.concatenate(list(mean.values()))) == pytest.approx(0.1, rel=1e-5)  # (1 - b1) × the threshold


def test_muon_makes_the_updates_of_block_matrices_orthogonal():
  draw = np.random.default_rng(0)
  shapes = {"transformer.blocks.ffn.up.kernel": (2, 8, 32), "transformer.proj_out.kernel": (8, 16),
            "transformer.blocks.ffn.up.bias": (2, 32)}
  values = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
  gradient = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
  settings = {"adam_weight_decay": 0.0, "gradient_clipping_threshold": 0.0}
  updates = {}
  for opt_type in ("muon", "adamw"):
    optimizer = state_lib.make_optimizer(config(opt_type=opt_type, **settings))
    updates[opt_type], _ = optimizer.update(gradient, optimizer.init(values), values)
  for name in list(shapes)[1:]:  # Nesterov: 0.9 · 0.1 / (1 - 0.9²) + 1 of the gradient
    ratio = np.asarray(updates["muon"][name] / updates["adamw"][name])
    np.testing.assert_allclose(ratio, 1.4737, rtol=1e-3)
  mine = np.asarray(updates["muon"]["transformer.blocks.ffn.up.kernel"])
  for update, slope in zip(mine, gradient["transformer.blocks.ffn.up.kernel"], strict=True):
    singular = np.linalg.svd(update, compute_uv=False) / (0.01 * 0.2 * np.sqrt(32))
    assert 0.6 < singular.min() and singular.max() < 1.3  # five Newton-Schulz steps come this near to 1
    assert (update * slope).sum() < 0  # downhill
  assert np.sqrt(np.square(mine).mean()) == pytest.approx(0.01 * 0.2, rel=0.2)  # AdamW's size, whatever the shape


def test_muon_takes_the_inner_convolutions_of_the_vae():
  draw = np.random.default_rng(0)
  shapes = {"vae.decoder.conv_in.conv.kernel": (3, 3, 3, 2, 4), "vae.decoder.mid_block.conv1.kernel": (3, 3, 3, 2, 4),
            "vae.encoder.mid_block.conv1.kernel": (3, 3, 2, 4)}
  values = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
  zero_encoder = {name: value * ("encoder" not in name) for name, value in values.items()}
  optimizer = state_lib.make_optimizer(config(opt_type="muon", vae_freeze_encoder=True, adam_weight_decay=0.5))
  updates, _ = optimizer.update(zero_encoder, optimizer.init(values), values)
  name = "vae.decoder.mid_block.conv1.kernel"
  inner = np.asarray(updates[name] + 0.01 * 0.5 * values[name])
  singular = np.linalg.svd(inner.reshape(-1, 4), compute_uv=False)
  assert singular.max() < 2 * singular.min()  # orthogonal, but for five Newton-Schulz steps
  assert np.ptp(np.abs(updates["vae.decoder.conv_in.conv.kernel"])) < 1e-4  # Adam's first step: one size
  np.testing.assert_array_equal(updates["vae.encoder.mid_block.conv1.kernel"], 0)  # frozen: neither moves nor decays


def test_average_of_the_weights():
  state, _ = run(steps=1, ema_decay=0.75)
  template = state_lib.make_template(config(), placement())
  for name, start in weights(template, template.trained).items():
    expected = 0.75 * np.asarray(start) + 0.25 * np.asarray(state.weights[name])
    np.testing.assert_allclose(np.asarray(state.ema[name]), expected, rtol=1e-5, atol=1e-6)


def test_a_lora_trains_its_adapters_alone():
  settings = config(lora_rank=2, lora_alpha=4.0)
  template = state_lib.make_template(settings, placement())
  assert len(template.trained) == 2 * 10 and all(name.startswith("transformer.blocks.") for name in template.trained)
  state, metrics = run(settings=settings, steps=3)
  before = weights(template, template.trained)
  assert set(state.weights) == set(before)
  assert all(np.abs(np.asarray(state.weights[name]) - np.asarray(value)).max() > 1e-4 for name, value in before.items())
  assert metrics[0]["loss"] != metrics[1]["loss"]


def test_evaluation_repeats_itself_and_tells_levels_apart():
  place = placement()
  template = state_lib.make_template(config(), place)
  values = weights(template, template.trained)
  eval_step = step.jit_eval_step(template, recipe(place), 3, place)
  losses = [np.asarray(eval_step(values, {}, batch(), np.uint32(number))) for number in (0, 0, 1)]
  np.testing.assert_array_equal(losses[0], losses[1])
  assert losses[0].shape == (3,) and len(set(losses[0].tolist())) == 3
  assert not np.array_equal(losses[0], losses[2])

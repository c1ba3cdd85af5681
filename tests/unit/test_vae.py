"""The video autoencoder against diffusers' AutoencoderKLWan (goldens by tests/golden/make_vae.py), and how it streams.

Dimensions: B batch, T video frames, F latent frames, H W picture or latent size, C channels.
"""

import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from MaxText.models import vae as vae_module
from MaxText.models import vae_layers, vae_tiling
from MaxText.models.vae import VaeConfig, WanVae, decode_frames, encode_video

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "vae"
TINY = VaeConfig(base_dim=4, z_dim=4, dim_mult=(1, 2), num_res_blocks=1, temporal_downsample=(True,),
                 latents_mean=(0.1, -0.2, 0.3, 0.0), latents_std=(1.0, 2.0, 0.5, 1.5))


def our_name(name: str) -> str:
  stem, leaf = name.rsplit(".", 1)
  return f"{stem}.{dict(weight='kernel', gamma='scale').get(leaf, leaf)}"


def our_layout(name: str, shape_or_array):
  """The reference's array in our order of dimensions: (out, in, …) -> (…, in, out), gamma without trailing ones."""
  x = np.asarray(shape_or_array)
  if name.endswith("weight"):
    return np.moveaxis(x, (0, 1), (-1, -2))
  return x.reshape(-1)


def abstract(config: VaeConfig, **dtypes) -> WanVae:
  return nnx.eval_shape(lambda: WanVae(config, rngs=nnx.Rngs(0), **dtypes))


def load(vae: WanVae, weights: dict[str, np.ndarray]) -> WanVae:
  """Fills an abstract model with weights of the reference's names."""
  graphdef, state = nnx.split(vae)
  flat = dict(nnx.to_flat_state(state))
  arrays = {our_name(name): our_layout(name, x) for name, x in weights.items()}
  assert {".".join(map(str, path)) for path in flat} == set(arrays)
  for path, leaf in flat.items():
    array = arrays[".".join(map(str, path))]
    assert leaf.shape == array.shape, path
    flat[path] = leaf.replace(jnp.asarray(array, leaf.dtype))
  return nnx.merge(graphdef, nnx.from_flat_state(flat))


def golden_vae(name: str, dtype=jnp.float32) -> WanVae:
  config = VaeConfig.from_config(json.loads((GOLDEN / f"{name}.json").read_text()))
  return load(abstract(config, dtype=dtype), load_file(GOLDEN / f"{name}.safetensors"))


def golden_video() -> np.ndarray:
  return np.load(GOLDEN / "video.npz")["video"][None].astype(np.float32) / 127.5 - 1


def tiny_vae(**dtypes) -> WanVae:
  """A random model of strides 2 in time and space."""
  rng = np.random.default_rng(0)

  def fill(leaf):
    fan_in = np.prod(leaf.shape[:-1])
    return jnp.asarray(rng.normal(leaf.ndim == 1, 0.3 if leaf.ndim == 1 else fan_in**-0.5, leaf.shape), leaf.dtype)

  graphdef, state = nnx.split(abstract(TINY, **dtypes))
  return nnx.merge(graphdef, jax.tree.map(fill, state))


@pytest.fixture(scope="module")
def vae() -> WanVae:
  return tiny_vae()


def random(*shape) -> np.ndarray:
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def decode(vae, latents, **kwargs) -> np.ndarray:
  return np.concatenate(list(decode_frames(vae, latents, **kwargs)), axis=1)


def relative(a, b) -> float:
  return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


@pytest.fixture(scope="module", params=["full", "small"])
def golden(request):
  """(arrays, model) of one golden file."""
  return np.load(GOLDEN / f"{request.param}.npz"), golden_vae(request.param)


@pytest.fixture
def quick_compilation():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("num_frames, remat", [(1, False), (5, True)])
def test_reconstruction_in_one_program_equals_streaming(num_frames, remat, quick_compilation):
  graphdef, state = nnx.split(tiny_vae())
  video = np.clip(random(2, num_frames, 12, 12, 3), -1, 1)

  def error(state, video):
    frames, mean, log_variance = vae_module.reconstruct(nnx.merge(graphdef, state), video, jnp.zeros, remat=remat)
    return jnp.mean(jnp.square(frames - video)), (frames, mean, log_variance)

  (_, (frames, mean, log_variance)), gradient = jax.jit(jax.value_and_grad(error, has_aux=True))(state, video)
  vae = nnx.merge(graphdef, state)
  latents = encode_video(vae, video)
  scale, shift = (np.asarray(x, np.float32) for x in (vae.config.latents_std, vae.config.latents_mean))
  np.testing.assert_allclose(np.asarray(latents) * scale + shift, mean, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(decode(vae, latents), np.clip(frames, -1, 1), rtol=1e-4, atol=1e-4)
  assert log_variance.shape == mean.shape
  zero = {path[-2] for path, leaf in nnx.to_flat_state(gradient) if not np.abs(leaf.get_value()).max() > 0}
  # Through a single frame no gradient reaches the convolutions over time, nor through the mean that of the variance.
  assert zero <= ({"time_conv"} if num_frames == 1 else set())


@pytest.mark.parametrize("num_frames", [1, 5, 13])
def test_equals_the_reference(golden, num_frames):
  golden, vae = golden
  num_latents = 1 + (num_frames - 1) // vae.config.temporal_stride
  height, width = 48 // vae.config.spatial_stride, 80 // vae.config.spatial_stride

  encoded = encode_video(vae, golden_video()[:, :num_frames])
  assert encoded.shape == (1, num_latents, height, width, vae.config.z_dim)
  assert relative(encoded, golden["encoded"][:, :num_latents]) < 1e-5

  frames = decode(vae, golden["latents"][:, :num_latents])
  assert frames.shape == (1, num_frames, 48, 80, 3) and frames.dtype == np.float32
  expected = golden["frames"][:, :num_frames]
  assert relative(frames[:, :, :, ::2], expected) < 1e-5
  assert np.abs(frames[:, :, :, ::2] - expected).max() < 1e-4


def test_full_size_has_the_reference_names_and_shapes():
  vae = abstract(VaeConfig(), weight_dtype=jnp.bfloat16)
  ours = {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in nnx.to_flat_state(nnx.state(vae))}
  shapes = json.loads((GOLDEN / "wan2.1_shapes.json").read_text())
  theirs = {our_name(name): our_layout(name, np.broadcast_to(0, shape)).shape for name, shape in shapes.items()}
  assert ours == theirs
  assert len(ours) == 194 and sum(map(np.prod, ours.values())) == 126_892_531
  for path, leaf in nnx.to_flat_state(nnx.state(vae)):
    assert leaf.dtype == (jnp.float32 if path[-1] == "scale" else jnp.bfloat16), path
    assert len(leaf.get_metadata("axes")) == leaf.ndim, path


def test_frames_do_not_depend_on_later_frames_or_other_videos(vae):
  latents = random(2, 4, 6, 6, 4)
  whole = decode(vae, latents)
  assert whole.shape == (2, 7, 12, 12, 3)
  np.testing.assert_array_equal(decode(vae, latents[:, :2]), whole[:, :3])
  one = np.eye(4, dtype=np.float32)
  later = decode(vae, latents + one[2, :, None, None, None])  # the third latent frame of both videos
  np.testing.assert_array_equal(later[:, :3], whole[:, :3])
  assert np.abs(later[:, 3:] - whole[:, 3:]).max(axis=(0, 2, 3, 4)).min() > 1e-3  # the cache carries it to all later ones
  other = decode(vae, latents + one[0, :2, None, None, None, None])  # the first video
  np.testing.assert_array_equal(other[1], whole[1])


def test_bfloat16_is_close_to_float32(vae):
  half = tiny_vae(dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  assert half.decoder.conv_in.kernel.dtype == jnp.bfloat16 and half.decoder.norm_out.scale.dtype == jnp.float32
  latents = random(2, 2, 6, 6, 4)
  frames = decode(half, latents)
  assert frames.dtype == np.float32
  assert 1e-4 < relative(frames, decode(vae, latents)) < 0.05  # 8 bits of mantissa through 15 layers


def test_two_programs_serve_any_number_of_frames(vae):
  def count():
    return np.array([vae_module.first_chunk._cache_size(), vae_module.next_chunk._cache_size()])

  start = count()
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # such as "donated buffers were not usable"
    decode(vae, random(2, 2, 6, 6, 4))
    encode_video(vae, random(2, 3, 12, 12, 3))
    compiled = count()
    for num_latents in (1, 3, 6):
      decode(vae, random(2, num_latents, 6, 6, 4))
      encode_video(vae, random(2, 2 * num_latents - 1, 12, 12, 3))
    other = jax.tree.map(lambda x: 2 * x, vae)  # other weights of the same architecture
    decode(other, random(2, 3, 6, 6, 4))
  assert (compiled - start <= 2).all()  # decode and encode, one of each kind
  assert (count() == compiled).all()


def test_the_cache_keeps_its_size_and_is_reused(vae):
  graphdef, state = nnx.split(vae)
  latents = jnp.asarray(random(2, 1, 6, 6, 4))
  _, first = vae_module.first_chunk("decode", graphdef, state, latents)
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), first)
  _, second = vae_module.next_chunk("decode", graphdef, state, latents, first)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), second) == shapes
  assert all(x.is_deleted() for x in first)  # donated: one cache lives at a time


def test_full_size_decodes_abstractly():
  """Shapes of one chunk at 720p, and the size of the cache that the documentation of vae.py states."""
  graphdef, state = nnx.split(abstract(VaeConfig()))
  latents = jax.ShapeDtypeStruct((1, 1, 90, 160, 16), jnp.float32)
  frames, cache = jax.eval_shape(lambda s, z: vae_module.first_chunk("decode", graphdef, s, z), state, latents)
  assert frames.shape == (1, 1, 720, 1280, 3)
  further = jax.eval_shape(lambda s, z, c: vae_module.next_chunk("decode", graphdef, s, z, c), state, latents, cache)
  frames, after = further
  assert frames.shape == (1, 4, 720, 1280, 3)
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)
  values_a_pixel = sum(x.size for x in cache) / (720 * 1280)
  assert values_a_pixel == pytest.approx(2365, rel=0.01)


@pytest.mark.parametrize("size, time_stride", [((3, 3, 3), 1), ((3, 1, 1), 1), ((3, 1, 1), 2)])
def test_both_forms_of_a_convolution_over_time_agree(size, time_stride):
  """Only one of them runs on the machine of the other tests."""
  x, kernel = random(2, 7, 5, 4, 3), random(*size, 3, 6)
  ours = vae_layers.conv3d(x, kernel, time_stride)
  assert ours.shape == (2, 3 if time_stride == 2 else 5, 5, 4, 6)
  np.testing.assert_allclose(vae_layers.conv3d_by_frames(x, kernel, time_stride), ours, atol=1e-5)


def test_attention_in_blocks_equals_attention_at_once(monkeypatch):
  q, k, v = random(3, 2, 37, 8)
  whole = vae_layers.attend_picture(q, k, v)
  monkeypatch.setattr(vae_layers, "_ATTENTION_ROWS", 10)
  np.testing.assert_allclose(vae_layers.attend_picture(q, k, v), whole, atol=1e-6)


def test_tiles_cover_a_line_evenly():
  assert vae_tiling.spread(10, 16, 4) == ((0, 10),)
  assert vae_tiling.spread(16, 16, 4) == ((0, 16),)
  assert vae_tiling.spread(17, 16, 4) == ((0, 16), (1, 17))
  assert vae_tiling.spread(28, 16, 4) == ((0, 16), (12, 28))
  assert vae_tiling.spread(30, 16, 4) == ((0, 16), (7, 23), (14, 30))
  for length in range(17, 200):
    spans = vae_tiling.spread(length, 16, 8)
    assert spans[0][0] == 0 and spans[-1][1] == length
    assert all(stop - start == 16 for start, stop in spans)
    assert all(a[1] - b[0] >= 8 and b[0] > a[0] for a, b in zip(spans, spans[1:], strict=False))
    total = np.zeros(length)
    for (start, stop), weight in zip(spans, vae_tiling.blend_weights(spans), strict=True):
      total[start:stop] += weight
    np.testing.assert_allclose(total, 1, atol=1e-6)


def test_blending_is_linear():
  first, second = vae_tiling.blend_weights([(0, 6), (2, 8)])
  np.testing.assert_allclose(first, [1, 1, 0.875, 0.625, 0.375, 0.125])
  np.testing.assert_allclose(second, [0.125, 0.375, 0.625, 0.875, 1, 1])


def test_one_tile_is_exact(vae):
  latents = random(2, 2, 6, 6, 4)
  np.testing.assert_array_equal(decode(vae, latents, tile_size=12, tile_overlap=4), decode(vae, latents))
  np.testing.assert_array_equal(decode(vae, latents, tile_size=0), decode(vae, latents))


def test_tiles_blend_without_seams(vae):
  """On a smooth picture of 2 × 3 tiles."""
  y, x = np.meshgrid(np.linspace(0, 1, 8), np.linspace(0, 1, 13), indexing="ij")
  smooth = np.stack([np.sin(2 * y + x), np.cos(y - 2 * x), y * x, y + x], axis=-1).astype(np.float32)
  latents = np.stack([smooth, 0.9 * smooth, 0.8 * smooth])[None].repeat(2, axis=0)  # [2, 3, 8, 13, 4]
  whole = decode(vae, latents)
  tiled = decode(vae, latents, tile_size=12, tile_overlap=4)
  assert tiled.shape == whole.shape == (2, 5, 16, 26, 3)
  # Not equal: at a tile's border a convolution sees zeros, and attention one tile only. But close, without steps: from
  # pixel to pixel the picture changes no more than the untiled one does.
  assert 1e-4 < relative(tiled, whole) < 0.06
  for axis in (2, 3):
    assert np.abs(np.diff(tiled, axis=axis)).max() < 1.1 * np.abs(np.diff(whole, axis=axis)).max()

  assert 1e-4 < relative(encode_video(vae, whole, tile_size=12, tile_overlap=4), encode_video(vae, whole)) < 0.1


@pytest.mark.parametrize("tile_size, tile_overlap, message", [
  (13, 4, "multiples of 2"), (12, 3, "multiples of 2"), (12, 8, "half of tile_size=12"), (12, 0, "positive"),
])
def test_impossible_tiles_are_refused(vae, tile_size, tile_overlap, message):
  with pytest.raises(ValueError, match=message):
    decode_frames(vae, jnp.zeros((1, 1, 24, 20, 4)), tile_size=tile_size, tile_overlap=tile_overlap)


@pytest.mark.parametrize("shape, message", [
  ((1, 4, 8, 8, 3), "num_frames=4: .*2·n \\+ 1 frames, such as 3"),
  ((1, 5, 9, 8, 3), "height=9, width=8: .*multiples of 2"),
  ((1, 5, 8, 8, 4), "video must be"),
])
def test_impossible_videos_are_refused(vae, shape, message):
  with pytest.raises(ValueError, match=message):
    encode_video(vae, jnp.zeros(shape))


def test_latents_of_another_model_are_refused(vae):
  with pytest.raises(ValueError, match=r"latents must be \[B, F, H, W, 4\], got shape \(1, 2, 2, 2, 16\)"):
    decode_frames(vae, jnp.zeros((1, 2, 2, 2, 16)))


@pytest.mark.parametrize("changes, message", [
  ({"is_residual": True, "z_dim": 48}, "is_residual=True.*48-channel"),
  ({"patch_size": 2}, "patch_size=2"),
  ({"decoder_base_dim": 256}, "decoder_base_dim=256"),
  ({"attn_scales": [0.5]}, "attn_scales"),
  ({"_class_name": "AutoencoderKL"}, "AutoencoderKLWan"),
  ({"temperal_downsample": [True]}, "needs one entry for each step"),
  ({"latents_mean": [0.0]}, "latents_mean has 1 numbers for z_dim=16"),
  ({"scale_factor_spatial": 16}, "scale_factor_spatial=16.* make it 8"),
])
def test_other_autoencoders_are_refused(changes, message):
  config = json.loads((GOLDEN / "full.json").read_text())
  with pytest.raises(ValueError, match=message):
    VaeConfig.from_config(config | changes)


def test_config_of_the_release_is_the_default():
  """The published folder carries fewer keys than diffusers writes today."""
  release = {"_class_name": "AutoencoderKLWan", "_diffusers_version": "0.33.0.dev0", "attn_scales": [], "base_dim": 96,
             "dim_mult": [1, 2, 4, 4], "dropout": 0.0, "num_res_blocks": 2, "temperal_downsample": [False, True, True],
             "z_dim": 16}
  assert VaeConfig.from_config(release) == VaeConfig() and hash(VaeConfig.from_config(release)) == hash(VaeConfig())

"""The UMT5 encoder against UMT5EncoderModel (tests/golden/make_text.py)."""

import dataclasses
import json
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.models import umt5
from MaxText.models.tokenizer import Tokenizer

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden", "text")

# Reference's name inside a block, ours, whether it is a matrix stored transposed.
BLOCK_NAMES = {
  "layer.0.SelfAttention.q.weight": ("attention.q.kernel", True),
  "layer.0.SelfAttention.k.weight": ("attention.k.kernel", True),
  "layer.0.SelfAttention.v.weight": ("attention.v.kernel", True),
  "layer.0.SelfAttention.o.weight": ("attention.o.kernel", True),
  "layer.0.SelfAttention.relative_attention_bias.weight": ("attention.relative_bias", False),
  "layer.0.layer_norm.weight": ("attention_norm.scale", False),
  "layer.1.DenseReluDense.wi_0.weight": ("ffn.gate.kernel", True),
  "layer.1.DenseReluDense.wi_1.weight": ("ffn.up.kernel", True),
  "layer.1.DenseReluDense.wo.weight": ("ffn.down.kernel", True),
  "layer.1.layer_norm.weight": ("ffn_norm.scale", False),
}


def config_of(sizes) -> umt5.Umt5Config:
  renamed = {"relative_attention_num_buckets": "num_buckets", "relative_attention_max_distance": "max_distance"}
  return umt5.Umt5Config(**{renamed.get(key, key): value for key, value in sizes.items()})


def build(config, weights, **kwargs):
  """An encoder that holds the reference's weights."""
  abstract = nnx.eval_shape(lambda: umt5.Umt5Encoder(config, rngs=nnx.Rngs(0), **kwargs))
  values = {
    "token_embedding.embedding": weights["shared.weight"],
    "final_norm.scale": weights["encoder.final_layer_norm.weight"],
  }
  for name, (ours, transposed) in BLOCK_NAMES.items():
    stack = np.stack([weights[f"encoder.block.{layer}.{name}"] for layer in range(config.num_layers)])
    values[f"blocks.{ours}"] = stack.swapaxes(1, 2) if transposed else stack
  graph, state = nnx.split(abstract)

  def fill(path, leaf):
    value = values.pop(".".join(path))
    assert value.shape == leaf.shape, path
    return leaf.replace(jnp.asarray(value, leaf.dtype))

  state = nnx.from_flat_state([(path, fill(path, leaf)) for path, leaf in nnx.to_flat_state(state)])
  assert not values
  return nnx.merge(graph, state)


def load(name, **kwargs):
  with open(f"{GOLDEN}/encoder_{name}.json") as stream:
    sizes = json.load(stream)
  golden = np.load(f"{GOLDEN}/encoder_{name}.npz")
  return build(config_of(sizes), golden, **kwargs), golden


def run(encoder, ids, mask):
  graph, state = nnx.split(encoder)
  return umt5.jitted_encode("cpu")(graph, state, ids, mask)


def relative_error(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name", ["long", "buckets"])
def test_equals_reference_in_float32(name):
  encoder, golden = load(name)
  output = run(encoder, golden["ids"], golden["mask"])
  for b, row_mask in enumerate(golden["mask"]):
    assert relative_error(output[b][row_mask], golden["output"][b][row_mask]) < 1e-5


def test_bfloat16_weights_and_compute_stay_close():
  encoder, golden = load("long", dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  output = run(encoder, golden["ids"], golden["mask"])
  assert output.dtype == jnp.bfloat16
  mask = golden["mask"]
  assert relative_error(output[mask], golden["output"][mask]) < 0.03


def test_large_activations_do_not_overflow_in_bfloat16():
  """T5 residuals reach 1e5 and more, where float16 overflows."""
  encoder, golden = load("long", dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  encoder.blocks.ffn.down.kernel[...] *= 1e6
  encoder.blocks.attention.q.kernel[...] *= 1e3
  output = run(encoder, golden["ids"], golden["mask"])
  assert bool(jnp.isfinite(output).all())
  assert float(jnp.abs(output[golden["mask"]].astype(jnp.float32)).mean()) > 0.1


def test_buckets_equal_reference():
  golden = np.load(f"{GOLDEN}/buckets.npz")
  for setting in golden.files:
    num_buckets, max_distance = map(int, setting.split("_"))
    ours = umt5.relative_buckets(701, num_buckets, max_distance)
    np.testing.assert_array_equal(np.concatenate([ours[700, :700], ours[0]]), golden[setting])
    np.testing.assert_array_equal(ours[350], golden[setting][350:1051])


@pytest.mark.parametrize("wrong", [dict(num_buckets=3), dict(max_distance=8), dict(num_buckets=0)])
def test_impossible_buckets_are_refused(wrong):
  with pytest.raises(ValueError, match="num_buckets"):
    umt5.Umt5Config(**wrong)


def test_padding_changes_nothing():
  encoder, golden = load("buckets")
  length = int(golden["mask"][0].sum())
  alone = run(encoder, golden["ids"][:1, :length], golden["mask"][:1, :length])
  padded = run(encoder, golden["ids"], golden["mask"])[:1, :length]
  np.testing.assert_allclose(alone, padded, rtol=0, atol=2e-5)


def test_encode_prompts_equals_reference_pipeline():
  golden = np.load(f"{GOLDEN}/prompt_embeddings.npz")
  with open(f"{GOLDEN}/tokens.json") as stream:
    prompts = json.load(stream)["prompts"]
  small, weights = load("long")
  encoder = build(dataclasses.replace(small.config, vocab_size=100), dict(weights) | {"shared.weight": golden["table"]})
  tokenizer = Tokenizer(f"{GOLDEN}/tokenizer_plain")
  embeddings = umt5.encode_prompts(encoder, tokenizer, [prompts[0], "", prompts[2], prompts[-1]])
  assert embeddings.shape == (4, 512, 24)
  assert relative_error(embeddings[:3, :64], golden["short"]) < 1e-5
  assert relative_error(embeddings[3, ::8], golden["long"]) < 1e-5
  assert golden["short_tail"] == 0 and not embeddings[:3, 64:].any()
  # Alone, the short ones run at 64 positions instead of 512, with the same result.
  alone = umt5.encode_prompts(encoder, tokenizer, [prompts[0], "", prompts[2]])
  np.testing.assert_allclose(alone, embeddings[:3], rtol=0, atol=2e-5)
  assert not alone[:, 64:].any()


def test_ids_beyond_the_vocabulary_are_refused():
  encoder, _ = load("long")
  with pytest.raises(ValueError, match="vocabulary of 50"):
    umt5.encode_prompts(encoder, Tokenizer(f"{GOLDEN}/tokenizer_plain"), ["<extra_id_0> a"])


def abstract_xxl(**kwargs):
  return nnx.eval_shape(lambda: umt5.Umt5Encoder(umt5.Umt5Config(), rngs=nnx.Rngs(0), **kwargs))


def test_full_size_has_the_reference_names_and_shapes():
  with open(f"{GOLDEN}/umt5_xxl_shapes.json") as stream:
    golden = json.load(stream)
  ours = {".".join(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(abstract_xxl(weight_dtype=jnp.bfloat16)))}
  assert sum(math.prod(leaf.shape) for leaf in ours.values()) == golden["parameters"]
  assert sum(24 if name.startswith("blocks.") else 1 for name in ours) == golden["tensors"]
  for name, shape in golden["shapes"].items():
    block = re.fullmatch(r"encoder\.block\.0\.(.*)", name)
    if block:
      our_name, transposed = BLOCK_NAMES[block[1]]
      leaf, want = ours[f"blocks.{our_name}"], (24, *(shape[::-1] if transposed else shape))
    else:
      leaf, want = ours["token_embedding.embedding" if name == "shared.weight" else "final_norm.scale"], tuple(shape)
    assert leaf.shape == want, name
    assert len(leaf.axes) == len(want)
    assert leaf.dtype == (jnp.float32 if name.endswith("norm.weight") else jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_full_size_encodes_without_a_second_copy_of_the_weights(dtype):
  """bfloat16 weights are cast a layer at a time: temporary memory is a layer in float32 (0.72 GiB), not 24."""
  graph, state = nnx.split(abstract_xxl(dtype=dtype, weight_dtype=jnp.bfloat16))
  shape = (2, 128)
  encode = umt5.jitted_encode("cpu")
  lowered = encode.lower(graph, state, jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool))
  memory = lowered.compile().memory_analysis()
  assert memory.argument_size_in_bytes > 10 * 2**30
  assert memory.temp_size_in_bytes < 1.2 * 2**30

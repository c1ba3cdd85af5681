"""UMT5 text encoder: token ids to the embeddings that condition the video model.

Pre-norm transformer with RMS norms, bidirectional attention without the 1/sqrt(D) factor, a relative position bias in
every layer (T5 has it in the first only) and a gated GELU. Source: UniMax, arXiv:2304.09151; the numbers are held to
UMT5EncoderModel's.

The residual stream and the softmax are float32 whatever `dtype` is: T5 residuals grow to thousands, where bfloat16 has
steps of 16. Weights are stored in `weight_dtype` and cast to `dtype` one layer at a time, so that an encoder stored in
bfloat16 never holds a float32 copy of more than a layer.

Dimensions: B batch, T text tokens (queries), U text tokens (keys), N heads, D head dim, E width, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config_types import ConfigError
from MaxText.models import layers

if TYPE_CHECKING:
  from MaxText.models.tokenizer import Tokenizer

# Prompts are encoded at the smallest multiple of this that holds the longest one: few compiled lengths, little padding.
LENGTH_STEP = 64


@dataclasses.dataclass(frozen=True)
class Umt5Config:
  """Shape of the encoder; the defaults are UMT5-XXL, which every Wan model uses."""

  vocab_size: int = 256384
  d_model: int = 4096
  d_kv: int = 64
  d_ff: int = 10240
  num_layers: int = 24
  num_heads: int = 64
  num_buckets: int = 32
  max_distance: int = 128
  eps: float = 1e-6

  def __post_init__(self):
    # A quarter of the buckets counts single tokens, and the logarithm starts where they end.
    if self.num_buckets < 4 or self.max_distance <= self.num_buckets // 4:
      raise ValueError(
        f"num_buckets = {self.num_buckets} and max_distance = {self.max_distance} do not fit: at least 4 buckets are "
        "needed, and a distance above a quarter of their number"
      )


def relative_buckets(length: int, num_buckets: int, max_distance: int) -> np.ndarray:
  """Bucket of every (query, key) pair: int32 [length, length].

  Half of the buckets are for keys after the query. Of each half, the first half counts single tokens and the rest grow
  logarithmically up to `max_distance`; farther keys share the last bucket. Computed by numpy in float32, as the
  reference rounds it, because an accelerator's approximate logarithm can fall on the other side of a bucket's edge.
  """
  offset_TU = np.arange(length)[None, :] - np.arange(length)[:, None]
  half = num_buckets // 2
  exact = half // 2
  distance_TU = np.abs(offset_TU)
  ratio_TU = np.log(np.maximum(distance_TU, 1).astype(np.float32) / np.float32(exact))
  ratio_TU = ratio_TU / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
  far_TU = np.minimum(exact + ratio_TU.astype(np.int64), half - 1)
  bucket_TU = np.where(distance_TU < exact, distance_TU, far_TU)
  return (bucket_TU + half * (offset_TU > 0)).astype(np.int32)


class Attention(nnx.Module):
  """Self-attention with a learned bias per head and relative-position bucket."""

  def __init__(self, make: layers.ParamMaker, config: Umt5Config):
    inner = config.num_heads * config.d_kv
    self.num_heads = config.num_heads
    # Nothing divides the scores by sqrt(D), so the queries start that much smaller.
    query_init = layers.normal(1.0 / math.sqrt(config.d_model * config.d_kv))
    self.q = layers.Linear(make, config.d_model, inner, ("embed", "heads"), bias=False, init=query_init)
    self.k = layers.Linear(make, config.d_model, inner, ("embed", "heads"), bias=False)
    self.v = layers.Linear(make, config.d_model, inner, ("embed", "heads"), bias=False)
    self.o = layers.Linear(make, inner, config.d_model, ("heads", "embed"), bias=False)
    self.relative_bias = make((config.num_buckets, config.num_heads), (None, None), layers.normal(0.1))

  def __call__(self, x_BTE, bucket_TU, key_mask_BU):
    q_BTND, k_BUND, v_BUND = (
      layer(x_BTE).reshape(*x_BTE.shape[:2], self.num_heads, -1) for layer in (self.q, self.k, self.v)
    )
    scores_BNTU = jnp.einsum("BTND,BUND->BNTU", q_BTND, k_BUND, preferred_element_type=jnp.float32)
    bias_TUN = self.relative_bias[...].astype(jnp.float32)[bucket_TU]
    scores_BNTU += bias_TUN.transpose(2, 0, 1)
    scores_BNTU = jnp.where(key_mask_BU[:, None, None, :], scores_BNTU, jnp.finfo(jnp.float32).min)
    weights_BNTU = jax.nn.softmax(scores_BNTU, axis=-1).astype(v_BUND.dtype)
    out_BTND = jnp.einsum("BNTU,BUND->BTND", weights_BNTU, v_BUND)
    return self.o(out_BTND.reshape(*x_BTE.shape[:2], -1))


class FeedForward(nnx.Module):
  """down(gelu(gate(x)) · up(x)), GELU by its tanh approximation."""

  def __init__(self, make: layers.ParamMaker, config: Umt5Config):
    self.gate = layers.Linear(make, config.d_model, config.d_ff, ("embed", "mlp"), bias=False)
    self.up = layers.Linear(make, config.d_model, config.d_ff, ("embed", "mlp"), bias=False)
    self.down = layers.Linear(make, config.d_ff, config.d_model, ("mlp", "embed"), bias=False)

  def __call__(self, x_BTE):
    return self.down(jax.nn.gelu(self.gate(x_BTE), approximate=True) * self.up(x_BTE))


class Block(nnx.Module):
  """One encoder layer; the residual stream stays float32."""

  def __init__(self, make: layers.ParamMaker, config: Umt5Config):
    self.attention_norm = layers.RMSNorm(make, config.d_model, config.eps)
    self.attention = Attention(make, config)
    self.ffn_norm = layers.RMSNorm(make, config.d_model, config.eps)
    self.ffn = FeedForward(make, config)

  def __call__(self, x_BTE, bucket_TU, key_mask_BU):
    x_BTE = x_BTE + self.attention(self.attention_norm(x_BTE), bucket_TU, key_mask_BU)
    return x_BTE + self.ffn(self.ffn_norm(x_BTE))


class Umt5Encoder(nnx.Module):
  """UMT5 encoder of any size.

  Args:
    config: shape.
    dtype: what matrices are multiplied in.
    weight_dtype: what the weights are stored in; norm scales stay float32.
    rngs: random streams of the initialisers.
  """

  def __init__(self, config: Umt5Config, *, dtype: Any = jnp.float32, weight_dtype: Any = jnp.float32, rngs: nnx.Rngs):
    make = layers.ParamMaker(rngs, dtype, weight_dtype)
    self.config = config
    self.dtype = dtype
    self.token_embedding = Embedding(make, config.vocab_size, config.d_model)
    self.blocks = Block(make.stacked(config.num_layers), config)
    self.final_norm = layers.RMSNorm(make, config.d_model, config.eps)

  def encode(self, ids_BT, mask_BT):
    """Embeds token ids.

    Args:
      ids_BT: int32 token ids.
      mask_BT: true or 1 for tokens, false or 0 for padding, which no token attends to.

    Returns:
      `dtype` [B, T, E]. Positions of padding hold meaningless numbers; `encode_prompts` zeroes them.
    """
    bucket_TU = jnp.asarray(relative_buckets(ids_BT.shape[1], self.config.num_buckets, self.config.max_distance))
    key_mask_BU = mask_BT.astype(bool)
    graph, state = nnx.split(self.blocks)

    def layer(x_BTE, layer_state):
      block = nnx.merge(graph, layer_state)
      return block(x_BTE, bucket_TU, key_mask_BU), None

    with jax.named_scope("umt5"):
      x_BTE = self.token_embedding(ids_BT)
      x_BTE, _ = jax.lax.scan(layer, x_BTE, state)
      return self.final_norm(x_BTE).astype(self.dtype)


class Embedding(nnx.Module):
  """Rows of a table, in float32."""

  def __init__(self, make: layers.ParamMaker, num: int, width: int):
    self.embedding = make((num, width), ("vocab", "embed"), layers.normal(1.0))

  def __call__(self, ids):
    return jnp.take(self.embedding[...], ids, axis=0).astype(jnp.float32)


@functools.cache
def jitted_encode(platform: str):
  """Jitted (graph, state, ids_BT, mask_BT) -> encoder output with the positions of padding set to zero.

  XLA's CPU compiler widens bfloat16 to float32 before it slices, sees that the widened stack of weights does not depend
  on the layer and moves the cast out of the loop: a float32 copy of the whole encoder, 18 GiB for UMT5-XXL. Without that
  one pass the cast stays with the slice of one layer (0.8 GiB). An optimization barrier does not help: it is gone before
  the pass runs. (Sizes: `memory_analysis` of the compiled program.)
  """
  options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"} if platform == "cpu" else None

  @functools.partial(jax.jit, static_argnums=0, compiler_options=options)
  def encode(graph, state, ids_BT, mask_BT):
    embeddings_BTE = nnx.merge(graph, state).encode(ids_BT, mask_BT)
    return jnp.where(mask_BT[:, :, None], embeddings_BTE, 0)

  return encode


def encode_prompts(encoder: Umt5Encoder, tokenizer: Tokenizer, prompts: Sequence[str]):
  """Embeddings of prompts as the video model takes them.

  Prompts are cleaned, cut to the tokenizer's maximum length and encoded; positions past a prompt's end are zero, as the
  reference pipeline has them. The encoder need not run on those, so it runs at the longest prompt's length, rounded up.

  Args:
    encoder: the text encoder.
    tokenizer: its tokenizer.
    prompts: one text or more; an empty text is the end token alone.

  Returns:
    encoder.dtype [len(prompts), tokenizer.max_length, E].

  Raises:
    ConfigError: a token id lies beyond the encoder's vocabulary.
  """
  tokens = tokenizer(prompts)
  if tokens.ids.max() >= encoder.config.vocab_size:
    raise ConfigError(
      f"a prompt has token id {tokens.ids.max()}, but the text encoder has a vocabulary of {encoder.config.vocab_size}: "
      "the tokenizer belongs to another model"
    )
  longest = int(tokens.mask.sum(axis=1).max())
  length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, tokenizer.max_length)
  graph, state = nnx.split(encoder)
  encode = jitted_encode(jax.default_backend())
  embeddings_BTE = encode(graph, state, tokens.ids[:, :length], tokens.mask[:, :length])
  return jnp.pad(embeddings_BTE, ((0, 0), (0, tokenizer.max_length - length), (0, 0)))

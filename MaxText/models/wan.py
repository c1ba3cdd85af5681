"""The Wan video diffusion transformer (text to video, 2.1 and 2.2 A14B), any size.

The path through a forward pass: patches → tokens → L blocks of (self-attention, cross-attention to the text, MLP), each
modulated by the timestep → patches. Self-attention is whatever callable the caller hands in (see MaxText.attention),
dense for some layers and sparse for others by a traced flag per layer; the model itself is the same for every kind.

Dimensions: B batch, F H W token grid, S = F·H·W tokens, T text tokens, N heads, D head dim, E = N·D width, C latent
channels, L layers, P = patch volume. Architecture: Wan 2.1 technical report (arXiv 2503.20314) and the published
checkpoints.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.attention import Attention, Grid
from MaxText.attention.dot_product import dot_product_attention
from MaxText.models.layers import LayerNorm, Linear, ParamMaker, RMSNorm, layer_norm, normal
from MaxText.parallel import sharding

ROPE_THETA = 10_000.0
TOKENS = (sharding.BATCH, sharding.TOKENS, None)  # logical names of x_BSE
TEXT = (sharding.BATCH, None, sharding.HEADS, None)  # of the text's keys and values
# What a block keeps for its backward pass: its input alone, or the products with weights too (not attention's).
REMAT_POLICIES = {
  "full": jax.checkpoint_policies.nothing_saveable,
  "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class WanConfig:
  """Architecture of one expert. The defaults are Wan 2.1 T2V 14B.

  rope_stretch is not part of a checkpoint: it spreads the rotary positions of rows and columns (`rotary_tables`).
  """

  patch_size: tuple[int, int, int] = (1, 2, 2)
  num_heads: int = 40
  head_dim: int = 128
  in_channels: int = 16
  out_channels: int = 16
  text_dim: int = 4096
  freq_dim: int = 256
  ffn_dim: int = 13824
  num_layers: int = 40
  eps: float = 1e-6
  rope_stretch: float = 1.0

  @property
  def width(self) -> int:
    return self.num_heads * self.head_dim

  @property
  def patch_volume(self) -> int:
    return math.prod(self.patch_size)

  def token_grid(self, frames: int, height: int, width: int) -> Grid:
    """Grid (F, H, W) of the tokens of a latent of this many frames, rows and columns."""
    return tuple(n // p for n, p in zip((frames, height, width), self.patch_size, strict=True))


def patchify(latents_BFHWC, patch_size):
  """[B, F·pt, H·ph, W·pw, C] → tokens [B, S, pt·ph·pw·C], frame-major."""
  B, Fl, Hl, Wl, C = latents_BFHWC.shape
  pt, ph, pw = patch_size
  x = latents_BFHWC.reshape(B, Fl // pt, pt, Hl // ph, ph, Wl // pw, pw, C)
  return x.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(B, -1, pt * ph * pw * C)


def unpatchify(tokens_BSP, grid: Grid, patch_size):
  """Inverse of `patchify`: [B, S, pt·ph·pw·C] → [B, F·pt, H·ph, W·pw, C]."""
  F, H, W = grid
  pt, ph, pw = patch_size
  B = tokens_BSP.shape[0]
  x = tokens_BSP.reshape(B, F, H, W, pt, ph, pw, -1)
  return x.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(B, F * pt, H * ph, W * pw, -1)


def rotary_tables(grid: Grid, head_dim: int, stretch: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
  """Cosines and signed sines of the 3-D rotary embedding, float32 [S, D] each.

  The head dim is split over (t, h, w): h and w take 2·⌊D/6⌋ each, t the rest; within a part, neighbouring channels form
  the rotated pairs. The sine's sign is folded in (− for the even channel), so that a rotation is x·cos +
  swap_pairs(x)·sin. Angles are computed in float64, as the reference does. With a stretch s, rows and columns lie where
  the middle of each s x s tokens of a picture s times as large would: (n + 1/2) s - 1/2.
  """
  F, H, W = grid
  dim_hw = 2 * (head_dim // 6)
  dims = (head_dim - 2 * dim_hw, dim_hw, dim_hw)
  parts = []
  frames, rows, columns = (np.arange(length, dtype=np.float64) for length in grid)
  positions = (frames, (rows + 0.5) * stretch - 0.5, (columns + 0.5) * stretch - 0.5)
  for axis, (position, dim) in enumerate(zip(positions, dims, strict=True)):
    frequencies = ROPE_THETA ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    angles = np.repeat(np.outer(position, frequencies), 2, axis=-1)
    shape = [1, 1, 1, dim]
    shape[axis] = len(position)
    parts.append(np.broadcast_to(angles.reshape(shape), (F, H, W, dim)))
  angles_SD = np.concatenate(parts, axis=-1).reshape(F * H * W, head_dim)
  sign = np.where(np.arange(head_dim) % 2 == 0, -1.0, 1.0)
  return np.cos(angles_SD).astype(np.float32), (np.sin(angles_SD) * sign).astype(np.float32)


def rotary_of_frames(tables, frames_BF, grid: Grid):
  """Of `rotary_tables`, [S, D] each, what belongs to some frames of each sample: [B, S', D] each."""
  F, H, W = grid
  return tuple(table.reshape(F, H * W, -1)[frames_BF].reshape(len(frames_BF), -1, table.shape[-1]) for table in tables)


def apply_rotary(x_BSND, cos_SD, sin_SD):
  """Rotates neighbouring channel pairs, in float32, and returns the input's type. Tables: [S, D], or [B, S, D]."""
  x32 = x_BSND.astype(jnp.float32)
  even = jnp.arange(x32.shape[-1]) % 2 == 0
  swapped = jnp.where(even, jnp.roll(x32, -1, axis=-1), jnp.roll(x32, 1, axis=-1))
  return (x32 * cos_SD[..., None, :] + swapped * sin_SD[..., None, :]).astype(x_BSND.dtype)


def timestep_features(timestep_B, dim: int):
  """Sinusoidal features of the timestep (0 … 1000), float32 [B, dim]: cosines, then sines."""
  half = dim // 2
  frequencies = jnp.exp(-math.log(10_000.0) * jnp.arange(half, dtype=jnp.float32) / half)
  angles = timestep_B.astype(jnp.float32)[:, None] * frequencies
  features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
  return jnp.pad(features, ((0, 0), (0, dim - 2 * half)))


class TwoLinear(nnx.Module):
  """linear → activation → linear."""

  def __init__(self, make: ParamMaker, num_in: int, num_out: int, activation, *, float32: bool = False):
    self.activation = activation
    self.linear_1 = Linear(make, num_in, num_out, (None, "embed"), float32=float32)
    self.linear_2 = Linear(make, num_out, num_out, (None, "embed"), float32=float32)

  def __call__(self, x):
    return self.linear_2(self.activation(self.linear_1(x)))


def gelu(x):
  return jax.nn.gelu(x, approximate=True)


class ConditionEmbedder(nnx.Module):
  """Timestep → (embedding, six modulation vectors); text embeddings → model width."""

  def __init__(self, make: ParamMaker, cfg: WanConfig):
    self.freq_dim, self.width = cfg.freq_dim, cfg.width
    self.time_embedder = TwoLinear(make, cfg.freq_dim, cfg.width, jax.nn.silu, float32=True)
    self.time_proj = Linear(make, cfg.width, 6 * cfg.width, (None, "embed"))
    self.text_embedder = TwoLinear(make, cfg.text_dim, cfg.width, gelu)

  def time(self, timestep_B):
    """Returns the embedding [B, E] and the modulation [B, 6, E], both float32."""
    # These few numbers are whole on every device: else their split spreads to the tokens that they modulate, or the
    # large weights are gathered for them.
    embedding_BE = self.time_embedder(timestep_features(timestep_B, self.freq_dim))
    embedding_BE = sharding.constrain(embedding_BE, (None, None))
    modulation = self.time_proj(jax.nn.silu(embedding_BE)).astype(jnp.float32)
    return embedding_BE, sharding.constrain(modulation.reshape(-1, 6, self.width), (None, None, None))


class Projections(nnx.Module):
  """Query, key, value and output projections of one attention, with RMS norms of q and k across all heads."""

  def __init__(self, make: ParamMaker, cfg: WanConfig):
    E = cfg.width
    self.heads = (cfg.num_heads, cfg.head_dim)
    self.to_q = Linear(make, E, E, ("embed", "heads"))
    self.to_k = Linear(make, E, E, ("embed", "heads"))
    self.to_v = Linear(make, E, E, ("embed", "heads"))
    self.to_out = Linear(make, E, E, ("heads", "embed"))
    self.norm_q = RMSNorm(make, E, cfg.eps, "heads")
    self.norm_k = RMSNorm(make, E, cfg.eps, "heads")

  def split(self, x_BSE):
    return x_BSE.reshape(*x_BSE.shape[:-1], *self.heads)

  def query(self, x_BSE):
    return self.split(self.norm_q(self.to_q(x_BSE)))

  def key(self, x_BSE):
    return self.split(self.norm_k(self.to_k(x_BSE)))

  def value(self, x_BSE):
    return self.split(self.to_v(x_BSE))

  def out(self, x_BSND):
    return self.to_out(x_BSND.reshape(*x_BSND.shape[:-2], -1))


class FeedForward(nnx.Module):
  """linear → GELU (tanh) → linear."""

  def __init__(self, make: ParamMaker, cfg: WanConfig):
    self.up = Linear(make, cfg.width, cfg.ffn_dim, ("embed", "mlp"))
    self.down = Linear(make, cfg.ffn_dim, cfg.width, ("mlp", "embed"))

  def __call__(self, x):
    return self.down(gelu(self.up(x)))


class WanBlock(nnx.Module):
  """Self-attention, cross-attention and MLP; the first and the last gated and shifted by the timestep."""

  def __init__(self, make: ParamMaker, cfg: WanConfig):
    self.eps = cfg.eps
    self.attn1 = Projections(make, cfg)
    self.norm2 = LayerNorm(make, cfg.width, cfg.eps)
    self.attn2 = Projections(make, cfg)
    self.ffn = FeedForward(make, cfg)
    self.scale_shift_table = make((6, cfg.width), (None, "embed"), normal(cfg.width**-0.5), float32=True)

  def __call__(self, x_BSE, modulation_B6E, rotary, text_kv, self_attention, cross_attention):
    """`self_attention(q, k, v) -> (out, temporal_BN)`; returns the new x_BSE and the routes temporal_BN."""
    dtype = x_BSE.dtype
    modulation = self.scale_shift_table[...] + modulation_B6E
    shift1, scale1, gate1, shift3, scale3, gate3 = (modulation[:, i : i + 1] for i in range(6))
    with jax.named_scope("self_attention"):
      h = (layer_norm(x_BSE, self.eps) * (1 + scale1) + shift1).astype(dtype)
      q, k, v = self.attn1.query(h), self.attn1.key(h), self.attn1.value(h)
      out, temporal_BN = self_attention(apply_rotary(q, *rotary), apply_rotary(k, *rotary), v)
      x_BSE = (x_BSE.astype(jnp.float32) + self.attn1.out(out) * gate1).astype(dtype)
    with jax.named_scope("cross_attention"):
      q = self.attn2.query(self.norm2(x_BSE).astype(dtype))
      x_BSE = x_BSE + self.attn2.out(cross_attention(q, *text_kv, None))
    with jax.named_scope("mlp"):
      h = (layer_norm(x_BSE, self.eps) * (1 + scale3) + shift3).astype(dtype)
      x_BSE = (x_BSE.astype(jnp.float32) + self.ffn(h).astype(jnp.float32) * gate3).astype(dtype)
    return x_BSE, temporal_BN


class WanTransformer(nnx.Module):
  """One expert: predicts the flow-matching velocity of noisy latents.

  Args:
    cfg: the architecture.
    dtype: compute type. weight_dtype: storage type (norms, modulation tables and the time embedder stay float32).
    rngs: initialiser streams; under `nnx.eval_shape` nothing is allocated.
    lora_rank, lora_scale: adapters of the blocks' linear layers, to be trained in place of their weights; rank 0: none.
  """

  def __init__(self, cfg: WanConfig, *, dtype=jnp.float32, weight_dtype=jnp.float32, rngs: nnx.Rngs, lora_rank: int = 0,
               lora_scale: float = 1.0):
    make = ParamMaker(rngs, dtype, weight_dtype, lora_rank=lora_rank, lora_scale=lora_scale)
    self.cfg, self.dtype = cfg, dtype
    self.patch_embedding = Linear(make, cfg.patch_volume * cfg.in_channels, cfg.width, (None, "embed"))
    self.condition_embedder = ConditionEmbedder(make, cfg)
    self.blocks = WanBlock(make.stacked(cfg.num_layers), cfg)
    self.proj_out = Linear(make, cfg.width, cfg.patch_volume * cfg.out_channels, ("embed", None))
    self.scale_shift_table = make((2, cfg.width), (None, "embed"), normal(cfg.width**-0.5), float32=True)

  def text_keys_values(self, text_BTE):
    """Keys and values of every layer's cross-attention: two arrays [L, B, T, N, D].

    They depend on the prompt alone, so a sampler computes them once. text_BTE: text encoder output, zeros past the
    prompt.
    """
    text_BTE = self.condition_embedder.text_embedder(text_BTE.astype(self.dtype))
    text_BTE = sharding.constrain(text_BTE, (sharding.BATCH, None, None))
    graphdef, stacked = nnx.split(self.blocks.attn2)

    def layer(_, state):
      attn2 = sharding.gather(nnx.merge(graphdef, state))
      return None, tuple(sharding.constrain(x, TEXT) for x in (attn2.key(text_BTE), attn2.value(text_BTE)))

    return jax.lax.scan(layer, None, stacked)[1]

  def __call__(self, latents_BFHWC, timestep_B, text_kv, *, attention: Attention = dot_product_attention,
               sparse_attention=None, sparse_layers_L=None, cross_attention: Attention = dot_product_attention,
               remat: str = "none", frames_BF=None, clip_frames: int | None = None):
    """Velocity of the latents at a timestep.

    Args:
      latents_BFHWC: noisy latents, channels last.
      timestep_B: 0 … 1000.
      text_kv: what `text_keys_values` returned for the same batch.
      attention: dense self-attention.
      sparse_attention: None, or an attention with `with_routes(q, k, v, grid) -> (out, temporal_BN)`.
      sparse_layers_L: bool [L], traced: which layers use `sparse_attention` (needed with it).
      remat: what a backward pass computes again, a key of `REMAT_POLICIES`, or 'none'.
      frames_BF: None, or int32 [B, F]: which frames of a clip of `clip_frames` the latents of each sample are.
    Returns:
      velocity [B, F, H, W, C_out] float32, and the routes temporal_LBN (bool; False where a layer was dense).
    """
    cfg = self.cfg
    grid = cfg.token_grid(*latents_BFHWC.shape[1:4])
    positions = grid if frames_BF is None else (clip_frames, *grid[1:])
    rotary = tuple(jnp.asarray(table) for table in rotary_tables(positions, cfg.head_dim, cfg.rope_stretch))
    if frames_BF is not None:
      rotary = rotary_of_frames(rotary, frames_BF, positions)
    with jax.named_scope("embed"):
      x_BSE = sharding.gather(self.patch_embedding)(patchify(latents_BFHWC.astype(self.dtype), cfg.patch_size))
      x_BSE = sharding.constrain(x_BSE, TOKENS)
      embedding_BE, modulation_B6E = self.condition_embedder.time(timestep_B)
    no_routes = jnp.zeros((x_BSE.shape[0], cfg.num_heads), bool)
    graphdef, stacked = nnx.split(self.blocks)

    def dense(q, k, v):
      return attention(q, k, v, grid), no_routes

    def layer(x_BSE, inputs):
      state, text_kv, use_sparse = inputs

      def self_attention(q, k, v):
        if sparse_attention is None:
          return dense(q, k, v)
        return jax.lax.cond(use_sparse, lambda q, k, v: sparse_attention.with_routes(q, k, v, grid), dense, q, k, v)

      block = sharding.gather(nnx.merge(graphdef, state))
      return block(sharding.constrain(x_BSE, TOKENS), modulation_B6E, rotary, text_kv, self_attention, cross_attention)

    if sparse_layers_L is None:
      sparse_layers_L = jnp.zeros(cfg.num_layers, bool)
    if remat != "none":
      layer = jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=False)  # a scan needs no barrier
    with jax.named_scope("blocks"):
      x_BSE, temporal_LBN = jax.lax.scan(layer, x_BSE, (stacked, text_kv, sparse_layers_L))
    with jax.named_scope("unembed"):
      modulation_B2E = self.scale_shift_table[...] + embedding_BE[:, None]
      modulation_B2E = sharding.constrain(modulation_B2E, (None, None, None))
      shift, scale = jnp.split(modulation_B2E, 2, axis=1)
      x_BSE = (layer_norm(x_BSE, cfg.eps) * (1 + scale) + shift).astype(x_BSE.dtype)
      patches_BSP = sharding.gather(self.proj_out)(sharding.constrain(x_BSE, TOKENS)).astype(jnp.float32)
      velocity = unpatchify(patches_BSP, grid, cfg.patch_size)
    return velocity, temporal_LBN

"""The fastest dense attention of the device: a Pallas kernel on TPU, elsewhere the bounded path, said aloud.

On TPU inference runs this project's kernel (kernels/), which has no gradient; training runs the flash kernel that ships
with JAX, which has one.

Legend: B batch, S queries, T keys, N heads, D head dim.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as library

from MaxText.attention.dot_product import DotProductAttention, heads_first, tokens_first

LIBRARY_BLOCK = 512  # query and key tile of the library kernel


@dataclasses.dataclass(frozen=True)
class FlashAttention:
  """Dense attention on TPU by this project's Pallas kernel. Forward only.

  Attributes:
    block_q, block_kv: tiles of the kernel; 0 takes the tuned ones.
    chip: whose tuned tiles to take, such as 'v6e'; empty means the device here.
  """

  block_q: int = 0
  block_kv: int = 0
  chip: str = ""

  def describe(self) -> str:
    return "flash (this project's Pallas TPU kernel)"

  def __call__(self, q_BSND: jax.Array, k_BTND: jax.Array, v_BTND: jax.Array, grid=None) -> jax.Array:
    """[B, S, N, D] × [B, T, N, D] × [B, T, N, D] -> [B, S, N, D] in q's dtype; D at most 128."""
    from MaxText.attention import kernels  # it imports from svg/, which imports from here
    with jax.named_scope("flash_attention"):
      out_HSD = kernels.dense_attention(
        *map(heads_first, (q_BSND, k_BTND, v_BTND)), chip=self.chip or None, block_q=self.block_q, block_kv=self.block_kv)
      return tokens_first(out_HSD, len(q_BSND))


@dataclasses.dataclass(frozen=True)
class LibraryFlashAttention:
  """Dense attention on TPU by the flash kernel that ships with JAX, forward and backward.

  Attributes:
    block_q, block_kv: tiles of the kernel, multiples of 128; 0 takes the default.
  """

  block_q: int = 0
  block_kv: int = 0

  def __post_init__(self):
    for key, block in (("flash_block_q", self.block_q), ("flash_block_kv", self.block_kv)):
      if block % 128:
        raise ValueError(f"{key}={block}: training on TPU runs the kernel that ships with JAX, whose tiles are multiples "
                         f"of 128; nearest: {max(128, round(block / 128) * 128)}")

  def describe(self) -> str:
    return "flash (the Pallas TPU flash kernel that ships with JAX)"

  def __call__(self, q_BSND: jax.Array, k_BTND: jax.Array, v_BTND: jax.Array, grid=None) -> jax.Array:
    """[B, S, N, D] × [B, T, N, D] × [B, T, N, D] -> [B, S, N, D] in q's dtype; any S, T and D."""
    num_queries, num_keys, head_dim = q_BSND.shape[1], k_BTND.shape[1], q_BSND.shape[3]
    block_q, block_kv = (block or LIBRARY_BLOCK for block in (self.block_q, self.block_kv))
    block_q, block_kv = min(block_q, -(-num_queries // 128) * 128), min(block_kv, -(-num_keys // 128) * 128)
    with jax.named_scope("flash_attention"):
      q_BNSD, k_BNTD, v_BNTD = (
        _padded(x.transpose(0, 2, 1, 3), block)
        for x, block in ((q_BSND, block_q), (k_BTND, block_kv), (v_BTND, block_kv)))
      # Padding is a segment of its own, which no real query sees.
      segments = library.SegmentIds(*(
        jnp.broadcast_to(jnp.arange(x.shape[2]) >= length, (x.shape[0], x.shape[2])).astype(jnp.int32)
        for x, length in ((q_BNSD, num_queries), (k_BNTD, num_keys))))
      out_BNSD = library.flash_attention(
        q_BNSD, k_BNTD, v_BNTD, segment_ids=segments, sm_scale=head_dim**-0.5,
        block_sizes=_library_blocks(block_q, block_kv))
      return out_BNSD[:, :, :num_queries].transpose(0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class BoundedAttention(DotProductAttention):
  """What attention=flash is where there is no TPU: the tiled path of dot_product."""

  platform: str = "cpu"

  def describe(self) -> str:
    return f"flash has no kernel for {self.platform}: running dot_product (same result, plain JAX, bounded memory)"


def _padded(x_BNSD: jax.Array, block: int) -> jax.Array:
  return jnp.pad(x_BNSD, ((0, 0), (0, 0), (0, -x_BNSD.shape[2] % block), (0, 0)))


def _library_blocks(block_q: int, block_kv: int) -> library.BlockSizes:
  return library.BlockSizes(
    block_b=1, block_q=block_q, block_k_major=block_kv, block_k=block_kv,
    block_q_major_dkv=block_q, block_k_major_dkv=block_kv, block_k_dkv=block_kv, block_q_dkv=block_q,
    block_k_major_dq=block_kv, block_k_dq=block_kv, block_q_dq=block_q)


def make_flash_attention(
  platform: str, block_q: int = 0, block_kv: int = 0, *, chip: str = "", training: bool = False):
  """The dense kernel for a platform.

  Args:
    platform: 'tpu', 'gpu' or 'cpu'.
    block_q, block_kv: tiles of the kernel; 0 takes the tuned ones.
    chip: whose tuned tiles to take, such as 'v6e'; empty means the device here.
    training: whether gradients are needed.
  """
  if platform == "tpu":
    return LibraryFlashAttention(block_q, block_kv) if training else FlashAttention(block_q, block_kv, chip)
  return BoundedAttention(block_q, block_kv, platform=platform)

"""Dense attention: equal to the plain formula, with gradients, in bounded memory; and the choice of a dense kind."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from MaxText.attention import DotProductAttention, dot_product_attention, make_attention
from MaxText.attention.dot_product import even_block
from MaxText.attention.flash import LibraryFlashAttention
from MaxText.attention.tiled import make_plan, tiled_attention


def random_qkv(B, S, T, N, D, dtype=np.float32, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(rng.standard_normal((B, tokens, N, D)).astype(dtype) for tokens in (S, T, T))


def plain(q, k, v, mask=None, xp=np):
  """The formula with the whole matrix, in float64 by numpy (nothing to compile), or in jax.numpy for gradients."""
  q, k, v = (xp.asarray(x).astype(np.float64 if xp is np else np.float32) for x in (q, k, v))
  score = xp.einsum("bsnd,btnd->bnst", q, k) / np.sqrt(q.shape[-1])
  score = score if mask is None else xp.where(mask, score, -np.inf)
  weight = xp.exp(score - score.max(-1, keepdims=True))
  return xp.einsum("bnst,btnd->bsnd", weight / weight.sum(-1, keepdims=True), v)


def largest_array(jaxpr) -> int:
  """Elements of the largest array made anywhere in a jaxpr."""
  sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars]
  inner = [largest_array(j) for e in jaxpr.eqns for j in jaxprs_in_params(e.params)]
  return max(sizes + inner, default=0)


def output_and_gradients(attend, *qkv):
  @jax.jit
  def run(*qkv):
    out, back = jax.vjp(attend, *qkv)
    return out, *back(jnp.cos(out))

  return run(*qkv)


# Ragged tiles in both directions with cross-attention; one tile of each.
@pytest.mark.parametrize("S,T,N,D,blocks", [(100, 53, 3, 24, (48, 16)), (50, 1, 2, 8, (0, 0))])
def test_equals_the_formula_with_gradients(S, T, N, D, blocks):
  q, k, v = random_qkv(2, S, T, N, D)
  ours = output_and_gradients(lambda *qkv: DotProductAttention(*blocks)(*qkv, None), q, k, v)
  for a, b in zip(ours, output_and_gradients(lambda *qkv: plain(*qkv, xp=jnp), q, k, v), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_bfloat16_accumulates_in_float32():
  q, k, v = random_qkv(1, 200, 3000, 2, 16, jnp.bfloat16)
  out = jax.jit(DotProductAttention())(q, k, v)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(out, np.float32), plain(q, k, v), atol=4e-3)


def test_large_logits_stay_finite():
  q, k, v = random_qkv(1, 64, 64, 1, 8)
  q, k = q * 300, k * 300
  np.testing.assert_allclose(jax.jit(DotProductAttention(16, 16))(q, k, v), plain(q, k, v), atol=1e-5)


def test_memory_at_75600_tokens_is_bounded():
  S = 75_600
  shapes = [jax.ShapeDtypeStruct((1, S, 4, 64), jnp.float32)] * 3
  forward = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, (21, 45, 80)))
  compiled = forward.lower(*shapes).compile()
  inputs = 4 * S * 4 * 64
  assert compiled.memory_analysis().temp_size_in_bytes < 8 * inputs  # an array of S × S would be 295 times an input
  for function in (forward, jax.grad(lambda *qkv: forward(*qkv).sum(), (0, 1, 2))):
    assert largest_array(jax.make_jaxpr(function)(*shapes).jaxpr) < 2 * S * 4 * 64


def test_a_tile_list_of_any_shape():
  """Not only bands: every query tile may list any key tiles."""
  table = np.array([[2, 0, 2, 0], [0, 2, 0, 2], [2, 2, 0, 0]])
  q, k, v = (x[0].transpose(1, 0, 2) for x in random_qkv(1, 24, 32, 2, 8))
  whole = np.zeros((1, 24), int)
  plan = make_plan([table], 8, 8, 0, whole, whole + 32)
  out = jax.jit(lambda q, k, v: tiled_attention(q, k, v, jnp.zeros(2, jnp.int32), plan))(q, k, v)
  mask = np.kron(table > 0, np.ones((8, 8), bool))
  expected = plain(*(x.transpose(1, 0, 2)[None] for x in (q, k, v)), mask)[0].transpose(1, 0, 2)
  np.testing.assert_allclose(out, expected, atol=2e-6)
  with pytest.raises(ValueError, match="visits no tile"):
    make_plan([table * 0], 8, 8, 0, whole, whole + 32)


def test_even_blocks():
  assert even_block(5376, 384) == 384 and even_block(5376, 256) == 256
  assert even_block(100, 384) == 100
  for length in (385, 1000, 75_600, 32_760):
    block = even_block(length, 256)
    assert block <= 256 and block % 8 == 0 and -length % block < 8 * -(-length // 256)


def mesh_of(platform):
  device = types.SimpleNamespace(platform=platform)
  return types.SimpleNamespace(devices=types.SimpleNamespace(flat=[device]))


def test_factory_and_what_it_says():
  def config(attention):
    return types.SimpleNamespace(attention=attention, flash_block_q=None, flash_block_kv=256, topology_chip="v5e")

  assert make_attention(config("dot_product"), mesh_of("tpu")) is dot_product_attention
  on_cpu = make_attention(config("svg"), mesh_of("cpu"))
  assert "no kernel for cpu" in on_cpu.describe() and on_cpu.block_kv == 256 and hash(on_cpu)
  assert "Pallas" in make_attention(config("flash"), mesh_of("tpu")).describe()
  assert make_attention(config("flash"), mesh_of("tpu")).chip == "v5e"
  assert isinstance(make_attention(config("flash"), mesh_of("tpu"), training=True), LibraryFlashAttention)

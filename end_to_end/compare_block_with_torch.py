"""Times forward + backward of one DiT block against the Diffusers block on CPU torch, alternating, at the same shapes.

  python end_to_end/compare_block_with_torch.py --oracle PYTHON_WITH_DIFFUSERS [--rounds 3] [--repeats 3]

4 heads × 64, MLP 1,024, 512 text tokens, float32, batch 1; video tokens as SHAPES says. Each side runs in a process of
its own, in turn, held to the same two cores (and two threads); a figure is the median over all repeats. Both compute the
keys and values of the text inside, and the gradients of all weights, of the tokens, the text and the modulation.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from compare_with_diffusers import time_calls

HEADS, HEAD_DIM, FFN, TEXT = 4, 64, 1024, 512
WIDTH = HEADS * HEAD_DIM
SHAPES = ((3, 16, 16), (6, 16, 16), (21, 16, 16))  # frames, rows, columns of tokens
THREADS = 2


def inputs(grid):
  """tokens [1, S, E], text [1, T, E], modulation [1, 6, E] and the gradient that comes from above [1, S, E]."""
  import numpy as np

  rng = np.random.default_rng(0)
  tokens = grid[0] * grid[1] * grid[2]
  shapes = ((1, tokens, WIDTH), (1, TEXT, WIDTH), (1, 6, WIDTH), (1, tokens, WIDTH))
  return [rng.standard_normal(shape, np.float32) for shape in shapes]


def ours(grid, repeats: int) -> list[float]:
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from MaxText.attention import dot_product_attention
  from MaxText.models.layers import ParamMaker
  from MaxText.models.wan import WanBlock, WanConfig, rotary_tables

  config = WanConfig(num_heads=HEADS, head_dim=HEAD_DIM, ffn_dim=FFN)
  graphdef, weights = nnx.split(WanBlock(ParamMaker(nnx.Rngs(0)), config))
  rotary = tuple(jnp.asarray(table) for table in rotary_tables(grid, HEAD_DIM))

  def attend(q, k, v):
    return dot_product_attention(q, k, v, grid), None

  def weighted_sum(weights, tokens, text, modulation, above):
    block = nnx.merge(graphdef, weights)
    text_kv = block.attn2.key(text), block.attn2.value(text)
    out, _ = block(tokens, modulation, rotary, text_kv, attend, dot_product_attention)
    return jnp.vdot(out, above)

  gradient = jax.jit(jax.grad(weighted_sum, argnums=(0, 1, 2, 3)))
  arrays = [jnp.asarray(array) for array in inputs(grid)]
  return time_calls(lambda: jax.block_until_ready(gradient(weights, *arrays)), repeats)


def diffusers(grid, repeats: int) -> list[float]:
  import torch
  from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformerBlock

  torch.set_num_threads(THREADS)
  torch.manual_seed(0)
  block = WanTransformerBlock(WIDTH, FFN, HEADS, "rms_norm_across_heads", cross_attn_norm=True)
  frames, rows, columns = grid
  latents = torch.zeros(1, 16, frames, 2 * rows, 2 * columns)
  rotary = WanRotaryPosEmbed(HEAD_DIM, (1, 2, 2), 1024)(latents)
  tokens, text, modulation, above = (torch.from_numpy(array) for array in inputs(grid))
  leaves = [tensor.requires_grad_() for tensor in (tokens, text, modulation)] + list(block.parameters())
  return time_calls(lambda: torch.autograd.grad(block(tokens, text, modulation, rotary), leaves, above), repeats)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--oracle", help="a Python with diffusers and torch (tests/golden/README.md)")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--side", choices=("ours", "diffusers"), help=argparse.SUPPRESS)
  args = parser.parse_args()
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # inherited, and read by both thread pools
  if args.side:
    side = {"ours": ours, "diffusers": diffusers}[args.side]
    print(json.dumps([side(grid, args.repeats) for grid in SHAPES]))
    return
  if not args.oracle:
    parser.error("--oracle is missing: give a Python that has diffusers and torch")
  repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  seconds = {side: [[] for _ in SHAPES] for side in ("ours", "diffusers")}
  for _ in range(args.rounds):
    for side, python in (("ours", sys.executable), ("diffusers", args.oracle)):
      run = subprocess.run(
        [python, __file__, "--side", side, "--repeats", str(args.repeats)], check=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": repository, "JAX_PLATFORMS": "cpu"})
      for all_of_shape, new in zip(seconds[side], json.loads(run.stdout.strip().splitlines()[-1]), strict=True):
        all_of_shape += new
  for grid, mine, theirs in zip(SHAPES, *seconds.values(), strict=True):
    print(f"{grid[0] * grid[1] * grid[2]:,} tokens")
    for side, values in (("ours", mine), ("diffusers", theirs)):
      print(f"  {side:10s} median {statistics.median(values):.3f} s  (min {min(values):.3f}, max {max(values):.3f}, "
            f"{len(values)} calls)")
    print(f"  ratio ours / diffusers: {statistics.median(mine) / statistics.median(theirs):.3f}")


if __name__ == "__main__":
  main()

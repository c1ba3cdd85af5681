"""Times our dense denoise step against the Diffusers model on CPU torch, alternating, on the same small model and shape.

  python end_to_end/compare_with_diffusers.py --oracle PYTHON_WITH_DIFFUSERS [--rounds 3] [--repeats 3]

4 heads × 64, 4 layers, 21×16×16 = 5,376 tokens, 512 text tokens, float32, batch 1, no guidance. Each side runs in a
process of its own, in turn, on all cores; a figure is the median over all repeats. Ours is the whole step (model and
solver); Diffusers' is the model alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HEADS, HEAD_DIM, LAYERS, FFN, TEXT_DIM, TEXT = 4, 64, 4, 1024, 256, 512
FRAMES, HEIGHT, WIDTH = 21, 32, 32  # latent


def time_calls(call, repeats: int) -> list[float]:
  call()  # compile, or warm up
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - start)
  return seconds


def ours(repeats: int) -> list[float]:
  import jax
  import numpy as np
  from flax import nnx

  from MaxText.attention import dot_product
  from MaxText.diffusion import pipeline, solvers
  from MaxText.models.wan import WanConfig, WanTransformer

  config = WanConfig(num_heads=HEADS, head_dim=HEAD_DIM, ffn_dim=FFN, num_layers=LAYERS, text_dim=TEXT_DIM)
  graphdef, weights = nnx.split(WanTransformer(config, rngs=nnx.Rngs(0)))
  solver = solvers.make_solver("unipc", 4, 5.0)
  rng = np.random.default_rng(0)
  state = solver.init(jax.numpy.asarray(rng.standard_normal((1, FRAMES, HEIGHT, WIDTH, 16), np.float32)))
  text_kv = nnx.merge(graphdef, weights).text_keys_values(rng.standard_normal((1, TEXT, TEXT_DIM), np.float32))
  arguments = (weights, state, solver.row(0), np.float32(900), np.float32(1), text_kv, np.zeros(LAYERS, bool))
  step = (
    jax.jit(pipeline.denoise, static_argnames=pipeline.STATIC)
    .lower(
      graphdef,
      *arguments,
      solver_step=solver.step,
      guided=False,
      attention=dot_product.dot_product_attention,
      sparse_attention=None,
    )
    .compile(compiler_options=pipeline.compiler_options("cpu"))
  )
  return time_calls(lambda: jax.block_until_ready(step(*arguments)), repeats)


def diffusers(repeats: int) -> list[float]:
  import torch
  from diffusers import WanTransformer3DModel

  torch.manual_seed(0)
  model = WanTransformer3DModel(
    num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, ffn_dim=FFN, num_layers=LAYERS, text_dim=TEXT_DIM
  ).eval()
  latents, text = torch.randn(1, 16, FRAMES, HEIGHT, WIDTH), torch.randn(1, TEXT, TEXT_DIM)
  with torch.inference_mode():
    return time_calls(lambda: model(latents, torch.tensor([900]), text), repeats)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--oracle", help="a Python with diffusers and torch (tests/golden/README.md)")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--side", choices=("ours", "diffusers"), help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.side:
    print(json.dumps({"ours": ours, "diffusers": diffusers}[args.side](args.repeats)))
    return
  if not args.oracle:
    parser.error("--oracle is missing: give a Python that has diffusers and torch")
  repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  seconds = {"ours": [], "diffusers": []}
  for _ in range(args.rounds):
    for side, python in (("ours", sys.executable), ("diffusers", args.oracle)):
      run = subprocess.run(
        [python, __file__, "--side", side, "--repeats", str(args.repeats)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": repository, "JAX_PLATFORMS": "cpu"},
      )
      seconds[side] += json.loads(run.stdout.strip().splitlines()[-1])
  medians = {side: statistics.median(values) for side, values in seconds.items()}
  for side, values in seconds.items():
    print(f"{side:10s} median {medians[side]:.3f} s  (min {min(values):.3f}, max {max(values):.3f}, {len(values)} steps)")
  print(f"ratio ours / diffusers: {medians['ours'] / medians['diffusers']:.3f}")


if __name__ == "__main__":
  main()

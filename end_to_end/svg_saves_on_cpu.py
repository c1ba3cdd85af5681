"""Whether sparse attention saves, over a whole denoising on CPU, the seconds that its tile counts predict.

  python end_to_end/svg_saves_on_cpu.py [key=value …]

4 heads × 64, 4 layers, 256×256 pixels, 81 frames = 21×16×16 = 5,376 tokens, float32, random weights, no guidance, 12
steps of which the last 8 are sparse (density .35) in all layers. Each round denoises once dense and once sparse, in turn.
The prediction: sparse steps × sparse layers × seconds of one dense attention (timed alone, between the rounds) × (1 −
share of tiles that run). Routing and layout are part of what is measured, not of what is predicted.
"""

import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from MaxText import pyconfig  # noqa: E402 - before jax: it keeps libtpu quiet where there is no TPU
from MaxText.diffusion import report  # noqa: E402
from MaxText.diffusion.pipeline import Request, VideoPipeline  # noqa: E402

import jax  # noqa: E402  # isort: skip
import numpy as np  # noqa: E402  # isort: skip

ROUNDS = 2
MODEL = ["num_heads=4", "head_dim=64", "ffn_dim=1024", "num_layers=4", "override_model_config=true",
         "init_random_weights=true"]
VIDEO = ["height=256", "width=256", "num_frames=81", "num_inference_steps=12", "guidance_scale=1", "prompt=a ball"]
SPARSE = ["attention=svg", "svg_density=0.35", "svg_start_step=4", "svg_end_step=12", "svg_start_layer=0"]


def attention_seconds(pipeline, repeats: int = 3) -> list[float]:
  """Seconds of one layer's dense attention at the shape of the pipeline's steps, for one video."""
  config, samples = pipeline.config, 1 + any(step.guided for step in pipeline.steps)
  shape = (3, samples, config.num_tokens, config.num_heads, config.head_dim)
  q, k, v = jax.random.normal(jax.random.key(0), shape, pipeline.dtypes["dtype"])
  attend = jax.jit(lambda q, k, v: pipeline.dense_kernel(q, k, v, config.token_grid))
  attend(q, k, v).block_until_ready()
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    attend(q, k, v).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return seconds


def main(argv):
  config = pyconfig.initialize(["configs/video.yml", *MODEL, *VIDEO, *SPARSE, *argv], "decode")
  pipeline = VideoPipeline(config)
  text = pipeline.encode_prompts([config.prompt])
  control, attention, totals = pipeline.dense_control(), [], {"dense": [], "sparse": []}
  for _ in range(ROUNDS):
    attention += attention_seconds(pipeline)
    for name, dense in (("dense", control), ("sparse", None)):
      list(pipeline.denoise([Request(config.prompt, 0)], text, control=dense))
      totals[name].append(sum(pipeline.step_seconds))
  mask = report.mask_records(pipeline)[0]
  temporal = np.stack([routes for routes in pipeline.routes if routes is not None])
  executed = np.where(temporal, mask["executed_tile_fraction_temporal"], mask["executed_tile_fraction_spatial"]).mean()
  one = statistics.median(attention)
  sparse_layers = sum(step.sparse.layer_end - step.sparse.layer_start for step in pipeline.steps if step.sparse)
  predicted = sparse_layers * one * (1 - executed)
  dense, sparse = (statistics.median(totals[name]) for name in ("dense", "sparse"))
  print(f"one dense attention {one:.3f} s; {sparse_layers} sparse layers, {executed:.2%} of the tiles run")
  for name, seconds in totals.items():
    print(f"denoising {name}: median {statistics.median(seconds):.2f} s of {', '.join(f'{s:.2f}' for s in seconds)}")
  saved = dense - sparse
  print(f"saved {saved:.2f} s, predicted {predicted:.2f} s: {saved / predicted:.2f} of the prediction")


if __name__ == "__main__":
  main(sys.argv[1:])

"""What a pipeline is about to do, in words: the plan of every run, and a dry run's estimates.

Reads a `VideoPipeline` and computes nothing on the devices, but for a matrix product that tells `estimate` their speed.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.attention.svg import accounting
from MaxText.parallel import memory
from MaxText.parallel import mesh as mesh_lib
from MaxText.reporter import seconds_in_words


def describe(pipeline) -> list[str]:
  """The plan, before anything is loaded."""
  config, steps = pipeline.config, pipeline.steps
  F, H, W = config.token_grid
  guidance = " / ".join(f"{scale:g}" for scale in config.guidance_scales)
  lines = [
    f"{config.width}×{config.height}, {config.num_frames} frames at {config.fps:g} fps: {F}×{H}×{W} = "
    f"{config.num_tokens:,} tokens; {len(steps)} steps ({config.solver}, shift {config.flow_shift:g}), "
    f"guidance {guidance} in {sum(step.guided for step in steps)} of them",
    f"on {mesh_lib.describe(pipeline.placement.mesh)}; dense attention: {pipeline.dense_kernel.describe()}",
  ]
  if config.num_experts == 2:
    high = sum(step.expert == 0 for step in steps)
    lines.append(f"experts: high noise in steps [0, {high}), low noise in [{high}, {len(steps)})")
  if pipeline.schedule is not None:
    lines += pipeline.schedule.describe()
    for row in mask_records(pipeline):
      name = "executed_fraction" if row["kernel"] == "aligned" else "kept_fraction"
      kept = " and ".join(f"{row[f'{name}_{kind}']:.2%} of a {kind}" for kind in ("spatial", "temporal"))
      tiles = " and ".join(f"{row[f'executed_tile_fraction_{kind}']:.2%}" for kind in ("spatial", "temporal"))
      lines.append(
        f"density {row['density']}: half-width {row['half_width']:,} tokens, keeps {kept} head's pairs (with sink); of "
        f"the tiles, {row['block_q']} queries × {row['block_kv']} keys, {tiles} run"
      )
      if row["executed_tile_fraction_spatial"] == 1.0:
        pipeline.reporter.warn(f"density {row['density']}: every tile runs at this size, as with dense attention")
    saved = flops_saved(pipeline)
    lines.append(f"the masks leave out {saved:.1%} of the transformer's FLOPs (all heads counted as spatial)")
  return lines


def check_memory(pipeline) -> None:
  """Refuses, before anything is loaded, weights that the devices cannot hold.

  Raises:
    ValueError: names the sizes and what to change.
  """
  weights = pipeline.abstract_weights()
  loaded = [{name: weights.pop(name)} for name in ("vae", "text_encoder")]  # alone; the text encoder leaves again
  if pipeline.config.latents_path:
    loaded, weights = loaded[:1], {}
  elif pipeline.folder is None:  # random embeddings
    loaded = loaded[:1]
  narrower = "" if pipeline.dtypes["weight_dtype"].itemsize == 2 else "weight_dtype=bfloat16, "
  advice = f"take {narrower}a smaller model, or more devices (ici_fsdp_parallelism splits weights)"
  for held in (*loaded, weights):
    memory.check_fits(held, pipeline.placement.mesh, advice)


def flops_saved(pipeline) -> float:
  """Share of the transformer's FLOPs that the schedule saves, sink included."""
  config, wan = pipeline.config, pipeline.config.wan()
  return accounting.flops_saved(
    pipeline.schedule.steps,
    config.token_grid,
    num_layers=wan.num_layers,
    text_tokens=config.text_length,
    width=wan.width,
    ffn_width=wan.ffn_dim,
    sink_frames=min(config.svg_sink_frames, config.token_grid[0]),
    sink=config.svg_sink,
  )


def mask_records(pipeline) -> list[dict[str, Any]]:
  """One entry a density: exact counts of kept pairs, and of tiles, for a spatial and a temporal head."""
  records = {}
  for plan in (step.sparse for step in pipeline.steps if step.sparse is not None):
    counts = pipeline.svg_attention(plan.half_width).counts(pipeline.config.token_grid, pipeline.platform)
    records[plan.half_width] = {"density": plan.density, **counts}
  return list(records.values())


def estimate(pipeline, num_videos: int) -> list[str]:
  """For a dry run: weights and activations a device holds, and the time of the steps. Estimates, and labelled so."""
  config, placement, wan = pipeline.config, pipeline.placement, pipeline.config.wan()
  sizes = {name: memory.device_bytes(tree) for name, tree in pipeline.abstract_weights().items()}
  batch = config.batch_size * (2 if any(step.guided for step in pipeline.steps) else 1)
  shape = placement.mesh.shape
  local_tokens = batch * config.num_tokens / min(batch, shape["data"]) / shape["context"]
  # One layer at a time: residual stream and its norm in float32, q, k, v and the output, and the MLP.
  bytes_a_token = 8 * wan.width + (4 * wan.width + wan.ffn_dim) * pipeline.dtypes["dtype"].itemsize
  text = 2 * wan.num_layers * batch * config.text_length * wan.width * pipeline.dtypes["dtype"].itemsize
  gib = ", ".join(f"{name} {size / memory.GIB:.2f}" for name, size in sizes.items())
  held = sum(size for name, size in sizes.items() if name not in ("text_encoder", "vae")) + text
  denoising = (held + local_tokens * bytes_a_token) / memory.GIB
  flops = total_flops(pipeline) * -(-num_videos // config.batch_size) * batch
  rate = measured_flops_per_second(pipeline.dtypes["dtype"]) * placement.mesh.size
  return [
    f"memory a device, estimate: weights {gib} GiB (the text encoder leaves before the transformer comes); denoising "
    f"{denoising:.2f} GiB with the text's keys and values and a layer's activations",
    f"time, estimate: {flops:.3g} FLOPs of denoising at {rate:.3g} FLOP/s (a matrix product measured just now on "
    f"{placement.mesh.devices.flat[0].device_kind}, times the devices): at least {seconds_in_words(flops / rate)}",
    "dry run: nothing was loaded or written",
  ]


def total_flops(pipeline) -> float:
  """FLOPs of all steps for one sample."""
  config, wan = pipeline.config, pipeline.config.wan()
  attention, other = accounting.layer_flops(config.num_tokens, config.text_length, wan.width, wan.ffn_dim)
  dense = len(pipeline.steps) * wan.num_layers * (attention + other)
  return dense * (1.0 - (flops_saved(pipeline) if pipeline.schedule is not None else 0.0))


@functools.cache
def measured_flops_per_second(dtype: Any, size: int = 1024) -> float:
  """Rate of a square matrix product on the first device, the best of five."""
  x = jnp.ones((size, size), dtype)
  product = jax.jit(lambda x: x @ x)
  product(x).block_until_ready()
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    product(x).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * size**3 / min(seconds)

"""What a training run says of each step: the line on the terminal, metrics.jsonl, and the arithmetic behind TFLOP/s.

Dimensions: S video tokens, T text tokens, E width, L layers.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any, TextIO

import jax

from MaxText.training.tensorboard import TensorBoard

# Dense bfloat16 TFLOP/s of one device by its `device_kind`, from Google Cloud's pages on each TPU version.
PEAK_TFLOPS = {"TPU v4": 275.0, "TPU v5 lite": 197.0, "TPU v5": 459.0, "TPU v6 lite": 918.0, "TPU7x": 1153.5}
# Memory of one device in GiB by its `device_kind`: what these pages call GB (of a chip; a TPU7x chip is two devices). The
# runtime keeps a little of it.
HBM_GIB = {"TPU v4": 32.0, "TPU v5 lite": 16.0, "TPU v5": 95.0, "TPU v6 lite": 32.0, "TPU7x": 96.0}


def train_flops(cfg, tokens: int, text_tokens: int, *, lora: bool) -> float:
  """Floating point operations of the model for one sample: forward and backward, without what remat computes again.

  A backward pass costs twice the forward; under a LoRA about once, since the gradients of the weights are left out.
  Counted are matrix products (2 for a multiply-add); norms, softmax and the adapters are not.

  Args:
    cfg: WanConfig. tokens: S. text_tokens: T.
  """
  E, S, T = cfg.width, tokens, text_tokens
  self_attention = 8 * S * E * E + 4 * S * S * E
  cross_attention = 4 * S * E * E + 4 * T * E * E + 4 * S * T * E
  layer = self_attention + cross_attention + 4 * S * E * cfg.ffn_dim
  ends = 2 * S * cfg.patch_volume * (cfg.in_channels + cfg.out_channels) * E + 2 * T * (cfg.text_dim + E) * E
  return (2 if lora else 3) * (cfg.num_layers * layer + ends)


def text_train_flops(cfg, text_tokens: int) -> float:
  """Forward and backward of the text encoder for one text, counted as in `train_flops`. cfg: Umt5Config."""
  E, T, inner = cfg.d_model, text_tokens, cfg.num_heads * cfg.d_kv
  return 3 * cfg.num_layers * (8 * T * E * inner + 4 * T * T * inner + 6 * T * E * cfg.d_ff)


@functools.cache
def vae_train_flops(cfg, batch: int, frames: int, height: int, width: int) -> float:
  """Forward and backward of the VAE on a batch, without what remat computes again. cfg: VaeConfig.

  The compiler's count for the first chunk and for one of the others, which are all alike; a backward pass costs twice.
  """
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from MaxText.models import vae

  graphdef, state = nnx.split(nnx.eval_shape(lambda: vae.WanVae(cfg, rngs=nnx.Rngs(0))))
  step = cfg.temporal_stride

  def count(program, *arguments) -> float:
    return program.lower(*arguments).cost_analysis()["flops"]

  total = 0.0
  small = (height // cfg.spatial_stride, width // cfg.spatial_stride)
  for method, first, later in (("encode", (1, height, width, 3), (step, height, width, 3)),
                               ("decode", (1, *small, cfg.z_dim), (1, *small, cfg.z_dim))):
    first, later = (jax.ShapeDtypeStruct((batch, *shape), jnp.float32) for shape in (first, later))
    cache = jax.eval_shape(vae.first_chunk, method, graphdef, state, first)[1]
    total += count(vae.first_chunk, method, graphdef, state, first)
    total += (frames - 1) // step * count(vae.next_chunk, method, graphdef, state, later, cache)
  return 3 * total


def batch_flops(config, batch) -> float:
  """Forward and backward of a whole batch, whose clips may have another size than the configuration's."""
  if config.train_target == "vae":
    return vae_train_flops(config.vae(), *batch["video"].shape[:4])
  frames, *picture = batch["latents"].shape[1:4]
  tokens = math.prod(config.wan().token_grid(min(frames, config.train_latent_frames or frames), *picture))
  text_tokens = batch["ids" if config.train_target == "text" else "text"].shape[1]
  each = train_flops(config.wan(), tokens, text_tokens, lora=config.lora_rank > 0)
  if config.train_target == "text":
    each += text_train_flops(config.umt5(), text_tokens)
  return len(batch["latents"]) * each


def step_line(step: int, seconds: float, tflops: float, loss: float) -> str:
  """MaxText's line. step: how many are completed; tflops: of one device."""
  return f"completed step: {step}, seconds: {seconds:.3f}, TFLOP/s/device: {tflops:.3f}, loss: {loss:.6f}"


class RunMetrics:
  """All that a run keeps of its steps: metrics.jsonl and TensorBoard's files, each if asked for, by the first process."""

  def __init__(self, config, run: pathlib.Path, step: int):
    first = jax.process_index() == 0
    self._outputs = (
      MetricsFile(run / "metrics.jsonl" if config.write_metrics and first else None, step),
      TensorBoard(run / "tensorboard" if config.write_tensorboard and first else None, step))

  def write(self, **values: Any) -> None:
    """`step` says how many are completed."""
    for output in self._outputs:
      output.write(**values)

  def close(self) -> None:
    for output in self._outputs:
      output.close()


class MetricsFile:
  """metrics.jsonl: one object a line, flushed line by line. With path None nothing is written.

  A run that continues keeps the lines up to the step it continues from: what comes after will be computed again.
  """

  def __init__(self, path: pathlib.Path | None, step: int):
    self._file: TextIO | None = None
    if path is None:
      return
    kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step] if path.exists() else []
    path.write_text("".join(line + "\n" for line in kept))
    self._file = open(path, "a", encoding="utf-8")

  def write(self, **values: Any) -> None:
    if self._file is not None:
      self._file.write(json.dumps(values) + "\n")
      self._file.flush()

  def close(self) -> None:
    if self._file is not None:
      self._file.close()


def _step_of(line: str) -> float:
  """Step of a line; a line that a killed run left half written has none and is dropped."""
  try:
    return json.loads(line)["step"]
  except (ValueError, KeyError, TypeError):
    return float("inf")

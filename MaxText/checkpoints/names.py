"""The table of names: every tensor of a Wan checkpoint, as three projects call it and as we store it.

A row says where a tensor lives in our state (`path`, and `layer` when the leaf is stacked over the layers), what it is
called in a Diffusers folder (`name`) and in the original release (`original`), its shape there, and how the one layout
becomes the other. The table is built from the architecture alone, so it serves reading, writing, LoRA files, and the
check of a folder before any weight is read. Nothing here imports JAX.

Dimensions: E width, C channels, O out, I in, t h w kernel size over time, height, width; L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from MaxText.models.umt5 import Umt5Config
  from MaxText.models.vae import VaeConfig
  from MaxText.models.wan import WanConfig

COMPONENTS = ("transformer", "transformer_2", "vae", "text_encoder")


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a checkpoint.

  Attributes:
    path: dotted path of our leaf.
    layer: index into the leading 'layers' axis of that leaf, or None.
    name: name in a Diffusers folder.
    original: name in the original release.
    shape: shape in both of them.
    order: our axes as positions of theirs (the argument of `transpose`).
    our_shape: our shape after the transpose, without the layers axis; sizes merged or axes of length 1 dropped.
    aliases: further Diffusers names under which the same numbers may stand.
  """

  path: str
  layer: int | None
  name: str
  original: str
  shape: tuple[int, ...]
  order: tuple[int, ...]
  our_shape: tuple[int, ...]
  aliases: tuple[str, ...] = ()

  def to_ours(self, array):
    """Their layout to ours; works on numpy and JAX arrays."""
    return array.transpose(self.order).reshape(self.our_shape)

  def to_theirs(self, array):
    """Our layout to theirs; works on numpy and JAX arrays."""
    transposed = tuple(self.shape[axis] for axis in self.order)
    return array.reshape(transposed).transpose(tuple(int(i) for i in np.argsort(self.order)))


# What a module holds: (their suffix, our suffix, layout), the weight first. The shape in the tables is that of the
# weight; a bias has its first dimension.
_HOLDS = {
  "linear": ((".weight", ".kernel", "reversed"), (".bias", ".bias", "same")),
  "linear_without_bias": ((".weight", ".kernel", "reversed"),),
  "patch": ((".weight", ".kernel", "patch"), (".bias", ".bias", "same")),
  "conv": ((".weight", ".kernel", "reversed"), (".bias", ".bias", "same")),
  "layer_norm": ((".weight", ".scale", "same"), (".bias", ".bias", "same")),
  "rms_norm": ((".weight", ".scale", "same"),),
  "gamma": ((".gamma", ".scale", "vector"),),
  "modulation": (("", "", "drop_first"),),
  "embedding": ((".weight", ".embedding", "same"),),
  "bias_table": ((".weight", "", "same"),),
}


def _layout(layout: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns (order, our_shape) of a tensor whose shape in torch is `shape`."""
  axes = tuple(range(len(shape)))
  if layout == "reversed":  # [O, I, t, h, w] -> [t, h, w, I, O], and [O, I] -> [I, O]
    order = (*axes[2:], 1, 0)
    return order, tuple(shape[axis] for axis in order)
  if layout == "patch":  # [E, C, t, h, w] -> [(t, h, w, C), E]
    return (*axes[2:], 1, 0), (math.prod(shape[1:]), shape[0])
  if layout == "vector":  # [C, 1, 1, 1] -> [C]
    return axes, shape[:1]
  if layout == "drop_first":  # [1, 6, E] -> [6, E]
    return axes, shape[1:]
  return axes, shape


def _rows(
  ours: str, name: str, original: str, holds: str, shape: tuple[int, ...], layer: int | None = None
) -> list[Tensor]:
  """The tensors of one module, given its name in the three projects and the shape of its weight."""
  rows = []
  for i, (their_suffix, our_suffix, layout) in enumerate(_HOLDS[holds]):
    tensor_shape = shape if i == 0 else shape[:1]
    order, our_shape = _layout(layout, tensor_shape)
    rows.append(Tensor(path=ours + our_suffix, layer=layer, name=name + their_suffix, original=original + their_suffix,
                       shape=tensor_shape, order=order, our_shape=our_shape))
  return rows


def _dit(cfg: WanConfig) -> list[Tensor]:
  E = cfg.num_heads * cfg.head_dim
  time, text = "condition_embedder.time_embedder", "condition_embedder.text_embedder"
  time_proj = "condition_embedder.time_proj"
  # (our module, in Diffusers, in the original release, what it holds, shape of the weight)
  top = (
    ("patch_embedding", "patch_embedding", "patch_embedding", "patch", (E, cfg.in_channels, *cfg.patch_size)),
    (f"{time}.linear_1", f"{time}.linear_1", "time_embedding.0", "linear", (E, cfg.freq_dim)),
    (f"{time}.linear_2", f"{time}.linear_2", "time_embedding.2", "linear", (E, E)),
    (time_proj, time_proj, "time_projection.1", "linear", (6 * E, E)),
    (f"{text}.linear_1", f"{text}.linear_1", "text_embedding.0", "linear", (E, cfg.text_dim)),
    (f"{text}.linear_2", f"{text}.linear_2", "text_embedding.2", "linear", (E, E)),
    # Rows of proj_out run over (pt, ph, pw, C) in all three, so it is a plain linear layer.
    ("proj_out", "proj_out", "head.head", "linear", (math.prod(cfg.patch_size) * cfg.out_channels, E)),
    ("scale_shift_table", "scale_shift_table", "head.modulation", "modulation", (1, 2, E)),
  )
  block = [
    ("norm2", "norm2", "norm3", "layer_norm", (E,)),
    ("ffn.up", "ffn.net.0.proj", "ffn.0", "linear", (cfg.ffn_dim, E)),
    ("ffn.down", "ffn.net.2", "ffn.2", "linear", (E, cfg.ffn_dim)),
    ("scale_shift_table", "scale_shift_table", "modulation", "modulation", (1, 6, E)),
  ]
  for ours, original in (("attn1", "self_attn"), ("attn2", "cross_attn")):
    for letter in "qkv":
      block.append((f"{ours}.to_{letter}", f"{ours}.to_{letter}", f"{original}.{letter}", "linear", (E, E)))
    block.append((f"{ours}.to_out", f"{ours}.to_out.0", f"{original}.o", "linear", (E, E)))
    for letter in "qk":
      block.append((f"{ours}.norm_{letter}", f"{ours}.norm_{letter}", f"{original}.norm_{letter}", "rms_norm", (E,)))

  rows = [row for module in top for row in _rows(*module)]
  for layer in range(cfg.num_layers):
    for ours, name, original, holds, shape in block:
      rows += _rows(f"blocks.{ours}", f"blocks.{layer}.{name}", f"blocks.{layer}.{original}", holds, shape, layer)
  return rows


def _umt5(cfg: Umt5Config) -> list[Tensor]:
  E, inner = cfg.d_model, cfg.num_heads * cfg.d_kv
  block = (
    ("attention_norm", "layer.0.layer_norm", "norm1", "rms_norm", (E,)),
    ("attention.q", "layer.0.SelfAttention.q", "attn.q", "linear_without_bias", (inner, E)),
    ("attention.k", "layer.0.SelfAttention.k", "attn.k", "linear_without_bias", (inner, E)),
    ("attention.v", "layer.0.SelfAttention.v", "attn.v", "linear_without_bias", (inner, E)),
    ("attention.o", "layer.0.SelfAttention.o", "attn.o", "linear_without_bias", (E, inner)),
    ("attention.relative_bias", "layer.0.SelfAttention.relative_attention_bias", "pos_embedding.embedding", "bias_table",
     (cfg.num_buckets, cfg.num_heads)),
    ("ffn_norm", "layer.1.layer_norm", "norm2", "rms_norm", (E,)),
    ("ffn.gate", "layer.1.DenseReluDense.wi_0", "ffn.gate.0", "linear_without_bias", (cfg.d_ff, E)),
    ("ffn.up", "layer.1.DenseReluDense.wi_1", "ffn.fc1", "linear_without_bias", (cfg.d_ff, E)),
    ("ffn.down", "layer.1.DenseReluDense.wo", "ffn.fc2", "linear_without_bias", (E, cfg.d_ff)),
  )
  (embedding,) = _rows("token_embedding", "shared", "token_embedding", "embedding", (cfg.vocab_size, E))
  rows = [dataclasses.replace(embedding, aliases=("encoder.embed_tokens.weight",))]
  for layer in range(cfg.num_layers):
    for ours, name, original, holds, shape in block:
      rows += _rows(f"blocks.{ours}", f"encoder.block.{layer}.{name}", f"blocks.{layer}.{original}", holds, shape, layer)
  return rows + _rows("final_norm", "encoder.final_layer_norm", "norm", "rms_norm", (E,))


def _vae(cfg: VaeConfig) -> list[Tensor]:
  """Our paths are the Diffusers names; the original release numbers residual blocks and resamplers in one list."""
  rows = []

  def add(name, original, holds, shape):
    rows.extend(_rows(name, name, original, holds, shape))

  def residual(name, original, num_in, num_out):
    add(f"{name}.norm1", f"{original}.residual.0", "gamma", (num_in, 1, 1, 1))
    add(f"{name}.conv1", f"{original}.residual.2", "conv", (num_out, num_in, 3, 3, 3))
    add(f"{name}.norm2", f"{original}.residual.3", "gamma", (num_out, 1, 1, 1))
    add(f"{name}.conv2", f"{original}.residual.6", "conv", (num_out, num_out, 3, 3, 3))
    if num_in != num_out:
      add(f"{name}.conv_shortcut", f"{original}.shortcut", "conv", (num_out, num_in, 1, 1, 1))

  def middle(side, width):
    residual(f"{side}.mid_block.resnets.0", f"{side}.middle.0", width, width)
    name, original = f"{side}.mid_block.attentions.0", f"{side}.middle.1"
    add(f"{name}.norm", f"{original}.norm", "gamma", (width, 1, 1))
    add(f"{name}.to_qkv", f"{original}.to_qkv", "conv", (3 * width, width, 1, 1))
    add(f"{name}.proj", f"{original}.proj", "conv", (width, width, 1, 1))
    residual(f"{side}.mid_block.resnets.1", f"{side}.middle.2", width, width)

  def ends(side, num_in, first, last, num_out):
    add(f"{side}.conv_in", f"{side}.conv1", "conv", (first, num_in, 3, 3, 3))
    add(f"{side}.norm_out", f"{side}.head.0", "gamma", (last, 1, 1, 1))
    add(f"{side}.conv_out", f"{side}.head.2", "conv", (num_out, last, 3, 3, 3))

  widths = [cfg.base_dim * m for m in cfg.dim_mult]
  stages = len(widths)
  ends("encoder", 3, cfg.base_dim, widths[-1], 2 * cfg.z_dim)
  position, width = 0, cfg.base_dim
  for stage, num_out in enumerate(widths):
    for _ in range(cfg.num_res_blocks):
      residual(f"encoder.down_blocks.{position}", f"encoder.downsamples.{position}", width, num_out)
      position, width = position + 1, num_out
    if stage < stages - 1:
      name, original = f"encoder.down_blocks.{position}", f"encoder.downsamples.{position}"
      add(f"{name}.resample.1", f"{original}.resample.1", "conv", (width, width, 3, 3))
      if cfg.temporal_downsample[stage]:
        add(f"{name}.time_conv", f"{original}.time_conv", "conv", (width, width, 3, 1, 1))
      position += 1
  middle("encoder", widths[-1])

  add("quant_conv", "conv1", "conv", (2 * cfg.z_dim, 2 * cfg.z_dim, 1, 1, 1))
  add("post_quant_conv", "conv2", "conv", (cfg.z_dim, cfg.z_dim, 1, 1, 1))

  ends("decoder", cfg.z_dim, widths[-1], cfg.base_dim, 3)
  middle("decoder", widths[-1])
  position, width = 0, widths[-1]
  for stage, num_out in enumerate(reversed(widths)):
    for i in range(cfg.num_res_blocks + 1):
      residual(f"decoder.up_blocks.{stage}.resnets.{i}", f"decoder.upsamples.{position}", width, num_out)
      position, width = position + 1, num_out
    if stage < stages - 1:
      name, original = f"decoder.up_blocks.{stage}.upsamplers.0", f"decoder.upsamples.{position}"
      add(f"{name}.resample.1", f"{original}.resample.1", "conv", (width // 2, width, 3, 3))
      if cfg.temporal_downsample[stages - 2 - stage]:
        add(f"{name}.time_conv", f"{original}.time_conv", "conv", (2 * width, width, 3, 1, 1))
      width, position = width // 2, position + 1
  return rows


@functools.cache
def tensors(component: str, config: WanConfig | VaeConfig | Umt5Config) -> tuple[Tensor, ...]:
  """Every tensor of `component` (one of COMPONENTS) at the architecture `config`."""
  build = {"transformer": _dit, "transformer_2": _dit, "vae": _vae, "text_encoder": _umt5}[component]
  return tuple(build(config))


def leaf_shapes(rows: tuple[Tensor, ...]) -> dict[str, tuple[int, ...]]:
  """Shape of every leaf of our state, stacked ones with their layers."""
  return {row.path: row.our_shape if row.layer is None else (row.layer + 1, *row.our_shape) for row in rows}

"""Layers of the Wan 2.1 video autoencoder: causal convolutions with a feature cache, residual blocks, resampling.

A video goes through the network in chunks: the first frame alone, then a few frames at a time. A causal convolution
reaches back over a chunk's start into frames that were seen before, so every such layer leaves its last frames in a
`FeatureCache`, and the next chunk starts from there. The result does not depend on where a video is cut, and memory does
not grow with its length.

Before the first frame there are zeros. The first chunk is a single frame, so all taps but the last would multiply zeros:
it runs as a network of 2-D convolutions, at a third of the cost, and gives the same numbers.

Attributes that hold parameters or lists carry the reference's names (AutoencoderKLWan of diffusers), so that a weight's
path here is its path there, with `weight` called `kernel` and `gamma` called `scale`.

Dimensions: B batch, T frames of a chunk, H W picture, C channels in, O channels out, S = H·W positions of one picture.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.models import layers

_ATTENTION_ROWS = 1024  # queries a block: 1,024 × 57,600 float32 scores (a 1440p picture) take 236 MB


class FeatureCache:
  """What the causal layers remember from one chunk to the next, in the order in which they are called.

  A plain object that lives while one chunk is traced. `entries`, an ordinary tuple of arrays, is what is carried between
  chunks.
  """

  def __init__(self, entries: tuple[jax.Array, ...] | None = None):
    """Starts a chunk from the entries that the chunk before left; None: the first chunk."""
    self._before = entries
    self._after = []

  @property
  def is_first(self) -> bool:
    return self._before is None

  def recall(self) -> jax.Array:
    """The frames that the calling layer remembered last time; the layer must `remember` before the next one recalls."""
    return self._before[len(self._after)]

  def remember(self, frames: jax.Array) -> None:
    self._after.append(frames)

  @property
  def entries(self) -> tuple[jax.Array, ...]:
    return tuple(self._after)


def conv2d(x_BTHWC, kernel, *, stride: int = 1, padding=((1, 1), (1, 1))):
  """Convolves every frame with kernel [h, w, C, O]."""
  if kernel.shape[:2] == (1, 1):
    return x_BTHWC @ kernel[0, 0]
  B, T = x_BTHWC.shape[:2]
  y = jax.lax.conv_general_dilated(x_BTHWC.reshape(B * T, *x_BTHWC.shape[2:]), kernel, (stride, stride), padding,
                                   dimension_numbers=("NHWC", "HWIO", "NHWC"))
  return y.reshape(B, T, *y.shape[1:])


def conv3d(x_BTHWC, kernel, time_stride: int):
  """Convolves with kernel [t, h, w, C, O]; zeros around the picture, none before the first frame."""
  padding = [(0, 0), *((size // 2, size // 2) for size in kernel.shape[1:3])]
  return jax.lax.conv_general_dilated(x_BTHWC, kernel, (time_stride, 1, 1), padding,
                                      dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))


def conv3d_by_frames(x_BTHWC, kernel, time_stride: int):
  """What `conv3d` computes, as a sum of t convolutions of frames."""
  taps = kernel.shape[0]
  end = x_BTHWC.shape[1] - taps + 1  # one past the first frame of the last output's window
  return sum(conv2d(x_BTHWC[:, i:end + i:time_stride], kernel[i]) for i in range(taps))


class Conv2d(nnx.Module):
  """A 3×3 (or 1×1) convolution of every frame; kernel [h, w, C, O], bias [O]."""

  def __init__(self, make: layers.ParamMaker, num_in: int, num_out: int, size: int, *, stride: int = 1,
               padding=((1, 1), (1, 1))):
    self.dtype, self.stride, self.padding = make.dtype, stride, padding
    self.kernel = make((size, size, num_in, num_out), (None, None, "conv_in", "conv_out"),
                       layers.fan_in(size * size * num_in))
    self.bias = make((num_out,), ("conv_out",), layers.zeros)

  def __call__(self, x):
    y = conv2d(x.astype(self.dtype), self.kernel[...].astype(self.dtype), stride=self.stride, padding=self.padding)
    return y + self.bias[...].astype(self.dtype)


class CausalConv(nnx.Module):
  """A convolution over time and picture that sees no later frame; kernel [t, h, w, C, O], bias [O].

  On a CPU it runs as a sum of convolutions of frames, 1.4 to 3.3 times as fast as XLA's 3-D convolution (CPU test on a
  busy machine of 2 cores: chunks of 1 to 4 frames, 32 to 128 channels). On a TPU the 3-D convolution takes half the time
  and memory of the sum (AOT estimate, v6e, 4 frames of 480×832 with 96 channels in bfloat16: 12.8 ms, 1.1 GB of
  temporaries; against 23.8 ms, 2.1 GB).

  Attributes:
    history: number of frames from before the chunk that its first output needs.
  """

  def __init__(self, make: layers.ParamMaker, num_in: int, num_out: int, size: tuple[int, int, int], *,
               time_stride: int = 1):
    self.dtype, self.time_stride = make.dtype, time_stride
    self.history = size[0] - time_stride
    self.kernel = make((*size, num_in, num_out), (None, None, None, "conv_in", "conv_out"),
                       layers.fan_in(math.prod(size) * num_in))
    self.bias = make((num_out,), ("conv_out",), layers.zeros)

  def __call__(self, x, cache: FeatureCache | None = None):
    """[B, T, H, W, C] -> [B, T / time_stride, H, W, O]; `cache` may be left out where history is 0."""
    x = x.astype(self.dtype)
    kernel = self.kernel[...].astype(self.dtype)
    if self.history == 0:
      y = conv2d(x, kernel[0])
    elif cache.is_first:
      if x.shape[1] != 1:
        raise ValueError(f"the first chunk of a video is one frame, got {x.shape[1]}")
      cache.remember(jnp.pad(x, ((0, 0), (self.history - 1, 0), (0, 0), (0, 0), (0, 0))))
      y = conv2d(x, kernel[-1])
    else:
      window = jnp.concatenate([cache.recall(), x], axis=1)
      cache.remember(window[:, -self.history:])
      y = jax.lax.platform_dependent(
        window, kernel, cpu=functools.partial(conv3d_by_frames, time_stride=self.time_stride),
        default=functools.partial(conv3d, time_stride=self.time_stride))
    return y + self.bias[...].astype(self.dtype)


class ChannelNorm(nnx.Module):
  """x / ‖x‖ · sqrt(C) · scale over the channels, in float32, returned in the input's type."""

  def __init__(self, make: layers.ParamMaker, channels: int):
    self.scale = make((channels,), ("norm",), layers.ones, float32=True)

  def __call__(self, x):
    x32 = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True))
    return (x32 / jnp.maximum(norm, 1e-12) * math.sqrt(x.shape[-1]) * self.scale[...]).astype(x.dtype)


class ResidualBlock(nnx.Module):
  """shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x)))))), with 3×3×3 causal convolutions."""

  def __init__(self, make: layers.ParamMaker, num_in: int, num_out: int):
    self.norm1 = ChannelNorm(make, num_in)
    self.conv1 = CausalConv(make, num_in, num_out, (3, 3, 3))
    self.norm2 = ChannelNorm(make, num_out)
    self.conv2 = CausalConv(make, num_out, num_out, (3, 3, 3))
    self.conv_shortcut = CausalConv(make, num_in, num_out, (1, 1, 1)) if num_in != num_out else None

  def __call__(self, x, cache: FeatureCache):
    shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x)
    x = self.conv1(jax.nn.silu(self.norm1(x)), cache)
    x = self.conv2(jax.nn.silu(self.norm2(x)), cache)
    return x + shortcut


def attend_picture(q_FSC, k_FSC, v_FSC):
  """One-headed softmax attention inside each of F pictures, a block of queries at a time so that no S×S array exists."""

  def attend_rows(q_FRC):
    scores = jnp.einsum("frc,fsc->frs", q_FRC, k_FSC, preferred_element_type=jnp.float32) / math.sqrt(q_FRC.shape[-1])
    weights = jax.nn.softmax(scores, axis=-1).astype(v_FSC.dtype)
    return jnp.einsum("frs,fsc->frc", weights, v_FSC)

  F, S, C = q_FSC.shape
  if S <= _ATTENTION_ROWS:
    return attend_rows(q_FSC)
  num_blocks = -(-S // _ATTENTION_ROWS)
  rows = -(-S // num_blocks)
  q = jnp.pad(q_FSC, ((0, 0), (0, num_blocks * rows - S), (0, 0)))
  out = jax.lax.map(attend_rows, q.reshape(F, num_blocks, rows, C).swapaxes(0, 1))
  return out.swapaxes(0, 1).reshape(F, num_blocks * rows, C)[:, :S]


class PictureAttention(nnx.Module):
  """Residual self-attention with one head over the positions of each frame."""

  def __init__(self, make: layers.ParamMaker, channels: int):
    self.norm = ChannelNorm(make, channels)
    self.to_qkv = Conv2d(make, channels, 3 * channels, 1)
    self.proj = Conv2d(make, channels, channels, 1)

  def __call__(self, x):
    B, T, H, W, C = x.shape
    qkv = self.to_qkv(self.norm(x)).reshape(B * T, H * W, 3 * C)
    out = attend_picture(*jnp.split(qkv, 3, axis=-1))
    return x + self.proj(out.reshape(x.shape))


class MidBlock(nnx.Module):
  """Residual block, attention, residual block."""

  def __init__(self, make: layers.ParamMaker, channels: int):
    self.resnets = nnx.List([ResidualBlock(make, channels, channels) for _ in range(2)])
    self.attentions = nnx.List([PictureAttention(make, channels)])

  def __call__(self, x, cache: FeatureCache):
    x = self.attentions[0](self.resnets[0](x, cache))
    return self.resnets[1](x, cache)


class Repeat2x(nnx.Module):
  """Doubles height and width by repeating every pixel."""

  def __call__(self, x):
    return jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)


class PadAfter(nnx.Module):
  """Adds a row of zeros below and a column at the right: with them a 3×3 convolution of stride 2 halves a picture."""

  def __call__(self, x):
    return jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)))


class Upsample(nnx.Module):
  """Twice the height and width, half the channels; with `temporal` also twice the frames, except for the first chunk.

  A video's first frame stands alone, so it is not doubled and the temporal convolution never sees it: to that layer, the
  frames before the second chunk are zeros.
  """

  def __init__(self, make: layers.ParamMaker, channels: int, temporal: bool):
    self.resample = nnx.List([Repeat2x(), Conv2d(make, channels, channels // 2, 3)])
    self.time_conv = CausalConv(make, channels, 2 * channels, (3, 1, 1)) if temporal else None

  def __call__(self, x, cache: FeatureCache):
    if self.time_conv is not None:
      B, T, H, W, C = x.shape
      if cache.is_first:
        cache.remember(jnp.zeros((B, self.time_conv.history, H, W, C), self.time_conv.dtype))
      else:
        pairs = self.time_conv(x, cache).reshape(B, T, H, W, 2, C)
        x = jnp.moveaxis(pairs, 4, 2).reshape(B, 2 * T, H, W, C)
    for layer in self.resample:
      x = layer(x)
    return x


class Downsample(nnx.Module):
  """Half the height and width; with `temporal` also half the frames, except for the first chunk, which is one frame."""

  def __init__(self, make: layers.ParamMaker, channels: int, temporal: bool):
    self.resample = nnx.List([PadAfter(), Conv2d(make, channels, channels, 3, stride=2, padding=((0, 0), (0, 0)))])
    self.time_conv = CausalConv(make, channels, channels, (3, 1, 1), time_stride=2) if temporal else None

  def __call__(self, x, cache: FeatureCache):
    for layer in self.resample:
      x = layer(x)
    if self.time_conv is None:
      return x
    if cache.is_first:
      cache.remember(x)
      return x
    return self.time_conv(x, cache)

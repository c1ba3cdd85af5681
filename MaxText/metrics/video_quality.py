"""How far one video is from another: PSNR in RGB, PSNR in YUV as FFmpeg counts it, and SSIM, all on uint8 pixels.

What each figure means, since papers seldom say:
  psnr      10 log10(255^2 / MSE), the MSE over all frames, pixels and RGB channels of the clip together. (The mean of
            per-frame PSNRs would be larger, and infinite with one equal frame.)
  yuv_psnr  as FFmpeg's psnr filter sums up, on the frames that `write_video` encodes (BT.709, limited range; U and V at
            half resolution for even sizes): MSE averaged over frames, planes weighted by their number of samples.
  ssim      Wang et al. 2004: Gaussian window 11 x 11, sigma 1.5, K1 = .01, K2 = .03, population variances, only windows
            inside the picture; mean over positions, RGB channels and frames.

Dimensions: T frames, H W rows and columns of pixels.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText import video_io

_WINDOW, _SIGMA = 11, 1.5


class YuvPsnr(NamedTuple):
  """Decibels, inf for equal planes. average: over all samples of the three planes."""

  y: float
  u: float
  v: float
  average: float


def psnr(reference_THW3: np.ndarray, test_THW3: np.ndarray) -> float:
  """RGB PSNR of the whole clip in dB; inf if the clips are equal.

  Raises:
    ValueError: other dtypes than uint8, or shapes that differ.
  """
  _check(reference_THW3, test_THW3)
  return _decibels(np.mean([_mse(a, b) for a, b in zip(reference_THW3, test_THW3, strict=True)]))


def yuv_psnr(reference_THW3: np.ndarray, test_THW3: np.ndarray) -> YuvPsnr:
  """PSNR of the Y, U and V planes and of all together, in dB, pooled as FFmpeg's psnr filter does; errors as `psnr`."""
  _check(reference_THW3, test_THW3)
  pairs = [(video_io.yuv_planes(a), video_io.yuv_planes(b)) for a, b in zip(reference_THW3, test_THW3, strict=True)]
  mse_3 = np.mean([[_mse(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs], axis=0)
  samples_3 = np.array([plane.size for plane in pairs[0][0]])
  return YuvPsnr(*map(_decibels, mse_3), _decibels(mse_3 @ samples_3 / samples_3.sum()))


def ssim(reference_THW3: np.ndarray, test_THW3: np.ndarray) -> float:
  """Mean structural similarity over RGB channels and frames, 1 for equal clips.

  Raises:
    ValueError: as `psnr`, or pictures smaller than the window.
  """
  _check(reference_THW3, test_THW3)
  if min(reference_THW3.shape[1:3]) < _WINDOW:
    raise ValueError(f"SSIM needs pictures of at least {_WINDOW}x{_WINDOW} pixels, got {reference_THW3.shape[1:3]}")
  return float(np.mean([_ssim(a, b) for a, b in zip(reference_THW3, test_THW3, strict=True)]))


def compare(reference_THW3: np.ndarray, test_THW3: np.ndarray) -> dict[str, float | None]:
  """All figures under the names that run records use; None stands for infinite (equal clips), which JSON cannot hold."""
  yuv = yuv_psnr(reference_THW3, test_THW3)
  figures = {
    "psnr_rgb_db": psnr(reference_THW3, test_THW3),
    "psnr_y_db": yuv.y,
    "psnr_yuv_db": yuv.average,
    "ssim_rgb": ssim(reference_THW3, test_THW3),
  }
  return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _check(reference: np.ndarray, test: np.ndarray) -> None:
  for name, clip in (("reference", reference), ("test", test)):
    if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[-1] != 3 or clip.size == 0:
      raise ValueError(f"the {name} clip is {clip.dtype} {clip.shape}; expected uint8 [T, H, W, 3]")
  if reference.shape != test.shape:
    raise ValueError(f"clips of different shapes: {reference.shape} and {test.shape}")


def _mse(a: np.ndarray, b: np.ndarray) -> float:
  difference = a.astype(np.int32) - b.astype(np.int32)
  return float(np.mean(np.square(difference), dtype=np.float64))


def _decibels(mse: float) -> float:
  return 10.0 * math.log10(255.0**2 / mse) if mse > 0 else math.inf


@functools.cache
def _weights() -> tuple[float, ...]:
  x = np.arange(_WINDOW) - _WINDOW // 2
  window = np.exp(-(x**2) / (2 * _SIGMA**2))
  return tuple((window / window.sum()).tolist())


def _blur(image_HWC: jax.Array) -> jax.Array:
  """Gaussian window along both sides, positions inside only. Sums of slices: a convolution would use bfloat16 on TPU."""
  for axis in (0, 1):
    size = image_HWC.shape[axis] - _WINDOW + 1
    image_HWC = sum(w * jax.lax.slice_in_dim(image_HWC, i, i + size, axis=axis) for i, w in enumerate(_weights()))
  return image_HWC


@jax.jit
def _ssim(a_HW3: jax.Array, b_HW3: jax.Array) -> jax.Array:
  # Centred values keep the float32 differences of squares exact enough; the means get their offset back.
  a, b = (x.astype(jnp.float32) / 255.0 - 0.5 for x in (a_HW3, b_HW3))
  mean_a, mean_b = _blur(a), _blur(b)
  var_a = _blur(a * a) - mean_a**2
  var_b = _blur(b * b) - mean_b**2
  covariance = _blur(a * b) - mean_a * mean_b
  mean_a, mean_b = mean_a + 0.5, mean_b + 0.5
  c1, c2 = 0.01**2, 0.03**2
  luminance = (2.0 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
  structure = (2.0 * covariance + c2) / (var_a + var_b + c2)
  return jnp.mean(luminance * structure)

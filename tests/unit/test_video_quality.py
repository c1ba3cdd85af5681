"""Quality figures against literal values, a slow reference and FFmpeg's own filter."""

import contextlib
import gc
import math
import re
from fractions import Fraction

import av
import av.filter
import av.logging
import numpy as np
import pytest

from MaxText.metrics import video_quality
from MaxText.video_io import yuv_planes


@pytest.fixture(scope="module", params=[(48, 80), (33, 47)])
def clips(request):
  """A blocky clip and a copy whose error grows from frame to frame (so that ways of pooling differ)."""
  rng = np.random.default_rng(0)
  height, width = request.param
  blocks = rng.integers(0, 256, (4, height // 4 + 1, width // 4 + 1, 3))
  reference = np.repeat(np.repeat(blocks, 4, 1), 4, 2)[:, :height, :width]
  noise = rng.integers(-9, 10, reference.shape) * np.array([1, 2, 3, 8])[:, None, None, None]
  return reference.astype(np.uint8), np.clip(reference + noise, 0, 255).astype(np.uint8)


def test_psnr_of_literal_values():
  reference = np.zeros((2, 4, 4, 3), np.uint8)
  test = reference.copy()
  test[1] = 10  # MSE 0 and 100, together 50
  assert video_quality.psnr(reference, test) == pytest.approx(10 * math.log10(255**2 / 50))
  assert video_quality.psnr(reference, reference) == math.inf
  assert video_quality.psnr(reference, reference + 255) == 0.0  # no wrapping of uint8


def test_psnr_is_pooled_over_the_clip(clips):
  reference, test = clips
  expected = 10 * np.log10(255**2 / np.mean((reference.astype(float) - test) ** 2))
  assert video_quality.psnr(reference, test) == pytest.approx(expected, rel=1e-12)
  frames = np.mean([video_quality.psnr(reference[i : i + 1], test[i : i + 1]) for i in range(len(test))])
  assert abs(expected - frames) > 1


def run_psnr_filter(reference, test):
  """Feeds both clips to FFmpeg's psnr filter."""
  pix_fmt = "yuv420p" if reference.shape[1] % 2 == 0 else "yuv444p"
  graph = av.filter.Graph()
  height, width = reference.shape[1:3]
  sources = [graph.add_buffer(width=width, height=height, format=pix_fmt, time_base=Fraction(1, 16)) for _ in range(2)]
  psnr, sink = graph.add("psnr"), graph.add("buffersink")
  for i, source in enumerate(sources):
    source.link_to(psnr, 0, i)
  psnr.link_to(sink)
  graph.configure()
  for i in range(len(reference)):
    for source, clip in zip(sources, (reference, test), strict=True):
      planes = yuv_planes(clip[i])
      array = np.stack(planes) if pix_fmt == "yuv444p" else np.concatenate([p.reshape(-1, width) for p in planes])
      frame = av.VideoFrame.from_ndarray(array, format=pix_fmt)
      frame.pts, frame.time_base = i, Fraction(1, 16)
      source.push(frame)
  for source in sources:
    source.push(None)
  with contextlib.suppress(av.error.EOFError):
    while True:
      sink.pull()


def ffmpeg_psnr(reference, test):
  """y, u, v and average of the psnr filter's summary line, which it logs when its graph is freed."""
  level = av.logging.get_level()
  with av.logging.Capture(local=False) as logs:
    av.logging.set_level(av.logging.INFO)
    try:
      run_psnr_filter(reference, test)
      gc.collect()
    finally:
      av.logging.set_level(level)
  line = next(message for _, name, message in logs if name == "psnr")
  return [float(value) for value in re.findall(r"(?:y|u|v|average):(\S+)", line)]


def test_yuv_psnr_is_what_ffmpeg_prints(clips):
  assert list(video_quality.yuv_psnr(*clips)) == pytest.approx(ffmpeg_psnr(*clips), abs=1e-5)


def slow_ssim(a, b):
  """Wang et al. 2004 with loops and float64, for one channel [H, W]."""
  x = np.arange(-5, 6)
  window = np.exp(-(x[:, None] ** 2 + x[None] ** 2) / (2 * 1.5**2))
  window /= window.sum()
  a, b, values = a.astype(float), b.astype(float), []
  for i in range(a.shape[0] - 10):
    for j in range(a.shape[1] - 10):
      p, q = a[i : i + 11, j : j + 11], b[i : i + 11, j : j + 11]
      mp, mq = (window * p).sum(), (window * q).sum()
      vp, vq, cov = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum(), (window * (p - mp) * (q - mq)).sum()
      c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
      values.append((2 * mp * mq + c1) * (2 * cov + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
  return np.mean(values)


def test_ssim_equals_the_slow_reference(clips):
  reference, test = (clip[2:, :33, :47] for clip in clips)
  expected = np.mean([slow_ssim(reference[t, ..., c], test[t, ..., c]) for t in range(2) for c in range(3)])
  assert 0.3 < expected < 0.95
  assert video_quality.ssim(reference, test) == pytest.approx(expected, abs=2e-6)


def test_ssim_of_equal_flat_and_dark_clips():
  clip = np.full((1, 16, 16, 3), 3, np.uint8)
  assert video_quality.ssim(clip, clip) == pytest.approx(1.0, abs=1e-6)
  # No structure on either side: the luminance term alone, (2 ab + C1) / (a^2 + b^2 + C1).
  assert video_quality.ssim(clip, clip + 100) == pytest.approx((2 * 3 * 103 + 6.5025) / (9 + 103**2 + 6.5025), abs=1e-5)


def test_compare_fits_into_json(clips):
  reference, test = clips
  figures = video_quality.compare(reference, test)
  assert list(figures) == ["psnr_rgb_db", "psnr_y_db", "psnr_yuv_db", "ssim_rgb"]
  assert figures["psnr_yuv_db"] == video_quality.yuv_psnr(reference, test).average
  assert video_quality.compare(test, test) == {
    "psnr_rgb_db": None, "psnr_y_db": None, "psnr_yuv_db": None, "ssim_rgb": pytest.approx(1.0, abs=1e-6),
  }


def test_clips_that_cannot_be_compared():
  clip = np.zeros((2, 16, 16, 3), np.uint8)
  for measure in (video_quality.psnr, video_quality.yuv_psnr, video_quality.ssim):
    with pytest.raises(ValueError, match="different shapes"):
      measure(clip, clip[:1])
    with pytest.raises(ValueError, match="the test clip is float32"):
      measure(clip, clip.astype(np.float32))
  with pytest.raises(ValueError, match="11x11"):
    video_quality.ssim(clip[:, :8], clip[:, :8])

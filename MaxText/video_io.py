"""Reads and writes video files (H.264 in mp4) of exactly the given size and frame rate.

Pixels outside this file are float in [-1, 1], the VAE's range, or uint8. Colours are stored as BT.709, limited range, and
tagged so. Even sizes use yuv420p, which every player shows; sizes with an odd side use yuv444p, because half-resolution
chroma would force another size (some browsers do not show it).

Dimensions: T frames, H W rows and columns of pixels.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import pathlib
from collections.abc import Iterable, Iterator
from fractions import Fraction

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation

# x264's quality: 0 is lossless, 23 its default; lower costs disk only. Measured on CPU, 17 frames 480 x 832 of moving
# colours with grain: 1.3 MB, 36 dB in RGB, where half-resolution chroma loses most.
CRF = 14
_AV_BT709 = 1  # AVCOL_SPC_BT709: the tag of a matrix, whereas Colorspace.ITU709 tells the converter to use it
_SWS = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP


def to_uint8(frames, first_frame: int = 0) -> np.ndarray:
  """Rounds pixels in [-1, 1] to 0 … 255; values outside are clipped. uint8 passes unchanged.

  Args:
    frames: [T, H, W, 3] or [H, W, 3]; numpy or jax, any float dtype, or uint8.
    first_frame: number of the first frame, for messages.
  Raises:
    ValueError: NaN or infinity, naming the frame; another dtype.
  """
  frames = np.asarray(frames)
  if frames.dtype == np.uint8:
    return frames
  if frames.dtype.kind != "f" and frames.dtype.name != "bfloat16":  # which numpy does not count as floating point
    raise ValueError(f"frames of dtype {frames.dtype}; expected floating point in [-1, 1], or uint8")
  frames = frames.astype(np.float32)
  for i, frame in enumerate(frames if frames.ndim == 4 else frames[None]):
    bad = frame.size - np.count_nonzero(np.isfinite(frame))
    if bad:
      raise ValueError(f"frame {first_frame + i} holds {bad} values of {frame.size} that are NaN or infinite")
  return np.rint((np.clip(frames, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)


def write_video(path, frames: Iterable, height: int, width: int, fps: float) -> int:
  """Writes an mp4; nothing appears under `path` before the file is complete and on disk.

  Frames are encoded as they come, so memory does not grow with the length. The file is first called `path` + ".part", in
  the same folder; it is removed if anything fails.

  Args:
    path: file to write or replace; its folder exists.
    frames: yields frames [H, W, 3] or runs of frames [t, H, W, 3]; float in [-1, 1] (clipped, rounded) or uint8.
    height, width: of every frame and of the file, exactly.
    fps: frames a second, > 0; need not be whole (23.976). Stored as the nearest fraction with a denominator up to 1001.
  Returns:
    the number of frames written.
  Raises:
    ValueError: no frames, a frame of another shape, NaN or infinity (names the frame), fps out of range.
    OSError: the folder cannot be written.
  """
  path = pathlib.Path(path)
  rate = _rate(fps)
  part = path.with_name(path.name + ".part")
  try:
    with open(part, "wb"):  # says what is wrong with the folder in Python's words, before the first frame is computed
      pass
    count = 0
    with av.open(str(part), "w", format="mp4", options={"movflags": "+faststart"}) as container:
      stream = _add_stream(container, height, width, rate)
      for count, pixels_HW3 in enumerate(_single_frames(frames, height, width), start=1):
        container.mux(stream.encode(_to_yuv(pixels_HW3, stream.pix_fmt, count - 1)))
      if count == 0:
        raise ValueError(f"{path}: no frames to write")
      container.mux(stream.encode(None))
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)
  except BaseException:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)
    raise
  return count


def yuv_planes(pixels_HW3: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Y [H, W], U and V of one RGB frame, uint8, as `write_video` encodes them (U, V at half resolution for even sizes)."""
  height, width, _ = pixels_HW3.shape
  frame = _to_yuv(pixels_HW3, _pix_fmt(height, width), 0).to_ndarray()
  if frame.ndim == 3:  # yuv444p
    return frame[0], frame[1], frame[2]
  chroma = frame[height:].reshape(2, height // 2, width // 2)
  return frame[:height], chroma[0], chroma[1]


def read_video(path) -> np.ndarray:
  """All frames of a video file as RGB, uint8 [T, H, W, 3]; untagged files are taken as BT.601, as FFmpeg does.

  Raises:
    FileNotFoundError: no such file. ValueError: not a video, or a truncated one.
  """
  try:
    with av.open(str(path)) as container:
      if not container.streams.video:
        raise ValueError(f"{path} has no video stream")
      frames = [_to_rgb(frame) for frame in container.decode(video=0)]
  except av.error.FileNotFoundError:
    raise FileNotFoundError(f"{path}: no such video file") from None
  except av.error.FFmpegError as error:
    raise ValueError(f"{path} cannot be read as a video: {error}") from error
  if not frames:
    raise ValueError(f"{path} holds no frames")
  return np.stack(frames)


def _rate(fps: float) -> Fraction:
  if not (isinstance(fps, numbers.Real) and math.isfinite(fps) and fps > 0):
    raise ValueError(f"fps={fps!r} must be a positive number, such as 16 or 23.976")
  rate = Fraction(float(fps)).limit_denominator(1001)  # 1001: film and television rates are multiples of 1000 / 1001
  if not 0 < rate <= 1000:
    raise ValueError(f"fps={fps!r} is out of range; use 0.001 to 1000")
  return rate


def _pix_fmt(height: int, width: int) -> str:
  return "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"


def _add_stream(container, height: int, width: int, rate: Fraction) -> av.VideoStream:
  stream = container.add_stream("libx264", rate=rate, options={"crf": str(CRF), "preset": "medium"})
  stream.height, stream.width = height, width
  stream.pix_fmt = _pix_fmt(height, width)
  context = stream.codec_context
  context.time_base = 1 / rate
  context.color_range = ColorRange.MPEG
  context.colorspace = _AV_BT709
  context.color_primaries = ColorPrimaries.BT709
  context.color_trc = ColorTrc.BT709
  return stream


def _single_frames(frames: Iterable, height: int, width: int) -> Iterator[np.ndarray]:
  """Splits runs of frames and checks shapes and values; uint8 [H, W, 3]."""
  count = 0
  for item in frames:
    run = np.asarray(item)
    run = run[None] if run.ndim == 3 else run
    if run.ndim != 4 or run.shape[1:] != (height, width, 3):
      raise ValueError(f"frame {count} has shape {run.shape[1:]}, the video is {(height, width, 3)}")
    for frame in run:
      yield to_uint8(frame, count)
      count += 1


def _to_yuv(pixels_HW3: np.ndarray, pix_fmt: str, index: int) -> av.VideoFrame:
  frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels_HW3), format="rgb24")
  frame = frame.reformat(
    format=pix_fmt,
    dst_colorspace=Colorspace.ITU709,
    src_color_range=ColorRange.JPEG,
    dst_color_range=ColorRange.MPEG,
    interpolation=_SWS,
  )
  frame.pts = index
  return frame


def _to_rgb(frame: av.VideoFrame) -> np.ndarray:
  frame = frame.reformat(format="rgb24", dst_color_range=ColorRange.JPEG, interpolation=_SWS)
  return frame.to_ndarray()


def _sync(path: pathlib.Path) -> None:
  """Flushes a file or folder to disk: a crash after the rename must not leave an empty file under the final name."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)

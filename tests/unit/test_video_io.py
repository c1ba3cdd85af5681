"""mp4 files: exact size, rate, colours and values, and nothing half-written."""

import os
import signal
import subprocess
import sys
import textwrap
from fractions import Fraction

import av
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.video_io import read_video, to_uint8, write_video, yuv_planes

RED, WHITE, BLACK = (255, 0, 0), (255, 255, 255), (0, 0, 0)
COLOURS = np.array([RED, (0, 255, 0), (0, 0, 255), (255, 255, 0), WHITE, BLACK, (9, 200, 90)], np.uint8)


def flat_frames(height, width):
  return np.broadcast_to(COLOURS[:, None, None], (len(COLOURS), height, width, 3))


@pytest.mark.parametrize("height, width", [(48, 80), (80, 48), (47, 80), (48, 81), (17, 33), (16, 16), (1, 1)])
def test_size_and_colours_come_back(tmp_path, height, width):
  path = tmp_path / "video.mp4"
  assert write_video(path, flat_frames(height, width), height, width, 16) == len(COLOURS)
  frames = read_video(path)
  assert frames.shape == (len(COLOURS), height, width, 3) and frames.dtype == np.uint8
  np.testing.assert_allclose(frames.astype(int), flat_frames(height, width), atol=3)  # limited range costs 1 or 2


def test_pictures_are_not_flipped_or_shifted(tmp_path):
  frames = np.full((3, 32, 48, 3), -1.0, np.float32)
  frames[0, :8, :16] = 1.0
  frames[1, -8:, :16, 0] = 1.0
  frames[2, :8, -16:, 2] = 1.0
  write_video(tmp_path / "v.mp4", [frames], 32, 48, 16)
  difference = np.abs(read_video(tmp_path / "v.mp4").astype(int) - to_uint8(frames).astype(int))
  assert difference.mean() < 3 and np.median(difference) == 0


@pytest.mark.parametrize(
  "fps, rate",
  [(16, "16"), (23.976, "2997/125"), (30000 / 1001, "30000/1001"), (0.5, "1/2"), (120, "120"), (np.float32(24), "24")],
)
@pytest.mark.parametrize("count", [1, 5])
def test_frame_rate_is_exact(tmp_path, fps, rate, count):
  path = tmp_path / "video.mp4"
  rate = Fraction(rate)
  write_video(path, [np.zeros((count, 16, 16, 3), np.uint8)], 16, 16, fps)
  with av.open(path) as container:
    stream = container.streams.video[0]
    assert (stream.average_rate, stream.frames) == (rate, count)
    assert stream.duration * stream.time_base == count / rate
    assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
    assert stream.codec_context.colorspace == stream.codec_context.color_range == 1  # BT.709, limited


def test_the_index_is_in_front_for_streaming(tmp_path):
  path = tmp_path / "video.mp4"
  write_video(path, flat_frames(16, 16), 16, 16, 16)
  data = path.read_bytes()
  assert 0 < data.find(b"moov") < data.find(b"mdat")


def test_values_are_rounded_and_clipped_never_wrapped():
  values = np.array([-1e30, -1.001, -1.0, -1 + 0.9 / 255, -1 + 1.1 / 255, 0.999, 1.0, 1.01, 300.0, 1e30], np.float32)
  pixels = to_uint8(np.broadcast_to(values[:, None], (1, len(values), 3)))
  assert pixels[0, :, 0].tolist() == [0, 0, 0, 0, 1, 255, 255, 255, 255, 255]


def test_every_byte_value_survives_a_round_trip():
  values = np.arange(256, dtype=np.uint8)
  np.testing.assert_array_equal(to_uint8((values / 127.5 - 1.0).astype(np.float32)[None, :, None]).ravel(), values)


def test_runs_single_frames_jax_and_bfloat16_are_the_same_video(tmp_path):
  frames = np.linspace(-1, 1, 5 * 16 * 32 * 3, dtype=np.float32).reshape(5, 16, 32, 3)
  bfloat16 = jnp.asarray(frames, jnp.bfloat16)
  frames = np.asarray(bfloat16, np.float32)
  variants = [iter(frames), [frames[:1], frames[1:]], jnp.asarray(frames), [bfloat16], to_uint8(frames)]
  files = []
  for i, variant in enumerate(variants):
    write_video(tmp_path / f"{i}.mp4", variant, 16, 32, 8)
    files.append((tmp_path / f"{i}.mp4").read_bytes())
  assert len(set(files)) == 1


def broken_generator(bad, after=3):
  for _ in range(after):
    yield np.zeros((16, 16, 3), np.float32)
  if isinstance(bad, BaseException):
    raise bad
  yield bad


NAN = np.zeros((2, 16, 16, 3), np.float32)
NAN[1, 3, 4, 1] = np.nan
INF = np.full((16, 16, 3), np.inf, np.float32)


@pytest.mark.parametrize(
  "bad, error, words",
  [
    (NAN, ValueError, "frame 4 holds 1 values of 768"),
    (INF, ValueError, "frame 3 .* infinite"),
    (np.zeros((16, 18, 3), np.float32), ValueError, r"frame 3 has shape \(16, 18, 3\)"),
    (np.zeros((16, 16), np.float32), ValueError, "frame 3 has shape"),
    (np.zeros((16, 16, 3), np.int32), ValueError, "dtype int32"),
    (RuntimeError("out of memory"), RuntimeError, "out of memory"),
    (KeyboardInterrupt(), KeyboardInterrupt, None),
  ],
)
def test_what_fails_half_way_leaves_the_folder_as_it_was(tmp_path, bad, error, words):
  path = tmp_path / "video.mp4"
  path.write_bytes(b"the earlier video")
  with pytest.raises(error, match=words):
    write_video(path, broken_generator(bad), 16, 16, 16)
  assert os.listdir(tmp_path) == ["video.mp4"] and path.read_bytes() == b"the earlier video"


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), "16", None, 1e9, 1e-9])
def test_bad_rates_are_refused_before_anything_is_written(tmp_path, fps):
  with pytest.raises(ValueError, match="fps"):
    write_video(tmp_path / "video.mp4", flat_frames(16, 16), 16, 16, fps)
  assert not os.listdir(tmp_path)


def test_no_frames_and_no_folder_are_errors(tmp_path):
  with pytest.raises(ValueError, match="no frames"):
    write_video(tmp_path / "video.mp4", [], 16, 16, 16)
  with pytest.raises(FileNotFoundError):
    write_video(tmp_path / "nowhere" / "video.mp4", flat_frames(16, 16), 16, 16, 16)
  assert not os.listdir(tmp_path)


def test_a_killed_writer_leaves_no_file_under_the_final_name(tmp_path):
  script = f"""
    import os, signal
    import numpy as np
    from MaxText.video_io import write_video
    def frames():
      for i in range(100):
        if i == 60:
          os.kill(os.getpid(), signal.SIGKILL)
        yield np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
    write_video({str(tmp_path / "video.mp4")!r}, frames(), 64, 64, 16)
  """
  done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
  assert done.returncode == -signal.SIGKILL
  assert not (tmp_path / "video.mp4").exists()
  write_video(tmp_path / "video.mp4", flat_frames(16, 16), 16, 16, 16)  # a rerun is not disturbed by what was left
  assert os.listdir(tmp_path) == ["video.mp4"]


def test_reading_what_is_no_video(tmp_path):
  (tmp_path / "text.mp4").write_text("no video")
  write_video(tmp_path / "whole.mp4", flat_frames(64, 64), 64, 64, 16)
  data = (tmp_path / "whole.mp4").read_bytes()
  (tmp_path / "part.mp4").write_bytes(data[: data.find(b"mdat") - 20])
  for name in ("text.mp4", "part.mp4"):
    with pytest.raises(ValueError, match=name):
      read_video(tmp_path / name)
  with pytest.raises(FileNotFoundError):
    read_video(tmp_path / "absent.mp4")


def test_yuv_planes_are_bt709_limited_range():
  """White, black and red by the definition of BT.709: Y = 16 + 219 (.2126 R + .7152 G + .0722 B), V of red is 240."""
  for colour, expected in [(WHITE, (235, 128, 128)), (BLACK, (16, 128, 128)), (RED, (63, 102, 240))]:
    y, u, v = yuv_planes(np.broadcast_to(np.array(colour, np.uint8), (16, 24, 3)))
    assert (y.shape, u.shape, v.shape) == ((16, 24), (8, 12), (8, 12))
    assert all(np.abs(plane.astype(int) - value).max() <= 1 for plane, value in zip((y, u, v), expected, strict=True))
  assert [plane.shape for plane in yuv_planes(np.zeros((15, 24, 3), np.uint8))] == [(15, 24)] * 3

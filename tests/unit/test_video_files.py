"""Folders of captioned videos: captions in three forms, sizes, frame rates, and what is refused or skipped."""

import json
from fractions import Fraction

import av
import numpy as np
import pytest

from MaxText.config_types import ConfigError
from MaxText.input_pipeline import video_files
from MaxText.input_pipeline.video_files import UnusableVideo, VideoFacts, find_videos, nearest_size, probe, read_clip
from MaxText.video_io import write_video

LEVELS = 8  # grey levels between two frames: far more than H.264 changes a flat picture


def make(path, frames=12, height=32, width=48, fps=8):
  """A video whose frame number can be read from its grey level."""
  path.parent.mkdir(parents=True, exist_ok=True)
  clip = np.stack([np.full((height, width, 3), 16 + LEVELS * n % 224, np.uint8) for n in range(frames)])
  write_video(path, clip, height, width, fps)
  return path


def numbers(clip_THW3):
  """The frame numbers that a clip shows."""
  return np.rint((clip_THW3.mean(axis=(1, 2, 3)) - 16) / LEVELS).astype(int).tolist()


def test_captions_in_three_forms(tmp_path):
  expected = [("a.mp4", "a ball"), ("sub/b.mp4", "snow, “deep”")]
  for form in ("jsonl", "csv", "txt"):
    root = tmp_path / form
    for name, _ in expected:
      make(root / name, frames=1)
    if form == "jsonl":
      lines = [json.dumps({"file": name, "caption": text}) for name, text in expected]
      (root / "captions.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    elif form == "csv":
      rows = "".join(f'{name},"{text}"\n' for name, text in expected)
      (root / "captions.csv").write_text("file,caption\n" + rows, encoding="utf-8-sig")
    else:
      for name, text in expected:
        (root / name).with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    make(root / "silent.mp4", frames=1)
    videos, skipped = find_videos(str(root))
    assert [(video.name, video.caption) for video in videos] == expected
    assert skipped == [video_files.Skipped("silent.mp4", "has no caption")]


@pytest.mark.parametrize("files, words", [
  ({}, "no captions"),
  ({"a.mp4": ""}, "no captions"),
  ({"captions.jsonl": '{"file": "gone.mp4", "caption": "x"}'}, "gone.mp4: captioned, but there is no such video"),
  ({"gone.txt": "x", "a.mp4": "", "a.txt": "y"}, "gone: captioned"),
  ({"captions.jsonl": "not json"}, "line 1: is not JSON"),
  ({"captions.jsonl": '{"file": "a.mp4"}'}, "line 1: must have a file and a caption"),
  ({"captions.csv": "name,text\na,b\n"}, "columns file and caption"),
  ({"captions.csv": "file,caption\n", "captions.jsonl": ""}, "keep one"),
  ({"a.mp4": "", "captions.csv": "file,caption\na.mp4,x\na.mp4,y\n"}, "line 3: a.mp4 has a caption already"),
  ({"a.mp4": "", "a.mov": "", "a.txt": "x"}, "stands beside a.mov and a.mp4"),
  ({"a.mp4": "", "a.txt": " "}, "every caption is empty"),
])
def test_wrong_folders(tmp_path, files, words):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  with pytest.raises(ConfigError, match=words):
    find_videos(str(tmp_path))


def test_missing_folder(tmp_path):
  with pytest.raises(ConfigError, match="there is no such folder"):
    find_videos(str(tmp_path / "nowhere"))


def test_frame_rates(tmp_path):
  path = str(make(tmp_path / "a.mp4", frames=12, fps=8))
  assert probe(path) == VideoFacts(32, 48, Fraction(3, 2))
  assert numbers(read_clip(path, 32, 48, 12, 8)) == list(range(12))
  assert numbers(read_clip(path, 32, 48, 6, 4)) == [0, 2, 4, 6, 8, 10]
  assert numbers(read_clip(path, 32, 48, 5, 16)) == [0, 0, 1, 1, 2]
  assert numbers(read_clip(path, 32, 48, 9, 6)) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
  assert numbers(read_clip(path, 32, 48, 5, 8, clip=1)) == [5, 6, 7, 8, 9]
  assert video_files.count_clips(Fraction(3, 2), 5, 8) == 2
  with pytest.raises(UnusableVideo, match="its pictures end after 1.50 s, and 5 frames at 8 fps from 1.25 s"):
    read_clip(path, 32, 48, 5, 8, clip=2)


def test_size_covers_and_cuts_at_the_centre(tmp_path):
  frames = np.zeros((2, 32, 96, 3), np.uint8)
  frames[:, :, :32, 0], frames[:, :, 32:64, 1], frames[:, :, 64:, 2] = 255, 255, 255
  write_video(tmp_path / "wide.mp4", frames, 32, 96, 8)
  clip = read_clip(str(tmp_path / "wide.mp4"), 16, 16, 1, 8)
  assert clip.shape == (1, 16, 16, 3)
  middle = clip[0, :, 2:-2].mean(axis=(0, 1))
  assert middle[1] > 220 and middle[0] < 30 and middle[2] < 30  # only the middle third is left
  assert read_clip(str(tmp_path / "wide.mp4"), 64, 48, 1, 8).shape == (1, 64, 48, 3)


def test_rotated_video_is_turned_upright(tmp_path):
  path = tmp_path / "turned.mp4"
  picture = np.zeros((32, 64, 3), np.uint8)
  picture[:, 32:] = 255  # bright to the right
  with av.open(str(path), "w") as container:
    stream = container.add_stream("libx264", rate=8)
    stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
    stream.set_display_rotation(90)  # a quarter turn anticlockwise when shown
    for _ in range(2):
      container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
    container.mux(stream.encode(None))
  facts = probe(str(path))
  assert (facts.height, facts.width) == (64, 32)
  clip = read_clip(str(path), 64, 32, 1, 8)
  assert clip[0, :28].mean() > 240 and clip[0, 36:].mean() < 15  # right has become up


def test_nearest_size():
  sizes = [(480, 832), (832, 480), (624, 624)]
  shown = [(1080, 1920), (1920, 1080), (500, 520)]
  assert [nearest_size(VideoFacts(*size, Fraction(1)), sizes) for size in shown] == sizes
  assert nearest_size(VideoFacts(720, 1280, Fraction(1)), [(90, 160), (720, 1280)]) == (720, 1280)


def test_unusable_files(tmp_path):
  (tmp_path / "empty.mp4").touch()
  (tmp_path / "text.mp4").write_text("hello " * 100)
  whole = make(tmp_path / "whole.mp4", frames=40, height=64, width=64).read_bytes()
  (tmp_path / "half.mp4").write_bytes(whole[:len(whole) * 6 // 10])
  with pytest.raises(UnusableVideo, match="is empty"):
    probe(str(tmp_path / "empty.mp4"))
  with pytest.raises(UnusableVideo, match="is not a video"):
    probe(str(tmp_path / "text.mp4"))
  with pytest.raises(UnusableVideo, match="cannot be read"):
    probe(str(tmp_path / "nowhere.mp4"))
  with pytest.raises(UnusableVideo):
    probe(str(tmp_path / "half.mp4"))
    read_clip(str(tmp_path / "half.mp4"), 64, 64, 40, 8)
  assert "12 frames at 8 fps, 13 are asked for" in video_files.too_short(Fraction(3, 2), 13, 8)


@pytest.mark.parametrize("end, codec, rate", [
  ("mkv", "libx264", 8), ("ts", "libx264", 8), ("avi", "mpeg4", 8), ("mpg", "mpeg2video", 25), ("webm", "libvpx-vp9", 8)])
def test_containers(tmp_path, end, codec, rate):
  path = str(tmp_path / f"a.{end}")
  with av.open(path, "w") as container:
    stream = container.add_stream(codec, rate=rate)
    stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
    for n in range(24):
      frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 16 + LEVELS * n, np.uint8), format="rgb24")
      frame.pts, frame.time_base = n, Fraction(1, rate)
      container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
  assert video_files.count_clips(probe(path).seconds, 6, rate) == 4
  assert [numbers(read_clip(path, 32, 48, 6, rate, clip)) for clip in range(4)] == [
    list(range(n, n + 6)) for n in (0, 6, 12, 18)]

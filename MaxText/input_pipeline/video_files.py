"""Folders of captioned videos: finds them, says what each can give, and reads clips of an asked size and frame rate.

A folder tells its captions in one of three ways: captions.jsonl with lines {"file": "a.mp4", "caption": "…"},
captions.csv with the columns file and caption, or a text file beside each video (a.mp4, a.txt). File names are relative
to the folder.

Decoding, timing and scaling are FFmpeg's, through PyAV. A frame of the clip shows what the video shows at that moment
(the last frame that began by then), so variable frame rates need no special case. The picture is scaled to cover the
asked size and cut at its centre; rotation tags and non-square pixels are respected.

This module imports no JAX: workers run it. Dimensions: T frames, H W rows and columns of pixels.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from fractions import Fraction

import av
import numpy as np
from av.video.reformatter import ColorRange, Interpolation

from MaxText.config_types import ConfigError

SUFFIXES = frozenset(f".{end}" for end in "mp4 m4v mov mkv webm avi mpg mpeg ts wmv flv ogv gif".split())
JSONL, CSV = "captions.jsonl", "captions.csv"
NO_CAPTION = "has no caption"
_TICK = Fraction(1, 200)  # containers round times: Matroska to milliseconds, GIF to hundredths of a second
_NO_LENGTH = frozenset({"mpeg", "mpegts"})  # formats without a length; FFmpeg guesses one from the last packets
_SWS = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


class UnusableVideo(ValueError):
  """A video that gives no clip; the message says why, without naming the file."""


@dataclasses.dataclass(frozen=True)
class CaptionedVideo:
  """A video file and what it shows."""

  path: str
  name: str  # relative to its folder
  caption: str


@dataclasses.dataclass(frozen=True)
class Skipped:
  """A file that is left out, and why."""

  name: str
  reason: str


@dataclasses.dataclass(frozen=True)
class VideoFacts:
  """What a video's header and first frame say: size as displayed, and seconds."""

  height: int
  width: int
  seconds: Fraction


# --- captions


def find_videos(directory: str) -> tuple[list[CaptionedVideo], list[Skipped]]:
  """The captioned videos of a folder, in the order of their names, and the files left out.

  Raises:
    ConfigError: no folder, no videos, no captions, captions in two ways, a damaged captions file, or captions of videos
      that are not there.
  """
  root = pathlib.Path(directory).expanduser()
  about = f"video_directory={directory}"
  if not root.is_dir():
    raise ConfigError(f"{about}: {'is a file, not a folder' if root.exists() else 'there is no such folder'}")
  tables = [name for name in (JSONL, CSV) if (root / name).is_file()]
  if len(tables) == 2:
    raise ConfigError(f"{about}: holds both {JSONL} and {CSV}; keep one")
  files = sorted(path for path in root.rglob("*") if path.is_file())
  videos = {path.relative_to(root).as_posix(): path for path in files if path.suffix.lower() in SUFFIXES}
  if tables:
    captions = _read_jsonl(root / JSONL, about) if tables == [JSONL] else _read_csv(root / CSV, about)
    missing = [name for name in captions if not (root / name).is_file()]
    videos |= {name: root / name for name in captions if name not in missing}
  else:
    captions, missing = _read_text_files(root, files, videos, about)
  if not captions:
    raise ConfigError(f"{about}: no captions. Give {JSONL} with lines {{\"file\": \"a.mp4\", \"caption\": \"…\"}}, {CSV} "
                      f"with the columns file and caption, or a text file beside each video (a.mp4, a.txt); "
                      f"{len(videos)} video files are there")
  if missing:
    raise ConfigError(f"{about}: {_some(missing)}: captioned, but there is no such video; restore it, or remove its "
                      "caption")
  found, skipped = [], []
  for name, path in sorted(videos.items()):
    caption = captions.get(name, "").strip()
    if caption:
      found.append(CaptionedVideo(str(path), name, caption))
    else:
      skipped.append(Skipped(name, "its caption is empty" if name in captions else NO_CAPTION))
  if not found:
    raise ConfigError(f"{about}: every caption is empty")
  return found, skipped


def _some(names: Sequence[str]) -> str:
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


def _add_caption(captions: dict[str, str], row: object, where: str) -> None:
  if not isinstance(row, dict) or not isinstance(row.get("file"), str) or not isinstance(row.get("caption"), str):
    raise ConfigError(f"{where}: must have a file and a caption, both text")
  name = pathlib.PurePosixPath(row["file"]).as_posix()
  if name in captions:
    raise ConfigError(f"{where}: {name} has a caption already; keep one")
  captions[name] = row["caption"]


def _read_table(path: pathlib.Path, about: str) -> str:
  try:
    return path.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError:
    raise ConfigError(f"{about}: {path.name} is not UTF-8 text") from None
  except OSError as error:
    raise ConfigError(f"{about}: {path.name} cannot be read: {error.strerror or error}") from None


def _read_jsonl(path: pathlib.Path, about: str) -> dict[str, str]:
  captions: dict[str, str] = {}
  for number, line in enumerate(_read_table(path, about).split("\n"), start=1):
    if not line.strip():
      continue
    where = f"{about}: {path.name} line {number}"
    try:
      row = json.loads(line)
    except ValueError:
      raise ConfigError(f"{where}: is not JSON; write {{\"file\": \"a.mp4\", \"caption\": \"…\"}}") from None
    _add_caption(captions, row, where)
  return captions


def _read_csv(path: pathlib.Path, about: str) -> dict[str, str]:
  captions: dict[str, str] = {}
  reader = csv.DictReader(_read_table(path, about).splitlines(keepends=True))
  if not {"file", "caption"} <= set(reader.fieldnames or ()):
    raise ConfigError(f"{about}: {path.name} needs a first line that names the columns file and caption")
  for row in reader:
    _add_caption(captions, row, f"{about}: {path.name} line {reader.line_num}")
  return captions


def _read_text_files(root, files, videos, about) -> tuple[dict[str, str], list[str]]:
  """Captions of the form a.txt beside a.mp4; and the text files beside no video."""
  beside: dict[pathlib.Path, list[str]] = {}
  for name, path in videos.items():
    beside.setdefault(path.with_suffix(""), []).append(name)
  captions, missing = {}, []
  for path in files:
    if path.suffix.lower() != ".txt":
      continue
    names = beside.get(path.with_suffix(""), [])
    if not names:
      missing.append(path.relative_to(root).with_suffix("").as_posix())
    elif len(names) > 1:
      raise ConfigError(f"{about}: {path.name} stands beside {' and '.join(names)}; give each a name of its own")
    else:
      captions[names[0]] = _read_table(path, about)
  return captions, missing if captions else []


# --- reading


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
  """An open video; FFmpeg's errors become reasons.

  Raises:
    UnusableVideo: missing, empty, not a video, or damaged.
  """
  file = pathlib.Path(path)
  try:
    if file.stat().st_size == 0:
      raise UnusableVideo("is empty (0 bytes)")
    with av.open(path) as container:
      if not container.streams.video:
        raise UnusableVideo("is not a video: it has no picture stream")
      stream = container.streams.video[0]
      stream.codec_context.thread_count = 1  # several videos are decoded side by side instead
      yield container, stream
  except av.error.InvalidDataError as error:
    raise UnusableVideo(f"is not a video, or is damaged ({error.strerror})") from None
  except av.error.FFmpegError as error:
    raise UnusableVideo(f"cannot be decoded ({error.strerror})") from None
  except OSError as error:
    raise UnusableVideo(f"cannot be read ({error.strerror or error})") from None


def probe(path: str) -> VideoFacts:
  """Size and length of a video; decodes its first frame, so that what no decoder knows is found here.

  Raises:
    UnusableVideo: it gives no picture.
  """
  with _opened(path) as (container, stream):
    frame = next(container.decode(stream), None)
    if frame is None:
      raise UnusableVideo("holds no frame that can be decoded")
    height, width = _displayed_size(frame, stream)
    counted = _NO_LENGTH.intersection(container.format.name.split(","))
    if stream.duration is not None and not counted:
      seconds = stream.duration * stream.time_base
    elif container.duration is not None and not counted:
      seconds = Fraction(container.duration, av.time_base)
    else:
      seconds = None
  return VideoFacts(height, width, _counted_seconds(path) if seconds is None else Fraction(seconds))


def _counted_seconds(path: str) -> Fraction:
  """Length by counting pictures; reads the whole file, without decoding it."""
  with _opened(path) as (container, stream):
    return sum(1 for packet in container.demux(stream) if packet.size) / Fraction(stream.guessed_rate or 25)


def _displayed_size(frame: av.VideoFrame, stream: av.VideoStream) -> tuple[int, int]:
  pixel = stream.sample_aspect_ratio or Fraction(1)
  height, width = frame.height, round(frame.width * pixel) if pixel > 0 else frame.width
  return (width, height) if frame.rotation % 180 else (height, width)


def count_clips(seconds: Fraction, num_frames: int, fps: float) -> int:
  """How many clips of num_frames at fps follow one another in a video of this length."""
  return int((seconds * Fraction(fps).limit_denominator(1001) + Fraction(1, 2)) / num_frames)


def too_short(seconds: Fraction, num_frames: int, fps: float) -> str:
  """The reason given for a video without a single clip."""
  frames = int(seconds * Fraction(fps).limit_denominator(1001) + Fraction(1, 2))
  return f"is too short: {float(seconds):.2f} s are {frames} frames at {fps:g} fps, {num_frames} are asked for"


def nearest_size(facts: VideoFacts, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
  """The (height, width) that wastes least of the picture: nearest in aspect, then in area."""

  def misfit(size):
    ours, theirs = Fraction(size[0], size[1]), Fraction(facts.height, facts.width)
    area = Fraction(size[0] * size[1], facts.height * facts.width)
    return max(ours / theirs, theirs / ours), max(area, 1 / area), size

  return min(sizes, key=misfit)


def read_clip(path: str, height: int, width: int, num_frames: int, fps: float, clip: int = 0) -> np.ndarray:
  """Frames of a video at the asked size and rate: uint8 RGB [T, H, W, 3].

  Args:
    path: video file.
    height, width: of the result; the picture is scaled to cover it and cut at the centre.
    num_frames, fps: frames of the result, and how many make a second.
    clip: which of the video's clips, which follow one another from its start.

  Raises:
    UnusableVideo: damaged, or over before the clip is whole.
  """
  shape = (num_frames, height, width, 3)
  if clip:
    try:
      return _read(path, shape, fps, clip, seek=True)
    except UnusableVideo:
      pass  # files without an index (MPEG transport streams) may land behind the clip: read from the start
  return _read(path, shape, fps, clip, seek=False)


def _read(path: str, shape: tuple[int, int, int, int], fps: float, clip: int, seek: bool) -> np.ndarray:
  num_frames, height, width, _ = shape
  rate = Fraction(fps).limit_denominator(1001)
  out = np.empty(shape, np.uint8)
  with _opened(path) as (container, stream):
    begin = stream.start_time * stream.time_base if stream.start_time is not None else Fraction(0)
    first = clip * num_frames  # counted in frames of the result, from the video's start
    if seek:
      container.seek(int((begin + first / rate) / stream.time_base), stream=stream)
    done, shown, end = 0, None, Fraction(0)

    def fill(until: Fraction) -> int:
      """Shows the frame held in `shown` at every moment before `until`."""
      pixels, now = None, done
      while now < num_frames and (first + now) / rate + _TICK < until:
        pixels = _scaled(shown, stream, height, width) if pixels is None else pixels
        out[now] = pixels
        now += 1
      return now

    for index, frame in enumerate(container.decode(stream)):
      start = (frame.pts * stream.time_base - begin) if frame.pts is not None else index / (stream.guessed_rate or 25)
      if shown is not None:
        done = fill(start)
      elif seek and start > first / rate + _TICK:
        raise UnusableVideo("cannot be entered in the middle")
      if done == num_frames:
        return out
      length = frame.duration * stream.time_base if frame.duration else 1 / (stream.guessed_rate or Fraction(25))
      shown, end = frame, start + length
    if shown is not None:
      # Half a frame of grace: containers round the length of their last frame.
      done = fill(end + 1 / (2 * rate))
  if done < num_frames:
    raise UnusableVideo(f"is damaged or too short: its pictures end after {float(end):.2f} s, and {num_frames} frames at "
                        f"{fps:g} fps from {float(first / rate):.2f} s on are asked for")
  return out


def _scaled(frame: av.VideoFrame, stream: av.VideoStream, height: int, width: int) -> np.ndarray:
  """One frame as RGB of exactly the given size: uint8 [height, width, 3]."""
  turns = frame.rotation // 90 % 4
  shown_height, shown_width = _displayed_size(frame, stream)
  scale = max(Fraction(height, shown_height), Fraction(width, shown_width))
  tall, wide = max(height, round(shown_height * scale)), max(width, round(shown_width * scale))
  stored = (wide, tall) if turns % 2 else (tall, wide)
  frame = frame.reformat(height=stored[0], width=stored[1], format="rgb24", dst_color_range=ColorRange.JPEG,
                         interpolation=_SWS)
  pixels_HW3 = np.rot90(frame.to_ndarray(), turns)
  top, left = (tall - height) // 2, (wide - width) // 2
  return pixels_HW3[top:top + height, left:left + width]

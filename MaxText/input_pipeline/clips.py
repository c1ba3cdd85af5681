"""Which clips a folder of videos gives: probes every video, and sorts clips by split and size.

Used before encoding and by training on raw video. Dimensions: H W rows and columns of pixels.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from MaxText.config_types import ConfigError
from MaxText.input_pipeline import video_files
from MaxText.input_pipeline.video_files import CaptionedVideo, Skipped, UnusableVideo


@dataclasses.dataclass(frozen=True)
class Clip:
  """A piece of a video. index: which of its clips, from its start. size: (height, width) that it is cut to."""

  video: CaptionedVideo
  index: int
  size: tuple[int, int]

  @property
  def name(self) -> str:
    return f"{self.video.name}, clip {self.index}"

  def read(self, num_frames: int, fps: float):
    """uint8 [num_frames, H, W, 3]. Raises UnusableVideo."""
    return video_files.read_clip(self.video.path, *self.size, num_frames, fps, self.index)


def sizes(config) -> tuple[tuple[int, int], ...]:
  """The (height, width) of clips that a configuration asks for."""
  return config.size_buckets or ((config.height, config.width),)


def find_clips(
  config, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[dict[tuple[str, tuple[int, int]], list[Clip]], list[Skipped]]:
  """All clips of config.video_directory.

  Args:
    progress: called with (videos probed, videos).

  Returns:
    (split, size) → its clips in the order of the videos' names, and the videos left out.

  Raises:
    ConfigError: the folder is wrong (see `video_files.find_videos`), or none of its videos can be used.
  """
  videos, skipped = video_files.find_videos(config.video_directory)

  def probe(video: CaptionedVideo):
    try:
      facts = video_files.probe(video.path)
    except UnusableVideo as error:
      return Skipped(video.name, str(error))
    count = video_files.count_clips(facts.seconds, config.num_frames, config.fps)
    if count == 0:
      return Skipped(video.name, video_files.too_short(facts.seconds, config.num_frames, config.fps))
    size = video_files.nearest_size(facts, sizes(config))
    return [Clip(video, i, size) for i in range(min(count, config.clips_per_video))]

  usable: list[list[Clip]] = []
  with ThreadPoolExecutor(max_workers=config.num_data_workers) as pool:
    for done, result in enumerate(pool.map(probe, videos), start=1):
      if isinstance(result, Skipped):
        skipped.append(result)
      else:
        usable.append(result)
      progress(done, len(videos))
  if not usable:
    raise ConfigError(f"video_directory={config.video_directory}: none of its {len(videos)} captioned videos is usable: "
                      + reasons(skipped))
  held_out = _held_out([clips[0].video.name for clips in usable], config.eval_fraction)
  groups: dict[tuple[str, tuple[int, int]], list[Clip]] = {}
  for clips in usable:
    split = "eval" if clips[0].video.name in held_out else "train"
    groups.setdefault((split, clips[0].size), []).extend(clips)
  return dict(sorted(groups.items(), reverse=True)), skipped


def reasons(skipped: Sequence[Skipped]) -> str:
  """The first few files and why they are left out, in words."""
  words = "; ".join(f"{item.name} {item.reason}" for item in skipped[:5])
  return words + (f"; and {len(skipped) - 5} more" if len(skipped) > 5 else "")


def _held_out(names: Sequence[str], fraction: float) -> frozenset[str]:
  """The videos for evaluation: at least one if any are asked for, and never all."""
  if fraction == 0.0 or len(names) < 2:
    return frozenset()
  count = min(max(1, round(fraction * len(names))), len(names) - 1)
  return frozenset(sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))[:count])

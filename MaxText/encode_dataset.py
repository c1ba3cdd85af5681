r"""Encodes a folder of videos with captions into shards for training.

  python -m MaxText.encode_dataset configs/train_video.yml load_parameters_path=FOLDER video_directory=VIDEOS \
      dataset_path=SHARDS height=480 width=832 num_frames=81 fps=16

Reads top to bottom: configuration → clips of the folder → plan of shards → for every shard that is not there yet: decode
(several threads), encode, write, rename → dataset.json. Killed at any moment, the same command goes on with the first
shard that is not whole. Videos that cannot be used are left out and listed in skipped.jsonl.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from MaxText import pyconfig
from MaxText.config_types import ConfigError, RunError
from MaxText.input_pipeline import clips as clips_lib
from MaxText.input_pipeline import records
from MaxText.input_pipeline.clips import Clip
from MaxText.input_pipeline.video_files import Skipped, UnusableVideo
from MaxText.reporter import Reporter

# What makes the shards what they are: a dataset is continued only with the same values.
PLANNED = ("load_parameters_path", "num_frames", "fps", "clips_per_video", "eval_fraction", "dataset_dtype",
           "clips_per_shard", "dtype", "vae_tile_size")


@dataclasses.dataclass(frozen=True)
class Shard:
  """One file to write."""

  path: pathlib.Path
  split: str
  size: tuple[int, int]
  clips: Sequence[Clip]


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "encode_dataset")
  reporter = Reporter(config.log_format)
  output = make_folder(config.dataset_path)
  with only_one(output):
    for leftover in output.glob("*.tmp"):  # of a killed run
      leftover.unlink()
    # --- what to encode
    with reporter.stage("scan"):
      groups, skipped = clips_lib.find_clips(config, progress=probing(reporter))
    for item in skipped:
      reporter.warn(f"left out: {item.name} {item.reason}")
    shards = plan_shards(config, output, groups)
    keep_plan(config, output, groups)
    total = sum(len(shard.clips) for shard in shards)
    todo = [shard for shard in shards if not records.marker(shard.path).exists()]
    if (output / records.DATASET).exists():
      clear_markers(shards)
      reporter.info(f"{output} is whole already: it was made with the same arguments")
      return
    reporter.info(f"{total} clips in {len(shards)} shards; {len(shards) - len(todo)} shards are whole already")

    # --- encode
    with reporter.stage("load"), pyconfig.input_errors():
      from MaxText.input_pipeline.encode import Encoders  # imports jax: only once there is something to encode

      encoders = Encoders(config)
    keep_fingerprints(output, encoders.fingerprints())
    with reporter.stage("encode"):
      encode_shards(config, encoders, todo, reporter)
      empty = encoders.texts([""])[""]
      records.replace_file(output / records.EMPTY_TEXT, records.pack({"text": empty}, config.dataset_dtype))

    # --- say what there is
    dataset, left_out = collect(config, output, shards, encoders.fingerprints(), skipped)
    lines = [json.dumps({"file": item.name, "reason": item.reason}, ensure_ascii=False) for item in left_out]
    records.replace_file(output / records.SKIPPED, "".join(f"{line}\n" for line in lines).encode())
    dataset.write()
    clear_markers(shards)
  counts = ", ".join(f"{dataset.count(split)} for {split}" for split in records.SPLITS if dataset.count(split))
  reporter.info(f"wrote {output}: {counts}; {len(left_out)} left out ({records.SKIPPED}); "
                f"{reporter.stages['encode']['seconds']:.1f} s")


# --- the plan


def make_folder(path: str) -> pathlib.Path:
  """The output folder: new, empty, or one of an earlier start.

  Raises:
    ConfigError: it holds something else, or cannot be written.
  """
  output = pathlib.Path(path).expanduser()
  try:
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()) and not (output / records.PLAN).exists() and not (output / ".lock").exists():
      raise ConfigError(f"dataset_path={path}: holds other files; name a new folder")
    (output / ".lock").touch()
  except OSError as error:
    raise ConfigError(f"dataset_path={path}: cannot be written ({error.strerror or error})") from None
  return output


@contextlib.contextmanager
def only_one(output: pathlib.Path) -> Iterator[None]:
  """Keeps a second encode_dataset out of the folder; the system frees the lock of a killed one."""
  with open(output / ".lock", "wb") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise ConfigError(f"dataset_path={output}: another encode_dataset is at work there; wait for it, or name another "
                        "folder") from None
    yield


def plan_shards(config, output: pathlib.Path, groups) -> list[Shard]:
  """Shards in the order in which they are made; the same folder and configuration give the same ones."""
  shards = []
  for (split, size), clips in groups.items():
    parts = [clips[i:i + config.clips_per_shard] for i in range(0, len(clips), config.clips_per_shard)]
    for index, part in enumerate(parts):
      name = records.shard_name(split, records.bucket_name(*size), index, len(parts))
      shards.append(Shard(output / name, split, size, part))
  return shards


def keep_plan(config, output: pathlib.Path, groups) -> None:
  """Writes plan.json, or compares it with that of an earlier start.

  Raises:
    ConfigError: other arguments, or other videos, than those that the folder was begun with.
  """
  listing = [[split, *size, clip.video.name, os.stat(clip.video.path).st_size, clip.index, clip.video.caption]
             for (split, size), clips in groups.items() for clip in clips]
  plan = {key: getattr(config, key) for key in PLANNED}
  plan["sizes"] = clips_lib.sizes(config)
  plan["videos and captions"] = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:32]
  plan = json.loads(json.dumps(plan))
  path = output / records.PLAN
  if not path.exists():
    records.replace_file(path, records.to_json(plan))
    return
  earlier = json.loads(path.read_text(encoding="utf-8"))
  changed = [key for key in plan if earlier.get(key) != plan[key]]
  if changed:
    words = "; ".join(f"{key} were {earlier.get(key)}, are {plan[key]}" if key == "sizes" else f"{key} have changed"
                      if " " in key else f"{key} was {earlier.get(key)}, is {plan[key]}" for key in changed)
    raise ConfigError(f"dataset_path={output}: was begun with other arguments ({words}); use the same ones, or name "
                      "a new folder")


def keep_fingerprints(output: pathlib.Path, fingerprints: dict[str, str]) -> None:
  """Refuses to continue a dataset with weights that have changed under the same path."""
  path = output / records.PLAN
  plan = json.loads(path.read_text(encoding="utf-8"))
  if plan.setdefault("weights", fingerprints) != fingerprints:
    raise ConfigError(f"dataset_path={output}: was begun with other weights; name a new folder")
  records.replace_file(path, records.to_json(plan))


def clear_markers(shards: Sequence[Shard]) -> None:
  """dataset.json has taken over what stood beside the shards."""
  for shard in shards:
    records.marker(shard.path).unlink(missing_ok=True)


# --- the work


def encode_shards(config, encoders, shards: Sequence[Shard], reporter: Reporter) -> None:
  """Decodes, encodes and writes; clips of the next shards are decoded while one is encoded."""
  total, done, start = sum(len(shard.clips) for shard in shards), 0, time.perf_counter()
  with ThreadPoolExecutor(max_workers=config.num_data_workers) as pool:
    stream = decoded(pool, config, [clip for shard in shards for clip in shard.clips])
    for shard in shards:
      texts = encoders.texts([clip.video.caption for clip in shard.clips])
      writer, skipped = records.ShardWriter(shard.path), []
      try:
        items = itertools.islice(stream, len(shard.clips))
        while batch := tuple(itertools.islice(items, config.batch_size)):
          skipped += [{"file": clip.name, "reason": frames} for clip, frames in batch if isinstance(frames, str)]
          whole = [(clip, frames) for clip, frames in batch if not isinstance(frames, str)]
          for record in encode_batch(config, encoders, whole, texts):
            writer.write(record)
          done += len(batch)
          each = (time.perf_counter() - start) / done
          reporter.progress("encoding", done, total, each, each * (total - done), unit="clip")
        writer.finish(skipped)
      except BaseException:
        writer.abandon()
        raise
      for item in skipped:
        reporter.warn(f"left out: {item['file']} {item['reason']}")


def decoded(pool: ThreadPoolExecutor, config, clips: Sequence[Clip]) -> Iterator[tuple[Clip, np.ndarray | str]]:
  """Every clip with its frames, or with the reason why there are none; in order, a few ahead of the reader."""

  def read(clip: Clip) -> np.ndarray | str:
    try:
      return clip.read(config.num_frames, config.fps)
    except UnusableVideo as error:
      return str(error)

  ahead = config.num_data_workers + config.batch_size
  waiting = iter(clips)
  running = collections.deque((clip, pool.submit(read, clip)) for clip in itertools.islice(waiting, ahead))
  try:
    while running:
      clip, future = running.popleft()
      frames = future.result()
      running.extend((new, pool.submit(read, new)) for new in itertools.islice(waiting, 1))
      yield clip, frames
  finally:
    for _, future in running:
      future.cancel()


def encode_batch(config, encoders, batch, texts) -> Iterator[bytes]:
  """Records of clips of one size. The batch is filled up with its last clip, so that one program serves all.

  Raises:
    RunError: the VAE or the text encoder gives NaN or infinity.
  """
  if not batch:
    return
  videos = [frames for _, frames in batch]
  videos += [videos[-1]] * (config.batch_size - len(videos))
  for (clip, _), latents in zip(batch, encoders.latents(np.stack(videos)), strict=False):
    text = texts[clip.video.caption]
    for what, value in (("VAE", latents), ("text encoder", text)):
      if not np.isfinite(value).all():
        raise RunError(f"{what}: NaN or infinity for {clip.name}; try dtype=float32, or check the weights")
    metadata = {"file": clip.video.name, "clip": str(clip.index), "caption": clip.video.caption}
    yield records.pack({"latents": latents, "text": text}, config.dataset_dtype, metadata)


def collect(config, output, shards, fingerprints, skipped) -> tuple[records.Dataset, list[Skipped]]:
  """The whole dataset from what stands beside each shard, and everything that was left out.

  Raises:
    ConfigError: not a single clip could be encoded.
  """
  skipped, files = list(skipped), collections.defaultdict(lambda: collections.defaultdict(list))
  for shard in shards:
    result = json.loads(records.marker(shard.path).read_text(encoding="utf-8"))
    skipped += [Skipped(item["file"], item["reason"]) for item in result["skipped"]]
    if result["count"]:
      files[shard.size][shard.split].append((shard.path.name, result["count"]))
  if not files:
    raise ConfigError(f"video_directory={config.video_directory}: none of its videos could be decoded: "
                      + clips_lib.reasons(skipped))
  frame_step, pixel_step = config.vae_strides
  frames = 1 + (config.num_frames - 1) // frame_step
  buckets = tuple(
    records.Bucket(height, width, (frames, height // pixel_step, width // pixel_step, config.vae_z_dim),
                   {split: tuple(shards) for split, shards in splits.items()})
    for (height, width), splits in files.items())
  return records.Dataset(output, config.num_frames, config.fps, config.text_dim, config.dataset_dtype, fingerprints,
                         buckets), skipped


def probing(reporter: Reporter):
  """Reports videos as they are probed."""
  start = time.perf_counter()

  def report(done: int, total: int) -> None:
    each = (time.perf_counter() - start) / done
    reporter.progress("probing videos", done, total, each, each * (total - done), unit="video")

  return report


if __name__ == "__main__":
  sys.exit(main())

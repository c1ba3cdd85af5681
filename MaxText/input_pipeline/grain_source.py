"""Batches for training, by Grain: shuffled by the seed, shared out among processes, read by several threads.

Grain shuffles and batches the *numbers* of the samples, which are the same on every process; then each process reads the
rows that its devices hold. So the batches do not depend on how many processes there are, and an iterator's state is one
number: how many batches were taken. Restored, it goes on with the very next one, whatever the number of workers.

Sizes are never mixed within a batch: each bucket makes batches of its own, and buckets take turns by their share of the
data, in an order that is the same everywhere.

Dimensions: B samples, F H W latent frames/rows/columns, C latent channels, T text tokens or video frames, E text width.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Sequence

import grain
import jax
import numpy as np

from MaxText.config_types import ConfigError, RunError
from MaxText.input_pipeline import clips as clips_lib
from MaxText.input_pipeline import records
from MaxText.input_pipeline.video_files import UnusableVideo
from MaxText.parallel import sharding

_SEEDS = 2**32  # Grain's seeds are smaller than the configuration's

Batch = dict[str, np.ndarray]
Reader = Callable[[int], Batch]  # number of a sample → the sample, without its batch dimension


def make_iterator(
  config, placement: sharding.Placement, split: str = "train", transform: Callable[[], Callable] | None = None
) -> grain.DatasetIterator:
  """Endless batches of this process's rows: shuffled anew every pass for 'train', always in the same order for 'eval'.

  Yields, with B the rows of the global batch that this process's devices hold, and T the length of texts:
    dataset_type=latents: {"latents": float32 [B, F, H, W, C], "text": float32 [B, T, E]}, the text zero past the prompt;
      where the text encoder is trained, "ids" int32 and "mask" bool [B, T] of the caption in place of "text".
    dataset_type=video: {"video": uint8 [B, frames, H, W, 3]}, and "ids" and "mask" unless the VAE is trained.
  Make global arrays of them with jax.make_array_from_process_local_data(placement.sharding(("batch", …), …), rows).

  Args:
    config, placement: of the run.
    split: 'train' or 'eval'.
    transform: makes a function that every batch passes through, once it is known that there is data.

  Returns:
    A Grain iterator; `get_state()` is a small dict for the checkpoint, `set_state(state)` goes on from there.

  Raises:
    ConfigError: the data is missing, damaged or of another shape than the configuration's, or the batch cannot be shared
      out.
  """
  rows = process_rows(config, placement)
  sources = _latents(config, split) if config.dataset_type == "latents" else _videos(config, split)
  batch, seed = config.global_batch_size, config.seed % _SEEDS

  def batches(count: int, read: Reader, salt: int) -> grain.MapDataset:
    numbers = grain.MapDataset.range(count)
    if split == "train":
      numbers = numbers.shuffle((seed + salt) % _SEEDS)

    def load(numbers_B: np.ndarray) -> Batch:
      samples = [read(int(number)) for number in numbers_B[rows]]
      return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    return numbers.repeat().batch(batch).map(load)

  parts = [batches(count, read, salt) for salt, (count, read) in enumerate(sources)]
  dataset = grain.MapDataset.mix(parts, weights=[count for count, _ in sources]) if len(parts) > 1 else parts[0]
  workers = config.num_data_workers
  stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers))
  return iter(stream if transform is None else stream.map(transform()))


def process_rows(config, placement: sharding.Placement) -> np.ndarray:
  """Rows of the global batch that the devices of this process hold, ascending: int [B].

  Processes whose devices share samples (tokens or matrices are split over them) get the same rows.

  Raises:
    ConfigError: the batch is not divisible by the devices that share it.
  """
  batch, parts = config.global_batch_size, config.gradient_accumulation_steps
  axes = placement.mesh_axes(sharding.BATCH)
  ways = math.prod(placement.mesh.shape[axis] for axis in axes)
  if batch % (ways * parts):
    listed = " × ".join(f"{axis}={placement.mesh.shape[axis]}" for axis in axes) or "one device"
    accumulated = f" × gradient_accumulation_steps={parts}" if parts > 1 else ""
    low = batch // (ways * parts) * ways * parts
    nearest = " or ".join(str(n) for n in (low, low + ways * parts) if n)
    raise ConfigError(f"global_batch_size={batch}: must be a multiple of {ways * parts} ({listed}{accumulated}); "
                      f"nearest valid: {nearest}")
  places = placement.sharding((sharding.BATCH,), (batch,)).addressable_devices_indices_map((batch,))
  held = np.zeros(batch, bool)
  for (piece,) in places.values():
    held[piece] = True
  return np.flatnonzero(held)


# --- sources: the number of samples, and what reads one of them


def _latents(config, split: str) -> list[tuple[int, Reader]]:
  dataset = records.open_dataset(config.dataset_path)
  check_shapes(config, dataset)
  if dataset.count(split) == 0:
    what = ("encode it with eval_fraction=0.05, or leave evaluation out" if split == "eval"
            else "all its clips are kept for evaluation; encode more videos")
    raise ConfigError(f"dataset_path={config.dataset_path}: holds no clips for {split}; {what}")
  tokenizer = _tokenizer(config) if config.train_target == "text" else None
  return [_shards(config, dataset.path, bucket.shards[split], tokenizer)
          for bucket in dataset.buckets if bucket.count(split)]


def _shards(config, path: pathlib.Path, shards: Sequence[tuple[str, int]], tokenizer) -> tuple[int, Reader]:
  try:
    source = grain.sources.ArrayRecordDataSource([str(path / name) for name, _ in shards])
    count = len(source)
  except (RuntimeError, ValueError, OSError) as error:
    raise ConfigError(f"dataset_path={path}: a shard of {shards[0][0]} … is damaged ({error})") from None
  if count != sum(count for _, count in shards):
    raise ConfigError(f"dataset_path={path}: its shards hold {count} clips, {records.DATASET} says "
                      f"{sum(count for _, count in shards)}; copy the folder again")

  length = config.text_length

  def read(number: int) -> Batch:
    record = source[number]
    sample = records.unpack(record)
    text = {"text": pad_text(sample["text"], length)} if tokenizer is None else _ids(tokenizer, records.caption(record))
    return {"latents": sample["latents"], **text}

  return count, read


def pad_text(text_TE: np.ndarray, length: int) -> np.ndarray:
  """Zeros past the prompt: float32 [length, E]."""
  return np.pad(text_TE.astype(np.float32), ((0, length - len(text_TE)), (0, 0)))


def _ids(tokenizer, caption: str) -> Batch:
  tokens = tokenizer([caption])
  return {"ids": tokens.ids[0], "mask": tokens.mask[0]}


def check_shapes(config, dataset: records.Dataset) -> None:
  """Refuses shards whose latents or texts are of another shape than the configuration's.

  Raises:
    ConfigError: says what the shards hold, what the configuration asks for, and the keys that fit.
  """
  about = f"dataset_path={config.dataset_path}"
  wanted = clips_lib.sizes(config)
  frame_step, pixel_step = config.vae_strides
  for bucket in dataset.buckets:
    height, width = bucket.height, bucket.width
    shape = (config.latent_grid[0], height // pixel_step, width // pixel_step, config.vae_z_dim)
    if (height, width) not in wanted or bucket.latent_shape != shape:
      sizes = [f"{b.height}×{b.width}" for b in dataset.buckets]
      asked = ", ".join(f"{h}×{w}" for h, w in wanted)
      size = (f"height={height} width={width}" if len(dataset.buckets) == 1 else
              f"size_buckets=[{','.join(f'[{b.height},{b.width}]' for b in dataset.buckets)}]")
      raise ConfigError(
        f"{about}: its shards hold latents {list(bucket.latent_shape)} ({height}×{width}, {dataset.num_frames} frames; "
        f"all sizes: {', '.join(sizes)}), but {asked}, {config.num_frames} frames with {config.vae_z_dim} latent "
        f"channels are asked for; use {size} num_frames={dataset.num_frames}, or encode the videos again")
  if dataset.text_width != config.text_dim:
    raise ConfigError(f"{about}: its text embeddings are {dataset.text_width} wide, the model reads text_dim="
                      f"{config.text_dim}; encode the videos again with this model's text encoder")


def _tokenizer(config):
  from MaxText.models.tokenizer import Tokenizer

  if config.folder is None:
    what = "dataset_type=video" if config.dataset_type == "video" else "train_target=text"
    raise ConfigError(f"{what}: needs load_parameters_path, because captions are read by a model's tokenizer")
  return Tokenizer(str(pathlib.Path(config.folder.tokenizer_path).parent))


def _videos(config, split: str) -> list[tuple[int, Reader]]:
  tokenizer = None if config.train_target == "vae" else _tokenizer(config)
  groups, skipped = clips_lib.find_clips(config)
  chosen = [clips for (name, _), clips in groups.items() if name == split]
  if not chosen:
    raise ConfigError(f"video_directory={config.video_directory}: holds no clips for {split}"
                      + ("; set eval_fraction=0.05, or leave evaluation out" if split == "eval" else ""))
  if skipped and jax.process_index() == 0 and split == "train":
    print(f"warning: {len(skipped)} videos are left out: {clips_lib.reasons(skipped)}", flush=True)

  def reader(clips) -> Reader:
    def read(number: int) -> Batch:
      clip = clips[number]
      try:
        video = clip.read(config.num_frames, config.fps)
      except UnusableVideo as error:
        raise RunError(f"video_directory={config.video_directory}: {clip.name} {error}; remove the video, or use "
                       "encode_dataset, which leaves out what cannot be decoded") from None
      return {"video": video, **({} if tokenizer is None else _ids(tokenizer, clip.video.caption))}

    return read

  return [(len(clips), reader(clips)) for clips in chosen]

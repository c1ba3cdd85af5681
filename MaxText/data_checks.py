"""Rules of the keys of group 'data', for the commands that read them and for those that do not. See `config_checks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from MaxText import config_types

if TYPE_CHECKING:
  from MaxText.config_checks import Facts

_CLIPS = frozenset({"video_directory", "size_buckets", "clips_per_video", "eval_fraction", "num_data_workers"})
_SOURCES = {
  "synthetic": frozenset({"dataset_type"}),
  "latents": frozenset({"dataset_type", "dataset_path", "size_buckets", "num_data_workers"}),
  "video": _CLIPS | {"dataset_type"},
}
_COMMANDS = {
  "encode_dataset": _CLIPS | {"dataset_path", "dataset_dtype", "clips_per_shard"},
  "train_tokenizer": frozenset({"video_directory", "tokenizer_path", "tokenizer_vocab_size", "tokenizer_max_length"}),
  "convert_checkpoint": frozenset({"tokenizer_path"}),
}
_VIDEOS = {"video_directory": "a folder of videos with captions"}
_NEEDED = {
  ("train", "latents"): {"dataset_path": "the folder that encode_dataset wrote"},
  ("train", "video"): _VIDEOS,
  ("encode_dataset", None): _VIDEOS | {"dataset_path": "the folder to write"},
  ("train_tokenizer", None): _VIDEOS | {"tokenizer_path": "the folder to write"},
}


def check_data(facts: Facts) -> Iterator[str]:
  """Problems of the group 'data'."""
  c, command = facts.config, facts.command
  source = c.dataset_type if facts.training else None
  read = _SOURCES[source] if source else _COMMANDS.get(command, frozenset())
  for key in sorted(facts.user_keys & set(config_types.keys_of("data")) - read):
    yield f"{key}: would do nothing, " + _advice(command, source, key)
  for key, what in _NEEDED.get(("train" if facts.training else command, source), {}).items():
    if getattr(c, key) is None:
      yield f"{key} is missing: give {what}"
  if command == "encode_dataset" and c.load_parameters_path is None and not c.init_random_weights:
    yield ("no weights: give load_parameters_path=FOLDER, the model that will be trained, or init_random_weights=true "
           "for a test (the latents mean nothing)")
  if "size_buckets" in read:
    yield from _buckets(facts)


def _advice(command: str, source: str | None, key: str) -> str:
  if source is None:
    return f"{command} does not read it; leave it out"
  readers = [name for name, keys in _SOURCES.items() if key in keys]
  return (f"training with dataset_type={source} does not read it; "
          + (f"add dataset_type={readers[0]}, or leave it out" if readers else "leave it out"))


def _buckets(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.size_buckets is None:
    return
  for key in sorted(facts.user_keys & {"height", "width"}):
    yield f"{key}: would do nothing beside size_buckets; keep one of the two"
  if not c.size_buckets or len(set(c.size_buckets)) < len(c.size_buckets):
    yield f"size_buckets={config_types.as_yaml(c.size_buckets)}: must hold at least one size, and each once"
  for size in c.size_buckets:
    for side, value, patch in zip(("height", "width"), size, c.patch_size[1:], strict=True):
      step = c.vae_strides[1] * patch
      if value % step:
        yield (f"size_buckets={config_types.as_yaml(c.size_buckets)}: the {side} {value} must be a multiple of {step} "
               f"(VAE stride {c.vae_strides[1]} × patch {patch}); nearest valid: {max(step, round(value / step) * step)}")

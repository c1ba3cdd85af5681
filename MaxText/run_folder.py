"""The folder of one decode run: its name, its files, and what an earlier, interrupted run left in it.

    {base_output_directory}/{run_name}/
      run.json                          configuration, environment and figures; rewritten whenever a video is finished
      video.mp4 | 000.mp4 …             one video | several
      latents.npy | 000.latents.npy …   final latents, from before the VAE runs; removed after success unless save_latents
      video.step-012.latents.npy        latents after step 12, left by an interrupted run

File names never contain the prompt. Every file is written under a temporary name and renamed, so a file with its final
name is whole.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from MaxText import config_types
from MaxText.config_reader import nearest, user_path
from MaxText.config_types import ConfigError, RunError

RUN_JSON = "run.json"
# Keys that may differ when a run is continued: they do not change what the videos show.
FREE_ON_RESUME = frozenset(config_types.keys_of("run")) - {
  "model_name",
  "load_parameters_path",
  "init_random_weights",
} | {"save_latents", "batch_size", "debug_sharding"}


class RunFolder:
  """Names of a run's files, and which videos an earlier run finished.

  Args:
    config: from `pyconfig.initialize`.
    requests: the videos that the run makes, each with `prompt` and `seed`, in the order of their files.
    create: False only looks (dry run).
  Raises:
    ConfigError: the folder holds output and resume is not set; or resume is set and the earlier run was another one.
  """

  def __init__(self, config, requests: Sequence[Any], create: bool = True):
    self.path = user_path(config.base_output_directory) / config.run_name
    self.requests, self.num_videos = requests, len(requests)
    self.earlier: dict[str, Any] = {}
    self.notice = ""  # for whoever meant to continue a run, and mistyped its name
    if config.resume and not self.path.is_dir():
      others = [path.name for path in self.path.parent.glob("*/")]
      self.notice = f"resume=true: there is no {self.path} yet, it starts now{nearest(config.run_name, others)}"
    if self.path.is_dir() and any(self.path.iterdir()):
      if not config.resume:
        raise ConfigError(
          f"run_name={config.run_name}: {self.path} already holds output; choose another run_name, or "
          "resume=true to make only what is missing in it"
        )
      self._check_same_run(config)
    if create:
      try:
        self.path.mkdir(parents=True, exist_ok=True)
        probe = self.path / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink()
      except OSError as error:
        raise ConfigError(
          f"base_output_directory={config.base_output_directory}: cannot write to {self.path} "
          f"({error.strerror}); choose another folder"
        ) from error
      for leftover in (*self.path.glob("*.tmp"), *self.path.glob("*.part")):  # of a killed run
        leftover.unlink()

  def _check_same_run(self, config) -> None:
    try:
      self.earlier = json.loads((self.path / RUN_JSON).read_text(encoding="utf-8"))
      before = dict(self.earlier["config"])
      videos = {video["file"]: (video["prompt"], video["seed"]) for video in self.earlier["videos"]}
    except FileNotFoundError:
      made = sorted(path.name for pattern in ("*.mp4", "*.npy") for path in self.path.glob(pattern))
      if not made:
        return  # killed before anything was made
      raise ConfigError(
        f"resume=true: {self.path} holds {made[0]} but no {RUN_JSON}, so nothing says what it shows; choose another "
        "run_name"
      ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
      raise ConfigError(
        f"resume=true: {self.path / RUN_JSON} cannot be read ({error!r}); choose another run_name"
      ) from error
    now = json.loads(json.dumps(config.as_record()))
    changed = [
      key for key in now if key not in FREE_ON_RESUME and key in before and value_of(before[key]) != value_of(now[key])
    ]
    if changed:
      listed = "; ".join(f"{key} was {value_of(before[key])!r}, is {value_of(now[key])!r}" for key in changed[:8])
      raise ConfigError(
        f"resume=true: run {self.path.name} was made with another configuration ({listed}); use the same one, or "
        "another run_name"
      )
    asked = {self.video(i).name: (request.prompt, request.seed) for i, request in enumerate(self.requests)}
    for file, (prompt, seed) in videos.items():  # a prompts file may have grown since, but not changed
      if asked.get(file) != (prompt, seed):
        raise ConfigError(
          f"resume=true: {file} of run {self.path.name} was of prompt {prompt!r} and seed {seed}, and no longer is; use "
          "the same prompts, or another run_name"
        )

  def _stem(self, index: int) -> str:
    return "video" if self.num_videos == 1 else f"{index:03d}"

  def video(self, index: int, variant: str = "") -> pathlib.Path:
    """Path of a video; variant: '' or a suffix such as 'dense'."""
    return self.path / f"{self._stem(index)}{'.' + variant if variant else ''}.mp4"

  def latents(self, index: int) -> pathlib.Path:
    """Path of the final latents of a video."""
    return self.path / ("latents.npy" if self.num_videos == 1 else f"{index:03d}.latents.npy")

  def partial_latents(self, index: int, step: int) -> pathlib.Path:
    return self.path / f"{self._stem(index)}.step-{step:03d}.latents.npy"

  def finished(self, index: int) -> bool:
    return self.video(index).exists()

  def clean(self, index: int, keep_latents: bool) -> None:
    """Removes what a finished video no longer needs."""
    for path in self.path.glob(f"{self._stem(index)}.step-*.latents.npy"):
      path.unlink()
    if not keep_latents:
      self.latents(index).unlink(missing_ok=True)

  def save_latents(self, path: pathlib.Path, latents_FHWC) -> pathlib.Path:
    """Writes latents as float32 [C, F, H, W] under a temporary name, then renames."""
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    try:
      with open(temporary, "wb") as f:
        np.save(f, np.asarray(latents_FHWC, np.float32).transpose(3, 0, 1, 2))
        f.flush()
        os.fsync(f.fileno())
      os.replace(temporary, path)
    except OSError as error:  # numpy's own says nothing of the disk
      temporary.unlink(missing_ok=True)
      raise RunError(f"{path} could not be written ({error}); is the disk full?") from error
    return path


def value_of(entry: Any) -> Any:
  """The value of one key in a config record, with or without its source."""
  return entry["value"] if isinstance(entry, dict) and "value" in entry else entry


def load_latents(path) -> np.ndarray:
  """Latents as files hold them, float32 [C, F, H, W], as the models take them: [F, H, W, C]."""
  try:
    return np.load(user_path(path), allow_pickle=False).transpose(1, 2, 3, 0)
  except (ValueError, EOFError) as error:
    raise ConfigError(f"{path}: is damaged ({error}); delete it, and its video starts over") from error

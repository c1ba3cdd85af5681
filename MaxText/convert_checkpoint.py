"""Converts a model to another format.

  python -m MaxText.convert_checkpoint configs/video.yml load_parameters_path=FOLDER converted_path=CHECKPOINT

convert_to=orbax makes our checkpoint of a Diffusers folder or an original release. convert_to=diffusers writes a
Diffusers folder of an Orbax checkpoint, a checkpoint of a training run, or an original release. Weights keep their types
(converted_dtype=bfloat16 rounds the matrices), so that a model converted there and back is bit-equal.
init_random_weights=true in place of load_parameters_path writes a new model of random weights around the tokenizer in
tokenizer_path, which training can start from. The result appears under its name only when it is whole. Needs as much
memory as the largest part of the model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable

from MaxText import pyconfig
from MaxText.config_types import ConfigError, RunError
from MaxText.reporter import Reporter


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "convert_checkpoint")
  reporter = Reporter(config.log_format)
  from MaxText.checkpoints import export, random_folder  # imports jax: only once the configuration is right
  from MaxText.checkpoints.folder import open_folder

  if config.init_random_weights:
    folder = random_folder.make(config)
  else:
    with pyconfig.input_errors(f"load_parameters_path={config.load_parameters_path}"):
      folder = open_folder(config.load_parameters_path)
  output = os.path.realpath(os.path.expanduser(config.converted_path))
  check_output(folder, output, config.convert_to)

  partial = f"{output}.partial"
  start = time.perf_counter()
  report = progress_reporter(reporter)
  with reporter.stage("convert"), removed_on_failure(partial):
    if config.convert_to == "orbax":
      export.write_orbax(folder, partial, report, config.converted_dtype)
    else:
      export.write_diffusers(folder, partial, config.flow_shift, report, config.converted_dtype)
  if os.path.isdir(output):
    os.rmdir(output)  # empty, as checked; fails if that has changed
  os.rename(partial, output)
  with pyconfig.input_errors():
    open_folder(output)  # what was written passes the checks that decode will make
  reporter.info(f"wrote {output} ({config.convert_to}) in {time.perf_counter() - start:.1f} s")


def check_output(folder, output: str, convert_to: str):
  """Raises ConfigError if the result would overwrite something, change nothing, or lie inside its source."""
  if folder.format == convert_to:
    raise ConfigError(f"load_parameters_path={folder.path} is in {convert_to} format already: nothing to convert")
  if os.path.isdir(output) and os.listdir(output):
    raise ConfigError(f"converted_path={output} is not empty: name a new folder")
  if os.path.exists(output) and not os.path.isdir(output):
    raise ConfigError(f"converted_path={output} is a file: name a new folder")
  if os.path.commonpath([os.path.realpath(folder.path), os.path.realpath(output)]) == os.path.realpath(folder.path):
    raise ConfigError(f"converted_path={output} lies inside load_parameters_path={folder.path}: name a folder outside it")
  try:
    os.makedirs(os.path.dirname(output), exist_ok=True)
    if os.path.isdir(f"{output}.partial"):  # left by a conversion that was killed
      shutil.rmtree(f"{output}.partial")
    os.mkdir(f"{output}.partial")  # fails now, and not after the first part of the model, where nothing can be written
    os.rmdir(f"{output}.partial")
  except OSError as error:
    raise ConfigError(f"converted_path={output} cannot be made: {error.strerror}") from error


@contextlib.contextmanager
def removed_on_failure(partial: str):
  """Leaves nothing half-written; a disk that is full or fails is told in one message."""
  try:
    yield
  except BaseException as error:
    shutil.rmtree(partial, ignore_errors=True)
    if isinstance(error, OSError) or "No space left on device" in str(error):  # the latter by Orbax, as a ValueError
      raise RunError(f"{partial} could not be written, and was removed: {str(error)[-200:]}") from error
    raise


def progress_reporter(reporter: Reporter):
  """Tells the share of each component that is read."""
  shares: dict[str, Callable[[int, int], None]] = {}

  def report(component: str, done: int, total: int):
    shares.setdefault(component, reporter.share(component))(done, total)

  return report


if __name__ == "__main__":
  sys.exit(main())

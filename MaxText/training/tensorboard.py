"""Metrics as TensorBoard reads them, in RUN/tensorboard."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any


class TensorBoard:
  """Scalars by step. With directory None nothing is written, and the library is not imported.

  A run that continues tells TensorBoard to forget the steps after the one it continues from: they will come again.
  """

  def __init__(self, directory: pathlib.Path | None, step: int):
    self._writer = None
    if directory is None:
      return
    from tensorboardX import SummaryWriter

    self._writer = SummaryWriter(str(directory), purge_step=step + 1, flush_secs=30)

  def write(self, *, step: int, **values: Any) -> None:
    """Numbers go under their names, a list under name/0, name/1, …; None is left out."""
    if self._writer is None:
      return
    for name, value in values.items():
      if isinstance(value, Sequence):
        for i, each in enumerate(value):
          self._writer.add_scalar(f"{name}/{i}", each, step)
      elif value is not None:
        self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    if self._writer is not None:
      self._writer.close()

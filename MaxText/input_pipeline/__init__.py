"""Where training batches come from. Every source is a Grain iterator, whose position is part of a checkpoint."""

from __future__ import annotations

from typing import Any


def make_iterator(config, placement: Any, split: str = "train"):
  """A Grain iterator over batches of this host's share of the global batch, numpy.

  They hold what the objective of `train_target` reads: "latents" [B, F, H, W, C] float32 and "text" [B, T, E], zeros past
  the prompt (dit); "latents", "ids" and "mask" [B, T] (text); "video" [B, frames, H, W, 3] uint8 (vae).

  Args:
    config: dataset_type says which source.
    placement: the mesh and its rules.
    split: 'train' (endless) or 'eval' (the same batches every time).
  """
  if config.dataset_type == "synthetic":
    from MaxText.input_pipeline import synthetic

    return synthetic.make_iterator(config, placement, split)
  from MaxText.input_pipeline import grain_source

  if config.dataset_type == "latents":
    return grain_source.make_iterator(config, placement, split)
  if config.train_target == "vae":
    return grain_source.make_iterator(config, placement, split)
  from MaxText.input_pipeline.encode import Encoders
  from MaxText.input_pipeline.on_the_fly import encoding

  return grain_source.make_iterator(config, placement, split, lambda: encoding(Encoders(config), config.train_target))

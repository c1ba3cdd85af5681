"""Raw videos and token ids to latents and text embeddings while training goes on; the encoders are frozen.

Dimensions: B samples of this process, F H W latent frames/rows/columns, C latent channels, T text tokens, E text width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from MaxText.config_types import RunError
from MaxText.input_pipeline.encode import Encoders

Batch = dict[str, np.ndarray]


def encoding(encoders: Encoders, train_target: str) -> Callable[[Batch], Batch]:
  """What makes of a raw batch the batch that encoded shards would give.

  {"video": uint8 [B, T, H, W, 3], "ids": int32 [B, 512], "mask": bool [B, 512]} →
  {"latents": float32 [B, F, H, W, C], "text": float32 [B, 512, E]}, or, where train_target=text trains the text encoder,
  "ids" and "mask" as they were. It raises RunError for NaN and infinity.
  """

  def encode(batch: Batch) -> Batch:
    made = {"latents": encoders.latents(batch["video"])}
    if train_target == "text":
      made |= {name: batch[name] for name in ("ids", "mask")}
    else:
      made["text"] = encoders.token_embeddings(batch["ids"], batch["mask"])
    for name, array in made.items():
      if not np.isfinite(array).all():
        raise RunError(f"dataset_type=video: NaN or infinity in the {name} of a batch; try dtype=float32, or check the "
                       "weights")
    return made

  return encode

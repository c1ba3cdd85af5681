"""A model of random weights around a tokenizer, opened as if it lay on disk: where training a model of one's own starts.

`convert_checkpoint` writes it as a folder, so that every further command reads it like any other model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from MaxText.checkpoints import contents
from MaxText.checkpoints.contents import Folder
from MaxText.config_types import ConfigError

if TYPE_CHECKING:
  import jax


@dataclasses.dataclass(frozen=True)
class RandomFolder(Folder):
  """Its weights are made when they are read. `seed`: the same one makes the same numbers."""

  seed: int = 0


def make(config) -> RandomFolder:
  """The model that a configuration describes.

  Args:
    config: architecture, tokenizer_path, flow_shift and seed.

  Raises:
    ConfigError: no tokenizer, or more pieces than text_vocab_size.
  """
  from MaxText.models.tokenizer import Tokenizer

  directory = os.path.expanduser(config.tokenizer_path)
  try:
    vocab_size = Tokenizer(directory).vocab_size
  except ValueError as error:
    raise ConfigError(f"tokenizer_path={config.tokenizer_path}: {error}") from None
  if vocab_size > config.text_vocab_size:
    raise ConfigError(f"text_vocab_size={config.text_vocab_size}: the tokenizer in {config.tokenizer_path} has "
                      f"{vocab_size} pieces; set text_vocab_size to at least that many (override_model_config=true), or "
                      "train a tokenizer with fewer")
  wan, vae, umt5 = config.wan(), config.vae(), config.umt5()
  try:
    contents.check_together(wan, vae, umt5, "this configuration")
  except ValueError as error:
    raise ConfigError(str(error)) from None
  return RandomFolder(
    path="random weights", format="random", wan=wan, vae=vae, umt5=umt5, num_experts=config.num_experts,
    boundary_ratio=config.boundary_ratio, flow_shift=config.flow_shift,
    tokenizer_path=os.path.join(directory, "spiece.model"), stored={}, configs={}, seed=config.seed)


def leaves(
  folder: RandomFolder, component: str, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """The initial weights of a component that `targets` names, in its types, on the host."""
  import jax
  from flax import nnx

  from MaxText.models.umt5 import Umt5Encoder
  from MaxText.models.vae import WanVae
  from MaxText.models.wan import WanTransformer
  from MaxText.parallel import mesh, sharding

  kind = {"vae": WanVae, "text_encoder": Umt5Encoder}.get(component, WanTransformer)
  abstract = nnx.state(nnx.eval_shape(lambda: kind(folder.architecture(component), rngs=nnx.Rngs(0))))
  placement = sharding.Placement(mesh.mesh_of(jax.local_devices(backend="cpu")[0]), ())
  seed = folder.seed + (component == "transformer_2")  # two experts are two models
  state = sharding.init_state(sharding.sharded_abstract(abstract, placement), placement, seed)
  made = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
  return {path: made[path].astype(target.dtype) for path, target in targets.items()}

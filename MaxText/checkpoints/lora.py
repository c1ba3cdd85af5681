"""LoRA files: matched against the model's names before anything loads, then merged into the weights in float32.

A LoRA changes a weight by scale · up @ down (two thin matrices), or by a plain difference. Sampling with merged weights
is as fast as without. Understood are the names that Wan LoRAs come with:

    transformer.blocks.0.attn1.to_q.lora_A.weight            Diffusers and PEFT (also lora.down, lora_A.default)
    diffusion_model.blocks.0.self_attn.q.lora_down.weight    names of the original release (also lora_A), with .alpha,
    .diff, .diff_b lora_unet_blocks_0_self_attn_q.lora_up.weight            the same with underscores

Dimensions: O out, I in (of the torch weight), r rank.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from MaxText.checkpoints import contents, names, tensor_files
from MaxText.checkpoints.tensor_files import StoredTensor

if TYPE_CHECKING:
  from flax import nnx

  from MaxText.models.wan import WanConfig

# Longest first: a name is stripped of the first that fits, and again.
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.")
_FLAT_PREFIX = "lora_unet_"
_ROLES = {
  ".lora_A.weight": "down", ".lora_A.default.weight": "down", ".lora_down.weight": "down", ".lora.down.weight": "down",
  ".lora_B.weight": "up", ".lora_B.default.weight": "up", ".lora_up.weight": "up", ".lora.up.weight": "up",
  ".lora_B.bias": "up_bias", ".lora_B.default.bias": "up_bias",
  ".alpha": "alpha", ".diff": "difference", ".diff_b": "bias_difference",
}
_METADATA = "lora_adapter_metadata"


@dataclasses.dataclass(frozen=True)
class Change:
  """What one LoRA adds to one tensor: scale · up @ down, or scale · difference (then up is None)."""

  row: names.Tensor
  scale: float
  down: StoredTensor
  up: StoredTensor | None = None


def open_loras(
  loras: Sequence[tuple[str, float, str]], wan: WanConfig, num_experts: int
) -> dict[str, tuple[Change, ...]]:
  """Matches LoRA files with the model. Reads their headers and the alphas, no weights.

  Args:
    loras: (path of a .safetensors file, weight, expert) each; expert is 'both', 'high_noise' or 'low_noise'.
    wan: architecture of the model.
    num_experts: 1 or 2; with one expert the third entry must be 'both'.

  Returns:
    component ('transformer', 'transformer_2') -> its changes.

  Raises:
    ValueError: a file is no LoRA, or was made for another model; lists the names that match nothing and the wrong shapes.
  """
  changes: dict[str, tuple[Change, ...]] = {component: () for component in names.COMPONENTS[:num_experts]}
  for path, weight, expert in loras:
    found = _open_lora(os.path.expanduser(path), weight, names.tensors("transformer", wan))
    for component, of in zip(names.COMPONENTS, ("high_noise", "low_noise"), strict=False):
      if component in changes and expert in ("both", of):
        changes[component] += found
  return changes


def _open_lora(path: str, weight: float, rows: tuple[names.Tensor, ...]) -> tuple[Change, ...]:
  if not os.path.isfile(path):
    raise ValueError(f"lora_path={path}: there is no such file")
  stored, metadata = tensor_files.read_header(path)
  dotted, flat = _modules(rows)
  match = _Match({row.name: row for row in rows}, weight, _adapter_scale(metadata))
  modules: dict[str, dict[str, StoredTensor]] = {}
  for name, tensor in stored.items():
    module, role = _split(name)
    is_flat = module.startswith(_FLAT_PREFIX)
    known = flat.get(module.removeprefix(_FLAT_PREFIX)) if is_flat else dotted.get(_strip(module))
    if role is None or known is None:
      match.unmatched.append(name)
    else:
      modules.setdefault(known, {})[role] = tensor
  for module, roles in modules.items():
    match.add(module, roles)
  problems = [(f"{len(match.unmatched)} of its {len(stored)} names match no weight", sorted(match.unmatched)),
              (f"{len(match.misshapen)} of its weights have another shape", match.misshapen)]
  listed = [contents.listed(title, items) for title, items in problems if items]
  if listed or not match.changes:
    width = next(row.shape[0] for row in rows if row.path == "patch_embedding.bias")
    model = f"this model (width {width}, {1 + max(row.layer or 0 for row in rows)} layers)"
    raise ValueError(f"lora_path={path} is not a LoRA of {model}:\n" + ("\n".join(listed) or "it holds no weights"))
  return tuple(match.changes)


class _Match:
  """Collects the changes that a file's tensors make, and the names of those that fit nothing."""

  def __init__(self, rows: Mapping[str, names.Tensor], weight: float, adapter_scale: Callable[[str, int], float | None]):
    self.rows, self.weight, self.adapter_scale = rows, weight, adapter_scale
    self.changes: list[Change] = []
    self.unmatched: list[str] = []
    self.misshapen: list[str] = []

  def add(self, module: str, roles: Mapping[str, StoredTensor]):
    """Adds the tensors of one module, given its Diffusers name."""
    row = self.rows.get(f"{module}.weight") or self.rows[module]  # a modulation table has no suffix
    bias = self.rows.get(f"{module}.bias")
    scale = self.weight
    if "down" in roles and "up" in roles:
      scale *= self._scale(module, roles)
      self._product(row, scale, roles["down"], roles["up"])
    else:
      halves = [roles[role].name for role in ("down", "up", "alpha") if role in roles]
      self.unmatched += [f"{name} (its other half is missing)" for name in halves]
    self._difference(row, self.weight, roles.get("difference"))
    self._difference(bias, self.weight, roles.get("bias_difference"))
    self._difference(bias, scale, roles.get("up_bias"))

  def _scale(self, module: str, roles: Mapping[str, StoredTensor]) -> float:
    """alpha / rank; a file without alpha is already scaled."""
    rank = max(roles["down"].shape[0], 1) if roles["down"].shape else 1
    if "alpha" in roles:
      alpha = tensor_files.read(roles["alpha"], dtype=np.float32).reshape(-1)
      if alpha.size != 1 or not np.isfinite(alpha[0]):
        self.misshapen.append(f"{roles['alpha'].name} {list(roles['alpha'].shape)}, where one number is expected")
        return 1.0
      return float(alpha[0]) / rank
    scale = self.adapter_scale(module, rank)
    return 1.0 if scale is None else scale

  def _product(self, row: names.Tensor, scale: float, down: StoredTensor, up: StoredTensor):
    num_out, num_in = row.shape[0], math.prod(row.shape[1:])
    rank = down.shape[0] if down.shape else 0
    # A convolution's kernel dimensions may be written out ([r, C, t, h, w] and [O, r, 1, 1, 1]).
    fits = (len(row.shape) > 1 and rank > 0 and up.shape[:2] == (num_out, rank) and math.prod(up.shape) == num_out * rank
            and math.prod(down.shape) == rank * num_in)
    if fits:
      self.changes.append(Change(row, scale, down, up))
    else:
      shapes = f"{list(up.shape)} @ {list(down.shape)} for a weight {list(row.shape)}"
      self.misshapen.append(f"{up.name} and {down.name}: {shapes}")

  def _difference(self, row: names.Tensor | None, scale: float, difference: StoredTensor | None):
    if difference is None:
      return
    if row is None:
      self.unmatched.append(difference.name)
    elif [n for n in difference.shape if n > 1] != [n for n in row.shape if n > 1]:
      self.misshapen.append(f"{difference.name} {list(difference.shape)} for {list(row.shape)}")
    else:
      self.changes.append(Change(row, scale, difference))


def _modules(rows: tuple[names.Tensor, ...]) -> tuple[dict[str, str], dict[str, str]]:
  """Maps a module's name (dotted; flat with underscores) in either project's words to its Diffusers name."""
  dotted = {}
  for row in rows:
    for name in (row.original, row.name):
      module = name.removesuffix(".weight").removesuffix(".bias")
      dotted[module] = row.name.removesuffix(".weight").removesuffix(".bias")
  return dotted, {module.replace(".", "_"): known for module, known in dotted.items()}


def _split(name: str) -> tuple[str, str | None]:
  for suffix, role in _ROLES.items():
    if name.endswith(suffix):
      return name.removesuffix(suffix), role
  return name, None


def _strip(module: str) -> str:
  prefix = next((p for p in _PREFIXES if module.startswith(p)), None)
  return module if prefix is None else _strip(module[len(prefix):])


def _adapter_scale(metadata: Mapping[str, str]) -> Callable[[str, int], float | None]:
  """(module, rank) -> alpha / rank by PEFT's record, which Diffusers writes into the header; None without a record."""
  try:
    record = json.loads(metadata.get(_METADATA, "{}"))
    record = {key.removeprefix("transformer."): value for key, value in record.items()}
    patterns = dict(record.get("alpha_pattern") or {})
    if not all(isinstance(alpha, (int, float, type(None))) for alpha in (record.get("lora_alpha"), *patterns.values())):
      raise ValueError("an alpha is no number")
  except (ValueError, TypeError, AttributeError) as e:
    raise ValueError(f"the {_METADATA} of the LoRA file cannot be read ({e})") from e

  def scale(module: str, rank: int) -> float | None:
    alpha = next((v for p, v in patterns.items() if f".{module}".endswith(f".{p}")), record.get("lora_alpha"))
    return None if alpha is None else alpha / (math.sqrt(rank) if record.get("use_rslora") else rank)

  return scale


def write_lora(path: str, wan: WanConfig, weights: Mapping[str, np.ndarray], scale: float):
  """Writes adapters as a LoRA file with Diffusers' names, which also `open_loras` reads.

  Args:
    path: the file; it appears when it is whole.
    weights: our names → arrays: "blocks.attn1.to_q.lora_A" [L, I, r] and "….lora_B" [L, r, O] float32.
    scale: strength, alpha / r.
  """
  arrays, rank = {}, 0
  for row in names.tensors("transformer", wan):
    module = row.path.removesuffix(".kernel")
    if row.layer is None or f"{module}.lora_A" not in weights or module == row.path:
      continue
    down, up = (np.ascontiguousarray(weights[f"{module}.lora_{half}"][row.layer].T) for half in "AB")
    stem, rank = f"transformer.{row.name.removesuffix('.weight')}", down.shape[0]
    arrays |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
  record = json.dumps({"transformer.r": rank, "transformer.lora_alpha": scale * rank})
  entries = [(name, array.dtype, array.shape) for name, array in arrays.items()]
  temporary = f"{path}.{os.getpid()}.tmp"
  tensor_files.write_safetensors(temporary, entries, arrays.__getitem__, {"format": "pt", _METADATA: record})
  os.replace(temporary, path)


def merge(state: nnx.State, changes: Sequence[Change]) -> nnx.State:
  """Adds the changes to a transformer's weights.

  All changes of a tensor are summed in float32 and rounded once, to the type the weights are stored in. The arrays keep
  their sharding; those that change are updated in place, so the state passed in must not be used again.

  Args:
    state: the loaded weights. changes: of this component, from `open_loras`.

  Returns:
    the state with the merged weights.
  """
  from flax import nnx

  of_row: dict[names.Tensor, list[Change]] = {}
  for change in changes:
    of_row.setdefault(change.row, []).append(change)
  leaves = {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}
  for row, each in of_row.items():
    products = tuple((np.float32(c.scale), _matrix(c.up), _matrix(c.down)) for c in each if c.up is not None)
    differences = tuple(
      (np.float32(c.scale), tensor_files.read(c.down, dtype=np.float32).reshape(row.shape)) for c in each if c.up is None)
    leaf = leaves[row.path]
    add = _adder(row.shape, row.order, row.our_shape, row.layer is not None, leaf.sharding)
    leaves[row.path] = add(leaf, np.int32(row.layer or 0), products, differences)
  return nnx.from_flat_state(
    [(path, variable.replace(leaves[".".join(map(str, path))])) for path, variable in nnx.to_flat_state(state)])


def _matrix(stored: StoredTensor) -> np.ndarray:
  """float32 [O, r] or [r, I]; kernel dimensions of a convolution are joined to its inputs."""
  array = tensor_files.read(stored, dtype=np.float32)
  return array.reshape(array.shape[0], -1)


@functools.lru_cache(maxsize=256)
def _adder(shape, order, our_shape, stacked: bool, sharding):
  """Compiled (leaf, layer, products, differences) -> leaf, in the leaf's own memory."""
  import jax
  import jax.numpy as jnp

  from MaxText.checkpoints import loading

  def add(leaf, layer, products, differences):
    delta = jnp.zeros(shape, jnp.float32)
    for scale, up_Or, down_rI in products:
      delta += scale * jnp.matmul(up_Or, down_rI, precision=jax.lax.Precision.HIGHEST).reshape(shape)
    for scale, difference in differences:
      delta += scale * difference
    delta = delta.transpose(order).reshape(our_shape)
    old = jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False) if stacked else leaf
    new = (old.astype(jnp.float32) + delta).astype(leaf.dtype)
    return loading.update_layer(leaf, new, layer, sharding=sharding) if stacked else new

  return jax.jit(add, donate_argnums=0, out_shardings=sharding)

"""Writes a model in another format: our Orbax checkpoint, or a Diffusers folder. Weights keep their stored types.

Both work on the host's memory, one component at a time, whatever accelerators there are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.checkpoints import diffusers_folder, names, orbax_folder, tensor_files, training_folder
from MaxText.checkpoints.contents import Folder
from MaxText.checkpoints.folder import load_leaves

# The size at which Diffusers starts a new shard.
SHARD_BYTES = 5 * 10**9

_CONFIG_FILES = {"model_index": diffusers_folder.INDEX, "scheduler": "scheduler/scheduler_config.json"}

Progress = Callable[[str, int, int], None]


def stored_dtypes(folder: Folder, component: str) -> dict[str, np.dtype]:
  """Diffusers name -> type in which the folder holds each tensor."""
  rows = names.tensors(component, folder.architecture(component))
  if folder.base is not None:
    if component not in folder.trained:
      return stored_dtypes(folder.base, component)
    leaves = training_folder.leaf_dtypes(folder, component)
    return {row.name: leaves[row.path] for row in rows}
  if folder.format == "random":
    return {row.name: np.dtype(np.float32) for row in rows}
  if folder.format == "orbax":
    leaves, exceptions = orbax_folder.leaf_dtypes(folder, component), orbax_folder.stored_dtypes(folder, component)
    return {row.name: exceptions.get(row.name, leaves[row.path]) for row in rows}
  return {row.name: folder.stored[component][row].dtype for row in rows}


def written_dtypes(folder: Folder, component: str, dtype: str | None) -> dict[str, np.dtype]:
  """Diffusers name -> type in which each tensor is written; `dtype` is that of matrices, None for the stored one."""
  stored = stored_dtypes(folder, component)
  if dtype is None:
    return stored
  rounded = (".kernel", ".embedding")
  return {row.name: np.dtype(jnp.dtype(dtype)) if row.path.endswith(rounded) and "condition_embedder.time" not in row.path
          else stored[row.name] for row in names.tensors(component, folder.architecture(component))}


def _load(
  folder: Folder, component: str, dtypes: Mapping[str, np.dtype], progress: Progress | None
) -> dict[str, jax.Array]:
  """All leaves of a component on the host. Layers written in different types share the wider one, which is exact."""
  host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  rows = names.tensors(component, folder.architecture(component))
  wide: dict[str, np.dtype] = {}
  for row in rows:
    wide[row.path] = np.promote_types(wide.get(row.path, dtypes[row.name]), dtypes[row.name])
  shapes = names.leaf_shapes(rows)
  targets = {path: jax.ShapeDtypeStruct(shape, wide[path], sharding=host) for path, shape in shapes.items()}
  report = None if progress is None else lambda done, total: progress(component, done, total)
  return load_leaves(folder, component, targets, report)


def write_orbax(folder: Folder, path: str, progress: Progress | None = None, dtype: str | None = None):
  """Writes one of our checkpoints into the new folder `path`.

  Args:
    folder: what to convert.
    path: a folder that does not exist.
    progress: called with (component, bytes read, bytes in all).
    dtype: of matrices; None keeps the stored types.
  """
  os.makedirs(path)
  leaves, exceptions = {}, {}
  for component in folder.components:
    dtypes = written_dtypes(folder, component, dtype)
    arrays = _load(folder, component, dtypes, progress)
    orbax_folder.save_component(os.path.join(path, component), arrays)
    leaves[component] = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    exceptions[component] = {
      row.name: dtypes[row.name] for row in names.tensors(component, folder.architecture(component))
      if dtypes[row.name] != arrays[row.path].dtype
    }
    del arrays
  orbax_folder.write_description(path, folder, leaves, exceptions)


def write_diffusers(
  folder: Folder, path: str, flow_shift: float, progress: Progress | None = None, dtype: str | None = None
):
  """Writes a Diffusers folder into the new folder `path`: weights, configs, scheduler and tokenizer.

  Args:
    folder: what to convert.
    path: a folder that does not exist.
    flow_shift: what the scheduler gets; the configuration's, which is the folder's own unless the user gave another.
    progress: called with (component, bytes read, bytes in all).
    dtype: of matrices; None keeps the stored types.
  """
  os.makedirs(path)
  write_configs(folder, path, flow_shift)
  shutil.copytree(os.path.dirname(folder.tokenizer_path), os.path.join(path, "tokenizer"))
  for component in folder.components:
    rows, dtypes = names.tensors(component, folder.architecture(component)), written_dtypes(folder, component, dtype)
    arrays = _load(folder, component, dtypes, progress)
    write_shards(os.path.join(path, component), diffusers_folder.STEMS[component], rows, arrays, dtypes)
    del arrays


def write_configs(folder: Folder, path: str, flow_shift: float):
  """Writes the JSON files of a Diffusers folder, and the subfolders that its parts go into."""
  for part, config in _configs(folder, flow_shift).items():
    file = os.path.join(path, _CONFIG_FILES.get(part, f"{part}/config.json"))
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with open(file, "w", encoding="utf-8") as f:
      json.dump(config, f, indent=2, sort_keys=True)
      f.write("\n")


def write_shards(
  directory: str,
  stem: str,
  rows: tuple[names.Tensor, ...],
  arrays: Mapping[str, jax.Array],
  dtypes: Mapping[str, np.dtype],
  shard_bytes: int = SHARD_BYTES,
):
  """Writes the leaves of a component as one safetensors file, or as shards with an index.

  Args:
    directory: an existing folder.
    stem: file name without .safetensors.
    rows: the table of the component.
    arrays: its leaves by path, on the host.
    dtypes: Diffusers name -> type to write.
    shard_bytes: a new shard starts before this size is passed.
  """
  by_name = {row.name: row for row in rows}
  size = {row.name: int(np.prod(row.shape)) * dtypes[row.name].itemsize for row in rows}
  shards: list[list[str]] = [[]]
  room = shard_bytes
  for name in sorted(by_name):
    if shards[-1] and size[name] > room:
      shards.append([])
      room = shard_bytes
    shards[-1].append(name)
    room -= size[name]

  def fetch(name):
    row = by_name[name]
    leaf = np.asarray(arrays[row.path])
    return row.to_theirs(leaf if row.layer is None else leaf[row.layer]).astype(dtypes[name])

  weight_map = {}
  for i, shard in enumerate(shards):
    file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    entries = [(name, dtypes[name], by_name[name].shape) for name in shard]
    tensor_files.write_safetensors(os.path.join(directory, file), entries, fetch, {"format": "pt"})
    weight_map |= dict.fromkeys(shard, file)
  if len(shards) > 1:
    with open(os.path.join(directory, f"{stem}.safetensors.index.json"), "w", encoding="utf-8") as f:
      json.dump({"metadata": {"total_size": sum(size.values())}, "weight_map": weight_map}, f, indent=2, sort_keys=True)
      f.write("\n")


def _configs(folder: Folder, flow_shift: float) -> dict[str, dict[str, Any]]:
  """The JSON files of a Diffusers folder. What the folder came with wins: it also holds keys that we do not read."""
  wan, vae, umt5 = folder.wan, folder.vae, folder.umt5
  classes = diffusers_folder.CLASSES
  transformer = {
    "_class_name": classes["transformer"], "patch_size": list(wan.patch_size), "num_attention_heads": wan.num_heads,
    "attention_head_dim": wan.head_dim, "in_channels": wan.in_channels, "out_channels": wan.out_channels,
    "text_dim": wan.text_dim, "freq_dim": wan.freq_dim, "ffn_dim": wan.ffn_dim, "num_layers": wan.num_layers,
    "eps": wan.eps, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "image_dim": None,
    "added_kv_proj_dim": None, "pos_embed_seq_len": None, "rope_max_seq_len": 1024,
  }
  made = {
    "model_index": {
      "_class_name": "WanPipeline", "boundary_ratio": folder.boundary_ratio, "expand_timesteps": False,
      "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", classes["text_encoder"]],
      "tokenizer": ["transformers", "T5TokenizerFast"], "transformer": ["diffusers", classes["transformer"]],
      "transformer_2": ["diffusers", classes["transformer_2"]] if folder.num_experts == 2 else [None, None],
      "vae": ["diffusers", classes["vae"]],
    },
    "scheduler": {
      "_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True,
      "num_train_timesteps": 1000, "solver_order": 2, "solver_type": "bh2",
    },
    "transformer": transformer,
    "vae": {
      "_class_name": classes["vae"], "base_dim": vae.base_dim, "z_dim": vae.z_dim, "dim_mult": list(vae.dim_mult),
      "num_res_blocks": vae.num_res_blocks, "attn_scales": [], "dropout": 0.0,
      "temperal_downsample": list(vae.temporal_downsample), "latents_mean": list(vae.latents_mean),
      "latents_std": list(vae.latents_std),
    },
    "text_encoder": {
      "architectures": [classes["text_encoder"]], "model_type": "umt5", "vocab_size": umt5.vocab_size,
      "d_model": umt5.d_model, "d_kv": umt5.d_kv, "d_ff": umt5.d_ff, "num_layers": umt5.num_layers,
      "num_heads": umt5.num_heads,
      "relative_attention_num_buckets": umt5.num_buckets, "relative_attention_max_distance": umt5.max_distance,
      "layer_norm_epsilon": umt5.eps, "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True,
      "dropout_rate": 0.1, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "is_encoder_decoder": True,
      "use_cache": True, "tie_word_embeddings": True,
    },
  }
  configs = {part: config | dict(folder.configs.get(part, {})) for part, config in made.items()}
  configs["scheduler"]["shift" if "shift" in configs["scheduler"] else "flow_shift"] = flow_shift
  if folder.num_experts == 2:
    configs["transformer_2"] = configs["transformer"]
  return configs

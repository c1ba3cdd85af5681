"""Reads the original release of a Wan model: safetensors of the transformer, .pth files of the text encoder and the VAE.

Only the transformer has a config file there. The sizes of the text encoder and the VAE are read off the shapes of their
tensors; what shapes cannot say (the latents' mean and deviation, the reach of the position bias) is as published: the
defaults of the dataclasses. A .pth is a pickle; it is read without executing it (torch_pickle.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from MaxText.checkpoints import contents, names, tensor_files, torch_pickle
from MaxText.checkpoints.contents import Fields, Folder, read_json
from MaxText.checkpoints.diffusers_folder import find_tensors
from MaxText.checkpoints.tensor_files import StoredTensor

_STEM = "diffusion_pytorch_model"
_TEXT_ENCODER = "models_t5_umt5-xxl-enc-bf16"
_VAE = "Wan2.1_VAE"
_EXPERTS = ("high_noise_model", "low_noise_model")

# The two-expert release says neither in its files; these are its published settings (Wan 2.2 T2V A14B).
_BOUNDARY_RATIO = 0.875
_FLOW_SHIFT = 12.0

_MODEL_TYPES = {"i2v": "an image-to-video model", "flf2v": "a first-and-last-frame model", "ti2v": "the TI2V-5B model",
                "vace": "a VACE (editing) model", "animate": "a Wan-Animate model", "s2v": "a speech-to-video model"}


def is_original(path: str) -> bool:
  """Whether a folder looks like the original release."""
  if any(os.path.isdir(os.path.join(path, expert)) for expert in _EXPERTS):
    return True
  config = os.path.join(path, "config.json")
  if not os.path.isfile(config):
    return False
  values = read_json(config)
  return "dim" in values and "num_heads" in values


def open_original(path: str) -> Folder:
  """Opens and checks a folder of the original release; see `folder.open_folder`."""
  two = any(os.path.isdir(os.path.join(path, expert)) for expert in _EXPERTS)
  directories = [os.path.join(path, expert) for expert in _EXPERTS] if two else [path]
  wan, *others = [_wan_config(os.path.join(directory, "config.json")) for directory in directories]
  if any(other != wan for other in others):
    raise ValueError(f"{path}: the two experts differ: {_EXPERTS[0]} is {wan}, {_EXPERTS[1]} is {others[0]}")

  if os.path.exists(os.path.join(path, "Wan2.2_VAE.pth")):
    raise ValueError(f"{path} is the TI2V-5B model (it has Wan2.2_VAE.pth); {contents.SUPPORTED}")
  vae_file, vae_tensors = _tensors_of(path, _VAE)
  text_file, text_tensors = _tensors_of(path, _TEXT_ENCODER)
  vae, umt5 = _vae_config(vae_tensors, vae_file), _umt5_config(text_tensors, text_file)
  contents.check_together(wan, vae, umt5, path)

  vocabulary = os.path.join(path, "google", "umt5-xxl", "spiece.model")
  tokenizer = contents.required_file(vocabulary, contents.TOKENIZER)
  stored = {
    "vae": contents.match(names.tensors("vae", vae), vae_tensors, vae_file, original=True),
    "text_encoder": contents.match(names.tensors("text_encoder", umt5), text_tensors, text_file, original=True),
  }
  for component, directory in zip(names.COMPONENTS, directories, strict=False):
    found = find_tensors(directory, _STEM)
    stored[component] = contents.match(names.tensors(component, wan), found, directory, original=True)
  return Folder(
    path=path, format="original", wan=wan, vae=vae, umt5=umt5, num_experts=len(directories),
    boundary_ratio=_BOUNDARY_RATIO if two else None, flow_shift=_FLOW_SHIFT if two else None, tokenizer_path=tokenizer,
    stored=stored, configs={},
  )


def _wan_config(path: str):
  from MaxText.models.wan import WanConfig

  fields = Fields(read_json(path), path)
  kind = fields.values.get("model_type", "t2v")
  if kind != "t2v":
    raise ValueError(f"{path} describes {_MODEL_TYPES.get(kind, 'another model')} ({kind!r}); {contents.SUPPORTED}")
  if fields.values.get("_class_name", "WanModel") != "WanModel":
    raise ValueError(f"{path} describes a {fields.values['_class_name']}, not a WanModel; {contents.SUPPORTED}")
  fields.expect("qk_norm", (True,), "a model without normalisation of queries and keys")
  fields.expect("cross_attn_norm", (True,), "a model without the norm before cross-attention")
  dim, num_heads = fields.count("dim"), fields.count("num_heads")
  if dim % num_heads:
    raise ValueError(f"{path}: dim = {dim} is not divisible by num_heads = {num_heads}")
  return contents.build(
    WanConfig, fields.path,
    num_heads=num_heads, head_dim=dim // num_heads, in_channels=fields.count("in_dim"),
    out_channels=fields.count("out_dim"), freq_dim=fields.count("freq_dim"), ffn_dim=fields.count("ffn_dim"),
    num_layers=fields.layers("num_layers"), eps=fields.number("eps"),
    **({"text_dim": fields.count("text_dim")} if "text_dim" in fields.values else {}),
    **({"patch_size": fields.counts("patch_size")} if "patch_size" in fields.values else {}),
  )


def _tensors_of(path: str, stem: str) -> tuple[str, dict[str, StoredTensor]]:
  """(file, its tensors) of a part: STEM.pth, or the same saved as STEM.safetensors."""
  safe = os.path.join(path, f"{stem}.safetensors")
  if os.path.isfile(safe):
    return safe, tensor_files.read_header(safe)[0]
  file = contents.required_file(os.path.join(path, f"{stem}.pth"), f"{stem}.safetensors would do too")
  return file, torch_pickle.read_index(file)


def _shape(tensors: Mapping[str, StoredTensor], name: str, rank: int, file: str) -> tuple[int, ...]:
  if name not in tensors:
    raise ValueError(f"{file} has no {name} but {', '.join(sorted(tensors)[:3])} …; is it the original release's file?")
  if len(tensors[name].shape) != rank:
    raise ValueError(f"{file}: {name} has shape {list(tensors[name].shape)}, {rank} dimensions were expected")
  return tensors[name].shape


def _umt5_config(tensors: Mapping[str, StoredTensor], file: str):
  from MaxText.models.umt5 import Umt5Config

  vocab_size, d_model = _shape(tensors, "token_embedding.weight", 2, file)
  num_buckets, num_heads = _shape(tensors, "blocks.0.pos_embedding.embedding.weight", 2, file)
  inner, _ = _shape(tensors, "blocks.0.attn.q.weight", 2, file)
  d_ff, _ = _shape(tensors, "blocks.0.ffn.fc1.weight", 2, file)
  num_layers = 1 + _last(tensors, r"blocks\.(\d+)\.")
  return contents.build(
    Umt5Config, file,
    vocab_size=vocab_size, d_model=d_model, d_kv=inner // num_heads, d_ff=d_ff, num_layers=num_layers,
    num_heads=num_heads, num_buckets=num_buckets,
  )


def _vae_config(tensors: Mapping[str, StoredTensor], file: str):
  """The encoder's list holds residual blocks and, between stages, resamplers; those of time have a time_conv."""
  from MaxText.models.vae import VaeConfig

  base_dim = _shape(tensors, "encoder.conv1.weight", 5, file)[0]
  z_dim = _shape(tensors, "conv2.weight", 5, file)[0]
  length = 1 + _last(tensors, r"encoder\.downsamples\.(\d+)\.")
  resamplers = [i for i in range(length) if f"encoder.downsamples.{i}.resample.1.weight" in tensors]
  ends = [*resamplers, length]
  dim_mult = [_shape(tensors, f"encoder.downsamples.{end - 1}.residual.2.weight", 5, file)[0] // base_dim for end in ends]
  values: dict[str, Any] = {"base_dim": base_dim, "z_dim": z_dim, "dim_mult": tuple(dim_mult), "num_res_blocks": ends[0]}
  values["temporal_downsample"] = tuple(f"encoder.downsamples.{i}.time_conv.weight" in tensors for i in resamplers)
  return contents.build(VaeConfig, file, **values)


def _last(tensors: Mapping[str, StoredTensor], pattern: str) -> int:
  return max((int(m.group(1)) for name in tensors if (m := re.match(pattern, name))), default=-1)

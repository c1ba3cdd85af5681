"""Reads a Diffusers folder (model_index.json and a subfolder a part): its configs, and where its weights lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from MaxText.checkpoints import contents, names, tensor_files
from MaxText.checkpoints.contents import Fields, Folder, read_json
from MaxText.checkpoints.tensor_files import StoredTensor

INDEX = "model_index.json"

# File names of the weights, without .safetensors.
STEMS = {
  "transformer": "diffusion_pytorch_model",
  "transformer_2": "diffusion_pytorch_model",
  "vae": "diffusion_pytorch_model",
  "text_encoder": "model",
}
CLASSES = {
  "transformer": "WanTransformer3DModel",
  "transformer_2": "WanTransformer3DModel",
  "vae": "AutoencoderKLWan",
  "text_encoder": "UMT5EncoderModel",
}
_OTHER_PIPELINES = {
  "WanImageToVideoPipeline": "an image-to-video model",
  "WanVACEPipeline": "a VACE (editing) model",
  "WanAnimatePipeline": "a Wan-Animate model",
  "WanAnimate2Pipeline": "a Wan-Animate model",
}


def open_diffusers(path: str) -> Folder:
  """Opens and checks a Diffusers folder; see `folder.open_folder`."""
  index = read_json(os.path.join(path, INDEX))
  _check_pipeline(index, path)
  num_experts = 2 if _has(index, "transformer_2") else 1
  boundary_ratio = index.get("boundary_ratio")
  if num_experts == 2 and not (isinstance(boundary_ratio, float) and 0 < boundary_ratio < 1):
    raise ValueError(f"{path}/{INDEX}: two transformers need a boundary_ratio between 0 and 1 (0.875 in Wan 2.2 T2V); "
                     f"it is {boundary_ratio!r}")
  if num_experts == 1 and boundary_ratio is not None:
    raise ValueError(f"{path}/{INDEX}: boundary_ratio = {boundary_ratio} but no transformer_2; is the folder complete?")

  configs = {component: _component_config(path, component) for component in ("transformer", "vae", "text_encoder")}
  wan = _wan_config(Fields(configs["transformer"], f"{path}/transformer/config.json"))
  vae = _vae_config(Fields(configs["vae"], f"{path}/vae/config.json"))
  umt5 = _umt5_config(Fields(configs["text_encoder"], f"{path}/text_encoder/config.json"))
  contents.check_together(wan, vae, umt5, path)
  if num_experts == 2:
    second = _wan_config(Fields(_component_config(path, "transformer_2"), f"{path}/transformer_2/config.json"))
    if second != wan:
      raise ValueError(f"{path}: the two experts differ: transformer is {wan}, transformer_2 is {second}")

  scheduler = read_json(os.path.join(path, "scheduler", "scheduler_config.json"))
  tokenizer = contents.required_file(os.path.join(path, "tokenizer", "spiece.model"), contents.TOKENIZER)
  stored = {}
  for component in (*names.COMPONENTS[:num_experts], "vae", "text_encoder"):
    config = {"vae": vae, "text_encoder": umt5}.get(component, wan)
    found = find_tensors(os.path.join(path, component), STEMS[component])
    stored[component] = contents.match(names.tensors(component, config), found, f"{path}/{component}")
  return Folder(
    path=path, format="diffusers", wan=wan, vae=vae, umt5=umt5, num_experts=num_experts, boundary_ratio=boundary_ratio,
    flow_shift=_flow_shift(scheduler, path), tokenizer_path=tokenizer, stored=stored,
    configs={"model_index": index, "scheduler": scheduler, **configs},
  )


def find_tensors(directory: str, stem: str) -> dict[str, StoredTensor]:
  """Reads the headers of a part's files: STEM.safetensors, or the shards that STEM.safetensors.index.json lists.

  Raises:
    ValueError: a file is missing or truncated, or a shard lacks a tensor that the index puts there.
  """
  single = os.path.join(directory, f"{stem}.safetensors")
  index_path = f"{single}.index.json"
  if not os.path.exists(index_path):
    if not os.path.isfile(single):
      files = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
      pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
      hint = f"; found {pickles[0]}, which is a pickle: save the model as safetensors" if pickles else ""
      raise ValueError(f"{single} is missing, and so is {os.path.basename(index_path)}{hint}")
    return tensor_files.read_header(single)[0]
  weight_map = read_json(index_path).get("weight_map")
  if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
    raise ValueError(f"{index_path} has no weight_map of names to files; download it again")
  shards = sorted(set(weight_map.values()))
  absent = [shard for shard in shards if not os.path.isfile(os.path.join(directory, shard))]
  if absent:
    raise ValueError(f"{directory} lacks {len(absent)} of {len(shards)} shards: {', '.join(absent)}; download them")
  found: dict[str, StoredTensor] = {}
  for shard in shards:
    found |= tensor_files.read_header(os.path.join(directory, shard))[0]
  for name, shard in weight_map.items():
    if name not in found or os.path.basename(found[name].file) != shard:
      raise ValueError(f"{directory}/{shard} does not hold {name}, which {os.path.basename(index_path)} puts there; "
                       "download both again")
  return found


def _has(index: Mapping[str, Any], part: str) -> bool:
  entry = index.get(part)
  return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def _check_pipeline(index: Mapping[str, Any], path: str):
  pipeline = str(index.get("_class_name"))
  if pipeline in _OTHER_PIPELINES:
    raise ValueError(f"{path} holds {_OTHER_PIPELINES[pipeline]} ({pipeline}); {contents.SUPPORTED}")
  if pipeline != "WanPipeline":
    raise ValueError(f"{path}/{INDEX} describes a {pipeline}, not a WanPipeline; {contents.SUPPORTED}")
  if index.get("expand_timesteps"):
    raise ValueError(f"{path} is a TI2V model (expand_timesteps is true, as in Wan 2.2 TI2V-5B); {contents.SUPPORTED}")
  for part in ("transformer", "vae", "text_encoder"):
    if not _has(index, part):
      raise ValueError(f"{path}/{INDEX} names no {part}; the folder is not a complete Wan model")
    if index[part][1] != CLASSES[part]:
      raise ValueError(f"{path}/{INDEX}: {part} is a {index[part][1]}; a Wan text-to-video model has a {CLASSES[part]}")


def _component_config(path: str, component: str) -> dict[str, Any]:
  file = os.path.join(path, component, "config.json")
  config = read_json(file)
  architectures = config.get("architectures")
  name = config.get("_class_name") or (architectures[0] if isinstance(architectures, list) and architectures else None)
  if name not in (CLASSES[component], None):
    raise ValueError(f"{file} describes a {name}; a Wan text-to-video model has a {CLASSES[component]} there")
  return config


def _wan_config(fields: Fields):
  from MaxText.models.wan import WanConfig

  for key in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
    fields.expect(key, (None,), "an image-to-video model")
  fields.expect("qk_norm", ("rms_norm_across_heads",), "another normalisation of queries and keys")
  fields.expect("cross_attn_norm", (True,), "a model without the norm before cross-attention")
  in_channels = fields.count("in_channels")
  out_channels = in_channels if fields.values.get("out_channels") is None else fields.count("out_channels")
  patch_size = fields.counts("patch_size")
  if len(patch_size) != 3:
    raise ValueError(f"{fields.path}: patch_size = {list(patch_size)} should be [time, height, width]")
  return contents.build(
    WanConfig, fields.path,
    patch_size=patch_size, num_heads=fields.count("num_attention_heads"), head_dim=fields.count("attention_head_dim"),
    in_channels=in_channels, out_channels=out_channels, text_dim=fields.count("text_dim"),
    freq_dim=fields.count("freq_dim"), ffn_dim=fields.count("ffn_dim"), num_layers=fields.layers("num_layers"),
    eps=fields.number("eps"),
  )


def _vae_config(fields: Fields):
  from MaxText.models.vae import VaeConfig

  fields.expect("is_residual", (False, None), "the VAE of Wan 2.2 TI2V-5B")
  fields.expect("patch_size", (None,), "the VAE of Wan 2.2 TI2V-5B")
  fields.expect("attn_scales", ([],), "attention at further scales")
  fields.expect("in_channels", (3,), "pictures of other than three channels")
  fields.expect("out_channels", (3,), "pictures of other than three channels")
  base_dim, dim_mult = fields.count("base_dim"), fields.counts("dim_mult")
  fields.expect("decoder_base_dim", (None, base_dim), "a decoder wider than the encoder")
  temporal = fields.flags("temperal_downsample")  # spelt so in the folders
  if len(temporal) != len(dim_mult) - 1:
    raise ValueError(f"{fields.path}: temperal_downsample has {len(temporal)} entries; the {len(dim_mult)} stages of "
                     f"dim_mult need {len(dim_mult) - 1}")
  return contents.build(
    VaeConfig, fields.path,
    base_dim=base_dim, z_dim=fields.count("z_dim"), dim_mult=dim_mult, num_res_blocks=fields.layers("num_res_blocks"),
    temporal_downsample=temporal, latents_mean=fields.numbers("latents_mean"), latents_std=fields.numbers("latents_std"),
  )


def _umt5_config(fields: Fields):
  from MaxText.models.umt5 import Umt5Config

  fields.expect("feed_forward_proj", ("gated-gelu",), "another feed-forward layer")
  return contents.build(
    Umt5Config, fields.path,
    vocab_size=fields.count("vocab_size"), d_model=fields.count("d_model"), d_kv=fields.count("d_kv"),
    d_ff=fields.count("d_ff"), num_layers=fields.layers("num_layers"), num_heads=fields.count("num_heads"),
    num_buckets=fields.count("relative_attention_num_buckets"),
    max_distance=fields.count("relative_attention_max_distance"),
    eps=fields.number("layer_norm_epsilon"),
  )


def _flow_shift(scheduler: Mapping[str, Any], path: str) -> float | None:
  """UniPC calls it flow_shift, the Euler scheduler shift."""
  key = "flow_shift" if "flow_shift" in scheduler else "shift"
  if scheduler.get(key) is None:
    return None
  return Fields(scheduler, f"{path}/scheduler/scheduler_config.json").number(key)

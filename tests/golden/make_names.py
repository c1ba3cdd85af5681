"""Writes names.json: every tensor of the published models, as the reference names and shapes them.

  python tests/golden/make_names.py        (needs torch 2.13, diffusers 0.42.1, transformers 5.24)

The models are built at full size on torch's meta device, so nothing is allocated. Names of the original release are
listed here by hand and run through the reference's conversion code, which must give exactly the names of the built model;
the pairs are what it returned. The text encoder's original names have no reference: transformers ships no conversion for
them, so they are left out.

names.json: {model: {"parameters": count, "tensors": {name: [shape, original name or null]}}}.
"""

import json
import pathlib

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from transformers import UMT5Config, UMT5EncoderModel


def original_dit_names(num_layers):
  both = (".weight", ".bias")
  modules = ["patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2",
             "time_projection.1", "head.head"]
  names = [m + s for m in modules for s in both] + ["head.modulation"]
  for i in range(num_layers):
    for attention in ("self_attn", "cross_attn"):
      names += [f"blocks.{i}.{attention}.{m}{s}" for m in "qkvo" for s in both]
      names += [f"blocks.{i}.{attention}.norm_{m}.weight" for m in "qk"]
    names += [f"blocks.{i}.{m}{s}" for m in ("norm3", "ffn.0", "ffn.2") for s in both] + [f"blocks.{i}.modulation"]
  return names


def original_vae_names():
  residual = [f"residual.{m}" for m in ("0.gamma", "2.weight", "2.bias", "3.gamma", "6.weight", "6.bias")]
  both = (".weight", ".bias")
  names = [m + s for m in ("conv1", "conv2") for s in both]
  blocks = {"encoder.downsamples": (0, 1, 3, 4, 6, 7, 9, 10),
            "decoder.upsamples": (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14)}
  resamplers = {"encoder.downsamples": {2: False, 5: True, 8: True}, "decoder.upsamples": {3: True, 7: True, 11: False}}
  shortcuts = {"encoder.downsamples": (3, 6), "decoder.upsamples": (4,)}
  for side in ("encoder", "decoder"):
    names += [f"{side}.conv1{s}" for s in both] + [f"{side}.head.2{s}" for s in both] + [f"{side}.head.0.gamma"]
    names += [f"{side}.middle.{i}.{m}" for i in (0, 2) for m in residual]
    names += [f"{side}.middle.1.{m}{s}" for m in ("to_qkv", "proj") for s in both] + [f"{side}.middle.1.norm.gamma"]
  for side in blocks:
    names += [f"{side}.{i}.{m}" for i in blocks[side] for m in residual]
    names += [f"{side}.{i}.shortcut{s}" for i in shortcuts[side] for s in both]
    for i, temporal in resamplers[side].items():
      names += [f"{side}.{i}.{m}{s}" for m in ("resample.1",) + (("time_conv",) if temporal else ()) for s in both]
  return names


def table(model, original_names=(), convert=None):
  shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
  original_of = {}
  for original in original_names:
    # One name at a time: the value says which original a converted name came from.
    (name,) = convert({original: torch.empty(1)})
    original_of[name] = original
  if original_names and set(original_of) != set(shapes):
    raise SystemExit(f"converted names differ from the model's: {sorted(set(original_of) ^ set(shapes))}")
  return {
    "parameters": sum(p.numel() for p in model.parameters()),
    "tensors": {name: [shape, original_of.get(name)] for name, shape in sorted(shapes.items())},
  }


with torch.device("meta"):
  small = WanTransformer3DModel(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30)
  large = WanTransformer3DModel(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=40)
  vae = AutoencoderKLWan()
  umt5 = UMT5EncoderModel(UMT5Config(vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
                                     feed_forward_proj="gated-gelu"))
tables = {
  "wan2.1-t2v-1.3b": table(small, original_dit_names(30), convert_wan_transformer_to_diffusers),
  "wan2.1-t2v-14b": table(large, original_dit_names(40), convert_wan_transformer_to_diffusers),
  "vae": table(vae, original_vae_names(), convert_wan_vae_to_diffusers),
  "umt5-xxl": table(umt5),
}
lines = []
for model, t in tables.items():
  rows = ",\n".join(f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}" for name, row in t["tensors"].items())
  lines.append(f'{json.dumps(model)}:{{"parameters":{t["parameters"]},"tensors":{{\n{rows}}}}}')
pathlib.Path(__file__).with_name("names.json").write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
print({model: (t["parameters"], len(t["tensors"])) for model, t in tables.items()})

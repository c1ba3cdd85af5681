"""Saves the text encoder and the VAE of pipelines/one_frame as the original release does: .pth files of torch.save.

  python tests/golden/make_original.py        (needs torch 2.13; run make_pipeline.py first)

Writes original/Wan2.1_VAE.pth in float32 and original/models_t5_umt5-xxl-enc-bf16.pth in bfloat16. The names are those of
our table: this checks the file format and the way through `open_folder`; the names themselves are checked by names.json.
One weight is saved as a transposed view, which torch.save keeps as such.
"""

import json
import pathlib
import sys
import types

import torch
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from MaxText.checkpoints import names  # noqa: E402  needs numpy only

PIPE = HERE / "pipelines" / "one_frame" / "pipe"


def main():
  (HERE / "original").mkdir(exist_ok=True)
  vae = load_file(PIPE / "vae" / "diffusion_pytorch_model.safetensors")
  text = load_file(PIPE / "text_encoder" / "model.safetensors")
  config = json.loads((PIPE / "vae" / "config.json").read_text())
  sizes = types.SimpleNamespace(**config, temporal_downsample=config["temperal_downsample"])
  rows = {row.name: row.original for row in names._vae(sizes)}
  torch.save({rows[name]: tensor for name, tensor in vae.items()}, HERE / "original" / "Wan2.1_VAE.pth")
  config = json.loads((PIPE / "text_encoder" / "config.json").read_text())
  sizes = types.SimpleNamespace(**config, num_buckets=config["relative_attention_num_buckets"])
  rows = {row.name: row.original for row in names._umt5(sizes)}
  saved = {rows[name]: tensor.to(torch.bfloat16) for name, tensor in text.items()}
  saved["blocks.0.attn.q.weight"] = saved["blocks.0.attn.q.weight"].T.contiguous().T
  torch.save(saved, HERE / "original" / "models_t5_umt5-xxl-enc-bf16.pth")


if __name__ == "__main__":
  main()

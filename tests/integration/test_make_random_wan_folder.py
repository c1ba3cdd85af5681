"""The script that writes random weight folders: what it writes opens, loads and tokenizes."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText import pyconfig
from MaxText.checkpoints.folder import load, open_folder
from MaxText.models.tokenizer import Tokenizer
from MaxText.models.umt5 import Umt5Encoder, encode_prompts

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "end_to_end"))
import make_random_wan_folder  # noqa: E402


def test_folder_opens_loads_and_encodes(tmp_path):
  path = str(tmp_path / "folder")
  assert make_random_wan_folder.main([path, "model_name=wan-test", "weight_dtype=bfloat16"]) == 0
  folder = open_folder(path)
  config = pyconfig.initialize([str(ROOT / "configs/video.yml"), "model_name=wan-test"], command="make_random_wan_folder")
  assert (folder.wan, folder.vae, folder.umt5, folder.flow_shift) == (config.wan(), config.vae(), config.umt5(), 3.0)
  abstract = nnx.eval_shape(lambda: Umt5Encoder(folder.umt5, weight_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  graph, state = nnx.split(abstract)
  encoder = nnx.merge(graph, load(folder, "text_encoder", state))
  embeddings = encode_prompts(encoder, Tokenizer(f"{path}/tokenizer"), ["a red ball", "雪 😀"])
  # Random weights of a sensible size: the output is about as large as a norm makes it, and differs between prompts.
  assert 0.5 < float(jnp.std(embeddings[0, 0])) < 2
  assert float(jnp.abs(embeddings[0, 0] - embeddings[1, 0]).max()) > 0.1


def test_layers_differ_and_no_number_is_odd(tmp_path):
  path = str(tmp_path / "folder")
  assert make_random_wan_folder.main([path, "model_name=wan-test"]) == 0
  folder = open_folder(path)
  abstract = nnx.eval_shape(lambda: Umt5Encoder(folder.umt5, rngs=nnx.Rngs(0)))
  state = load(folder, "text_encoder", nnx.state(abstract))
  for leaf in jax.tree.leaves(state):
    assert np.isfinite(leaf).all()
  kernel = state["blocks"]["ffn"]["gate"]["kernel"][...]
  assert not np.array_equal(kernel[0], kernel[1])
  assert float(kernel.std()) == pytest.approx(kernel.shape[1] ** -0.5, rel=0.05)


def test_large_parts_are_sharded_with_an_index(tmp_path):
  path = tmp_path / "folder"
  config = pyconfig.initialize([str(ROOT / "configs/video.yml"), "model_name=wan-test"], command="make_random_wan_folder")
  make_random_wan_folder.write_folder(config, str(path), shard_bytes=200_000)
  index = json.loads((path / "text_encoder/model.safetensors.index.json").read_text())
  shards = sorted(set(index["weight_map"].values()))
  assert len(shards) > 1 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
  assert all((path / "text_encoder" / shard).stat().st_size < 210_000 for shard in shards)
  open_folder(str(path))


def test_existing_folder_and_bad_key_are_refused(tmp_path, capsys):
  assert make_random_wan_folder.main([str(tmp_path)]) == 2
  assert "exists" in capsys.readouterr().err
  assert make_random_wan_folder.main([str(tmp_path / "new"), "model_nam=wan-test"]) == 2
  assert not (tmp_path / "new").exists()

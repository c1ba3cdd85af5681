"""Batches of encoded shards and raw videos: order, state, sharding by process, and what is refused."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from MaxText import input_pipeline, pyconfig
from MaxText.config_types import ConfigError
from MaxText.input_pipeline import grain_source, records, synthetic
from MaxText.input_pipeline.encode import Encoders
from MaxText.input_pipeline.records import Bucket, Dataset
from MaxText.parallel import mesh as mesh_lib
from MaxText.parallel import sharding
from MaxText.video_io import write_video

SIZES = {(32, 48): 7, (48, 32): 4}  # size of the clips → how many for training


def write_shards(path, sizes=SIZES, dtype="float32", text_width=64):
  """Shards whose sample n of a size holds n in its latents, and a text of n + 1 tokens."""
  path.mkdir()
  buckets = []
  for (height, width), count in sizes.items():
    shape = (2, height // 8, width // 8, 16)
    shards = {}
    for split, numbers in (("train", range(count)), ("eval", range(100, 103))):
      parts = [list(numbers)[:3], list(numbers)[3:]]
      for i, part in enumerate([part for part in parts if part]):
        name = records.shard_name(split, records.bucket_name(height, width), i, 2)
        writer = records.ShardWriter(path / name)
        for n in part:
          text = np.full((n % 100 + 1, text_width), n + 1.0)
          writer.write(records.pack({"latents": np.full(shape, float(n)), "text": text}, dtype))
        writer.finish([])
        shards.setdefault(split, []).append((name, len(part)))
    buckets.append(Bucket(height, width, shape, {split: tuple(files) for split, files in shards.items()}))
  records.replace_file(path / records.EMPTY_TEXT, records.pack({"text": np.ones((1, text_width))}, dtype))
  Dataset(path, 5, 8.0, text_width, dtype, {"vae": "v", "text_encoder": "t"}, tuple(buckets)).write()
  return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
  return write_shards(tmp_path_factory.mktemp("data") / "shards")


def load(path, *more):
  values = {"dataset_type": "latents", "dataset_path": path, "num_frames": 5, "size_buckets": "[[32,48],[48,32]]",
            "global_batch_size": 4} | dict(item.split("=", 1) for item in more)
  return pyconfig.initialize(
    ["configs/train_video.yml", *(f"{key}={value}" for key, value in values.items() if value != "")], "train", {})


def placement_of(config, devices=None):
  return sharding.Placement(mesh_lib.make_mesh(config, devices), sharding.parse_rules(config.logical_axis_rules))


def batches(config, count, split="train", state=None):
  iterator = grain_source.make_iterator(config, placement_of(config), split)
  if state is not None:
    iterator.set_state(state)
  return [next(iterator) for _ in range(count)], iterator


def numbers(batch):
  """Number and latent shape of a batch's samples; checks that text and latents belong together."""
  found = batch["latents"][:, 0, 0, 0, 0].astype(int)
  for n, text in zip(found, batch["text"], strict=True):
    assert text.shape == (512, 64) and (text[:n % 100 + 1] == n + 1).all() and (text[n % 100 + 1:] == 0).all()
  return tuple(found.tolist()), batch["latents"].shape[2:4]


def test_every_pass_shows_all_samples_in_another_order(shards):
  taken, _ = batches(load(shards), 60)
  assert taken[0]["latents"].dtype == np.float32 and taken[0]["latents"].shape[1:] in ((2, 4, 6, 16), (2, 6, 4, 16))
  for shape, count in (((4, 6), 7), ((6, 4), 4)):
    order = [n for ns, where in map(numbers, taken) if where == shape for n in ns]
    passes = [order[i:i + count] for i in range(0, len(order) - count, count)]
    assert len(passes) > 5 and all(sorted(one) == list(range(count)) for one in passes)
    assert len({tuple(one) for one in passes}) > 2
  share = sum(where == (4, 6) for _, where in map(numbers, taken)) / len(taken)
  assert abs(share - 7 / 11) < 0.05  # buckets take turns by their share of the data


def test_order_depends_on_the_seed_alone(shards):
  def order(*more):
    return [numbers(batch) for batch in batches(load(shards, *more), 12)[0]]

  assert order() == order("num_data_workers=5") != order("seed=1")
  assert order("seed=9223372036854775807")  # Grain's own seeds are 32 bits


def test_state_restores_exactly(shards):
  whole = [numbers(batch) for batch in batches(load(shards), 12)[0]]
  _, iterator = batches(load(shards), 5)
  state = json.loads(json.dumps(iterator.get_state()))
  rest, _ = batches(load(shards, "num_data_workers=1"), 7, state=state)
  assert [numbers(batch) for batch in rest] == whole[5:]


def test_evaluation_repeats_in_order(shards):
  config = load(shards)
  first, second = (([numbers(b) for b in batches(config, 4, "eval")[0]]) for _ in range(2))
  assert first == second and first[0][0] == (100, 101, 102, 100)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_record_types(dtype):
  arrays = {"latents": np.linspace(-3, 3, 24).reshape(1, 2, 3, 4), "text": np.ones((2, 4))}
  back = records.unpack(records.pack(arrays, dtype, {"caption": "für"}))
  np.testing.assert_allclose(back["latents"], arrays["latents"], rtol=1e-7 if dtype == "float32" else 2**-8)
  assert back["latents"].dtype == np.float32


def test_rows_of_a_process(shards):
  import jax

  class Devices:  # a placement whose second half belongs to another process
    def __init__(self, placement, mine):
      self.mesh, self.mesh_axes, self._placement, self._mine = placement.mesh, placement.mesh_axes, placement, mine

    def sharding(self, axes, shape):
      places, mine = self._placement.sharding(axes, shape), self._mine

      class Local:
        def addressable_devices_indices_map(self, shape):
          return {d: piece for d, piece in places.devices_indices_map(shape).items() if d in mine}

      return Local()

  devices = jax.devices()[:4]
  config = load(shards, "global_batch_size=8")
  placement = placement_of(config, devices)
  rows = [grain_source.process_rows(config, Devices(placement, devices[i:i + 2])).tolist() for i in (0, 2)]
  assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]
  config = load(shards, "global_batch_size=8", "ici_fsdp_parallelism=1", "ici_context_parallelism=4",
                "context_parallel_strategy=ulysses")
  shared = Devices(placement_of(config, devices), devices[2:])
  assert grain_source.process_rows(config, shared).tolist() == list(range(8))  # tokens are split: each holds all samples

  # Random data are shared out by the same rule.
  config = pyconfig.initialize(
    ["configs/train_video.yml", "height=32", "width=32", "num_frames=5", "global_batch_size=8"], "train", {})
  whole, *parts = (next(synthetic.make_iterator(config, where, "train"))["latents"] for where in (
    placement, Devices(placement, devices[:2]), Devices(placement, devices[2:])))
  np.testing.assert_array_equal(np.concatenate(parts), whole)
  assert len(next(synthetic.make_iterator(config, shared, "train"))["latents"]) == 8


def refused(words, call, *arguments):
  with pytest.raises(ConfigError) as error:
    call(*arguments)
  assert all(word in str(error.value) for word in words), str(error.value)


def make(config, split="train", devices=None):
  return grain_source.make_iterator(config, placement_of(config, devices), split)


def test_refused_shapes(shards, tmp_path):
  one = load(shards, "height=32", "width=48", "size_buckets=")
  refused(["48×32", "size_buckets=[[32,48],[48,32]]"], make, one)
  refused(["num_frames=5", "9 frames"], make, load(shards, "num_frames=9"))
  narrow = write_shards(tmp_path / "narrow", {(32, 48): 2}, text_width=32)
  refused(["32 wide", "text_dim=64"], make, load(narrow))
  import jax

  refused(["global_batch_size=6", "multiple of 4", "fsdp=4", "4 or 8"], make,
          load(shards, "global_batch_size=6"), "train", jax.devices()[:4])


def test_refused_folders(shards, tmp_path):
  refused(["there is no such folder"], make, load(tmp_path / "nowhere"))
  (tmp_path / "bare").mkdir()
  refused(["holds no shards", "encode_dataset"], make, load(tmp_path / "bare"))
  (tmp_path / "bare" / records.PLAN).write_text("{}")
  refused(["has not finished"], make, load(tmp_path / "bare"))
  damaged = write_shards(tmp_path / "damaged", {(32, 48): 2})
  shard = next(damaged.glob("train-*.arrayrecord"))
  content = shard.read_bytes()
  shard.write_bytes(content[:len(content) // 3])
  refused(["damaged"], make, load(damaged))
  shard.unlink()
  refused([f"the shard {shard.name} is missing"], make, load(damaged))
  (damaged / records.DATASET).write_text("{")
  refused([f"{records.DATASET} is damaged"], make, load(damaged))
  whole = write_shards(tmp_path / "whole", {(32, 48): 2})
  values = json.loads((whole / records.DATASET).read_text())
  del values["buckets"][0]["shards"]["eval"]
  (whole / records.DATASET).write_text(json.dumps(values))
  refused(["holds no clips for eval", "eval_fraction"], make, load(whole), "eval")


def test_raw_videos(tmp_path):
  for n in range(3):
    write_video(tmp_path / f"{n}.mp4", np.full((12, 32, 48, 3), 60 * n, np.uint8), 32, 48, 8)
    (tmp_path / f"{n}.txt").write_text("a ball " * (n + 1))
  (tmp_path / "bad.mp4").touch()
  (tmp_path / "bad.txt").write_text("nothing")
  config = pyconfig.initialize(
    ["configs/train_video.yml", "load_parameters_path=tests/golden/pipelines/one_expert/pipe", "dataset_type=video",
     f"video_directory={tmp_path}", "height=32", "width=48", "num_frames=5", "fps=8", "clips_per_video=2",
     "eval_fraction=0.4", "global_batch_size=2"], "train", {})
  taken, iterator = batches(config, 4)
  batch = taken[0]
  assert batch["video"].shape == (2, 5, 32, 48, 3) and batch["video"].dtype == np.uint8
  assert batch["ids"].shape == batch["mask"].shape == (2, 512) and batch["ids"].dtype == np.int32
  levels = {int(np.rint(video.mean() / 60)) for b in taken for video in b["video"]}
  held_out = {int(np.rint(video.mean() / 60)) for b in batches(config, 2, "eval")[0] for video in b["video"]}
  assert len(levels) == 2 and len(held_out) == 1 and not levels & held_out
  tokens = {int(np.rint(v.mean() / 60)): m.sum() for b in taken for v, m in zip(b["video"], b["mask"], strict=True)}
  assert [tokens[n] for n in sorted(tokens)] == sorted(tokens.values())
  state = iterator.get_state()
  again = next(iterator)
  np.testing.assert_array_equal(batches(config, 1, state=state)[0][0]["video"], again["video"])

  # encoded on the fly, a batch is what its raw videos and captions give
  encoded = input_pipeline.make_iterator(config, placement_of(config))
  first = next(encoded)
  encoders = Encoders(config)
  np.testing.assert_allclose(first["latents"], encoders.latents(batch["video"]), rtol=1e-4, atol=1e-4)
  assert first["text"].shape == (2, 512, 40)
  for text, mask in zip(first["text"], batch["mask"], strict=True):
    caption = "a ball " * ((mask.sum() - 1) // tokens_a_word(encoders))
    expected = encoders.texts([caption])[caption]
    np.testing.assert_allclose(text[:len(expected)], expected, rtol=1e-4, atol=1e-4)
    assert (text[len(expected):] == 0).all()
  assert encoded.get_state() and next(encoded)["latents"].shape == first["latents"].shape


def tokens_a_word(encoders):
  """Tokens of one "a ball" of the captions."""
  return encoders.tokenizer(["a ball"]).mask.sum() - 1


TWO_PROCESSES = """
import json, sys
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from MaxText import pyconfig
from MaxText.input_pipeline import grain_source
from MaxText.parallel import mesh, sharding
config = pyconfig.initialize(sys.argv[3:], "train", {})
placement = sharding.Placement(mesh.make_mesh(config), sharding.parse_rules(config.logical_axis_rules))
iterator = grain_source.make_iterator(config, placement)
for _ in range(6):
  local = next(iterator)["latents"]
  where = placement.sharding(("batch", None, None, None, None), (4, *local.shape[1:]))
  whole = jax.make_array_from_process_local_data(where, local)
  print(json.dumps([whole.shape[0], local[:, 0, 0, 0, 0].tolist()]), flush=True)
"""


def test_two_processes_share_a_batch(shards):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  argv = ["configs/train_video.yml", "dataset_type=latents", f"dataset_path={shards}", "num_frames=5",
          "size_buckets=[[32,48],[48,32]]", "global_batch_size=4"]
  root = pathlib.Path(__file__).parent.parent.parent
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
  processes = [
    subprocess.Popen([sys.executable, "-c", TWO_PROCESSES, str(port), str(i), *argv], cwd=root, env=environment,
                     stdout=subprocess.PIPE, text=True) for i in range(2)]
  outputs = [[json.loads(line) for line in process.communicate(timeout=240)[0].splitlines() if line.startswith("[")]
             for process in processes]
  together = [[*map(int, first[1]), *map(int, second[1])] for first, second in zip(*outputs, strict=True)]
  assert together == [list(numbers(batch)[0]) for batch in batches(load(shards), 6)[0]]  # those of one process
  assert all(len(rows) == 2 and size == 4 for output in outputs for size, rows in output)

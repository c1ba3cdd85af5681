"""encode_dataset as a user types it: what is encoded, what is left out, a kill in the middle, and wrong arguments."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import grain
import numpy as np
import pytest

from MaxText import encode_dataset, pyconfig
from MaxText.input_pipeline import grain_source, records
from MaxText.input_pipeline.encode import Encoders
from MaxText.input_pipeline.video_files import read_clip
from MaxText.training import batches
from MaxText.video_io import write_video

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
WEIGHTS = REPOSITORY / "tests" / "golden" / "pipelines" / "one_expert" / "pipe"


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
  """Four wide videos and an upright one, one too short, and three files that are no videos."""
  root = tmp_path_factory.mktemp("videos")
  random = np.random.default_rng(0)
  captions = {}
  for n in range(6):
    height, width, frames = (48, 32, 12) if n == 4 else (32, 48, 3 if n == 5 else 12)
    tile = random.integers(0, 255, (frames, height // 16, width // 16, 3), np.uint8)
    write_video(root / f"{n}.mp4", tile.repeat(16, axis=1).repeat(16, axis=2), height, width, 8)
    captions[f"{n}.mp4"] = f"a ball {'rolls ' * n}"
  whole = (root / "0.mp4").read_bytes()
  (root / "cut.mp4").write_bytes(whole[:len(whole) * 6 // 10])
  (root / "empty.mp4").touch()
  (root / "text.mp4").write_text("no video")
  captions |= {"cut.mp4": "cut", "empty.mp4": "empty", "text.mp4": "text"}
  lines = [json.dumps({"file": name, "caption": caption}) for name, caption in captions.items()]
  (root / "captions.jsonl").write_text("\n".join(lines))
  return root


def arguments(videos, output, *more):
  values = {"load_parameters_path": WEIGHTS, "video_directory": videos, "dataset_path": output, "num_frames": 5, "fps": 8,
            "size_buckets": "[[32,48],[48,32]]", "clips_per_video": 2, "clips_per_shard": 3, "batch_size": 2,
            "log_format": "quiet"} | dict(item.split("=", 1) for item in more)
  return ["configs/train_video.yml", *(f"{key}={value}" for key, value in values.items())]


@pytest.fixture(scope="module")
def encoded(videos, tmp_path_factory):
  output = tmp_path_factory.mktemp("out") / "shards"
  assert encode_dataset.main(arguments(videos, output)) == 0
  return output


def samples(folder, split="train"):
  """(file, clip) → latents and text of every record."""
  found = {}
  for path in sorted(folder.glob(f"{split}-*{records.SUFFIX}")):
    source = grain.sources.ArrayRecordDataSource([str(path)])
    for i in range(len(source)):
      record = source[i]
      header = json.loads(record[8:8 + int.from_bytes(record[:8], "little")])["__metadata__"]
      found[header["file"], int(header["clip"]), header["caption"]] = records.unpack(record)
  return found


def test_what_is_encoded(encoded, videos):
  dataset = records.open_dataset(str(encoded))
  assert {(b.height, b.width): b.count("train") for b in dataset.buckets} == {(32, 48): 8, (48, 32): 2}
  assert sorted(path.name for path in encoded.iterdir()) == sorted([
    *(f"train-32x48-0000{i}-of-00004.arrayrecord" for i in range(3)), "train-48x32-00000-of-00001.arrayrecord",
    "dataset.json", "plan.json", "skipped.jsonl", "empty_text.safetensors", ".lock"])
  found = samples(encoded)
  assert sorted({(file, clip) for file, clip, _ in found}) == [(f"{n}.mp4", c) for n in range(5) for c in range(2)]
  encoders = Encoders(pyconfig.initialize(arguments(videos, encoded), "encode_dataset", {}))
  for (file, clip, caption), sample in found.items():
    if file in ("3.mp4", "4.mp4"):
      size = (48, 32) if file == "4.mp4" else (32, 48)
      frames = read_clip(str(videos / file), *size, 5, 8, clip)
      latents = encoders.latents(np.stack([frames, 255 - frames]))[0]  # two, as compiled before
      np.testing.assert_allclose(sample["latents"], latents, rtol=1e-4, atol=1e-4)
      np.testing.assert_allclose(sample["text"], encoders.texts([caption])[caption], rtol=1e-5, atol=1e-5)
  one, other = (next(v for (f, c, _), v in found.items() if (f, c) == ("3.mp4", clip)) for clip in range(2))
  assert np.abs(one["latents"] - other["latents"]).max() > 0.1
  np.testing.assert_allclose(dataset.empty_text(), encoders.texts([""])[""], rtol=1e-5, atol=1e-5)
  skipped = {line["file"]: line["reason"] for line in map(json.loads, open(encoded / "skipped.jsonl", encoding="utf-8"))}
  assert "too short" in skipped["5.mp4"] and "0 bytes" in skipped["empty.mp4"] and "not a video" in skipped["text.mp4"]
  assert any(name.startswith("cut.mp4") for name in skipped)


def test_training_reads_it(encoded):
  config = pyconfig.initialize(
    ["configs/train_video.yml", f"load_parameters_path={WEIGHTS}", "dataset_type=latents", f"dataset_path={encoded}",
     "size_buckets=[[32,48],[48,32]]", "num_frames=5", "global_batch_size=2"], "train", {})
  from MaxText.parallel import mesh as mesh_lib
  from MaxText.parallel import sharding

  placement = sharding.Placement(mesh_lib.make_mesh(config), sharding.parse_rules(config.logical_axis_rules))
  batch = next(grain_source.make_iterator(config, placement))
  assert batch["latents"].shape[0] == 2 and batch["latents"].shape[1:] in ((2, 4, 6, 16), (2, 6, 4, 16))
  assert batch["text"].shape == (2, 512, 40)
  assert batches.empty_prompt(config, placement)["text"].shape == (1, 40)  # the end token alone


def test_second_start_does_nothing_or_refuses(encoded, videos, capsys):
  before = {path: path.stat().st_mtime_ns for path in encoded.iterdir() if path.name != ".lock"}
  assert encode_dataset.main(arguments(videos, encoded)) == 0
  assert before == {path: path.stat().st_mtime_ns for path in before}
  capsys.readouterr()
  assert encode_dataset.main(arguments(videos, encoded, "fps=4")) == 2
  assert "fps was 8.0, is 4.0" in capsys.readouterr().err


def test_kill_loses_at_most_a_shard(encoded, videos, tmp_path):
  output = tmp_path / "killed"
  argv = arguments(videos, output, "num_data_workers=1", "clips_per_shard=1")
  process = subprocess.Popen([sys.executable, "-m", "MaxText.encode_dataset", *argv], cwd=REPOSITORY,
                             env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL)
  deadline = time.time() + 120
  while not list(output.glob("*-of-*.json")) and process.poll() is None and time.time() < deadline:
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert not (output / records.DATASET).exists()
  whole = {path.with_suffix(records.SUFFIX): path.stat().st_mtime_ns for path in output.glob("*-of-*.json")}
  assert whole
  before = {path: path.stat().st_mtime_ns for path in whole}
  half = output / "train-32x48-00009-of-00010.arrayrecord.tmp"
  half.write_bytes(b"half a shard")
  assert encode_dataset.main(argv) == 0
  assert before == {path: path.stat().st_mtime_ns for path in before}  # whole shards are kept
  assert not list(output.glob("*.tmp")) and not list(output.glob("*-of-*.json"))
  ours, theirs = samples(output), samples(encoded)
  assert list(ours) == list(theirs)
  for key in ours:
    np.testing.assert_allclose(ours[key]["latents"], theirs[key]["latents"], rtol=1e-5, atol=1e-5)


@pytest.mark.devices(4)
def test_on_four_devices(encoded, videos, tmp_path):
  more = ["batch_size=4", "dataset_dtype=bfloat16", "num_frames=1", "clips_per_video=1", "size_buckets=[[32,48]]"]
  assert encode_dataset.main(arguments(videos, tmp_path / "four", *more)) == 0
  ours, theirs = samples(tmp_path / "four"), samples(encoded)
  wide = [key for key in ours if key in theirs and key[0] != "4.mp4"]  # the upright one is cut to another size here
  assert len(wide) == 4
  for key in wide:  # the VAE is causal: the first frame's latents do not depend on the others
    np.testing.assert_allclose(ours[key]["latents"], theirs[key]["latents"][:1], rtol=2**-7, atol=1e-2)
    np.testing.assert_allclose(ours[key]["text"], theirs[key]["text"], rtol=2**-7, atol=1e-2)


def test_random_weights_and_evaluation_split(videos, tmp_path):
  argv = [a for a in arguments(videos, tmp_path / "random", "eval_fraction=0.2", "num_frames=1", "clips_per_video=1",
                               "size_buckets=[[32,48]]") if not a.startswith("load_parameters")]
  assert encode_dataset.main([*argv, "init_random_weights=true"]) == 0
  dataset = records.open_dataset(str(tmp_path / "random"))
  assert (dataset.count("train"), dataset.count("eval")) == (6, 1)
  assert dataset.fingerprints["text_encoder"] == "random"
  files = [{file for file, _, _ in samples(tmp_path / "random", split)} for split in ("train", "eval")]
  assert not files[0] & files[1]


@pytest.mark.parametrize("more, words", [
  (["num_frames=17"], "17 are asked for"),
  (["num_frames=6"], "num_frames=6: must be 4n+1"),
  (["size_buckets=[[32,50]]"], "the width 50 must be a multiple of 16"),
  (["dataset_type=latents"], "dataset_type: would do nothing"),
  (["video_directory=/nowhere"], "there is no such folder"),
  (["load_parameters_path="], "no weights"),
  (["dataset_path=tests"], "holds other files"),
])
def test_wrong_arguments(videos, tmp_path, capsys, more, words):
  assert encode_dataset.main(arguments(videos, tmp_path / "out", *more)) == 2
  error = capsys.readouterr().err
  assert words in error and "Traceback" not in error


def test_nothing_decodes(tmp_path, capsys):
  root = tmp_path / "videos"
  root.mkdir()
  (root / "a.mp4").touch()
  (root / "a.txt").write_text("a")
  assert encode_dataset.main(arguments(root, tmp_path / "out")) == 2
  assert "a.mp4 is empty (0 bytes)" in capsys.readouterr().err

"""train_tokenizer as a user types it: a vocabulary that the tokenizer reads, and what is refused."""

import json

import numpy as np
import pytest

from MaxText import train_tokenizer
from MaxText.models.tokenizer import Tokenizer

CAPTIONS = ["a red ball rolls over the snow", "a blue cube falls", "Füße im Schnee", "the   ball &amp; the cube"]


@pytest.fixture
def videos(tmp_path):
  root = tmp_path / "videos"
  root.mkdir()
  rows = [{"file": f"{n}.mp4", "caption": CAPTIONS[n % 4]} for n in range(16)]
  (root / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
  for row in rows:
    (root / row["file"]).touch()  # only the captions are read
  return root


def run(videos, output, *more):
  return train_tokenizer.main(
    ["configs/train_video.yml", f"video_directory={videos}", f"tokenizer_path={output}", "log_format=quiet", *more])


def test_vocabulary(videos, tmp_path, capsys):
  output = tmp_path / "model" / "tokenizer"
  assert run(videos, output, "tokenizer_vocab_size=400", "tokenizer_max_length=24") == 0
  assert sorted(path.name for path in output.iterdir()) == ["spiece.model", "tokenizer_config.json"]
  assert len(list(output.parent.iterdir())) == 1
  assert "captions give only" in capsys.readouterr().err
  tokenizer = Tokenizer(str(output))
  tokens = tokenizer(["a red cube 🎈 雪", "", "the  ball"])
  assert tokens.mask.sum(axis=1)[1] == 1 and tokens.ids[1, 0] == 1  # the end token alone
  assert not np.isin(tokens.ids, [2])[tokens.mask].any()  # bytes stand in for what is unknown
  pieces = tokenizer._pieces
  assert pieces.decode(tokens.ids[0][tokens.mask[0]].tolist()) == "a red cube 🎈 雪"
  assert (pieces.pad_id(), pieces.eos_id(), pieces.unk_id(), pieces.bos_id()) == (0, 1, 2, -1)
  assert tokenizer.max_length == 24 == tokens.ids.shape[1]  # read from tokenizer_config.json
  assert pieces.encode("a ball", out_type=str) == ["▁a", "▁ball"]  # few as the words are, each has a piece


def test_refused(videos, tmp_path, capsys):
  assert run(videos, tmp_path / "out", "tokenizer_vocab_size=270") == 2
  error = capsys.readouterr().err
  assert "tokenizer_vocab_size=270" in error and "are needed" in error and not (tmp_path / "out").exists()
  assert run(videos, videos) == 2 and "name a new folder" in capsys.readouterr().err
  assert run(tmp_path / "nowhere", tmp_path / "out") == 2 and "no such folder" in capsys.readouterr().err
  assert train_tokenizer.main(["configs/train_video.yml", f"video_directory={videos}"]) == 2
  assert "tokenizer_path is missing" in capsys.readouterr().err

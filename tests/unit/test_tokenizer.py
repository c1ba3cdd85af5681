"""Prompt cleaning and token ids against the reference's tokenizers (tests/golden/make_text.py)."""

import json
import os
import shutil

import numpy as np
import pytest
import sentencepiece

from MaxText.models.tokenizer import EOS_ID, PAD_ID, Tokenizer, clean_prompt

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden")


@pytest.fixture(scope="module")
def golden():
  with open(f"{GOLDEN}/text/tokens.json") as stream:
    return json.load(stream)


@pytest.fixture(scope="module")
def plain():
  return Tokenizer(f"{GOLDEN}/text/tokenizer_plain")


@pytest.mark.parametrize("name", ["plain", "bytes"])
def test_ids_equal_reference(golden, name):
  """Ordinary text, emoji, Chinese, new lines, quotes, nothing, 2,000 words, literal special tokens."""
  tokens = Tokenizer(f"{GOLDEN}/text/tokenizer_{name}")(golden["prompts"])
  assert tokens.ids.shape == tokens.mask.shape == (len(golden["prompts"]), 512)
  assert tokens.ids.dtype == np.int32 and tokens.mask.dtype == bool
  for prompt, ids, mask, want in zip(golden["prompts"], tokens.ids, tokens.mask, golden[name], strict=True):
    assert ids[mask].tolist() == want, prompt
    assert mask.sum() == len(want) and mask[: len(want)].all()
    assert (ids[~mask] == PAD_ID).all()


def test_byte_fallback_spells_what_the_vocabulary_lacks():
  tokenizer = Tokenizer(f"{GOLDEN}/text/tokenizer_bytes")
  spelled = [tokenizer._pieces.id_to_piece(i) for i in tokenizer.encode("😀")]
  assert spelled == ["▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


def test_truncation_keeps_the_end_token_and_is_counted(plain):
  tokens = plain([" ".join(["ball"] * 2000), "ball", " ".join(["ball"] * 511), " ".join(["ball"] * 512)])
  assert tokens.truncated.tolist() == [2000 - 511, 0, 0, 1]
  assert tokens.mask.sum(axis=1).tolist() == [512, 2, 512, 512]
  assert (tokens.ids[[0, 2, 3], 511] == EOS_ID).all()
  short = Tokenizer(f"{GOLDEN}/text/tokenizer_plain", max_length=4)(["a red ball and"])
  assert short.ids.shape == (1, 4) and short.truncated.tolist() == [1] and short.ids[0, 3] == EOS_ID


def test_special_tokens_in_a_prompt_become_their_ids(plain):
  size = plain._pieces.get_piece_size()
  # T5's rule: sentinels follow the vocabulary, the last one first. This folder declares ten.
  assert plain.encode("<extra_id_9><extra_id_0>") == [size, size + 9]
  assert plain.vocab_size == size + 10
  assert plain.encode("</s>") == [EOS_ID] and plain.encode("<pad>") == [PAD_ID]
  assert plain.encode("a</s>ball") == [*plain.encode("a"), EOS_ID, *plain.encode("ball")]


def test_special_tokens_of_a_tokenizer_json_are_read():
  """A pipeline saved by transformers 5 declares them there."""
  tokenizer = Tokenizer(f"{GOLDEN}/pipelines/one_expert/pipe/tokenizer")
  assert sorted(tokenizer._specials) == ["</s>", "<pad>", "<unk>"]


def test_clean_prompt_equals_reference(golden):
  for text, want in golden["cleaned"]:
    assert clean_prompt(text) == want, repr(text)


def test_clean_prompt_examples():
  assert clean_prompt("  a \r\n\n b\t") == "a b"
  assert clean_prompt("<b> &amp;amp;lt;") == "<b> &lt;"  # unescaped twice, not three times
  assert clean_prompt("schÃ¶n “it’s”") == "schön \"it's\""


def test_missing_vocabulary_says_what_to_copy(tmp_path):
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"spiece\.model is missing.*google/umt5-xxl.*tokenizer\.json"):
    Tokenizer(str(tmp_path))


def test_broken_vocabulary_is_refused(tmp_path):
  (tmp_path / "spiece.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
  with pytest.raises(ValueError, match="not a sentencepiece model"):
    Tokenizer(str(tmp_path))


def test_foreign_vocabulary_is_refused(tmp_path):
  corpus = tmp_path / "corpus.txt"
  corpus.write_text("a red ball\n" * 50)
  sentencepiece.SentencePieceTrainer.train(input=str(corpus), model_prefix=str(tmp_path / "spiece"), vocab_size=20,
                                           hard_vocab_limit=False, minloglevel=2)
  with pytest.raises(ValueError, match="pad id -1 and end id 2"):
    Tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["{", '{"added_tokens_decoder": {"3": "x"}}', '{"extra_ids": "many"}'])
def test_broken_config_is_refused(tmp_path, content):
  shutil.copy(f"{GOLDEN}/text/tokenizer_plain/spiece.model", tmp_path)
  (tmp_path / "tokenizer_config.json").write_text(content)
  with pytest.raises(ValueError, match="JSON"):
    Tokenizer(str(tmp_path))

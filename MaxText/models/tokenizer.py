"""Prompts to token ids: the reference's cleaning, a sentencepiece vocabulary and literal special tokens.

The vocabulary is the folder's `spiece.model`. What sentencepiece does not know are the special tokens that the folder
declares beside it (`</s>`, `<extra_id_0>` …): in the reference such a token written in a prompt becomes its own id, so
prompts are split at them first.

Dimensions: B prompts, T maximum length.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import ftfy
import numpy as np
import sentencepiece

PAD_ID = 0
EOS_ID = 1
MAX_LENGTH = 512  # text length that every Wan model was trained with


class Tokens(NamedTuple):
  """Tokenized prompts.

  Attributes:
    ids: int32 [B, T], end token last, then padding.
    mask: bool [B, T], true for tokens.
    truncated: int [B], how many tokens of each prompt were dropped because it was too long.
  """

  ids: np.ndarray
  mask: np.ndarray
  truncated: np.ndarray


def clean_prompt(text: str) -> str:
  """Repairs mojibake, undoes HTML escapes (twice), makes runs of white space one space, as the reference pipeline."""
  text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
  return re.sub(r"\s+", " ", text).strip()


class Tokenizer:
  """The tokenizer of a weights folder.

  Args:
    path: folder with spiece.model; tokenizer_config.json and tokenizer.json beside it declare special tokens.
    max_length: length that prompts are padded to and cut at; None takes `text_length`.

  Raises:
    ValueError: no spiece.model, or not a T5 vocabulary (pad 0, end 1).
  """

  def __init__(self, path: str, max_length: int | None = None):
    model_file = os.path.join(path, "spiece.model")
    if not os.path.isfile(model_file):
      raise ValueError(
        f"no tokenizer: {model_file} is missing. It is the sentencepiece vocabulary: tokenizer/spiece.model in a "
        "Diffusers Wan folder, google/umt5-xxl/spiece.model in the original release. Copy it there (a tokenizer.json "
        "alone is not read)."
      )
    try:
      self._pieces = sentencepiece.SentencePieceProcessor(model_file=model_file)
    except (RuntimeError, OSError) as error:
      raise ValueError(f"{model_file} is not a sentencepiece model: {error}") from error
    if (self._pieces.pad_id(), self._pieces.eos_id()) != (PAD_ID, EOS_ID):
      raise ValueError(
        f"{model_file} has pad id {self._pieces.pad_id()} and end id {self._pieces.eos_id()}; "
        f"a T5 vocabulary has {PAD_ID} and {EOS_ID}"
      )
    self.max_length = text_length(path) if max_length is None else max_length
    self._specials = _special_tokens(path, self._pieces)
    self.vocab_size = 1 + max(self._pieces.get_piece_size() - 1, *self._specials.values())
    longest_first = sorted(self._specials, key=len, reverse=True)
    self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split

  def encode(self, text: str) -> list[int]:
    """Ids of a text as it stands: not cleaned, not cut, no end token."""
    ids = []
    for i, part in enumerate(self._split(text)):
      ids += [self._specials[part]] if i % 2 else self._pieces.encode(part)
    return ids

  def __call__(self, prompts: Sequence[str]) -> Tokens:
    """Cleans, encodes, cuts (the end token stays) and pads prompts."""
    ids_BT = np.full((len(prompts), self.max_length), PAD_ID, np.int32)
    lengths_B = np.zeros(len(prompts), np.int64)
    truncated_B = np.zeros(len(prompts), np.int64)
    for b, prompt in enumerate(prompts):
      ids = self.encode(clean_prompt(prompt))
      kept = ids[: self.max_length - 1] + [EOS_ID]
      ids_BT[b, : len(kept)] = kept
      lengths_B[b] = len(kept)
      truncated_B[b] = len(ids) + 1 - len(kept)
    return Tokens(ids_BT, np.arange(self.max_length) < lengths_B[:, None], truncated_B)


def text_length(path: str) -> int:
  """Tokens of a prompt, padding included, that the models of a tokenizer's folder were trained with.

  512 as for every Wan model, unless tokenizer_config.json says less (model_max_length).

  Raises:
    ValueError: model_max_length is no positive whole number.
  """
  length = _read_json(os.path.join(path, "tokenizer_config.json")).get("model_max_length", MAX_LENGTH)
  if not isinstance(length, int) or isinstance(length, bool) or length < 1:
    raise ValueError(f"{path}/tokenizer_config.json: model_max_length = {length!r} should be a positive whole number")
  return min(length, MAX_LENGTH)


def _special_tokens(path: str, pieces: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
  """Special tokens and their ids.

  They are the vocabulary's control and unknown pieces and what the folder's JSON files add. Where these add nothing,
  T5's rule holds: `extra_ids` sentinels (100 by default) follow the vocabulary, numbered backwards.
  """
  vocab_size = pieces.get_piece_size()
  specials = {pieces.id_to_piece(i): i for i in range(vocab_size) if pieces.is_control(i) or pieces.is_unknown(i)}
  config = _read_json(os.path.join(path, "tokenizer_config.json"))
  full = _read_json(os.path.join(path, "tokenizer.json"))
  try:
    added = {token["content"]: int(i) for i, token in config.get("added_tokens_decoder", {}).items()}
    added |= {token["content"]: token["id"] for token in full.get("added_tokens", [])}
    num_sentinels = int(config.get("extra_ids", 100))
    if not all(isinstance(content, str) and isinstance(i, int) and i >= 0 for content, i in added.items()):
      raise TypeError("a token is no text, or its id no whole number")
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(f"the JSON files in {path} do not declare the special tokens as expected: {error!r}") from error
  return specials | (added or {f"<extra_id_{i}>": vocab_size + num_sentinels - 1 - i for i in range(num_sentinels)})


def _read_json(file: str) -> dict:
  """Content of a JSON file, empty if there is none."""
  if not os.path.isfile(file):
    return {}
  try:
    with open(file, encoding="utf-8") as stream:
      return json.load(stream)
  except ValueError as error:
    raise ValueError(f"{file} is not JSON: {error}") from error

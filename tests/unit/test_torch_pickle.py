"""Reading .pth files without executing them (files by tests/golden/make_text.py)."""

import io
import os
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from MaxText.checkpoints import tensor_files, torch_pickle

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden", "text")


def test_state_dict_equals_torch():
  """bf16, half, double, views, transposes, shared storage, a scalar, an empty tensor, integers, a Parameter."""
  index = torch_pickle.read_index(f"{GOLDEN}/state_dict.pth")
  values = np.load(f"{GOLDEN}/state_dict_values.npz")
  assert list(index) == values.files
  for name, stored in index.items():
    array = tensor_files.read(stored)
    assert array.dtype == (ml_dtypes.bfloat16 if name == "bf16" else values[name].dtype), name
    np.testing.assert_array_equal(array.astype(values[name].dtype), values[name], err_msg=name)
  assert index["parameter"].strides is None and index["transposed"].strides == (1, 5)
  assert index["window"].file == index["shared_storage"].file


def test_parts_are_read_and_converted():
  index = torch_pickle.read_index(f"{GOLDEN}/state_dict.pth")
  values = np.load(f"{GOLDEN}/state_dict_values.npz")
  for name in ("transposed", "window", "shared_storage"):
    part = tensor_files.read(index[name], (slice(1, 3), slice(0, 2)), np.dtype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(part, values[name][1:3, :2].astype(ml_dtypes.bfloat16))


def test_opening_reads_no_numbers(tmp_path):
  """Numbers that differ from the archive's checksum are noticed by whoever reads them through the archive: not here."""
  numbers = np.arange(4, dtype=np.float32)
  path = tmp_path / "changed.pth"
  torch_file(str(path), pickled_tensor("FloatStorage"), {"0": numbers.tobytes()})
  path.write_bytes(path.read_bytes().replace(numbers.tobytes(), (numbers + 1).tobytes()))
  stored = torch_pickle.read_index(str(path))["w"]
  np.testing.assert_array_equal(tensor_files.read(stored), [[1, 2], [3, 4]])


def test_nested_containers_get_dotted_names():
  index = torch_pickle.read_index(f"{GOLDEN}/nested.pth")
  assert sorted(index) == ["a.b", "list.0"]
  assert index["a.b"].shape == (6, 5)


def test_legacy_format_is_refused():
  with pytest.raises(ValueError, match=r"legacy\.pth is in the format of torch before 1\.6"):
    torch_pickle.read_index(f"{GOLDEN}/legacy.pth")


def test_whole_module_is_refused_by_name():
  with pytest.raises(ValueError, match=r"refers to torch\.nn\.modules\.linear\.Linear"):
    torch_pickle.read_index(f"{GOLDEN}/whole_module.pth")


# --- hostile and damaged files


def torch_file(path, pickled, storages=None):
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("x/data.pkl", pickled)
    for key, content in (storages or {}).items():
      archive.writestr(f"x/data/{key}", content)


class Call:
  """Pickles to a call of `function`."""

  def __init__(self, function, *arguments):
    self.call = (function, arguments)

  def __reduce__(self):
    return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("function", [os.system, eval, io.open, getattr, pickle.loads])
def test_malicious_pickles_do_not_run(tmp_path, protocol, function):
  mark = tmp_path / "executed"
  arguments = {
    os.system: (f"touch {mark}",), eval: (f"open({str(mark)!r}, 'w')",), io.open: (str(mark), "w"),
    getattr: ("text", "upper"), pickle.loads: (b"I1\n.",),
  }[function]
  path = str(tmp_path / "evil.pth")
  torch_file(path, pickle.dumps({"weight": Call(function, *arguments)}, protocol))
  with pytest.raises(ValueError, match="nothing in it was executed") as error:
    torch_pickle.read_index(path)
  if protocol >= 2:
    assert function.__name__ in str(error.value)
  assert not mark.exists()


@pytest.mark.parametrize(
  ("pickled", "message"),
  [
    (b"\x80\x02ctorch\nFloatStorage\n(tR.", "does not parse"),  # calls a storage type
    (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02))tR.", "without a storage"),
    (b"\x80\x02ccollections\nOrderedDict\n(K\x01tR.", "does not parse"),
    (b"\x80\x02(ios\nsystem\nX\x02\x00\x00\x00lso.", "INST|refers to os.system"),
    (b"\x80\x02cos\nsystem\n.", "refers to os.system"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "refers to os.system"),
    (b"\x80\x02\x82\x01.", "EXT1"),
    (b"\x80\x02h\x07.", "does not parse"),  # reads a memo that was never written
    (b"\x80\x02}K\x01a.", "put into a dict"),
    (b"\x80\x02.", "does not parse"),
    (b"", "does not parse"),
    (b"\x80\x02X\xff\xff\xff\x7fabc.", "does not parse"),
  ],
)
def test_odd_pickles_are_refused(tmp_path, pickled, message):
  path = str(tmp_path / "odd.pth")
  torch_file(path, pickled)
  with pytest.raises(ValueError, match=message):
    torch_pickle.read_index(path)


def test_huge_memo_index_takes_no_memory(tmp_path):
  path = str(tmp_path / "memo.pth")
  torch_file(path, b"\x80\x02}r\xff\xff\xff\xff.")
  assert torch_pickle.read_index(path) == {}


def test_nested_references_do_not_explode(tmp_path):
  content = [1]
  for _ in range(60):
    content = [content] * 8
  content.append(content)
  path = str(tmp_path / "bomb.pth")
  torch_file(path, pickle.dumps(content, 2))
  assert torch_pickle.read_index(path) == {}


def pickled_tensor(storage, *, count=4, offset=0, shape=(2, 2), strides=None):
  """A state dict of one tensor, written by hand: no torch here."""
  strides = strides or [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]

  def number(n):
    return b"\x8a\x08" + struct.pack("<q", n)

  def text(s):
    return b"X" + struct.pack("<I", len(s)) + s.encode()

  identity = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text("0") + text("cpu") + number(count) + b"tQ"
  sizes = b"".join(b"(" + b"".join(map(number, values)) + b"t" for values in (shape, strides))
  tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + identity + number(offset) + sizes + b"\x89}tR"
  return b"\x80\x02}" + text("w") + tensor + b"s."


def test_tensor_written_by_hand_is_read(tmp_path):
  path = str(tmp_path / "hand.pth")
  torch_file(path, pickled_tensor("FloatStorage"), {"0": np.arange(4, dtype=np.float32).tobytes()})
  np.testing.assert_array_equal(tensor_files.read(torch_pickle.read_index(path)["w"]), [[0, 1], [2, 3]])


@pytest.mark.parametrize(
  "wrong",
  [dict(offset=1), dict(offset=-1), dict(shape=(3, 2)), dict(shape=(-2, 2)), dict(strides=[100, 1]),
   dict(strides=[-1, 1]), dict(count=5, shape=(5,)), dict(strides=[1]), dict(count=2**31, shape=(2**16, 2**15))],
)
def test_views_beyond_their_storage_are_refused(tmp_path, wrong):
  path = str(tmp_path / "wrong.pth")
  torch_file(path, pickled_tensor("FloatStorage", **wrong), {"0": bytes(16)})
  with pytest.raises(ValueError, match=r"w .*(beyond|impossible)"):
    torch_pickle.read_index(path)


def test_missing_storage_and_unknown_type_are_refused(tmp_path):
  path = str(tmp_path / "missing.pth")
  torch_file(path, pickled_tensor("FloatStorage"))
  with pytest.raises(ValueError, match=r"data/0\) are missing"):
    torch_pickle.read_index(path)
  torch_file(path, pickled_tensor("QInt8Storage"), {"0": bytes(16)})
  with pytest.raises(ValueError, match=r"torch\.QInt8Storage"):
    torch_pickle.read_index(path)


def test_truncated_files_are_refused(tmp_path):
  with open(f"{GOLDEN}/state_dict.pth", "rb") as stream:
    content = stream.read()
  path = tmp_path / "short.pth"
  for length in (0, 3, 100, len(content) // 2, len(content) - 1):
    path.write_bytes(content[:length])
    with pytest.raises(ValueError, match=r"short\.pth.*download it again"):
      torch_pickle.read_index(str(path))


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"version https://git-lfs.github.com/spec/v1\n", "not a .pth file"),
    (b"<html>", "not a .pth file"),
    (pickle.dumps({"a": 1}), "bare pickle"),
  ],
)
def test_other_files_are_refused(tmp_path, content, message):
  (tmp_path / "other.pth").write_bytes(content)
  with pytest.raises(ValueError, match=message):
    torch_pickle.read_index(str(tmp_path / "other.pth"))


def test_zip_of_something_else_is_refused(tmp_path):
  path = str(tmp_path / "other.pth")
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("readme.txt", "hello")
  with pytest.raises(ValueError, match="not from torch.save"):
    torch_pickle.read_index(path)


def test_big_endian_file_is_refused(tmp_path):
  path = str(tmp_path / "big.pth")
  torch_file(path, pickled_tensor("FloatStorage"), {"0": bytes(16)})
  with zipfile.ZipFile(path, "a") as archive:
    archive.writestr("x/byteorder", "big")
  with pytest.raises(ValueError, match="big-endian"):
    torch_pickle.read_index(path)

"""Hashes by their definitions; writes that either happen wholly or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pytest

from swaralign import artifacts

ROWS = [
    {"prompt": [{"role": "user", "content": "नमस्ते, 10 \"हाँ\""}], "data_source": "corpus", "extra_info": {"index": 0}},
    {"prompt": [{"role": "user", "content": "café"}], "data_source": "corpus", "extra_info": {"index": 1}},
]


def test_content_sha256_is_the_hash_of_the_written_out_json() -> None:
    written_out = (
        '[{"data_source":"corpus","extra_info":{"index":0},"prompt":[{"content":"नमस्ते, 10 \\"हाँ\\"","role":"user"}]},'
        '{"data_source":"corpus","extra_info":{"index":1},"prompt":[{"content":"café","role":"user"}]}]'
    )
    assert json.loads(written_out) == ROWS
    by_hand = hashlib.sha256(written_out.encode("utf-8")).hexdigest()
    assert artifacts.content_sha256(ROWS) == by_hand
    assert by_hand == "9b445b9bb5d92b8fc8e3d8b197435c7b43c1fc26a96abac674d84d78246b2c12"


def test_content_sha256_of_no_rows() -> None:
    assert artifacts.content_sha256([]) == hashlib.sha256(b"[]").hexdigest()


def test_content_sha256_depends_on_row_order_but_not_on_key_order() -> None:
    swapped_keys = [dict(reversed(row.items())) for row in ROWS]
    assert artifacts.content_sha256(swapped_keys) == artifacts.content_sha256(ROWS)
    assert artifacts.content_sha256(ROWS[::-1]) != artifacts.content_sha256(ROWS)


def test_fingerprint_is_16_hex_digits_of_the_canonical_json() -> None:
    assert artifacts.fingerprint({"b": 1, "a": [2]}) == hashlib.sha256(b'{"a":[2],"b":1}').hexdigest()[:16]


def test_not_a_number_has_no_hash() -> None:
    with pytest.raises(ValueError, match="JSON"):
        artifacts.content_sha256([{"snr": float("nan")}])


def test_sha256_tree_lists_every_file_sorted_but_what_python_compiled(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_bytes(b"two")
    (tmp_path / "z.txt").write_bytes(b"one")
    (tmp_path / "b" / "__pycache__").mkdir()
    (tmp_path / "b" / "__pycache__" / "c.cpython-311.pyc").write_bytes(b"compiled at some time")
    assert list(artifacts.sha256_tree(tmp_path).items()) == [
        ("b/c.txt", hashlib.sha256(b"two").hexdigest()),
        ("z.txt", hashlib.sha256(b"one").hexdigest()),
    ]


def test_write_json_layout_and_no_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "made" / "manifest.json"
    artifacts.write_json(target, {"b": "ह", "a": 1})
    assert target.read_bytes() == '{\n  "a": 1,\n  "b": "ह"\n}\n'.encode()
    assert [path.name for path in target.parent.iterdir()] == ["manifest.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    artifacts.write_json(target, {"kept": True})
    with pytest.raises(UnicodeEncodeError):
        artifacts.write_text(target, "half \ud800")
    assert json.loads(target.read_text()) == {"kept": True}
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_equal_tables_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        artifacts.write_parquet(tmp_path / name, pa.table({"text": ["x", None], "n": [1.0, 2.0]}))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_atomic_folder_replaces_the_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in ("first", "second"):
        with artifacts.atomic_folder(target) as folder:
            (folder / name).write_text(name)
    assert [path.name for path in target.iterdir()] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_atomic_folder_keeps_the_old_one_on_error(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with artifacts.atomic_folder(target) as folder:
        (folder / "kept").write_text("kept")
    with pytest.raises(RuntimeError), artifacts.atomic_folder(target) as folder:
        (folder / "half").write_text("half")
        raise RuntimeError("killed")
    assert [path.name for path in target.iterdir()] == ["kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

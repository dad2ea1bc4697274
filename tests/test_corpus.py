"""Reading a corpus in place: the same rows from disk and from a hub, no audio byte, no row too many, through cuts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swaralign.corpus import COLUMNS, read_cell, read_rows
from swaralign.hub import list_rows
from swaralign.params import HubRowsAsset, LocalAsset, SplitParams
from swaralign.split import build_split
from tests.loopback_hub import COMMIT, TOKEN, Hub, connect, serve

ROWS, SHARDS, GROUP = 100, 3, 25  # rows of a shard, shards, rows of a row group
AUDIO_BYTES = 200_000  # of a row, so 20 MB a shard
ASSET = HubRowsAsset(source="hub_rows", id="house/corpus", revision=COMMIT, pattern="Hindi/train-*.parquet")
LOCAL = LocalAsset(source="local", path=".", id="house/corpus", revision=COMMIT, files={"x.parquet": "0" * 64})
PARAMS = SplitParams(config="Hindi", id_prefix="hi", scenario="Read", window_rows=100, min_duration_s=1.0,
                     max_duration_s=14.0, min_snr_db=20.0, expected_train=100, held_out=10)


def shard(first: int) -> pa.Table:
    rng = np.random.default_rng(first)
    rows = range(first, first + ROWS)
    return pa.table({
        "text": [f"वाक्य {row}" for row in rows], "normalized": [None] * ROWS, "scenario": ["Read"] * ROWS,
        "speaker_id": [f"s{row % 3}" for row in rows],
        "audio": [{"bytes": rng.bytes(AUDIO_BYTES), "path": None} for _ in rows],
        "snr": [25.0] * ROWS, "duration": [2.0] * ROWS,
    }, schema=pa.schema([
        ("text", pa.string()), ("normalized", pa.string()), ("scenario", pa.string()), ("speaker_id", pa.string()),
        ("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("snr", pa.float64()), ("duration", pa.float64()),
    ]))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpus")
    paths = [folder / f"train-{number:05d}-of-{SHARDS:05d}.parquet" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        pq.write_table(shard(number * ROWS), path, row_group_size=GROUP)
    return paths


@pytest.fixture
def hub(shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A gated data set with the three shards; this machine is logged in and has accepted its terms."""
    files = {f"Hindi/{path.name}": path.read_bytes() for path in shards}
    files |= {"README.md": b"-", "Hindi/test-00000-of-00001.parquet": b"0" * 2000}
    with serve(Hub({"datasets/house/corpus": files}, gated={"datasets/house/corpus"})) as hub:
        connect(hub, tmp_path, monkeypatch, TOKEN)
        yield hub


def split_files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def bytes_read() -> int:
    """What this process has read from files so far, however it did."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts reads as Linux does")
def test_less_than_a_hundredth_of_a_local_file_is_read(shards: list[Path]) -> None:
    before = bytes_read()
    rows = list(read_rows(shards))
    assert len(rows) == SHARDS * ROWS
    assert bytes_read() - before < 0.01 * sum(path.stat().st_size for path in shards)


def test_less_than_a_hundredth_of_a_hub_file_is_sent(hub: Hub, shards: list[Path]) -> None:
    assert list(read_rows(list_rows("prompts", ASSET))) == list(read_rows(shards))
    assert 0 < hub.sent < 0.01 * sum(path.stat().st_size for path in shards)


def test_nothing_is_asked_for_after_the_last_held_out_row(hub: Hub, shards: list[Path], tmp_path: Path) -> None:
    build_split(list_rows("prompts", ASSET), ASSET, PARAMS, tmp_path / "out")
    asked = {path for _, path, ranged in hub.asked if ranged}
    assert {Path(path).name for path in asked} == {shards[0].name, shards[1].name}
    ranges = [ranged for _, path, ranged in hub.asked if ranged and path.endswith(shards[1].name)]
    second_group = pq.ParquetFile(shards[1]).metadata.row_group(1).column(0).data_page_offset
    assert all(int(ranged.split("=")[1].split("-")[0]) < second_group for ranged in ranges[1:])  # the first: the footer


def test_hub_and_disk_and_any_number_of_threads_give_the_same_bytes(
    hub: Hub, shards: list[Path], tmp_path: Path
) -> None:
    threads = pa.cpu_count(), pa.io_thread_count()
    try:
        for count in (1, 4):
            pa.set_cpu_count(count)
            pa.set_io_thread_count(count)
            build_split(shards, LOCAL, PARAMS, tmp_path / f"local-{count}")
            build_split(list_rows("prompts", ASSET), ASSET, PARAMS, tmp_path / f"hub-{count}")
    finally:
        pa.set_cpu_count(threads[0])
        pa.set_io_thread_count(threads[1])
    outs = [split_files(tmp_path / name) for name in ("local-1", "local-4", "hub-1", "hub-4")]
    assert outs[0] and all(out == outs[0] for out in outs)


def test_reading_goes_on_after_the_line_broke(hub: Hub, shards: list[Path]) -> None:
    files = list_rows("prompts", ASSET)
    hub.cut = [10, 0, 100]
    rows = read_rows(files)
    assert next(rows)["text"] == "वाक्य 0"
    assert hub.cut == [], "the line broke three times"
    assert [row["text"] for row in rows][-1] == f"वाक्य {SHARDS * ROWS - 1}"


def test_a_hub_that_went_away_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list_rows("prompts", ASSET)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"assets\.prompts: house/corpus .*no connection to http://127\.0\.0\.1:9 \(C"):
        list(read_rows(files))


@pytest.mark.parametrize(("changes", "told"), [
    ({"gated": {"datasets/house/corpus"}}, "is gated: log in at"),
    ({"repos": {}}, "no such repository at"),
])
def test_access_that_was_lost_after_the_listing_is_told(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    files = list_rows("prompts", ASSET)
    monkeypatch.delenv("HF_TOKEN")
    for name, value in changes.items():
        setattr(hub, name, value)
    with pytest.raises(ValueError, match=rf"assets\.prompts: house/corpus .*{told}"):
        list(read_rows(files))


def test_the_listing_is_asked_once_and_leaves_the_other_files_out(hub: Hub, shards: list[Path]) -> None:
    files = list_rows("prompts", ASSET)
    asked = len(hub.asked)
    assert list_rows("prompts", ASSET) == files and len(hub.asked) == asked
    assert [Path(file.path).name for file in files] == [path.name for path in shards]


def test_offline_reads_what_the_cache_holds(
    hub: Hub, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import hf_hub_download

    files = list_rows("prompts", ASSET)
    hf_hub_download("house/corpus", files[0].path, repo_type="dataset", revision=COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert len(list(read_rows(list_rows("prompts", ASSET)[:1]))) == ROWS
    with pytest.raises(ValueError, match=r"assets\.prompts.*not all of it is in the cache, and HF_HUB_OFFLINE forbids"):
        list(read_rows(files))
    assert len(hub.asked) == asked


def test_a_gated_data_set_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in (None, "hf_not_accepted"):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(ValueError) as caught:
            list_rows("prompts", ASSET)
        assert f"is gated: log in at {hub.url}/datasets/house/corpus, accept its terms" in str(caught.value)
        assert "`hf auth login`" in str(caught.value)


@pytest.mark.parametrize(("changes", "told"), [
    ({"revision": "f" * 40}, r"the repository has no such revision; correct assets\.prompts\.revision"),
    ({"id": "house/other"}, r"no such repository at .*/datasets/house/other, or a private one"),
    ({"pattern": "Tamil/train-*.parquet"}, r"lacks what is asked for: .*; correct assets\.prompts\.pattern"),
    ({"pattern": "Hindi/dev-*.parquet"}, r"has no file Hindi/dev-\*\.parquet; correct assets\.prompts\.pattern"),
])
def test_wrong_pins_are_told(hub: Hub, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        list_rows("prompts", ASSET.model_copy(update=changes))


def test_one_cell_is_found_across_groups_and_shards(hub: Hub, shards: list[Path]) -> None:
    expected = shard(ROWS).column("audio")[60].as_py()
    before = hub.sent
    for corpus in (shards, list_rows("prompts", ASSET)):
        assert read_cell(corpus, ROWS + 60, "audio") == expected
    assert hub.sent - before < 1.1 * GROUP * AUDIO_BYTES, "no more than its row group"
    with pytest.raises(ValueError, match="row 300 is asked for, but the corpus has only 300"):
        read_cell(shards, 300, "audio")


def test_a_speaker_column_of_labels_is_decoded(tmp_path: Path) -> None:
    features = json.dumps({"info": {"features": {"speaker_id": {"names": ["a", "b"], "_type": "ClassLabel"}}}})
    table = shard(0).drop_columns(["audio"]).slice(0, 2)
    table = table.set_column(3, "speaker_id", pa.array([1, 0])).replace_schema_metadata({"huggingface": features})
    pq.write_table(table, tmp_path / "x.parquet")
    rows = list(read_rows([tmp_path / "x.parquet"], (*COLUMNS, "speaker_id")))
    assert [row["speaker_id"] for row in rows] == ["b", "a"]

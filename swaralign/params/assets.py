"""What comes from outside, where from and by which hash."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swaralign.params.base import Commit, HubId, Section, Sha256


class LocalAsset(Section):
    """Files under a folder of the repository (or any path), each pinned by its hash."""

    source: Literal["local"]
    path: str
    id: str
    revision: str
    files: dict[str, Sha256] = Field(min_length=1)
    convert: Literal["ctranslate2"] | None = None  # a key of its own only where it is wanted


class PackageAsset(Section):
    """Files that installed Python packages ship; a file may be split over several packages' parts."""

    source: Literal["package"]
    id: str
    revision: str
    files: dict[str, Sha256] = Field(min_length=1)
    parts: dict[str, list[str]]

    @model_validator(mode="after")
    def _every_file_has_parts(self) -> Self:
        missing = sorted(set(self.files) ^ set(self.parts))
        if missing:
            raise ValueError(f"files and parts must name the same files; only one of them names {missing}")
        return self


class HubAsset(Section):
    """Files of a repository on the hub at one commit. A hash of null means that the commit alone pins the file."""

    source: Literal["hub"]
    repo_type: Literal["model", "dataset"]
    id: HubId
    revision: Commit
    files: dict[str, Sha256 | None] = Field(min_length=1)
    convert: Literal["ctranslate2"] | None = None


class HubRowsAsset(Section):
    """Parquet files of a hub dataset at one commit, read in place: columns are fetched, files are not."""

    source: Literal["hub_rows"]
    id: HubId
    revision: Commit
    pattern: Annotated[str, Field(pattern=r"\.parquet$")]


FileAsset = LocalAsset | PackageAsset | HubAsset
Asset = Annotated[FileAsset, Field(discriminator="source")]
RowsAsset = Annotated[FileAsset | HubRowsAsset, Field(discriminator="source")]


class AssetsParams(Section):
    base: Asset
    adapter: Asset | None
    reference: Asset | None
    prompts: RowsAsset
    asr: Asset
    second_asr: Asset | None
    mos: Asset | None
    speaker_encoder: Asset | None

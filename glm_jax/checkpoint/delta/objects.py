"""Paths in object stores: what `Places` needs of a path, by any file system that fsspec knows.

etils knows four schemes; fsspec knows those, in-memory stores and every one that a user registers.
"""

import dataclasses
import posixpath
from collections.abc import Iterator
from typing import Any

import fsspec

from glm_jax.errors import GlmError


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """As of an `epath.Path`."""

    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectPath:
    """A place in a store; an object appears when it is whole."""

    fs: Any
    path: str

    @classmethod
    def of(cls, url: str) -> "ObjectPath":
        """Opens a URL such as s3://bucket/chain.

        Raises:
            GlmError: no file system of that scheme, or its package is not installed.
        """
        try:
            return cls(*fsspec.core.url_to_fs(url))
        except (ValueError, ImportError) as error:
            scheme = url.split("://")[0]
            raise GlmError(
                f"{url}: cannot be opened ({error}); give a folder, or install the package that "
                f"fsspec needs for {scheme}://"
            ) from error

    def __str__(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.fs, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self.path.rstrip("/"))

    def exists(self) -> bool:
        """Whether there is an object, or one below."""
        self.fs.invalidate_cache()  # others write there too
        return self.fs.exists(self.path)

    def iterdir(self) -> Iterator["ObjectPath"]:
        """What is directly below."""
        for path in self.fs.ls(self.path, detail=False):
            yield ObjectPath(self.fs, path)

    def stat(self) -> Stat:
        """Its size."""
        return Stat(int(self.fs.info(self.path)["size"]))

    def open(self, mode: str) -> Any:
        """A binary file, whose writing ends in the object's appearance."""
        return self.fs.open(self.path, mode)

    def read_bytes(self) -> bytes:
        """All of it."""
        return self.fs.cat_file(self.path)

    def write_bytes(self, data: bytes) -> None:
        """Makes the object."""
        self.fs.pipe_file(self.path, data)

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Only for stores that have folders."""
        del parents
        self.fs.makedirs(self.path, exist_ok=exist_ok)

    def unlink(self, *, missing_ok: bool) -> None:
        """Removes an object."""
        if not missing_ok or self.exists():
            self.fs.rm_file(self.path)

    def rmtree(self, *, missing_ok: bool) -> None:
        """Removes all below."""
        if not missing_ok or self.exists():
            self.fs.rm(self.path, recursive=True)

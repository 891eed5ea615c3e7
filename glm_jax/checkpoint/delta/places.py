"""The folders of a chain: `v00000007/` with a data file and, written last, a manifest."""

import os
import re
from pathlib import Path
from typing import Any

from etils import epath

from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.objects import ObjectPath
from glm_jax.errors import GlmError

MANIFEST, FULL, DELTA = "manifest.json", "model.safetensors", "deltas.bin"
_MOST_MANIFEST_BYTES = 1 << 30


class Places:
    """Names and files of a store; a local folder, or a URL that fsspec knows, such as s3://.

    A version without a manifest is not there: its writer was killed, or it is being removed.
    """

    def __init__(self, root: str | os.PathLike[str]):
        place = str(root).removeprefix("file://")
        local = "://" not in place
        self.root: Any = epath.Path(place) if local else ObjectPath.of(place)
        self._local = Path(place) if local else None

    def folder(self, version: int) -> Any:
        """Of a version, whether there or not."""
        return self.root / f"v{version:08d}"

    def data(self, manifest: Manifest) -> Any:
        """The data file of a version."""
        return self.folder(manifest.version) / (FULL if manifest.kind == "full" else DELTA)

    def versions(self) -> list[int]:
        """Numbers of all versions with a manifest, ascending."""
        return [n for n in self._numbers() if (self.folder(n) / MANIFEST).exists()]

    def leftovers(self) -> list[int]:
        """Numbers of folders without a manifest."""
        return [n for n in self._numbers() if not (self.folder(n) / MANIFEST).exists()]

    def _numbers(self) -> list[int]:
        if not self.root.exists():
            return []
        found = (re.fullmatch(r"v(\d{8})", path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def read_manifest(self, version: int) -> Manifest:
        """Reads and checks a manifest, and that its data file is as long as it says.

        Raises:
            GlmError: no such version, an unusable manifest, another data file, or a link that
                leaves the store.
        """
        path = self.folder(version) / MANIFEST
        if not path.exists():
            known = self.versions()
            which = f"{known[0]} to {known[-1]}" if known else "none"
            raise GlmError(f"{self.root}: has no version {version} (it has {which}); name another")
        self._require_inside(path)
        if path.stat().length > _MOST_MANIFEST_BYTES:
            raise GlmError(f"{path}: {path.stat().length} bytes are no manifest; remove it")
        manifest = Manifest.parse(path.read_bytes(), str(path))
        if manifest.version != version:
            raise GlmError(f"{path}: is that of version {manifest.version}; rename its folder")
        data = self.data(manifest)
        found = data.stat().length if data.exists() else None
        self._require_inside(data)
        if found != manifest.data_bytes:
            raise GlmError(
                f"{data}: has {found} bytes, the manifest says {manifest.data_bytes}; fetch it "
                "again, or save a full version"
            )
        return manifest

    def _require_inside(self, path: Any) -> None:
        if self._local is None:
            return
        root, real = self._local.resolve(), Path(path).resolve()
        if not real.is_relative_to(root):
            raise GlmError(f"{path}: is a link out of the store, to {real}; remove it")

    def write_manifest(self, manifest: Manifest) -> None:
        """Makes a version appear; its data file is whole by now."""
        path = self.folder(manifest.version) / MANIFEST
        if self._local is None:
            path.write_bytes(manifest.to_bytes())  # an object appears whole or not at all
            return
        partial = Path(path).with_name(f".{MANIFEST}.partial")
        with partial.open("wb") as file:
            file.write(manifest.to_bytes())
            flush(file)
        partial.replace(path)
        for folder in (Path(path).parent, self._local):
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def remove(self, version: int) -> None:
        """Removes a version, its manifest first."""
        folder = self.folder(version)
        if self._local is not None and Path(folder).is_symlink():
            raise GlmError(f"{folder}: is a link; remove it by hand")
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.rmtree(missing_ok=True)


def flush(file: Any) -> None:
    """Brings what was written to the disk, where the file is on one."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and type(error).__name__ != "UnsupportedOperation":
            raise

"""A model's weights by name, on the host, one at a time."""

from collections.abc import Iterator, Mapping

import numpy as np

from glm_jax.checkpoint.delta.manifest import CODES, Manifest
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import leaves


class HostArrays(Mapping[str, np.ndarray]):
    """Dotted path to array; each is brought to the host when it is asked for, and not kept."""

    def __init__(self, model: GlmModel):
        self._variables = dict(leaves(model))

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._variables[name][...])

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def require_same_tensors(self, manifest: Manifest) -> None:
        """Refuses other names, dtypes or shapes, by what a manifest says and before any is read.

        Raises:
            GlmError: names the first tensor that differs.
        """
        ours = {name: (CODES[x.dtype], x.shape) for name, x in self._variables.items()}
        theirs = {name: (x.dtype, x.shape) for name, x in manifest.tensors.items()}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise GlmError(
                    f"version {manifest.version}: {name} is {theirs.get(name, 'absent')}, the "
                    f"engine's is {ours.get(name, 'absent')}; publish weights of this model"
                )

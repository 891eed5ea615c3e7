"""Arrays by name that come to the host one at a time, as a store reads them."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from glm_jax.checkpoint.safetensors_files import CODES
from glm_jax.errors import GlmError
from glm_jax.params import leaves


class HostArrays(Mapping[str, np.ndarray]):
    """Dotted path to array; each is brought to the host when it is asked for, and not kept.

    Args:
        arrays: `jax.Array` or `np.ndarray` by dotted path; held by reference.
    """

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = arrays

    @classmethod
    def of(cls, model: Any) -> "HostArrays":
        """The parameters and buffers of a model, as they are now."""
        return cls({path: variable[...] for path, variable in leaves(model)})

    def __getitem__(self, name: str) -> np.ndarray:
        """Raises `GlmError` for what is no array, or has parts on other hosts."""
        array = self._array(name)
        here = not isinstance(array, jax.Array) or (
            array.is_fully_addressable or array.is_fully_replicated
        )
        if not here:
            raise GlmError(f"{name}: parts are on other hosts; gather it, or save it by save_orbax")
        return np.asarray(array)

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype, as safetensors writes it, and shape of each; nothing comes to the host.

        Raises:
            GlmError: what is no array, or has a dtype that safetensors does not know.
        """
        return {name: kind(name, self._array(name)) for name in self._arrays}

    def _array(self, name: str) -> Any:
        array = self._arrays[name]
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise GlmError(f"{name}: is a {type(array).__name__}; give an array")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def kind(name: str, array: Any) -> tuple[str, tuple[int, ...]]:
    """dtype, as safetensors writes it, and shape.

    Raises:
        GlmError: a dtype that safetensors does not know.
    """
    dtype = np.dtype(array.dtype)
    if dtype not in CODES:
        raise GlmError(f"{name}: dtype {dtype} is none of safetensors'; convert it")
    return CODES[dtype], tuple(array.shape)

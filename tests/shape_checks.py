"""What checks the shape annotations of the packages during a test run.

The hook is installed by `--jaxtyping-packages` in pyproject.toml. Only annotations with an array in
them are checked. Plain types are basedpyright's work, and a user's wrong value must reach the error
that our code has for it. Constructors are left out: JAX rebuilds dataclasses with shardings, specs
and other things in the place of arrays.
"""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def has_array(hint: object) -> bool:
    """Tells whether a jaxtyping array stands anywhere in an annotation."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(has_array(part) for part in get_args(hint))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a signature check its arrays; jaxtyping passes a stand-in made for this purpose."""
    hints = function.__annotations__
    if function.__name__ == "__init__" or not any(map(has_array, hints.values())):
        return function
    function.__annotations__ = {
        name: hint if has_array(hint) else Any for name, hint in hints.items()
    }
    return beartype(function)

"""What the codec sees of a dtype: unsigned integers, and which of their bits are the exponent."""

import dataclasses

import ml_dtypes
import numpy as np

from glm_jax.errors import GlmError

MOST_CLASSES = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """How the bits of a dtype are read.

    The class of an element is `(bits >> shift) & mask` of its old value, which the receiver has.
    """

    unsigned: np.dtype
    """Unsigned integers that the array is viewed as."""
    shift: int
    mask: int
    """0: all elements are of one class."""

    @classmethod
    def of(cls, dtype: np.dtype, *, by_exponent: bool) -> "Elements":
        """The view of `dtype`; its classes are the values of the exponent field, if it has one.

        Raises:
            GlmError: the dtype holds Python objects.
        """
        if dtype.hasobject:
            raise GlmError(f"dtype {dtype}: holds Python objects; give an array of numbers")
        size = dtype.itemsize
        # Wider or odd elements (complex128, records) are taken in the largest whole parts.
        unsigned = np.dtype(f"u{next(n for n in (8, 4, 2, 1) if size % n == 0 and size)}")
        shift = mask = 0
        if by_exponent and unsigned.itemsize == size and (field := _exponent(dtype)):
            shift, n_bits = field
            surplus = max(0, n_bits - 8)  # float64 has 11 bits: its classes are runs of 8 exponents
            shift, mask = shift + surplus, (1 << (n_bits - surplus)) - 1
        return cls(unsigned=unsigned, shift=shift, mask=mask)

    def view(self, array: np.ndarray) -> np.ndarray:
        """The flat unsigned integers of an array, read-only; a copy if it is not contiguous.

        The compiled scans have one form for what can be written to and one for what cannot; so
        only one of them is ever needed.
        """
        flat = np.ascontiguousarray(array).reshape(-1).view(self.unsigned)
        flat.flags.writeable = False
        return flat


def whole_words(array: np.ndarray) -> np.ndarray:
    """An array of unsigned integers as uint64, but for a tail that fills no word; read-only."""
    n = array.nbytes // 8 * 8 // array.itemsize
    if not array.ctypes.data % 8:
        return array[:n].view(np.uint64)
    words = array[:n].copy().view(np.uint64)  # a tensor that begins anywhere in a mapped file
    words.flags.writeable = False
    return words


def _exponent(dtype: np.dtype) -> tuple[int, int] | None:
    """(position of the lowest bit, bits) of the exponent field; None for what is no float."""
    try:
        info = ml_dtypes.finfo(dtype)
    except ValueError:
        return None
    n_bits = dtype.itemsize * 8 - 1 - info.nmant
    # Formats of 4 or 6 bits lie in a byte with zeros above: a mask that takes those in is harmless.
    return (info.nmant, n_bits) if n_bits > 0 else None

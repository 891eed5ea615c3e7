"""What an operation does not do."""


class KernelError(ValueError):
    """A request outside of what an operation or its tuned tiles allow.

    The message names the operation, the field, the value, the limit and, where there is one, the
    nearest value that is supported.
    """

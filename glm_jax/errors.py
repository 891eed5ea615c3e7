"""Errors that a user can mend."""


class GlmError(ValueError):
    """A mistake in the user's input.

    The text names the field, file or tensor, the value found, and what to do. The command line
    prints it without a traceback and exits with status 2.
    """

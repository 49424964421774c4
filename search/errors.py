"""The one exception that means: the user gave something that cannot work."""


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where it came from, how to mend it.

    The command line prints it without a traceback and exits with code 2.
    """

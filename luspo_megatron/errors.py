"""Errors a person can mend. The command line prints their message alone and exits with their code."""


class UserError(Exception):
    """Bad input: one message that names what, where and the mend. Exit code 2."""

    exit_code = 2


class RunError(Exception):
    """A run that cannot go on for a reason outside the program (an engine died for good, ...). Exit code 1."""

    exit_code = 1

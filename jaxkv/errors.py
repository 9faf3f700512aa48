"""Every error jaxkv raises on purpose.

Messages name the value, the limit and the way out. `assert` is for our own mistakes, never for a caller's.
"""


class JaxkvError(Exception):
    """Base of all errors raised on purpose."""


class RequestError(JaxkvError, ValueError):
    """The caller's request cannot be served as asked; nothing was queued, other requests are untouched."""


class CapacityError(JaxkvError):
    """Memory or queue space is too small for what was asked; the message gives both numbers."""


class CheckpointError(JaxkvError):
    """Model files are missing, damaged, or of a kind jaxkv does not know; the message names the file or tensor."""


class ConfigError(JaxkvError, ValueError):
    """An engine setting is impossible or contradicts another one."""


class EngineError(JaxkvError):
    """The engine could not go on with a request that it had accepted."""

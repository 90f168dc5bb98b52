"""Every exception that mpikv raises.

::

    MPIKVError(RuntimeError)
    ├── ConfigError(ValueError)             unknown name or bad option; lists the known ones
    ├── KeyNotInitialized(KeyError)         push or pull of an unknown key
    ├── KeyAlreadyInitialized(ValueError)   init of a known key without overwrite
    ├── ValueMismatch(ValueError)           number of arrays, shape or dtype differs from the stored value
    ├── CheckpointError(ValueError)         a file is not a whole checkpoint, or not one for this store
    ├── NotFinite(ValueError)               an array to be compressed has NaN or infinity
    ├── StaleGradient(UserWarning)          a Trainer's parameter got no gradient since the last update
    ├── Unsupported(NotImplementedError)    two choices that cannot go together; names both
    ├── TransportUnavailable(ImportError)   a library or device is missing; the message has the install line
    ├── TransportError                      MPI failed; the original error is in __cause__
    │   └── Stalled(TimeoutError)           a deadline passed; names the missing ranks and the call
    ├── RankMismatch                        ranks made different calls; names both ranks, shows both calls
    ├── PeerFailed                          another rank raised in this call; carries its rank and its text
    └── Closed(ValueError)                  use after close(), or in a forked child

Keys of a wrong type and targets that cannot be written raise the built-in ``TypeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar

Raised = TypeVar("Raised", bound=BaseException)

Mark: TypeAlias = Literal["settled", "repeated", "shortened", "unwritable"]
"""A fact about an error. ``settled``: every rank has seen it at the same step, so the store can be used again.
``repeated``: another rank prints it in full. ``shortened``: frames of this package were taken out of its traceback.
``unwritable``: its target is a read-only array, and a new array may take its place."""


class MPIKVError(RuntimeError):
    """The base of all errors of this package."""


class ConfigError(MPIKVError, ValueError):
    """A name is unknown or an option has a bad value; the message lists what is known."""


class KeyNotInitialized(MPIKVError, KeyError):
    """A key was pushed, pulled, set or deleted before ``init``."""

    # KeyError prints the repr of its message, which turns a sentence into a quoted string.
    __str__ = RuntimeError.__str__


class KeyAlreadyInitialized(MPIKVError, ValueError):
    """A key was initialised twice without ``overwrite=True``."""


class ValueMismatch(MPIKVError, ValueError):
    """The number of arrays, a shape or a dtype differs from the stored value."""


class CheckpointError(MPIKVError, ValueError):
    """A file is not a whole checkpoint, or not one for this store; the store is as before."""


class NotFinite(MPIKVError, ValueError):
    """An array to be compressed has NaN, infinity or numbers too large for a residual; nothing was sent."""


class StaleGradient(MPIKVError, UserWarning):
    """A parameter of a Trainer got no gradient since the last update."""


class Unsupported(MPIKVError, NotImplementedError):
    """Two choices cannot go together, or a named feature is not in this version."""


class TransportUnavailable(MPIKVError, ImportError):
    """A chosen transport, or chosen kernels, need a missing library or device."""


class TransportError(MPIKVError):
    """A transport failed. The original error is in ``__cause__``; the store cannot be used any more."""


class Stalled(TransportError, TimeoutError):
    """A rank did not arrive before the deadline. The store cannot be used any more."""

    def __init__(self, message: str, missing: Iterable[int] = ()) -> None:
        """Store ``missing``, the ranks that did not come, as a tuple; empty if they are not known."""
        super().__init__(message)
        self.missing = tuple(missing)


class RankMismatch(MPIKVError):
    """Ranks made different calls; no data moved and the store can be used again."""


class PeerFailed(MPIKVError):
    """Another rank raised in this call; stored values are as before and the store can be used again."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        """Store the number of the other rank; None if it is not known."""
        super().__init__(message)
        self.rank = rank


class Closed(MPIKVError, ValueError):
    """The store was used after ``close()`` or in a forked child."""


def mark(error: Raised, name: Mark, on: bool = True) -> Raised:
    """Set a mark of an error, in place, or remove it; return the error."""
    # A caller's own exception may forbid attributes, as a frozen dataclass does. Without the mark, ranks would disagree
    # whether the store can be used again.
    BaseException.__setattr__(error, name, on)
    return error


def is_marked(error: BaseException, name: Mark) -> bool:
    """Return whether :func:`mark` has set this mark of an error, and has not removed it since."""
    return bool(vars(error).get(name, False))


def mark_stalled(error: Stalled, rank: int) -> Stalled:
    """Mark a Stalled as ``repeated``, not to be printed in full, unless all lower ranks are missing, or none is known
    to be; return it.
    """
    # First if all lower ranks are missing. With none known to be missing each rank prints: better twice than never.
    return mark(error, "repeated", bool(error.missing) and not set(range(rank)) <= set(error.missing))


def noted(error: Raised, text: str) -> Raised:
    """Add a line to an error of the caller's own code, in place, and return it. Python 3.11 and later shows it."""
    BaseException.__setattr__(error, "__notes__", [*notes(error), text])
    return error


def notes(error: BaseException) -> list[str]:
    """Return the lines added to an error."""
    known = vars(error).get("__notes__")
    return list(map(str, known)) if isinstance(known, list) else []


def text_of(error: object, form: Callable[[object], str] = str) -> str:
    """Return the text of an error or another object. If its ``str()`` raises, as a caller's own may, return that fact.

    >>> class Bad(Exception):
    ...     def __str__(self):
    ...         return self.lost
    >>> text_of(Bad())
    'no text, as its str() raised AttributeError'
    """
    try:
        return form(error)
    except Exception as failure:
        return f"no text, as its {form.__name__}() raised {type(failure).__name__}"


def a_kind(value: object) -> str:
    """Return the name of a value's type with its article, for a message.

    >>> a_kind(3), a_kind([3]), a_kind(None)
    ('an int', 'a list', 'None')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name.lower().startswith(("a", "e", "i", "o", "nd")) else f"a {name}"


def brief(value: object, most: int = 120) -> str:
    """Return a string, or another value's repr, cut to ``most`` characters.

    >>> brief(["a" * 50], 20)
    "['aaaaaaaaaaaaaaaaa…"
    """
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def known_names(what: str, name: object, known: Iterable[str], hint: str = "") -> str:
    """Return a message about an unknown name: the known names, and ``hint``, else the nearest known name.

    >>> known_names("placement", "shard", ["root", "sharded"])
    "unknown placement 'shard' (known: root, sharded); did you mean 'sharded'?"
    """
    import difflib  # as seldom as somebody mistypes a name

    # In one order, so that all ranks raise the same text.
    names = sorted(known)
    text = f"unknown {what} {name!r} (known: {', '.join(names)})"
    # Compared in lower case: "SGD" for "sgd" is a likely mistake, and difflib would see three wrong letters.
    lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1)
    hint = hint or (f"did you mean {lower[near[0]]!r}?" if near else "")
    return f"{text}; {hint}" if hint else text


def no_attribute(what: str, name: str, known: Iterable[str], hint: str = "") -> AttributeError:
    """Return, not raise, the AttributeError for a name that a module lacks, with the known and the nearest names."""
    return AttributeError(name if name.startswith("__") else known_names(what, name, known, hint))

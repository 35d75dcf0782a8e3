"""How bad input is refused: a ValueError that names the argument, before any compute."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def known_arguments_only(cls: Class) -> Class:
    """Class decorator: an unknown keyword is a ValueError that lists the known ones."""
    init: Callable = cls.__init__
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(self, *args, **kwargs):
        for name in kwargs:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                raise ValueError(
                    f"{cls.__name__} has no argument `{name}`{hint} Known: {', '.join(known)}."
                )
        init(self, *args, **kwargs)

    cls.__init__ = checked
    return cls

"""The line with which a call is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adt_tree.errors import UserError


def refusal(call: Callable[[], object], kind: type[Exception] = UserError) -> str:
    """Returns the line of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    return line

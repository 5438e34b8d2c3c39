"""Time limits for PostgreSQL, whose client library otherwise waits forever.

While libpq waits for a silent server it also ignores signals.
"""

from __future__ import annotations

import contextlib
import functools
import select
from typing import Any

# In seconds: the limit for a connection, unless the URI sets one, and the limit for each part of an answer.
CONNECTS_IN = 5
_ANSWERS_IN = 60
# True after the first timeout; later waits then use the shorter limit.
_silent = False


@functools.cache
def answer_in_time() -> None:
    """Applies the time limits to all psycopg2 connections of this process."""
    with contextlib.suppress(ImportError):
        from psycopg2 import extensions
        from sqlalchemy import Engine, event

        event.listen(Engine, "do_connect", _connect)
        extensions.set_wait_callback(_wait)


def _connect(dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> Any:  # noqa: ARG001 - SQLAlchemy's
    """Connects through libpq without the callback, so that its timeout and host list work."""
    if dialect.driver != "psycopg2":
        return None
    from psycopg2 import extensions

    options.setdefault("connect_timeout", CONNECTS_IN)
    extensions.set_wait_callback(None)
    try:
        return dialect.connect(*arguments, **options)
    finally:
        extensions.set_wait_callback(_wait)


def _wait(connection: Any) -> None:
    global _silent
    from psycopg2 import OperationalError, extensions

    while (state := connection.poll()) != extensions.POLL_OK:
        asked = [connection] if state == extensions.POLL_READ else []
        told = [connection] if state == extensions.POLL_WRITE else []
        seconds = CONNECTS_IN if _silent else _ANSWERS_IN
        if not any(select.select(asked, told, [], seconds)):
            _silent = True
            raise OperationalError(f"the server has not answered for {seconds} seconds")

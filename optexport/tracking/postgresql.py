"""Has PostgreSQL answer in time: its library waits without an end, and deaf to signals, for a server that is silent."""

from __future__ import annotations

import contextlib
import select
from typing import Any

# In seconds: for a connection, and for each part of an answer.
_CONNECTS_IN = 5
_ANSWERS_IN = 60
# CONNECTION_OK of libpq.
_CONNECTED = 0


def answer_in_time() -> None:
    """Has psycopg2, where it is installed, wait for every server of this process as long as that and no longer."""
    with contextlib.suppress(ImportError):
        from psycopg2 import extensions

        extensions.set_wait_callback(_wait)


def _wait(connection: Any) -> None:
    from psycopg2 import OperationalError, extensions

    while (state := connection.poll()) != extensions.POLL_OK:
        is_connected = connection.info.status == _CONNECTED
        waited = _ANSWERS_IN if is_connected else _CONNECTS_IN
        asked = [connection] if state == extensions.POLL_READ else []
        told = [connection] if state == extensions.POLL_WRITE else []
        if not any(select.select(asked, told, [], waited)):
            raise OperationalError(f"the server has not answered for {waited} seconds")

"""A Prefect server that is away: told from one that refuses, and waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from prefect import get_run_logger

RETRY_S = 5.0
AWAY = "the Prefect server cannot be reached ({!r}); trying again"


def is_away(error: BaseException | None) -> bool:
    """Whether an error of a call says that the server does not answer or is broken, rather than that it refuses."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.RequestError)


def patiently(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Do a call to the server; while the server is away, try again."""
    while True:
        try:
            call(*args, **kwargs)
            return
        except httpx.HTTPError as error:
            if not is_away(error):
                raise
            get_run_logger().warning(AWAY.format(error))
            time.sleep(RETRY_S)

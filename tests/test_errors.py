"""Errors that travel between processes by their exit codes."""

from __future__ import annotations

from hetrl.errors import GangTimeoutError, HetrlError, UsageError, error_of
from hetrl.runtime.transport.member import RunAborted


def test_an_error_comes_back_as_the_kind_that_has_its_exit_code() -> None:
    for kind in (UsageError, GangTimeoutError):
        assert type(error_of(kind.exit_code, "why")) is kind
    assert str(error_of(2, "why")) == "why"


def test_a_plain_failure_of_somebody_else_is_not_taken_for_the_end_of_the_run() -> None:
    assert issubclass(RunAborted, HetrlError)
    assert type(error_of(1, "why")) is HetrlError
    assert type(error_of(RunAborted.exit_code, "why")) is HetrlError
    assert type(error_of(99, "why")) is HetrlError

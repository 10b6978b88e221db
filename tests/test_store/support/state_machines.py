"""How state machines of hypothesis are run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.nightly import histories


def run_machine(
    machine: type[RuleBasedStateMachine], examples: int, steps: int, policy: str | None = None
) -> None:
    """Run so many examples (more at night) of at most so many steps; with a policy, of a subclass that has it."""
    if policy is not None:
        machine = type(f"{machine.__name__} of policy {policy}", (machine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories(examples),
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
